"""Shared parts of commands that make several runs: seeds, runs side by side, and how to continue."""

from __future__ import annotations

import argparse
import shlex
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import UserError
from ..experiments.batch import RunTask, make_runs, unfinished
from ..report import tables
from ..server.observers import Observers
from ..utils.environment import cores
from .output import width
from .progress import ManyRunsProgress

if TYPE_CHECKING:
    from rich.console import Console


def configure(parser: argparse.ArgumentParser) -> None:
    """Add --seeds and --jobs."""
    parser.add_argument("--seeds", metavar="N|A,B,..", help="number of seeds (0..N-1), or a list; default 3")
    about = "number of runs side by side; 0: one per core; default 1"
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help=about)


def check(args: argparse.Namespace) -> None:
    """Raise for options that no run could be made with."""
    Observers(args.log)  # raises for an unknown observer
    if args.jobs < 0:
        raise UserError(f"--jobs: expected a whole number >= 0, got {args.jobs}")


def make(args: argparse.Namespace, tasks: Sequence[RunTask], out: Path, console: Console, show: bool) -> dict[str, str]:
    """Make the runs that are not done, with a progress display; return label -> reason of failures."""
    left = unfinished(tasks)
    if len(left) < len(tasks) and show:
        console.print(f"{len(tasks) - len(left)} of {len(tasks)} runs are done already and kept")
    try:
        with ManyRunsProgress(console, args.command, left, show) as shown:
            return make_runs(left, args.jobs or cores(), shown, args.traceback)
    except KeyboardInterrupt as stopped:
        raise type(stopped)(f"`{_again(args, out)}` continues it") from None


def _again(args: argparse.Namespace, out: Path) -> str:
    """Return the command that continues this one: with its output folder, and without --overwrite."""
    given = [text for text in args.argv if text != "--overwrite"]
    return "fedspeed " + shlex.join(given if args.out else [*given, "--out", str(out)])


def print_table(
    console: Console,
    table: tuple[tuple[str, ...], tables.Lines],
    keep: Sequence[int],
    notes: Sequence[str],
    rest: Sequence[str],
    files: str,
    out: Path,
) -> None:
    """Print a table as wide as the terminal, the names of columns that do not fit, notes, the rest, and the files."""
    wide = width(console)
    text, dropped = tables.fit(*table, keep, wide)
    missing = [f"no room for {', '.join(dropped)}: see {out / 'table.md'}"] if dropped else []
    below = [textwrap.fill(note, wide) for note in (*missing, *notes)]
    parts = ["", text, "", *below, *rest, "", textwrap.fill(f"files: {files}", wide), f"   in: {out}"]
    console.print("\n".join(parts), no_wrap=True, overflow="ignore", crop=False)


def parse_seeds(text: str) -> list[int]:
    """Parse `3` into 0, 1, 2; `5,7` into 5, 7; `7,` into 7 alone."""
    try:
        numbers = [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < (0 if "," in text else 1):
        raise UserError(f"--seeds: expected how many, such as 3, or which, such as 5,7; got {text!r}")
    return list(range(numbers[0])) if "," not in text else numbers
