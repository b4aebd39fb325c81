"""`fedspeed report RUNS` and `fedspeed export RUNS`: runs as a page, tables, figures, or in a tracker."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from ..report.comparison import Look

FORMATS = ("html", "md", "latex", "csv", "png", "svg", "pdf")
EPILOG = """\
One file that needs no network: ranking, differences with intervals and p-values, costs, splits. Runs that are running,
interrupted or damaged are shown with their rounds so far and left out of the tables. For papers: the same numbers as
md, latex or csv; the curves (and the differences in a second file) as png, svg or pdf.

examples:
  fedspeed report runs/first -o report.html
  fedspeed report runs/a runs/b --baseline fedavg --targets 0.8,0.9
  fedspeed report runs/first -o table.tex --columns last5,best,gradients,mb --labels fedspeed=Ours
  fedspeed report runs/fair -o fair.tex --columns last5,client-mean,worst10,spread      of runs with --client-metrics
  fedspeed report runs/first -o figure.pdf --size column --title none
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the runs, the output file and the baseline."""
    from .options import accuracies

    parser.add_argument("runs", nargs="+", metavar="RUNS", help="run directories, or folders of them")
    parser.add_argument("-o", "--out", default="", metavar="FILE", help="the file to write; default report.html")
    about = "default from the file's name, else html"
    parser.add_argument("--format", default="", choices=FORMATS, metavar="|".join(FORMATS), help=about)
    parser.add_argument("--baseline", metavar="METHOD", default="", help="method to compare with; default the first")
    about = "accuracies to reach; default those of the runs, else what the baseline ends with, rounded down"
    parser.add_argument("--targets", metavar="A,B", type=accuracies, help=about)
    add_look(parser)
    parser.add_argument("--quiet", action="store_true", help="print nothing but errors")


def add_look(parser: argparse.ArgumentParser) -> None:
    """Add the options for tables and figures in a paper."""
    group = parser.add_argument_group("for a paper")
    about = "columns of the table, such as last5,best,gradients; all: every one; an unknown name lists them"
    group.add_argument("--columns", metavar="A,B", action="append", default=[], help=about)
    about = "names to show, such as fedspeed=Ours; LaTeX, figures and page write the others as their papers do"
    group.add_argument("--labels", metavar="OLD=NEW,..", action="append", default=[], help=about)
    group.add_argument("--title", metavar="none|TEXT", help="title of the figure and the page; none leaves it out")
    about = "size of the figure: column (3.25 inches wide), page (6.75), or inches; type is then 8 points"
    group.add_argument("--size", metavar="column|page|WIDTHxHEIGHT", default="", help=about)


def look_of(args: argparse.Namespace) -> Look:
    """Return what the tables and figures show."""
    from ..report.comparison import Look

    return Look(",".join(args.columns), ",".join(args.labels), args.title, args.size)


def main(args: argparse.Namespace, console: Console) -> int:
    """Read and compare runs; write one file, or two figures."""
    from ..report.write import write_report

    runs = [Path(text) for text in args.runs]
    written, notes = write_report(runs, args.out, args.format, args.baseline, args.targets or (), look_of(args))
    if not args.quiet:
        for text in notes:  # the page has them too, tables and figures do not
            console.print(text, style="yellow")
        for path in written:
            console.print(f"report: {path}")
    return 0


EPILOG_EXPORT = """\
targets: csv and parquet (one table of all rounds), tensorboard, wandb (offline), mlflow
A tracker gets every round and number, the config as hyper-parameters, and method, data and seed as tags. Exporting
again replaces a run. To log while a run is in progress: `fedspeed run --log TARGET`.

examples:
  fedspeed export runs/demo --to csv -o demo.csv
  fedspeed export runs/A runs/B --to tensorboard
"""


def configure_export(parser: argparse.ArgumentParser) -> None:
    """Add the runs and the target."""
    parser.add_argument("runs", nargs="+", metavar="RUNS", help="run directories, or folders of them")
    parser.add_argument("--to", required=True, metavar="TARGET", help="see below")
    place = "file of a table, folder of a tracker; default rounds.csv, tensorboard/, or the tracker's own place"
    parser.add_argument("-o", "--out", metavar="PLACE", help=place)
    parser.add_argument("--overwrite", action="store_true", help="replace a table that exists")


def main_export(args: argparse.Namespace, console: Console) -> int:
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
