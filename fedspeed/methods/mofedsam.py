"""MoFedSAM: FedCM along a sharpness-aware gradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from ..utils.params import param
from .base import Grad, Local, Method, Movement, Nothing, Round
from .terms import MIXED, sam_gradient, zeros

if TYPE_CHECKING:
    from torch import Tensor as Vec


class Server(NamedTuple):
    x: Vec
    Delta: Vec  # the last round's mean direction, 0 at first


Down = Server  # all of it is sent


@dataclass(frozen=True)
class MoFedSAM(Method):
    """FedCM with the fresh gradient taken at an ascended point.

        1  server sends x^t and Delta^t to the clients of S^t
        2  client i, from x_i0 = x^t, for k = 0..K-1:
               g2 = g_i(x_ik + rho g1 / ||g1||), g1 = g_i(x_ik), the same minibatch
               x_i,k+1 = x_ik - eta_l (alpha g2 + (1 - alpha) Delta^t)
        3  server:   x^{t+1} = x^t + eta_g mean_S D_i,   D_i = x_iK - x^t
        4            Delta^{t+1} = -mean_S D_i / (K eta_l)

    Recovers: rho = 0: FedCM. alpha = 1: FedSAM.

    Args:
        alpha: weight of the FRESH gradient.
        rho: length of the ascent step.
        eta_g: server rate.
        ascent_fraction: part of the minibatch used for g1; a step costs 1 + this many gradients.

    Example:
        >>> MoFedSAM().mix
        0.1

    Reference: Qu et al., Generalized Federated Learning via Sharpness Aware Minimization, ICML 2022.
    """

    alpha: float = param(0.1, "(0, 1]", "alpha, the weight of the fresh gradient", tune="0.03..1:log")
    rho: float = param(0.1, "[0, inf)", "rho, length of the ascent step", schedulable=True, tune="0.01..0.5:log")
    eta_g: float = param(1.0, "(0, inf)", "the server rate eta_g")
    ascent_fraction: float = param(1.0, "(0, 1]", "the part of the minibatch used for the ascent gradient")
    family = "sharpness-aware"
    reads_gradient_from_D = MIXED
    reads_K = True

    @property
    def mix(self) -> float:
        return self.alpha  # Delta holds the other rounds' weight decay already

    def init_server(self, x0: Vec) -> Server:
        return Server(x0, zeros(x0))

    def broadcast(self, server: Server) -> Down:
        return Down(server.x, server.Delta)

    def direction(self, x: Vec, grad: Grad, down: Down, client: Nothing) -> Vec:
        return (
            self.alpha * sam_gradient(x, grad, self.rho, self.ascent_fraction) + (1 - self.alpha) * down.Delta
        )  # line 2

    def upload(self, xK: Vec, down: Down, client: Nothing, run: Local) -> tuple[Movement, Nothing]:
        return Movement(xK - down.x), client

    def update(self, server: Server, mean: Movement, round: Round) -> Server:
        Delta = -mean.D / round.lr_sum  # line 4
        return Server(server.x + self.eta_g * mean.D, Delta)  # line 3
