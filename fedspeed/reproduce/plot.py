"""Figures of a reproduced table: our curves, lines or bars, and the paper's numbers in a panel of their own."""

from __future__ import annotations

import math
from itertools import product
from pathlib import Path
from typing import Any

from ..errors import unknown
from ..report.figures import LINES, MARKERS, marker, new_figure, save, style
from ..report.run_files import band
from .table import UNITS, Sheet, base, estimate, is_diverged, label

CURVES = {
    "test_accuracy": "test accuracy (%)",
    "test_loss": "server's loss, test data",
    "server_loss": "server's loss, clients' data",
    "train_loss": "active clients' loss in their steps",
}

Points = list[tuple[float, float, bool] | None]
"""One (value, standard deviation, whether it is only a bound) per column; None without a value."""


def figure(sheet: Sheet, stem: Path) -> list[Path]:
    """Write the figure of a sheet as `stem`.png and `stem`.svg, the same bytes every time; nothing without runs."""
    kinds = {"curves": _curves, "lines": _lines, "bars": _bars, "none": None}
    if sheet.figure not in kinds:
        raise unknown("figure", sheet.figure, kinds)
    draw = kinds[sheet.figure]
    if draw is None or not any(cell.results for cell in sheet.cells.values()):
        return []
    return save(draw(sheet), stem, ("png", "svg"))


def _curves(sheet: Sheet) -> Any:
    """Draw one panel per curve and column: the mean over seeds, and every seed thin; a diverged one ends in a cross.

    Rows and columns without a run are left out.
    """
    for name in sheet.curves:
        if name not in CURVES:
            raise unknown("curve", name, CURVES)
    run = [(row, column) for row, column in product(sheet.rows, sheet.columns) if _results(sheet, row, column)]
    rows, found = ({place[k] for place in run} for k in (0, 1))
    columns = [column for column in sheet.columns if column in found]
    pairs = list(product(drawn(sheet), columns))
    picture, panels = _panels(len(pairs), 3 if len(pairs) == len(columns) else len(columns))
    crossed = False
    for panel, (kind, column) in zip(panels, pairs, strict=True):
        scale = 100 if kind == "test_accuracy" else 1
        for i, row in enumerate(sheet.rows):  # the colour of a row does not depend on which others were run
            if row not in rows:
                continue
            results = _results(sheet, row, column)
            seeds = [_curve(result, kind, scale) for result in results]
            for curve, result in zip(seeds, results, strict=True):
                panel.plot(list(curve), list(curve.values()), **style(i), alpha=0.25, linewidth=0.7)
                if curve and is_diverged(result):
                    panel.plot(*list(curve.items())[-1], "x", color=style(i)["color"], markersize=8, markeredgewidth=2)
                    crossed = True
            mean = band(seeds)
            marks = marker(i, len(mean), len(sheet.rows))
            panel.plot(
                [t for t, _, _ in mean], [value for _, value, _ in mean], **style(i), **marks, linewidth=1.6, label=row
            )  # also if empty: all panels share the legend
        panel.set(title=column, xlabel="communication round", ylabel=CURVES[kind])
    if crossed:
        panels[0].plot([], [], "x", color="grey", markersize=8, markeredgewidth=2, label="diverged")
    return _finish(picture, panels, sheet)


def _results(sheet: Sheet, row: str, column: str) -> list[Any]:
    cell = sheet.cell(row, column)
    return list(cell.results) if cell else []


def drawn(sheet: Sheet) -> list[str]:
    """Return the curves of a sheet that some run has; the first if no run has any."""
    runs = [result["rounds"] for cell in sheet.cells.values() for result in cell.results]
    return [curve for curve in sheet.curves if any(curve in rounds for rounds in runs)] or list(sheet.curves[:1])


def _lines(sheet: Sheet) -> Any:
    """Draw columns along x and one line per row with standard deviations, beside the paper's; `^` marks a bound.

    Lines that lie on each other differ in width, dashes and marks.
    """
    picture, panels = _panels(2 if _has_paper(sheet) else 1)
    for i, row in enumerate(sheet.rows):
        line = {**style(i), "linestyle": LINES[i % len(LINES)], "linewidth": max(1.2, 3.0 - 0.6 * i)}
        for panel, points in zip(panels, (_ours(sheet, row), _papers(sheet, row)), strict=False):
            kept = [(x, *point) for x, point in zip(_places(sheet), points, strict=True) if point]
            xs, ys, errors = ([point[k] for point in kept] for k in range(3))
            panel.errorbar(xs, ys, errors, **line, marker=MARKERS[i % len(MARKERS)], markersize=6, capsize=2,
                           markerfacecolor="none", elinewidth=1.0, label=row)  # fmt: skip
            bounds = [(x, y) for x, y, _, missed in kept if missed]
            panel.plot([x for x, _ in bounds], [y for _, y in bounds], "^", color=line["color"], markersize=8)
    return _finish(picture, panels, sheet)


def _bars(sheet: Sheet) -> Any:
    """Draw groups of bars with standard deviations; the paper's are hollow marks in a panel of their own."""
    picture, panels = _panels(2 if _has_paper(sheet) else 1)
    width = 0.8 / len(sheet.rows)
    for i, row in enumerate(sheet.rows):
        colour = style(i)["color"]
        for panel, points in zip(panels, (_ours(sheet, row), _papers(sheet, row)), strict=False):
            kept = [(x + (i + 0.5) * width - 0.4, *point) for x, point in enumerate(points) if point]
            xs, ys, errors = ([point[k] for point in kept] for k in range(3))
            if panel is panels[0]:
                panel.bar(xs, ys, 0.9 * width, yerr=errors, color=colour, capsize=2, label=row)
            else:
                panel.plot(xs, ys, "o", markerfacecolor="none", color=colour, label=row)
    return _finish(picture, panels, sheet)


def _ours(sheet: Sheet, row: str) -> Points:
    found = [estimate(sheet.cell(row, column), sheet.metric, sheet.targets) for column in sheet.columns]
    return [(each.mean, each.deviation or 0.0, each.missed > 0) if each else None for each in found]


def _papers(sheet: Sheet, row: str) -> Points:
    """Return the paper's numbers; `>1500` is a bound."""
    points: Points = []
    for column in sheet.columns:
        value = sheet.value(row, column)
        try:
            points.append(None if value is None else (float(str(value).lstrip("> ")), 0.0, str(value).startswith(">")))
        except ValueError:  # words instead of a number
            points.append(None)
    return points


def _has_paper(sheet: Sheet) -> bool:
    return any(point for row in sheet.rows for point in _papers(sheet, row))


def _curve(result: dict[str, Any], key: str, scale: float) -> dict[int, float]:
    """Return round -> value, where it was measured and is finite."""
    points = zip(result["rounds"]["round"], result["rounds"].get(key, ()), strict=key in result["rounds"])
    return {t: scale * value for t, value in points if value is not None and math.isfinite(value)}


def _panels(count: int, wide: int = 2) -> tuple[Any, list[Any]]:
    """Return a figure of `count` panels, at most `wide` side by side."""
    wide = min(wide, count)
    tall = math.ceil(count / wide)
    picture, first = new_figure(4.6 * wide + 1.6, 3.4 * tall)
    first.remove()
    return picture, [picture.add_subplot(tall, wide, i + 1) for i in range(count)]


def _finish(picture: Any, panels: list[Any], sheet: Sheet) -> Any:
    """Add title, grid, and one legend for all panels; return the figure."""
    for panel in panels:
        panel.grid(alpha=0.3)
        panel.set_axisbelow(True)
    if sheet.figure != "curves":
        for panel, title in zip(panels, ("ours", "paper"), strict=False):
            panel.set(title=f"{title}, preset {sheet.preset}" if title == "ours" else title, ylabel=label(sheet.metric))
            at = _places(sheet)
            crowded = len(at) * max(map(len, sheet.columns)) > 40  # the names would overlap
            panel.set_xticks(at, sheet.columns, rotation=20 if crowded else 0)
            room = 0.5 if sheet.figure == "bars" or len(at) < 2 else 0.15 * (max(at) - min(at))
            panel.set_xlim(min(at) - room, max(at) + room)  # the same in both, also where the paper lacks a column
        if UNITS.get(base(sheet.metric)) == "%":  # accuracies are compared by eye
            limits = [panel.get_ylim() for panel in panels]
            for panel in panels:
                panel.set_ylim(min(low for low, _ in limits), 1.03 * max(high for _, high in limits))
    handles, names = panels[0].get_legend_handles_labels()
    picture.legend(handles, names, loc="outside right center", frameon=False, fontsize=8, handlelength=3.0)
    picture.suptitle(sheet.title, fontsize=11)
    return picture


def _places(sheet: Sheet) -> list[float]:
    """Return the x of every column: `E=1`, `E=5`, `E=20` on a logarithmic axis, others side by side."""
    parts = [column.rpartition("=") for column in sheet.columns]
    try:
        numbers = [float(number) for _, _, number in parts]
    except ValueError:
        numbers = []
    numeric = len(numbers) > 2 and min(numbers) > 0 and len(set(numbers)) == len(numbers) == len(sheet.columns)
    if sheet.figure == "lines" and numeric and len({name for name, _, _ in parts}) == 1:
        return [math.log10(number) for number in numbers]
    return [float(i) for i in range(len(sheet.columns))]
