"""The O(1/T) experiment: FedSpeed under the conditions of a form for growing T, with K = O(T), beside the bound."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..data.problems import Problem
from ..errors import UserError
from .bounds import Bound, Start, bound, schedule
from .runs import NAMES, run
from .setting import Setting

CONDITIONS = ("printed", "corrected", "tracking", "free")
TITLES = {"fedspeed": "FedSpeed at z", "fedavg": "FedAvg", "scaffold": "SCAFFOLD"}
STYLES = {"fedspeed": ("C3", "o", "-"), "fedavg": ("C0", "s", "-"), "scaffold": ("C2", "^", "--")}


class Fit(NamedTuple):
    """The fit log value = slope log T + constant; `error` is two standard errors, of the line and over the seeds."""

    slope: float
    error: float

    def includes(self, slope: float) -> bool:
        """Return whether a slope lies inside the error bar."""
        return abs(self.slope - slope) <= self.error


class Curve(NamedTuple):
    """A method's average of ||grad F||^2 for every T: (len(T), seeds), over all rounds and over the last quarter."""

    method: str
    average: np.ndarray
    tail: np.ndarray


class Rate(NamedTuple):
    """One experiment: settings and bounds by T (none under `free`), one curve per method, and the fits."""

    form: str
    settings: tuple[Setting, ...]
    bounds: tuple[Bound, ...]
    curves: tuple[Curve, ...]

    @property
    def T(self) -> np.ndarray:
        """The numbers of rounds."""
        return np.array([s.T for s in self.settings])

    def fit(self, method: str, tail: bool = False) -> Fit:
        """Return the measured slope of a method."""
        curve = next(c for c in self.curves if c.method == method)
        return power_law(self.T, curve.tail if tail else curve.average)

    def last(self, method: str) -> float:
        """Return the slope between the two largest T, where the start has the least influence."""
        curve = next(c for c in self.curves if c.method == method)
        return power_law(self.T[-2:], curve.average[-2:]).slope

    @property
    def bound_fit(self) -> Fit:
        """The slope of the bound."""
        return power_law(self.T, np.array([[b.total] for b in self.bounds]))

    @property
    def worst(self) -> float:
        """The largest measured average of FedSpeed over its bound: above 1 the bound would be violated."""
        curve = next(c for c in self.curves if c.method == "fedspeed")
        return float((curve.average.mean(1) / [b.total for b in self.bounds]).max())


def power_law(T: np.ndarray, values: np.ndarray) -> Fit:
    """Fit log mean(values) to log T by least squares, with an error bar.

    The error combines the standard error of the line (from its residuals) and, with several seeds, the jackknife's;
    values is (len(T), seeds), positive.

    Example:
        >>> power_law(np.array([1, 2, 4, 8]), np.array([[8.0], [4.0], [2.0], [1.0]])).slope
        -1.0
    """
    t = np.log(np.asarray(T, dtype=np.float64))
    if len(t) < 2 or np.ptp(t) == 0:
        raise UserError(f"power_law: expected at least two different T, got {np.unique(T).tolist()}; give more")
    if not (values > 0).all():
        raise UserError("power_law: expected positive values, found one that is not; log axes cannot show it")
    t = t - t.mean()

    def slope(part: np.ndarray) -> float:
        return float(t @ np.log(part.mean(1)) / (t @ t))

    best = slope(values)
    n, seeds = values.shape
    y = np.log(values.mean(1))
    residual = y - y.mean() - best * t
    variance = float(residual @ residual / (n - 2) / (t @ t)) if n > 2 else 0.0
    if seeds > 1:
        left_out = [slope(np.delete(values, r, axis=1)) for r in range(seeds)]
        variance += (seeds - 1) * float(np.var(left_out))
    return Fit(round(best, 12), 2 * math.sqrt(variance))


def rate(
    problem: Problem,
    form: str,
    T: Sequence[int],
    *,
    distance: float = 1.0,
    batch: int = 1,
    seeds: int = 8,
    seed: int = 0,
    fraction: float = 0.6,
    per_round: int = 1,
    rho: float = 0.1,
    alpha: float = 1.0,
    lam: float = 4.0,
    progress: Callable[[str, int], None] | None = None,
) -> Rate:
    """Run FedSpeed, FedAvg and SCAFFOLD with the same eta and K under the corollary's schedule for every T.

    FedSpeed is measured at z^t, the points of the theorem, the others at x^t. Under `printed` the average runs over
    t = 1..T-1 and is divided by T as printed; otherwise over t = 0..T-1.

    Args:
        form: of conditions and bound: `printed`, `corrected` or `tracking`; `free` uses the given lam and has no bound.
        T: numbers of rounds.
        distance: the distance of x^0 from x*; at 0 only noise and heterogeneity remain.
        batch: minibatch size, 0 for full batches (one seed is then enough).
        fraction: the fraction of the largest lam that the conditions allow.
        per_round: K/T.
        rho: rho_0 in units of 1/(alpha L); the step is rho_0/sqrt(T).
        lam: for `free`, in units of 1/L.
        progress: called as `progress(method, T)` before each run.
    """
    rounds = sorted({int(t) for t in T})
    _check(problem, form, rounds, alpha)
    v = np.random.default_rng([seed, 11]).normal(size=problem.d)
    x0 = problem.optimum + distance * (v / np.linalg.norm(v))
    noise = problem.sigma_l(batch) if batch else 0.0
    base = Setting(
        eta=lam / problem.L, lam=lam / problem.L, L=problem.L, alpha=alpha, rho=rho / (alpha * problem.L), m=problem.m,
        sigma_l=noise, sigma_g=problem.sigma_g,
    )  # fmt: skip
    settings = tuple(
        schedule(base.but(T=t), form, fraction=fraction, per_round=per_round, base=rounds[0]) for t in rounds
    )
    repeats, first = seeds if noise else 1, 1 if form == "printed" else 0
    bounds: list[Bound] = []
    averages: dict[str, tuple[list[np.ndarray], list[np.ndarray]]] = {name: ([], []) for name in NAMES}
    for s in settings:
        if form != "free":
            bounds.append(bound(s, _start(problem, s, x0, batch, repeats, seed, first), form))
        for name in NAMES:
            if progress:
                progress(name, s.T)
            trace = run(name, problem, s, x0, batch=batch if noise else 0, seeds=repeats, seed=seed)
            points = (trace.z if name == "fedspeed" else trace.x)[:-1]
            g = problem.gradient(np.broadcast_to(points[:, :, None], (*points.shape[:2], problem.m, problem.d)))
            square = np.square(g.mean(2)).sum(-1)  # (T, seeds)
            averages[name][0].append(square[first:].sum(0) / s.T)
            averages[name][1].append(square[-max(s.T // 4, 1) :].mean(0))
    curves = tuple(Curve(name, np.array(a), np.array(b)) for name, (a, b) in averages.items())
    return Rate(form, settings, tuple(bounds), curves)


def _check(problem: Problem, form: str, rounds: list[int], alpha: float) -> None:
    if form not in CONDITIONS:
        reason = "; `consistent` needs eta >= lam/2, which eta = O(1/K) cannot meet (erratum 13)"
        raise UserError(
            f"rate: the conditions must be one of {', '.join(CONDITIONS)}, got {form!r}"
            f"{reason if form == 'consistent' else ''}"
        )
    if len(rounds) < 2 or rounds[0] < 2:
        raise UserError(f"rate: T must hold at least two different numbers >= 2, got {rounds}")
    if not 0 < alpha <= 1:
        raise UserError(f"rate: alpha must lie in (0, 1], got {alpha:g}; use rho=0 to leave the perturbation out")
    if not math.isfinite(problem.sigma_g):
        raise UserError("rate: sigma_g is infinite on this problem, so (A3) fails; share the Hessian, or use logistic")


def start_at(problem: Problem, x0: np.ndarray) -> Start:
    """Return the start t = 0, where z^0 = x^0 and all corrections are 0."""
    g = problem.gradient(np.broadcast_to(x0, (problem.m, problem.d)))
    return Start(float(problem.value(x0)) - problem.minimum, tracking=float(np.square(g).sum(-1).mean()))


def _start(problem: Problem, s: Setting, x0: np.ndarray, batch: int, seeds: int, seed: int, first: int) -> Start:
    if not first:
        return start_at(problem, x0)
    trace = run("fedspeed", problem, s.but(T=1), x0, batch=batch if s.sigma_l else 0, seeds=seeds, seed=seed, keep=True)
    assert trace.ghat is not None
    z, ghat = trace.z[1], trace.ghat[0]
    own = problem.gradient(np.broadcast_to(z[:, None], ghat.shape))
    return Start(
        float(problem.value(z).mean()) - problem.minimum,
        float(np.square(ghat).sum(-1).mean()),
        float(np.square(ghat.mean(1)).sum(-1).mean()),
        float(np.square(ghat - own).sum(-1).mean()),
    )


def rate_figure(rates: Sequence[Rate], stem: Path, title: str = "") -> Path:
    """Draw one panel per form: the average of ||grad F||^2 against T on log axes, beside the bound; return the path."""
    from ..report.figures import new_figure, save

    figure, first = new_figure(4.0 * len(rates), 3.9)
    first.remove()
    for i, rate in enumerate(rates):
        axes = figure.add_subplot(1, len(rates), i + 1)
        for curve in rate.curves:
            colour, marker, line = STYLES[curve.method]
            mean, seeds = curve.average.mean(1), curve.average.shape[1]
            error = 2 * curve.average.std(1, ddof=1) / seeds**0.5 if seeds > 1 else None
            fit = rate.fit(curve.method)
            label = f"{TITLES[curve.method]}: {fit.slope:.2f} ± {fit.error:.2f}"
            axes.errorbar(rate.T, mean, error, color=colour, marker=marker, linestyle=line, ms=4, lw=1.2, label=label)
        if rate.bounds:
            bounds = [b.total for b in rate.bounds]
            axes.plot(rate.T, bounds, "k:", label=f"bound: {rate.bound_fit.slope:.2f}")
        top = rate.curves[0].average.mean(1)[0]
        axes.plot(rate.T, top * rate.T[0] / rate.T, color="0.7", lw=0.8, label="slope -1")
        axes.set(xscale="log", yscale="log")
        axes.set_xticks(rate.T, [str(t) for t in rate.T])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
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
