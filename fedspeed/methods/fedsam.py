"""FedSAM: FedAvg along a sharpness-aware gradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..utils.params import param
from .base import Grad, Local, Method, Model, Movement, Nothing, Round
from .terms import sam_gradient

if TYPE_CHECKING:
    from torch import Tensor as Vec


@dataclass(frozen=True)
class FedSAM(Method):
    """FedAvg with the gradient taken at an ascended point.

        1  server sends x^t to the clients of S^t
        2  client i, from x_i0 = x^t, for k = 0..K-1:
               g2 = g_i(x_ik + rho g1 / ||g1||), g1 = g_i(x_ik), the same minibatch
               x_i,k+1 = x_ik - eta_l g2
        3  client i sends D_i = x_iK - x^t
        4  server:   x^{t+1} = x^t + eta_g mean_S D_i

    Recovers: rho = 0: FedAvg. FedSpeed(prox=False, correction=False) is the same method.

    Args:
        rho: length of the ascent step.
        eta_g: server rate.
        ascent_fraction: part of the minibatch used for g1; a step costs 1 + this many gradients.

    Example:
        >>> FedSAM(rho=0.05).rho
        0.05

    Reference: Qu et al., Generalized Federated Learning via Sharpness Aware Minimization, ICML 2022.
    """

    rho: float = param(0.1, "[0, inf)", "rho, length of the ascent step", schedulable=True, tune="0.01..0.5:log")
    eta_g: float = param(1.0, "(0, inf)", "the server rate eta_g")
    ascent_fraction: float = param(1.0, "(0, 1]", "the part of the minibatch used for the ascent gradient")
    family = "sharpness-aware"

    def init_server(self, x0: Vec) -> Model:
        return Model(x0)

    def broadcast(self, server: Model) -> Model:
        return Model(server.x)

    def direction(self, x: Vec, grad: Grad, down: Model, client: Nothing) -> Vec:
        return sam_gradient(x, grad, self.rho, self.ascent_fraction)  # line 2

    def upload(self, xK: Vec, down: Model, client: Nothing, run: Local) -> tuple[Movement, Nothing]:
        return Movement(xK - down.x), client

    def update(self, server: Model, mean: Movement, round: Round) -> Model:
        return Model(server.x + self.eta_g * mean.D)  # line 4
