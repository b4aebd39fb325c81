"""FedSWA: a rate that falls within the round, and a server that goes further."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from ..method import Grad, Local, Method, Nothing, Round
from ..params import param
from .terms import falling

if TYPE_CHECKING:
    from torch import Tensor as Vec


class Server(NamedTuple):
    x: Vec


class Down(NamedTuple):
    x: Vec


class Up(NamedTuple):
    D: Vec  # x_iK - x^t


@dataclass(frozen=True)
class FedSWA(Method):
    """Stochastic weight averaging in rounds: large steps first, small ones last, and the server extrapolates.

        1  server sends x^t to the clients of S^t
        2  client i, from x_i0 = x^t, for k = 0..K_i-1:   eta_k = eta_l ((1 - k/K_i) + rho k/K_i), K_i as planned
               x_i,k+1 = x_ik - eta_k g_i(x_ik)
        3  server:   x^{t+1} = x^t + alpha mean_S D_i,   D_i = x_iK - x^t

    A straggler does the first of its K_i steps at these rates, and does not know that it will not do the rest.
    Recovers: rho = 1, alpha = 1: FedAvg.
    The released code (junkangLiu0/FedSWA@0892738, main_FedSWA.py) has rho = 0, alpha = 1, and steps at 2 eta_l.

    Args:
        rho: where the rate ends within a round, as a part of eta_l.
        alpha: how far the server goes; beyond 1 it extrapolates.

    Example:
        >>> FedSWA().rate(0, 4), FedSWA(rho=0.5).rate(2, 4)
        (1.0, 0.75)

    Reference: Liu et al., Improving Generalization in Federated Learning with Highly Heterogeneous Data via
    Momentum-Based Stochastic Controlled Weight Averaging, ICML 2025.
    """

    rho: float = param(0.1, "[0, 1]", "rho, what is left of the rate at the end of a round", tune="0.01..0.5:log")
    alpha: float = param(1.5, "(0, inf)", "alpha, how far the server goes")
    family = "averaging"
    released: ClassVar[Mapping[str, Any]] = {"rho": 0.0, "alpha": 1.0}

    def init_server(self, x0: Vec) -> Server:
        return Server(x0)

    def broadcast(self, server: Server) -> Down:
        return Down(server.x)

    def rate(self, k: int, K: int) -> float:
        return falling(k, K, self.rho)  # line 2

    def direction(self, x: Vec, grad: Grad, down: Down, client: Nothing) -> Vec:
        return grad(x)  # line 2

    def upload(self, xK: Vec, down: Down, client: Nothing, run: Local) -> tuple[Up, Nothing]:
        return Up(xK - down.x), client

    def update(self, server: Server, mean: Up, round: Round) -> Server:
        return Server(server.x + self.alpha * mean.D)  # line 3
