"""`fedspeed resume`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..run import resume
from ..rundir import finished, read_config
from . import options, run
from .progress import Live

if TYPE_CHECKING:
    from rich.console import Console

EPILOG = """\
A run directory holds checkpoints; whatever stopped the run, it goes on from the newest one and ends with the same bits
as if nothing had happened. A run without a checkpoint starts at round 0; a finished one is left as it is.

examples:
  fedspeed resume runs/20260101-120000-fedspeed-digits-s0
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Options of `resume`."""
    parser.epilog = EPILOG
    parser.add_argument("run", metavar="RUN", help="the run directory")
    options.allow_code(parser)
    parser.add_argument("--quiet", action="store_true", help="print nothing but errors")
    parser.add_argument("--json", action="store_true", help="print the result as JSON and nothing else")


def main(args: argparse.Namespace, console: Console) -> int:
    """Go on with a run."""
    return resume_run(Path(args.run), args, console)


def resume_run(out: Path, args: argparse.Namespace, console: Console) -> int:
    """Resume a run directory and report as `run` does."""
    config = read_config(out, args.allow_code)
    show = not (args.quiet or args.json)
    if finished(out) is not None and show:
        console.print(f"{out} is finished already; nothing to do")
    with Live(console, config.rounds, config.method.name, show=show) as live:
        watch: dict[str, Any] = {"on_round": live.on_round, "progress": live.on_progress, "on_client": live.on_client}
        summary = resume(out, allow_code=args.allow_code, **watch)
    run.report(args, console, config, summary, out)
    return 0
