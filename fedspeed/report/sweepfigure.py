"""The figure of a sweep: a heat map over two fields, curves over one, else every point with its interval."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .figures import MARKERS, new_figure, style
from .runs import seeds_of, setting

if TYPE_CHECKING:
    from .sweep import Swept

WIDE = 10.0
"""How many times the least value the largest is where an axis becomes logarithmic."""
TICKS = 12
"""Values up to which each has its tick."""


def draw(found: Swept) -> Any:
    """The figure that fits the fields in which points differ; nothing in it is averaged over points."""
    from .sweep import is_problem

    names = list(found.varied)
    problems = [name for name in names if is_problem(name)]
    if len(names) == 1:
        return curves(found, names[0])
    if len(names) == 2 and len(found.points) > 2:
        if problems:
            along = next((name for name in names if name not in problems), names[0])
            return curves(found, along, next(name for name in names if name != along))
        if all(set(names) <= set(point) for point in found.points):
            return heat_map(found, *names)
    return points(found)


def is_number(value: Any) -> bool:
    """Whether an axis can hold it."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def logarithmic(values: Sequence[Any]) -> bool:
    """Whether values are spread over orders of magnitude.

    Example:
        >>> logarithmic([0.01, 0.1, 1]), logarithmic([1, 2, 3]), logarithmic([0, 0.1, 1])
        (True, False, False)
    """
    return bool(min(values) > 0 and max(values) >= WIDE * min(values))


def curves(found: Swept, name: str, by: str = "") -> Any:
    """The score over a field with its 95% interval; a curve for every value of another field."""
    figure, axes = new_figure()
    values = found.varied[name]
    numbers = all(map(is_number, values))
    places = {repr(value): value if numbers else i for i, value in enumerate(values)}
    groups = found.varied[by] if by else [None]
    for k, group in enumerate(groups):
        members = [i for i, point in enumerate(found.points) if name in point and (not by or point.get(by) == group)]
        drawn = [(places[repr(found.points[i][name])], found.scores[i]) for i in members if found.scores[i].values]
        drawn.sort(key=lambda pair: pair[0])
        x = [place for place, _ in drawn]
        means = [found.scale * score.mean for _, score in drawn]
        half = [found.scale * (score.bounds[1] - score.mean) if math.isfinite(score.bounds[1]) else 0.0
                for _, score in drawn]  # fmt: skip
        label = f"{_short(by)}={group}" if by else None
        line = {**style(k), "marker": MARKERS[k % len(MARKERS)], "capsize": 4, "label": label}
        axes.errorbar(x, means, yerr=half, **(line if numbers else {**line, "linestyle": "none"}))
    if numbers and logarithmic(values):
        axes.set_xscale("log")
    if not numbers or len(values) <= TICKS:
        axes.set_xticks(list(places.values()), [str(value) for value in values])
        axes.minorticks_off()
    axes.set(xlabel=_short(name), ylabel=_label(found), title=_title(found, bars=True))
    axes.grid(alpha=0.3)
    if by:
        axes.legend(framealpha=0.8, edgecolor="none")
    return figure


def heat_map(found: Swept, down: str, across: str) -> Any:
    """The score over two fields, a number in every cell; the best in a frame, points that are not there left blank."""
    rows, columns = (_sorted(found.varied[name]) for name in (down, across))
    cells = [[math.nan] * len(columns) for _ in rows]
    for point, score in zip(found.points, found.scores, strict=True):
        cells[rows.index(point[down])][columns.index(point[across])] = found.scale * score.mean
    figure, axes = new_figure(max(4.8, 1.6 + 0.9 * len(columns)), max(3.2, 1.4 + 0.5 * len(rows)))
    image = axes.imshow(cells, aspect="auto", cmap="viridis" if found.accuracy else "viridis_r", origin="lower")
    low, high = image.get_clim()
    for i, line in enumerate(cells):
        for j, value in enumerate(line):
            dark = (value - low) < 0.6 * (high - low) if found.accuracy else (value - low) > 0.4 * (high - low)
            text = found.number(value / found.scale) if math.isfinite(value) else "-"
            shown = "white" if dark and math.isfinite(value) else "black"
            axes.text(j, i, text, ha="center", va="center", fontsize=8, color=shown)
    for best in found.best:
        point = next(p for p, row in zip(found.points, found.rows, strict=True) if row.label == best.label)
        corner = (columns.index(point[across]) - 0.5, rows.index(point[down]) - 0.5)
        frame = {"fill": False, "edgecolor": "#D55E00", "linewidth": 2.5}
        axes.add_patch(_rectangle(corner, **frame, clip_on=False, zorder=3))
    axes.set_xticks(range(len(columns)), [str(value) for value in columns])
    axes.set_yticks(range(len(rows)), [str(value) for value in rows])
    axes.set(xlabel=_short(across), ylabel=_short(down), title=_title(found))
    figure.colorbar(image, ax=axes, label=_label(found))
    return figure


def points(found: Swept) -> Any:
    """Every point with its 95% interval, one below the other."""
    figure, axes = new_figure(6.4, 1.3 + 0.3 * max(1, len(found.rows)))
    first = {best.label for best in found.best}
    for i, (row, score) in enumerate(zip(found.rows, found.scores, strict=True)):
        if not score.values:
            continue
        half = found.scale * (score.bounds[1] - score.mean)
        ends = half if math.isfinite(half) else 0.0
        colour = style(1 if row.label in first else 0)["color"]
        axes.errorbar([found.scale * score.mean], [i], xerr=ends, fmt="o", color=colour, capsize=4)
    names = [row.label if len(row.label) <= 50 else f"{row.label[:49]}…" for row in found.rows]
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.set(xlabel=_label(found), title=_title(found, bars=True))
    axes.grid(axis="x", alpha=0.3)
    return figure


def _rectangle(corner: tuple[float, float], **how: Any) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle(corner, 1, 1, **how)


def _sorted(values: list[Any]) -> list[Any]:
    """Numbers by size, others as they were given."""
    return sorted(values) if all(map(is_number, values)) else values


def _short(name: str) -> str:
    return name.removeprefix("method.")


def _label(found: Swept) -> str:
    return f"{found.on} accuracy (%), last-5 mean" if found.accuracy else f"{found.on} loss"


def _title(found: Swept, bars: bool = False) -> str:
    seeds = f"{seeds_of(found.rows)} per point{', 95% interval' if bars and seeds_of(found.rows) != '1 seed' else ''}"
    where = setting(found.rows)
    return f"{where}\n{seeds}" if where else seeds
