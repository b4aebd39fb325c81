"""Adaptive rates at the server: FedAdam, FedYogi and FedAdagrad."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from ..utils.checked_fields import param
from .base import Grad, Local, Method, Model, Movement, Nothing, Round, Vec
from .terms import zeros


class Server(NamedTuple):
    x: Vec
    m: Vec  # first moment of mean_S D_i
    v: Vec  # second moment, starts at v0


class LocalSGD(Method):
    """Line 1 of all three: clients run plain SGD and send how far they moved."""

    family = "adaptive server"
    v0: float

    def init_server(self, x0: Vec) -> Server:
        return Server(x0, zeros(x0), zeros(x0) + self.v0)

    def broadcast(self, server: Server) -> Model:
        return Model(server.x)

    def direction(self, x: Vec, grad: Grad, down: Model, client: Nothing) -> Vec:
        return grad(x)

    def upload(self, xK: Vec, down: Model, client: Nothing, run: Local) -> tuple[Movement, Nothing]:
        return Movement(xK - down.x), client


@dataclass(frozen=True)
class FedAdam(LocalSGD):
    """Local SGD, then Adam at the server on the mean movement Dbar = mean_S D_i as a pseudo-gradient.

        1  server sends x^t; client i runs K steps of SGD from it and sends D_i = x_iK - x^t
        2  m = beta1 m + (1 - beta1) Dbar
        3  v = beta2 v + (1 - beta2) Dbar^2
        4  x^{t+1} = x^t + eta_g m / (sqrt(v) + tau)              element by element; the sign is plus

    No bias correction; tau is added to the root, not under it; eta_g does not decay with the local rate.
    Recovers: beta1 = 0, beta2 = 1, v0 = 1, tau = 0, eta_g = 1: FedAvg.

    Args:
        eta_g: server rate (the FedSpeed paper: 0.1; small models want 0.01).
        beta1, beta2: the moments' memories; 0.9 and 0.99 are the weights 0.1 and 0.01 of the FedSpeed paper.
        tau: the paper's "minimal value".
        v0: where v starts; 0 as in the authors' code, tau^2 in the original.

    Example:
        >>> FedAdam(eta_g=0.01).tau
        0.001

    Reference: Reddi et al., Adaptive Federated Optimization, ICLR 2021.
    """

    eta_g: float = param(0.1, "(0, inf)", "the server rate eta_g", tune="0.003..0.3:log")
    beta1: float = param(0.9, "[0, 1)", "beta1, the memory of the first moment")
    beta2: float = param(0.99, "[0, 1]", "beta2, the memory of the second moment")
    tau: float = param(1e-3, "[0, inf)", "tau, added to sqrt(v)")
    v0: float = param(0.0, "[0, inf)", "the start of the second moment v")
    released: ClassVar[Mapping[str, Any]] = {"tau": 0.01}

    def update(self, server: Server, mean: Movement, round: Round) -> Server:
        m = self.beta1 * server.m + (1 - self.beta1) * mean.D  # line 2
        v = self.beta2 * server.v + (1 - self.beta2) * mean.D**2  # line 3
        return Server(server.x + self.eta_g * m / (v.sqrt() + self.tau), m, v)  # line 4


@dataclass(frozen=True)
class FedYogi(LocalSGD):
    """Local SGD, then Yogi at the server on the mean movement Dbar = mean_S D_i as a pseudo-gradient.

        1  server sends x^t; client i runs K steps of SGD from it and sends D_i = x_iK - x^t
        2  m = beta1 m + (1 - beta1) Dbar
        3  v = v - (1 - beta2) Dbar^2 sign(v - Dbar^2)
        4  x^{t+1} = x^t + eta_g m / (sqrt(v) + tau)              element by element; the sign is plus

    No bias correction; tau is added to the root, not under it; eta_g does not decay with the local rate.
    v moves by at most (1 - beta2) Dbar^2, so one large round is not forgotten at once.

    Args:
        eta_g: server rate (the FedSpeed paper: 0.1; small models want 0.01).
        beta1, beta2: the moments' memories; 0.9 and 0.99 are the weights 0.1 and 0.01 of the FedSpeed paper.
        tau: the paper's "minimal value".
        v0: where v starts; 0 as in the authors' code, tau^2 in the original.

    Example:
        >>> FedYogi(eta_g=0.01).tau
        0.001

    Reference: Reddi et al., Adaptive Federated Optimization, ICLR 2021.
    """

    eta_g: float = param(0.1, "(0, inf)", "the server rate eta_g", tune="0.003..0.3:log")
    beta1: float = param(0.9, "[0, 1)", "beta1, the memory of the first moment")
    beta2: float = param(0.99, "[0, 1]", "beta2, the memory of the second moment")
    tau: float = param(1e-3, "[0, inf)", "tau, added to sqrt(v)")
    v0: float = param(0.0, "[0, inf)", "the start of the second moment v")

    def update(self, server: Server, mean: Movement, round: Round) -> Server:
        m = self.beta1 * server.m + (1 - self.beta1) * mean.D  # line 2
        v = server.v - (1 - self.beta2) * mean.D**2 * (server.v - mean.D**2).sign()  # line 3
        return Server(server.x + self.eta_g * m / (v.sqrt() + self.tau), m, v)  # line 4


@dataclass(frozen=True)
class FedAdagrad(LocalSGD):
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

    def update(self, server: Server, mean: Movement, round: Round) -> Server:
        m = self.beta1 * server.m + (1 - self.beta1) * mean.D  # line 2
        v = server.v + mean.D**2  # line 3
        return Server(server.x + self.eta_g * m / (v.sqrt() + self.tau), m, v)  # line 4
