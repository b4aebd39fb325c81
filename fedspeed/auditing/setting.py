"""The small federation on which an implementation and ours run side by side. NumPy only."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ..data.problems import Quadratic, random_quadratic
from ..errors import UserError
from ..params import Params, param


@dataclass(frozen=True)
class Setting(Params):
    """Heterogeneous quadratics with their own Hessians, full gradients, a rate that decays, some clients absent.

    Nothing is 1 or equal by chance where a slip could hide behind it: S, N, K and d are different numbers.

    Example:
        >>> setting = Setting(rounds=3)
        >>> setting.cohorts
        ((0, 1, 2), (0, 1, 3), (0, 1, 4))
        >>> setting.gradient(0, setting.x0).shape
        (6,)
    """

    rounds: int = param(6, "[1, 1000]", "the number of rounds")
    clients: int = param(5, "[1, 1000]", "N, the number of clients")
    active: int = param(3, "[1, 1000]", "S, the number of clients in each round")
    local_steps: int = param(4, "[1, 1000]", "K, the local steps of every client")
    lr: float = param(0.1, "(0, inf)", "the local rate eta_l of the first round")
    lr_decay: float = param(0.9, "(0, 1]", "the factor of the rate from a round to the next")
    dim: int = param(6, "[2, 50]", "d, the length of a vector")
    seed: int = param(0, "[0, inf)", "the seed of problem and cohorts")
    tolerance: float = param(1e-6, "(0, 0.1]", "the largest error, relative to numbers above 1, that is rounding")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.active > self.clients:
            raise UserError(f"audit: active must be at most clients, got active {self.active} of {self.clients}")

    @cached_property
    def problem(self) -> Quadratic:
        """The clients' losses."""
        return random_quadratic(self.clients, self.dim, 1, mu=0.2, sigma_g=2.0, shared=False, seed=self.seed)

    @cached_property
    def x0(self) -> np.ndarray:
        """The first model, away from 0 and from every optimum."""
        return np.random.default_rng([self.seed, 1]).normal(size=self.dim) + 1.0

    @cached_property
    def cohorts(self) -> tuple[tuple[int, ...], ...]:
        """The active clients of every round, in the order in which they run."""
        draw = np.random.default_rng([self.seed, 2])
        chosen = (draw.choice(self.clients, self.active, replace=False) for _ in range(self.rounds))
        return tuple(tuple(sorted(int(i) for i in each)) for each in chosen)

    def gradient(self, i: int, x: np.ndarray) -> np.ndarray:
        """grad F_i(x)."""
        return np.asarray(self.problem.H[i] @ x - self.problem.v[i])
