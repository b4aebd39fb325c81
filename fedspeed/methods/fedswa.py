"""FedSWA and FedMoSWA: a rate that falls within the round, and a server that goes further."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from ..utils.checked_fields import param
from .base import Grad, Local, Method, Model, Movement, Nothing, Round, Vec
from .terms import VARIATE, falling, zeros


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

    def init_server(self, x0: Vec) -> Model:
        return Model(x0)

    def broadcast(self, server: Model) -> Model:
        return Model(server.x)

    def rate(self, k: int, K: int) -> float:
        return falling(k, K, self.rho)  # line 2

    def direction(self, x: Vec, grad: Grad, down: Model, client: Nothing) -> Vec:
        return grad(x)  # line 2

    def upload(self, xK: Vec, down: Model, client: Nothing, run: Local) -> tuple[Movement, Nothing]:
        return Movement(xK - down.x), client

    def update(self, server: Model, mean: Movement, round: Round) -> Model:
        return Model(server.x + self.alpha * mean.D)  # line 3


class Server(NamedTuple):
    x: Vec
    m: Vec  # moving average of the c_i that were sent


Down = Server  # all of it is sent


class Client(NamedTuple):
    c: Vec  # c_i, the client's control variate


class Up(NamedTuple):
    D: Vec  # x_iK - x^t
    dm: Vec  # c_i^+ - m


@dataclass(frozen=True)
class FedMoSWA(Method):
    """FedSWA along directions that are corrected by the client's variate and by the federation's momentum.

        1  server sends x^t and m to the clients of S^t
        2  client i, from x_i0 = x^t, for k = 0..K_i-1:   eta_k = eta_l ((1 - k/K_i) + rho k/K_i), K_i as planned
               x_i,k+1 = x_ik - eta_k (g_i(x_ik) - c_i + m)
        3  c_i^+ = c_i - m + (x^t - x_iK) / sum_k eta_k           over the steps that were done: a straggler's are fewer
        4  server:   x^{t+1} = x^t + alpha mean_S D_i,   D_i = x_iK - x^t
        5            m = m + gamma mean_S (c_i^+ - m)             over the REPLIES, not over all clients

    Variates and m start at 0, so round 1 is FedSWA. It is not SCAFFOLD for any gamma: that sends c_i^+ - c_i.
    The released code (junkangLiu0/FedSWA@0892738, main_FedSWA.py) runs update_scafplus for its flag MoFedSWA: a
    constant rate (rho = 1), alpha = 1, gamma = 0.4 whatever is asked, and m = mean_S c_i^+ in round 1. Its
    update_FedMoSWA, whose rate falls to 0, is not called.

    Args:
        rho: where the rate ends within a round, as a part of eta_l.
        alpha: how far the server goes; beyond 1 it extrapolates.
        gamma: weight of this round's replies in m.

    Example:
        >>> FedMoSWA(gamma=0.4).gamma
        0.4

    Reference: Liu et al., Improving Generalization in Federated Learning with Highly Heterogeneous Data via
    Momentum-Based Stochastic Controlled Weight Averaging, ICML 2025.
    """

    rho: float = param(0.1, "[0, 1]", "rho, what is left of the rate at the end of a round", tune="0.01..0.5:log")
    alpha: float = param(1.5, "(0, inf)", "alpha, how far the server goes")
    gamma: float = param(0.2, "(0, 1]", "gamma, weight of this round's replies in the momentum")
    family = "control variates"
    released: ClassVar[Mapping[str, Any]] = {"rho": 1.0, "alpha": 1.0, "gamma": 0.4}
    reads_gradient_from_D = VARIATE

    def init_server(self, x0: Vec) -> Server:
        return Server(x0, zeros(x0))

    def init_client(self, x0: Vec) -> Client:
        return Client(zeros(x0))

    def broadcast(self, server: Server) -> Down:
        return Down(server.x, server.m)

    def rate(self, k: int, K: int) -> float:
        return falling(k, K, self.rho)  # line 2

    def direction(self, x: Vec, grad: Grad, down: Down, client: Client) -> Vec:
        return grad(x).sub_(client.c).add_(down.m)  # line 2

    def upload(self, xK: Vec, down: Down, client: Client, run: Local) -> tuple[Up, Client]:
        D = xK - down.x
        c = client.c - down.m - D / run.lr_sum  # line 3
        return Up(D, c - down.m), Client(c)

    def update(self, server: Server, mean: Up, round: Round) -> Server:
        m = server.m + self.gamma * mean.dm  # line 5
        return Server(server.x + self.alpha * mean.D, m)  # line 4
