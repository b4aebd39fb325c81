"""The four forms of the theorem as numbers: conditions with their slack, kappa, coefficients of the bound; its errata.

Every form states: if its conditions hold, then

    (1/T) sum_t E||grad F(z^t)||^2  <=  (a gap + b mean_i||g_hat_i||^2 + c ||mean_i g_hat_i||^2 + e delta) / T + floor

with gap = F(z) - F*, g_hat and delta = mean_i ||g_hat_i - grad F_i(z)||^2 at the start of the sum.
`docs/explanation/theory.md` derives the two forms that are proved (`corrected`, `tracking`) and the errata of the
published analysis, by number.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from ..errors import unknown
from .setting import FORMS, P, Setting


class Condition(NamedTuple):
    """A condition `value <= limit` (`>=` with at_least), and the numbers of the errata that concern it."""

    name: str
    value: float
    limit: float
    advice: str
    errata: tuple[int, ...] = ()
    at_least: bool = False
    strict: bool = False

    @property
    def slack(self) -> float:
        """The distance to the limit in the condition's own units; negative if it fails."""
        return self.value - self.limit if self.at_least else self.limit - self.value

    @property
    def holds(self) -> bool:
        """Whether the condition holds (NaN does not)."""
        return self.slack > 0 if self.strict else self.slack >= 0


class Form(NamedTuple):
    """One form of the theorem at one setting."""

    conditions: tuple[Condition, ...]
    kappa: float
    gap: float  # a, b, c, e of the module's docstring
    ghat: float
    ghat_mean: float
    tracking: float
    floor: dict[str, float]

    @property
    def holds(self) -> bool:
        """Whether every condition holds."""
        return all(condition.holds for condition in self.conditions)


def _common(s: Setting) -> Condition:
    return Condition("eta <= lam", s.eta, s.lam, "lower eta or raise lam", (8,))


def _plain(s: Setting) -> tuple[Condition, ...]:
    """Return the condition that rho is a plain step; a normalised one moves gradients by a fixed length instead."""
    if not s.normalise or s.alpha * s.rho == 0:
        return ()
    return (Condition("rho is not normalised", 1.0, 0.0, "use normalise=false; form `tracking` covers both", (15,)),)


def _ascent(s: Setting) -> tuple[Condition, ...]:
    limit = 1 / math.sqrt(6)
    advice = f"lower rho to {limit / max(s.alpha * s.L, 1e-300):.3g}, or alpha"
    return (*_plain(s), Condition("rho alpha L <= 1/sqrt(6)", math.sqrt(s.q), limit, advice))


def _positive(kappa: float, advice: str, errata: tuple[int, ...]) -> Condition:
    return Condition("kappa > 0", kappa, 0.0, advice, errata, at_least=True, strict=True)


def _interval(s: Setting) -> Condition:
    """Return the condition K >= lam/eta, with tolerance for the rounding of the quotient."""
    least = s.lam / s.eta * (1 - 1e-12)
    return Condition(
        "K >= lam/eta", s.K, least, f"raise K to {math.ceil(least)}, or eta to {s.lam / s.K:.3g}", (18,), at_least=True
    )


def printed(s: Setting) -> Form:
    """Return the theorem as published, with its own conditions; it is not proved (errata 4, 5, 7-13)."""
    q, x = s.q, s.eta**2 * s.L**2 * s.K
    kappa = 0.5 - 3 * q - 1536 * x
    limit = 1 / (32 * math.sqrt(3 * s.K) * s.L)
    conditions = (
        *_ascent(s),
        Condition("eta <= 1/(32 sqrt(3K) L)", s.eta, limit, f"lower eta to {limit:.3g}"),
        Condition("eta <= 2 lam", s.eta, 2 * s.lam, "lower eta or raise lam", (8,)),
        _interval(s),
        _positive(kappa, "lower eta, K or rho; the two limits above leave kappa = -1/2", (7,)),
    )
    k = _inverse(kappa)
    return Form(
        conditions,
        kappa,
        gap=2 * k / s.lam,
        ghat=64 * k * s.eta * s.L**2 * s.K,
        ghat_mean=32 * k * s.lam**2 * s.L**2,
        tracking=0.0,
        floor={
            "drift": 32 * k * s.lam * x * (16 * s.sigma_g**2 + s.sigma_l**2),
            "ascent": k * s.lam * q * (3 * s.sigma_g**2 + s.sigma_l**2),
        },
    )


def consistent(s: Setting) -> Form:
    """Return the printed derivation with correct algebra (errata 2, 4, 5, 6, 8, 10); errata 11-13 and 15 remain."""
    base = printed(s)
    q = s.q
    x = s.eta**2 * s.L**2 * s.K
    r = s.shift
    k, a1 = _inverse(base.kappa), 2 * (1 - s.s) ** 2 + 32 * s.eta**2 * s.L**2
    conditions = (
        _common(s),
        *base.conditions[:-3],
        _interval(s),
        Condition("P <= 2", P(s), 2.0, _lower_lam(s), (9,)),
        Condition("8 L^2 r^2 + lam L <= 1", 8 * (s.L * r) ** 2 + s.lam * s.L, 1.0, _lower_lam(s), (10,)),
        Condition("2(1-s)^2 + 32 eta^2 L^2 <= 1-s", a1, 1 - s.s, "needs eta >= lam/2", (13,)),
        base.conditions[-1],
    )
    return Form(
        conditions,
        base.kappa,
        gap=k / s.lam,
        ghat=32 * k * x / s.gamma,
        ghat_mean=4 * k * (s.L * r) ** 2 / s.gamma,
        tracking=0.0,
        floor={
            "drift": 32 * k * x * (16 * s.sigma_g**2 + s.sigma_l**2),
            "ascent": k * q * (3 * s.sigma_g**2 + s.sigma_l**2),
        },
    )


def drift_factor(s: Setting) -> float:
    """Return Theta in c^t <= Theta {...}, the drift of the local models, by Young's inequality with the best a > 0.

    c_{k+1} <= beta c_k + (1 + 1/a) eta^2 {...}, beta = (1+a)(1-s)^2 + 16 (1+1/a) eta^2 L^2. For beta <= 1 the
    weighted mean of the c_k is at most (1 + 1/a) eta^2 min(sum_k k gamma_k/gamma, 1/(1-beta)) {...}. Every a > 0
    is allowed, so this is the minimum over a grid (the paper's a = 1 needs s >= 1/2: erratum 13).
    """
    a = np.geomspace(max(s.s, 1e-9) / 100, 1e4, 4001)
    beta = (1 + a) * (1 - s.s) ** 2 + 16 * (1 + 1 / a) * (s.eta * s.L) ** 2
    mean_k = max(s.K / s.gamma - 1 / s.s, 0.0)  # 0 for K = 1, up to rounding
    steps = np.minimum(mean_k, 1 / np.maximum(1 - beta, 1e-300))
    theta: np.ndarray = np.where(beta <= 1, (1 + 1 / a) * s.eta**2 * steps, np.inf)
    return float(theta.min())


def corrected(s: Setting) -> Form:
    """Return the paper's route with every step proved; docs/explanation/theory.md derives conditions and constants."""
    q = s.q
    r2 = (s.L * s.shift) ** 2
    g = s.gamma
    p = P(s)
    noisy = 2 if s.sigma_l else 1  # E||V + N||^2 <= 2 E||V||^2 + 2 E||N||^2, erratum 11
    v = (1 + math.sqrt(q)) ** 2  # erratum 15
    p1 = (11 * p - 2) / 3  # erratum 12
    raw = drift_factor(s) * s.L**2
    room = 1 - 24 * p1 * raw if math.isfinite(p1 * raw) else -math.inf
    theta = raw / room if room > 0 else math.inf
    kappa = 0.5 - 3 * q - 4 * theta * (16 + 12 * p1) if math.isfinite(theta) else -math.inf
    absorbed = noisy * (8 * r2 + s.lam * s.L)
    lower = _lower_lam(s)
    conditions = (
        _common(s),
        *_ascent(s),
        Condition("24 L^2 r^2 < 1 (P finite)", 24 * r2, 1.0, lower, (2, 9), strict=True),
        Condition(f"{noisy} (8 L^2 r^2 + lam L) <= 1", absorbed, 1.0, lower, (10, 11)),
        Condition("8 (11P-2) L^2 Theta < 1", 1 - room, 1.0, lower, (12, 13), strict=True),
        _positive(kappa, lower, (7, 12, 13)),
    )
    k = _inverse(kappa)
    noise = s.W * s.sigma_l**2
    return Form(
        conditions,
        kappa,
        gap=k / s.lam,
        ghat=4 * k * theta * p1 / g,
        ghat_mean=4 * k * r2 / g,
        tracking=0.0,
        floor={
            "drift": 4 * k * theta * ((16 + 12 * p1) * s.sigma_g**2 + (1 + p1) * v * s.sigma_l**2),
            "ascent": k * q * (3 * s.sigma_g**2 + s.sigma_l**2),
            "noise": k * (8 * r2 + s.lam * s.L) * noise / s.m,
        },
    )


def tracking(s: Setting) -> Form:
    """Return the other route: g_hat_i tracks grad F_i, so the drift shrinks and the floor does not contain sigma_g.

    It only needs lam L below a constant and eta <= lam. With eta = O(1/K), K = O(T), rho = O(1/sqrt(T)) it is O(1/T)
    for a fixed lam, which is the corollary's claim. Derived in docs/explanation/theory.md.
    """
    g = s.gamma
    lL = s.lam * s.L
    noisy = 2 if s.sigma_l else 1
    groups = 3 if s.sigma_l else 2  # number of parts that Young's inequality splits
    q = s.q
    ell = 1.0 if q == 0 else 2.0 if s.normalise else 2 + 4 * q
    mu = max(g, abs(s.tau), abs(g + s.tau))
    room = 1 - groups * ell * (g * lL) ** 2
    omega = ell * groups * lL**2 / room if room > 0 else math.inf
    left = 1 - 2 * groups * omega * mu**2 if math.isfinite(omega) else -math.inf
    b = omega * mu**2 / left / g if left > 0 else math.inf
    h = 0.5 + groups * b * g
    lifted = h * (1 + omega * g**2) * 2 * q if q and math.isfinite(h * omega) else (math.inf if q else 0.0)
    kappa = 0.5 - 2 * h * omega * s.tau**2 - (0.0 if s.normalise else 2 * lifted) if left > 0 else -math.inf
    absorbed = noisy * (lL + 2 * groups * b * lL**2 / g)
    lower = _lower_lam(s)
    conditions = (
        _common(s),
        Condition(f"{groups} l (gamma lam L)^2 < 1", 1 - room, 1.0, lower, strict=True),
        Condition(f"{2 * groups} omega mu^2 < 1", 1 - left, 1.0, lower, strict=True),
        Condition(f"{noisy} (lam L + {2 * groups} b lam^2 L^2/gamma) <= 1", absorbed, 1.0, lower, (10, 11)),
        _positive(kappa, lower + ("; or lower rho" if q else ""), (7,)),
    )
    k, noise = _inverse(kappa), s.W * s.sigma_l**2
    spread = 1.0 if s.normalise else 2 * s.sigma_g**2 + s.sigma_l**2
    return Form(
        conditions,
        kappa,
        gap=k / s.lam,
        ghat=0.0,
        ghat_mean=0.0,
        tracking=k * b,
        floor={
            "drift": k * h * omega * s.sigma_l**2 * s.s / (2 - s.s) if s.sigma_l else 0.0,
            "ascent": k * lifted * spread,
            "noise": k * (groups * b * g + absorbed / 2 / s.m) * noise if noise else 0.0,
        },
    )


_FORMS: dict[str, Callable[[Setting], Form]] = dict(zip(FORMS, (printed, consistent, corrected, tracking), strict=True))


def form_at(setting: Setting, form: str) -> Form:
    """Return a form at a setting, by name.

    Example:
        >>> setting = Setting(eta=0.001, lam=0.1, K=200, L=1.0)
        >>> [form for form in FORMS if form_at(setting, form).holds]
        ['printed', 'tracking']
    """
    if form not in _FORMS:
        raise unknown("form of the theorem", form, FORMS)
    return _FORMS[form](setting)


def kappa(setting: Setting, form: str = "printed") -> float:
    """Return kappa of a form; printed: 1/2 - 3 alpha^2 L^2 rho^2 - 1536 eta^2 L^2 K.

    Example:
        >>> round(kappa(Setting(eta=0.001, lam=0.1, K=100)), 12)
        0.3464
    """
    return form_at(setting, form).kappa


def _lower_lam(s: Setting) -> str:
    return f"lower lam L (now {s.lam * s.L:.3g}), with eta in proportion"


def _inverse(kappa: float) -> float:
    return 1 / kappa if kappa > 0 else math.inf


class Erratum(NamedTuple):
    """An error of the paper: the printed text, the correct one, and where this package uses it."""

    printed: str
    right: str
    here: str


ERRATA: dict[int, Erratum] = {
    1: Erratum("u^t = mean_i x_iK^t (main text)", "u^{t+1} = mean_i x_iK^t (appendix)", "runs.auxiliary"),
    2: Erratum("P with (1 - 2 gamma^2), once", "P with (1 - 2 gamma)^2", "setting.P"),
    3: Erratum("+lam gamma g_hat_i^t in the proof of (4)", "g_hat_i^{t-1}", "-"),
    4: Erratum("Phi carries a factor lam", "it has none after the division by lam kappa", "forms from `consistent` on"),
    5: Erratum("64 eta L^2 K mean||g_hat_i^0||^2", "eta^2", "forms from `consistent` on"),
    6: Erratum("2 (F(z^1) - F*)", "the factor 2 is not needed", "forms from `consistent` on"),
    7: Erratum("the two limits on rho and eta", "leave kappa = -1/2; their shares must add up to < 1/2", "kappa > 0"),
    8: Erratum("eta <= 2 lam", "eta <= lam: above it the gamma_k alternate in sign", "Setting refuses eta > lam"),
    9: Erratum(
        "no limit on lam L",
        "a limit is needed: the proof uses P <= 2, and without it the theorem is false",
        "docs/gallery/plot_counterexample.py",
    ),
    10: Erratum(
        "4 lam^3 L^2 (..) against 1/m^2", "||mean||^2 throughout: 8 L^2 r^2 + lam L <= 1", "forms from `consistent` on"
    ),
    11: Erratum(
        "E||g_tilde||^2 cancels against ||E g_tilde||^2",
        "a noise term lam L W sigma_l^2/m remains, and the condition is twice as strict",
        "forms `corrected`, `tracking`",
    ),
    12: Erratum("2(P-1)/3 in the c_k recursion", "(11P-2)/3", "form `corrected`"),
    13: Erratum(
        "a = 1 'for convenience'", "needs eta >= lam/2; any a > 0 may be chosen", "`corrected`: the best a; `tracking`"
    ),
    14: Erratum("gamma_1/gamma_0 = 1 - eta/lam", "the inverse: gamma_k increases with k", "setting.gamma_k"),
    15: Erratum(
        "g2 unbiased at the perturbed point",
        "it uses the minibatch that defines the point: (1 + alpha L rho)^2 sigma_l^2, with L-smooth minibatch losses",
        "forms `corrected`, `tracking`",
    ),
    16: Erratum(
        "penalty beta ||grad||^2 (main text)", "(beta/2) ||grad||^2 (appendix)", "docs/gallery/plot_perturbation.py"
    ),
    17: Erratum("'Proof of Theorem 4.5'", "of Theorem 4.4", "-"),
    18: Erratum(
        "K >= lam/eta in the theorem", "fails in every main experiment of the paper", "`fedspeed theory --from RUN`"
    ),
}
