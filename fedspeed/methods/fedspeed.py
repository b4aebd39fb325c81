"""FedSpeed: prox term, prox correction, perturbed gradient."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from ..errors import UserError
from ..utils.checked_fields import param
from .base import Dual, Grad, Local, Method, Model, Movement, Nothing, Round, Vec
from .terms import add_corrected_prox_, add_prox_, ascend_, check_prox, zeros


class Server(NamedTuple):
    x: Vec
    H: Vec  # mean of h_i over ALL clients; stays 0 under server="active" and without correction


@dataclass(frozen=True)
class FedSpeed(Method):
    """Many local steps along a perturbed gradient, held near x^t by a prox term whose bias is corrected.

    Algorithm 1 of the paper, its lines numbered, and h_i = -lam g_hat_i:

         4  server sends x^t to the clients of S^t
         5  client i, from x_i0 = x^t, for k = 0..K-1:
         7      g1 = g_i(x_ik)
         8      x_breve = x_ik + rho g1                       rho = rho_0 / (||g1|| + 1e-7) if `normalise`
         9      g2 = g_i(x_breve)                             the same minibatch
        10      g_tilde = (1 - alpha) g1 + alpha g2
        11      x_i,k+1 = x_ik - eta_l (g_tilde - g_hat_i + (x_ik - x^t) / lam)
        13  g_hat_i = g_hat_i - (x_iK - x^t) / lam            that is h_i += D_i, D_i = x_iK - x^t
        14  x_hat_i = x_iK - lam g_hat_i                      that is x_iK + h_i
        16  server="active":  x^{t+1} = mean_S x_hat_i
            server="all":     x^{t+1} = mean_S x_iK + mean_ALL h_i = x^t + mean_S D_i + H,   H += (S/N) mean_S D_i

    The paper prints `active`; its authors' code runs `all`. They are the same under full participation. Under
    partial participation `active` averages a random part of the corrections, which do not cancel, and stalls at a
    distance lam sqrt((1 - S/N)/S tr Cov(grad F_i)) from the optimum, below FedAvg; `all` converges. So `all` is the
    default.

    Recovers: rho = 0 or alpha = 0, server="all": FedDyn(alpha=1/lam). correction=False, rho = 0: FedProx(mu=1/lam).
    prox=False, correction=False: FedSAM (rho = 0: FedAvg). lam -> inf with the correction on is NOT FedAvg.

    Args:
        lam: the paper's lambda, 1/w for the prox weight w of its experiments (w = 0.1: lam = 10); FedDyn's alpha is w.
        rho: rho_0, length of the ascent step (not decayed with the learning rate).
        alpha: weight of the perturbed gradient; 1 uses g2 alone, 0 is one plain gradient per step.
        normalise: divide rho by the gradient's norm, as in the paper's experiments; False takes rho as the box has it.
        correction: the prox-correction term g_hat_i; False sets it to 0 and averages x_iK.
        prox: the prox term; False needs correction=False.
        server: `all` or `active`, see above.
        ascent_fraction: part of the minibatch used for g1 (beyond the paper); a step costs 1 + this many gradients.

    Example:
        >>> FedSpeed(lam=10, rho=0.1).lam
        10.0

    Reference: Sun et al., FedSpeed: Larger Local Interval, Less Communication Round, and Higher Generalization
    Accuracy, ICLR 2023.
    """

    lam: float = param(
        10.0, "(0, inf)", "the paper's lambda, 1/alpha of FedDyn and 1/w of the prox weight w", tune="1..100:log"
    )
    rho: float = param(
        0.1, "[0, inf)", "the paper's rho_0, length of the ascent step", schedulable=True, tune="0.01..0.5:log"
    )
    alpha: float = param(1.0, "[0, 1]", "the paper's alpha, weight of the perturbed gradient")
    normalise: bool = param(True, about="whether rho is divided by the gradient's norm")
    correction: bool = param(True, about="whether the prox-correction term g_hat_i is on")
    prox: bool = param(True, about="whether the prox term is on")
    server: str = param("all", ("all", "active"), "the server rule: `all` as released, `active` as printed")
    ascent_fraction: float = param(1.0, "(0, 1]", "the part of the minibatch used for the ascent gradient")
    family = "primal-dual"
    paper_decay = 0.9995  # a prox term and a dual: the paper takes a slower decay
    released: ClassVar[Mapping[str, Any]] = {"alpha": 1.0, "normalise": True, "server": "all"}

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.correction and not self.prox:
            raise UserError(
                "FedSpeed: correction=true needs prox=true, got prox=false; the correction undoes the prox term's "
                "bias, so switch both off or both on"
            )

    def check(self, lr: float, active: int, clients: int) -> None:
        if self.prox:
            check_prox("FedSpeed", lr, 1 / self.lam, "1/lam")

    @property
    def shrink(self) -> float:
        return 1 / self.lam if self.prox else 0.0

    @property
    def running_mean(self) -> tuple[str, str] | None:
        return ("h", "H") if self.correction and self.server == "all" else None

    def init_server(self, x0: Vec) -> Server:
        return Server(x0, zeros(x0))

    def init_client(self, x0: Vec) -> Dual | Nothing:
        return Dual(zeros(x0)) if self.correction else Nothing()

    def broadcast(self, server: Server) -> Model:
        return Model(server.x)

    def direction(self, x: Vec, grad: Grad, down: Model, client: Dual) -> Vec:
        g = self.quasi_gradient(x, grad)
        if self.correction:
            return add_corrected_prox_(g, x, down.x, client.h, 1 / self.lam)  # line 11
        return add_prox_(g, x, down.x, 1 / self.lam) if self.prox else g

    def quasi_gradient(self, x: Vec, grad: Grad) -> Vec:
        """Return g_tilde of lines 7-10; one gradient where the perturbation is off."""
        if self.alpha == 0 or self.rho == 0:
            return grad(x)
        g1 = grad(x, self.ascent_fraction)
        if self.alpha == 1:
            return grad(ascend_(x, g1, self.rho, self.normalise))
        g2 = grad(ascend_(x, g1.clone(), self.rho, self.normalise))
        return g1.mul_(1 - self.alpha).add_(g2, alpha=self.alpha)

    def upload(self, xK: Vec, down: Model, client: Dual, run: Local) -> tuple[Movement, Dual]:
        D = xK - down.x
        if not self.correction:
            return Movement(D), client
        h = client.h + D  # line 13
        return Movement(D + h if self.server == "active" else D), Dual(h)  # line 14

    def update(self, server: Server, mean: Movement, round: Round) -> Server:
        if not self.correction or self.server == "active":
            return Server(server.x + mean.D, server.H)
        H = (round.S / round.N * mean.D).add_(server.H)
        return Server((server.x + mean.D).add_(H), H)  # line 16
