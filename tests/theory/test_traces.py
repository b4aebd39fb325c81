"""Further identities of u^t and z^t on traces of `simulate`, and exactly how Eq. (5) fails where it does.

Eqs. (2)-(5), x^{t+1} = 2u^{t+1} - u^t and the lag x^t - z^t, with the cases in which they must fail, are in
`tests/methods/test_identities.py`, whose recorder this file uses.
"""

from __future__ import annotations

import importlib
import math
import re
from pathlib import Path

import numpy as np
from federations import Softmax, package
from sequences import EQUAL, FULL, Recorded, sequences, weights

from fedspeed.config.plan import Plan
from fedspeed.theory import Setting, auxiliary, gamma, gamma_k
from fedspeed.theory.forms import ERRATA


def record(plan: Plan, problem: Softmax, lam: float = 0.5):
    """u^t for t = 0..T, and a round's log entries, of a FedSpeed run."""
    method = Recorded(lam=lam)
    run = package(problem, method, plan)
    x0 = run.x.numpy()
    for _ in run:
        pass
    S = plan.active
    logs = [method.log[t * S : (t + 1) * S] for t in range(plan.rounds)]
    ends = np.array([[entry[5] for entry in log] for log in logs])
    return x0, ends, logs


def test_auxiliary_sequences_of_the_theory_are_those_of_the_trace():
    lam, x, u, z, ghat, _, g = sequences(FULL, EQUAL)
    x0, ends, logs = record(FULL, EQUAL, lam)
    run = logs[0][0][4]
    assert math.isclose(g, gamma(run.lr, lam, run.K), rel_tol=1e-14)
    np.testing.assert_allclose(gamma_k(run.lr, lam, run.K), weights(run, lam)[0], atol=1e-16)
    ours = auxiliary(x0, ends, g)
    np.testing.assert_allclose(ours[0], u, atol=1e-14)
    np.testing.assert_allclose(ours[1], z, atol=1e-13)
    setting = Setting(eta=run.lr, lam=lam, K=run.K)
    for t in range(1, FULL.rounds):
        np.testing.assert_allclose(x[t] - z[t], lam * setting.tau * ghat[t - 1], atol=1e-12)


def test_main_text_u_does_not_satisfy_equation_4():
    """Erratum 1 on a trace of our own: u^t = mean x_iK^t (main text) is off by the change of the corrections."""
    lam, _, u, _, ghat, _, _ = sequences(FULL, EQUAL)
    shifted = u[1:]
    wrong = max(np.abs(shifted[t + 1] - shifted[t] + lam * ghat[t]).max() for t in range(FULL.rounds - 1))
    right = max(np.abs(u[t + 1] - u[t] + lam * ghat[t]).max() for t in range(FULL.rounds))
    assert right < 1e-12 < 1e-2 < wrong
    assert "main text" in ERRATA[1].printed


def test_equation_5_under_decay_is_off_by_exactly_the_change_of_gamma():
    """z^{t+1} - z^t + lam G = lam [(1-g')/g' - (1-g)/g] mean g_hat^{t-1}, g' the gamma of the round before."""
    plan, lam = Plan.from_fields({**FULL.fields(), "lr_decay": 0.7}), 0.5
    x0, ends, logs = record(plan, EQUAL, lam)
    u = np.concatenate([x0[None], ends.mean(1)])
    g = [weights(log[0][4], lam)[1] for log in logs]
    z = [x0] + [u[t + 1] + (1 - g[t]) / g[t] * (u[t + 1] - u[t]) for t in range(plan.rounds)]
    ghat = [np.mean([-entry[2] / lam for entry in log], 0) for log in logs]
    for t in range(1, plan.rounds):
        G = np.mean([weights(e[4], lam)[0] @ e[0] for e in logs[t]], 0) / g[t]
        off = z[t + 1] - z[t] + lam * G
        np.testing.assert_allclose(off, lam * ((1 - g[t - 1]) / g[t - 1] - (1 - g[t]) / g[t]) * ghat[t - 1], atol=1e-12)
        assert np.abs(off).max() > 1e-3


def test_unequal_steps_keep_equation_4_and_break_equation_5():
    """Clients of different size: (4) holds with gamma_i inside the mean, no single gamma makes (5) hold."""
    plan, lam = FULL, 0.5
    x0, ends, logs = record(plan, Softmax(), lam)
    u = np.concatenate([x0[None], ends.mean(1)])
    own = [[weights(e[4], lam)[1] for e in log] for log in logs]
    assert len({round(g, 6) for g in own[0]}) > 1
    for t, log in enumerate(logs):
        inside = np.mean(
            [weights(e[4], lam)[0] @ e[0] - (1 - g) * e[1] / lam for e, g in zip(log, own[t], strict=True)], 0
        )
        np.testing.assert_allclose(u[t + 1] - u[t], -lam * inside, atol=1e-12)
    g = float(np.mean(own[0]))
    _, z = auxiliary(x0, ends, g)
    G = [np.mean([weights(e[4], lam)[0] @ e[0] / gi for e, gi in zip(log, own[0], strict=True)], 0) for log in logs]
    assert max(np.abs(z[t + 1] - z[t] + lam * G[t]).max() for t in range(1, plan.rounds)) > 1e-2


def test_errata_name_what_there_is():
    """`module.name` in the column `here` is of this package, a path of this repository."""
    said = [name for erratum in ERRATA.values() for name in re.findall(r"^(\w+)\.(\w+)$", erratum.here)]
    assert len(said) >= 3
    for module, name in said:
        assert hasattr(importlib.import_module(f"fedspeed.theory.{module}"), name)
    paths = [erratum.here for erratum in ERRATA.values() if erratum.here.startswith("docs/")]
    assert len(paths) >= 2
    assert all((Path(__file__).parents[2] / path).is_file() for path in paths)
