"""Figures of comparisons, sweeps and splits as files (matplotlib without a display), and curves in characters."""

from __future__ import annotations

import contextlib
import math
import statistics
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..utils.files import atomic
from .run_files import Row, measured, seeds_of, setting
from .statistics import Gap

if TYPE_CHECKING:
    import numpy as np

    from .sweep import Score, Swept

Y_LABELS = {"test_accuracy": "test accuracy (%)", "train_loss": "training loss", "test_loss": "test loss"}
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#000000", "#E69F00")
DARK = ("#4AA8E0", "#FF8C42", "#2CC49A", "#E39AC4", "#8FD0F5", "#FFFFFF", "#F2B72E")
"""The same seven colours for a dark background."""
LINES: tuple[Any, ...] = ("-", "--", "-.", (0, (1, 1.2)), (0, (5, 1, 1, 1, 1, 1)))
DASHES = ((), (8, 4), (8, 3, 2, 3), (2, 3), (10, 2, 2, 2, 2, 2))
"""`LINES` for the page, in pixels."""
MARKERS = "os^Dv*XPp<>h"
METADATA: dict[str, dict[str, Any]] = {
    "png": {"Software": None}, "svg": {"Date": None, "Creator": None}, "pdf": {"CreationDate": None},
}  # fmt: skip
"""Dates and versions are removed: the same figure must have the same bytes."""
WIDE = 10.0
"""The ratio of largest to smallest value from which an axis is logarithmic."""
TICKS = 12
"""The most values that each get a tick."""
MARKS = "o+x*#@%&=~ABCDEFGHIJKLMNPQRSTUVWYZ123456789"
"""One mark per method; no two look alike."""


def load_matplotlib() -> Any:
    """Import matplotlib without the `matplotlibrc` of the current folder.

    Its values are evaluated, and the folder may be a run directory of another user. Settings in `$MATPLOTLIBRC` or the
    home directory apply.
    """
    aside = Path(__file__).parent if "matplotlib" not in sys.modules and Path("matplotlibrc").exists() else Path()
    with contextlib.chdir(aside):
        import matplotlib
    return matplotlib


def can_draw(text: str) -> bool:
    """Return whether a text can be drawn; maths between dollars may be wrong."""
    if text.count("$") < 2:
        return True
    load_matplotlib()
    from matplotlib.mathtext import MathTextParser

    try:
        MathTextParser("path").parse(text)
    except ValueError:
        return False
    return True


def new_figure(width: float = 6.4, height: float = 4.0) -> tuple[Any, Any]:
    """Return a new figure and its axes."""
    load_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.add_subplot()


def style(i: int) -> dict[str, Any]:
    """Return the i-th style: seven colours that colour-blind readers can distinguish, repeated with other dashes."""
    return {"color": COLOURS[i % len(COLOURS)], "linestyle": LINES[i // len(COLOURS) % len(LINES)]}


def marker(i: int, points: int, of: int) -> dict[str, Any]:
    """Return about six marks for the i-th curve, at other places than those of the next curve."""
    every = max(1, points // 6)
    return {"marker": MARKERS[i % len(MARKERS)], "markersize": 4.5, "markevery": (every * i // max(1, of), every)}


def save(figure: Any, stem: Path, kinds: Sequence[str] = ("png", "svg", "pdf"), *, paper: bool = False) -> list[Path]:
    """Write `stem`.png, .svg, .pdf, each atomically and with the same bytes every time."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    return [save_as(figure, stem.with_name(f"{stem.name}.{kind}"), kind, paper=paper) for kind in kinds]


def save_as(figure: Any, path: Path, kind: str, *, paper: bool = False) -> Path:
    """Write one file of any name.

    Args:
        paper: as publishers ask: a PNG of 300 dots per inch, and a PDF whose fonts are TrueType, not Type 3.
    """
    fixed = {"svg.hashsalt": "fedspeed"}  # a fixed salt fixes the ids, and so the bytes, of an SVG
    with load_matplotlib().rc_context(fixed | ({"pdf.fonttype": 42} if paper else {})), atomic(path) as file:
        figure.savefig(file, format=kind, dpi=300 if paper else 150, metadata=METADATA[kind])
    return path


def draw_curves(rows: Sequence[Row], title: str = "", size: tuple[float, float] | None = None) -> Any:
    """Draw means over seeds in a band of one standard deviation against rounds; a diverged run ends in a cross.

    With a `size` in inches the figure is for a paper: small type, and the legend above the curves.
    """
    key, many = measured(rows), len(rows) > 4
    labels = [row.label + (f" ({row.diverged} of {len(row.runs)} diverged)" if row.diverged else "") for row in rows]
    aside = 0.6 + 0.075 * min(50, max(map(len, labels), default=0)) if many else 0.0
    scale = 100 if key == "test_accuracy" else 1
    with _type_of(size):
        figure, axes = new_figure(*(size or (6.4 + aside, max(4.0, 0.19 * len(rows) + 0.8))))
        for i, (row, label) in enumerate(zip(rows, labels, strict=True)):
            line = {**style(i), **marker(i, len(row.band(key)), len(rows)), "linewidth": 1.6, "zorder": 3}
            line |= {"linewidth": 1.0, "markersize": 3.0} if size else {}
            _draw_row(axes, row, key, scale, line, label, 1.5 / (8 + len(rows)))
        axes.set(xlabel="communication round", ylabel=Y_LABELS[key], title=title)
        axes.grid(alpha=0.3)
        axes.xaxis.get_major_locator().set_params(integer=True)
        limits = _limits(rows, key, scale)
        if limits and scale == 1:  # accuracies are bounded: the axis has all of them; losses may be huge at first
            axes.set_ylim(*limits)
        handles, names = axes.get_legend_handles_labels()
        clipped = list(map(_clipped, names))
        if size:
            columns = max(1, int(size[0] / (0.5 + 0.065 * max(map(len, clipped), default=1))))
            below = {"loc": "outside upper center", "ncols": min(len(names), columns) or 1}
            figure.legend(handles, clipped, frameon=False, handlelength=2.2, columnspacing=1.2, **below)
        elif many:
            figure.legend(handles, clipped, loc="outside right upper", frameon=False, fontsize=8, handlelength=3.2)
        elif handles:
            axes.legend(handles, clipped, framealpha=0.8, edgecolor="none", handlelength=3.2)
    return figure


def differences(
    found: Sequence[Gap], baseline: str, rows: Sequence[Row], size: tuple[float, float] | None = None
) -> Any:
    """Draw paired differences to the baseline with their intervals, in the first metric and the colours of the rows,
    as wide as the figure of curves beside it (`size`)."""
    width = size[0] if size else 6.4
    places = {row.label: i for i, row in enumerate(rows)}
    gaps = [gap for gap in found if gap.metric == found[0].metric and gap.values]
    scale = 100 if "accuracy" in found[0].metric else 1
    with _type_of(size):
        figure, axes = new_figure(width, (1.3 if width == 6.4 else 0.8) + 0.42 * max(1, len(gaps)))
        axes.axvline(0, color="0.5", linewidth=1, linestyle="--")
        for i, gap in enumerate(gaps):
            colour = style(places[gap.method])["color"]
            values = [scale * value for value in gap.values]
            axes.plot(values, [i + 0.22] * len(values), ".", color=colour, markersize=4, alpha=0.6)
            mean = statistics.fmean(values)
            ends = [[mean - scale * gap.low], [scale * gap.high - mean]] if len(values) > 1 else None
            axes.errorbar([mean], [i], xerr=ends, fmt="o", color=colour, capsize=4, markersize=6 if width == 6.4 else 4)
        _list_down(axes, [gap.method for gap in gaps])
        unit = "accuracy, points (mean of the last five)" if scale == 100 else "test loss"
        about = f"difference to {baseline}: {unit}, 95% interval"
        axes.set(xlabel=about if width >= 6 else textwrap.fill(about, int(12 * width)))
    return figure


def _type_of(size: tuple[float, float] | None) -> Any:
    """Return a context in which a figure for a paper has small type."""
    return load_matplotlib().rc_context({"font.size": 8} if size else {})


def _list_down(axes: Any, names: Sequence[str]) -> None:
    """Name the lines of a figure from the top down."""
    axes.set_yticks(range(len(names)), list(map(_clipped, names)))
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.grid(axis="x", alpha=0.3)


def _clipped(name: str) -> str:
    return name if len(name) <= 50 else f"{name[:49]}…"


def _draw_row(axes: Any, row: Row, key: str, scale: float, line: dict[str, Any], label: str, alpha: float) -> None:
    band = row.band(key)
    t, mean = [point[0] for point in band], [scale * point[1] for point in band]
    axes.plot(t, mean, **line, label=label)  # also if empty: the legend says why
    if len(row.runs) > 1:
        low, high = ([scale * (m + side * s) for _, m, s in band] for side in (-1, 1))
        axes.fill_between(t, low, high, color=line["color"], alpha=alpha, linewidth=0)
    for run in row.runs if row.diverged else ():
        curve = [(t, scale * value) for t, value in run.curve(key)]
        axes.plot(*zip(*curve, strict=True), color=line["color"], alpha=0.5, linewidth=0.7) if curve else None
        if curve and run.diverged:
            axes.plot(*curve[-1], "x", color=line["color"], markersize=9, markeredgewidth=2, zorder=4)


def _limits(rows: Sequence[Row], key: str, scale: float) -> tuple[float, float] | None:
    """Return the range of the curves after the first quarter of the rounds; the climb before it may be cut off."""
    bands = [band for row in rows if (band := row.band(key))]
    last = max((band[-1][0] for band in bands), default=0)
    settled = [scale * (m + side * s) for band in bands for t, m, s in band if 4 * t >= last for side in (-1, 1)]
    settled += [scale * run.curve(key)[-1][1] for row in rows for run in row.runs if run.diverged and run.curve(key)]
    if not settled or not max(settled) < 1e30:
        return None
    room = 0.06 * (max(settled) - min(settled)) or 0.01 * scale
    return min(settled) - room, max(settled) + room


def draw_sweep(found: Swept) -> Any:
    """Draw the figure that suits the number of fields that vary; points are never averaged."""
    from .sweep import is_problem

    names = list(found.varied)
    if len(names) == 1:
        return _sweep_curves(found, names[0])
    if len(names) == 2 and len(found.points) > 2:
        if any(map(is_problem, names)):
            return _sweep_curves(found, *sorted(names, key=is_problem))  # one curve per problem
        if all(set(names) <= set(point) for point in found.points):
            return _sweep_heat_map(found, *names)
    return _sweep_points(found)


def _is_plottable(value: Any) -> bool:
    """Whether an axis can show the value."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def logarithmic(values: Sequence[Any]) -> bool:
    """Whether values need a logarithmic axis.

    Example:
        >>> logarithmic([0.01, 0.1, 1]), logarithmic([1, 2, 3]), logarithmic([0, 0.1, 1])
        (True, False, False)
    """
    return bool(min(values) > 0 and max(values) >= WIDE * min(values))


def _sweep_curves(found: Swept, name: str, by: str = "") -> Any:
    """Draw the score over a field with its 95% interval; one curve per value of another field."""
    figure, axes = new_figure()
    values = found.varied[name]
    numbers = all(map(_is_plottable, values))
    places = {repr(value): value if numbers else i for i, value in enumerate(values)}
    groups = found.varied[by] if by else [None]
    for k, group in enumerate(groups):
        members = [i for i, point in enumerate(found.points) if name in point and (not by or point.get(by) == group)]
        drawn = [(places[repr(found.points[i][name])], found.scores[i]) for i in members if found.scores[i].values]
        drawn.sort(key=lambda pair: pair[0])
        means = [found.scale * score.mean for _, score in drawn]
        half = [_half(found, score) for _, score in drawn]
        label = f"{by.removeprefix('method.')}={group}" if by else None
        line = {**style(k), "marker": MARKERS[k % len(MARKERS)], "capsize": 4, "label": label}
        line |= {} if numbers else {"linestyle": "none"}
        axes.errorbar([place for place, _ in drawn], means, yerr=half, **line)
    if numbers and logarithmic(values):
        axes.set_xscale("log")
    if not numbers or len(values) <= TICKS:
        axes.set_xticks(list(places.values()), [str(value) for value in values])
        axes.minorticks_off()
    axes.set(xlabel=name.removeprefix("method."), ylabel=_score_label(found), title=_sweep_title(found, bars=True))
    axes.grid(alpha=0.3)
    if by:
        axes.legend(framealpha=0.8, edgecolor="none")
    return figure


def _sweep_heat_map(found: Swept, down: str, across: str) -> Any:
    """Draw the score over two fields, one number per cell; the best has a frame, missing points are blank."""
    both = (found.varied[name] for name in (down, across))
    rows, columns = (sorted(values) if all(map(_is_plottable, values)) else values for values in both)
    cells = [[math.nan] * len(columns) for _ in rows]
    for point, score in zip(found.points, found.scores, strict=True):
        cells[rows.index(point[down])][columns.index(point[across])] = found.scale * score.mean
    figure, axes = new_figure(max(4.8, 1.6 + 0.9 * len(columns)), max(3.2, 1.4 + 0.5 * len(rows)))
    from matplotlib.patches import Rectangle  # after `new_figure`, which imports matplotlib safely

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
        axes.add_patch(Rectangle(corner, 1, 1, fill=False, edgecolor="#D55E00", linewidth=2.5, clip_on=False, zorder=3))
    axes.set_xticks(range(len(columns)), [str(value) for value in columns])
    axes.set_yticks(range(len(rows)), [str(value) for value in rows])
    axes.set(xlabel=across.removeprefix("method."), ylabel=down.removeprefix("method."), title=_sweep_title(found))
    figure.colorbar(image, ax=axes, label=_score_label(found))
    return figure


def _sweep_points(found: Swept) -> Any:
    """Draw every point with its 95% interval, one below the other."""
    figure, axes = new_figure(6.4, 1.3 + 0.3 * max(1, len(found.rows)))
    first = {best.label for best in found.best}
    for i, (row, score) in enumerate(zip(found.rows, found.scores, strict=True)):
        if score.values:
            colour = style(1 if row.label in first else 0)["color"]
            mean, ends = found.scale * score.mean, _half(found, score)
            axes.errorbar([mean], [i], xerr=ends, fmt="o", color=colour, capsize=4)
    _list_down(axes, [row.label for row in found.rows])
    axes.set(xlabel=_score_label(found), title=_sweep_title(found, bars=True))
    return figure


def _half(found: Swept, score: Score) -> float:
    """Return half the 95% interval of a score; 0 where there is none."""
    half = found.scale * (score.bounds[1] - score.mean)
    return half if math.isfinite(half) else 0.0


def _score_label(found: Swept) -> str:
    return f"{found.on} accuracy (%), last-5 mean" if found.accuracy else f"{found.on} loss"


def _sweep_title(found: Swept, bars: bool = False) -> str:
    seeds = f"{seeds_of(found.rows)} per point{', 95% interval' if bars and seeds_of(found.rows) != '1 seed' else ''}"
    where = setting(found.rows)
    return f"{where}\n{seeds}" if where else seeds


def heat_map(counts: np.ndarray, path: Path, title: str = "", names: Sequence[str] = ()) -> Path:
    """Draw clients along x, classes along y, colour = samples of the class at the client (Figure 3 of the paper).

    Args:
        counts: samples of every class (columns) at every client (rows).
        names: the class names, shown if they fit.
    """
    clients, classes = counts.shape
    figure, axes = new_figure(max(4.0, min(16.0, 2.5 + 0.07 * clients)), max(2.6, min(9.0, 1.6 + 0.09 * classes + 1)))
    shown = axes.imshow(counts.T, aspect="auto", cmap="YlGnBu", interpolation="nearest", origin="lower", vmin=0)
    _label_split(axes, classes, title, names)
    figure.colorbar(shown, ax=axes, label="samples")
    return save(figure, path.with_suffix(""), ["png"])[0]


def bubbles(counts: np.ndarray, path: Path, title: str = "", names: Sequence[str] = (), most: int = 30) -> Path:
    """Draw one circle per (client, class), its area proportional to the samples, for the first `most` clients."""
    part = counts[:most]
    clients, classes = part.shape
    figure, axes = new_figure(max(4.0, min(14.0, 2.0 + 0.26 * clients)), max(2.8, min(16.0, 1.4 + 0.24 * classes)))
    client, label = part.nonzero()
    held = part[client, label]
    axes.scatter(client, label, s=160 * held / held.max(), alpha=0.75, linewidths=0)
    axes.set_xlim(-0.7, clients - 0.3)
    axes.set_ylim(-0.7, classes - 0.3)
    axes.grid(alpha=0.2)
    axes.set_axisbelow(True)
    first = f" (first {most} of {len(counts)} clients)" if len(counts) > most else ""
    _label_split(axes, classes, title + first, names)
    return save(figure, path.with_suffix(""), ["png"])[0]


def _label_split(axes: Any, classes: int, title: str, names: Sequence[str]) -> None:
    axes.set(xlabel="client", ylabel="class", title=title)
    if len(names) == classes <= 30:
        axes.set_yticks(range(classes), names)
    elif classes <= 20:
        axes.set_yticks(range(classes))


def chart(rows: Sequence[Row], width: int = 81, height: int = 14) -> str:
    """Return mean accuracy over rounds drawn with characters, at most `width` (and 81) wide; one mark per method."""
    return draw_text([(row.label, [(t, mean) for t, mean, _ in row.band()]) for row in rows], "round", width, height)


def draw_text(
    drawn: Sequence[tuple[str, Sequence[tuple[float, float]]]], unit: str, width: int = 81, height: int = 14
) -> str:
    """Return named curves of shares drawn with characters, over an axis in `unit`."""
    wide = max(10, min(72, width - 9))
    curves = [(mark, label, curve) for mark, (label, curve) in zip(MARKS, drawn, strict=False) if curve]
    points = [point for _, _, curve in curves for point in curve]
    if not points:
        return ""
    last = max(t for t, _ in points)
    settled = [value for t, value in points if 4 * t >= last]  # the climb of the first quarter may be cut off
    low, high = math.floor(min(settled) * 20) / 20, math.ceil(max(value for _, value in points) * 20) / 20
    high = high if high > low else low + 0.05
    grid = [[" "] * wide for _ in range(height)]
    for mark, _, curve in curves:
        for t, value in curve:
            column = round((t / last) * (wide - 1))
            row = round((high - value) / (high - low) * (height - 1))
            if row < height:
                grid[row][column] = mark
    lines = []
    for i, cells in enumerate(grid):
        level = high - (high - low) * i / (height - 1)
        axis = f"{level:7.0%} |" if i % 3 == 0 or i == height - 1 else "        |"
        lines.append((axis + "".join(cells)).rstrip())
    lines += ["        +" + "-" * wide, "         0" + f"{unit} {last:g}".rjust(wide - 1)]
    names = [f"{mark} {label}" for mark, label, _ in curves]
    names += [f"({len(drawn) - len(MARKS)} more are in the table)"] if len(drawn) > len(MARKS) else []
    return "\n".join([*lines, *_legend(names, wide)])


def _legend(names: list[str], wide: int) -> list[str]:
    """Return the names in as few lines as possible; a name that is too long takes several."""
    lines = [""]
    for name in names:
        joined = f"{lines[-1]}   {name}" if lines[-1] else name
        if len(joined) <= wide:
            lines[-1] = joined
        else:
            first, *rest = textwrap.wrap(name, wide, break_on_hyphens=False)
            lines += [first, *rest]
    return [" " * 9 + line for line in lines if line]
