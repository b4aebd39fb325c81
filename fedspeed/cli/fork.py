"""`fedspeed fork RUN --at N --set lr=0.05`."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config.config import Config
from ..config.lr_schedule import shown
from ..config.presets import paper_decay
from ..experiments.grid import parse_value
from ..runs.config_file import read_config
from ..runs.diagnosis import WarnObserver
from ..runs.directory import RunDir
from . import method_syntax, options, run
from .progress import Live

if TYPE_CHECKING:
    from rich.console import Console

EPILOG = """\
The new run has the first N rounds of RUN, bit for bit, and continues with the changes of --set; without --set it gets
RUN's own bits. It starts from RUN's last checkpoint of at most N rounds (the last two are kept), else from round 0, and
repeats the rounds up to N as RUN did.

Changes apply from round N + 1 on. The rate of round t + 1 is lr * lr_decay^t for every t, so --set lr=0.05 is the rate
that round 1 would have had; a schedule (lr_schedule) and a warm-up count from round 1. Settings that the shared rounds
depend on cannot be changed: model, data, split, clients, seed, cohorts, the method (its numbers can).

examples:
  fedspeed fork runs/NAME --at 300 --set lr=0.05
  fedspeed fork runs/NAME --at 300 --set method.rho=0.2 --set rounds=500 --out runs/rho02
  fedspeed diff runs/NAME runs/rho02
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the run, the shared rounds and the changes."""
    parser.epilog = EPILOG
    parser.add_argument("run", metavar="RUN", help="the run directory; it is only read")
    parser.add_argument("--at", type=int, required=True, metavar="N", help="number of shared rounds")
    about = "a config key, or a field of the method: lr=0.05, rounds=500, method.rho=0.2; may be repeated"
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="sets", help=about)
    parser.add_argument("--out", metavar="DIR", help="where to write (default: a new folder under runs/)")
    options.allow_code(parser)
    options.log(parser)
    parser.add_argument("--quiet", action="store_true", help="print nothing but errors")
    parser.add_argument("--json", action="store_true", help="print the result as JSON and nothing else")


def main(args: argparse.Namespace, console: Console) -> int:
    """Fork a run and print the result as `run` does."""
    from ..runs.fork import fork, forked, require

    changes = dict(_change(text) for text in args.sets)
    old = read_config(Path(args.run), args.allow_code)
    out = options.output_folder(args, f"{old.method.label}-{old.data.label}-s{old.seed}-fork{args.at}")
    require(Path(args.run), args.at, out)
    new = forked(old, args.at, changes)
    show = not (args.quiet or args.json)
    if show:
        _print_start(console, Path(args.run), args.at, old, new)
    with Live(console, new.rounds, new.method.label, show=show) as live:
        watch: dict[str, Any] = {
            "observers": [live, WarnObserver(live.on_warning), *args.log],
            "progress": live.on_progress,
        }
        summary = fork(args.run, args.at, out, changes, allow_code=args.allow_code, **watch)
    run.report(args, console, new, summary, out)
    if show:
        console.print(f"next: {shlex.join(['fedspeed', 'compare', args.run, str(out)])}   (what did it change?)")
    return 0


def _change(text: str) -> tuple[str, Any]:
    """Parse `method.rho=0.05` into ("method.rho", 0.05); values are TOML, bare words are strings."""
    name, value = method_syntax.split_pair(text, "--set", "KEY=VALUE such as lr=0.05 or method.rho=0.2")
    return name.replace("-", "_"), parse_value(value)


def _print_start(console: Console, path: Path, at: int, old: Config, new: Config) -> None:
    """Print where the fork starts, and at which rate it continues."""
    begun = next((int(manifest.stem) for manifest in RunDir(path).manifests() if int(manifest.stem) <= at), 0)
    if begun < at:
        where = f"checkpoint of round {begun}" if begun else "start"
        console.print(f"no checkpoint of round {at} is kept: rounds {begun + 1} to {at} are run again from the {where}")
    then, now = (config.rate(at, paper_decay(config.method)) for config in (old, new))
    how = f"lr_schedule {shown(new.lr_schedule)}" if new.lr_schedule else f"lr * decay^{at}"
    if then != now:
        console.print(f"the rate of round {at + 1} is {now:.4g}, it was {then:.4g} ({how}, warm-up included)")
