"""Curves drawn with characters."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence

from .runs import Row

MARKS = "o+x*#@%&=~ABCDEFGHIJKLMNPQRSTUVWYZ123456789"
"""One per method; no two look alike."""


def chart(rows: Sequence[Row], width: int = 81, height: int = 14) -> str:
    """Mean accuracy against rounds, at most `width` (and 81) wide; one mark per method, as far as there are marks."""
    return draw([(row.label, row.mean_curve()) for row in rows], "round", width, height)


def draw(
    drawn: Sequence[tuple[str, Sequence[tuple[float, float]]]], unit: str, width: int = 81, height: int = 14
) -> str:
    """Curves of shares, each with its name, against something counted in `unit`."""
    wide = max(10, min(72, width - 9))
    curves = [(mark, label, curve) for mark, (label, curve) in zip(MARKS, drawn, strict=False) if curve]
    points = [point for _, _, curve in curves for point in curve]
    if not points:
        return ""
    last = max(t for t, _ in points)
    settled = [value for t, value in points if 4 * t >= last]  # the climb of the first quarter may leave the picture
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
    lines.append("        +" + "-" * wide)
    lines.append("         0" + f"{unit} {last:g}".rjust(wide - 1))
    names = [f"{mark} {label}" for mark, label, _ in curves]
    names += [f"({len(drawn) - len(MARKS)} more are in the table)"] if len(drawn) > len(MARKS) else []
    return "\n".join([*lines, *_legend(names, wide)])


def _legend(names: list[str], wide: int) -> list[str]:
    """Names in as few lines as they need; one that is too long takes several."""
    lines = [""]
    for name in names:
        joined = f"{lines[-1]}   {name}" if lines[-1] else name
        if len(joined) <= wide:
            lines[-1] = joined
        else:
            first, *rest = textwrap.wrap(name, wide, break_on_hyphens=False)
            lines += [first, *rest]
    return [" " * 9 + line for line in lines if line]
