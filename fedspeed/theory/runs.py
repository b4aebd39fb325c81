"""FedSpeed, FedAvg and SCAFFOLD in NumPy, all clients and all seeds at once: a long experiment takes seconds.

This is a second implementation on purpose, written from the pseudo-code; `test_numpy_runs.py` compares it with
`simulate` up to rounding. It runs under the theorem's assumptions: full participation, a constant rate, minibatches
drawn with replacement, no weight decay.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..data.problems import Grad, Problem
from ..errors import Diverged, UserError, unknown
from .setting import Setting

NAMES = ("fedspeed", "fedavg", "scaffold")
CHUNK = 256
"""Number of steps whose minibatches are drawn at once."""


@dataclass(frozen=True, eq=False)
class Trace:
    """The models of a run; axis R is the repetition (seed).

    Args:
        setting: the setting of the run.
        x: server models, (T+1, R, d).
        xK: last local models, (T, R, m, d), or only their mean (T, R, 1, d) without `keep`.
        ghat: FedSpeed's corrections after every round, (T, R, m, d), with `keep`.
        points, quasi: local models before every step and the (quasi-)gradients there, (T, K, R, m, d), with `steps`.
    """

    setting: Setting
    x: np.ndarray
    xK: np.ndarray
    ghat: np.ndarray | None = None
    points: np.ndarray | None = None
    quasi: np.ndarray | None = None

    @property
    def u(self) -> np.ndarray:
        """u^t, (T+1, R, d)."""
        return auxiliary(self.x[0], self.xK, self.setting.gamma)[0]

    @property
    def z(self) -> np.ndarray:
        """z^t, (T+1, R, d): the points of the theorem (FedSpeed only)."""
        return auxiliary(self.x[0], self.xK, self.setting.gamma)[1]


def auxiliary(x0: np.ndarray, xK: np.ndarray, gamma: float) -> tuple[np.ndarray, np.ndarray]:
    """Return u and z: u^0 = z^0 = x^0, u^{t+1} = mean_i x_iK^t, z^t = u^t + (1-gamma)/gamma (u^t - u^{t-1}).

    The index of u is the appendix's; the main text's does not satisfy Eq. (4) (erratum 1). x0 is (..., d), the last
    local models xK are (T, ..., m, d).
    """
    u = np.concatenate([x0[None], xK.mean(-2)])
    z = u.copy()
    z[1:] += (1 - gamma) / gamma * np.diff(u, axis=0)
    return u, z


def run(
    method: str,
    problem: Problem,
    setting: Setting,
    x0: np.ndarray,
    *,
    batch: int = 0,
    seeds: int = 1,
    seed: int = 0,
    keep: bool = False,
    steps: bool = False,
) -> Trace:
    """Run setting.T rounds of setting.K local steps from x0; the setting's L and sigmas are not used.

    Args:
        method: `fedspeed`, `fedavg` or `scaffold` (server rates 1).
        batch: minibatch size, 0 for full batches.
        seeds: the number of repetitions, which differ in their minibatches only; `seed` is the first.
        keep: keep every client's last models and corrections.
        steps: keep every local model and quasi-gradient as well (small runs only).

    Example:
        >>> from ..data.problems import random_quadratic
        >>> problem = random_quadratic(m=4, d=3)
        >>> trace = run("fedspeed", problem, Setting(eta=0.1, lam=1.0, K=10, T=200), np.zeros(3))
        >>> bool(np.allclose(trace.x[-1, 0], problem.optimum))
        True
    """
    if method not in NAMES:
        raise unknown("method of the theory's runs", method, NAMES)
    if seeds < 1 or batch < 0:
        raise UserError(f"run: expected seeds >= 1 and batch >= 0, got seeds {seeds} and batch {batch}")
    shape, s = (seeds, problem.m, problem.d), setting
    x = np.broadcast_to(np.asarray(x0, dtype=np.float64), (seeds, 1, problem.d)).copy()
    kept, c = np.zeros(shape), np.zeros_like(x)  # g_hat_i, or c_i and c of SCAFFOLD
    streams = [np.random.default_rng([seed + r, 7]) for r in range(seeds)]
    xs = [x[:, 0]]
    ends, ghats, points, quasi = [], [], [], []
    for t in range(s.T):
        y = np.broadcast_to(x, shape).copy()
        for k in range(s.K):
            if batch and k % CHUNK == 0:
                drawn = (min(CHUNK, s.K - k), problem.m, batch)
                index = np.stack([r.integers(0, problem.n, drawn) for r in streams], axis=1)
            grad = problem.minibatch(index[k % CHUNK]) if batch else problem.gradient
            g = _quasi_gradient(y, grad, s) if method == "fedspeed" else grad(y)
            if steps:
                points.append(y)
                quasi.append(g)
            pull = (y - x) / s.lam if method == "fedspeed" else c
            y = y - s.eta * (g if method == "fedavg" else g - kept + pull)
        x, kept, c = _round_end(method, y, x, kept, c, s)
        xs.append(x[:, 0])
        ends.append(y if keep else y.mean(1, keepdims=True))
        if keep and method == "fedspeed":
            ghats.append(kept)
        if not np.isfinite(x).all():
            raise Diverged(f"{method} diverged in round {t + 1}; lower eta (now {s.eta:g}) or lam (now {s.lam:g})")
    local = (s.T, s.K, *shape)
    return Trace(
        setting,
        np.array(xs),
        np.array(ends),
        np.array(ghats) if ghats else None,
        np.array(points).reshape(local) if steps else None,
        np.array(quasi).reshape(local) if steps else None,
    )


def _round_end(
    method: str, y: np.ndarray, x: np.ndarray, kept: np.ndarray, c: np.ndarray, s: Setting
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the server model, the clients' vectors and the server's c after a round that ended at the models y."""
    D = y - x
    if method == "fedspeed":
        kept = kept - D / s.lam
        return (y - s.lam * kept).mean(1, keepdims=True), kept, c
    if method == "scaffold":
        kept = kept - c - D / (s.K * s.eta)
        c = kept.mean(1, keepdims=True)
    return y.mean(1, keepdims=True), kept, c


def _quasi_gradient(x: np.ndarray, grad: Grad, s: Setting) -> np.ndarray:
    """Return g_tilde = (1-alpha) g(x) + alpha g(x + rho g(x)), on one minibatch; rho/(||g|| + 1e-7) if normalised."""
    g1 = grad(x)
    if s.alpha * s.rho == 0:
        return g1
    length = s.rho / (np.linalg.norm(g1, axis=-1, keepdims=True) + 1e-7) if s.normalise else s.rho
    return (1 - s.alpha) * g1 + s.alpha * grad(x + length * g1)
