"""FedACG: clients begin where the server's momentum leads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from ..utils.params import param
from .base import Grad, Local, Method, Model, Movement, Nothing, Round
from .terms import add_prox_, check_prox, zeros

if TYPE_CHECKING:
    from torch import Tensor as Vec


class Server(NamedTuple):
    x: Vec
    m: Vec  # the momentum, 0 at first


@dataclass(frozen=True)
class FedACG(Method):
    """Server momentum with a look ahead: one vector tells clients the model and where it is going.

        1  server sends x~ = x^t + gamma m to the clients of S^t
        2  client i, from x_i0 = x~, for k = 0..K-1:   x_i,k+1 = x_ik - eta_l (g_i(x_ik) + beta (x_ik - x~))
        3  server:   m = gamma m + mean_S D_i,   D_i = x_iK - x~
        4            x^{t+1} = x^t + m                            that is mean_S x_iK

    Recovers: gamma = 0: FedProx(mu=beta). With beta = 0 it is FedAvg with Nesterov's momentum at the server.

    Args:
        gamma: memory of the momentum.
        beta: weight of the prox term (beta/2) ||x - x~||^2; the authors' 0.001 ||x - x~||^2 is beta = 0.002.

    Example:
        >>> FedACG().shrink
        0.002

    Reference: Kim et al., Communication-Efficient Federated Learning with Accelerated Client Gradient, CVPR 2024.
    """

    gamma: float = param(0.85, "[0, 1)", "gamma, memory of the server's momentum")
    beta: float = param(0.002, "[0, inf)", "beta, weight of the prox term")
    family = "momentum"

    def check(self, lr: float, active: int, clients: int) -> None:
        check_prox("FedACG", lr, self.beta, "beta")

    @property
    def shrink(self) -> float:
        return self.beta

    def init_server(self, x0: Vec) -> Server:
        return Server(x0, zeros(x0))

    def broadcast(self, server: Server) -> Model:
        return Model(server.x + self.gamma * server.m)  # line 1

    def direction(self, x: Vec, grad: Grad, down: Model, client: Nothing) -> Vec:
        return add_prox_(grad(x), x, down.x, self.beta)  # line 2

    def upload(self, xK: Vec, down: Model, client: Nothing, run: Local) -> tuple[Movement, Nothing]:
        return Movement(xK - down.x), client

    def update(self, server: Server, mean: Movement, round: Round) -> Server:
        m = self.gamma * server.m + mean.D  # line 3
        return Server(server.x + m, m)  # line 4
