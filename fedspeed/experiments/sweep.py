"""Sweeps: a config at many points (`grid`), with several seeds each.

    planned = plan(base, combinations({"lr": [0.05, 0.1], "method.lam": [1, 10]}), [0, 1, 2], Path("runs/lr"))
    failed = make_runs(unfinished(tasks_of(planned)), jobs=2)
    outcome(planned, failed).write(Path("runs/lr"))

Nothing here imports torch.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ..config.config import Config
from ..config.plan import PLACEMENT
from ..errors import UserError
from ..report.comparison import configured_targets
from ..report.export import need
from ..report.run_files import Row, RunFiles
from ..report.sweep import Swept
from ..runs.config_file import as_stored
from ..server.observers import Observers
from ..utils.processes import cores
from .batch import RunTask, folder_name, make_runs, one_command, unfinished
from .grid import Point, Tables, apply, label_of, points_of, qualify

MOST_RUNS = 200
"""Largest number of runs that a sweep makes without `--max-runs`."""


@dataclass(frozen=True)
class Planned:
    """A point with its runs: a task per seed."""

    label: str
    point: Point
    tasks: dict[int, RunTask]


def plan(base: Tables, points: Sequence[Point], seeds: Sequence[int], out: Path, **how: Any) -> list[Planned]:
    """Return the runs of a sweep, `out/LABEL-sSEED` each; raise for a bad one before any is made.

    Args:
        base: the config of all points, as tables.
        how: `overwrite` and `log` of a `RunTask`.
    """
    if not points:
        raise UserError("sweep: expected points, such as lr=0.1,rho=0.05; got none")
    seeds = seed_list("sweep", seeds)
    found: list[Planned] = []
    known: dict[str, str] = {}
    folders: dict[str, str] = {}
    for given in points:
        point = qualify(base, given)
        label = label_of(point)
        tables = apply(base, point)
        try:
            configs = {seed: Config.from_dict({**tables, "seed": seed}) for seed in seeds}
        except UserError as error:
            raise UserError(f"sweep at {label}: {error}") from None
        if "local_epochs" in point and configs[seeds[0]].local_steps:
            raise UserError(f"sweep at {label}: expected local_epochs or local_steps, got both; leave one out")
        stored = as_stored(configs[seeds[0]])
        deciding = {key: value for key, value in stored.items() if key not in (*PLACEMENT, "targets")}
        kind, name = json.dumps(deciding, default=str), folder_name(label).casefold()
        if kind in known:
            twice = f"{label} twice" if known[kind] == label else f"{known[kind]} and {label}, which are one run"
            raise UserError(f"sweep: expected different points, got {twice}; leave one out")
        known[kind] = label
        if folders.setdefault(name, label) != label:
            raise UserError(f"sweep: {folders[name]} and {label} would share a folder; sweep over them apart")
        found.append(Planned(label, point, seed_tasks(label, configs, out, **how)))
    return found


def seed_tasks(label: str, configs: Mapping[int, Config], out: Path, **how: Any) -> dict[int, RunTask]:
    """Return a task per seed of one point or config: `out/LABEL-sSEED`; `how` as in `plan`."""
    folder = folder_name(label)
    return {
        seed: RunTask.of(config, out / f"{folder}-s{seed}", f"{label} seed {seed}", **how)
        for seed, config in configs.items()
    }


def tasks_of(planned: Sequence[Planned]) -> list[RunTask]:
    """Return all runs, seed by seed, so that a stopped sweep has all points for the first seeds."""
    seeds = dict.fromkeys(seed for one in planned for seed in one.tasks)
    return [one.tasks[seed] for seed in seeds for one in planned if seed in one.tasks]


def outcome(planned: Sequence[Planned], failed: Mapping[str, str] = MappingProxyType({})) -> Swept:
    """Read the runs of a sweep, without those that failed."""
    rows = rows_of("sweep", planned, failed)
    points = {one.label: one.point for one in planned}
    return Swept([points[row.label] for row in rows], rows, configured_targets(rows))


def rows_of(command: str, planned: Sequence[Planned], failed: Mapping[str, str]) -> list[Row]:
    """Read the runs that did not fail, a row per label that has one; raise if every run failed."""
    rows = [
        Row(one.label, [RunFiles.read(task.folder) for task in one.tasks.values() if task.label not in failed])
        for one in planned
    ]
    if not any(row.runs for row in rows):
        raise UserError(f"{command}: every run failed; the first: {next(iter(failed.values()))}")
    return [row for row in rows if row.runs]


def sweep(
    base: Config | Tables | None = None,
    *,
    out: Path | str,
    grid: Mapping[str, Iterable[Any]] | None = None,
    points: Iterable[Point] | Path | str | None = None,
    seeds: int | Sequence[int] = 3,
    jobs: int = 1,
    overwrite: bool = False,
    log: Sequence[str] = (),
    max_runs: int = MOST_RUNS,
) -> Any:
    """Make the runs of a sweep, as far as they are not done, and return them as a pandas frame. Needs pandas.

    The frame has a row per run: the fields of its point, `seed`, `status`, `score` (by which points are ranked) and all
    numbers of its summary; `frame.attrs["best"]` is the best point. The folder gets what `fedspeed sweep` writes: run
    directories, table, figure and report page. A call that was stopped continues when it is repeated. A run that fails
    gives a warning.

    Args:
        base: the config of all points, or its tables such as `{"data": "digits", "clients": 50}`.
        out: the folder.
        grid: values of fields, all combinations of which are run: `{"lr": [0.05, 0.1], "method.lam": [1, 10]}`.
        points: or the points themselves, `[{"lr": 0.1, "rho": 0.05}, ...]`, or a TOML file of them.
        seeds: the number of seeds (0, 1, ...), or a list of them.
        jobs: the number of runs side by side, 0 for one per core; a script then needs `if __name__ == "__main__":`.
        log: names of observers of every run.
        max_runs: raise if there would be more.
    """
    pandas = need("pandas")
    found = run_sweep(base, Path(out), grid, points, seeds, jobs, overwrite, log, max_runs)
    frame = pandas.DataFrame(found.runs())
    frame.attrs["best"] = found.data()["best"]
    return frame


def seed_list(command: str, seeds: int | Sequence[int]) -> list[int]:
    """Return the seeds of a number of them, or of a list."""
    if isinstance(seeds, bool | str) or not isinstance(seeds, int | Sequence) or (isinstance(seeds, int) and seeds < 1):
        raise UserError(f"{command}: expected how many seeds, such as 3, or which, such as [5, 7]; got {seeds!r}")
    chosen = list(range(seeds)) if isinstance(seeds, int) else list(seeds)
    if not chosen or len(set(chosen)) < len(chosen):
        raise UserError(f"{command}: expected different seeds, got {chosen}; leave one out")
    return chosen


def run_sweep(
    base: Config | Tables | None,
    out: Path,
    grid: Mapping[str, Iterable[Any]] | None,
    points: Iterable[Point] | Path | str | None,
    seeds: int | Sequence[int] = 3,
    jobs: int = 1,
    overwrite: bool = False,
    log: Sequence[str] = (),
    max_runs: int = MOST_RUNS,
) -> Swept:
    """Run `sweep` without pandas and return what it found."""
    if base is not None and not isinstance(base, Config | Mapping):
        raise UserError(f"sweep: expected a Config or its tables as base, got {base!r}")
    tables = base.to_dict() if isinstance(base, Config) else dict(base or {})
    chosen = seed_list("sweep", seeds)
    if not isinstance(jobs, int) or jobs < 0:
        raise UserError(f"sweep: jobs must be a whole number >= 0, got {jobs!r}")
    Observers(log)
    planned = plan(tables, points_of(grid, points, len(chosen), max_runs), chosen, out, overwrite=overwrite, log=log)
    with one_command(out):
        failed = make_runs(unfinished(tasks_of(planned)), jobs or cores())
        for label, why in failed.items():
            warnings.warn(f"{label} failed: {why}", stacklevel=3)
        found = outcome(planned, failed)
        found.write(out)
    return found
