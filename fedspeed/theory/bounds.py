"""The bound of the theorem, its parts, and settings that meet its conditions."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from ..errors import UserError
from .forms import form_at
from .setting import Setting


class Start(NamedTuple):
    """The start of the average over rounds: the quantities of that point in the bound.

    The paper sums from t = 1, with z^1 and the corrections g_hat_i^0 of round 0. From t = 0, z^0 = x^0 and every
    correction is 0, so only `gap` and `tracking` = mean_i ||grad F_i(x^0)||^2 are left.
    """

    gap: float  # F(z) - F*
    ghat: float = 0.0  # mean_i ||g_hat_i||^2
    ghat_mean: float = 0.0  # ||mean_i g_hat_i||^2
    tracking: float = 0.0  # mean_i ||g_hat_i - grad F_i(z)||^2


class Bound(NamedTuple):
    """A bound by its terms; `valid` says whether the form's conditions hold."""

    form: str
    terms: dict[str, float]
    valid: bool

    @property
    def total(self) -> float:
        """The bound on (1/T) sum_t E||grad F(z^t)||^2."""
        return math.fsum(self.terms.values()) if all(map(math.isfinite, self.terms.values())) else math.inf

    @property
    def dominant(self) -> str:
        """The name of the largest term."""
        return max(self.terms, key=lambda name: self.terms[name])


def bound(setting: Setting, start: Start, form: str = "corrected") -> Bound:
    """Return the right side of the theorem.

        printed     2 gap/(lam kappa T) + 64 eta L^2 K/(kappa T) mean||g_hat_i^0||^2
                    + 32 lam^2 L^2/(kappa T) ||mean g_hat_i^0||^2 + Phi

    The other forms have their own coefficients (`forms.py`); only `corrected` and `tracking` are proved. Infinite if
    kappa <= 0.

    Example:
        >>> setting = Setting(eta=0.001, lam=0.1, K=200, T=1000)
        >>> b = bound(setting, Start(gap=1.0, tracking=2.0), "tracking")
        >>> b.valid, b.dominant
        (True, 'gap')
    """
    r, T = form_at(setting, form), setting.T
    terms = {
        "gap": _times(r.gap, start.gap) / T,
        "corrections": (_times(r.ghat, start.ghat) + _times(r.ghat_mean, start.ghat_mean)) / T,
        "tracking": _times(r.tracking, start.tracking) / T,
        **r.floor,
    }
    return Bound(form, terms, r.holds)


def phi(setting: Setting, form: str = "printed") -> float:
    """Return Phi, the part that does not fall with T.

    Example:
        >>> s = Setting(eta=0.001, lam=0.1, K=200, sigma_g=1.0)
        >>> round(phi(s, "printed") / phi(s, "consistent"), 12)   # the additional lambda of erratum 4
        0.1
    """
    return math.fsum(form_at(setting, form).floor.values())


def largest(holds: Callable[[float], bool], high: float = 1e9) -> float:
    """Return the largest value up to `high` at which a condition that holds near 0 still holds; 0 if there is none.

    The relative error is at most 1e-9.
    """
    low = top = high
    while low > 1e-30 and not holds(low):
        top, low = low, low / 2
    if low <= 1e-30:
        return 0.0
    while top - low > 1e-9 * top:
        middle = (low + top) / 2
        low, top = (middle, top) if holds(middle) else (low, middle)
    return low


def largest_L(setting: Setting, form: str) -> float:
    """Return the largest smoothness constant at which a form's conditions hold; 0 if they fail for every L.

    Example:
        >>> setting = Setting(eta=0.001, lam=0.1, K=200)
        >>> form_at(setting.but(L=largest_L(setting, "tracking")), "tracking").holds
        True
    """
    return largest(lambda L: form_at(setting.but(L=L), form).holds)


def suggest(setting: Setting, form: str, start: Start) -> Setting | None:
    """Return a setting near the given one that meets a form: the lam, at most the given one, with the least bound.

    eta = c lam/K with c = eta K/lam as before but at least 1, so that K >= lam/eta; rho is lowered if necessary.
    None if no lam meets the form for this K (form `consistent` needs eta >= lam/2, for example).

    Example:
        >>> near = suggest(Setting(), "tracking", Start(gap=1.0, tracking=2.0))
        >>> form_at(near, "tracking").holds, near.lam < 10
        (True, True)
    """
    c = min(max(1.0, setting.s * setting.K), float(setting.K))
    normalise = setting.normalise and form == "tracking"
    most = (0.1 if form == "tracking" else 0.2) / max(setting.alpha * setting.L, 1e-300)
    rho = setting.rho if normalise else min(setting.rho, most)

    def at(lam: float) -> Setting:
        return setting.but(lam=lam, eta=min(c * lam / setting.K, lam), rho=rho, normalise=normalise)

    edge = largest(lambda lam: form_at(at(lam), form).holds, setting.lam)
    if not edge:
        return None
    return min((at(edge * (k / 50)) for k in range(1, 51)), key=lambda near: bound(near, start, form).total)


def schedule(setting: Setting, form: str, *, fraction: float = 0.6, per_round: int = 1, base: int = 0) -> Setting:
    """Return the corollary's schedule for setting.T rounds: K = per_round T, eta = lam/K, rho = rho_0/sqrt(T).

    lam is a fraction of the largest that the form's conditions allow, the same for every T. Only `corrected` has a
    floor that does not fall with T: there lam = lam_0 T^{-1/3} balances 1/(lam T) and lam^2, for a bound of order
    T^{-2/3}. Under `free` lam is the setting's own, and nothing is proved.

    Args:
        setting: has T, L, alpha, m, the sigmas, and rho as rho_0; its eta and K are not used.
        form: `printed`, `corrected`, `tracking` or `free`.
        base: the smallest T of an experiment; conditions that hold there hold for larger T. 0: setting.T.

    Example:
        >>> a, b = (schedule(Setting(T=T, rho=0.1), "printed", base=32) for T in (32, 128))
        >>> a.lam == b.lam, b.K // a.K, round(a.rho / b.rho, 6), form_at(b, "printed").holds
        (True, 4, 2.0, True)
    """
    base = base or setting.T
    if not 0 < fraction <= 1 or per_round < 1 or base > setting.T:
        raise UserError(
            f"schedule: expected fraction in (0, 1], per_round >= 1 and T >= {base}, got fraction {fraction:g}, "
            f"per_round {per_round} and T {setting.T}"
        )

    def at(T: int, lam: float) -> Setting:
        K = per_round * T
        return setting.but(T=T, K=K, lam=lam, eta=lam / K, rho=setting.rho / math.sqrt(T), normalise=False)

    if form == "free":
        return at(setting.T, setting.lam)
    most = largest(lambda lam: form_at(at(base, lam), form).holds, 10 / setting.L)
    if not most:
        raise UserError(
            f"schedule: no lam meets the conditions `{form}` at T = {base}, K = {per_round * base} and rho = "
            f"{setting.rho / math.sqrt(base):.3g}; lower rho, or choose another form"
        )
    fall = (base / setting.T) ** (1 / 3) if form == "corrected" else 1.0
    return at(setting.T, fraction * most * fall)


def _times(coefficient: float, value: float) -> float:
    """Return the product, with 0 times infinity = 0: such a term is absent."""
    return coefficient * value if value else 0.0
