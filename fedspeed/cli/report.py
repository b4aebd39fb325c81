"""`fedspeed report`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from . import options

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
    parser.epilog = EPILOG
    parser.add_argument("runs", nargs="+", metavar="RUNS", help="run directories, or folders of them")
    parser.add_argument("-o", "--out", metavar="FILE", help="the file to write; default report.html")
    about = "default from the file's name, else html"
    parser.add_argument("--format", choices=FORMATS, metavar="|".join(FORMATS), help=about)
    parser.add_argument("--baseline", metavar="METHOD", default="", help="method to compare with; default the first")
    about = "accuracies to reach; default those of the runs, else what the baseline ends with, rounded down"
    parser.add_argument("--targets", metavar="A,B", type=options.accuracies, help=about)
    add_look(parser)
    parser.add_argument("--quiet", action="store_true", help="print nothing but errors")


def add_look(parser: argparse.ArgumentParser) -> None:
    """Add the options for tables and figures in a paper."""
    group = parser.add_argument_group("for a paper")
    about = "columns of the table, such as last5,best,gradients; all: every one; an unknown name lists them"
    group.add_argument("--columns", metavar="A,B", default="", help=about)
    about = "names to show, such as fedspeed=Ours; LaTeX, figures and page write the others as their papers do"
    group.add_argument("--labels", metavar="OLD=NEW,..", default="", help=about)
    group.add_argument("--title", metavar="none|TEXT", help="title of the figure and the page; none leaves it out")
    about = "size of the figure: column (3.25 inches wide), page (6.75), or inches; type is then 8 points"
    group.add_argument("--size", metavar="column|page|WIDTHxHEIGHT", default="", help=about)


def look_of(args: argparse.Namespace) -> Look:
    """Return what the tables and figures show."""
    from ..report.comparison import Look

    return Look(args.columns, args.labels, args.title, args.size)


def main(args: argparse.Namespace, console: Console) -> int:
    """Read and compare runs; write one file, or two figures."""
    from ..report.write import write_report

    runs = [Path(text) for text in args.runs]
    out, kind = args.out or "", args.format or ""
    written, notes = write_report(runs, out, kind, args.baseline, args.targets or (), look_of(args))
    if not args.quiet:
        for text in notes:  # the page has them too, tables and figures do not
            console.print(text, style="yellow")
        for path in written:
            console.print(f"report: {path}")
    return 0
