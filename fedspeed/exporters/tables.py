"""Rounds as tables: CSV, Parquet, a pandas frame."""

from __future__ import annotations

import csv
import io
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import UserError
from ..files import atomic, write
from ..observe import Observer
from ..record import Record
from .source import Source, read_runs
from .trackers import need

if TYPE_CHECKING:
    from ..server import Simulation


def row(record: Record) -> dict[str, Any]:
    """The fields of a record, then its metrics and signs, as `metrics.NAME`."""
    plain = record.to_dict()
    found = {key: value for key, value in plain.items() if not isinstance(value, dict)}
    for key in (key for key in plain if key not in found):
        found |= {f"{key}.{name}": value for name, value in plain[key].items()}
    return found


def rows(runs: Sequence[Source]) -> list[dict[str, Any]]:
    """One per round: its run, method, data and seed; `config.KEY` for what differs between the configs; the record."""
    tables = [run.parameters for run in runs]
    keys = dict.fromkeys(key for table in tables for key in table)
    differ = [key for key in keys if any(table.get(key) != tables[0].get(key) for table in tables)]
    found = []
    for run, table in zip(runs, tables, strict=True):
        about = {"run": run.name, **run.tags, "seed": run.config.get("seed", 0)}
        about |= {f"config.{key}": table.get(key) for key in differ if key not in ("seed", "method.name", "data.name")}
        found += [{**about, **row(record)} for record in run.records]
    return found


def csv_text(table: Sequence[dict[str, Any]]) -> str:
    """Rows as CSV; lists are numbers with spaces between, None is empty."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(dict.fromkeys(key for one in table for key in one)), lineterminator="\n")
    writer.writeheader()
    for one in table:
        writer.writerow({key: " ".join(map(str, v)) if isinstance(v, list) else v for key, v in one.items()})
    return text.getvalue()


def frame(runs: Sequence[Source]) -> Any:
    """Runs as a pandas frame, one row per round."""
    return need("pandas").DataFrame(rows(runs))


def write_csv(runs: Sequence[Source], file: Path) -> None:
    """One table of all runs."""
    file.parent.mkdir(parents=True, exist_ok=True)
    write(file, csv_text(rows(runs)))


def write_parquet(runs: Sequence[Source], file: Path) -> None:
    """As `frame` has them."""
    need("pyarrow")
    found = frame(runs)
    file.parent.mkdir(parents=True, exist_ok=True)
    with atomic(file) as out:
        found.to_parquet(out, engine="pyarrow", index=False)


def load_runs(*given: Path | str | Iterable[Path | str]) -> Any:
    """Run directories, or folders of them, as one pandas frame: a row per round. Needs pandas.

    What cannot be read is left out, with a warning.

    Args:
        given: for example "runs/demo", or several.
    """
    paths = [Path(p) for each in given for p in ([each] if isinstance(each, str | Path) else each)]
    need("pandas")
    runs, out = read_runs(paths)
    for reason in out:
        warnings.warn(f"left out: {reason}", stacklevel=2)
    return frame(runs)


class Csv(Observer):
    """The rounds as a table, `rounds.csv` in the run's directory: written when rounds end, always of all of them."""

    def started(self, run: Simulation, config: dict[str, Any]) -> None:
        """Where to write."""
        if run.recorder is None:
            raise UserError("there is no directory to write to; simulate(..., out=FOLDER)")
        self.recorder = run.recorder

    def ended(self, status: str, summary: dict[str, Any]) -> None:
        """Columns are the fields of a record, then its metrics and signs."""
        if summary:  # else the folder was moved, and another may be in its place
            write(self.recorder.out / "rounds.csv", csv_text([row(record) for record in self.recorder.records]))
