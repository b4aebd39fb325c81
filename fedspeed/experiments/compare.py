"""Comparisons of methods: the same data, models, cohorts and batches per seed, one row per method."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from ..config.config import Config
from ..config.plan import Plan, Settings, lists_settings
from ..config.stopping import as_targets, goal_accuracy
from ..config.warmup import shared
from ..errors import Diverged, UserError, unknown
from ..methods import METHODS, WRAPPERS, require_name
from ..report.comparison import Comparison, Look, configured_targets
from ..report.labels import kind_of
from ..report.labels import labels as labels_of
from ..report.run_files import Row, RunFiles, collect
from ..runs.directory import RunDir
from ..server.observers import Observers
from ..utils.processes import cores
from .batch import Progress, ProgressObserver, RunTask, folder_name, make_runs, one_command, unfinished
from .sweep import Planned, rows_of, seed_list, seed_tasks, tasks_of

if TYPE_CHECKING:
    from torch import nn

    from ..client.flat_model import Loss
    from ..data.federated import Federated
    from ..methods.base import Method


KEYWORDS = ("seeds", "out", "jobs", "baseline", "overwrite", "log", "progress", "loss", "targets", "columns", "labels")
"""The keywords of `compare` beside settings that a message names."""
SECONDS = 2.0
"""Seconds between two lines of progress."""


@lists_settings
def compare(
    methods: Sequence[Method | type[Method] | str] | Mapping[str, Method | type[Method] | str],
    model: nn.Module | Callable[[], nn.Module] | str = "",
    data: Federated | Callable[[int], Federated] | Mapping[str, Any] | str = "",
    *,
    out: Path | str | None = None,
    seeds: int | Sequence[int] = 3,
    jobs: int = 1,
    baseline: str = "",
    overwrite: bool = False,
    log: Sequence[str] = (),
    split: str = "",
    clients: int = 0,
    validation: str | float = "",
    client_test: str | float = "",
    loss: Loss | str | Mapping[str, Any] | None = None,
    no_decay: Sequence[str] = (),
    targets: Sequence[float] | float = (),
    progress: Callable[[str], Any] | None = None,
    columns: str | Sequence[str] = "",
    labels: str | Mapping[str, str] = "",
    title: str | None = None,
    size: str = "",
    **settings: Unpack[Settings],
) -> Comparison:
    """Run every method with every seed, as `fedspeed compare` does, and return the comparison, which shows itself.

    Methods that share a seed share the initial model, the cohorts and the batches, and so the differences are paired.
    The folder gets a run directory per run, the tables and the figure. A call that was stopped continues when it is
    repeated: finished runs are kept.

    Args:
        methods: names, classes or methods such as `FedSpeed(rho=0.05)`; or a mapping from labels to them. Without
            model and data: folders of runs, which are only read.
        model: a name of `MODELS`; or a class or function without arguments that makes an `nn.Module`, called with
            torch seeded by each seed; or a module, which all seeds start from.
        data: a name or a table of `load_data`, with a split of its own for each seed; or a `Federated`; or a function
            of the seed that returns one.
        out: the folder of the runs.
        seeds: the number of seeds (0, 1, ...), or a list of them.
        jobs: the number of runs side by side, 0 for one per core; more than one takes model and data by name.
        baseline: the label of the method to compare with; the first unless named.
        overwrite: make runs again that the folder has.
        log: names of observers of every run.
        split, clients, validation, client_test: of data that are given by name.
        loss, no_decay: as for `simulate`.
        targets: accuracies to reach; they are stored with the runs.
        progress: a function of a line of text, `print` for example, called every few seconds and after every run.
        columns, labels, title, size: what tables and figures show, as the options of `fedspeed report`.
        settings: fields of `Plan`, the same for all methods.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as out:
        ...     found = compare(["fedavg", "fedspeed"], "linear", "digits", out=out, seeds=2, rounds=1, clients=20)
        >>> [row.label for row in found.rows], found.columns[0].title
        (['fedavg', 'fedspeed'], 'last-5 mean %')
    """
    look = Look(columns, labels, title, size)
    goals = as_targets(targets)
    if not model and not data:
        return _read(methods, out, baseline, goals, look)
    if out is None or not isinstance(out, str | Path):
        raise UserError(f'compare: expected out= a folder for the runs, found {out!r}; give one, out="runs/first"')
    if not isinstance(jobs, int) or jobs < 0:
        raise UserError(f"compare: jobs must be a whole number >= 0, got {jobs!r}")
    for name in settings:
        if name == "seed" or name not in Settings.__annotations__:
            raise unknown("keyword of compare", name, [*(set(Settings.__annotations__) - {"seed"}), *KEYWORDS])
    Observers(log)  # raises for an unknown observer
    named = _labelled(methods)
    given: dict[str, Any] = {"split": split, "clients": clients, "validation": validation, "client_test": client_test}
    kept = {key: value for key, value in given.items() if value}
    chosen = seed_list("compare", seeds)
    lines = Lines(progress, len(named) * len(chosen))
    job = Job(named, model, data, dict(settings), kept, loss, no_decay, goals, overwrite, tuple(log), lines)
    shown = sorted({*goals, *goal_accuracy(str(settings.get("stop_at", "")))})
    if baseline and baseline not in named:
        raise UserError(f"baseline: expected one of {', '.join(named)}, got {baseline!r}; name one")
    look.check(list(named), shown)
    folder = Path(out)
    with one_command(folder):
        rows = job.by_name(folder, chosen, jobs or cores()) if job.named else job.objects(folder, chosen, jobs)
        known = baseline if baseline in [row.label for row in rows] else ""
        found = Comparison(rows, shown, known, look, lines.kept)
        found.write(folder)
    return found


def _read(given: Any, out: Any, baseline: str, targets: Sequence[float], look: Look) -> Comparison:
    """Compare the runs in folders, as they are."""
    paths = [Path(path) for path in ([given] if isinstance(given, str | os.PathLike) else given)]
    if missing := next((path for path in paths if not path.is_dir()), None):
        raise UserError(
            f"compare: expected a model and data, or folders of runs, found {str(missing)!r} and neither; "
            f'compare(["fedavg", "fedspeed"], "mlp", "digits", out="runs/first") makes runs'
        )
    rows, left_out = collect(paths)
    for reason in left_out:
        warnings.warn(f"left out: {reason}", stacklevel=3)
    goals = list(targets) or configured_targets(rows)
    look.check([row.label for row in rows], goals)
    found = Comparison(rows, goals, baseline, look)
    if out is not None:
        found.write(Path(out))
    return found


def _labelled(methods: Any) -> dict[str, Method]:
    """Return label -> method; labels are those that the runs would have when read from their folders."""
    from ..runs.simulate import as_method

    if isinstance(methods, str) or not isinstance(methods, Sequence | Mapping) or not methods:
        raise UserError(f'compare: expected a list of methods, ["fedavg", FedSpeed(rho=0.05)], found {methods!r}')
    if isinstance(methods, Mapping):
        given = {str(label): as_method(value) for label, value in methods.items()}
        _refuse_equal({label: (type(method), method.to_dict()) for label, method in given.items()})
        return given
    made = [as_method(value) for value in methods]
    usual = {name: cls.from_fields({}).to_dict() for name, cls in (METHODS | WRAPPERS).items()}
    names = labels_of([kind_of({"method": method.to_dict()}) for method in made], usual)
    if twice := next((name for name in names if names.count(name) > 1), ""):
        raise UserError(f"compare: expected different methods, got {twice} twice; leave one out")
    return dict(zip(names, made, strict=True))


def _refuse_equal(given: Mapping[str, Any]) -> None:
    """Raise if two labels stand for the same method, which would be trained twice."""
    for one, other in combinations(given, 2):
        if given[one] == given[other]:
            alike = f"{one} and {other}, which are the same"
            raise UserError(f"compare: expected different methods, got {alike}; leave one out")


def planned_runs(
    tables: Sequence[tuple[str, Mapping[str, Any]]], seeds: Sequence[int], out: Path, **how: Any
) -> tuple[list[Planned], list[float]]:
    """Return the runs of a comparison by name, `out/LABEL-sSEED` each, and its targets; raise for a bad one.

    Args:
        tables: every label with the tables of its config, without a seed.
        how: `overwrite` and `log` of a `RunTask`.
    """
    folders = [f"{folder_name(name)}-s{seed}" for seed in seeds for name, _ in tables]
    if twice := next((name for name in folders if folders.count(name) > 1), ""):
        raise UserError(f"compare: expected different methods and seeds, got {twice} twice; leave one out")
    configs = {text: {seed: Config.from_dict({**own, "seed": seed}) for seed in seeds} for text, own in tables}
    _refuse_equal({text: own[seeds[0]] for text, own in configs.items()})
    first = next(iter(configs.values()))[seeds[0]]  # targets are the same for all
    targets = sorted({*first.targets, *goal_accuracy(first.stop_at)})
    return [Planned(text, {}, seed_tasks(text, own, out, **how)) for text, own in configs.items()], targets


@dataclass(frozen=True)
class Job:
    """The runs of a comparison; the fields are the arguments of `compare`, `given` has those of data by name."""

    methods: dict[str, Method]
    model: Any
    data: Any
    settings: dict[str, Any]
    given: dict[str, Any]
    loss: Any
    no_decay: Sequence[str]
    targets: tuple[float, ...]
    overwrite: bool
    log: tuple[str, ...]
    lines: Lines

    @property
    def named(self) -> bool:
        """Whether everything has a name, so that a config describes the runs and any process can resume them."""
        parts = (self.model, self.data, self.loss or "", self.settings.get("cohort", ""))
        if self.no_decay or not all(isinstance(part, str | Mapping) for part in parts):
            return False
        try:
            for method in self.methods.values():
                require_name(method)
        except UserError:
            return False
        return True

    def _of(self, method: Method) -> dict[str, Any]:
        """Return the settings of one method: schedules name only fields that it has."""
        return {**self.settings, **shared(self.settings, method, self.methods.values())}

    def by_name(self, out: Path, seeds: Sequence[int], jobs: int) -> list[Row]:
        """Make the runs from configs, as `fedspeed compare` does; a run that fails gives a warning."""
        parts = {"model": self.model, "data": self.data, "targets": list(self.targets), **self.given}
        parts |= {"loss": self.loss} if self.loss else {}
        tables = [(label, {**self._of(m), **parts, "method": m.to_dict()}) for label, m in self.methods.items()]
        planned, _ = planned_runs(tables, seeds, out, overwrite=self.overwrite, log=self.log)
        tasks = tasks_of(planned)
        left = unfinished(tasks)
        self.lines.kept = len(tasks) - len(left)
        failed = make_runs(left, jobs, self.lines)
        for label, why in failed.items():
            warnings.warn(f"{label} failed: {why}", stacklevel=3)
        return rows_of("compare", planned, failed)

    def objects(self, out: Path, seeds: Sequence[int], jobs: int) -> list[Row]:
        """Make the runs of objects, one after another, as `simulate(..., out=, resume=True)` does."""
        if jobs != 1:
            raise UserError(
                "compare: expected jobs=1 for a model or data that are objects; name both, or leave jobs out"
            )
        if self.overwrite:
            raise UserError("compare: expected overwrite only with model and data by name; choose another out")
        if self.given and not isinstance(self.data, str | Mapping):
            raise UserError(f"compare: {next(iter(self.given))} is for data by name; the data given have theirs")
        folders = {(seed, label): out / f"{folder_name(label)}-s{seed}" for seed in seeds for label in self.methods}
        # Finished runs come first: one of other code or data is refused before anything is trained.
        order = sorted(folders, key=lambda key: RunDir(folders[key]).finished() is None)
        for seed, keys in groupby(order, key=lambda key: key[0]):
            data = self._data(seed)
            for key in keys:
                self._simulate(folders[key], self.methods[key[1]], data, seed)
        return [Row(label, [RunFiles.read(folders[seed, label]) for seed in seeds]) for label in self.methods]

    def _data(self, seed: int) -> Federated:
        from ..data import load
        from ..data.federated import federated

        if isinstance(self.data, str | Mapping):
            table: dict[str, Any] = {"name": self.data} if isinstance(self.data, str) else dict(self.data)
            return load(**table, **self.given, seed=seed)
        return federated(self.data(seed) if callable(self.data) else self.data)

    def _simulate(self, folder: Path, method: Method, data: Federated, seed: int) -> None:
        from ..runs.simulate import simulate

        plan: dict[str, Any] = {**self._of(method), "seed": seed}
        watch = ProgressObserver(int(plan.get("rounds", Plan.rounds)), lambda news: self.lines.on_part(folder, *news))
        plan |= {"loss": self.loss, "no_decay": self.no_decay, "observers": [watch, *self.log]}
        try:
            with simulate(method, self.model, data, out=folder, resume=True, targets=self.targets, **plan) as run:
                made = sum(1 for _ in run)
        except Diverged:  # the run is done, and its summary says so
            made = 1
        if made:
            self.lines.on_done(folder)
        else:
            self.lines.kept += 1


class Lines(Progress):
    """Progress of `count` runs as lines of text, with which `say` is called."""

    def __init__(self, say: Callable[[str], Any] | None, count: int) -> None:
        if say is not None and not callable(say):
            raise UserError(f"compare: expected progress= a function of a text, such as print, found {say!r}")
        self.say, self.count = say, count
        self.kept = self.done = 0
        self.said = time.monotonic()

    def on_part(self, run: Any, part: float, note: str = "") -> None:
        if time.monotonic() - self.said > SECONDS:
            self._line(run, note)

    def on_done(self, run: Any, note: str = "", bad: bool = False) -> None:
        self.done += 1
        self._line(run, note or "done")

    def _line(self, run: Any, note: str) -> None:
        self.said = time.monotonic()
        if self.say is not None:
            name = run.folder.name if isinstance(run, RunTask) else run.name
            self.say(f"{self.kept + self.done}/{self.count} runs, {name}: {note}")
