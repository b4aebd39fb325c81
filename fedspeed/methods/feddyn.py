"""FedDyn: dynamic regularisation; FedSMOO and FedGloSS, which make its clients or its server sharpness-aware too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ..utils.checked_fields import param
from .base import Dual, Grad, Local, Method, Model, Movement, Round, Vec
from .terms import add_corrected_prox_, ascent_, check_prox, sam_gradient, unit, zeros


class Server(NamedTuple):
    x: Vec
    H: Vec  # mean of h_i over ALL clients


@dataclass(frozen=True)
class FedDyn(Method):
    """Local SGD on a risk that each client bends so that the federation's optimum is its own.

        1  server sends x^t to the clients of S^t
        2  client i, from x_i0 = x^t, for k = 0..K-1:
               x_i,k+1 = x_ik - eta_l (g_i(x_ik) - g_hat_i + alpha (x_ik - x^t))
        3  g_hat_i = g_hat_i - alpha D_i, D_i = x_iK - x^t        that is h_i += D_i
        4  server:   h = h - (alpha/N) sum_S D_i                  that is H += (S/N) mean_S D_i
        5            x^{t+1} = mean_S x_iK - h/alpha              that is x^t + mean_S D_i + H

    The same as FedSpeed(lam=1/alpha, rho=0, server="all"); under full participation also FedADMM.

    Args:
        alpha: weight of the regulariser, w of the FedSpeed paper's experiments, 1/lam of its Algorithm 1. The server
            divides by it, so it cannot be 0.

    Example:
        >>> FedDyn(alpha=0.1).shrink
        0.1

    Reference: Acar et al., Federated Learning Based on Dynamic Regularization, ICLR 2021.
    """

    alpha: float = param(0.1, "(0, inf)", "alpha, weight of the regulariser, 1/lam of FedSpeed", tune="0.01..1:log")
    family = "primal-dual"
    paper_decay = 0.9995  # a prox term and a dual: the paper takes a slower decay
    running_mean = ("h", "H")

    def check(self, lr: float, active: int, clients: int) -> None:
        check_prox("FedDyn", lr, self.alpha, "alpha")

    @property
    def shrink(self) -> float:
        return self.alpha

    def init_server(self, x0: Vec) -> Server:
        return Server(x0, zeros(x0))

    def init_client(self, x0: Vec) -> Dual:
        return Dual(zeros(x0))

    def broadcast(self, server: Server) -> Model:
        return Model(server.x)

    def direction(self, x: Vec, grad: Grad, down: Model, client: Dual) -> Vec:
        return add_corrected_prox_(grad(x), x, down.x, client.h, self.alpha)  # line 2

    def upload(self, xK: Vec, down: Model, client: Dual, run: Local) -> tuple[Movement, Dual]:
        D = xK - down.x
        return Movement(D), Dual(client.h + D)  # line 3

    def update(self, server: Server, mean: Movement, round: Round) -> Server:
        H = server.H + round.S / round.N * mean.D  # line 4
        return Server(server.x + mean.D + H, H)  # line 5


class AscentServer(NamedTuple):
    x: Vec
    H: Vec  # mean of h_i over ALL clients
    s: Vec  # the federation's ascent vector


class AscentDown(NamedTuple):
    x: Vec
    s: Vec


class AscentClient(NamedTuple):
    h: Vec  # h_i: the sum of the client's own past D_i
    mu: Vec  # mu_i, the dual of the ascent vector


class AscentUp(NamedTuple):
    D: Vec  # x_iK - x^t
    mu: Vec  # mu_i


@dataclass(frozen=True)
class FedSMOO(Method):
    """FedDyn whose ascent vectors are also driven to agree, by a dual of their own.

        1  server sends x^t and s to the clients of S^t
        2  client i, from x_i0 = x^t, for k = 0..K-1:
        3      q = g_i(x_ik) - mu_i - s;   e = rho q / (||q|| + 1e-7)
        4      mu_i = mu_i + e - s                                 at EVERY local step
        5      x_i,k+1 = x_ik - eta_l (g_i(x_ik + e) + (h_i + x_ik - x^t) / lam)    the same minibatch
        6  h_i = h_i + D_i, D_i = x_iK - x^t;   client i sends D_i and mu_i
        7  server:   H = H + (S/N) mean_S D_i;   x^{t+1} = x^t + mean_S D_i + H
        8            s = rho a / (||a|| + 1e-7), a = mean_S mu_i

    As in the authors' code, which drops one term (the client's last ascent vector) of the original update of s.

    Args:
        lam: penalty parameter, 1/w of the prox weight w.
        rho: length of the ascent vectors.
        ascent_fraction: part of the minibatch used for the gradient of line 3; a step costs 1 + this many gradients.

    Example:
        >>> FedSMOO(rho=0.1).lam
        10.0

    Reference: Sun et al., Dynamic Regularized Sharpness Aware Minimization in Federated Learning: Approaching Global
    Consistency and Smooth Landscape, ICML 2023.
    """

    lam: float = param(10.0, "(0, inf)", "the penalty parameter lambda, 1/w of the prox weight w", tune="1..100:log")
    rho: float = param(0.1, "[0, inf)", "rho, length of the ascent vectors", schedulable=True, tune="0.01..0.5:log")
    ascent_fraction: float = param(1.0, "(0, 1]", "the part of the minibatch used for the ascent gradient")
    family = "sharpness-aware"
    paper_decay = 0.9995  # a prox term and a dual: the paper takes a slower decay
    running_mean = ("h", "H")

    def check(self, lr: float, active: int, clients: int) -> None:
        check_prox("FedSMOO", lr, 1 / self.lam, "1/lam")

    @property
    def shrink(self) -> float:
        return 1 / self.lam

    def init_server(self, x0: Vec) -> AscentServer:
        return AscentServer(x0, zeros(x0), zeros(x0))

    def init_client(self, x0: Vec) -> AscentClient:
        return AscentClient(zeros(x0), zeros(x0))

    def broadcast(self, server: AscentServer) -> AscentDown:
        return AscentDown(server.x, server.s)

    def direction(self, x: Vec, grad: Grad, down: AscentDown, client: AscentClient) -> Vec:
        q = grad(x, self.ascent_fraction).sub_(client.mu).sub_(down.s)
        e = ascent_(q, self.rho)  # line 3
        client.mu.add_(e).sub_(down.s)  # line 4
        return add_corrected_prox_(grad(e.add_(x)), x, down.x, client.h, 1 / self.lam)  # line 5

    def upload(self, xK: Vec, down: AscentDown, client: AscentClient, run: Local) -> tuple[AscentUp, AscentClient]:
        D = xK - down.x
        return AscentUp(D, client.mu), AscentClient(client.h + D, client.mu)  # line 6

    def update(self, server: AscentServer, mean: AscentUp, round: Round) -> AscentServer:
        H = server.H + round.S / round.N * mean.D  # line 7
        return AscentServer(server.x + mean.D + H, H, self.rho * unit(mean.mu))  # line 8


class UphillServer(NamedTuple):
    x: Vec
    H: Vec  # mean of h_i over ALL clients
    G: Vec  # the last round's mean_S D_i, 0 at first


@dataclass(frozen=True)
class FedGloSS(Method):
    """FedDyn whose server sends a model that it has moved uphill, against its own last step.

        1  server sends x~ = x^t - rho G / (||G|| + 1e-7)        G = 0 at first; x^t is evaluated, never x~
        2  client i, from x_i0 = x~, for k = 0..K-1:
               g~ = g_i(x_ik + rho_l g1 / (||g1|| + 1e-7)),   g1 = g_i(x_ik) on the same minibatch
               x_i,k+1 = x_ik - eta_l (g~ + (h_i + x_ik - x~) / lam)
        3  h_i += D_i,   D_i = x_iK - x~
        4  server:   H += (S/N) mean_S D_i;   G = mean_S D_i
        5            x^{t+1} = x^t + mean_S D_i + H              from x^t, not from x~

    The authors' code divides line 4's step of H by the number of active clients once more, repeats lines 2 and 3 in
    every epoch (theirs have one), and its warm-up of the server's rho does not rise; here both can have one.

    Weighted by samples, S and N count samples and H is the mean of h_i under the weights of the models, so that rho = 0
    ends at the optimum of the weighted risk; the authors' code sums the duals without weights.

    Recovers: rho = 0: FedSpeed(rho=rho_l). rho = rho_l = 0: FedDyn(alpha=1/lam).

    Args:
        lam: the paper's beta, 10 on CIFAR-10 and 100 on CIFAR-100 there; 1/alpha of FedDyn.
        rho: length of the server's ascent step; 0.15 there on CIFAR-10, 0.01 on CIFAR-100.
        rho_l: length of the clients' ascent step; 0 is plain SGD, at half the cost.

    Example:
        >>> FedGloSS(rho_l=0).shrink
        0.1

    Reference: Caldarola et al., Beyond Local Sharpness: Communication-Efficient Global Sharpness-aware Minimization for
    Federated Learning, CVPR 2025.
    """

    lam: float = param(10.0, "(0, inf)", "the paper's beta, 1/alpha of FedDyn", tune="1..100:log")
    rho: float = param(
        0.15, "[0, inf)", "rho, length of the server's ascent step", schedulable=True, tune="0.01..0.5:log"
    )
    rho_l: float = param(
        0.15, "[0, inf)", "rho_l, length of the clients' ascent step", schedulable=True, tune="0.01..0.5:log"
    )
    family = "sharpness-aware"
    paper_decay = 0.9995  # a prox term and a dual: the paper takes a slower decay
    running_mean = ("h", "H")

    def check(self, lr: float, active: int, clients: int) -> None:
        check_prox("FedGloSS", lr, 1 / self.lam, "1/lam")

    @property
    def shrink(self) -> float:
        return 1 / self.lam

    def init_server(self, x0: Vec) -> UphillServer:
        return UphillServer(x0, zeros(x0), zeros(x0))

    def init_client(self, x0: Vec) -> Dual:
        return Dual(zeros(x0))

    def broadcast(self, server: UphillServer) -> Model:
        return Model(server.x - self.rho * unit(server.G))  # line 1

    def direction(self, x: Vec, grad: Grad, down: Model, client: Dual) -> Vec:
        g = sam_gradient(x, grad, self.rho_l)
        return add_corrected_prox_(g, x, down.x, client.h, 1 / self.lam)  # line 2

    def upload(self, xK: Vec, down: Model, client: Dual, run: Local) -> tuple[Movement, Dual]:
        D = xK - down.x
        return Movement(D), Dual(client.h + D)  # line 3

    def update(self, server: UphillServer, mean: Movement, round: Round) -> UphillServer:
        H = server.H + round.S / round.N * mean.D  # line 4
        return UphillServer(server.x + mean.D + H, H, mean.D)  # line 5
