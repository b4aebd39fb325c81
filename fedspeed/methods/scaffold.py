"""SCAFFOLD and FedGamma: control variates against client drift, the latter along a sharpness-aware gradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ..utils.checked_fields import param
from .base import Grad, Local, Method, Round, Vec
from .terms import VARIATE, sam_gradient, zeros


class Server(NamedTuple):
    x: Vec
    c: Vec  # mean of c_i over ALL clients


Down = Server  # all of it is sent


class Client(NamedTuple):
    c: Vec  # c_i, the client's control variate


class Up(NamedTuple):
    D: Vec  # x_iK - x^t
    dc: Vec  # c_i^+ - c_i


class Variates(Method):
    """Lines 1 and 3 to 5 of both: variates start at 0, and the server's is the mean of all clients'."""

    eta_g: float
    running_mean = ("c", "c")
    reads_gradient_from_D = VARIATE

    def init_server(self, x0: Vec) -> Server:
        return Server(x0, zeros(x0))

    def init_client(self, x0: Vec) -> Client:
        return Client(zeros(x0))

    def broadcast(self, server: Server) -> Down:
        return Down(server.x, server.c)

    def upload(self, xK: Vec, down: Down, client: Client, run: Local) -> tuple[Up, Client]:
        D = xK - down.x
        c = client.c - down.c - D / run.lr_sum  # line 3
        return Up(D, c - client.c), Client(c)

    def update(self, server: Server, mean: Up, round: Round) -> Server:
        x = server.x + self.eta_g * mean.D  # line 4
        return Server(x, server.c + round.S / round.N * mean.dc)  # line 5


@dataclass(frozen=True)
class Scaffold(Variates):
    """Local SGD whose direction is corrected by what the client and the federation did last (option II).

        1  server sends x^t and c to the clients of S^t
        2  client i, from x_i0 = x^t, for k = 0..K_i-1:   x_i,k+1 = x_ik - eta_l (g_i(x_ik) - c_i + c)
        3  c_i^+ = c_i - c + (x^t - x_iK) / (K_i eta_l)           K_i and eta_l of THIS client and round
        4  server:   x^{t+1} = x^t + eta_g mean_S D_i,   D_i = x_iK - x^t
        5            c = c + (1/N) sum_S (c_i^+ - c_i)            so c stays the mean of ALL c_i

    All variates start at 0, so round 1 is FedAvg.

    Args:
        eta_g: server rate.

    Example:
        >>> Scaffold().name
        'scaffold'

    Reference: Karimireddy et al., SCAFFOLD: Stochastic Controlled Averaging for Federated Learning, ICML 2020.
    """

    eta_g: float = param(1.0, "(0, inf)", "the server rate eta_g")
    family = "control variates"

    def direction(self, x: Vec, grad: Grad, down: Down, client: Client) -> Vec:
        return grad(x).sub_(client.c).add_(down.c)  # line 2


@dataclass(frozen=True)
class FedGamma(Variates):
    """SCAFFOLD with the gradient taken at an ascended point.

        1  server sends x^t and c to the clients of S^t
        2  client i, from x_i0 = x^t, for k = 0..K_i-1:
               g2 = g_i(x_ik + rho g1 / ||g1||), g1 = g_i(x_ik), the same minibatch
               x_i,k+1 = x_ik - eta_l (g2 - c_i + c)              the ascent does not see c_i and c
        3  c_i^+ = c_i - c + (x^t - x_iK) / (K_i eta_l)
        4  server:   x^{t+1} = x^t + eta_g mean_S D_i,   D_i = x_iK - x^t
        5            c = c + (1/N) sum_S (c_i^+ - c_i)

    Recovers: rho = 0: SCAFFOLD. Round 1 is FedSAM.

    Args:
        rho: length of the ascent step.
        eta_g: server rate.
        ascent_fraction: part of the minibatch used for g1; a step costs 1 + this many gradients.

    Example:
        >>> FedGamma().rho
        0.01

    Reference: Dai et al., FedGAMMA: Federated Learning with Global Sharpness-Aware Minimization, TNNLS 2023.
    """

    rho: float = param(0.01, "[0, inf)", "rho, length of the ascent step", schedulable=True, tune="0.01..0.5:log")
    eta_g: float = param(1.0, "(0, inf)", "the server rate eta_g")
    ascent_fraction: float = param(1.0, "(0, 1]", "the part of the minibatch used for the ascent gradient")
    family = "sharpness-aware"

    def direction(self, x: Vec, grad: Grad, down: Down, client: Client) -> Vec:
        g = sam_gradient(x, grad, self.rho, self.ascent_fraction)
        return g.sub_(client.c).add_(down.c)  # line 2
