"""FedADMM and FedPD: consensus by the alternating direction method of multipliers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..errors import UserError
from ..utils.checked_fields import param
from .base import Dual, Grad, Local, Method, Model, Round, Vec
from .terms import add_corrected_prox_, check_prox, zeros


class Client(NamedTuple):
    h: Vec
    xh: Vec  # x_hat_i as last counted by the server, x^0 at first


class Up(NamedTuple):
    dxh: Vec  # the change of x_hat_i; variant="active": x_hat_i - x^t


@dataclass(frozen=True)
class FedADMM(Method):
    """Local SGD on the augmented Lagrangian F_i(x_i) + <z_i, x_i - x^t> + ||x_i - x^t||^2 / (2 lam).

        1  server sends x^t to the clients of S^t
        2  client i, from x_i0 = x^t, for k = 0..K-1:
               x_i,k+1 = x_ik - eta_l (g_i(x_ik) + z_i + (x_ik - x^t) / lam)
        3  z_i = z_i + D_i / lam, D_i = x_iK - x^t                that is h_i += D_i
        4  x_hat_i = x_iK + lam z_i;   client i sends its change
        5  variant="wang":    x^{t+1} = x^t + (1/N) sum_S (change of x_hat_i): the mean of the latest x_hat_i of ALL
           variant="gong":    x^{t+1} = x^t + eta_g mean_S (change of x_hat_i)
           variant="active":  x^{t+1} = mean_S x_hat_i

    `wang` is the algorithm the FedSpeed paper cites. Its server moves by S/N of the step, so it is slow at low
    participation, where the paper's FedADMM is not. Which rule the paper ran cannot be determined: its released code
    has no FedADMM, and asked for it the first author named the implementation of Gong et al. (issue #8 of
    woodenchild95/FL-Simulator), adding that active duals alone need a decaying server rate and prox coefficient. So
    say the variant next to a result. Under full participation `wang` and `active` equal FedDyn and FedSpeed(rho=0);
    `active` is always FedSpeed(rho=0, server="active").

    Args:
        lam: penalty parameter, 1/w of the FedSpeed paper's prox weight w.
        variant: `wang`, `gong` or `active`.
        eta_g: server rate of `gong`; the others have none.

    Example:
        >>> FedADMM(variant="gong", eta_g=0.5).eta_g
        0.5

    Reference: Wang, Marella, Anderson, FedADMM: A Federated Primal-Dual Algorithm Allowing Partial Participation, CDC
    2022 (`wang`); Gong, Li, Freris, FedADMM: A Robust Federated Deep Learning Framework with Adaptivity to System
    Heterogeneity, ICDE 2022 (`gong`).
    """

    lam: float = param(10.0, "(0, inf)", "the penalty parameter lambda, 1/w of the prox weight w", tune="1..100:log")
    variant: str = param("wang", ("wang", "gong", "active"), "the server rule, by the paper it is from")
    eta_g: float = param(1.0, "(0, inf)", "the server rate eta_g of variant `gong`")
    family = "primal-dual"
    paper_decay = 0.9995  # a prox term and a dual: the paper takes a slower decay

    def check(self, lr: float, active: int, clients: int) -> None:
        check_prox("FedADMM", lr, 1 / self.lam, "1/lam")

    @property
    def shrink(self) -> float:
        return 1 / self.lam

    @property
    def running_mean(self) -> tuple[str, str] | None:
        return ("xh", "x") if self.variant == "wang" else None

    def init_server(self, x0: Vec) -> Model:
        return Model(x0)

    def init_client(self, x0: Vec) -> Client | Dual:
        return Dual(zeros(x0)) if self.variant == "active" else Client(zeros(x0), x0)

    def broadcast(self, server: Model) -> Model:
        return Model(server.x)

    def direction(self, x: Vec, grad: Grad, down: Model, client: Client | Dual) -> Vec:
        return add_corrected_prox_(grad(x), x, down.x, client.h, 1 / self.lam)  # line 2

    def upload(self, xK: Vec, down: Model, client: Client | Dual, run: Local) -> tuple[Up, Client | Dual]:
        h = client.h + (xK - down.x)  # line 3
        xh = xK + h  # line 4
        if isinstance(client, Dual):
            return Up(xh - down.x), Dual(h)
        return Up(xh - client.xh), Client(h, xh)

    def update(self, server: Model, mean: Up, round: Round) -> Model:
        rate = {"wang": round.S / round.N, "gong": self.eta_g, "active": 1.0}[self.variant]
        return Model(server.x + rate * mean.dxh)  # line 5


class FullClient(NamedTuple):
    x: Vec  # x_i, where the last local solve ended
    h: Vec  # h_i = lam z_i, the dual in parameter units


class FullUp(NamedTuple):
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

    def init_client(self, x0: Vec) -> FullClient:
        return FullClient(x0, zeros(x0))

    def broadcast(self, server: Model) -> Model:
        return Model(server.x)

    def start(self, down: Model, client: FullClient) -> Vec:
        return client.x  # line 2

    def direction(self, x: Vec, grad: Grad, down: Model, client: FullClient) -> Vec:
        return add_corrected_prox_(grad(x), x, down.x, client.h, 1 / self.lam)  # line 2

    def upload(self, xK: Vec, down: Model, client: FullClient, run: Local) -> tuple[FullUp, FullClient]:
        h = client.h + (xK - down.x)  # line 3
        return FullUp(xK + h - down.x), FullClient(xK, h)  # line 4

    def update(self, server: Model, mean: FullUp, round: Round) -> Model:
        return Model(server.x + mean.xh)  # line 5
