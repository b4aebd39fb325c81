"""Runs for other programs: trackers (`trackers.py`) and tables (`tables.py`), while a run lasts or after it.

`rounds.jsonl` is the truth: a tracker is told what stands there, all of it once more whenever a run continues.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..errors import UserError, one_line, unknown
from ..observe import find_observer
from .source import Source, read_runs
from .tables import write_csv, write_parquet
from .trackers import quiet

TABLES = {"csv": write_csv, "parquet": write_parquet}
TRACKERS = ("tensorboard", "wandb", "mlflow")


__all__ = ["TABLES", "TRACKERS", "Source", "export", "read_runs", "require_target"]


def require_target(target: str) -> None:
    """Raise unless there is such a target."""
    if target not in TABLES and target not in TRACKERS:
        raise unknown("target", target, [*TABLES, *TRACKERS])


def export(runs: Sequence[Source], target: str, place: Path | None = None, overwrite: bool = False) -> str:
    """Hand runs to a target, one of `TABLES` and `TRACKERS`; what it had of a run is replaced. How to look at it.

    Args:
        place: the file of a table, the folder of a tracker; None for `rounds.csv`, `tensorboard/`, its own.
        overwrite: a table may replace a file.
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


class _reported:
    """What a target raises, as one line."""

    def __init__(self, target: str) -> None:
        self.target = target

    def __enter__(self) -> None: ...

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if isinstance(error, Exception) and not isinstance(error, UserError):
            raise UserError(f"{self.target} could not be written ({one_line(error)}); check its place") from error
