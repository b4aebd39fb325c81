"""`fedspeed export RUNS --to TARGET`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

EPILOG = """\
targets: csv and parquet (one table of all rounds), tensorboard, wandb (offline), mlflow
A tracker gets every round and number, the config as hyper-parameters, and method, data and seed as tags. Exporting
again replaces a run. To log while a run is in progress: `fedspeed run --log TARGET`.

examples:
  fedspeed export runs/demo --to csv -o demo.csv
  fedspeed export runs/A runs/B --to tensorboard
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the runs and the target."""
    parser.epilog = EPILOG
    parser.add_argument("runs", nargs="+", metavar="RUNS", help="run directories, or folders of them")
    parser.add_argument("--to", required=True, metavar="TARGET", help="see below")
    place = "file of a table, folder of a tracker; default rounds.csv, tensorboard/, or the tracker's own place"
    parser.add_argument("-o", "--out", metavar="PLACE", help=place)
    parser.add_argument("--overwrite", action="store_true", help="replace a table that exists")


def main(args: argparse.Namespace, console: Console) -> int:
    """Export the runs; print which were left out, and how to open the rest."""
    from ..report.export import export, require_target
    from ..report.run_files import read_runs

    require_target(args.to)
    runs, out = read_runs([Path(run) for run in args.runs])
    look = export(runs, args.to, Path(args.out) if args.out else None, args.overwrite)
    for reason in out:
        console.print(f"left out: {reason}")
    going = [run for run in runs if run.status == "running"]
    rounds = sum(len(run.records) for run in runs)
    so_far = f" ({len(going)} still running: their rounds so far)" if going else ""
    console.print(f"{len(runs)} run{'s' * (len(runs) > 1)}, {rounds} rounds to {args.to}{so_far}: {look}")
    return 0
