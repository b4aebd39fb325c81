"""Run directories as data, and runs of several seeds as one row."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..record import is_number, up_to
from ..rundir import RunDir, runs_in
from ..stopping import RULES
from ..tables import flat
from .labels import kind_of, labels


@dataclass(frozen=True)
class RunFiles:
    """What a run directory says."""

    path: Path
    rounds: list[dict[str, Any]]
    summary: dict[str, Any]
    config: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> RunFiles:
        """Read a run directory that is finished or stopped, or has diverged. Nothing in it is executed."""
        files = RunDir(path)
        try:
            run = cls(path, list(files.lines(whole=True)), files.told() or {}, files.config())
            if not run.summary:
                raise UserError(f"it has no {files.summary_file.name} that can be read")
        except UserError as error:
            raise UserError(f"{path} is not a finished run directory: {error}") from None
        try:
            run.check()
        except (KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{path} is not a finished run directory: it lacks {error}") from None
        return run

    def check(self) -> None:
        """Raise KeyError, TypeError or AttributeError where something is missing, or is not what it must be."""
        method = self.config.get("method")
        if not isinstance(method, dict) or not isinstance(method.get("name"), str):
            raise TypeError("the name of a method")
        for key, value in self.numbers((0.5,)).items():
            if not is_number(value) and (value is not None or key == "seed"):
                raise TypeError(f"a number for {key}")
        texts = {"data_fingerprint": "-", "split_fingerprint": "-", **self.summary}
        for key in ("data_fingerprint", "split_fingerprint", "status"):
            if not str.strip(texts[key]):  # a TypeError where it is no text
                raise TypeError(f"text for {key}")

    @property
    def done(self) -> bool:
        """Whether there is nothing left to run: finished, stopped by a rule, or diverged."""
        return self.state in ("finished", "stopped", "diverged")

    @property
    def state(self) -> str:
        """How it ended, in a word: `finished`, `stopped` (by a rule), `diverged`; else it broke off."""
        return str(self.summary["status"]).partition(":")[0]

    @property
    def stopped(self) -> str:
        """The rule that stopped it, `stop_at accuracy=0.8`; "" if none did."""
        if self.state != "stopped":
            return ""
        told = self.summary.get("stopped")
        by, rule = (told.get("by"), told.get("rule")) if isinstance(told, dict) else ("", "")
        return f"{by} {rule[:60]}" if by in RULES and isinstance(rule, str) else "by a rule"

    @property
    def diverged(self) -> bool:
        """Whether it ended with NaN or Inf."""
        return self.state == "diverged"

    @property
    def illnesses(self) -> list[str]:
        """What ailed it, by name."""
        found = self.summary.get("illnesses")
        return [str(name) for name in found] if isinstance(found, dict) else []

    def curve(self, key: str = "test_accuracy") -> list[tuple[int, float]]:
        """(round, value) where the value was measured."""
        return [(r["round"], r[key]) for r in self.rounds if r.get(key) is not None]

    def numbers(self, targets: Sequence[float] = ()) -> dict[str, float | None]:
        """Every result of the run, by machine names; None for what was not measured or not reached."""
        plain: dict[str, float | None] = {key: self.summary[key] for key in SUMMARY}
        plain["bytes"] = self.summary["bytes_down"] + self.summary["bytes_up"]
        timed = bool(self.config.get("network"))
        plain |= {VIRTUAL: self.rounds[-1].get(VIRTUAL) if self.rounds else 0.0} if timed else {}
        for target in targets:
            plain |= self._reached.setdefault(target, {}) or self._reach(target)
        return plain

    @cached_property
    def _reached(self) -> dict[float, dict[str, float | None]]:
        return {}

    def _reach(self, target: float) -> dict[str, float | None]:
        """What a target took, kept: every cell of a table asks."""
        spent = up_to(self.rounds, target)
        found = self._reached[target]
        found[to("rounds", target)] = spent[-1]["round"] if spent else None
        for cost, keys in COSTS.items():
            found[to(cost, target)] = sum(r[key] for r in spent for key in keys) if spent else None
        if self.config.get("network"):
            found[to(VIRTUAL, target)] = spent[-1].get(VIRTUAL) if spent else None
        return found


VIRTUAL = "virtual_seconds"
SUMMARY = ("seed", "last_accuracy", "best_accuracy", "mean_last5_accuracy", "last_test_loss", "last_train_loss",
           "rounds", "bytes_down", "bytes_up", "grad_evals", "seconds", "eval_seconds")  # fmt: skip
COSTS = {"bytes": ("bytes_down", "bytes_up"), "grad_evals": ("grad_evals",), "seconds": ("seconds",)}
"""What rounds cost beside their number, and what in a record adds up to it."""


def to(cost: str, target: float) -> str:
    """The name of what a target cost.

    Example:
        >>> to("rounds", 0.825)
        'rounds_to_82.5'
    """
    return f"{cost}_to_{100 * target:g}"


@dataclass(frozen=True)
class Row:
    """One method over its seeds."""

    label: str
    runs: list[RunFiles]

    def values(self, key: str, targets: Sequence[float] = ()) -> list[float]:
        """The number of every seed that has one."""
        found = [run.numbers(targets).get(key) for run in self.runs]
        return [value for value in found if value is not None]

    def mean_curve(self, key: str = "test_accuracy") -> list[tuple[int, float]]:
        """(round, mean over seeds) where every seed has a value."""
        return [(t, mean) for t, mean, _ in self.band(key)]

    def band(self, key: str = "test_accuracy") -> list[tuple[int, float, float]]:
        """(round, mean, standard deviation over seeds) where every seed has a value."""
        return band([dict(run.curve(key)) for run in self.runs])

    @property
    def diverged(self) -> int:
        """How many of its runs diverged."""
        return sum(run.diverged for run in self.runs)

    @property
    def at_goal(self) -> int:
        """How many of its runs stopped at a score: their last scores are their goal's, not the method's."""
        return sum(run.stopped.startswith("stop_at ") for run in self.runs)


def band(curves: Sequence[dict[int, float]]) -> list[tuple[int, float, float]]:
    """(round, mean, standard deviation) of curves where every one of them has a value.

    Example:
        >>> band([{1: 0.5, 2: 0.6}, {2: 0.6}])
        [(2, 0.6, 0.0)]
    """
    shared = sorted(set.intersection(*map(set, curves))) if curves else []
    found = [(t, [curve[t] for curve in curves]) for t in shared]
    return [(t, statistics.fmean(v), statistics.stdev(v) if len(v) > 1 else 0.0) for t, v in found]


def measured(rows: Iterable[Row]) -> str:
    """What the runs were tested by: `test_accuracy`, or `test_loss` where there is only that."""
    runs = [run for row in rows for run in row.runs]
    losses_only = any(run.curve("test_loss") for run in runs) and not any(run.curve() for run in runs)
    return "test_loss" if losses_only else "test_accuracy"


def short(value: float, digits: int = 4) -> str:
    """A number with this many decimals; a huge one, a loss that diverges for example, in short form.

    Example:
        >>> short(0.51234), short(3.0617e25)
        ('0.5123', '3.1e+25')
    """
    return f"{value:.{digits}f}" if abs(value) < 1e5 else f"{value:.1e}"


def spread(values: list[float], scale: float = 1.0, digits: int = 2) -> str:
    """`mean +- standard deviation` over seeds; one value has no deviation.

    Example:
        >>> spread([0.5, 0.7], scale=100, digits=1)
        '60.0 +- 14.1'
    """
    if not values:
        return "-"
    mean = short(scale * statistics.fmean(values), digits)
    return mean if len(values) < 2 else f"{mean} +- {short(scale * statistics.stdev(values), digits)}"


def seeds_of(rows: Iterable[Row]) -> str:
    """How many seeds the rows have, in words: `1 seed`, `3 seeds`, `2 to 3 seeds`."""
    counts = sorted({len(row.runs) for row in rows})
    if not counts or counts == [1]:
        return "1 seed"
    return f"{counts[0]} to {counts[-1]} seeds" if len(counts) > 1 else f"{counts[0]} seeds"


def setting(rows: Iterable[Row]) -> str:
    """Data, split and cohort, as far as all runs have the same."""
    tables = [flat(run.config) for row in rows for run in row.runs]
    first = tables[0] if tables else {}
    shared = {key: value for key, value in first.items() if all(t.get(key) == value for t in tables)}
    parts = [str(shared[key]) for key in ("data.name", "split") if key in shared]
    if {"active", "clients"} <= set(shared):
        parts.append(f"{shared['active']} of {shared['clients']} clients")
    return ", ".join(parts)


def folders_of_runs(given: Path) -> list[Path]:
    """A run directory itself, or those in a folder, `rho=0.1-s10` after `rho=0.1-s2`."""
    found = runs_in(given)
    if not found:
        raise UserError(f"{given} holds no runs: expected a run directory, or a folder of them")
    return sorted(found, key=lambda path: [float(p) if i % 2 else p for i, p in enumerate(_NUMBER.split(path.name))])


_NUMBER = re.compile(r"(\d+(?:\.\d+)?)")


def gather(
    folders: Iterable[Path],
    usual: dict[str, dict[str, Any]] | None = None,
    read: Callable[[Path], RunFiles] = RunFiles.read,
    unfinished: bool = False,
) -> tuple[list[Row], list[str]]:
    """Finished runs as rows, seeds in order, named by method and by whatever differs; and why others are left out.

    Args:
        usual: the fields of methods by default; others are named too.
        read: a run directory; one for which it raises UserError is left out.
        unfinished: take those that are not done as well.
    """
    runs: dict[str, dict[int, RunFiles]] = {}
    out = []
    for folder in dict.fromkeys(folders):
        try:
            run = read(folder)
        except UserError as error:
            why = str(error).splitlines()[0].replace(f"{folder} is not a finished run directory", "not finished")
            out.append(f"{folder}: {why}")
            continue
        seeds = runs.setdefault(json.dumps(kind_of(run.config), sort_keys=True, default=str), {})
        seed = int(run.summary["seed"])
        if not run.done and not unfinished:
            out.append(f"{folder}: {str(run.summary['status']).splitlines()[0]}")
        elif seed in seeds and (seeds[seed].done or not run.done):
            same = "run" if run.config == seeds[seed].config else "seed"
            out.append(f"{folder}: the same {same} as {seeds[seed].path}")
        else:
            seeds[seed] = run
    kept = [[seeds[seed] for seed in sorted(seeds)] for seeds in runs.values() if seeds]
    names = labels([kind_of(seeds[0].config) for seeds in kept], usual or {})
    return [Row(label, seeds) for label, seeds in zip(names, kept, strict=True)], out
