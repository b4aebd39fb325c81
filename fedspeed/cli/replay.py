"""`fedspeed replay RUN --round T --client I`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from ..utils.registry import BACKENDS
from . import options

if TYPE_CHECKING:
    from rich.console import Console

    from ..runs.replay import Replay

EPILOG = """\
Repeats the rounds since the nearest checkpoint (or from round 0), then this client's turn with the run's own
arithmetic, and compares its upload with the digest that the run stored. The run directory is only read. T may be at
most one more than the rounds that RUN has: the round in which it diverged, for example.
Exit code: 0 if the upload is the same or has no stored digest, 1 if it differs or the client failed, 2 for bad input.

examples:
  fedspeed replay runs/NAME --round 417 --client 12
  fedspeed replay runs/NAME --round 417 --client 12 --json
"""

SHOWN = 12
"""Number of steps that are printed at each end of a long turn."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the turn, the back end and the format."""
    parser.epilog = EPILOG
    parser.add_argument("run", metavar="RUN", help="the run directory")
    parser.add_argument("--round", type=int, required=True, metavar="T", help="the round; 1 is the first")
    parser.add_argument("--client", type=int, required=True, metavar="I", help="a client of the round's cohort")
    about = "back end of the rounds before it; default the run's"
    parser.add_argument("--backend", metavar="|".join(BACKENDS), default="", help=about)
    options.allow_code(parser)
    parser.add_argument("--json", action="store_true", help="print the result as JSON and nothing else")


def main(args: argparse.Namespace, console: Console) -> int:
    """Print the client's steps, and whether its upload is the one that the run counted."""
    from ..runs.replay import replay
    from .progress import Live

    with Live(console, args.round, "replay", show=not args.json) as live:
        found = replay(
            Path(args.run),
            args.round,
            args.client,
            backend=args.backend,
            allow_code=args.allow_code,
            progress=live.on_progress,
        )
    if args.json:
        console.print_json(json.dumps(found.to_dict()))
    else:
        _print(console, found)
    return int(bool(found.error) or found.matches is False or bool(found.unlike))


def _print(console: Console, found: Replay) -> None:
    from rich.table import Table

    beside = f", in a block with {', '.join(map(str, found.beside))}" if found.beside else ""
    samples = "" if found.labels is None else f"; samples of each class: {' '.join(map(str, found.labels))}"
    began = f"the checkpoint of round {found.began}" if found.began else "round 0"
    console.print(f"{found.run}: round {found.round}, client {found.client}, from {began}{beside}")
    console.print(f"{len(found.steps)} steps at rate {found.lr:.4g}, engine {found.engine}{samples}")
    table = Table("step", "loss", "||gradient||", "||direction||", "samples", box=None, pad_edge=False)
    for k, step in enumerate(found.steps, 1):
        if SHOWN < k <= len(found.steps) - SHOWN:
            if k == SHOWN + 1:
                table.add_row("...")
            continue
        some = " ".join(map(str, step.samples[:6])) + (" ..." if len(step.samples) > 6 else "")
        loss = "-" if step.loss is None else f"{step.loss:.4g}"
        table.add_row(str(k), loss, " ".join(f"{g:.4g}" for g in step.gradients), f"{step.direction:.4g}", some)
    console.print(table)
    for text in found.unlike[:3]:
        console.print(f"on the way: {text}")
    console.print(_verdict(found))


def _verdict(found: Replay) -> str:
    if found.error:
        return found.error
    if found.matches is None:
        return f"upload {found.digest}: nothing to compare with, the run noted no digest of it"
    same = "as the run noted it: the same bits" if found.matches else f"the run noted {found.recorded}: NOT the same"
    return f"upload {found.digest}, {same}"
