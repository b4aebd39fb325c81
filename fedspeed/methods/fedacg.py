"""FedACG and FedNSAM: clients begin where the server's momentum leads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ..utils.checked_fields import param
from .base import Grad, Local, Method, Model, Movement, Nothing, Round, Vec
from .terms import add_prox_, check_prox, sam_gradient, unit, zeros


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


class Guided(NamedTuple):
    x: Vec  # x~
    m: Vec  # what ascent="momentum" sends as well


@dataclass(frozen=True)
class FedNSAM(Method):
    """FedACG's look ahead with perturbed gradients in place of its prox term.

        1  server sends x~ = x^t + gamma m to the clients of S^t
        2  client i, from x_i0 = x~, for k = 0..K-1:   x_i,k+1 = x_ik - eta_l g_i(x_ik + e)
               ascent="local":     e = rho g1 / (||g1|| + 1e-7), g1 = g_i(x_ik)     the authors' code; same minibatch
               ascent="momentum":  e = -rho m / (||m|| + 1e-7)                      the abstract; one gradient per step
        3  server:   m = gamma m + mean_S D_i,   D_i = x_iK - x~
        4            x^{t+1} = x^t + m

    The authors' released server sets m = (1 + gamma) mean_S D_i, which remembers nothing; line 3 is the method's own.
    Recovers: rho = 0: FedACG(beta=0). gamma = 0: FedSAM.

    Args:
        gamma: memory of the momentum.
        rho: length of the ascent step.
        ascent: `local` or `momentum`, see above; from reading code and abstract, the paper's box was not at hand.

    Example:
        >>> FedNSAM().gamma
        0.85

    Reference: Liu et al., FedNSAM: Consistency of Local and Global Flatness for Federated Learning, 2026.
    """

    gamma: float = param(0.85, "[0, 1)", "gamma, memory of the server's momentum")
    rho: float = param(0.05, "[0, inf)", "rho, length of the ascent step", schedulable=True, tune="0.01..0.5:log")
    ascent: str = param("local", ("local", "momentum"), "what the ascent step follows")
    family = "sharpness-aware"

    def init_server(self, x0: Vec) -> Server:
        return Server(x0, zeros(x0))

    def broadcast(self, server: Server) -> Model | Guided:
        ahead = server.x + self.gamma * server.m  # line 1
        return Model(ahead) if self.ascent == "local" else Guided(ahead, server.m)

    def direction(self, x: Vec, grad: Grad, down: Model | Guided, client: Nothing) -> Vec:
        if isinstance(down, Guided):
            return grad(x - self.rho * unit(down.m))  # line 2
        return sam_gradient(x, grad, self.rho)

    def upload(self, xK: Vec, down: Model | Guided, client: Nothing, run: Local) -> tuple[Movement, Nothing]:
        return Movement(xK - down.x), client

    def update(self, server: Server, mean: Movement, round: Round) -> Server:
        m = self.gamma * server.m + mean.D  # line 3
        return Server(server.x + m, m)  # line 4
