"""The protocol of a problem: a gradient per client, and known constants.

Clients i = 0..m-1 own n samples each, F_i is the mean over them and F the mean of the F_i. Points may carry leading
axes: `gradient` takes (..., m, d), one point per client, the other functions (..., d).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np

from ...errors import UserError

Grad = Callable[[np.ndarray], np.ndarray]


class Problem(Protocol):
    """A federated problem with known constants."""

    @property
    def m(self) -> int: ...
    @property
    def n(self) -> int: ...
    @property
    def d(self) -> int: ...
    @property
    def L(self) -> float: ...
    @property
    def sigma_g(self) -> float: ...
    @property
    def optimum(self) -> np.ndarray: ...
    @property
    def minimum(self) -> float: ...
    def sigma_l(self, batch: int) -> float: ...
    def value(self, x: np.ndarray) -> np.ndarray: ...
    def gradient(self, x: np.ndarray) -> np.ndarray: ...
    def minibatch(self, index: np.ndarray) -> Grad: ...


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
