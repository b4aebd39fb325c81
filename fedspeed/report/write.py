"""One file from runs: the report page, a table or a figure, by the end of the file's name."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path

from ..errors import UserError
from ..utils.files import write
from . import tables
from .comparison import Comparison, Look, targets_of
from .run_files import Row, collect, finished, renamed

FORMATS = {"html": "html", "md": "md", "latex": "tex", "csv": "csv", "png": "png", "svg": "svg", "pdf": "pdf"}
"""Formats, and the suffixes of their files."""


def report(
    runs: Path | str | Sequence[Path | str],
    out: Path | str = "report.html",
    *,
    format: str = "",
    baseline: str = "",
    targets: Sequence[float] = (),
    columns: str | Sequence[str] = "",
    labels: str | dict[str, str] = "",
    title: str | None = None,
    size: str = "",
) -> Path:
    """Write one file about runs, as `fedspeed report` does, and return it; what is wrong with a run is a warning.

    Args:
        runs: a run directory or a folder of them, or several.
        out: the file; a page (.html), a table (.md, .tex, .csv) or a figure (.png, .svg, .pdf).
        format: the format, if the name does not say it.
        baseline: the method to compare with; the first unless named.
        targets: accuracies to reach; those of the runs by default, else what the baseline ends with, rounded down.
        columns, labels, title, size: what tables and figures show, as the options of these names.
    """
    given = [runs] if isinstance(runs, Path | str) else runs
    look = Look(columns, labels, title, size)
    written, notes = write_report([Path(path) for path in given], out, format, baseline, targets, look)
    for text in notes:
        warnings.warn(text, stacklevel=2)
    return written[0]


def write_report(
    runs: Sequence[Path], out: Path | str, format: str, baseline: str, targets: Sequence[float], look: Look
) -> tuple[list[Path], list[str]]:
    """Read and compare runs; write one file, or two figures; return the files, and what readers should know of the
    runs."""
    from .page import warnings as notes_on

    path, kind = _output(out, format)
    _ = look.inches  # raises for a size that no figure has
    rows, left_out = collect(runs, unfinished=True)
    done = finished(rows)
    targets = targets or targets_of(done, baseline)
    look.check([row.label for row in rows], targets, [column.name for column in tables.client_columns(done)])
    found = Comparison(done, targets, baseline, look)
    path.parent.mkdir(parents=True, exist_ok=True)
    if kind in ("png", "svg", "pdf"):
        return _figures(path, kind, found), notes_on(rows, left_out)
    write(path, _text(kind, rows, found, left_out))
    return [path], notes_on(rows, left_out)


def _output(out: Path | str, format: str) -> tuple[Path, str]:
    """Return the file and its format; each has a default that follows from the other."""
    by_suffix = {suffix: kind for kind, suffix in FORMATS.items()}
    path = Path(out or f"report.{FORMATS.get(format, 'html')}")
    kind = format or by_suffix.get(path.suffix.removeprefix(".").lower(), "")
    if path.is_dir():
        raise UserError(f"report: {path} is a folder; use -o {path / 'report.html'}")
    if kind not in FORMATS:
        known = ", ".join(f".{suffix}" for suffix in by_suffix)
        raise UserError(f"report: expected a file that ends in {known}, got {path}; or say --format")
    return path, kind


def _figures(path: Path, kind: str, found: Comparison) -> list[Path]:
    from .figures import differences, save_as

    paper = found.look.inches is not None
    written = [save_as(found.figure(), path, kind, paper=paper)]
    named = found.named(papers=True)
    if not named.gaps:
        return written
    beside = path.with_name(f"{path.stem}-differences{path.suffix}")
    drawn = differences(named.gaps, named.baseline, named.rows, found.look.inches)
    return [*written, save_as(drawn, beside, kind, paper=paper)]


def _text(kind: str, rows: Sequence[Row], found: Comparison, left_out: Sequence[str]) -> str:
    if kind == "csv":
        return tables.csv(found.rows, found.targets)
    named = found.named(papers=kind != "md")
    if kind == "md":
        return named.markdown()
    if kind == "latex":
        return "\n\\par\\medskip\n".join([named.latex(), *([tables.booktabs(*named.paper_gaps)] if named.gaps else [])])
    from .page import page

    return page(renamed(rows, found.look.named([row.label for row in rows], papers=True)), named, left_out)
