"""FedDyn: dynamic regularisation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from ..utils.params import param
from .base import Dual, Grad, Local, Method, Model, Movement, Round
from .terms import add_corrected_prox_, check_prox, zeros

if TYPE_CHECKING:
    from torch import Tensor as Vec


class Server(NamedTuple):
    x: Vec
    H: Vec  # mean of h_i over ALL clients


@dataclass(frozen=True)
class FedDyn(Method):
    """Local SGD on a risk that each client bends so that the federation's optimum is its own.

        1  server sends x^t to the clients of S^t
        2  client i, from x_i0 = x^t, for k = 0..K-1:
               x_i,k+1 = x_ik - eta_l (g_i(x_ik) - g_hat_i + alpha (x_ik - x^t))
        3  g_hat_i = g_hat_i - alpha D_i, D_i = x_iK - x^t        that is h_i += D_i
        4  server:   h = h - (alpha/N) sum_S D_i                  that is H += (S/N) mean_S D_i
        5            x^{t+1} = mean_S x_iK - h/alpha              that is x^t + mean_S D_i + H

    The same as FedSpeed(lam=1/alpha, rho=0, server="all"); under full participation also FedADMM.

    Args:
        alpha: weight of the regulariser, w of the FedSpeed paper's experiments, 1/lam of its Algorithm 1. The server
            divides by it, so it cannot be 0.

    Example:
        >>> FedDyn(alpha=0.1).shrink
        0.1

    Reference: Acar et al., Federated Learning Based on Dynamic Regularization, ICLR 2021.
    """

    alpha: float = param(0.1, "(0, inf)", "alpha, weight of the regulariser, 1/lam of FedSpeed", tune="0.01..1:log")
    family = "primal-dual"
    paper_decay = 0.9995  # a prox term and a dual: the paper takes a slower decay
    running_mean = ("h", "H")

    def check(self, lr: float, active: int, clients: int) -> None:
        check_prox("FedDyn", lr, self.alpha, "alpha")

    @property
    def shrink(self) -> float:
        return self.alpha

    def init_server(self, x0: Vec) -> Server:
        return Server(x0, zeros(x0))

    def init_client(self, x0: Vec) -> Dual:
        return Dual(zeros(x0))

    def broadcast(self, server: Server) -> Model:
        return Model(server.x)

    def direction(self, x: Vec, grad: Grad, down: Model, client: Dual) -> Vec:
        return add_corrected_prox_(grad(x), x, down.x, client.h, self.alpha)  # line 2

    def upload(self, xK: Vec, down: Model, client: Dual, run: Local) -> tuple[Movement, Dual]:
        D = xK - down.x
        return Movement(D), Dual(client.h + D)  # line 3

    def update(self, server: Server, mean: Movement, round: Round) -> Server:
        H = server.H + round.S / round.N * mean.D  # line 4
        return Server(server.x + mean.D + H, H)  # line 5
