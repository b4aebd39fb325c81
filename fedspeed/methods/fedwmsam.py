"""FedWMSAM: a client's own momentum guides its step and its perturbation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from ..utils.params import param
from .base import Grad, Local, Method, Round
from .terms import VARIATE, ascent_, norm, zeros

if TYPE_CHECKING:
    from torch import Tensor as Vec


class Server(NamedTuple):
    x: Vec
    Delta: Vec  # the last round's mean direction, 0 at first
    c: Vec  # mean of c_i over ALL clients
    alpha: Vec  # weight of the fresh gradient in the next round; one element


Down = Server  # all of it is sent


class Client(NamedTuple):
    c: Vec  # c_i, the client's control variate
    b: Vec  # steps of this round so far, 0 between rounds; one element


class Up(NamedTuple):
    D: Vec  # x_iK - x^t
    dc: Vec  # c_i^+ - c_i
    v: Vec  # 1 + cos(D_i, Delta), 0 for a client that goes along with the momentum, 2 for one against; one element


@dataclass(frozen=True)
class FedWMSAM(Method):
    """FedCM with SCAFFOLD's correction in its momentum, perturbed towards where that momentum leads.

        1  server sends x^t, Delta, c and alpha to the clients of S^t
        2  client i:  P = Delta + alpha / (1 - alpha) (c - c_i)               its momentum, in units of gradients
        3  from x_i0 = x^t, for b = 0..K-1:   d = (x^t + b P) - x_ib,   e = rho d / (||d|| + 1e-7),
               x_i,b+1 = x_ib - eta_l (alpha g_i(x_ib + e) + (1 - alpha) P)   one gradient per step
        4  c_i^+ = c_i - c - D_i / (K_i eta_l),   D_i = x_iK - x^t;   v_i = 1 + cos(D_i, Delta), 0 if one of them is 0
        5  server:   x^{t+1} = x^t + eta_g mean_S D_i;   Delta = -mean_S D_i / (K eta_l)
        6            c += (S/N) mean_S (c_i^+ - c_i);   alpha = 0.99 alpha + 0.01 clip(mean_S v_i, 0.1, 0.9)

    Lines 2 and 3 are the authors' README; in their code e has the other sign and one number for each tensor. alpha
    changes from round to round, so weight decay stays outside the mix, as in their code: see FedCM for what that does.
    Recovers: rho = 0, as long as alpha stays: FedCM, and SCAFFOLD's c - c_i in units of the fresh gradient.

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

    def init_server(self, x0: Vec) -> Server:
        return Server(x0, zeros(x0), zeros(x0), x0.new_full((1,), self.alpha))

    def init_client(self, x0: Vec) -> Client:
        return Client(zeros(x0), x0.new_zeros(1))

    def broadcast(self, server: Server) -> Down:
        return Down(server.x, server.Delta, server.c, server.alpha)

    def direction(self, x: Vec, grad: Grad, down: Down, client: Client) -> Vec:
        P = (down.c - client.c).mul_(down.alpha / (1 - down.alpha)).add_(down.Delta)  # line 2
        e = ascent_((client.b * P).add_(down.x).sub_(x), self.rho)
        client.b.add_(1)
        return grad(e.add_(x)).mul_(down.alpha).add_(P.mul_(1 - down.alpha))  # line 3

    def upload(self, xK: Vec, down: Down, client: Client, run: Local) -> tuple[Up, Client]:
        D = xK - down.x
        c = client.c - down.c - D / run.lr_sum  # line 4
        lengths = norm(D) * norm(down.Delta)
        moved = (lengths > 0).to(D.dtype)
        v = moved + (D * down.Delta).sum(-1, keepdim=True) / (lengths + (1 - moved))
        return Up(D, c - client.c, v), Client(c, zeros(client.b))

    def update(self, server: Server, mean: Up, round: Round) -> Server:
        Delta = -mean.D / round.lr_sum  # line 5
        c = server.c + round.S / round.N * mean.dc  # line 6
        alpha = 0.99 * server.alpha + 0.01 * mean.v.clamp(0.1, 0.9)
        return Server(server.x + self.eta_g * mean.D, Delta, c, alpha)
