"""`fedspeed verify RUN`."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from ..utils.registry import BACKENDS
from . import options

if TYPE_CHECKING:
    from rich.console import Console

EPILOG = """\
Recomputes the digests of all checkpoint files, the server's running sums from the clients' states, and the last round
from the checkpoint before it (--all: every round), and compares bits. The run directory is only read.
Exit code: 0 if all holds, 1 if something does not, 2 for bad input.

examples:
  fedspeed verify runs/NAME
  fedspeed verify runs/NAME --all --backend serial
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the run and how much of it is checked."""
    parser.epilog = EPILOG
    parser.add_argument("run", metavar="RUN", help="the run directory")
    parser.add_argument("--all", action="store_true", help="repeat every round, from round 0")
    parser.add_argument("--backend", metavar="|".join(BACKENDS), default="", help="back end; default the run's")
    options.allow_code(parser)
    parser.add_argument("--json", action="store_true", help="print the result as JSON and nothing else")


def main(args: argparse.Namespace, console: Console) -> int:
    """Print what holds, what does not, and on which machine it was checked."""
    from ..runs.verify import verify

    with console.status(f"verifying {args.run}"):
        found = verify(Path(args.run), every_round=args.all, backend=args.backend, allow_code=args.allow_code)
    if args.json:
        console.print_json(json.dumps(asdict(found)))
        return 1 if found.broken else 0
    for text in found.held:
        console.print(f"holds:  {text}")
    for text in found.broken:
        console.print(f"BROKEN: {text}")
    console.print("checked on: " + ", ".join(f"{key} {value}" for key, value in found.checked_on.items()))
    if found.differs is None:
        console.print("the run did not say where it was made (it has no summary.json)")
    for key, (then, now) in (found.differs or {}).items():
        console.print(f"not the run's own {key}: {then} then, {now} now; bits are promised for equal ones only")
    console.print(f"{args.run}: " + (f"{len(found.broken)} BROKEN" if found.broken else "all holds"))
    return 1 if found.broken else 0
