"""FedTOGA: FedSpeed that looks at the federation's last update."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ..utils.checked_fields import param
from .base import Dual, Grad, Local, Method, Movement, Round, Vec
from .terms import add_corrected_prox_, ascend_, check_prox, zeros


class Server(NamedTuple):
    x: Vec
    H: Vec  # mean of h_i over ALL clients
    Delta: Vec  # -mean_S D_i / K of the last round, 0 at first


class Down(NamedTuple):
    x: Vec
    Delta: Vec


@dataclass(frozen=True)
class FedTOGA(Method):
    """FedSpeed whose ascent step and whose direction follow the last round's mean step as well.

        1  server sends x^t and Delta to the clients of S^t
        2  client i, from x_i0 = x^t, for k = 0..K-1:   q = g_i(x_ik) + kappa Delta,   e = rho q / (||q|| + 1e-7),
               x_i,k+1 = x_ik - eta_l (g_i(x_ik + e) + (h_i + x_ik - x^t) / lam + beta Delta)     the same minibatch
        3  h_i += D_i,   D_i = x_iK - x^t
        4  server:   H += (S/N) mean_S D_i,   Delta = -mean_S D_i / K
        5            x^{t+1} = x^t + mean_S D_i + H

    Delta has the length of a step, not of a gradient: it holds eta_l. The box is from the abstract and from third-party
    code, whose ascent adds h_i - x^t where Delta is meant, and the last step's gradient (the paper's neighbourhood
    perturbation, which is not here).

    Recovers: kappa = beta = 0, or a first round: FedSpeed. rho = beta = 0: FedDyn(alpha=1/lam).

    Args:
        lam: the prox weight's inverse, as FedSpeed's.
        rho: length of the ascent step.
        kappa: weight of Delta in the ascent.
        beta: weight of Delta in the direction.

    Example:
        >>> FedTOGA().shrink
        0.1

    Reference: Li et al., Neighborhood and Global Perturbations Supported SAM in Federated Learning: From Local Tweaks
    To Global Awareness, 2024.
    """

    lam: float = param(10.0, "(0, inf)", "lambda, 1/alpha of FedDyn and 1/w of the prox weight w", tune="1..100:log")
    rho: float = param(0.1, "[0, inf)", "rho, length of the ascent step", schedulable=True, tune="0.01..0.5:log")
    kappa: float = param(1.0, "[0, inf)", "kappa, weight of the last mean step in the ascent")
    beta: float = param(0.9, "[0, inf)", "beta, weight of the last mean step in the direction")
    family = "primal-dual"
    paper_decay = 0.9995  # a prox term and a dual: the paper takes a slower decay
    running_mean = ("h", "H")
    reads_gradient_from_D = (
        "its Delta takes -mean D_i / K as the mean of eta_l times a gradient, which it is after plain SGD steps alone"
    )
    reads_K = True

    def check(self, lr: float, active: int, clients: int) -> None:
        check_prox("FedTOGA", lr, 1 / self.lam, "1/lam")

    @property
    def shrink(self) -> float:
        return 1 / self.lam

    def init_server(self, x0: Vec) -> Server:
        return Server(x0, zeros(x0), zeros(x0))

    def init_client(self, x0: Vec) -> Dual:
        return Dual(zeros(x0))

    def broadcast(self, server: Server) -> Down:
        return Down(server.x, server.Delta)

    def direction(self, x: Vec, grad: Grad, down: Down, client: Dual) -> Vec:
        g = grad(x)
        if self.rho:
            g = grad(ascend_(x, g.add_(down.Delta, alpha=self.kappa), self.rho))
        return add_corrected_prox_(g, x, down.x, client.h, 1 / self.lam).add_(down.Delta, alpha=self.beta)  # line 2

    def upload(self, xK: Vec, down: Down, client: Dual, run: Local) -> tuple[Movement, Dual]:
        D = xK - down.x
        return Movement(D), Dual(client.h + D)  # line 3

    def update(self, server: Server, mean: Movement, round: Round) -> Server:
        H = server.H + round.S / round.N * mean.D  # line 4
        return Server(server.x + mean.D + H, H, -mean.D / round.K)  # line 5
