"""FedAdagrad: Adagrad at the server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from ..method import Grad, Local, Method, Nothing, Round
from ..params import param
from .terms import zeros

if TYPE_CHECKING:
    from torch import Tensor as Vec


class Server(NamedTuple):
    x: Vec
    m: Vec  # first moment of mean_S D_i
    v: Vec  # second moment, starts at v0


class Down(NamedTuple):
    x: Vec


class Up(NamedTuple):
    D: Vec  # x_iK - x^t


@dataclass(frozen=True)
class FedAdagrad(Method):
    """Local SGD, then Adagrad at the server on the mean movement Dbar = mean_S D_i as a pseudo-gradient.

        1  server sends x^t; client i runs K steps of SGD from it and sends D_i = x_iK - x^t
        2  m = beta1 m + (1 - beta1) Dbar
        3  v = v + Dbar^2
        4  x^{t+1} = x^t + eta_g m / (sqrt(v) + tau)              element by element; the sign is plus

    No bias correction; tau is added to the root, not under it; eta_g does not decay with the local rate.
    From v = 0 with tau = 0 and beta1 = 0 the first step is eta_g sign(Dbar).

    Args:
        eta_g: server rate (the FedSpeed paper: 0.1; small models want 0.01).
        beta1: the first moment's memory (beta1 = 0 is the original).
        tau: the paper's "minimal value".
        v0: where v starts; 0 as in the authors' code, tau^2 in the original.

    Example:
        >>> FedAdagrad(eta_g=0.01).tau
        0.001

    Reference: Reddi et al., Adaptive Federated Optimization, ICLR 2021.
    """

    eta_g: float = param(0.1, "(0, inf)", "the server rate eta_g", tune="0.003..0.3:log")
    beta1: float = param(0.0, "[0, 1)", "beta1, the memory of the first moment")
    tau: float = param(1e-3, "[0, inf)", "tau, added to sqrt(v)")
    v0: float = param(0.0, "[0, inf)", "the start of the second moment v")
    family = "adaptive server"

    def init_server(self, x0: Vec) -> Server:
        return Server(x0, zeros(x0), zeros(x0) + self.v0)

    def broadcast(self, server: Server) -> Down:
        return Down(server.x)

    def direction(self, x: Vec, grad: Grad, down: Down, client: Nothing) -> Vec:
        return grad(x)  # line 1

    def upload(self, xK: Vec, down: Down, client: Nothing, run: Local) -> tuple[Up, Nothing]:
        return Up(xK - down.x), client

    def update(self, server: Server, mean: Up, round: Round) -> Server:
        m = self.beta1 * server.m + (1 - self.beta1) * mean.D  # line 2
        v = server.v + mean.D**2  # line 3
        return Server(server.x + self.eta_g * m / (v.sqrt() + self.tau), m, v)  # line 4
