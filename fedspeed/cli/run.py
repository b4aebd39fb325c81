"""`fedspeed run`."""

from __future__ import annotations

import argparse
import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config.config import Config
from ..config.lr_schedule import shown
from ..config.presets import paper_decay
from ..errors import UserError
from ..runs.config_file import placement, read_config, same_run, trusted
from ..runs.diagnosis import WarnObserver
from ..runs.directory import RunDir
from ..runs.launch import resume, run_config
from ..runs.summary import final_summary
from . import method_syntax, options
from .progress import Live
from .show import client_lines

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
    parser.epilog = EPILOG
    about = "a config, which options given here override; or a method, as --method"
    parser.add_argument("file", nargs="?", metavar="FILE.toml", help=about)
    parser.add_argument(
        "--method", metavar="NAME", help="method (`fedspeed methods`), or file.py:Class, with fields; default fedspeed"
    )
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
    own = continues and trusted(RunDir(out).config(), config)
    if continues and not (own and same_run(read_config(out, True), config)):
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
        watch: dict[str, Any] = {
            "observers": [live, WarnObserver(live.on_warning), *args.log],
            "progress": live.on_progress,
        }
        if continues:
            given: dict[str, Any] = {"data_dir": config.data_dir, "max_time": config.max_time}
            given |= {"rounds": config.rounds, "placement": placement(config)}
            summary = resume(out, allow_code=True, **given, **watch)
        else:
            summary = run_config(config, out, overwrite=args.overwrite, **watch)
    report(args, console, config, summary, out)
    return 0


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
        hint = _next(config)
        if summary.get("illnesses"):
            console.print(f"next: {shlex.join(['fedspeed', 'explain', str(out)])}   (what is wrong, and what to try)")
        elif hint:
            console.print(f"next: {hint}   (is the difference real?)")


def _next(config: Config) -> str:
    """Return the command that compares the run's method with another in the same setting; "" if there is none."""
    long = shown(config.lr_schedule) != config.lr_schedule  # as a table of numbers that fills the screen
    method = method_syntax.as_text(config.method) if not (config.until or long) else None
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
