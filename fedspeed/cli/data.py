def configure(parser):
    pass


def main(args, console):
    return 0
