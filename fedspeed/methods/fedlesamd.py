"""FedLESAM-D: FedDyn whose gradient is taken along the movement of the server's model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from ..method import Grad, Local, Method, Round
from ..params import param
from .terms import add_corrected_prox_, ascent_, check_prox, zeros

if TYPE_CHECKING:
    from torch import Tensor as Vec


class Server(NamedTuple):
    x: Vec
    H: Vec  # mean of h_i over ALL clients


class Down(NamedTuple):
    x: Vec


class Client(NamedTuple):
    h: Vec  # the sum of the client's own past D_i
    x_old: Vec  # the server model received the last time
    seen: Vec  # 1 if there was a last time, else 0; one element


class Up(NamedTuple):
    D: Vec  # x_iK - x^t


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
    of the server for everybody, and adds to every entry of tensor number j the one number at place j of that vector.

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
    running_mean = ("h", "H")

    def check(self, lr: float, active: int, clients: int) -> None:
        check_prox("FedLESAMD", lr, 1 / self.lam, "1/lam")

    @property
    def shrink(self) -> float:
        return 1 / self.lam

    def init_server(self, x0: Vec) -> Server:
        return Server(x0, zeros(x0))

    def init_client(self, x0: Vec) -> Client:
        return Client(zeros(x0), x0, x0.new_zeros(1))

    def broadcast(self, server: Server) -> Down:
        return Down(server.x)

    def direction(self, x: Vec, grad: Grad, down: Down, client: Client) -> Vec:
        e = ascent_(client.x_old - down.x, self.rho).mul_(client.seen)  # line 2
        return add_corrected_prox_(grad(e.add_(x)), x, down.x, client.h, 1 / self.lam)  # line 3

    def upload(self, xK: Vec, down: Down, client: Client, run: Local) -> tuple[Up, Client]:
        D = xK - down.x
        return Up(D), Client(client.h + D, down.x, client.seen.new_ones(client.seen.shape))  # line 4

    def update(self, server: Server, mean: Up, round: Round) -> Server:
        H = server.H + round.S / round.N * mean.D
        return Server(server.x + mean.D + H, H)  # line 5
