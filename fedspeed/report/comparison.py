"""A comparison of methods: tables, paired differences and notes, as files and as data; for another network too."""

from __future__ import annotations

import json
import math
import statistics
import struct
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..config.network import Clock
from ..config.settings import compared, difference, in_force
from ..config.stopping import goal_accuracy
from ..errors import UserError
from ..record import Record, is_number
from ..utils.files import write
from . import tables
from .run_files import VIRTUAL, Row, RunFiles, seeds_of, setting
from .statistics import find_row, gaps


def targets_of(rows: Sequence[Row], baseline: str = "") -> list[float]:
    """Return the targets of the configs; without any, the baseline's last-5 mean accuracy, rounded down to percent."""
    if given := configured_targets(rows):
        return given
    ends = find_row(rows, baseline).values("mean_last5_accuracy")
    return [math.floor(100 * statistics.fmean(ends)) / 100] if ends and statistics.fmean(ends) >= 0.01 else []


def configured_targets(rows: Sequence[Row]) -> list[float]:
    """Return the targets of the runs' configs, and the accuracies at which they stop."""
    lists = [run.config.get("targets") for row in rows for run in row.runs]
    given = [a for one in lists if isinstance(one, list) for a in one]
    goals = [goal for row in rows for run in row.runs for goal in goal_accuracy(str(run.config.get("stop_at", "")))]
    return sorted({a for a in [*given, *goals] if is_number(a) and 0 < a < 1})


class Comparison:
    """Rows compared with a baseline (the first row unless named)."""

    def __init__(self, rows: Sequence[Row], targets: Sequence[float], baseline: str = "") -> None:
        self.rows, self.targets = rows, targets
        self.baseline = find_row(rows, baseline).label if rows else ""
        self.gaps = gaps(rows, self.baseline) if rows else []
        self.table = tables.table(rows, targets)
        self.gap_table = tables.gap_table(self.gaps)

    def write(self, out: Path) -> None:
        """Write the table and the figure in every format."""
        from .figures import draw_curves, save

        out.mkdir(parents=True, exist_ok=True)
        write(out / "table.md", self.markdown())
        write(out / "table.csv", tables.csv(self.rows, self.targets))
        write(out / "table.tex", tables.tabular(*self.table))
        write(out / "table.json", json.dumps(self.data(), indent=1) + "\n")
        save(draw_curves(self.rows, self.title), out / "accuracy")

    def markdown(self) -> str:
        """Return table and differences as Markdown."""
        page = tables.markdown(*self.table) + f"\n{self.note}.\n" + (f"\n{self.settings}.\n" if self.settings else "")
        return page + (f"\n{self.question}:\n\n{tables.markdown(*self.gap_table)}" if self.gaps else "")

    def data(self) -> dict[str, Any]:
        """Return the comparison as JSON values."""
        same, others = compared(self._settings)
        settings = {"settings": {"shared": same, "different": others}}
        return tables.data(self.rows, self.targets, self.gaps, self.baseline) | settings

    @property
    def _settings(self) -> dict[str, dict[str, str]]:
        first = {row.label: row.runs[0] for row in self.rows if row.runs}
        return {label: in_force(run.config, run.summary.get("settings")) for label, run in first.items()}

    @property
    def settings(self) -> str:
        """The training settings, and which of them differ between the methods."""
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
        """The conditions of the numbers: seeds, decay, schedules, network, stopped runs."""
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
    """Return how many runs a rule stopped; means are then over runs of different lengths."""
    runs = [run for row in rows for run in row.runs]
    stopped = sum(bool(run.stopped) for run in runs)
    return f"{stopped} of {len(runs)} runs were stopped by a rule before their last round" if stopped else ""


def _network(rows: Sequence[Row]) -> str:
    """Return the networks and devices of the simulated time; "" without simulated time."""
    configs = [run.config for row in rows for run in row.runs]
    found = {
        f"{config['network']}, devices {config.get('devices', 'uniform')}": 1
        for config in configs
        if config.get("network")
    }
    return f"virtual seconds: network {' or '.join(found)}" if found else ""


def _scheduled(rows: Sequence[Row], key: str, words: str) -> str:
    """Return the schedules of one kind, with the methods that use them where they differ."""
    found: dict[str, list[str]] = {}
    for row in rows:
        for schedule in {str(run.config.get(key, "")) for run in row.runs}:
            found.setdefault(schedule, []).append(row.label)
    if len(found) < 2:
        return "".join(f"; {words} {schedule}" for schedule in found if schedule)
    return f"; {words} " + "; ".join(f"{one or 'none'} of {', '.join(whose)}" for one, whose in found.items())


def costed(run: RunFiles, network: str = "", devices: str = "") -> RunFiles:
    """Return a run with simulated time for another network or other devices; "" keeps its own."""
    lacking = UserError(
        f"{run.path}: expected rounds that say what every client computed and sent, found none; only a run made "
        f"with --network can be timed for another: run it again with one"
    )
    if not run.config.get("network"):
        raise lacking
    network, devices = network or str(run.config["network"]), devices or str(run.config.get("devices", "uniform"))
    clock = Clock(network, devices, int(run.summary["seed"]))
    try:
        times = clock.rounds([Record.from_dict(plain) for plain in run.rounds])
        rounds = [{**plain, VIRTUAL: time} for plain, time in zip(run.rounds, times, strict=True)]
    except (TypeError, ValueError, ArithmeticError, struct.error):
        raise lacking from None
    return replace(run, rounds=rounds, config={**run.config, "network": network, "devices": devices})
