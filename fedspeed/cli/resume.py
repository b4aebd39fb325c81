"""`fedspeed resume` and `fedspeed extend`."""

from __future__ import annotations

import argparse
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config.config import Config
from ..config.stopping import RULES
from ..runs.diagnosis import WarnObserver
from ..runs.launch import config_to_resume, resume_config
from ..server.observers import Observers
from . import options, run
from .progress import Live

if TYPE_CHECKING:
    from rich.console import Console

PLACES = ("backend", "workers", "ray_address")
EPILOG = """\
A run continues from its newest checkpoint and ends with the same bits as if it had never stopped. A run without a
checkpoint starts at round 0. A finished run stays as it is, or, with more --rounds, continues as if it had had them
from the start. A run that a rule stopped continues if the rule is changed or dropped: --stop-at none, --patience 0,
--max-time none. Code of your own is executed from the run's copy: without a question if you made the run here, else
with --allow-code.

examples:
  fedspeed resume runs/20260101-120000-fedspeed-digits-s0
  fedspeed resume runs/20260101-120000-fedspeed-digits-s0 --rounds 2000
  fedspeed resume runs/20260101-120000-fedspeed-digits-s0 --stop-at accuracy=0.9
  fedspeed resume runs/20260101-120000-fedspeed-digits-s0 --backend process --workers 4
"""
EXTEND = """\
The run ends with the bits of one that had N rounds from the start, schedules and decay included; if that is not
possible, an error says why. A command that was stopped continues when it is repeated. `fedspeed fork` makes a new run
instead and leaves this one as it is.

examples:
  fedspeed extend runs/NAME --rounds 2000
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options of both commands; `extend` requires --rounds."""
    extends = parser.prog.endswith("extend")
    parser.epilog = EXTEND if extends else EPILOG
    parser.add_argument("run", metavar="RUN", help="the run directory")
    about = "total number of rounds" if extends else "give the run more rounds, N in total"
    parser.add_argument("--rounds", type=int, default=0, required=extends, metavar="N", help=about)
    parser.add_argument("--data-dir", default="", metavar="PATH", help="where the data are now, if they were moved")
    parser.add_argument("--stop-at", metavar="SCORE=X", help="a new score to stop at, accuracy=0.9; or none")
    about = "stop after N evaluated rounds without improvement; 0: never"
    parser.add_argument("--patience", type=int, metavar="N", help=about)
    parser.add_argument("--min-delta", type=float, metavar="X", help="smallest improvement that counts for patience")
    about = "total wall-clock time, with that used so far, 4h; or none"
    parser.add_argument("--max-time", metavar="TIME", help=about)
    group = parser.add_argument_group("machine", "defaults are those of the run's config")
    for field in fields(Config):
        if field.name in PLACES:
            options.add_field(group, field.name, field)
    options.allow_code(parser)
    options.log(parser)
    parser.add_argument("--quiet", action="store_true", help="print nothing but errors")
    parser.add_argument("--json", action="store_true", help="print the result as JSON and nothing else")


def main(args: argparse.Namespace, console: Console) -> int:
    """Continue a run and print its result as `run` does."""
    out = Path(args.run)
    given: dict[str, Any] = {"rounds": args.rounds, "data_dir": args.data_dir}
    given |= {name: getattr(args, name) for name in RULES}  # None: the rule stays
    places = {name: value for name in PLACES if (value := getattr(args, name)) is not None}
    config = config_to_resume(out, args.allow_code, placement=places, **given)
    show = not (args.quiet or args.json)
    if show:
        run.print_done(console, config, out)
    with Live(console, config.rounds, config.method.label, show=show) as live:
        watching = Observers([live, WarnObserver(live.on_warning), *args.log])
        summary = resume_config(out, config, watching, live.on_progress, args.data_dir)
    run.report(args, console, config, summary, out)
    return 0
