"""Quadratics with known constants; clients may share their Hessian or have their own."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ...errors import UserError
from .problem import Grad, check, dissimilarity


@dataclass(frozen=True, eq=False)
class Quadratic:
    """F_i(x) = mean_j 1/2 ||A_i x - y_ij||^2: Hessian H_i = A_i'A_i, gradient H_i x - v_i, v_i = mean_j A_i'y_ij.

    All samples of a client share A_i, so a minibatch gradient is the gradient plus noise that does not depend on x:
    sigma_l is exact. With one A for all clients the heterogeneity does not depend on x either and sigma_g is exact;
    with their own A_i it is unbounded (infinite), and FedAvg no longer ends at the optimum.

    Args:
        A: (m, p, d).
        y: (m, n, p).

    Example:
        >>> problem = random_quadratic(m=4, d=3, sigma_g=2.0, sigma_l=0.5)
        >>> x = np.broadcast_to(problem.optimum, (4, 3))
        >>> np.allclose(problem.gradient(x).mean(0), 0), round(problem.sigma_g, 6), round(problem.sigma_l(1), 6)
        (True, 2.0, 0.5)
    """

    A: np.ndarray
    y: np.ndarray

    @property
    def m(self) -> int:
        """Return the number of clients."""
        return len(self.A)

    @property
    def n(self) -> int:
        """Return the number of samples per client."""
        return int(self.y.shape[1])

    @property
    def d(self) -> int:
        """Return the number of parameters."""
        return int(self.A.shape[2])

    @cached_property
    def H(self) -> np.ndarray:
        """Return the Hessians (m, d, d)."""
        return np.asarray(np.einsum("ipj,ipk->ijk", self.A, self.A))

    @cached_property
    def v_samples(self) -> np.ndarray:
        """Return A_i'y_ij, (m, n, d)."""
        return np.asarray(np.einsum("ipj,inp->inj", self.A, self.y))

    @cached_property
    def v(self) -> np.ndarray:
        """Return v_i, (m, d)."""
        mean: np.ndarray = self.v_samples.mean(1)
        return mean

    @cached_property
    def shared(self) -> bool:
        """Return whether all clients have the same Hessian."""
        return bool(np.allclose(self.H, self.H[0], rtol=1e-12, atol=0))

    @cached_property
    def L(self) -> float:
        """Return the largest eigenvalue of any H_i."""
        return float(np.linalg.eigvalsh(self.H)[:, -1].max())

    @cached_property
    def sigma_g(self) -> float:
        """Return sup_x sqrt(mean_i ||grad F_i - grad F||^2): exact, infinite unless the Hessian is shared."""
        return float(np.sqrt(dissimilarity(self, self.optimum))) if self.shared else np.inf

    def sigma_l(self, batch: int) -> float:
        """Return the noise of a minibatch drawn with replacement, of the noisiest client: exact."""
        spread = float(np.square(self.v_samples - self.v[:, None]).sum(-1).mean(-1).max())
        rounding = 1e-24 * float(np.square(self.v_samples).sum(-1).max())
        return float(np.sqrt(spread / batch)) if spread > rounding else 0.0

    @cached_property
    def optimum(self) -> np.ndarray:
        """Return x* = (mean H_i)^-1 mean v_i, the minimiser of F."""
        return np.linalg.solve(self.H.mean(0), self.v.mean(0))

    @cached_property
    def minimum(self) -> float:
        """Return F(x*)."""
        return float(self.value(self.optimum))

    def value(self, x: np.ndarray) -> np.ndarray:
        """Return F(x)."""
        constant = 0.5 * np.square(self.y).sum(-1).mean()
        H, v = self.H.mean(0), self.v.mean(0)
        return np.asarray(0.5 * np.einsum("...j,jk,...k->...", x, H, x) - x @ v + constant)

    def gradient(self, x: np.ndarray) -> np.ndarray:
        """Return grad F_i(x_i), full batch."""
        return np.asarray(np.einsum("ijk,...ik->...ij", self.H, x) - self.v)

    def minibatch(self, index: np.ndarray) -> Grad:
        """Return the gradient of the samples `index` (..., m, batch)."""
        v = self.v_samples[np.arange(self.m)[:, None], index].mean(-2)
        return lambda x: np.asarray(np.einsum("ijk,...ik->...ij", self.H, x) - v)


SMALL = 50
"""Up to this d, LAPACK runs in one thread. Its bits depend on the number of threads: larger problems do not call it."""


def _basis(normal: np.ndarray) -> np.ndarray:
    """Return an orthogonal matrix from one of normal numbers: a product of reflections (Stewart, 1980)."""
    d = len(normal)
    basis = np.eye(d)
    for k in range(d - 1, -1, -1):
        v = normal[k:, k].copy()
        v[0] += np.copysign(np.sqrt(np.square(v).sum()), v[0])
        block = basis[k:, k:]
        block -= np.multiply.outer(v, np.einsum("i,ij->j", 2 / np.square(v).sum() * v, block))
    return basis


def random_quadratic(
    m: int = 10, d: int = 5, n: int = 8, *, L: float = 1.0, mu: float = 0.2, sigma_g: float = 1.0,
    sigma_l: float = 0.0, shared: bool = True, seed: int = 0,
) -> Quadratic:  # fmt: skip
    """Return a quadratic with eigenvalues from mu to L, and exactly these sigma_g (at x*) and sigma_l (one sample)."""
    check("quadratic", m=m, d=d, n=n, L=L, mu=mu, sigma_g=sigma_g, sigma_l=sigma_l)
    if mu > L:
        raise UserError(f"quadratic: mu must be at most L, got mu {mu:g} and L {L:g}; they bound the eigenvalues")
    if sigma_l and n < 2:
        raise UserError("quadratic: noise needs at least 2 samples per client, got 1; raise n, or set sigma_l=0")
    r = np.random.default_rng(seed)
    spectrum = np.geomspace(L, mu, d)
    draws = 1 if shared else m
    normal = r.normal(size=(draws, d, d))
    bases = np.linalg.qr(normal)[0] if d <= SMALL else np.stack([_basis(one) for one in normal])
    if not shared:
        spectrum = np.exp(r.uniform(np.log(mu), np.log(L), (m, d)))
        spectrum[:, 0] = L
    A = np.broadcast_to(np.sqrt(spectrum)[..., None] * bases, (m, d, d)).copy()
    wanted = r.normal(size=(m, d))
    if m > 1:  # grad F_i - grad F at x*, with mean 0 and the given size
        wanted -= wanted.mean(0)
        wanted *= sigma_g / np.sqrt(np.square(wanted).sum(-1).mean())
    H, centre = np.einsum("ipj,ipk->ijk", A, A), r.normal(size=d)
    v = (H @ centre if d <= SMALL else np.einsum("ijk,k->ij", H, centre)) - (wanted if m > 1 else 0)
    noise = r.normal(size=(m, n, d))
    noise -= noise.mean(1, keepdims=True)
    if n > 1:
        noise *= sigma_l / np.sqrt(np.square(noise).sum(-1).mean(1))[:, None, None]
    inverse = np.linalg.inv(A) if d <= SMALL else np.swapaxes(bases / np.sqrt(spectrum)[..., None], -1, -2)
    y = np.einsum("ijp,inj->inp", np.broadcast_to(inverse, A.shape), v[:, None] + noise)  # A_i'y = v_i + noise
    return Quadratic(A, y)
