"""Logistic regression with known constants: bounded heterogeneity without a shared Hessian."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ...errors import UserError
from .problem import Grad, check, dissimilarity


@dataclass(frozen=True, eq=False)
class Logistic:
    """F_i(x) = mean_j log(1 + exp(-(2 y_ij - 1) a_ij'x)): binary logistic regression, convex and not quadratic.

    Gradients are bounded, so sigma_g and sigma_l are finite whatever the clients. Both are upper bounds from
    |sigmoid - y| < 1, except that sigma_g is exact where all clients share their inputs. L is that of the noisiest
    minibatch loss, max_ij ||a_ij||^2/4, which erratum 15 needs.

    Args:
        a: inputs (m, n, d).
        y: labels 0 or 1, (m, n).

    Example:
        >>> problem = random_logistic(m=4, n=20, d=3)
        >>> problem.L, float(np.linalg.norm(problem.gradient(problem.optimum).mean(0))) < 1e-9
        (1.0, True)
    """

    a: np.ndarray
    y: np.ndarray

    @property
    def m(self) -> int:
        """Return the number of clients."""
        return len(self.a)

    @property
    def n(self) -> int:
        """Return the number of samples per client."""
        return int(self.a.shape[1])

    @property
    def d(self) -> int:
        """Return the number of parameters."""
        return int(self.a.shape[2])

    @cached_property
    def L(self) -> float:
        """Return max_ij ||a_ij||^2 / 4."""
        return float(round(np.square(self.a).sum(-1).max() / 4, 12))

    @cached_property
    def shared(self) -> bool:
        """Return whether all clients have the same inputs, and hence the same Hessian everywhere."""
        return bool((self.a == self.a[0]).all())

    @cached_property
    def sigma_g(self) -> float:
        """Return an upper bound of sup_x sqrt(mean_i ||grad F_i - grad F||^2); exact for shared inputs."""
        if self.shared:
            return float(np.sqrt(dissimilarity(self, np.zeros(self.d))))
        return float(np.sqrt(np.square(np.linalg.norm(self.a, axis=-1).mean(-1)).mean()))

    def sigma_l(self, batch: int) -> float:
        """Return an upper bound for minibatches drawn with replacement."""
        return float(np.sqrt(np.square(self.a).sum(-1).mean(-1).max() / batch))

    @cached_property
    def optimum(self) -> np.ndarray:
        """Return x*, by Newton's method to rounding; raise UserError for separable data, which have none."""
        a = self.a.reshape(-1, self.d)
        y = self.y.reshape(-1)
        x = np.zeros(self.d)
        for _ in range(100):
            H, g = self.hessian(x), a.T @ (_sigmoid(a @ x) - y) / len(y)
            if np.linalg.eigvalsh(H)[0] < 1e-9 * self.L:  # flat in some direction: the minimiser is at infinity
                break
            step, before = np.linalg.solve(H, g), self.value(x)
            while self.value(x - step) > before + 1e-15 and np.linalg.norm(step) > 1e-14:
                step = step / 2
            x = x - step
            if np.linalg.norm(step) < 1e-13 * (1 + np.linalg.norm(x)):
                return np.asarray(x)
        raise UserError("Logistic: the data can be separated, so F has no minimiser; give more or noisier samples")

    @cached_property
    def minimum(self) -> float:
        """Return F(x*)."""
        return float(self.value(self.optimum))

    def value(self, x: np.ndarray) -> np.ndarray:
        """Return F(x)."""
        margin = np.einsum("inj,...j->...in", self.a, x) * (2 * self.y - 1)
        return np.asarray(np.logaddexp(0, -margin).mean((-2, -1)))

    def gradient(self, x: np.ndarray) -> np.ndarray:
        """Return grad F_i(x_i), full batch."""
        p = _sigmoid(np.einsum("inj,...ij->...in", self.a, np.broadcast_to(x, (*x.shape[:-2], self.m, self.d))))
        return np.asarray(np.einsum("...in,inj->...ij", p - self.y, self.a) / self.n)

    def hessian(self, x: np.ndarray) -> np.ndarray:
        """Return the Hessian of F at x, (d, d)."""
        a = self.a.reshape(-1, self.d)
        p = _sigmoid(a @ x)
        return np.asarray((a.T * (p * (1 - p))) @ a / len(a))

    def minibatch(self, index: np.ndarray) -> Grad:
        """Return the gradient of the samples `index` (..., m, batch)."""
        rows = np.arange(self.m)[:, None]
        a, y = self.a[rows, index], self.y[rows, index]

        def grad(x: np.ndarray) -> np.ndarray:
            p = _sigmoid((a * x[..., None, :]).sum(-1))
            return np.asarray(((p - y)[..., None] * a).mean(-2))

        return grad


def _sigmoid(t: np.ndarray) -> np.ndarray:
    return np.asarray(0.5 * (1 + np.tanh(0.5 * t)))


def random_logistic(
    m: int = 10, d: int = 5, n: int = 40, *, L: float = 1.0, spread: float = 1.0, flip: float = 0.15,
    shared: bool = False, seed: int = 0,
) -> Logistic:  # fmt: skip
    """Return a logistic problem whose clients differ in inputs and in the weights that label them, with this L.

    Args:
        spread: how far the clients' weights and inputs are apart.
        flip: the share of wrong labels, which keeps the minimiser finite.
        shared: all clients have the same inputs and differ in labels only.
    """
    check("logistic", m=m, d=d, n=n, L=L, spread=spread)
    if not 0 <= flip <= 0.5:
        raise UserError(f"logistic: flip must lie in [0, 0.5], got {flip:g}; it is a share of labels")
    r = np.random.default_rng(seed)
    weights = r.normal(size=d) + spread * r.normal(size=(m, d))
    shift = spread * r.normal(size=(1 if shared else m, 1, d))
    a = np.broadcast_to(r.normal(size=(1 if shared else m, n, d)) + shift, (m, n, d)).copy()
    a *= 2 * np.sqrt(L) / np.linalg.norm(a, axis=-1, keepdims=True)
    y = (np.einsum("inj,ij->in", a, weights) > 0) ^ (r.random((m, n)) < flip)
    return Logistic(a, y.astype(np.float64))
