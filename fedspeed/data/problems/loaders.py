"""The problems as data sets: L, the sigmas and the optimum are known, with the model `vector`."""

from __future__ import annotations

import numpy as np

from ..samples import Samples
from .logistic import Logistic, random_logistic
from .quadratic import Quadratic, random_quadratic


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
    return samples(
        random_quadratic(clients, d, n, L=L, mu=mu, sigma_g=sigma_g, sigma_l=sigma_l, shared=shared, seed=seed)
    )


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
