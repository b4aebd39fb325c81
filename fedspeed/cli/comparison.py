"""The outcome of a comparison: files, and a screen that fits the terminal."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..files import write
from ..report import tables
from ..report.chart import chart
from ..report.paired import find_row, gaps
from ..report.runs import Row, seeds_of, setting

if TYPE_CHECKING:
    from rich.console import Console

FILES = "table.md, .csv, .tex and .json; accuracy.png, .svg and .pdf"


class Comparison:
    """Rows with their targets and their baseline (the first unless named)."""

    def __init__(self, rows: Sequence[Row], targets: Sequence[float], baseline: str = "") -> None:
        self.rows, self.targets = rows, targets
        self.baseline = find_row(rows, baseline).label
        self.gaps = gaps(rows, self.baseline)
        self.table = tables.table(rows, targets)
        self.gap_table = tables.gap_table(self.gaps)

    def write(self, out: Path) -> None:
        """Table and figure in every format."""
        from ..report.figures import curves

        out.mkdir(parents=True, exist_ok=True)
        page = tables.markdown(*self.table) + f"\n{self.note}.\n"
        if self.gaps:
            page += f"\n{self.question}:\n\n{tables.markdown(*self.gap_table)}"
        write(out / "table.md", page)
        write(out / "table.csv", tables.csv(self.rows, self.targets))
        write(out / "table.tex", tables.tabular(*self.table))
        write(out / "table.json", json.dumps(self.data(), indent=1) + "\n")
        curves(self.rows, out / "accuracy", f"{setting(self.rows)}\n{self._seeds}")

    def data(self) -> dict[str, Any]:
        """As JSON takes it."""
        return tables.data(self.rows, self.targets, self.gaps, self.baseline)

    def show(self, console: Console, out: Path) -> None:
        """Table, differences and chart; columns there is no room for are named."""
        wide = console.width if console.is_terminal else 10_000
        keep = [column.keep for column in tables.columns(self.rows, self.targets)]
        text, dropped = tables.fit(*self.table, keep, wide)
        parts = [text, ""]
        if dropped:
            parts.append(textwrap.fill(f"no room for {', '.join(dropped)}: see {out / 'table.md'}", wide))
        parts.append(textwrap.fill(self.note, wide))
        if self.gaps:
            parts += [
                "",
                textwrap.fill(f"{self.question}:", wide),
                tables.fit(*self.gap_table, tables.GAP_KEEP, wide)[0],
            ]
        drawing = chart(self.rows, console.width)
        parts += ["", drawing] if drawing else []
        parts += ["", textwrap.fill(f"files: {FILES}", wide), f"   in: {out}"]
        console.print("\n" + "\n".join(parts), no_wrap=True, overflow="ignore", crop=False)

    @property
    def _seeds(self) -> str:
        return "1 seed" if seeds_of(self.rows) == "1 seed" else f"mean +- standard deviation over {seeds_of(self.rows)}"

    @property
    def note(self) -> str:
        """What the numbers are."""
        return "; ".join(
            part for part in (self._seeds, _decay(self.rows) + _warmup(self.rows), _network(self.rows)) if part
        )

    @property
    def question(self) -> str:
        """What the differences say."""
        unit = "points, " if any("accuracy" in gap.metric for gap in self.gaps) else ""
        many = f"; of {n} such intervals about {n / 20:.0f} miss by chance" if (n := len(self.gaps)) >= 20 else ""
        return f"Is the difference to {self.baseline} real? ({unit}paired over seeds, 95% t-interval{many})"


def _network(rows: Sequence[Row]) -> str:
    """What simulated time was counted for; nothing if there is none."""
    configs = [run.config for row in rows for run in row.runs]
    found = {f"{config['network']}, devices {config.get('devices')}": 1 for config in configs if config.get("network")}
    return f"virtual seconds: network {' or '.join(found)}" if found else ""


def _decay(rows: Sequence[Row]) -> str:
    """The learning-rate decay in force."""
    found = {run.config.get("lr_decay", 0.0) for row in rows for run in row.runs}
    if len(found) > 1:
        return "learning-rate decay as in each config"
    (decay,) = found or {0.0}
    return f"learning-rate decay {decay:g} per round" if decay else "learning-rate decay of the paper, per method"


def _warmup(rows: Sequence[Row]) -> str:
    """The warm-ups in force, and whose they are where they differ."""
    found: dict[str, list[str]] = {}
    for row in rows:
        for warmup in {str(run.config.get("warmup", "")) for run in row.runs}:
            found.setdefault(warmup, []).append(row.label)
    if len(found) < 2:
        return "".join(f"; warm-up {warmup}" for warmup in found if warmup)
    return "; warm-up " + "; ".join(f"{warmup or 'none'} of {', '.join(whose)}" for warmup, whose in found.items())
