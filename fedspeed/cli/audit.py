"""`fedspeed audit FILE.py:CLASS --method NAME`."""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import redirect_stdout
from typing import TYPE_CHECKING

from ..errors import UserError
from ..methods import build
from .methodtext import parse_value, split_pair

if TYPE_CHECKING:
    from rich.console import Console

EPILOG = """\
Your implementation and ours run side by side on small heterogeneous quadratics, a few seconds. The first vector that
differs is named, and our run is repeated with one mistake at a time (a wrong denominator, sign, K or rate, a state that
leaks or is lost, a term without effect, a field used as its inverse ...) to see which gives your numbers. The code in
the file is executed. Exit code: 0 if it conforms, 1 if it differs, 2 for bad input.

examples:
  fedspeed audit --list
  fedspeed audit --template > mine.py
  fedspeed audit mine.py:Mine --method fedavg
  fedspeed audit mine.py:Speed --method fedspeed --set lam=10 --rounds 8
  fedspeed audit strategy.py:MyFlowerStrategy --method fedadam --set eta_g=0.1
  fedspeed audit pair.py:Server,Client --method scaffold --json
"""
SIZES = (
    ("rounds", int, "rounds; default 6"),
    ("clients", int, "N; default 5"),
    ("active", int, "S, clients in each round; default 3"),
    ("local-steps", int, "K; default 4"),
    ("lr", float, "local rate; default 0.1"),
    ("lr-decay", float, "its factor from round to round; default 0.9"),
    ("dim", int, "d, length of a vector; default 6"),
    ("seed", int, "of the problem and the cohorts; default 0"),
    ("tolerance", float, "largest error that is rounding; default 1e-6, which float32 meets"),
)


def configure(parser: argparse.ArgumentParser) -> None:
    """What is audited, as what, on which setting."""
    parser.epilog = EPILOG
    about = "a class of yours, a Flower strategy, a pair Server,Client, or a function that makes one"
    parser.add_argument("adapter", nargs="?", metavar="FILE.py:NAME", help=about)
    parser.add_argument("--method", metavar="NAME", help="what it should be; `fedspeed methods` lists them")
    parser.add_argument(
        "--set", action="append", default=[], metavar="FIELD=VALUE", help="a field of the method such as lam=10"
    )
    for name, kind, about in SIZES:
        parser.add_argument(f"--{name}", type=kind, metavar="X" if kind is float else "N", help=about)
    parser.add_argument("--json", action="store_true", help="print the result as JSON and nothing else")
    parser.add_argument("--list", action="store_true", help="what an adapter needs, and the mistakes that are known")
    parser.add_argument("--template", action="store_true", help="print an adapter to begin with")


def main(args: argparse.Namespace, console: Console) -> int:
    """The verdict."""
    if args.template:
        from ..auditing.template import TEMPLATE

        console.print(TEMPLATE, end="", soft_wrap=True)
        return 0
    if args.list:
        needs(console)
        return 0
    if not args.adapter or not args.method:
        missing = "--method NAME" if args.adapter else "an adapter, path/to/file.py:Class"
        raise UserError(f"audit: expected {missing}; `fedspeed audit --list` says what an adapter needs")
    from ..auditing import audit

    method = build({"name": args.method, **dict(field(text) for text in args.set)})
    names = [name.replace("-", "_") for name, _, _ in SIZES]
    settings = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    with redirect_stdout(sys.stderr):  # what somebody's code prints is not the result
        found = audit(args.adapter, method, **settings)
    if args.json:
        console.print_json(json.dumps(found.to_dict()))
    else:
        console.print(str(found))
    return 0 if found.conforms else 1


def field(text: str) -> tuple[str, object]:
    """`lam=10`, also written `method.lam=10`."""
    name, value = split_pair(text, "--set", "FIELD=VALUE such as lam=10")
    return name.removeprefix("method."), parse_value(value)


def needs(console: Console) -> None:
    """The kinds of adapter with their hooks, then the kinds of mistakes."""
    from ..auditing.adapters import NEEDS
    from ..auditing.result import KINDS

    for kind, hooks in NEEDS.items():
        console.print(f"{kind}:")
        for hook, about in hooks.items():
            console.print(f"  {hook}\n      {about}")
    console.print(
        "\nIts constructor is given what it names: x0, the setting (clients, active, local_steps, lr, lr_decay, ...), "
        "the method's\nfields; a Flower strategy also initial_parameters. `fedspeed audit --template` prints one.\n"
    )
    console.print("known mistakes:")
    for kind, about in KINDS.items():
        console.print(f"  {kind}: {about}")
