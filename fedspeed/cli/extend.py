"""`fedspeed extend RUN --rounds N`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from . import resume

if TYPE_CHECKING:
    from rich.console import Console

EPILOG = """\
The run ends with the bits of one that had N rounds from the start, schedules and decay included, or says why it cannot.
Stopped on the way, the same command goes on. `fedspeed fork` keeps the run as it is and makes another.

examples:
  fedspeed extend runs/NAME --rounds 2000
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Which run, and how far."""
    parser.epilog = EPILOG
    parser.add_argument("run", metavar="RUN", help="the run directory")
    parser.add_argument("--rounds", type=int, required=True, metavar="N", help="how many it is to have in all")
    resume.shared(parser)


def main(args: argparse.Namespace, console: Console) -> int:
    """Continue a run beyond its end."""
    return resume.resume_run(Path(args.run), args, console)
