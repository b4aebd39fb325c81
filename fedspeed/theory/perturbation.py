"""The gradient-perturbation view: the quasi-gradient as the gradient of a loss with a penalty on ||grad L||."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..data.problems import Logistic
from ..errors import UserError
from .experiment import Fit, power_law

PENALTIES = {
    "(beta/2) ||grad L||^2": "plain rho, beta = alpha rho: the appendix",
    "beta ||grad L||^2": "plain rho, beta = alpha rho: the main text (erratum 16)",
    "beta ||grad L||": "normalised rho, beta = alpha rho: what the experiments use",
}


class Perturbation(NamedTuple):
    """||g_tilde - grad(L + penalty)|| by rho and penalty, its measured order, and the penalty's own effect."""

    rho: np.ndarray
    error: dict[str, np.ndarray]
    effect: dict[str, np.ndarray]
    order: dict[str, Fit]


def quasi_gradient_orders(
    problem: Logistic, rho: Sequence[float], *, alpha: float = 1.0, seed: int = 0
) -> Perturbation:
    """Compare g_tilde = (1-alpha) g(x) + alpha g(x + rho g(x)) with the gradients of the penalised losses.

    g_tilde = g + alpha rho H g + (alpha rho^2/2) D^3 L[g, g] + ..., and grad (beta/2)||grad L||^2 = beta H g. So with
    beta = alpha rho the error of the appendix's penalty is O(alpha rho^2), one order below the penalty's effect; on a
    quadratic it is 0. L is the mean loss of the problem; means over ten random points.

    Args:
        rho: decreasing steps, in units of 1/L.

    Example:
        >>> from ..data.problems import random_logistic
        >>> p = quasi_gradient_orders(random_logistic(m=2, d=3), [0.1, 0.05, 0.025, 0.0125])
        >>> [round(fit.slope) for fit in p.order.values()]
        [2, 1, 2]
    """
    steps = np.array(sorted(rho, reverse=True), dtype=np.float64)
    if len(steps) < 2 or not (steps > 0).all() or not 0 < alpha <= 1:
        raise UserError(
            f"perturbation: expected at least two rho > 0 and alpha in (0, 1], got rho {list(rho)} and alpha {alpha:g}"
        )
    steps = steps / problem.L
    r = np.random.default_rng([seed, 13])
    points = problem.optimum + r.normal(size=(10, problem.d))

    def grad(x: np.ndarray) -> np.ndarray:
        mean: np.ndarray = problem.gradient(np.broadcast_to(x, (problem.m, problem.d))).mean(0)
        return mean

    error = {name: np.zeros((len(steps), len(points))) for name in PENALTIES}
    effect = {name: np.zeros((len(steps), len(points))) for name in PENALTIES}
    half, full, norm = PENALTIES
    for j, x in enumerate(points):
        g = grad(x)
        size = float(np.linalg.norm(g))
        Hg = problem.hessian(x) @ g
        for i, step in enumerate(steps):
            beta = alpha * float(step)
            plain = (1 - alpha) * g + alpha * grad(x + step * g)
            unit = (1 - alpha) * g + alpha * grad(x + step * g / size)
            for name, quasi, extra in (
                (half, plain, beta * Hg),
                (full, plain, 2 * beta * Hg),
                (norm, unit, beta * Hg / size),
            ):
                error[name][i, j] = np.linalg.norm(quasi - g - extra)
                effect[name][i, j] = np.linalg.norm(extra)
    return Perturbation(
        steps,
        {name: values.mean(1) for name, values in error.items()},
        {name: values.mean(1) for name, values in effect.items()},
        {name: power_law(steps, values) for name, values in error.items()},
    )
