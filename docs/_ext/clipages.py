"""A page per command, from its parser: every option, every example."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import marks

from fedspeed.cli import COMMANDS, Parser, build_parser


def pages() -> Iterator[tuple[str, str]]:
    parser = build_parser()
    yield "cli/index.md", index(parser)
    for name, command in parser.inner().items():
        yield f"cli/{name}.md", page(f"fedspeed {name}", command)


def index(parser: Parser) -> str:
    """Return all commands, what they have in common, exit codes."""
    lines = [(f"[`fedspeed {name}`]({name}.md)", marks.cell(about)) for name, about in COMMANDS.items()]
    return "\n".join([
        "# Command line\n",
        f"{marks.plain(parser.description or '')} `fedspeed COMMAND --help` prints what these pages have.\n",
        marks.table(("command", "what it does"), lines),
        "Exit codes: 0 done, 1 diverged, 2 bad input, 3 a defect of fedspeed, 130 Ctrl-C, 143 SIGTERM.\n",
        options("fedspeed", parser),
        marks.block(examples(parser), "sh"),
        marks.toctree(COMMANDS, hidden=True),
    ])  # fmt: skip


def page(prog: str, parser: Parser, level: int = 1) -> str:
    """Return a command, or an action of one."""
    usage = parser.format_usage().removeprefix("usage: ")
    parts = [f"{'#' * level} {prog}\n", f"{marks.plain(parser.description or '')}\n", marks.block(usage)]
    parts.append(options(prog, parser))
    if parser.epilog:
        parts.append(marks.block(examples(parser), "text"))
    for name, inner in parser.inner().items():
        parts.append(page(f"{prog} {name}", inner, level + 1))
    return "\n".join(parts)


def options(prog: str, parser: Parser) -> str:
    """Return every argument and option, by its groups."""
    parts = [f"```{{program}} {prog}\n```\n"]
    for group in parser._action_groups:
        found = [
            one
            for one in group._group_actions
            if not isinstance(one, argparse._SubParsersAction | argparse._HelpAction)
        ]
        if found:
            parts.append(f"**{(group.title or '').capitalize()}**\n")
        parts += [option(parser, one) for one in found]
    return "\n".join(parts)


def option(parser: Parser, action: argparse.Action) -> str:
    """Return one option: its spellings, its value, its help."""
    look = parser._get_formatter()
    takes = "" if action.nargs == 0 else look._format_args(action, look._get_default_metavar_for_optional(action))
    if action.option_strings:
        spelled = ", ".join(f"{flag} {takes}".strip() for flag in action.option_strings)
    else:
        spelled = look._format_args(action, look._get_default_metavar_for_positional(action))
    said = marks.plain(look._expand_help(action)) if action.help else ""
    return f"````{{option}} {spelled}\n\n{said}\n````\n"


def examples(parser: Parser) -> str:
    return parser.epilog or ""
