"""The outcome of a sweep: a table of its points, and the best points with their certainty, as files and as data."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ..utils.files import write
from . import tables
from .comparison import Comparison, targets_of
from .run_files import Row, RunFiles, measured, setting, short
from .statistics import distinguished, interval

PROBLEM = ("data", "split", "clients", "augment", "data_dir", "validation", "client_test")
"""Fields that define the problem: points with other values of them are neither averaged nor compared."""


@dataclass(frozen=True)
class Score:
    """The score of a point: one value per seed that did not diverge, with mean and 95% interval."""

    values: dict[int, float]

    @property
    def mean(self) -> float:
        """The mean over seeds; NaN without any."""
        return statistics.fmean(self.values.values()) if self.values else math.nan

    @property
    def bounds(self) -> tuple[float, float]:
        """The 95% t-interval of the mean; infinite with fewer than two seeds."""
        return interval(list(self.values.values()))


@dataclass(frozen=True)
class Best:
    """The best point of one problem.

    Args:
        where: the fields that define the problem; empty if all points share it.
        rivals: the points that the seeds do not prove worse (paired, 95% interval).
        aside: the points that diverged or lack seeds, and were not compared.
    """

    label: str
    where: dict[str, Any]
    score: Score
    rivals: list[str]
    aside: list[str]


class Swept:
    """The points of a sweep, as values of fields by their full names, with a row of runs for each."""

    def __init__(self, points: Sequence[dict[str, Any]], rows: Sequence[Row], targets: Sequence[float] = ()) -> None:
        self.points, self.rows, self.targets = list(points), list(rows), targets
        runs = [run for row in rows for run in row.runs]
        self.on = "validation" if runs and all(run.summary.get("chosen_on") == "validation" for run in runs) else "test"
        self.accuracy = measured(rows) == "test_accuracy"
        self.scale, self.digits = (100.0, 2) if self.accuracy else (1.0, 4)
        self.scores = [
            Score({int(run.summary["seed"]): s for run in row.runs if (s := self._score(run)) is not None})
            for row in rows
        ]

    def _score(self, run: RunFiles) -> float | None:
        """Return the mean of the last five accuracies, or the last loss, on the data that points are chosen on."""
        values = [value for _, value in run.curve(f"{self.on}_{'accuracy' if self.accuracy else 'loss'}")]
        if not values or run.diverged:
            return None
        return math.fsum(values[-5:]) / len(values[-5:]) if self.accuracy else values[-1]

    @property
    def title(self) -> str:
        """The title of the column of scores."""
        what = "last-5 mean %" if self.accuracy else "loss"
        return what if self.on == "test" and self.accuracy else f"{self.on} {what}"

    @cached_property
    def varied(self) -> dict[str, list[Any]]:
        """The fields that vary, each with its values in the order of the points."""
        names = dict.fromkeys(name for point in self.points for name in point)
        found = {name: [point[name] for point in self.points if name in point] for name in names}
        apart = {name: [v for i, v in enumerate(values) if v not in values[:i]] for name, values in found.items()}
        return {n: v for n, v in apart.items() if len(v) > 1 or len(found[n]) < len(self.points)}

    @cached_property
    def best(self) -> list[Best]:
        """The best point of every problem; one that diverged or lacks seeds only if there is no other."""
        groups: dict[str, list[int]] = {}
        for i, point in enumerate(self.points):
            where = {name: point.get(name) for name in self.varied if is_problem(name)}
            groups.setdefault(json.dumps(where, default=str), []).append(i)
        return [best for members in groups.values() if (best := self._best(members)) is not None]

    def _best(self, members: list[int]) -> Best | None:
        most = max(len(self.scores[i].values) for i in members)
        whole = [i for i in members if most and len(self.scores[i].values) == most]
        sign = 1.0 if self.accuracy else -1.0
        first = max(whole, key=lambda i: sign * self.scores[i].mean, default=None)
        if first is None:
            return None
        own = self.scores[first]
        where = {name: self.points[first].get(name) for name in self.varied if is_problem(name)}
        rivals = [self.rows[i].label for i in whole if i != first and not _worse(own, self.scores[i], sign)]
        return Best(self.rows[first].label, where, own, rivals, [self.rows[i].label for i in members if i not in whole])

    # --- in words ---

    @cached_property
    def table(self) -> tuple[tuple[str, ...], tables.Lines]:
        """Header and one line per point: the score with its 95% interval, then the columns of a comparison."""
        header, lines = tables.table(self.rows, self.targets, ["all"])
        kept = [i for i, title in enumerate(header) if i and title != self.title]
        found = []
        for line, score in zip(lines, self.scores, strict=True):
            low, high = score.bounds
            bounds = f"[{self.number(low)}, {self.number(high)}]" if math.isfinite(low) else "-"
            mean = self.number(score.mean) if score.values else "-"
            found.append((line[0], mean, bounds, *(line[i] for i in kept)))
        return ("point", self.title, "95% interval", *(header[i] for i in kept)), found

    @property
    def keep(self) -> list[int]:
        """The priorities of the columns when there is little room (`tables.fit`)."""
        others = [column.keep for column in tables.columns(self.rows, self.targets) if column.title != self.title]
        return [10, 10, *(min(keep, 9) for keep in others)]

    def number(self, score: float) -> str:
        """Return a score as shown in tables."""
        return short(self.scale * score, self.digits)

    @property
    def note(self) -> str:
        """The conditions of the numbers: setting, seeds, decay."""
        parts = (setting(self.rows), Comparison(self.rows, ()).note)
        return "; ".join(part for part in parts if part)

    @property
    def verdict(self) -> list[str]:
        """The best points, how certain that is, and what they were chosen on; nothing for a single point."""
        if len(self.points) == 1 and self.best:
            return []
        lines = [self._sentence(best) for best in self.best]
        if len(self.best) > 1:
            lines.append("points that differ in data or split are other problems: nothing is averaged over them")
        if self.best and self.on == "test":
            lines.append(
                "chosen on the test set: the best number is too good, the more so the more points there are; choose "
                "with --validation 0.1, and judge the point on other seeds"
            )
        elif self.best:
            lines.append(
                "chosen on validation data, which no client trains on; the test numbers were not used, other seeds "
                "would judge it best"
            )
        return lines or ["no run that could be judged: every one diverged or failed"]

    def _sentence(self, best: Best) -> str:
        where = "".join(f" {name}={value}" for name, value in best.where.items())
        unit = "%" if self.accuracy else ""
        text = f"best{f' on{where}' if where else ''}: {best.label} ({self.title.replace(' %', '')} "
        text += f"{self.number(best.score.mean)}{unit})"
        if len(best.score.values) < 2:
            text += "; 1 seed cannot show whether it really is"
        elif best.rivals:
            text += f"; not proved worse by the seeds: {_some(best.rivals)}"
        elif len(self.rows) > len(self.best) + len(best.aside):
            text += "; the seeds prove the others worse"
        return text + (f"; left aside, diverged or without all seeds: {_some(best.aside)}" if best.aside else "")

    def markdown(self) -> str:
        """Return table and verdict as Markdown."""
        lines = "".join(f"- {text}\n" for text in self.verdict)
        return f"{tables.markdown(*self.table)}\n{self.note}.\n\n{lines}"

    # --- as data ---

    def runs(self) -> list[dict[str, Any]]:
        """Return one row per run: the fields of its point, seed, status, every number, and its folder."""
        found = []
        for point, row in zip(self.points, self.rows, strict=True):
            for run in row.runs:
                numbers = run.numbers(self.targets)
                about = {**point, "seed": numbers.pop("seed"), "status": run.state, "score": self._score(run)}
                found.append({**about, **numbers, "folder": str(run.path)})
        return found

    def csv(self) -> str:
        """Return the runs as CSV."""
        runs = [{**run, "folder": Path(run["folder"]).name} for run in self.runs()]
        names = list(dict.fromkeys(name for run in runs for name in run))
        return tables.csv_lines([names, *([run.get(name) for name in names] for run in runs)])

    def data(self) -> dict[str, Any]:
        """Return the outcome as JSON values."""
        rows = tables.data(self.rows, self.targets, [], "")["rows"]
        return {
            "fields": self.varied,
            "chosen_on": self.on,
            "points": [
                {"label": row.pop("method"), "point": point, "score": _plain(score), **row}
                for point, row, score in zip(self.points, rows, self.scores, strict=True)
            ],
            "best": [
                {"label": b.label, "where": b.where, "score": _plain(b.score), "not_proved_worse": b.rivals}
                for b in self.best
            ],
        }

    def write(self, out: Path) -> list[Path]:
        """Write the table in every format, the figure, and the report page; return the main files."""
        from .figures import draw_sweep, save
        from .page import page

        out.mkdir(parents=True, exist_ok=True)
        baseline = self.best[0].label if self.best else ""
        found = Comparison(self.rows, self.targets or targets_of(self.rows, baseline), baseline)
        write(out / "table.md", self.markdown())
        write(out / "table.csv", self.csv())
        write(out / "table.tex", tables.booktabs(*self.table))
        write(out / "table.json", json.dumps(self.data(), indent=1, default=str) + "\n")
        write(out / "report.html", page(self.rows, found))
        return [out / "table.md", out / "report.html", *save(draw_sweep(self), out / "sweep")]


def is_problem(name: str) -> bool:
    """Whether a field defines the problem."""
    return name.partition(".")[0] in PROBLEM


def _some(labels: list[str]) -> str:
    """Return the first three labels, and how many more there are."""
    return "; ".join(labels[:3]) + (f"; and {len(labels) - 3} more" if len(labels) > 3 else "")


def _worse(best: Score, other: Score, sign: float) -> bool:
    """Whether the seeds prove a point worse than the best."""
    differences = [sign * (best.values[seed] - other.values[seed]) for seed in best.values if seed in other.values]
    return distinguished(differences) and math.fsum(differences) > 0


def _plain(score: Score) -> dict[str, Any]:
    low, high = (bound if math.isfinite(bound) else None for bound in score.bounds)
    mean = score.mean if score.values else None
    return {"values": {str(seed): v for seed, v in score.values.items()}, "mean": mean, "low": low, "high": high}
