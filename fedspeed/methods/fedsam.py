"""FedSAM, and FedLESAM, -D and -S, whose ascent follows the movement of the server's model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ..utils.checked_fields import param
from .base import Grad, Local, Method, Model, Movement, Nothing, Round, Vec
from .scaffold import Server as VariateServer
from .scaffold import Up
from .terms import VARIATE, add_corrected_prox_, ascent_, check_prox, sam_gradient, zeros


@dataclass(frozen=True)
class FedSAM(Method):
    """FedAvg with the gradient taken at an ascended point.

        1  server sends x^t to the clients of S^t
        2  client i, from x_i0 = x^t, for k = 0..K-1:
               g2 = g_i(x_ik + rho g1 / ||g1||), g1 = g_i(x_ik), the same minibatch
               x_i,k+1 = x_ik - eta_l g2
        3  client i sends D_i = x_iK - x^t
        4  server:   x^{t+1} = x^t + eta_g mean_S D_i

    Recovers: rho = 0: FedAvg. FedSpeed(prox=False, correction=False) is the same method.

    Args:
        rho: length of the ascent step.
        eta_g: server rate.
        ascent_fraction: part of the minibatch used for g1; a step costs 1 + this many gradients.

    Example:
        >>> FedSAM(rho=0.05).rho
        0.05

    Reference: Qu et al., Generalized Federated Learning via Sharpness Aware Minimization, ICML 2022.
    """

    rho: float = param(0.1, "[0, inf)", "rho, length of the ascent step", schedulable=True, tune="0.01..0.5:log")
    eta_g: float = param(1.0, "(0, inf)", "the server rate eta_g")
    ascent_fraction: float = param(1.0, "(0, 1]", "the part of the minibatch used for the ascent gradient")
    family = "sharpness-aware"

    def init_server(self, x0: Vec) -> Model:
        return Model(x0)

    def broadcast(self, server: Model) -> Model:
        return Model(server.x)

    def direction(self, x: Vec, grad: Grad, down: Model, client: Nothing) -> Vec:
        return sam_gradient(x, grad, self.rho, self.ascent_fraction)  # line 2

    def upload(self, xK: Vec, down: Model, client: Nothing, run: Local) -> tuple[Movement, Nothing]:
        return Movement(xK - down.x), client

    def update(self, server: Model, mean: Movement, round: Round) -> Model:
        return Model(server.x + self.eta_g * mean.D)  # line 4


class Client(NamedTuple):
    x_old: Vec  # the server model received the last time
    seen: Vec  # 1 if there was a last time, else 0; one element


@dataclass(frozen=True)
class FedLESAM(Method):
    """FedSAM at the price of FedAvg: the ascent follows the way the server's model came from.

        1  server sends x^t to the clients of S^t
        2  client i:  e = rho (x_old - x^t) / (||x_old - x^t|| + 1e-7)     OLD minus NEW; 0 the first time
        3  from x_i0 = x^t, for k = 0..K-1:   x_i,k+1 = x_ik - eta_l g_i(x_ik + e)
        4  client i keeps x_old = x^t and sends D_i = x_iK - x^t
        5  server:   x^{t+1} = x^t + eta_g mean_S D_i

    Recovers: rho = 0, or a client's first round: FedAvg.

    Args:
        rho: length of the ascent step.
        eta_g: server rate.

    Example:
        >>> FedLESAM().rho
        0.1

    Reference: Fan et al., Locally Estimated Global Perturbations are Better than Local Perturbations for Federated
    Sharpness-aware Minimization, ICML 2024.
    """

    rho: float = param(0.1, "[0, inf)", "rho, length of the ascent step", schedulable=True, tune="0.01..0.5:log")
    eta_g: float = param(1.0, "(0, inf)", "the server rate eta_g")
    family = "sharpness-aware"

    def init_server(self, x0: Vec) -> Model:
        return Model(x0)

    def broadcast(self, server: Model) -> Model:
        return Model(server.x)

    def init_client(self, x0: Vec) -> Client:
        return Client(x0, x0.new_zeros(1))

    def direction(self, x: Vec, grad: Grad, down: Model, client: Client) -> Vec:
        e = ascent_(client.x_old - down.x, self.rho).mul_(client.seen)  # line 2
        return grad(e.add_(x))  # line 3

    def upload(self, xK: Vec, down: Model, client: Client, run: Local) -> tuple[Movement, Client]:
        return Movement(xK - down.x), Client(down.x, client.seen.new_ones(client.seen.shape))  # line 4

    def update(self, server: Model, mean: Movement, round: Round) -> Model:
        return Model(server.x + self.eta_g * mean.D)  # line 5


class DualServer(NamedTuple):
    x: Vec
    H: Vec  # mean of h_i over ALL clients


class DualClient(NamedTuple):
    h: Vec  # the sum of the client's own past D_i
    x_old: Vec
    seen: Vec


@dataclass(frozen=True)
class FedLESAMD(Method):
    """FedLESAM-D: the ascent of FedLESAM, the prox term and the dual of FedDyn, one gradient per step.

        1  server sends x^t to the clients of S^t
        2  client i:  e = rho (x_old - x^t) / (||x_old - x^t|| + 1e-7)     OLD minus NEW; 0 the first time
        3  from x_i0 = x^t, for k = 0..K-1:   x_i,k+1 = x_ik - eta_l (g_i(x_ik + e) + (h_i + x_ik - x^t) / lam)
        4  client i keeps x_old = x^t and h_i += D_i,   D_i = x_iK - x^t
        5  server:   H += (S/N) mean_S D_i,   x^{t+1} = x^t + mean_S D_i + H

    Recovers: rho = 0: FedDyn(alpha=1/lam).
    The released code (MediaBrain-SJTU/FedLESAM@8a9fe90, optimizer/LESAM_D.py) ascends along the LAST round's movement
    of the server for every client, and adds to every entry of tensor number j the one number at place j of that vector.

    Args:
        rho: length of the ascent step.
        lam: 1/lam weighs prox term and dual, alpha of FedDyn.

    Example:
        >>> FedLESAMD(lam=10).shrink
        0.1

    Reference: Fan et al., Locally Estimated Global Perturbations are Better than Local Perturbations for Federated
    Sharpness-aware Minimization, ICML 2024. They ran lr 0.1, decay 0.998, weight decay 1e-3, 5 epochs, batch 50.
    """

    rho: float = param(0.1, "[0, inf)", "rho, length of the ascent step", schedulable=True, tune="0.01..0.5:log")
    lam: float = param(10.0, "(0, inf)", "lam, 1/lam weighs prox term and dual", tune="1..100:log")
    family = "sharpness-aware"
    paper_decay = 0.9995  # a prox term and a dual: the paper takes a slower decay
    running_mean = ("h", "H")

    def check(self, lr: float, active: int, clients: int) -> None:
        check_prox("FedLESAMD", lr, 1 / self.lam, "1/lam")

    @property
    def shrink(self) -> float:
        return 1 / self.lam

    def init_server(self, x0: Vec) -> DualServer:
        return DualServer(x0, zeros(x0))

    def init_client(self, x0: Vec) -> DualClient:
        return DualClient(zeros(x0), x0, x0.new_zeros(1))

    def broadcast(self, server: DualServer) -> Model:
        return Model(server.x)

    def direction(self, x: Vec, grad: Grad, down: Model, client: DualClient) -> Vec:
        e = ascent_(client.x_old - down.x, self.rho).mul_(client.seen)  # line 2
        return add_corrected_prox_(grad(e.add_(x)), x, down.x, client.h, 1 / self.lam)  # line 3

    def upload(self, xK: Vec, down: Model, client: DualClient, run: Local) -> tuple[Movement, DualClient]:
        D = xK - down.x
        return Movement(D), DualClient(client.h + D, down.x, client.seen.new_ones(client.seen.shape))  # line 4

    def update(self, server: DualServer, mean: Movement, round: Round) -> DualServer:
        H = server.H + round.S / round.N * mean.D
        return DualServer(server.x + mean.D + H, H)  # line 5


class VariateClient(NamedTuple):
    c: Vec  # c_i, the client's control variate
    x_old: Vec
    seen: Vec


@dataclass(frozen=True)
class FedLESAMS(Method):
    """FedLESAM-S: the ascent of FedLESAM, the control variates of SCAFFOLD, one gradient per step.

        1  server sends x^t and c to the clients of S^t
        2  client i:  e = rho (x_old - x^t) / (||x_old - x^t|| + 1e-7)     OLD minus NEW; 0 the first time
        3  from x_i0 = x^t, for k = 0..K_i-1:   x_i,k+1 = x_ik - eta_l (g_i(x_ik + e) - c_i + c)
        4  client i keeps x_old = x^t and c_i^+ = c_i - c + (x^t - x_iK) / (K_i eta_l)
        5  server:   x^{t+1} = x^t + eta_g mean_S D_i,   D_i = x_iK - x^t
        6            c = c + (1/N) sum_S (c_i^+ - c_i)

    Recovers: rho = 0: SCAFFOLD.
    The released code (MediaBrain-SJTU/FedLESAM@8a9fe90, client/fedlesam_s.py) weighs c - c_i with its flag lamb, 0.1,
    and has FedLESAM-D's perturbation: see there.

    Args:
        rho: length of the ascent step.
        eta_g: server rate.

    Example:
        >>> FedLESAMS().rho
        0.1

    Reference: Fan et al., Locally Estimated Global Perturbations are Better than Local Perturbations for Federated
    Sharpness-aware Minimization, ICML 2024. They ran lr 0.1, decay 0.998, weight decay 1e-3, 5 epochs, batch 50.
    """

    rho: float = param(0.1, "[0, inf)", "rho, length of the ascent step", schedulable=True, tune="0.01..0.5:log")
    eta_g: float = param(1.0, "(0, inf)", "the server rate eta_g")
    family = "sharpness-aware"
    running_mean = ("c", "c")
    reads_gradient_from_D = VARIATE

    def init_server(self, x0: Vec) -> VariateServer:
        return VariateServer(x0, zeros(x0))

    def init_client(self, x0: Vec) -> VariateClient:
        return VariateClient(zeros(x0), x0, x0.new_zeros(1))

    def broadcast(self, server: VariateServer) -> VariateServer:
        return VariateServer(server.x, server.c)

    def direction(self, x: Vec, grad: Grad, down: VariateServer, client: VariateClient) -> Vec:
        e = ascent_(client.x_old - down.x, self.rho).mul_(client.seen)  # line 2
        return grad(e.add_(x)).sub_(client.c).add_(down.c)  # line 3

    def upload(self, xK: Vec, down: VariateServer, client: VariateClient, run: Local) -> tuple[Up, VariateClient]:
        D = xK - down.x
        c = client.c - down.c - D / run.lr_sum  # line 4
        return Up(D, c - client.c), VariateClient(c, down.x, client.seen.new_ones(client.seen.shape))

    def update(self, server: VariateServer, mean: Up, round: Round) -> VariateServer:
        x = server.x + self.eta_g * mean.D  # line 5
        return VariateServer(x, server.c + round.S / round.N * mean.dc)  # line 6
