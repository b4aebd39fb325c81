"""FedSpeed on a quadratic in closed form: its sequences without a local step, and where methods end."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fedspeed.data.problems import Quadratic
from fedspeed.theory import Setting
from fedspeed.theory.runs import auxiliary


class Sequences(NamedTuple):
    """x^t, u^t, z^t for t = 0..T, (T+1, ..., d), and the corrections g_hat_i^t for t = 0..T-1, (T, ..., m, d)."""

    x: np.ndarray
    u: np.ndarray
    z: np.ndarray
    ghat: np.ndarray


def local_map(problem: Quadratic, s: Setting, prox: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(M, J, w) with x_iK - x = -M_i (J_i x - w_i - g_hat_i): K exact local steps of every client at once.

    The quasi-gradient of a quadratic is J x - w with J = (I + alpha rho H) H and w = (I + alpha rho H) v (plain rho),
    and M = [I - (I - eta C)^K] C^-1 with C = J + prox I.
    """
    assert not (s.normalise and s.alpha * s.rho), "a normalised rho is not linear in x"
    eye = np.eye(problem.d)
    lift = eye + s.alpha * s.rho * problem.H
    J = lift @ problem.H
    C = J + prox * eye
    power = np.linalg.matrix_power(eye - s.eta * C, s.K)
    M = np.linalg.solve(C, eye - power)  # C and its powers commute
    return M, J, np.einsum("ijk,ik->ij", lift, problem.v)


def fixed_point(problem: Quadratic, s: Setting, method: str, mu: float = 0.0) -> np.ndarray:
    """Where a method ends on a quadratic with full batches and full participation.

        FedAvg, FedProx    mean_i M_i (J_i x - w_i) = 0, M_i as in `local_map`: x* only if all M_i are equal
        FedSpeed           mean_i (J_i x - w_i) = 0: x* for alpha rho = 0, whatever eta, K, lam

    Args:
        method: `fedavg`, `fedprox` (with prox weight mu) or `fedspeed`. The first two ignore alpha and rho.

    """
    assert method in ("fedavg", "fedprox", "fedspeed")
    own = method == "fedspeed"
    M, J, w = local_map(problem, s if own else s.but(rho=0.0), mu if method == "fedprox" else 0.0)
    if own:
        return np.linalg.solve(J.mean(0), w.mean(0))
    return np.linalg.solve((M @ J).mean(0), np.einsum("ijk,ik->j", M, w) / problem.m)


def exact_sequences(problem: Quadratic, s: Setting, x0: np.ndarray) -> Sequences:
    """FedSpeed's x^t, u^t, z^t and g_hat_i^t on a quadratic for s.T rounds, without a single local step.

    Full batches, all clients: g_hat_i^t = g_hat_i^{t-1} - (x_iK - x^t)/lam, x^{t+1} = mean_i (x_iK - lam g_hat_i^t).
    """
    M, J, w = local_map(problem, s, 1 / s.lam)
    x, ghat = [np.asarray(x0, dtype=np.float64)], [np.zeros((problem.m, problem.d))]
    ends = []
    for _ in range(s.T):
        step = np.einsum("ijk,ik->ij", M, J @ x[-1] - w - ghat[-1])
        ends.append(x[-1] - step)
        ghat.append(ghat[-1] + step / s.lam)
        x.append((ends[-1] - s.lam * ghat[-1]).mean(0))
    u, z = auxiliary(x[0], np.array(ends), s.gamma)
    return Sequences(np.array(x), u, z, np.array(ghat[1:]))
