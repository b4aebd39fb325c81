"""`fedspeed report`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import UserError
from . import options

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from ..report.comparison import Comparison
    from ..report.run_files import Row

FORMATS = {"html": "html", "md": "md", "latex": "tex", "csv": "csv", "png": "png", "svg": "svg", "pdf": "pdf"}
"""Formats, and the suffixes of their files."""
EPILOG = """\
One file that needs no network: ranking, differences with intervals and p-values, costs, splits. Runs that are running,
interrupted or damaged are shown with their rounds so far and left out of the tables. For papers: the same numbers as
md, latex or csv; the curves (and the differences in a second file) as png, svg or pdf.

examples:
  fedspeed report runs/first -o report.html
  fedspeed report runs/a runs/b --baseline fedavg --targets 0.8,0.9
  fedspeed report runs/first -o table.tex
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the runs, the output file and the baseline."""
    parser.epilog = EPILOG
    parser.add_argument("runs", nargs="+", metavar="RUNS", help="run directories, or folders of them")
    parser.add_argument("-o", "--out", metavar="FILE", help="the file to write; default report.html")
    about = "default from the file's name, else html"
    parser.add_argument("--format", choices=tuple(FORMATS), metavar="|".join(FORMATS), help=about)
    parser.add_argument("--baseline", metavar="METHOD", default="", help="method to compare with; default the first")
    about = "accuracies to reach; default those of the runs, else what the baseline ends with, rounded down"
    parser.add_argument("--targets", metavar="A,B", type=options.accuracies, help=about)
    parser.add_argument("--quiet", action="store_true", help="print nothing but errors")


def main(args: argparse.Namespace, console: Console) -> int:
    """Read and compare runs; write one file, or two figures."""
    from ..report.comparison import Comparison, targets_of
    from ..report.page_sections import warnings
    from ..report.run_files import collect, finished

    out, kind = _output(args)
    rows, left_out = collect([Path(text) for text in args.runs], unfinished=True)
    done = finished(rows)
    found = Comparison(done, args.targets or targets_of(done, args.baseline), args.baseline)
    written = _write(out, kind, rows, found, left_out)
    if not args.quiet:
        for text in warnings(rows, left_out):  # the page has them too, tables and figures do not
            console.print(text, style="yellow")
        for path in written:
            console.print(f"report: {path}")
    return 0


def _output(args: argparse.Namespace) -> tuple[Path, str]:
    """Return the file and its format; each has a default that follows from the other."""
    by_suffix = {suffix: kind for kind, suffix in FORMATS.items()}
    out = Path(args.out or f"report.{FORMATS[args.format or 'html']}")
    if out.is_dir():
        raise UserError(f"report: expected a file to write, {out} is a folder; use -o {out / 'report.html'}")
    kind = args.format or by_suffix.get(out.suffix.lstrip(".").lower(), "")
    if not kind:
        known = ", ".join(f".{suffix}" for suffix in by_suffix)
        raise UserError(f"report: expected a file that ends in {known}, got {out}; or say --format")
    return out, kind


def _write(out: Path, kind: str, rows: Sequence[Row], found: Comparison, left_out: Sequence[str]) -> list[Path]:
    from ..report import tables
    from ..utils.files import write

    out.parent.mkdir(parents=True, exist_ok=True)
    if kind in ("png", "svg", "pdf"):
        from ..report.figures import differences, draw_curves, save_as

        paths = [save_as(draw_curves(found.rows, found.title), out, kind)]
        beside = out.with_name(f"{out.stem}-differences{out.suffix}")
        return paths + (
            [save_as(differences(found.gaps, found.baseline, found.rows), beside, kind)] if found.gaps else []
        )
    if kind == "html":
        from ..report.page import page

        text = page(rows, found, left_out)
    elif kind == "md":
        text = found.markdown()
    elif kind == "latex":
        text = "\n".join(tables.tabular(*one) for one in (found.table, found.gap_table) if one[1])
    else:
        text = tables.csv(found.rows, found.targets)
    write(out, text)
    return [out]
