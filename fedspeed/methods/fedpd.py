"""FedPD: primal-dual, every client in every round."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import UserError
from ..utils.params import param
from .base import Grad, Local, Method, Model, Round
from .terms import add_corrected_prox_, check_prox, zeros

if TYPE_CHECKING:
    from torch import Tensor as Vec


class Client(NamedTuple):
    x: Vec  # x_i, where the last local solve ended
    h: Vec  # h_i = lam z_i, the dual in parameter units


class Up(NamedTuple):
    xh: Vec  # x_hat_i - x^t


@dataclass(frozen=True)
class FedPD(Method):
    """FedADMM with full participation whose local solves start from the client's own last point.

        1  server sends x^t to ALL clients
        2  client i, from x_i0 = its own x_i, for k = 0..K-1:
               x_i,k+1 = x_ik - eta_l (g_i(x_ik) + z_i + (x_ik - x^t) / lam)
        3  x_i = x_iK;   z_i = z_i + (x_i - x^t) / lam             that is h_i += x_i - x^t
        4  x_hat_i = x_i + lam z_i
        5  server:   x^{t+1} = mean_i x_hat_i

    A communication every round (the original may skip some at random). Partial participation is not defined for it:
    settings with which a reply may be missing (bernoulli cohorts, dropout, on_client_error drop) are refused.

    Args:
        lam: penalty parameter, 1/w of the FedSpeed paper's prox weight w.

    Example:
        >>> FedPD(lam=5).shrink
        0.2

    Reference: Zhang et al., FedPD: A Federated Learning Framework with Adaptivity to Non-IID Data, IEEE TSP 2021.
    """

    lam: float = param(10.0, "(0, inf)", "the penalty parameter lambda, 1/w of the prox weight w", tune="1..100:log")
    family = "primal-dual"
    paper_decay = 0.9995  # a prox term and a dual: the paper takes a slower decay

    @property
    def needs(self) -> Mapping[str, Any]:
        """Settings with which every client is counted in every round."""
        return {"cohort": "fixed", "dropout": 0.0, "on_client_error": "stop"}

    def check(self, lr: float, active: int, clients: int) -> None:
        check_prox("FedPD", lr, 1 / self.lam, "1/lam")
        if active < clients:
            raise UserError(
                f"FedPD: needs every client in every round, got {active} active of {clients}; set --active {clients} "
                f"(and --cohort fixed), or use fedadmm, which allows partial participation"
            )

    @property
    def shrink(self) -> float:
        return 1 / self.lam

    def init_server(self, x0: Vec) -> Model:
        return Model(x0)

    def init_client(self, x0: Vec) -> Client:
        return Client(x0, zeros(x0))

    def broadcast(self, server: Model) -> Model:
        return Model(server.x)

    def start(self, down: Model, client: Client) -> Vec:
        return client.x  # line 2

    def direction(self, x: Vec, grad: Grad, down: Model, client: Client) -> Vec:
        return add_corrected_prox_(grad(x), x, down.x, client.h, 1 / self.lam)  # line 2

    def upload(self, xK: Vec, down: Model, client: Client, run: Local) -> tuple[Up, Client]:
        h = client.h + (xK - down.x)  # line 3
        return Up(xK + h - down.x), Client(xK, h)  # line 4

    def update(self, server: Model, mean: Up, round: Round) -> Model:
        return Model(server.x + mean.xh)  # line 5
