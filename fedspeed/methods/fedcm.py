"""FedCM, client-level momentum; MoFedSAM and FedWMSAM, which take sharpness-aware steps along it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from ..utils.checked_fields import param
from .base import Grad, Local, Method, Movement, Nothing, Round, Vec
from .terms import MIXED, VARIATE, ascent_, norm, sam_gradient, zeros


class Server(NamedTuple):
    x: Vec
    Delta: Vec  # the last round's mean direction, 0 at first


Down = Server  # all of it is sent


class Mixing(Method):
    """Lines 1, 3 and 4 of FedCM and MoFedSAM; line 2, the local step, is their own."""

    alpha: float
    eta_g: float
    reads_gradient_from_D = MIXED
    reads_K = True

    @property
    def mix(self) -> float:
        return self.alpha  # the rest of weight decay is in Delta already

    def init_server(self, x0: Vec) -> Server:
        return Server(x0, zeros(x0))

    def broadcast(self, server: Server) -> Down:
        return Down(server.x, server.Delta)

    def upload(self, xK: Vec, down: Down, client: Nothing, run: Local) -> tuple[Movement, Nothing]:
        return Movement(xK - down.x), client

    def update(self, server: Server, mean: Movement, round: Round) -> Server:
        Delta = -mean.D / round.lr_sum  # line 4
        return Server(server.x + self.eta_g * mean.D, Delta)  # line 3


@dataclass(frozen=True)
class FedCM(Mixing):
    """Local steps that mix the fresh gradient with the federation's last direction.

        1  server sends x^t and Delta^t to the clients of S^t
        2  client i, from x_i0 = x^t, for k = 0..K-1:
               x_i,k+1 = x_ik - eta_l (alpha g_i(x_ik) + (1 - alpha) Delta^t)
        3  server:   x^{t+1} = x^t + eta_g mean_S D_i,   D_i = x_iK - x^t
        4            Delta^{t+1} = -mean_S D_i / (K eta_l)        K the round's mean, eta_l of this round

    Weight decay is a part of g_i: added outside the mix it would be inflated by 1/alpha, since Delta holds it already.
    Recovers: alpha = 1: FedAvg. Round 1 is FedAvg at rate alpha eta_l.

    Args:
        alpha: weight of the FRESH gradient.
        eta_g: server rate.

    Example:
        >>> FedCM(alpha=0.1).mix
        0.1

    Reference: Xu et al., FedCM: Federated Learning with Client-level Momentum, 2021.
    """

    alpha: float = param(0.1, "(0, 1]", "alpha, the weight of the fresh gradient", tune="0.03..1:log")
    eta_g: float = param(1.0, "(0, inf)", "the server rate eta_g")
    family = "momentum"

    def direction(self, x: Vec, grad: Grad, down: Down, client: Nothing) -> Vec:
        return grad(x).mul_(self.alpha).add_(down.Delta, alpha=1 - self.alpha)  # line 2


@dataclass(frozen=True)
class MoFedSAM(Mixing):
    """FedCM with the fresh gradient taken at an ascended point.

        1  server sends x^t and Delta^t to the clients of S^t
        2  client i, from x_i0 = x^t, for k = 0..K-1:
               g2 = g_i(x_ik + rho g1 / ||g1||), g1 = g_i(x_ik), the same minibatch
               x_i,k+1 = x_ik - eta_l (alpha g2 + (1 - alpha) Delta^t)
        3  server:   x^{t+1} = x^t + eta_g mean_S D_i,   D_i = x_iK - x^t
        4            Delta^{t+1} = -mean_S D_i / (K eta_l)

    Recovers: rho = 0: FedCM. alpha = 1: FedSAM.

    Args:
        alpha: weight of the FRESH gradient.
        rho: length of the ascent step.
        eta_g: server rate.
        ascent_fraction: part of the minibatch used for g1; a step costs 1 + this many gradients.

    Example:
        >>> MoFedSAM().mix
        0.1

    Reference: Qu et al., Generalized Federated Learning via Sharpness Aware Minimization, ICML 2022.
    """

    alpha: float = param(0.1, "(0, 1]", "alpha, the weight of the fresh gradient", tune="0.03..1:log")
    rho: float = param(0.1, "[0, inf)", "rho, length of the ascent step", schedulable=True, tune="0.01..0.5:log")
    eta_g: float = param(1.0, "(0, inf)", "the server rate eta_g")
    ascent_fraction: float = param(1.0, "(0, 1]", "the part of the minibatch used for the ascent gradient")
    family = "sharpness-aware"

    def direction(self, x: Vec, grad: Grad, down: Down, client: Nothing) -> Vec:
        return (
            self.alpha * sam_gradient(x, grad, self.rho, self.ascent_fraction) + (1 - self.alpha) * down.Delta
        )  # line 2


class GuidedServer(NamedTuple):  # all of it is sent
    x: Vec
    Delta: Vec  # the last round's mean direction, 0 at first
    c: Vec  # mean of c_i over ALL clients
    alpha: Vec  # weight of the fresh gradient in the next round; one element


class GuidedClient(NamedTuple):
    c: Vec  # c_i, the client's control variate
    b: Vec  # steps of this round so far, 0 between rounds; one element


class GuidedUp(NamedTuple):
    D: Vec  # x_iK - x^t
    dc: Vec  # c_i^+ - c_i
    v: Vec  # 1 + cos(D_i, Delta), 0 for a client that goes along with the momentum, 2 for one against; one element


@dataclass(frozen=True)
class FedWMSAM(Method):
    """FedCM with SCAFFOLD's correction in its momentum, perturbed along that momentum.

        1  server sends x^t, Delta, c and alpha to the clients of S^t
        2  client i:  P = Delta + alpha / (1 - alpha) (c - c_i)               its momentum, in units of gradients
        3  from x_i0 = x^t, for b = 0..K-1:   d = (x^t + b P) - x_ib,   e = rho d / (||d|| + 1e-7),
               x_i,b+1 = x_ib - eta_l (alpha g_i(x_ib + e) + (1 - alpha) P)   one gradient per step
        4  c_i^+ = c_i - c - D_i / (K_i eta_l),   D_i = x_iK - x^t;   v_i = 1 + cos(D_i, Delta), 0 if one of them is 0
        5  server:   x^{t+1} = x^t + eta_g mean_S D_i;   Delta = -mean_S D_i / (K eta_l)
        6            c += (S/N) mean_S (c_i^+ - c_i);   alpha = 0.99 alpha + 0.01 clip(mean_S v_i, 0.1, 0.9)

    Lines 2 and 3 are the authors' README; in their code e has the other sign, and a whole tensor takes one entry
    of d. alpha changes from round to round, so weight decay stays outside the mix, as in their code: see FedCM.
    Recovers: rho = 0 and constant alpha: FedCM with SCAFFOLD's c - c_i in its fresh gradient; FedCM for one client.

    Args:
        rho: length of the ascent step; the authors' code has 0.1.
        alpha: weight of the FRESH gradient in round 1.
        eta_g: server rate.

    Example:
        >>> FedWMSAM().mix
        1.0

    Reference: Li et al., Fast and Flat Federated Learning via Weighted Momentum and Sharpness-Aware Minimization,
    NeurIPS 2025.
    """

    rho: float = param(0.01, "[0, inf)", "rho, length of the ascent step", schedulable=True, tune="0.01..0.5:log")
    alpha: float = param(0.1, "(0, 1)", "alpha, the weight of the fresh gradient in round 1")
    eta_g: float = param(1.0, "(0, inf)", "the server rate eta_g")
    family = "sharpness-aware"
    running_mean = ("c", "c")
    reads_gradient_from_D = VARIATE
    reads_K = True
    numbers = ("v",)
    released: ClassVar[Mapping[str, Any]] = {"rho": 0.1}

    def init_server(self, x0: Vec) -> GuidedServer:
        return GuidedServer(x0, zeros(x0), zeros(x0), x0.new_full((1,), self.alpha))

    def init_client(self, x0: Vec) -> GuidedClient:
        return GuidedClient(zeros(x0), x0.new_zeros(1))

    def broadcast(self, server: GuidedServer) -> GuidedServer:
        return GuidedServer(server.x, server.Delta, server.c, server.alpha)

    def direction(self, x: Vec, grad: Grad, down: GuidedServer, client: GuidedClient) -> Vec:
        P = (down.c - client.c).mul_(down.alpha / (1 - down.alpha)).add_(down.Delta)  # line 2
        e = ascent_((client.b * P).add_(down.x).sub_(x), self.rho)
        client.b.add_(1)
        return grad(e.add_(x)).mul_(down.alpha).add_(P.mul_(1 - down.alpha))  # line 3

    def upload(self, xK: Vec, down: GuidedServer, client: GuidedClient, run: Local) -> tuple[GuidedUp, GuidedClient]:
        D = xK - down.x
        c = client.c - down.c - D / run.lr_sum  # line 4
        lengths = norm(D) * norm(down.Delta)
        moved = (lengths > 0).to(D.dtype)
        v = moved + (D * down.Delta).sum(-1, keepdim=True) / (lengths + (1 - moved))
        return GuidedUp(D, c - client.c, v), GuidedClient(c, zeros(client.b))

    def update(self, server: GuidedServer, mean: GuidedUp, round: Round) -> GuidedServer:
        Delta = -mean.D / round.lr_sum  # line 5
        c = server.c + round.S / round.N * mean.dc  # line 6
        alpha = 0.99 * server.alpha + 0.01 * mean.v.clamp(0.1, 0.9)
        return GuidedServer(server.x + self.eta_g * mean.D, Delta, c, alpha)
