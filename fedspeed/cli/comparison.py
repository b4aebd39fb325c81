"""A comparison on a screen that fits the terminal."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

from ..report import tables
from ..report.chart import chart

if TYPE_CHECKING:
    from rich.console import Console

    from ..report.comparison import Comparison

FILES = "table.md, .csv, .tex and .json; accuracy.png, .svg and .pdf"


def show(found: Comparison, console: Console, out: Path) -> None:
    """Table, differences and chart; columns there is no room for are named."""
    wide = console.width if console.is_terminal else 10_000
    keep = [column.keep for column in tables.columns(found.rows, found.targets)]
    text, dropped = tables.fit(*found.table, keep, wide)
    parts = [text, ""]
    if dropped:
        parts.append(textwrap.fill(f"no room for {', '.join(dropped)}: see {out / 'table.md'}", wide))
    parts.append(textwrap.fill(found.note, wide))
    parts.append(textwrap.fill(found.settings, wide))
    if found.gaps:
        parts += [
            "",
            textwrap.fill(f"{found.question}:", wide),
            tables.fit(*found.gap_table, tables.GAP_KEEP, wide)[0],
        ]
    drawing = chart(found.rows, console.width)
    parts += ["", drawing] if drawing else []
    parts += ["", textwrap.fill(f"files: {FILES}", wide), f"   in: {out}"]
    console.print("\n" + "\n".join(parts), no_wrap=True, overflow="ignore", crop=False)
