"""Figure of the measured rates beside their bounds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..report.figures import new_figure, save
from .experiment import Rate

NAMES = {"fedspeed": "FedSpeed at z", "fedavg": "FedAvg", "scaffold": "SCAFFOLD"}
STYLES = {"fedspeed": ("C3", "o", "-"), "fedavg": ("C0", "s", "-"), "scaffold": ("C2", "^", "--")}


def rate_figure(rates: Sequence[Rate], stem: Path, title: str = "") -> Path:
    """Draw one panel per form: the average of ||grad F||^2 against T on log axes, beside the bound; return the path."""
    figure, first = new_figure(4.0 * len(rates), 3.9)
    first.remove()
    for i, rate in enumerate(rates):
        axes = figure.add_subplot(1, len(rates), i + 1)
        for curve in rate.curves:
            colour, marker, line = STYLES[curve.method]
            mean, seeds = curve.average.mean(1), curve.average.shape[1]
            error = 2 * curve.average.std(1, ddof=1) / seeds**0.5 if seeds > 1 else None
            fit = rate.fit(curve.method)
            label = f"{NAMES[curve.method]}: {fit.slope:.2f} ± {fit.error:.2f}"
            axes.errorbar(rate.T, mean, error, color=colour, marker=marker, linestyle=line, ms=4, lw=1.2, label=label)
        if rate.bounds:
            bounds = [b.total for b in rate.bounds]
            axes.plot(rate.T, bounds, "k:", label=f"bound: {rate.bound_fit.slope:.2f}")
        top = rate.curves[0].average.mean(1)[0]
        axes.plot(rate.T, top * rate.T[0] / rate.T, color="0.7", lw=0.8, label="slope -1")
        _log(axes, rate.T)
        lams = [s.lam * s.L for s in rate.settings]
        shown = f"{lams[0]:.2g}" if lams[0] == lams[-1] else f"{lams[0]:.2g} to {lams[-1]:.2g}"
        axes.set(xlabel="rounds T (K = O(T))", title=f"conditions `{rate.form}`, lam L = {shown}")
        axes.title.set_fontsize(9)
        axes.legend(frameon=False, fontsize=7, title="slope on log axes", title_fontsize=7)
        if i == 0:
            axes.set_ylabel("average of ||grad F||^2")
    if title:
        figure.suptitle(title, fontsize=10)
    return save(figure, stem, ["png"])[0]


def _log(axes: Any, T: Any) -> None:
    axes.set(xscale="log", yscale="log")
    axes.set_xticks(T, [str(t) for t in T])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
