"""Pictures of a split: the paper's Figure 3 (label heat map) and a bubble plot. Counts in, PNG out; no torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .figures import new_figure, save


def heat_map(counts: np.ndarray, path: Path, title: str = "", names: Sequence[str] = ()) -> Path:
    """Clients along x, classes along y, colour = samples of the class at the client (Figure 3 of the paper).

    Args:
        counts: samples of every class (columns) at every client (rows).
        path: the PNG to write.
        names: of the classes, shown where they fit.
    """
    clients, classes = counts.shape
    figure, axes = new_figure(max(4.0, min(16.0, 2.5 + 0.07 * clients)), max(2.6, min(9.0, 1.6 + 0.09 * classes + 1)))
    shown = axes.imshow(counts.T, aspect="auto", cmap="YlGnBu", interpolation="nearest", origin="lower", vmin=0)
    _label(axes, classes, title, names)
    figure.colorbar(shown, ax=axes, label="samples")
    return save(figure, path.with_suffix(""), ["png"])[0]


def bubbles(counts: np.ndarray, path: Path, title: str = "", names: Sequence[str] = (), most: int = 30) -> Path:
    """A circle a (client, class), its area proportional to the samples; the first `most` clients."""
    part = counts[:most]
    clients, classes = part.shape
    figure, axes = new_figure(max(4.0, min(14.0, 2.0 + 0.26 * clients)), max(2.8, min(16.0, 1.4 + 0.24 * classes)))
    client, label = np.nonzero(part)
    held = part[client, label]
    axes.scatter(client, label, s=160 * held / held.max(), alpha=0.75, linewidths=0)
    axes.set_xlim(-0.7, clients - 0.3)
    axes.set_ylim(-0.7, classes - 0.3)
    axes.grid(alpha=0.2)
    axes.set_axisbelow(True)
    first = f" (first {most} of {len(counts)} clients)" if len(counts) > most else ""
    _label(axes, classes, title + first, names)
    return save(figure, path.with_suffix(""), ["png"])[0]


def _label(axes: Any, classes: int, title: str, names: Sequence[str]) -> None:
    axes.set(xlabel="client", ylabel="class", title=title)
    if len(names) == classes <= 30:
        axes.set_yticks(range(classes), names)
    elif classes <= 20:
        axes.set_yticks(range(classes))
