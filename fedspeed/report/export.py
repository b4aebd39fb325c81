"""Exports of runs to other programs, during a run or after it: trackers (`trackers.py`), CSV, Parquet, pandas.

`rounds.jsonl` is the source: a tracker receives all of its rounds, and all of them again when a run continues.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import UserError, one_line, unknown
from ..record import Record
from ..server.observers import Observer, find_observer
from ..utils.files import atomic, write
from .run_files import Source, read_runs
from .tables import csv_text
from .trackers import need, quiet

if TYPE_CHECKING:
    from ..server.simulation import Simulation

TRACKERS = ("tensorboard", "wandb", "mlflow")


def require_target(target: str) -> None:
    """Raise UserError unless a target has this name."""
    if target not in TABLES and target not in TRACKERS:
        raise unknown("target", target, [*TABLES, *TRACKERS])


def export(runs: Sequence[Source], target: str, place: Path | None = None, overwrite: bool = False) -> str:
    """Write runs to a target of `TABLES` or `TRACKERS`, replacing earlier exports; return how to open the result.

    Args:
        place: the file of a table or the folder of a tracker; None for `rounds.csv`, `tensorboard/` or its default.
        overwrite: allow a table to replace a file.
    """
    require_target(target)
    if target in TABLES:
        file = place or Path(f"rounds.{target}")
        if file.exists() and not overwrite:
            raise UserError(f"{file} exists; choose another -o, or --overwrite it")
        with _reported(target):
            TABLES[target](runs, file)
        return str(file)
    tracker = find_observer(target)(place or (Path("tensorboard") if target == "tensorboard" else None))
    with _reported(target), quiet():
        for run in runs:
            tracker.open(run)
            tracker.log(run.rounds())
            tracker.close(run.status)
    return str(tracker.look())


@contextmanager
def _reported(target: str) -> Iterator[None]:
    """Turn an exception of a target into a UserError of one line."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{target} could not be written ({one_line(error)}); check its place") from error


def row(record: Record) -> dict[str, Any]:
    """Return the fields of a record, then its metrics and signs, as `metrics.NAME`."""
    plain = record.to_dict()
    found = {key: value for key, value in plain.items() if not isinstance(value, dict)}
    for key in (key for key in plain if key not in found):
        found |= {f"{key}.{name}": value for name, value in plain[key].items()}
    return found


def rows(runs: Sequence[Source]) -> list[dict[str, Any]]:
    """Return one row per round: run, method, data, seed, the config keys that differ (`config.KEY`), the record."""
    tables = [run.parameters for run in runs]
    keys = dict.fromkeys(key for table in tables for key in table)
    differ = [key for key in keys if any(table.get(key) != tables[0].get(key) for table in tables)]
    found = []
    for run, table in zip(runs, tables, strict=True):
        about = {"run": run.name, **run.tags, "seed": run.config.get("seed", 0)}
        about |= {f"config.{key}": table.get(key) for key in differ if key not in ("seed", "method.name", "data.name")}
        found += [{**about, **row(record)} for record in run.records]
    return found


def frame(runs: Sequence[Source]) -> Any:
    """Return runs as a pandas frame, one row per round."""
    return need("pandas").DataFrame(rows(runs))


def write_csv(runs: Sequence[Source], file: Path) -> None:
    """Write one table of all runs as CSV."""
    file.parent.mkdir(parents=True, exist_ok=True)
    write(file, csv_text(rows(runs)))


def write_parquet(runs: Sequence[Source], file: Path) -> None:
    """Write one table of all runs as Parquet."""
    need("pyarrow")
    found = frame(runs)
    file.parent.mkdir(parents=True, exist_ok=True)
    with atomic(file) as out:
        found.to_parquet(out, engine="pyarrow", index=False)


TABLES = {"csv": write_csv, "parquet": write_parquet}


def load_runs(*given: Path | str | Iterable[Path | str]) -> Any:
    """Load run directories, or folders of them, as one pandas frame: a row per round. Needs pandas.

    Runs that cannot be read are left out with a warning.

    Args:
        given: a path, for example "runs/demo", or several.
    """
    paths = [Path(p) for each in given for p in ([each] if isinstance(each, str | Path) else each)]
    need("pandas")
    runs, out = read_runs(paths)
    for reason in out:
        warnings.warn(f"left out: {reason}", stacklevel=2)
    return frame(runs)


class Csv(Observer):
    """An observer that writes all rounds to `rounds.csv` in the run's directory when a run ends."""

    def started(self, run: Simulation, config: dict[str, Any]) -> None:
        """Keep the recorder, whose directory receives the table."""
        if run.recorder is None:
            raise UserError("there is no directory to write to; give one: simulate(..., out=FOLDER)")
        self.recorder = run.recorder

    def ended(self, status: str, summary: dict[str, Any]) -> None:
        """Write all rounds; the columns are the fields of a record, then its metrics and signs."""
        if summary:  # empty if the folder was moved: another run may be in its place
            write(self.recorder.out / "rounds.csv", csv_text([row(record) for record in self.recorder.records]))
