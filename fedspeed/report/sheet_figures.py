"""Figures of a reproduced table: curves, lines or bars of ours, and the paper's numbers in a panel of their own."""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import Any

from ..errors import unknown
from .cells import Sheet, estimate, label
from .figures import Y_LABELS, load_matplotlib, new_figure

Points = list[tuple[float, float, bool] | None]
"""Value, standard error and whether it is only a bound, for every column; None where there is none."""


def figure(sheet: Sheet, stem: Path) -> list[Path]:
    """Draw the sheet as `stem`.png and `stem`.svg, the same bytes every time; no files without runs or a figure."""
    kinds = {"curves": _curves, "lines": _lines, "bars": _bars, "none": None}
    if sheet.figure not in kinds:
        raise unknown("figure", sheet.figure, kinds)
    draw = kinds[sheet.figure]
    if draw is None or not any(cell.records for cell in sheet.cells.values()):
        return []
    matplotlib = load_matplotlib()
    stem.parent.mkdir(parents=True, exist_ok=True)
    paths = []
    with matplotlib.rc_context({"svg.hashsalt": "fedspeed"}):  # else the ids in an SVG are drawn anew every time
        picture = draw(sheet)
        for kind, metadata in (("png", {"Software": None}), ("svg", {"Date": None, "Creator": None})):
            path = stem.with_name(f"{stem.name}.{kind}")
            part = path.with_name(f".{path.name}.part")
            picture.savefig(part, format=kind, dpi=150, metadata=metadata)
            paths.append(part.replace(path))
    return paths


def _curves(sheet: Sheet) -> Any:
    """One panel a column: mean over seeds against the round, every seed drawn thin behind it."""
    if sheet.curve not in Y_LABELS:
        raise unknown("curve", sheet.curve, Y_LABELS)
    picture, panels = _panels(len(sheet.columns), 3)
    scale = 100 if sheet.curve == "test_accuracy" else 1
    for panel, column in zip(panels, sheet.columns, strict=True):
        for i, row in enumerate(sheet.rows):
            cell = sheet.cell(row, column)
            seeds = [_curve(record, sheet.curve, scale) for record in cell.records] if cell else []
            for curve in seeds:
                panel.plot(list(curve), list(curve.values()), **_style(i), alpha=0.25, linewidth=0.7)
            shared = sorted(set.intersection(*map(set, seeds))) if seeds else []
            mean = [statistics.fmean(curve[t] for curve in seeds) for t in shared]
            panel.plot(shared, mean, **_style(i), linewidth=1.6, label=row)  # also where empty: one legend for all
        panel.set(title=column, xlabel="communication round", ylabel=Y_LABELS[sheet.curve])
    return _finish(picture, panels, sheet)


def _lines(sheet: Sheet) -> Any:
    """x = columns, one line a row with standard errors; the paper's dashed beside it. `^`: never reached, a bound."""
    picture, panels = _panels(2 if _has_paper(sheet) else 1)
    for i, row in enumerate(sheet.rows):
        for panel, points in zip(panels, (_ours(sheet, row), _papers(sheet, row)), strict=False):
            style = {**_style(i), **({"linestyle": "--"} if panel is not panels[0] else {})}
            kept = [(x, *point) for x, point in enumerate(points) if point]
            xs, ys, errors = ([point[k] for point in kept] for k in range(3))
            panel.errorbar(xs, ys, errors, **style, marker="o", markersize=4, capsize=2, label=row)
            bounds = [(x, y) for x, y, _, missed in kept if missed]
            panel.plot([x for x, _ in bounds], [y for _, y in bounds], "^", color=style["color"], markersize=8)
    return _finish(picture, panels, sheet)


def _bars(sheet: Sheet) -> Any:
    """Groups of bars with standard errors; the paper's as hollow marks in a panel of their own scale."""
    picture, panels = _panels(2 if _has_paper(sheet) else 1)
    width = 0.8 / len(sheet.rows)
    for i, row in enumerate(sheet.rows):
        colour = _style(i)["color"]
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
    return [(each.mean, each.error or 0.0, each.missed > 0) if each else None for each in found]


def _papers(sheet: Sheet, row: str) -> Points:
    """The paper's numbers; `>1500` is a bound."""
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


def _curve(record: dict[str, Any], key: str, scale: float) -> dict[int, float]:
    """Round -> value where it was measured and is finite."""
    points = zip(record["rounds"]["round"], record["rounds"][key], strict=True)
    return {t: scale * value for t, value in points if value is not None and math.isfinite(value)}


def _style(i: int) -> dict[str, Any]:
    """Of the i-th row, the same in every panel: ten colours, then again with another line."""
    return {"color": f"C{i % 10}", "linestyle": ("-", "--", ":", "-.")[i // 10 % 4]}


def _panels(count: int, wide: int = 2) -> tuple[Any, list[Any]]:
    """A figure of `count` panels, at most `wide` beside each other."""
    wide = min(wide, count)
    tall = math.ceil(count / wide)
    picture, first = new_figure(4.6 * wide + 1.6, 3.4 * tall)
    first.remove()
    return picture, [picture.add_subplot(tall, wide, i + 1) for i in range(count)]


def _finish(picture: Any, panels: list[Any], sheet: Sheet) -> Any:
    """Title, grid, and one legend for all panels at the side."""
    for panel in panels:
        panel.grid(alpha=0.3)
        panel.set_axisbelow(True)
    if sheet.figure != "curves":
        for panel, title in zip(panels, ("ours", "paper"), strict=False):
            panel.set(title=f"{title}, preset {sheet.preset}" if title == "ours" else title, ylabel=label(sheet.metric))
            panel.set_xticks(range(len(sheet.columns)), sheet.columns, rotation=20 if _long(sheet.columns) else 0)
            panel.set_xlim(-0.5, len(sheet.columns) - 0.5)  # the same in both, also where the paper lacks a column
    handles, names = panels[0].get_legend_handles_labels()
    picture.legend(handles, names, loc="outside right upper", frameon=False, fontsize=8)
    picture.suptitle(sheet.title, fontsize=11)
    return picture


def _long(names: tuple[str, ...]) -> bool:
    """Whether names would run into each other under a panel."""
    return len(names) * max(map(len, names)) > 40
