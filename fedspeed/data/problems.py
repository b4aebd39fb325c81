"""Problems with known constants: L, sigma_g, sigma_l, the minimiser and the minimum; and their samples as data sets.

Clients i = 0..m-1 own n samples each, F_i is the mean over them and F the mean of the F_i. Points may carry leading
axes: `gradient` takes (..., m, d), one point per client, the other functions (..., d). NumPy only: torch is imported
when samples are made, for the model `vector`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

import numpy as np

from ..errors import UserError

if TYPE_CHECKING:
    from .samples import Samples

Grad = Callable[[np.ndarray], np.ndarray]


class Problem(Protocol):
    """A federated problem with known constants; the targets y, of shape (m, n, ...), say how many samples there are."""

    y: np.ndarray

    @property
    def d(self) -> int: ...
    @property
    def L(self) -> float: ...
    @property
    def sigma_g(self) -> float: ...
    @property
    def optimum(self) -> np.ndarray: ...
    def sigma_l(self, batch: int) -> float: ...
    def value(self, x: np.ndarray) -> np.ndarray: ...
    def gradient(self, x: np.ndarray) -> np.ndarray: ...
    def minibatch(self, index: np.ndarray) -> Grad: ...

    @property
    def m(self) -> int:
        """Return the number of clients."""
        return len(self.y)

    @property
    def n(self) -> int:
        """Return the number of samples per client."""
        return int(self.y.shape[1])

    @cached_property
    def minimum(self) -> float:
        """Return F(x*)."""
        return float(self.value(self.optimum))


def dissimilarity(problem: Problem, x: np.ndarray) -> float:
    """Return mean_i ||grad F_i(x) - grad F(x)||^2 at one point."""
    g = problem.gradient(np.broadcast_to(x, (problem.m, problem.d)))
    return float(np.square(g - g.mean(0)).sum(-1).mean())


def check(problem: str, **given: float) -> None:
    """Raise for constants that no problem can have."""
    for name, value in given.items():
        least, strict = (1, False) if name in ("m", "d", "n") else (0, name in ("L", "mu"))
        if not (np.isfinite(value) and (value > least if strict else value >= least)):
            raise UserError(f"{problem}: {name} must be {'>' if strict else '>='} {least}, got {value:g}")


@dataclass(frozen=True, eq=False)
class Quadratic(Problem):
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
        return np.asarray(self.v_samples.mean(1))

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


@dataclass(frozen=True, eq=False)
class Logistic(Problem):
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


def samples(problem: Quadratic | Logistic) -> Samples:
    """Return the samples of a problem: inputs are matrices, so that the model `vector` (outputs A x) gives F_i exactly.

    A quadratic's rows are scaled by sqrt(p/2), which turns the mean squared error into 1/2 ||A x - y||^2. A logistic
    row is (0, a): two logits whose cross-entropy is the logistic loss. The test set is all samples, so that the test
    loss is F. The samples have client ids (`split="natural"`).

    Example:
        >>> data = samples(random_quadratic(m=3, d=4, n=2))
        >>> data.x.shape, data.y.shape, data.owner.tolist()
        ((6, 4, 4), (6, 4), [0, 0, 1, 1, 2, 2])
    """
    from .samples import Samples

    owner = np.repeat(np.arange(problem.m), problem.n)
    if isinstance(problem, Quadratic):
        scale = np.sqrt(problem.A.shape[1] / 2)
        x, y = scale * problem.A[owner], scale * problem.y.reshape(len(owner), -1)
        return Samples("quadratic", x, y, x, y, owner=owner)
    a = problem.a.reshape(len(owner), -1)
    x, labels = np.stack([np.zeros_like(a), a], axis=1), problem.y.reshape(-1).astype(np.int64)
    return Samples("logistic", x, labels, x, labels, classes=2, owner=owner)


def quadratic(
    d: int = 10,
    n: int = 20,
    L: float = 1.0,
    mu: float = 0.1,
    sigma_g: float = 1.0,
    sigma_l: float = 0.0,
    shared: bool = True,
    *,
    clients: int = 10,
    seed: int = 0,
) -> Samples:
    """Generate quadratics F_i(x) = mean_j 1/2 ||A_i x - y_ij||^2 with eigenvalues from mu to L; see `samples`.

    Args:
        d, n: parameters, samples of every client.
        sigma_g: sqrt(mean_i ||grad F_i - grad F||^2), at the optimum, and everywhere if `shared`.
        sigma_l: noise of the gradient of one sample.
        shared: one Hessian for all clients; otherwise each has its own, and FedAvg does not end at the optimum.

    Example:
        >>> quadratic(d=3, n=2, clients=4).x.shape
        (8, 3, 3)
    """
    made = random_quadratic(clients, d, n, L=L, mu=mu, sigma_g=sigma_g, sigma_l=sigma_l, shared=shared, seed=seed)
    return samples(made)


def logistic(
    d: int = 10,
    n: int = 50,
    L: float = 1.0,
    spread: float = 1.0,
    flip: float = 0.15,
    shared: bool = False,
    *,
    clients: int = 10,
    seed: int = 0,
) -> Samples:
    """Generate binary logistic regression whose inputs have length 2 sqrt(L); see `samples`.

    Args:
        d, n: parameters, samples of every client.
        spread: how far the clients' inputs and weights are apart.
        flip: the share of wrong labels, which keeps the minimiser finite.
        shared: the same inputs for all clients, which then differ in labels only.

    Example:
        >>> data = logistic(d=3, n=5, clients=4)
        >>> data.x.shape, data.classes
        ((20, 2, 3), 2)
    """
    return samples(random_logistic(clients, d, n, L=L, spread=spread, flip=flip, shared=shared, seed=seed))
