"""FedCM: client-level momentum."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from ..utils.params import param
from .base import Grad, Local, Method, Movement, Nothing, Round
from .terms import MIXED, zeros

if TYPE_CHECKING:
    from torch import Tensor as Vec


class Server(NamedTuple):
    x: Vec
    Delta: Vec  # the last round's mean direction, 0 at first


Down = Server  # all of it is sent


@dataclass(frozen=True)
class FedCM(Method):
    """Local steps that mix the fresh gradient with the federation's last direction.

        1  server sends x^t and Delta^t to the clients of S^t
        2  client i, from x_i0 = x^t, for k = 0..K-1:
               x_i,k+1 = x_ik - eta_l (alpha g_i(x_ik) + (1 - alpha) Delta^t)
        3  server:   x^{t+1} = x^t + eta_g mean_S D_i,   D_i = x_iK - x^t
        4            Delta^{t+1} = -mean_S D_i / (K eta_l)        K the round's mean, eta_l of this round

    Weight decay is a part of g_i: added outside the mix it would be inflated by 1/alpha, since Delta holds it already.
    Recovers: alpha = 1: FedAvg. Round 1 is FedAvg at rate alpha eta_l.

    Args:
        alpha: weight of the FRESH gradient.
        eta_g: server rate.

    Example:
        >>> FedCM(alpha=0.1).mix
        0.1

    Reference: Xu et al., FedCM: Federated Learning with Client-level Momentum, 2021.
    """

    alpha: float = param(0.1, "(0, 1]", "alpha, the weight of the fresh gradient", tune="0.03..1:log")
    eta_g: float = param(1.0, "(0, inf)", "the server rate eta_g")
    family = "momentum"
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
        return grad(x).mul_(self.alpha).add_(down.Delta, alpha=1 - self.alpha)  # line 2

    def upload(self, xK: Vec, down: Down, client: Nothing, run: Local) -> tuple[Movement, Nothing]:
        return Movement(xK - down.x), client

    def update(self, server: Server, mean: Movement, round: Round) -> Server:
        Delta = -mean.D / round.lr_sum  # line 4
        return Server(server.x + self.eta_g * mean.D, Delta)  # line 3
