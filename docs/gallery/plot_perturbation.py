r"""
What the perturbed gradient descends on
=======================================

FedSpeed mixes the gradient with one taken a step uphill: :math:`\tilde g = (1-\alpha) g(x) + \alpha g(x + \rho g(x))
= g + \alpha\rho H g + O(\alpha\rho^2)`. Since :math:`\nabla \tfrac{\beta}{2} \|\nabla L\|^2 = \beta H g`, this is the
gradient of a loss with a penalty on its own gradient, to second order in rho, for :math:`\beta = \alpha\rho`. On a
quadratic it is so exactly.

**What to see.** The distance between the quasi-gradient and the gradient of each penalised loss against rho, on a
logistic loss. With the appendix's penalty it falls like :math:`\rho^2`; with the main text's, which lacks the factor
1/2 (erratum 16), like :math:`\rho`, as the penalty itself. With the normalised rho of the experiments the penalty is on
the norm, not on its square.
"""

from collections.abc import Sequence
from typing import NamedTuple

import matplotlib.pyplot as plt
import numpy as np

from fedspeed.data.problems import Logistic
from fedspeed.theory import Fit, power_law, random_logistic

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
    """
    steps = np.array(sorted(rho, reverse=True), dtype=np.float64)
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


found = quasi_gradient_orders(random_logistic(m=4, d=5, n=50, seed=0), [0.2 / 2**i for i in range(7)])

# %%
# The legend has the measured orders, with two standard errors.

figure, axis = plt.subplots(figsize=(5.6, 4), layout="constrained")
for i, (name, error) in enumerate(found.error.items()):
    fit = found.order[name]
    label = f"{name}: order {fit.slope:.2f} ± {fit.error:.2f}"
    axis.plot(found.rho, error, marker="o", markersize=4, color=f"C{i}", label=label)
axis.set(xscale="log", yscale="log", xlabel="rho", ylabel="||g_tilde - gradient of L + penalty||")
axis.grid(alpha=0.3)
axis.legend(frameon=False, fontsize=8)
plt.show()
