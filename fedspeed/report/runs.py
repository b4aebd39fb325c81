"""Run directories as data, and runs of several seeds as one row."""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import UserError


@dataclass(frozen=True)
class RunFiles:
    """What a run directory says."""

    path: Path
    rounds: list[dict[str, Any]]
    summary: dict[str, Any]

    @classmethod
    def read(cls, path: Path) -> RunFiles:
        """Read a finished run directory."""
        try:
            lines = (path / "rounds.jsonl").read_text("utf-8").splitlines()
            return cls(
                path,
                [json.loads(line) for line in lines],
                json.loads((path / "summary.json").read_text("utf-8")),
            )
        except (OSError, json.JSONDecodeError) as error:
            raise UserError(f"{path} is not a finished run directory: {error}") from None

    def curve(self, key: str = "test_accuracy") -> list[tuple[int, float]]:
        """(round, value) where the value was measured."""
        return [(r["round"], r[key]) for r in self.rounds if r[key] is not None]


@dataclass(frozen=True)
class Row:
    """One method over its seeds."""

    label: str
    runs: list[RunFiles]

    def values(self, key: str) -> list[float]:
        """The summary's value of every seed that has one."""
        return [run.summary[key] for run in self.runs if run.summary[key] is not None]

    def mean_curve(self, key: str = "test_accuracy") -> list[tuple[int, float]]:
        """(round, mean over seeds) where every seed has a value."""
        curves = [dict(run.curve(key)) for run in self.runs]
        shared = sorted(set.intersection(*(set(curve) for curve in curves))) if curves else []
        return [(t, statistics.fmean(curve[t] for curve in curves)) for t in shared]


def spread(values: list[float], scale: float = 1.0, digits: int = 2) -> str:
    """`mean +- standard deviation` over seeds; one value has no deviation.

    Example:
        >>> spread([0.5, 0.7], scale=100, digits=1)
        '60.0 +- 14.1'
    """
    if not values:
        return "-"
    mean = f"{scale * statistics.fmean(values):.{digits}f}"
    return mean if len(values) < 2 else f"{mean} +- {scale * statistics.stdev(values):.{digits}f}"


COLUMNS = ("method", "last %", "best %", "last-5 mean %", "train loss", "MB sent", "gradients", "seconds")


def table(rows: list[Row]) -> list[tuple[str, ...]]:
    """One line a method: accuracies with their deviation over seeds, and what they cost; says which diverged."""
    lines: list[tuple[str, ...]] = []
    for row in rows:
        sent = [(run.summary["bytes_down"] + run.summary["bytes_up"]) / 1e6 for run in row.runs]
        diverged = sum(run.summary["status"].startswith("diverged") for run in row.runs)
        lines.append((
            row.label + (f" ({diverged} of {len(row.runs)} diverged)" if diverged else ""),
            spread(row.values("last_accuracy"), 100),
            spread(row.values("best_accuracy"), 100),
            spread(row.values("mean_last5_accuracy"), 100),
            spread(row.values("last_train_loss"), 1, 4),
            f"{statistics.fmean(sent):.1f}" if sent else "-",
            f"{statistics.fmean(row.values('grad_evals')):.0f}" if sent else "-",
            f"{statistics.fmean(row.values('seconds')):.1f}" if sent else "-",
        ))  # fmt: skip
    return lines


def markdown(header: tuple[str, ...], lines: list[tuple[str, ...]]) -> str:
    """A Markdown table."""
    rule = tuple("---" for _ in header)
    return "".join("| " + " | ".join(line) + " |\n" for line in (header, rule, *lines))


def chart(rows: list[Row], width: int = 72, height: int = 14) -> str:
    """Mean accuracy against rounds, drawn with characters; one mark a method."""
    marks = "o+x*#@%&=~"
    curves = [(row.label, row.mean_curve()) for row in rows if row.mean_curve()]
    points = [point for _, curve in curves for point in curve]
    if not points:
        return ""
    last = max(t for t, _ in points)
    settled = [value for t, value in points if 4 * t >= last]  # the climb of the first quarter may leave the picture
    low, high = math.floor(min(settled) * 20) / 20, math.ceil(max(value for _, value in points) * 20) / 20
    high = high if high > low else low + 0.05
    grid = [[" "] * width for _ in range(height)]
    for mark, (_, curve) in zip(marks * 9, curves, strict=False):
        for t, value in curve:
            column = round((t / last) * (width - 1))
            row = round((high - value) / (high - low) * (height - 1))
            if row < height:
                grid[row][column] = mark
    lines = []
    for i, cells in enumerate(grid):
        level = high - (high - low) * i / (height - 1)
        axis = f"{level:7.0%} |" if i % 3 == 0 or i == height - 1 else "        |"
        lines.append(axis + "".join(cells))
    lines.append("        +" + "-" * width)
    lines.append("         0" + f"round {last}".rjust(width - 1))
    legend = "   ".join(f"{mark} {label}" for mark, (label, _) in zip(marks * 9, curves, strict=False))
    return "\n".join([*lines, "         " + legend])
