"""A setting of the convergence theorem, and the quantities that all its forms share."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np

from ..errors import UserError
from ..utils.params import Params, param

FORMS = ("printed", "consistent", "corrected", "tracking")
"""`printed`: the theorem as published. `consistent`: the same text made consistent with itself (errata 2, 4, 5, 6, 8,
10), its constants still unproved. `corrected`: the same route with every step proved. `tracking`: another route."""


@dataclass(frozen=True)
class Setting(Params):
    """Everything in the theorem except the starting point; symbols as in the paper.

    Args:
        eta, lam, K: local rate, penalty parameter (1/w), local steps; eta <= lam (erratum 8).
        L: smoothness of every F_i (A1); with noise and a perturbation also of every minibatch loss (erratum 15).
        alpha, rho: weight and step of the ascent; rho is a plain step unless `normalise`, which only `tracking` covers.
        m, T: clients (all of them active) and rounds.
        sigma_l, sigma_g: noise of a minibatch gradient (A2) and heterogeneity (A3, mean over clients).

    Example:
        >>> setting = Setting(eta=0.01, lam=0.1, K=20)
        >>> round(setting.gamma, 4), round(setting.shift, 4)
        (0.8784, 0.0862)
    """

    eta: float = param(0.1, "(0, inf)", "the local rate eta_l")
    lam: float = param(10.0, "(0, inf)", "the penalty parameter lambda, 1/w")
    K: int = param(50, "[1, inf)", "the number of local steps")
    L: float = param(1.0, "(0, inf)", "the smoothness constant")
    alpha: float = param(1.0, "[0, 1]", "the weight of the perturbed gradient")
    rho: float = param(0.0, "[0, inf)", "the ascent step")
    normalise: bool = param(False, about="whether rho is divided by the gradient's norm")
    m: int = param(10, "[1, inf)", "the number of clients")
    T: int = param(100, "[1, inf)", "the number of rounds")
    sigma_l: float = param(0.0, "[0, inf)", "the noise of a minibatch gradient")
    sigma_g: float = param(0.0, "[0, inf)", "the heterogeneity of the clients")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.eta > self.lam:
            raise UserError(
                f"Setting: eta must be at most lam, got eta {self.eta:g} and lam {self.lam:g}; above lam no form "
                f"of the theorem holds (erratum 8): lower eta or raise lam"
            )

    def but(self, **changes: Any) -> Self:
        """Return the setting with some fields changed."""
        return replace(self, **changes)

    @property
    def s(self) -> float:
        """s = eta / lam, in (0, 1]: the relative step towards the prox centre."""
        return self.eta / self.lam

    @property
    def gamma(self) -> float:
        """gamma = 1 - (1 - eta/lam)^K."""
        return gamma(self.eta, self.lam, self.K)

    @property
    def tau(self) -> float:
        """tau = (1 - 2 gamma) / gamma, so that x^t - z^t = lam tau mean_i g_hat_i^{t-1}."""
        return (1 - 2 * self.gamma) / self.gamma

    @property
    def shift(self) -> float:
        """r = lam |1 - 2 gamma| / gamma, so that ||x^t - z^t|| = r ||mean_i g_hat_i^{t-1}||."""
        return self.lam * abs(self.tau)

    @property
    def q(self) -> float:
        """q = (alpha L rho)^2: the perturbation moves a gradient by at most sqrt(q) of its norm."""
        return (self.alpha * self.L * self.rho) ** 2

    @property
    def W(self) -> float:
        """W = sum_k (gamma_k/gamma)^2 = s (2 - gamma) / ((2 - s) gamma), in [1/K, 1]: the factor of averaged noise."""
        return self.s * (2 - self.gamma) / ((2 - self.s) * self.gamma)


def gamma(eta: float, lam: float, K: int) -> float:
    """Return gamma = 1 - (1 - eta/lam)^K, accurate also for small eta/lam.

    Example:
        >>> round(gamma(0.1, 10.0, 50), 3)
        0.395
    """
    s = _ratio(eta, lam, K)
    return float(-np.expm1(K * np.log1p(-s))) if s < 1 else 1 - (1 - s) ** K


def gamma_k(eta: float, lam: float, K: int) -> np.ndarray:
    """Return gamma_k = (eta/lam) (1 - eta/lam)^{K-1-k} for k = 0..K-1; they add up to gamma and increase with k.

    For lam < eta < 2 lam, which the printed theorem allows, they alternate in sign (erratum 8).

    Example:
        >>> gamma_k(1.5, 1.0, 3).tolist()
        [0.375, -0.75, 1.5]
    """
    s = _ratio(eta, lam, K)
    weights: np.ndarray = s * (1 - s) ** np.arange(K - 1, -1, -1.0)
    return weights


def _ratio(eta: float, lam: float, K: int) -> float:
    if not (0 < eta < 2 * lam):
        raise UserError(f"gamma: eta must lie in (0, 2 lam), got eta {eta:g} and lam {lam:g}; lower eta or raise lam")
    if K < 1:
        raise UserError(f"gamma: K must be at least 1, got {K}; it is the number of local steps")
    return eta / lam


def P(setting: Setting, form: str = "corrected") -> float:
    """Return P from 1/P = 1 - 24 lam^2 L^2 (1 - 2 gamma)^2 / gamma^2; infinite if the right side is not positive.

    The last display of the paper's proof prints (1 - 2 gamma^2) instead: form="slip" (erratum 2).

    Example:
        >>> round(P(Setting(eta=0.01, lam=0.1, K=20)), 3)
        1.217
    """
    part = 1 - 2 * setting.gamma**2 if form == "slip" else (1 - 2 * setting.gamma) ** 2
    inverse = 1 - 24 * (setting.lam * setting.L) ** 2 * part / setting.gamma**2
    return 1 / inverse if inverse > 0 else float("inf")
