"""`fedspeed run`, `resume`, `extend` and `fork`: commands that run the rounds of one run."""

from __future__ import annotations

import argparse
import json
import shlex
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config.config import Config
from ..config.lr_schedule import shown
from ..config.presets import paper_decay
from ..config.stopping import RULES
from ..errors import UserError
from ..runs.config_file import placement, read_config, same_run, trusted
from ..runs.diagnosis import WarnObserver
from ..runs.directory import RunDir
from ..runs.launch import config_to_resume, resume, resume_config, run_config
from ..runs.summary import final_summary
from ..server.observers import Observers
from . import options
from .look import client_lines
from .progress import Live

if TYPE_CHECKING:
    from rich.console import Console

EPILOG = """\
A file of yours (--method, --model, --data file.py:NAME) may import others of its folder: they are copied with it into
the run, and `fedspeed resume` executes the copies.

examples:
  fedspeed run                                             FedSpeed on digits, the paper's defaults
  fedspeed run --method fedavg --data digits --split iid --rounds 50
  fedspeed run --method fedspeed:rho=0.05,lam=100          or --set rho=0.05 --set lam=100
  fedspeed run --lr-schedule cosine                        the rate falls to 0 over all rounds; also step:30,60:0.1, ..
  fedspeed run --warmup lr=10,rho=10                       rate and perturbation rise over ten rounds
  fedspeed run --follow-lr rho                             rho decays as the rate does: rho = eta_l in every round
  fedspeed run --stop-at accuracy=0.9 --max-time 2h        stop early; `resume` can continue
  fedspeed run experiment.toml --seed 1                    a file, with one option changed
  fedspeed run runs/NAME/config.toml --out again           repeat a run: the same bits
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the config file, --method, --resume and an option per config key."""
    about = "a config, which options given here override; or a method, as --method"
    parser.add_argument("file", nargs="?", metavar="FILE.toml", help=about)
    about = "method (`fedspeed methods`), or file.py:Class, with fields; default fedspeed"
    parser.add_argument("--method", metavar="NAME", help=about)
    parser.add_argument("--resume", choices=["auto"], nargs="?", const="auto", help="continue the run in --out, if any")
    options.configure(parser)


def main(args: argparse.Namespace, console: Console) -> int:
    """Run one config, or continue the run in the folder."""
    tables = options.tables(args)
    config = Config.from_dict(tables)
    out = options.output_folder(args, f"{config.method.label}-{config.data.label}-s{config.seed}")
    if args.resume == "auto" and args.overwrite:
        raise UserError("--resume and --overwrite: expected one of them, got both; leave one out")
    continues = args.resume == "auto" and RunDir(out).config_file.exists()
    if continues and not (trusted(RunDir(out).config(), config) and same_run(read_config(out, True), config)):
        raise UserError(
            f"{out} holds a run of another config, or of other code; choose another --out, or continue it as it is: "
            f"`fedspeed resume {out}`"
        )
    show = not (args.quiet or args.json)
    if show and (line := options.preset_line(tables)):
        console.print(line)
    if continues and show:
        print_done(console, config, out)
    with Live(console, config.rounds, config.method.label, show=show) as live:
        if continues:
            how: dict[str, Any] = {"rounds": config.rounds, "data_dir": config.data_dir, "max_time": config.max_time}
            summary = resume(out, allow_code=True, placement=placement(config), **how, **_watch(live, args.log))
        else:
            summary = run_config(config, out, overwrite=args.overwrite, **_watch(live, args.log))
    report(args, console, config, summary, out)
    return 0


def _watch(live: Live, log: list[str]) -> dict[str, Any]:
    """Return the observers of a run, and the function that is called with its progress."""
    return {"observers": [live, WarnObserver(live.on_warning), *log], "progress": live.on_progress}


def print_done(console: Console, config: Config, out: Path) -> None:
    """Print a line if a run that is to continue is over."""
    done = final_summary(RunDir(out), config)
    if done is not None and done["status"] == "finished":
        console.print(f"{out} is finished already; nothing to do (--rounds N gives it more)")
    elif done is not None:
        console.print(f"{out} is stopped already; nothing to do while its rule stays")


def report(args: argparse.Namespace, console: Console, config: Config, summary: dict[str, Any], out: Path) -> None:
    """Print the result of a run and the next command."""
    if args.json:
        console.print_json(json.dumps({"out": str(out), **summary}))
    elif not args.quiet:
        _report(console, config, summary)
        if str(summary["status"]).startswith("stopped: "):
            flag = {"patience": "--patience 0"}.get(by := summary["stopped"]["by"], f"--{by.replace('_', '-')} none")
            how = shlex.join(["fedspeed", "resume", str(out), *flag.split()])
            console.print(f"{summary['status']}, of {config.rounds}; `{how}` continues without the rule")
        console.print(f"run directory: {out}")
        if summary.get("illnesses"):
            console.print(f"next: {shlex.join(['fedspeed', 'explain', str(out)])}   (what is wrong, and what to try)")
        elif hint := _next(config):
            console.print(f"next: {hint}   (is the difference real?)")


def _next(config: Config) -> str:
    """Return the command that compares the run's method with another in the same setting; "" if there is none."""
    long = shown(config.lr_schedule) != config.lr_schedule  # as a table of numbers that fills the screen
    method = options.as_text(config.method) if not (config.until or long) else None
    rival = "fedspeed" if config.method.name == "fedavg" else "fedavg"
    given = ["fedspeed", "compare", rival, method or "", *options.as_given(config), "--seeds", "3"]
    return shlex.join(given) if method else ""


def _report(console: Console, config: Config, summary: dict[str, Any]) -> None:
    if summary["last_accuracy"] is not None:
        chosen = "validation" if summary.get("chosen_on") == "validation" else "the test set"
        console.print(
            f"{config.method.label}: accuracy last {summary['last_accuracy']:.2%}, "
            f"best {summary['best_accuracy']:.2%} (chosen on {chosen}), "
            f"mean of last 5 {summary['mean_last5_accuracy']:.2%}"
        )
    for line in client_lines(summary):
        console.print(line)
    waited, spent = summary.get("checkpoint_seconds", 0.0), summary["seconds"] + summary["eval_seconds"]
    waits = f", + {waited:.1f} s waiting for checkpoints" if waited > 0.05 * (spent + waited) else ""
    virtual = f", {summary['virtual_seconds']:.1f} virtual s ({config.network})" if "virtual_seconds" in summary else ""
    decay = shown(config.lr_schedule) or f"decay {config.lr_decay or paper_decay(config.method):g} per round"
    megabytes = (summary["bytes_down"] + summary["bytes_up"]) / 1e6
    console.print(
        f"{summary['rounds']} rounds in {summary['seconds']:.1f} s "
        f"(+ {summary['eval_seconds']:.1f} s of evaluation{waits}), "
        f"{megabytes:.1f} MB sent, {summary['grad_evals']:.0f} gradients{virtual}; "
        f"lr {config.lr:g}, {decay}"
        f"{f', warm-up {config.warmup}' if config.warmup else ''}"
        f"{f', {config.follow_lr} as lr' if config.follow_lr else ''}; "
        f"data {summary['data_fingerprint']}, split {summary['split_fingerprint']}"
    )
    for target, cost in summary["targets"].items():
        reached = f"in round {cost['round']}, after {cost['bytes'] / 1e6:.1f} MB" if cost else "not reached"
        reached += f" and {cost['virtual_seconds']:.1f} virtual s" if cost and "virtual_seconds" in cost else ""
        console.print(f"{100 * float(target):g}% accuracy: {reached}")


PLACES = ("backend", "workers", "ray_address")
EPILOG_RESUME = """\
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
EPILOG_EXTEND = """\
The run ends with the bits of one that had N rounds from the start, schedules and decay included; if that is not
possible, an error says why. A command that was stopped continues when it is repeated. `fedspeed fork` makes a new run
instead and leaves this one as it is.

examples:
  fedspeed extend runs/NAME --rounds 2000
"""


def configure_resume(parser: argparse.ArgumentParser) -> None:
    """Add the options of both commands; `extend` requires --rounds."""
    extends = parser.prog.endswith("extend")
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
    options.output(parser)


def main_resume(args: argparse.Namespace, console: Console) -> int:
    """Continue a run and print its result as `run` does."""
    out = Path(args.run)
    given: dict[str, Any] = {"rounds": args.rounds, "data_dir": args.data_dir}
    given |= {name: getattr(args, name) for name in RULES}  # None: the rule stays
    places = {name: value for name in PLACES if (value := getattr(args, name)) is not None}
    config = config_to_resume(out, args.allow_code, placement=places, **given)
    show = not (args.quiet or args.json)
    if show:
        print_done(console, config, out)
    with Live(console, config.rounds, config.method.label, show=show) as live:
        watching = Observers([live, WarnObserver(live.on_warning), *args.log])
        summary = resume_config(out, config, watching, live.on_progress, args.data_dir)
    report(args, console, config, summary, out)
    return 0


EPILOG_FORK = """\
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


def configure_fork(parser: argparse.ArgumentParser) -> None:
    """Add the run, the shared rounds and the changes."""
    parser.add_argument("run", metavar="RUN", help="the run directory; it is only read")
    parser.add_argument("--at", type=int, required=True, metavar="N", help="number of shared rounds")
    about = "a config key, or a field of the method: lr=0.05, rounds=500, method.rho=0.2; may be repeated"
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="sets", help=about)
    parser.add_argument("--out", metavar="DIR", help="where to write (default: a new folder under runs/)")
    options.allow_code(parser)
    options.output(parser)


def main_fork(args: argparse.Namespace, console: Console) -> int:
    """Fork a run and print the result as `run` does."""
    from ..runs.fork import fork, forked, require

    given = options.split_pairs(args.sets, "--set", "KEY=VALUE such as lr=0.05 or method.rho=0.2")
    changes = {name.replace("-", "_"): value for name, value in given}
    old = read_config(Path(args.run), args.allow_code)
    out = options.output_folder(args, f"{old.method.label}-{old.data.label}-s{old.seed}-fork{args.at}")
    require(Path(args.run), args.at, out)
    new = forked(old, args.at, changes)
    show = not (args.quiet or args.json)
    if show:
        _print_start(console, Path(args.run), args.at, old, new)
    with Live(console, new.rounds, new.method.label, show=show) as live:
        summary = fork(args.run, args.at, out, changes, allow_code=args.allow_code, **_watch(live, args.log))
    report(args, console, new, summary, out)
    if show:
        console.print(f"next: {shlex.join(['fedspeed', 'compare', args.run, str(out)])}   (what did it change?)")
    return 0


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
