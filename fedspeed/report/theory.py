"""Figures of the theory: the measured rates beside their bounds, the counterexample, the perturbation's order."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..files import atomic
from .figures import new_figure

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..theory.counterexample import Counterexample
    from ..theory.experiment import Rate
    from ..theory.perturbation import Perturbation

NAMES = {"fedspeed": "FedSpeed at z", "fedavg": "FedAvg", "scaffold": "SCAFFOLD"}
STYLES = {"fedspeed": ("C3", "o", "-"), "fedavg": ("C0", "s", "-"), "scaffold": ("C2", "^", "--")}


def rate_figure(rates: Sequence[Rate], path: Path, title: str = "") -> Path:
    """One panel a set of conditions: the average of ||grad F||^2 against T on log axes, beside the bound."""
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
    return _save(figure, path)


def perturbation_figure(found: Perturbation, path: Path) -> Path:
    """The distance between the quasi-gradient and each penalised loss's gradient, against rho."""
    figure, axes = new_figure(5.2, 3.8)
    for i, (name, error) in enumerate(found.error.items()):
        fit = found.order[name]
        label = f"{name}: order {fit.slope:.2f} ± {fit.error:.2f}"
        axes.plot(found.rho, error, marker="o", ms=4, color=f"C{i}", label=label)
    axes.set(xscale="log", yscale="log", xlabel="rho", ylabel="||g_tilde - gradient of L + penalty||")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize=8)
    return _save(figure, path)


def counterexample_figure(found: Sequence[Counterexample], path: Path) -> Path:
    """The running average of |F'(z^t)|^2 beside the printed bound, for every T up to the run's, a curve a lam."""
    import numpy as np

    from ..theory.bounds import bound

    figure, axes = new_figure(5.2, 3.8)
    for i, each in enumerate(found):
        T = np.unique(np.geomspace(2, each.setting.T, 60).astype(int))
        running = np.cumsum(each.squares)[T - 2] / T
        limits = [bound(each.setting.but(T=int(t)), each.start, "printed").total for t in T]
        axes.plot(T, running, color=f"C{i}", label=f"lam L = {each.setting.lam:g}: seen")
        axes.plot(T, limits, color=f"C{i}", linestyle=":", label=f"lam L = {each.setting.lam:g}: printed bound")
    axes.set(xscale="log", yscale="log", xlabel="rounds T", ylabel="(1/T) sum of |F'(z)|^2")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize=8)
    return _save(figure, path)


def _log(axes: Any, T: Any) -> None:
    axes.set(xscale="log", yscale="log")
    axes.set_xticks(T, [str(t) for t in T])
    axes.minorticks_off()
    axes.grid(alpha=0.3)


def _save(figure: Any, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic(path) as file:
        figure.savefig(file, format=path.suffix[1:], dpi=110)
    return path
