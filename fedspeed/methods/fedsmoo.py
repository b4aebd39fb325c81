"""FedSMOO: FedDyn with a consistent sharpness-aware direction."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from ..utils.params import param
from .base import Grad, Local, Method, Round
from .terms import add_corrected_prox_, ascent_, check_prox, unit, zeros

if TYPE_CHECKING:
    from torch import Tensor as Vec


class Server(NamedTuple):
    x: Vec
    H: Vec  # mean of h_i over ALL clients
    s: Vec  # the federation's ascent vector


class Down(NamedTuple):
    x: Vec
    s: Vec


class Client(NamedTuple):
    h: Vec  # h_i: the sum of the client's own past D_i
    mu: Vec  # mu_i, the dual of the ascent vector


class Up(NamedTuple):
    D: Vec  # x_iK - x^t
    mu: Vec  # mu_i


@dataclass(frozen=True)
class FedSMOO(Method):
    """FedDyn whose ascent vectors are also driven to agree, by a dual of their own.

        1  server sends x^t and s to the clients of S^t
        2  client i, from x_i0 = x^t, for k = 0..K-1:
        3      q = g_i(x_ik) - mu_i - s;   e = rho q / (||q|| + 1e-7)
        4      mu_i = mu_i + e - s                                 at EVERY local step
        5      x_i,k+1 = x_ik - eta_l (g_i(x_ik + e) + (h_i + x_ik - x^t) / lam)    the same minibatch
        6  h_i = h_i + D_i, D_i = x_iK - x^t;   client i sends D_i and mu_i
        7  server:   H = H + (S/N) mean_S D_i;   x^{t+1} = x^t + mean_S D_i + H
        8            s = rho a / (||a|| + 1e-7), a = mean_S mu_i

    As in the authors' code, which drops one term (the client's last ascent vector) of the original update of s.

    Args:
        lam: penalty parameter, 1/w of the prox weight w.
        rho: length of the ascent vectors.
        ascent_fraction: part of the minibatch used for the gradient of line 3; a step costs 1 + this many gradients.

    Example:
        >>> FedSMOO(rho=0.1).lam
        10.0

    Reference: Sun et al., Dynamic Regularized Sharpness Aware Minimization in Federated Learning: Approaching Global
    Consistency and Smooth Landscape, ICML 2023.
    """

    lam: float = param(10.0, "(0, inf)", "the penalty parameter lambda, 1/w of the prox weight w", tune="1..100:log")
    rho: float = param(0.1, "[0, inf)", "rho, length of the ascent vectors", schedulable=True, tune="0.01..0.5:log")
    ascent_fraction: float = param(1.0, "(0, 1]", "the part of the minibatch used for the ascent gradient")
    family = "sharpness-aware"
    paper_decay = 0.9995  # a prox term and a dual: the paper takes a slower decay
    running_mean = ("h", "H")

    def check(self, lr: float, active: int, clients: int) -> None:
        check_prox("FedSMOO", lr, 1 / self.lam, "1/lam")

    @property
    def shrink(self) -> float:
        return 1 / self.lam

    def init_server(self, x0: Vec) -> Server:
        return Server(x0, zeros(x0), zeros(x0))

    def init_client(self, x0: Vec) -> Client:
        return Client(zeros(x0), zeros(x0))

    def broadcast(self, server: Server) -> Down:
        return Down(server.x, server.s)

    def direction(self, x: Vec, grad: Grad, down: Down, client: Client) -> Vec:
        q = grad(x, self.ascent_fraction).sub_(client.mu).sub_(down.s)
        e = ascent_(q, self.rho)  # line 3
        client.mu.add_(e).sub_(down.s)  # line 4
        return add_corrected_prox_(grad(e.add_(x)), x, down.x, client.h, 1 / self.lam)  # line 5

    def upload(self, xK: Vec, down: Down, client: Client, run: Local) -> tuple[Up, Client]:
        D = xK - down.x
        return Up(D, client.mu), Client(client.h + D, client.mu)  # line 6

    def update(self, server: Server, mean: Up, round: Round) -> Server:
        H = server.H + round.S / round.N * mean.D  # line 7
        return Server(server.x + mean.D + H, H, self.rho * unit(mean.mu))  # line 8
