"""Figures as files, with matplotlib's file back end: no display is needed."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Any

from .runs import Row

Y_LABELS = {"test_accuracy": "test accuracy (%)", "train_loss": "training loss", "test_loss": "test loss"}


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


def curves(rows: list[Row], path: Path, key: str = "test_accuracy", title: str = "") -> Path:
    """Mean over seeds against the round, with every seed drawn thin behind it."""
    figure, axes = new_figure()
    scale = 100 if key == "test_accuracy" else 1
    for i, row in enumerate(rows):
        colour = f"C{i % 10}"
        for run in row.runs:
            _plot(axes, run.curve(key), scale, color=colour, alpha=0.25, linewidth=0.8)
        _plot(axes, row.mean_curve(key), scale, color=colour, linewidth=1.8, label=row.label)
    axes.set(xlabel="communication round", ylabel=Y_LABELS[key], title=title)
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    return path


def _plot(axes: Any, curve: list[tuple[int, float]], scale: float, **style: Any) -> None:
    if curve:
        axes.plot([t for t, _ in curve], [scale * value for _, value in curve], **style)
