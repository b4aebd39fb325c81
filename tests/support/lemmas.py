"""The lemmas of the proofs as inequalities one can check on a run, round by round.

The paper's two (bounded global update, bounded local update) and the three steps behind the proved forms. Left and
right sides are means over the trace's repetitions, the lemmas' expectations: without noise they must hold exactly.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from fedspeed.data.problems import Problem
from fedspeed.theory import P, Setting, Trace, gamma_k
from fedspeed.theory.forms import drift_factor


class Inequality(NamedTuple):
    """left <= right, one number per round."""

    name: str
    left: np.ndarray
    right: np.ndarray

    def holds(self, tolerance: float = 1e-12) -> bool:
        """Whether it holds in every round, up to rounding."""
        room = tolerance * (1 + np.abs(self.right))
        return bool((self.left <= self.right + room).all())

    @property
    def slack(self) -> float:
        """The least of right - left."""
        return float((self.right - self.left).min())


class Moments(NamedTuple):
    """Mean squares of a FedSpeed trace by round t = 0..T-1."""

    before: np.ndarray  # mean_i ||g_hat_i^{t-1}||^2
    after: np.ndarray  # mean_i ||g_hat_i^t||^2
    mean_before: np.ndarray  # ||mean_i g_hat_i^{t-1}||^2
    mean_after: np.ndarray
    quasi: np.ndarray  # ||mean_i sum_k (gamma_k/gamma) g_tilde_ik||^2
    drift: np.ndarray  # c^t = mean_i sum_k (gamma_k/gamma) ||x_ik - x^t||^2
    offset: np.ndarray  # max_k mean_i ||x_ik - z^t||^2
    gradient: np.ndarray  # ||grad F(z^t)||^2
    tracking: np.ndarray  # mean_i ||g_hat_i^{t-1} - grad F_i(z^t)||^2
    tracking_next: np.ndarray  # the same at t+1


def moments(trace: Trace, problem: Problem) -> Moments:
    """The quantities of the lemmas, measured on a trace made with `keep=True, steps=True`."""
    s, z = trace.setting, trace.z
    weights = gamma_k(s.eta, s.lam, s.K) / s.gamma
    ghat = np.concatenate([np.zeros_like(trace.ghat[:1]), trace.ghat])
    G = np.einsum("k,tkrid->trid", weights, trace.quasi)
    moved = _square(trace.points - trace.x[:-1, None, :, None]).mean(-1)  # (T, K, R)
    away = _square(trace.points - z[:-1, None, :, None]).mean(-1)
    g = problem.gradient(np.broadcast_to(z[:, :, None], (*z.shape[:2], problem.m, problem.d)))
    off = _square(ghat - g).mean(-1)
    return Moments(
        before=_square(ghat[:-1]).mean((-1, -2)),
        after=_square(ghat[1:]).mean((-1, -2)),
        mean_before=_square(ghat[:-1].mean(2)).mean(-1),
        mean_after=_square(ghat[1:].mean(2)).mean(-1),
        quasi=_square(G.mean(2)).mean(-1),
        drift=np.einsum("k,tkr->tr", weights, moved).mean(-1),
        offset=away.mean(-1).max(1),
        gradient=_square(g.mean(2)).mean(-1)[:-1],
        tracking=off.mean(-1)[:-1],
        tracking_next=off.mean(-1)[1:],
    )


def global_update(s: Setting, q: Moments) -> Inequality:
    """Lemma "bounded global update": ||g||^2 <= (||g||^2 - ||g+||^2)/gamma + ||G||^2, means over clients."""
    return Inequality("bounded global update", q.mean_before, (q.mean_before - q.mean_after) / s.gamma + q.quasi)


def local_update(s: Setting, q: Moments, form: str = "corrected") -> Inequality:
    """Lemma "bounded local update", with P of erratum 2.

        mean||g_hat||^2 <= (P/gamma)(mean||g_hat||^2 - mean||g_hat+||^2) + 24 P L^2 c + 12 P ||grad F||^2
                           + P (12 sigma_g^2 + v sigma_l^2)

    Printed with v = 1; the same minibatch twice makes it v = (1 + alpha L rho)^2 (erratum 15). Needs P finite and
    alpha L rho <= 1.
    """
    p, v = P(s), 1.0 if form == "printed" else (1 + math.sqrt(s.q)) ** 2
    right = p / s.gamma * (q.before - q.after) + 24 * p * s.L**2 * q.drift + 12 * p * q.gradient
    return Inequality("bounded local update", q.before, right + p * (12 * s.sigma_g**2 + v * s.sigma_l**2))


def drift(s: Setting, q: Moments) -> Inequality:
    """The drift of form `corrected`: c <= Theta/(1 - 8(11P-2) L^2 Theta) {...}; needs that form's conditions."""
    p1, v, theta = (11 * P(s) - 2) / 3, (1 + math.sqrt(s.q)) ** 2, drift_factor(s)
    inner = (
        (16 + 12 * p1) * (s.sigma_g**2 + q.gradient) + (1 + p1) * v * s.sigma_l**2 + p1 / s.gamma * (q.before - q.after)
    )
    return Inequality("drift", q.drift, theta / (1 - 24 * p1 * s.L**2 * theta) * inner)


def offset(s: Setting, q: Moments) -> Inequality:
    """The offset of form `tracking`: max_k mean_i ||x_ik - z||^2 <= Lambda^2 {...}; needs that form's conditions."""
    groups, ell, psi = _parts(s, q.gradient)
    mu, g = max(s.gamma, abs(s.tau), abs(s.gamma + s.tau)), s.gamma
    factor = groups * s.lam**2 / (1 - groups * ell * (g * s.lam * s.L) ** 2)
    noise = s.sigma_l**2 * s.s / (2 - s.s)
    right = factor * (g**2 * psi + 2 * mu**2 * q.tracking + 2 * s.tau**2 * q.gradient + noise)
    return Inequality("offset", q.offset, right)


def tracking(s: Setting, q: Moments) -> Inequality:
    """The contraction of form `tracking`, from the measured offset M:

    delta+ <= (1-gamma) delta + g gamma (l L^2 M + Psi + W sigma_l^2) + (g lam^2 L^2/gamma) ||G||^2, g = 2 or 3 parts.
    """
    groups, ell, psi = _parts(s, q.gradient)
    inner = ell * s.L**2 * q.offset + psi + s.W * s.sigma_l**2
    right = (1 - s.gamma) * q.tracking + groups * s.gamma * inner
    return Inequality("tracking", q.tracking_next, right + groups * (s.lam * s.L) ** 2 / s.gamma * q.quasi)


def _parts(s: Setting, gradient: np.ndarray) -> tuple[int, float, np.ndarray]:
    """Number of parts, l and Psi of docs/explanation/theory.md."""
    groups = 3 if s.sigma_l else 2
    if s.q == 0:
        return groups, 1.0, np.zeros_like(gradient)
    if s.normalise:
        return groups, 2.0, np.full_like(gradient, 2 * s.q)
    return groups, 2 + 4 * s.q, 2 * s.q * (2 * s.sigma_g**2 + 2 * gradient + s.sigma_l**2)


def _square(a: np.ndarray) -> np.ndarray:
    total: np.ndarray = np.square(a).sum(-1)
    return total
