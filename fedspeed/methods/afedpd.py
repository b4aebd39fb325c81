"""A-FedPD and A-FedPDSAM: FedDyn and FedSpeed whose absent clients follow the federation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ..utils.checked_fields import param
from .base import Grad, Local, Method, Movement, Round, Vec
from .terms import add_corrected_prox_, check_prox, sam_gradient, zeros


class Server(NamedTuple):
    x: Vec
    H: Vec  # mean of h_i over ALL clients: the sum of all past mean_S D_i


Down = Server  # all of it is sent


class Client(NamedTuple):
    q: Vec  # h_i - H as of the end of the client's last round, 0 before its first


@dataclass(frozen=True)
class AFedPD(Method):
    """A-FedPD: a client that is absent updates its dual all the same, by what those present did on average.

        1  server sends x^t and H to the clients of S^t
        2  client i, from x_i0 = x^t, for k = 0..K-1:
               x_i,k+1 = x_ik - eta_l (g_i(x_ik) + (h_i + x_ik - x^t) / lam)
        3  present:   h_i += D_i,   D_i = x_iK - x^t
        4  absent:    h_i += mean_S D_i                           EVERY absent client, in every round
        5  server:    H += mean_S D_i                             so H stays the mean of ALL h_i
        6             x^{t+1} = x^t + mean_S D_i + H

    h_i / lam is the paper's dual variable, 1/lam its rho. Line 4 is never run: an absence adds the same to h_i and H,
    so q_i = h_i - H stands still meanwhile. Line 3 keeps q_i + D_i, and `settle`, when the mean is known, takes it off.
    Where clients hold their own states that mean is one more vector to send; it is not counted here.

    Recovers: full participation: FedDyn(alpha=1/lam). With ONE client per round q_i never changes: take two or more.

    Args:
        lam: penalty parameter, 1/rho of the paper.

    Example:
        >>> AFedPD(lam=5).shrink
        0.2

    Reference: Sun et al., A-FedPD: Aligning Dual-Drift is All Federated Primal-Dual Learning Needs, NeurIPS 2024.
    """

    lam: float = param(
        10.0, "(0, inf)", "the penalty parameter lambda, 1/rho of the paper and 1/alpha of FedDyn", tune="1..100:log"
    )
    family = "primal-dual"
    paper_decay = 0.9995  # a prox term and a dual: the paper takes a slower decay

    def check(self, lr: float, active: int, clients: int) -> None:
        check_prox(type(self).__name__, lr, 1 / self.lam, "1/lam")

    @property
    def shrink(self) -> float:
        return 1 / self.lam

    def init_server(self, x0: Vec) -> Server:
        return Server(x0, zeros(x0))

    def init_client(self, x0: Vec) -> Client:
        return Client(zeros(x0))

    def broadcast(self, server: Server) -> Down:
        return Down(server.x, server.H)

    def direction(self, x: Vec, grad: Grad, down: Down, client: Client) -> Vec:
        g = self.gradient(x, grad)
        return add_corrected_prox_(g, x, down.x, client.q, 1 / self.lam).add_(down.H, alpha=1 / self.lam)  # line 2

    def gradient(self, x: Vec, grad: Grad) -> Vec:
        """Return the gradient of line 2."""
        return grad(x)

    def upload(self, xK: Vec, down: Down, client: Client, run: Local) -> tuple[Movement, Client]:
        D = xK - down.x
        return Movement(D), Client(client.q + D)  # line 3

    def settle(self, client: Client, mean: Movement, round: Round) -> Client:
        return Client(client.q - mean.D)  # line 5, as q_i sees it

    def update(self, server: Server, mean: Movement, round: Round) -> Server:
        H = server.H + mean.D  # line 5
        return Server(server.x + mean.D + H, H)  # line 6


@dataclass(frozen=True)
class AFedPDSAM(AFedPD):
    """A-FedPD with FedSpeed's local gradient: FedSpeed whose absent clients follow the federation.

        1  server sends x^t and H to the clients of S^t
        2  client i, from x_i0 = x^t, for k = 0..K-1:   g1 = g_i(x_ik),
               g2 = g_i(x_ik + rho g1 / (||g1|| + 1e-7))          the same minibatch
               x_i,k+1 = x_ik - eta_l (g2 + (h_i + x_ik - x^t) / lam)
        3  present:   h_i += D_i,   D_i = x_iK - x^t
        4  absent:    h_i += mean_S D_i                           see `AFedPD`: q_i = h_i - H is kept, this is not run
        5  server:    H += mean_S D_i
        6             x^{t+1} = x^t + mean_S D_i + H

    Recovers: rho = 0: AFedPD. Full participation: FedSpeed(server="all").

    Args:
        lam: penalty parameter, 1/rho of the paper.
        rho: length of the ascent step.

    Example:
        >>> AFedPDSAM().rho
        0.1

    Reference: Sun et al., A-FedPD: Aligning Dual-Drift is All Federated Primal-Dual Learning Needs, NeurIPS 2024.
    """

    rho: float = param(0.1, "[0, inf)", "rho, length of the ascent step", schedulable=True, tune="0.01..0.5:log")

    def gradient(self, x: Vec, grad: Grad) -> Vec:
        return sam_gradient(x, grad, self.rho)
