"""FedProx: FedAvg held near the server's model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..utils.params import param
from .base import Grad, Local, Method, Model, Movement, Nothing, Round
from .terms import add_prox_, check_prox

if TYPE_CHECKING:
    from torch import Tensor as Vec


@dataclass(frozen=True)
class FedProx(Method):
    """Local SGD on F_i(x) + (mu/2) ||x - x^t||^2, then the mean of what came back.

        1  server sends x^t to the clients of S^t
        2  client i, from x_i0 = x^t, for k = 0..K-1:   x_i,k+1 = x_ik - eta_l (g_i(x_ik) + mu (x_ik - x^t))
        3  client i sends D_i = x_iK - x^t
        4  server:   x^{t+1} = x^t + eta_g mean_S D_i

    Recovers: mu = 0: FedAvg. With K = 1 the prox term is 0 and has no effect. FedSpeed(lam=1/mu, rho=0,
    correction=False) is the same method.

    Args:
        mu: prox weight, w of the FedSpeed paper's experiments and 1/lam of its Algorithm 1.
        eta_g: server rate.

    Example:
        >>> FedProx(mu=0.01).shrink
        0.01

    Reference: Li et al., Federated Optimization in Heterogeneous Networks, MLSys 2020.
    """

    mu: float = param(
        0.1, "[0, inf)", "the prox weight mu, 1/lam of FedSpeed and w of its paper's experiments", tune="0.01..1:log"
    )
    eta_g: float = param(1.0, "(0, inf)", "the server rate eta_g")
    family = "averaging"

    def check(self, lr: float, active: int, clients: int) -> None:
        check_prox("FedProx", lr, self.mu, "mu")

    @property
    def shrink(self) -> float:
        return self.mu

    def init_server(self, x0: Vec) -> Model:
        return Model(x0)

    def broadcast(self, server: Model) -> Model:
        return Model(server.x)

    def direction(self, x: Vec, grad: Grad, down: Model, client: Nothing) -> Vec:
        return add_prox_(grad(x), x, down.x, self.mu)  # line 2

    def upload(self, xK: Vec, down: Model, client: Nothing, run: Local) -> tuple[Movement, Nothing]:
        return Movement(xK - down.x), client

    def update(self, server: Model, mean: Movement, round: Round) -> Model:
        return Model(server.x + self.eta_g * mean.D)  # line 4
