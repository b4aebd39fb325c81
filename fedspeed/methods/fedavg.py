"""FedAvg, FedProx and FedNova: means of local SGD, held near the server's model, and of normalised movements."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ..utils.checked_fields import param
from .base import Grad, Local, Method, Model, Movement, Nothing, Round, Vec
from .terms import add_prox_, check_prox


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


@dataclass(frozen=True)
class FedProx(Method):
    """Local SGD on F_i(x) + (mu/2) ||x - x^t||^2, then the mean of what came back.

        1  server sends x^t to the clients of S^t
        2  client i, from x_i0 = x^t, for k = 0..K-1:   x_i,k+1 = x_ik - eta_l (g_i(x_ik) + mu (x_ik - x^t))
        3  client i sends D_i = x_iK - x^t
        4  server:   x^{t+1} = x^t + eta_g mean_S D_i

    Recovers: mu = 0: FedAvg. With K = 1 the prox term is 0 and has no effect. FedSpeed(lam=1/mu, rho=0,
    correction=False) is the same method.

    Args:
        mu: prox weight, w of the FedSpeed paper's experiments and 1/lam of its Algorithm 1.
        eta_g: server rate.

    Example:
        >>> FedProx(mu=0.01).shrink
        0.01

    Reference: Li et al., Federated Optimization in Heterogeneous Networks, MLSys 2020.
    """

    mu: float = param(
        0.1, "[0, inf)", "the prox weight mu, 1/lam of FedSpeed and w of its paper's experiments", tune="0.01..1:log"
    )
    eta_g: float = param(1.0, "(0, inf)", "the server rate eta_g")
    family = "averaging"

    def check(self, lr: float, active: int, clients: int) -> None:
        check_prox("FedProx", lr, self.mu, "mu")

    @property
    def shrink(self) -> float:
        return self.mu

    def init_server(self, x0: Vec) -> Model:
        return Model(x0)

    def broadcast(self, server: Model) -> Model:
        return Model(server.x)

    def direction(self, x: Vec, grad: Grad, down: Model, client: Nothing) -> Vec:
        return add_prox_(grad(x), x, down.x, self.mu)  # line 2

    def upload(self, xK: Vec, down: Model, client: Nothing, run: Local) -> tuple[Movement, Nothing]:
        return Movement(xK - down.x), client

    def update(self, server: Model, mean: Movement, round: Round) -> Model:
        return Model(server.x + self.eta_g * mean.D)  # line 4


class Normalised(NamedTuple):
    d: Vec  # (x_iK - x^t) / a_i
    a: Vec  # a_i = K_i, one element: a number about the work


@dataclass(frozen=True)
class FedNova(Method):
    """FedAvg for clients that take different numbers of steps: no client counts for more because it did more.

        1  server sends x^t; client i runs K_i steps of SGD from it
        2  client i sends d_i = (x_iK - x^t) / a_i and a_i = K_i
        3  server:   x^{t+1} = x^t + eta_g (mean_S a_i) (mean_S d_i)

    Recovers: equal K_i: FedAvg.

    Args:
        eta_g: server rate.

    Example:
        >>> FedNova().eta_g
        1.0

    Reference: Wang et al., Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization,
    NeurIPS 2020.
    """

    eta_g: float = param(1.0, "(0, inf)", "the server rate eta_g")
    family = "averaging"
    reads_gradient_from_D = (
        "its a_i = K_i is the sum of the weights that gradients have in D_i, which it is after plain SGD steps alone"
    )
    numbers = ("a",)

    def init_server(self, x0: Vec) -> Model:
        return Model(x0)

    def broadcast(self, server: Model) -> Model:
        return Model(server.x)

    def direction(self, x: Vec, grad: Grad, down: Model, client: Nothing) -> Vec:
        return grad(x)  # line 1

    def upload(self, xK: Vec, down: Model, client: Nothing, run: Local) -> tuple[Normalised, Nothing]:
        return Normalised((xK - down.x) / run.K, xK.new_full((*xK.shape[:-1], 1), run.K)), client  # line 2

    def update(self, server: Model, mean: Normalised, round: Round) -> Model:
        return Model(server.x + self.eta_g * mean.a * mean.d)  # line 3
