"""FedLESAM-S: SCAFFOLD whose gradient is taken along the movement of the server's model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from ..method import Grad, Local, Method, Round
from ..params import param
from .terms import ascent_, zeros

if TYPE_CHECKING:
    from torch import Tensor as Vec


class Server(NamedTuple):
    x: Vec
    c: Vec  # mean of c_i over ALL clients


class Down(NamedTuple):
    x: Vec
    c: Vec


class Client(NamedTuple):
    c: Vec  # c_i, the client's control variate
    x_old: Vec  # the server model received the last time
    seen: Vec  # 1 if there was a last time, else 0; one element


class Up(NamedTuple):
    D: Vec  # x_iK - x^t
    dc: Vec  # c_i^+ - c_i


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
    reads_gradient_from_D = True

    def init_server(self, x0: Vec) -> Server:
        return Server(x0, zeros(x0))

    def init_client(self, x0: Vec) -> Client:
        return Client(zeros(x0), x0, x0.new_zeros(1))

    def broadcast(self, server: Server) -> Down:
        return Down(server.x, server.c)

    def direction(self, x: Vec, grad: Grad, down: Down, client: Client) -> Vec:
        e = ascent_(client.x_old - down.x, self.rho).mul_(client.seen)  # line 2
        return grad(e.add_(x)).sub_(client.c).add_(down.c)  # line 3

    def upload(self, xK: Vec, down: Down, client: Client, run: Local) -> tuple[Up, Client]:
        D = xK - down.x
        c = client.c - down.c - D / run.lr_sum  # line 4
        return Up(D, c - client.c), Client(c, down.x, client.seen.new_ones(client.seen.shape))

    def update(self, server: Server, mean: Up, round: Round) -> Server:
        x = server.x + self.eta_g * mean.D  # line 5
        return Server(x, server.c + round.S / round.N * mean.dc)  # line 6
