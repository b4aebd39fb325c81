"""FedGloSS: sharpness-aware at the server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from ..utils.params import param
from .base import Dual, Grad, Local, Method, Model, Movement, Round
from .terms import add_corrected_prox_, check_prox, sam_gradient, unit, zeros

if TYPE_CHECKING:
    from torch import Tensor as Vec


class Server(NamedTuple):
    x: Vec
    H: Vec  # mean of h_i over ALL clients
    G: Vec  # the last round's mean_S D_i, 0 at first


@dataclass(frozen=True)
class FedGloSS(Method):
    """FedDyn whose server sends a model that it has moved uphill, against its own last step.

        1  server sends x~ = x^t - rho G / (||G|| + 1e-7)        G = 0 at first; x^t is evaluated, never x~
        2  client i, from x_i0 = x~, for k = 0..K-1:
               g~ = g_i(x_ik + rho_l g1 / (||g1|| + 1e-7)),   g1 = g_i(x_ik) on the same minibatch
               x_i,k+1 = x_ik - eta_l (g~ + (h_i + x_ik - x~) / lam)
        3  h_i += D_i,   D_i = x_iK - x~
        4  server:   H += (S/N) mean_S D_i;   G = mean_S D_i
        5            x^{t+1} = x^t + mean_S D_i + H              from x^t, not from x~

    The authors' code divides line 4's step of H by the number of active clients once more, repeats lines 2 and 3 in
    every epoch (theirs have one), and its warm-up of the server's rho does not rise; here both can have one.

    Weighted by samples, S and N count samples and H is the mean of h_i under the weights of the models, so that rho = 0
    ends at the optimum of the weighted risk; the authors' code sums the duals without weights.

    Recovers: rho = 0: FedSpeed(rho=rho_l). rho = rho_l = 0: FedDyn(alpha=1/lam).

    Args:
        lam: the paper's beta, 10 on CIFAR-10 and 100 on CIFAR-100 there; 1/alpha of FedDyn.
        rho: length of the server's ascent step; 0.15 there on CIFAR-10, 0.01 on CIFAR-100.
        rho_l: length of the clients' ascent step; 0 is plain SGD, at half the cost.

    Example:
        >>> FedGloSS(rho_l=0).shrink
        0.1

    Reference: Caldarola et al., Beyond Local Sharpness: Communication-Efficient Global Sharpness-aware Minimization for
    Federated Learning, CVPR 2025.
    """

    lam: float = param(10.0, "(0, inf)", "the paper's beta, 1/alpha of FedDyn", tune="1..100:log")
    rho: float = param(
        0.15, "[0, inf)", "rho, length of the server's ascent step", schedulable=True, tune="0.01..0.5:log"
    )
    rho_l: float = param(
        0.15, "[0, inf)", "rho_l, length of the clients' ascent step", schedulable=True, tune="0.01..0.5:log"
    )
    family = "sharpness-aware"
    paper_decay = 0.9995  # a prox term and a dual: the paper takes a slower decay
    running_mean = ("h", "H")

    def check(self, lr: float, active: int, clients: int) -> None:
        check_prox("FedGloSS", lr, 1 / self.lam, "1/lam")

    @property
    def shrink(self) -> float:
        return 1 / self.lam

    def init_server(self, x0: Vec) -> Server:
        return Server(x0, zeros(x0), zeros(x0))

    def init_client(self, x0: Vec) -> Dual:
        return Dual(zeros(x0))

    def broadcast(self, server: Server) -> Model:
        return Model(server.x - self.rho * unit(server.G))  # line 1

    def direction(self, x: Vec, grad: Grad, down: Model, client: Dual) -> Vec:
        g = sam_gradient(x, grad, self.rho_l)
        return add_corrected_prox_(g, x, down.x, client.h, 1 / self.lam)  # line 2

    def upload(self, xK: Vec, down: Model, client: Dual, run: Local) -> tuple[Movement, Dual]:
        D = xK - down.x
        return Movement(D), Dual(client.h + D)  # line 3

    def update(self, server: Server, mean: Movement, round: Round) -> Server:
        H = server.H + round.S / round.N * mean.D  # line 4
        return Server(server.x + mean.D + H, H, mean.D)  # line 5
