"""FedLESAM: a sharpness-aware step along the movement of the server's model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from ..method import Grad, Local, Method, Round
from ..params import param
from .terms import ascent_

if TYPE_CHECKING:
    from torch import Tensor as Vec


class Server(NamedTuple):
    x: Vec


class Down(NamedTuple):
    x: Vec


class Client(NamedTuple):
    x_old: Vec  # the server model received the last time
    seen: Vec  # 1 if there was a last time, else 0; one element


class Up(NamedTuple):
    D: Vec  # x_iK - x^t


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

    def init_server(self, x0: Vec) -> Server:
        return Server(x0)

    def broadcast(self, server: Server) -> Down:
        return Down(server.x)

    def init_client(self, x0: Vec) -> Client:
        return Client(x0, x0.new_zeros(1))

    def direction(self, x: Vec, grad: Grad, down: Down, client: Client) -> Vec:
        e = ascent_(client.x_old - down.x, self.rho).mul_(client.seen)  # line 2
        return grad(e.add_(x))  # line 3

    def upload(self, xK: Vec, down: Down, client: Client, run: Local) -> tuple[Up, Client]:
        return Up(xK - down.x), Client(down.x, client.seen.new_ones(client.seen.shape))  # line 4

    def update(self, server: Server, mean: Up, round: Round) -> Server:
        return Server(server.x + self.eta_g * mean.D)  # line 5
