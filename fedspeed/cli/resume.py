"""`fedspeed resume`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..runs.diagnosis import WarnObserver
from ..runs.launch import config_to_resume, resume_config
from ..server.observers import Observers
from . import options, run
from .progress import Live

if TYPE_CHECKING:
    from rich.console import Console

EPILOG = """\
A run directory holds checkpoints; whatever stopped the run, it continues from the newest one and ends with the same
bits as if nothing had happened. A run without a checkpoint starts at round 0. A finished one is left as it is, or, with
more --rounds, continues as if it had had them from the start. One that a rule has stopped goes on if that rule is
changed or dropped: --stop-at none, --patience 0, --max-time none.

examples:
  fedspeed resume runs/20260101-120000-fedspeed-digits-s0
  fedspeed resume runs/20260101-120000-fedspeed-digits-s0 --rounds 2000
  fedspeed resume runs/20260101-120000-fedspeed-digits-s0 --stop-at accuracy=0.9
  fedspeed resume runs/20260101-120000-fedspeed-digits-s0 --backend process --workers 4
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Options of `resume`."""
    parser.epilog = EPILOG
    parser.add_argument("run", metavar="RUN", help="the run directory")
    parser.add_argument("--rounds", type=int, default=0, metavar="N", help="give the run more rounds: N in all")
    shared(parser)


def shared(parser: argparse.ArgumentParser) -> None:
    """Options of `resume` and `extend`."""
    parser.add_argument("--data-dir", default="", metavar="PATH", help="where the data are now, if they were moved")
    options.rules(parser)
    options.places(parser)
    options.allow_code(parser)
    options.log(parser)
    parser.add_argument("--quiet", action="store_true", help="print nothing but errors")
    parser.add_argument("--json", action="store_true", help="print the result as JSON and nothing else")


def main(args: argparse.Namespace, console: Console) -> int:
    """Continue a run."""
    return resume_run(Path(args.run), args, console)


def resume_run(out: Path, args: argparse.Namespace, console: Console) -> int:
    """Resume a run directory and report as `run` does."""
    given: dict[str, Any] = {"rounds": args.rounds, "data_dir": args.data_dir, **options.given_rules(args)}
    config = config_to_resume(out, args.allow_code, placement=options.given_places(args), **given)
    show = not (args.quiet or args.json)
    if show:
        run.tell_done(console, config, out)
    with Live(console, config.rounds, config.method.label, show=show) as live:
        watching = Observers([live, WarnObserver(live.on_ill), *args.log])
        summary = resume_config(out, config, watching, live.on_progress, args.data_dir)
    run.report(args, console, config, summary, out)
    return 0
