"""Figures as files, with matplotlib's file back end: no display is needed."""

from __future__ import annotations

import contextlib
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..files import atomic
from .paired import Gap
from .runs import Row, measured

Y_LABELS = {"test_accuracy": "test accuracy (%)", "train_loss": "training loss", "test_loss": "test loss"}
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#000000", "#E69F00")
DARK = ("#4AA8E0", "#FF8C42", "#2CC49A", "#E39AC4", "#8FD0F5", "#FFFFFF", "#F2B72E")
"""The same seven on a dark ground."""
LINES: tuple[Any, ...] = ("-", "--", "-.", (0, (1, 1.2)), (0, (5, 1, 1, 1, 1, 1)))
DASHES = ((), (8, 4), (8, 3, 2, 3), (2, 3), (10, 2, 2, 2, 2, 2))
"""`LINES` as a page draws them, in pixels."""
MARKERS = "os^Dv*XPp<>h"
METADATA: dict[str, dict[str, Any]] = {
    "png": {"Software": None}, "svg": {"Date": None, "Creator": None}, "pdf": {"CreationDate": None},
}  # fmt: skip
"""Without what would make other bytes of the same figure."""


def load_matplotlib() -> Any:
    """matplotlib, without the settings file of the current folder: its values are evaluated, and the folder may be
    somebody's run directory. Your own settings are taken from where `$MATPLOTLIBRC` says, or your home."""
    aside = Path(__file__).parent if "matplotlib" not in sys.modules and Path("matplotlibrc").exists() else Path()
    with contextlib.chdir(aside):
        import matplotlib
    return matplotlib


def new_figure(width: float = 6.4, height: float = 4.0) -> tuple[Any, Any]:
    """A figure and its axes."""
    load_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.add_subplot()


def style(i: int) -> dict[str, Any]:
    """Of the i-th thing: seven colours that the colour-blind tell apart, then again with another line."""
    return {"color": COLOURS[i % len(COLOURS)], "linestyle": LINES[i // len(COLOURS) % len(LINES)]}


def marker(i: int, points: int, of: int) -> dict[str, Any]:
    """About six marks on the i-th of some curves, not where the next one has its own."""
    every = max(1, points // 6)
    return {"marker": MARKERS[i % len(MARKERS)], "markersize": 4.5, "markevery": (every * i // max(1, of), every)}


def save(figure: Any, stem: Path, kinds: Sequence[str]) -> list[Path]:
    """Write `stem`.png, .svg, .pdf, each whole or not at all and the same bytes every time."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    return [save_as(figure, stem.with_name(f"{stem.name}.{kind}"), kind) for kind in kinds]


def save_as(figure: Any, path: Path, kind: str) -> Path:
    """Write one file, whatever it is called."""
    with (
        load_matplotlib().rc_context({"svg.hashsalt": "fedspeed"}),  # else the ids in an SVG change every time
        atomic(path) as file,
    ):
        figure.savefig(file, format=kind, dpi=150, metadata=METADATA[kind])
    return path


def curves(
    rows: Sequence[Row], stem: Path, title: str = "", kinds: Sequence[str] = ("png", "svg", "pdf")
) -> list[Path]:
    """Mean over seeds against the round in a band of one standard deviation; a run that diverged ends in a cross."""
    return save(draw_curves(rows, title), stem, kinds)


def draw_curves(rows: Sequence[Row], title: str = "") -> Any:
    """The figure of `curves`."""
    key, many = measured(rows), len(rows) > 4
    labels = [row.label + (f" ({row.diverged} of {len(row.runs)} diverged)" if row.diverged else "") for row in rows]
    aside = 0.6 + 0.075 * min(50, max(map(len, labels), default=0)) if many else 0.0
    figure, axes = new_figure(6.4 + aside, max(4.0, 0.19 * len(rows) + 0.8))
    scale = 100 if key == "test_accuracy" else 1
    for i, (row, label) in enumerate(zip(rows, labels, strict=True)):
        line = {**style(i), **marker(i, len(row.band(key)), len(rows)), "linewidth": 1.6, "zorder": 3}
        _draw_row(axes, row, key, scale, line, label, 1.5 / (8 + len(rows)))
    axes.set(xlabel="communication round", ylabel=Y_LABELS[key], title=title)
    axes.grid(alpha=0.3)
    axes.xaxis.get_major_locator().set_params(integer=True)
    limits = _limits(rows, key, scale)
    if limits:
        axes.set_ylim(*limits)
    handles, names = axes.get_legend_handles_labels()
    short = [name if len(name) <= 50 else f"{name[:49]}…" for name in names]
    if many:
        figure.legend(handles, short, loc="outside right upper", frameon=False, fontsize=8, handlelength=3.2)
    elif handles:
        axes.legend(handles, short, framealpha=0.8, edgecolor="none", handlelength=3.2)
    return figure


def differences(found: Sequence[Gap], baseline: str, rows: Sequence[Row]) -> Any:
    """Paired differences to the baseline with their intervals, the first metric of them, in the colours of the rows."""
    places = {row.label: i for i, row in enumerate(rows)}
    gaps = [gap for gap in found if gap.metric == found[0].metric and gap.values]
    scale = 100 if "accuracy" in found[0].metric else 1
    figure, axes = new_figure(6.4, 1.3 + 0.42 * max(1, len(gaps)))
    axes.axvline(0, color="0.5", linewidth=1, linestyle="--")
    for i, gap in enumerate(gaps):
        colour = style(places[gap.method])["color"]
        values = [scale * value for value in gap.values]
        axes.plot(values, [i + 0.22] * len(values), ".", color=colour, markersize=4, alpha=0.6)
        mean = statistics.fmean(values)
        ends = [[mean - scale * gap.low], [scale * gap.high - mean]] if len(values) > 1 else None
        axes.errorbar([mean], [i], xerr=ends, fmt="o", color=colour, capsize=4)
    axes.set_yticks(range(len(gaps)), [gap.method if len(gap.method) <= 50 else f"{gap.method[:49]}…" for gap in gaps])
    axes.set_ylim(len(gaps) - 0.4, -0.6)
    unit = "accuracy, points (mean of the last five)" if scale == 100 else "test loss"
    axes.set(xlabel=f"difference to {baseline}: {unit}, 95% interval")
    axes.grid(axis="x", alpha=0.3)
    return figure


def _draw_row(axes: Any, row: Row, key: str, scale: float, line: dict[str, Any], label: str, alpha: float) -> None:
    band = row.band(key)
    t, mean = [point[0] for point in band], [scale * point[1] for point in band]
    axes.plot(t, mean, **line, label=label)  # also where empty: the legend says why
    if len(row.runs) > 1:
        low, high = ([scale * (m + side * s) for _, m, s in band] for side in (-1, 1))
        axes.fill_between(t, low, high, color=line["color"], alpha=alpha, linewidth=0)
    for run in row.runs if row.diverged else ():
        curve = [(t, scale * value) for t, value in run.curve(key)]
        axes.plot(*zip(*curve, strict=True), color=line["color"], alpha=0.5, linewidth=0.7) if curve else None
        if curve and run.diverged:
            axes.plot(*curve[-1], "x", color=line["color"], markersize=9, markeredgewidth=2, zorder=4)


def _limits(rows: Sequence[Row], key: str, scale: float) -> tuple[float, float] | None:
    """A range filled by what the methods do after the first quarter: the climb before it may leave the picture."""
    bands = [band for row in rows if (band := row.band(key))]
    last = max((band[-1][0] for band in bands), default=0)
    settled = [scale * (m + side * s) for band in bands for t, m, s in band if 4 * t >= last for side in (-1, 1)]
    settled += [scale * run.curve(key)[-1][1] for row in rows for run in row.runs if run.diverged and run.curve(key)]
    if not settled or not max(settled) < 1e30:
        return None
    room = 0.06 * (max(settled) - min(settled)) or 0.01 * scale
    return min(settled) - room, max(settled) + room
