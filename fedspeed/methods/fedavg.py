"""FedAvg: the mean of local SGD."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..utils.params import param
from .base import Grad, Local, Method, Model, Movement, Nothing, Round

if TYPE_CHECKING:
    from torch import Tensor as Vec


@dataclass(frozen=True)
class FedAvg(Method):
    """Local SGD on each active client, then the mean of what came back.

        1  server sends x^t to the clients of S^t
        2  client i, from x_i0 = x^t, for k = 0..K-1:   x_i,k+1 = x_ik - eta_l g_i(x_ik)
        3  client i sends D_i = x_iK - x^t
        4  server:   x^{t+1} = x^t + eta_g mean_S D_i

    Args:
        eta_g: server rate; 1 is the plain mean of the local models.

    Example:
        >>> FedAvg(eta_g=1.0).to_dict()
        {'name': 'fedavg', 'eta_g': 1.0}

    Reference: McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, AISTATS 2017.
    """

    eta_g: float = param(1.0, "(0, inf)", "the server rate eta_g")
    family = "averaging"

    def init_server(self, x0: Vec) -> Model:
        return Model(x0)

    def broadcast(self, server: Model) -> Model:
        return Model(server.x)

    def direction(self, x: Vec, grad: Grad, down: Model, client: Nothing) -> Vec:
        return grad(x)  # line 2

    def upload(self, xK: Vec, down: Model, client: Nothing, run: Local) -> tuple[Movement, Nothing]:
        return Movement(xK - down.x), client  # line 3

    def update(self, server: Model, mean: Movement, round: Round) -> Model:
        return Model((self.eta_g * mean.D).add_(server.x))  # line 4
