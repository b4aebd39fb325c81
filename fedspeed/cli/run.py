"""`fedspeed run`."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

from ..config import Config
from ..run import run_config
from . import options
from .progress import Live

if TYPE_CHECKING:
    from rich.console import Console

EPILOG = """\
examples:
  fedspeed run                                             FedSpeed on digits, the paper's defaults
  fedspeed run --method fedavg --data digits --split iid --rounds 50
  fedspeed run --method fedspeed --set method.rho=0.05 --set method.lam=100
  fedspeed run experiment.toml --seed 1                    a file, with one option changed
  fedspeed run runs/NAME/config.toml --out again           repeat a run: the same bits
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Options of `run`."""
    parser.epilog = EPILOG
    parser.add_argument("file", nargs="?", metavar="FILE.toml", help="a config; options given here override it")
    parser.add_argument("--method", metavar="NAME", help="method (`fedspeed methods`); default fedspeed")
    options.configure(parser)


def main(args: argparse.Namespace, console: Console) -> int:
    """Run one config."""
    config = Config.from_dict(options.tables(args))
    out = options.output_folder(args, f"{config.method.name}-{config.data.name}-s{config.seed}")
    with Live(console, config.rounds, config.method.name, show=not (args.quiet or args.json)) as live:
        summary = run_config(config, out, overwrite=args.overwrite, on_round=live.on_round, progress=live.on_progress)
    if args.json:
        console.print_json(json.dumps({"out": str(out), **summary}))
    elif not args.quiet:
        _report(console, config, summary)
        console.print(f"run directory: {out}\nnext: fedspeed compare fedavg {config.method.name} --seeds 3 "
                      f"--data {config.data.name}   (is the difference real?)")  # fmt: skip
    return 0


def _report(console: Console, config: Config, summary: dict[str, object]) -> None:
    if summary["last_accuracy"] is not None:
        console.print(
            f"{config.method.name}: accuracy last {summary['last_accuracy']:.2%}, best {summary['best_accuracy']:.2%}, "
            f"mean of last 5 {summary['mean_last5_accuracy']:.2%}"
        )
    megabytes = (summary["bytes_down"] + summary["bytes_up"]) / 1e6  # type: ignore[operator]
    console.print(
        f"{summary['rounds']} rounds in {summary['seconds']:.1f} s (+ {summary['eval_seconds']:.1f} s of evaluation), "
        f"{megabytes:.1f} MB sent, {summary['grad_evals']:.0f} gradients; "
        f"data {summary['data_fingerprint']}, split {summary['split_fingerprint']}"
    )
