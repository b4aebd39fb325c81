"""HTML of a run for notebooks: a table of facts and curves, without scripts or external files."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from ..record import Record


def card(title: str, facts: dict[str, Any], records: Sequence[Record]) -> str:
    """Return a title, a table of facts, and the curves of accuracy and loss as HTML."""
    texts = {key: f"{value:.6g}" if isinstance(value, float) else str(value) for key, value in facts.items()}
    lines = [f"<tr><th>{escape(key)}</th><td>{escape(text)}</td></tr>" for key, text in texts.items()]
    table = f"<table>{''.join(lines)}</table>" if lines else ""
    curves = [_curve(name, records) for name in ("test_accuracy", "train_loss")]
    return f"<div><p><b>{escape(title)}</b></p>{table}{''.join(curves)}</div>"


def _curve(name: str, records: Sequence[Record], wide: int = 360, high: int = 90) -> str:
    """Draw one field against rounds, from its lowest to its highest value; "" with fewer than two values."""
    points = [(record.round, value) for record in records if (value := record.to_dict()[name]) is not None]
    if len(points) < 2:
        return ""
    low, top = min(value for _, value in points), max(value for _, value in points)
    first, last = points[0][0], points[-1][0]
    at = [
        f"{(t - first) / (last - first) * wide:.1f},{high - (v - low) / ((top - low) or 1) * high:.1f}"
        for t, v in points
    ]
    line = f'<polyline points="{" ".join(at)}" fill="none" stroke="#0072b2" stroke-width="1.5"/>'
    svg = f'<svg viewBox="-2 -2 {wide + 4} {high + 4}" width="{wide}" height="{high}" role="img">{line}</svg>'
    return f"<p>{name}, rounds {first} to {last}: {low:.4g} to {top:.4g}, last {points[-1][1]:.4g}</p>{svg}"
