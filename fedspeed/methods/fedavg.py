"""FedAvg: the mean of local SGD."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from ..method import Grad, Local, Method, Nothing, Round
from ..params import param

if TYPE_CHECKING:
    from torch import Tensor as Vec


class Server(NamedTuple):
    x: Vec


class Down(NamedTuple):
    x: Vec


class Up(NamedTuple):
    D: Vec  # x_iK - x^t


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

    def init_server(self, x0: Vec) -> Server:
        return Server(x0)

    def broadcast(self, server: Server) -> Down:
        return Down(server.x)

    def direction(self, x: Vec, grad: Grad, down: Down, client: Nothing) -> Vec:
        return grad(x)  # line 2

    def upload(self, xK: Vec, down: Down, client: Nothing, run: Local) -> tuple[Up, Nothing]:
        return Up(xK - down.x), client  # line 3

    def update(self, server: Server, mean: Up, round: Round) -> Server:
        return Server((self.eta_g * mean.D).add_(server.x))  # line 4
