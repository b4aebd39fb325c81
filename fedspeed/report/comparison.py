"""The outcome of a comparison: its tables, its differences and what they say, as files and as data."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..config.settings import compared, difference, in_force
from ..config.stopping import goal_accuracy
from ..record import is_number
from ..utils.files import write
from . import tables
from .run_files import Row, seeds_of, setting
from .statistics import find_row, gaps


def targets_of(rows: Sequence[Row], baseline: str = "") -> list[float]:
    """Return the targets of the runs' configs; else the whole percentage that the baseline ends with (last-5 mean)."""
    if given := told_targets(rows):
        return given
    ends = find_row(rows, baseline).values("mean_last5_accuracy")
    return [math.floor(100 * statistics.fmean(ends)) / 100] if ends and statistics.fmean(ends) >= 0.01 else []


def told_targets(rows: Sequence[Row]) -> list[float]:
    """Return the targets of the runs' configs, and the accuracies at which they stop."""
    told = [run.config.get("targets") for row in rows for run in row.runs]
    given = [a for one in told if isinstance(one, list) for a in one]
    goals = [goal for row in rows for run in row.runs for goal in goal_accuracy(str(run.config.get("stop_at", "")))]
    return sorted({a for a in [*given, *goals] if is_number(a) and 0 < a < 1})


class Comparison:
    """Rows with their targets and their baseline (the first unless named)."""

    def __init__(self, rows: Sequence[Row], targets: Sequence[float], baseline: str = "") -> None:
        self.rows, self.targets = rows, targets
        self.baseline = find_row(rows, baseline).label if rows else ""
        self.gaps = gaps(rows, self.baseline) if rows else []
        self.table = tables.table(rows, targets)
        self.gap_table = tables.gap_table(self.gaps)

    def write(self, out: Path) -> None:
        """Write the table and the figure in every format."""
        from .figures import curves

        out.mkdir(parents=True, exist_ok=True)
        write(out / "table.md", self.markdown())
        write(out / "table.csv", tables.csv(self.rows, self.targets))
        write(out / "table.tex", tables.tabular(*self.table))
        write(out / "table.json", json.dumps(self.data(), indent=1) + "\n")
        curves(self.rows, out / "accuracy", self.title)

    def markdown(self) -> str:
        """Return table and differences as Markdown."""
        page = tables.markdown(*self.table) + f"\n{self.note}.\n" + (f"\n{self.settings}.\n" if self.settings else "")
        return page + (f"\n{self.question}:\n\n{tables.markdown(*self.gap_table)}" if self.gaps else "")

    def data(self) -> dict[str, Any]:
        """Return the comparison as JSON takes it."""
        same, others = compared(self._settings)
        told = {"settings": {"shared": same, "different": others}}
        return tables.data(self.rows, self.targets, self.gaps, self.baseline) | told

    @property
    def _settings(self) -> dict[str, dict[str, str]]:
        first = {row.label: row.runs[0] for row in self.rows if row.runs}
        return {label: in_force(run.config, run.summary.get("settings")) for label, run in first.items()}

    @property
    def settings(self) -> str:
        """The settings that the runs train with, and which of them differ between the methods."""
        return difference(self._settings)

    @property
    def title(self) -> str:
        """The title of the figure: setting and seeds."""
        return f"{setting(self.rows)}\n{self._seeds}"

    @property
    def _seeds(self) -> str:
        return "1 seed" if seeds_of(self.rows) == "1 seed" else f"mean +- standard deviation over {seeds_of(self.rows)}"

    @property
    def note(self) -> str:
        """How the numbers are to be read: seeds, decay, schedules, network, stopped runs."""
        rates = _scheduled(self.rows, "warmup", "warm-up") + _scheduled(self.rows, "follow_lr", "following lr:")
        parts = (self._seeds, _decay(self.rows) + rates, _network(self.rows), _stopped(self.rows))
        return "; ".join(part for part in parts if part)

    @property
    def question(self) -> str:
        """The question that the differences answer."""
        unit = "points, " if any("accuracy" in gap.metric for gap in self.gaps) else ""
        many = f"; of {n} such intervals about {n / 20:.0f} miss by chance" if (n := len(self.gaps)) >= 20 else ""
        return f"Is the difference to {self.baseline} real? ({unit}paired over seeds, 95% t-interval{many})"


def _decay(rows: Sequence[Row]) -> str:
    """Return the learning-rate decay in force, in words."""
    found = {run.config.get("lr_decay", 0.0) for row in rows for run in row.runs}
    if len(found) > 1:
        return "learning-rate decay as in each config"
    if not found:
        return ""
    (decay,) = found
    return f"learning-rate decay {decay:g} per round" if decay else "learning-rate decay of the paper, per method"


def _stopped(rows: Sequence[Row]) -> str:
    """Return how many runs a rule stopped: means are then of runs of different lengths."""
    runs = [run for row in rows for run in row.runs]
    stopped = sum(bool(run.stopped) for run in runs)
    return f"{stopped} of {len(runs)} runs were stopped by a rule before their last round" if stopped else ""


def _network(rows: Sequence[Row]) -> str:
    """Return the networks and devices that simulated time was counted for; nothing if it was not."""
    configs = [run.config for row in rows for run in row.runs]
    found = {
        f"{config['network']}, devices {config.get('devices', 'uniform')}": 1
        for config in configs
        if config.get("network")
    }
    return f"virtual seconds: network {' or '.join(found)}" if found else ""


def _scheduled(rows: Sequence[Row], key: str, words: str) -> str:
    """Return the schedules of one kind in force, with their methods where they differ."""
    found: dict[str, list[str]] = {}
    for row in rows:
        for told in {str(run.config.get(key, "")) for run in row.runs}:
            found.setdefault(told, []).append(row.label)
    if len(found) < 2:
        return "".join(f"; {words} {told}" for told in found if told)
    return f"; {words} " + "; ".join(f"{told or 'none'} of {', '.join(whose)}" for told, whose in found.items())
