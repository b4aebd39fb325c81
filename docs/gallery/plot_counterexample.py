r"""
The printed theorem, broken: nothing in it limits lam L
=======================================================

Theorem 4.4 of the FedSpeed paper bounds the mean of :math:`|\nabla F(z^t)|^2`. Its printed conditions leave
:math:`\lambda L` free (erratum 9 of ``fedspeed theory errata``), and without a limit on it the bound is false. Two
clients in one dimension are enough: :math:`F_1 = w` and :math:`F_2 = -b w`, where :math:`w'` is the triangle wave,
:math:`w'(x) = x` on [-1, 1] and :math:`2 - x` on [1, 3], with period 4. Both are 1-smooth, heterogeneity is bounded by
(1+b)/2, there is no noise and no perturbation, and :math:`F = (1-b)/2\, w` is bounded below. When :math:`\lambda b`
comes near 1 the local problem of client 2, of curvature :math:`1/\lambda - b` around the minimiser of F, no longer
holds its model near :math:`x^t`, and FedSpeed does not settle: seen above :math:`\lambda L = 2.7` for b = 0.3
and 1.3 for b = 0.9. The gradient is piecewise linear, so a million local steps take a few powers: the run below is
Algorithm 1 itself, not its limit.

**What to see.** The running average of :math:`|F'(z^t)|^2` (lines) beside the printed bound (dotted). For
:math:`\lambda L = 1` the run stays below it; for 4 every printed condition holds and the run crosses the bound.
"""

import math
from typing import NamedTuple

import matplotlib.pyplot as plt
import numpy as np

from fedspeed.theory import Bound, Condition, Setting, Start, auxiliary, bound, form_at


class Counterexample(NamedTuple):
    """The setting, the printed conditions, the measured (1/T) sum_{t=1}^{T-1} |F'(z^t)|^2 and the printed bound."""

    setting: Setting
    conditions: tuple[Condition, ...]
    average: float
    bound: Bound
    start: Start
    squares: np.ndarray  # |F'(z^t)|^2, t = 1..T-1

    @property
    def violated(self) -> bool:
        """Whether the printed theorem is wrong here: its conditions hold and its bound does not."""
        return self.bound.valid and self.average > self.bound.total


def wave(x: float) -> float:
    """Return the triangle wave w'(x)."""
    j = round(x / 2)
    return (1 - 2 * (j % 2)) * (x - 2 * j)


def potential(x: float) -> float:
    """w(x), in [0, 1], 0 at the multiples of 4."""
    j = round(x / 2)
    near = 0.5 * (x - 2 * j) ** 2
    return 1 - near if j % 2 else near


def local_steps(x: float, ghat: float, a: float, s: Setting) -> float:
    """x_iK after s.K steps of client F_i = a w from x: one power for every linear piece of the wave that is crossed."""
    y, left = x, s.K
    while left:
        j = round(y / 2)
        slope = a * (1 - 2 * (j % 2))
        c = slope + 1 / s.lam
        pull = slope * (y - 2 * j) - ghat + (y - x) / s.lam  # the direction at y; y_n - y = -pull (1 - r^n)/c
        n = min(left, _until(y, 2 * j + (-1 if pull > 0 else 1), pull, c, s.eta)) if pull else left
        y -= pull * s.eta * (n if c == 0 else -math.expm1(n * math.log1p(-s.eta * c)) / (s.eta * c))
        left -= n
    return y


def _until(y: float, edge: float, pull: float, c: float, eta: float) -> int:
    """Steps until the edge of a piece is passed; very many if it never is."""
    share = (y - edge) * c / pull  # 1 - r^n has to reach it
    if c == 0:
        steps = (y - edge) / (pull * eta) if pull * eta else math.inf
    else:
        steps = math.log1p(-share) / math.log1p(-eta * c) if share < 1 else math.inf
    return max(1, math.floor(steps) + 1) if steps < 2**62 else 2**62  # a pull of 1e-311 reaches no edge


def break_printed_bound(
    lam: float = 4.0, K: int = 10_000_000, T: int = 20_000, b: float = 0.3, x0: float = 0.5
) -> Counterexample:
    """Run FedSpeed on the two clients with eta = 2 lam/K, twice the least that the printed conditions ask for.

    Args:
        lam: in units of 1/L; above about 2.7 it does not converge for b = 0.3.
        K, T: as large as the printed bound needs to become smaller than what is seen.
        b: in (0, 1), so that F = (1-b)/2 w is bounded below.
        x0: where it starts.
    """
    s = Setting(eta=2 * lam / K, lam=lam, K=K, L=1.0, m=2, T=T, sigma_g=(1 + b) / 2)
    coefficients, ghat = (1.0, -b), [0.0, 0.0]
    x = x0
    ends = []
    first = (0.0, 0.0)
    for t in range(T):
        y = [local_steps(x, g, a, s) for a, g in zip(coefficients, ghat, strict=True)]
        ghat = [g - (end - x) / lam for g, end in zip(ghat, y, strict=True)]
        x = sum(end - lam * g for g, end in zip(ghat, y, strict=True)) / 2
        ends.append(y)
        first = (ghat[0], ghat[1]) if t == 0 else first
    _, z = auxiliary(np.array([x0]), np.array(ends)[:, :, None], s.gamma)
    points, mean = z[:, 0].tolist(), (1 - b) / 2
    squares = np.array([(mean * wave(p)) ** 2 for p in points[1:-1]])
    start = Start(
        gap=mean * potential(points[1]),
        ghat=(first[0] ** 2 + first[1] ** 2) / 2,
        ghat_mean=((first[0] + first[1]) / 2) ** 2,
    )
    right = bound(s, start, "printed")
    return Counterexample(s, form_at(s, "printed").conditions, float(squares.sum()) / T, right, start, squares)


found = [break_printed_bound(lam=lam) for lam in (1.0, 4.0)]

# %%
# With lam L = 4, K = 10^7 and T = 20,000 the average is 0.0497 where the printed bound is 0.0127.

figure, axis = plt.subplots(figsize=(5.6, 4), layout="constrained")
for i, each in enumerate(found):
    T = np.unique(np.geomspace(2, each.setting.T, 60).astype(int))
    running = np.cumsum(each.squares)[T - 2] / T
    limits = [bound(each.setting.but(T=int(t)), each.start, "printed").total for t in T]
    axis.plot(T, running, color=f"C{i}", label=f"lam L = {each.setting.lam:g}: seen")
    axis.plot(T, limits, color=f"C{i}", linestyle=":", label=f"lam L = {each.setting.lam:g}: printed bound")
axis.set(xscale="log", yscale="log", xlabel="rounds T", ylabel="(1/T) sum of |F'(z)|^2")
axis.grid(alpha=0.3)
axis.legend(frameon=False, fontsize=8)
plt.show()
