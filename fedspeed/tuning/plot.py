"""The figure "best method at budget B", and beside it how the chosen points were judged."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..report.figures import MARKERS, new_figure, save, style

if TYPE_CHECKING:
    from .result import Tuned


def draw(tuned: Tuned, stem: Path) -> list[Path]:
    """`stem`.png, .svg and .pdf, the same bytes every time."""
    figure, first = new_figure(9.4, 4.0)
    first.remove()
    left, right = figure.subplots(1, 2, width_ratios=(1.7, 1))
    curves = tuned.best_so_far
    scale = 100 if all(y >= 0 for curve in curves.values() for _, y in curve) else 1
    unit = "accuracy (%)" if scale == 100 else "score (minus the loss)"
    for i, (label, curve) in enumerate(curves.items()):
        spent = [x for x, _ in curve] + [tuned.spent[label]]
        best = [scale * y for _, y in curve] + [scale * curve[-1][1] if curve else 0.0]
        line = {**style(i), "marker": MARKERS[i % len(MARKERS)], "markersize": 4.5, "linewidth": 1.6}
        left.step(spent if curve else [], best if curve else [], where="post", label=label, **line)
    left.set(xlabel="gradients spent on tuning", ylabel=f"held-out {unit}, best point so far")
    left.set_title("best method at budget B", fontsize=10)
    left.set_xlim(0, 1.02 * tuned.used["budget"])
    _judged(right, tuned)
    for panel in (left, right):
        panel.grid(alpha=0.3)
    handles, names = left.get_legend_handles_labels()
    left.legend(handles, names, framealpha=0.8, edgecolor="none", handlelength=3.0, fontsize=8, loc="lower right")
    return save(figure, stem, ("png", "svg", "pdf"))


def _judged(panel: Any, tuned: Tuned) -> None:
    places = {label: i for i, label in enumerate(tuned.chosen)}
    losses = any(one["metric"] == "last_test_loss" for one in tuned.judged)
    scale = 1 if losses else 100
    for one in tuned.judged:
        if one["mean"] is None:
            continue
        i = places[one["method"]]
        mean = scale * one["mean"]
        ends = None if one["low"] is None else [[mean - scale * one["low"]], [scale * one["high"] - mean]]
        panel.errorbar([i], [mean], yerr=ends, fmt=MARKERS[i % len(MARKERS)], color=style(i)["color"], capsize=4)
    panel.set_xticks(range(len(places)), list(places), rotation=20 if len(places) > 2 else 0, fontsize=8)
    panel.set_xlim(-0.6, len(places) - 0.4)
    panel.set_ylabel("test loss" if losses else "test accuracy (%), mean of the last five")
    panel.set_title(f"judged on {len(tuned.used['judging_seeds'])} fresh seeds, 95% interval", fontsize=10)
