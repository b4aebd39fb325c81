"""Small data sets that need no network: they come with this package, or are generated."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ..errors import UserError
from ..utils.random import rng
from .samples import Samples

TRAIN = 1437


def digits() -> Samples:
    """Return the first 1,437 pictures for training, the last 360 for testing, in the original order; grey values 0..1.

    They are the test part of "Optical Recognition of Handwritten Digits" by E. Alpaydin and C. Kaynak, UCI Machine
    Learning Repository (1998), https://doi.org/10.24432/C50P49, licensed under CC BY 4.0; the arrays are those of
    scikit-learn's `load_digits`, unchanged: 1,797 grey pictures of 8 x 8, ten classes, grey values 0..16.

    The order groups writers, so the writers of the test set do not occur in training.

    Example:
        >>> data = digits()
        >>> data.x.shape, data.x_test.shape, data.classes
        ((1437, 1, 8, 8), (360, 1, 8, 8), 10)
    """
    with np.load(Path(__file__).with_name("digits.npz"), allow_pickle=False) as stored:
        x = stored["x"][:, None].astype(np.float32) / np.float32(16)
        y = stored["y"].astype(np.int64)
    return Samples("digits", x[:TRAIN], y[:TRAIN], x[TRAIN:], y[TRAIN:], classes=10)


FEATURES, CLASSES = 60, 10


def synthetic(alpha: float = 1.0, beta: float = 1.0, size: int = 0, *, clients: int = 30, seed: int = 0) -> Samples:
    """Generate data of `clients` clients, 60 features, 10 classes, with client ids (`split = natural`).

    This is the generator synthetic(alpha, beta) of the FedProx paper: clients differ in model and in inputs.
    Client k draws `u_k ~ N(0, alpha)`, `B_k ~ N(0, beta)`; entries of `W_k`, `b_k ~ N(u_k, 1)` and of
    `v_k ~ N(B_k, 1)`; then `x ~ N(v_k, diag(j^-1.2))` and `y = argmax softmax(x W_k + b_k)`. It has
    `50 + floor(exp(4 + 2 z))` samples, z ~ N(0, 1); the first 90% are for training, the others join the test
    set. Client k depends on seed and k only, not on the number of clients.

    Args:
        alpha: how much the clients' models differ (a standard deviation, as in the released generator).
        beta: how much the clients' inputs differ.
        size: training samples of every client, or 0 for the sizes above.

    Example:
        >>> data = synthetic(alpha=0.5, beta=0.5, size=20, clients=3)
        >>> data.x.shape, np.unique(data.owner).tolist()
        ((60, 60), [0, 1, 2])

    Reference: Li et al., "Federated optimization in heterogeneous networks", MLSys 2020, and its code.
    """
    for name, value, least in (("alpha", alpha, 0), ("beta", beta, 0), ("size", size, 0), ("clients", clients, 1)):
        if not (np.isfinite(value) and value >= least):
            raise UserError(f"data synthetic: {name} must be a number >= {least}, found {value}")
    spread = np.sqrt(np.arange(1, FEATURES + 1) ** -1.2)
    xs, ys, train = [], [], []
    for k in range(clients):
        stream = rng(seed, "synthetic", k)
        u, shift = alpha * stream.standard_normal(), beta * stream.standard_normal()
        weight = u + stream.standard_normal((FEATURES, CLASSES))
        bias = u + stream.standard_normal(CLASSES)
        centre = shift + stream.standard_normal(FEATURES)
        n = int(np.ceil(size / 0.9)) if size else 50 + int(stream.lognormal(4, 2))
        x = centre + spread * stream.standard_normal((n, FEATURES))
        xs.append(x.astype(np.float32))
        ys.append(np.argmax(x @ weight + bias, axis=1))
        train.append(np.arange(n) < (size or int(0.9 * n)))
    x, y, keep = (np.concatenate(parts) for parts in (xs, ys, train))
    owner = np.repeat(np.arange(clients), [len(part) for part in ys])[keep]
    return Samples("synthetic", x[keep], y[keep], x[~keep], y[~keep], classes=CLASSES, owner=owner)
