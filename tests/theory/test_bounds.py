"""The proved bounds are never violated, and every inequality behind them holds, on random problems."""

from __future__ import annotations

import math

import lemmas as lm
import numpy as np
import pytest
from federations_theory import simulation
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fedspeed.errors import UserError
from fedspeed.methods import FedSpeed
from fedspeed.theory import (
    Setting,
    Start,
    bound,
    form_at,
    largest_L,
    random_logistic,
    random_quadratic,
    run,
    schedule,
    start_at,
    suggest,
)
from fedspeed.theory.bounds import largest


@st.composite
def problems(draw):
    """Quadratics with a shared Hessian, or logistic regression: (A3) holds for every x."""
    m, d, seed = draw(st.integers(1, 6)), draw(st.integers(1, 4)), draw(st.integers(0, 10**6))
    L = 10 ** draw(st.floats(-1, 1))
    if draw(st.booleans()):
        mu = L * draw(st.floats(0.01, 1))
        return random_quadratic(m, d, 3, L=L, mu=mu, sigma_g=10 ** draw(st.floats(-2, 1)), sigma_l=0.5, seed=seed)
    problem = random_logistic(
        m, d, 20, L=L, spread=draw(st.floats(0, 3)), flip=0.3, shared=draw(st.booleans()), seed=seed
    )
    try:
        _ = problem.optimum
    except UserError:
        assume(False)
    return problem


@st.composite
def admissible(draw, form, noisy=False):
    """A problem, a setting that meets a form's conditions (up to their edge), and a start."""
    problem = draw(problems())
    K, T = draw(st.sampled_from([1, 2, 3, 7, 25])), draw(st.sampled_from([1, 2, 5, 15]))
    c = min(10 ** draw(st.floats(-1, 1.3)), float(K))  # eta K / lam: K >= lam/eta is not needed
    base = Setting(
        eta=1e-9, lam=1e-9, K=K, L=problem.L, alpha=draw(st.floats(0.1, 1)), m=problem.m, T=T,
        rho=draw(st.sampled_from([0.0, 0.01, 0.05])) / problem.L,
        normalise=form == "tracking" and draw(st.booleans()),
        sigma_g=problem.sigma_g, sigma_l=problem.sigma_l(1) if noisy else 0.0,
    )  # fmt: skip

    def at(lam):
        return base.but(lam=lam, eta=min(c * lam / K, lam))

    edge = largest(lambda lam: form_at(at(lam), form).holds, 10 / problem.L)
    assume(edge > 0)
    setting = at(edge * draw(st.sampled_from([1 - 1e-6, 0.5, 0.1])))
    far = 10 ** draw(st.floats(-2, 1))
    x0 = problem.optimum + far * np.random.default_rng(draw(st.integers(0, 999))).normal(size=problem.d)
    return problem, setting, x0


def measured(trace, problem) -> np.ndarray:
    """||grad F(z^t)||^2, (T, R)."""
    z = trace.z[:-1]
    g = problem.gradient(np.broadcast_to(z[:, :, None], (*z.shape[:2], problem.m, problem.d))).mean(2)
    return np.square(g).sum(-1)


@given(admissible("corrected"))
@settings(max_examples=120, deadline=None)
def test_corrected_bound_and_its_lemmas(case):
    problem, s, x0 = case
    trace = run("fedspeed", problem, s, x0, keep=True, steps=True)
    q = lm.moments(trace, problem)
    assert q.gradient.mean() <= bound(s, start_at(problem, x0), "corrected").total * (1 + 1e-12)
    for inequality in (
        lm.global_update(s, q),
        lm.local_update(s, q, "printed"),  # without noise the printed lemma is right
        lm.local_update(s, q),
        lm.drift(s, q),
    ):
        assert inequality.holds(1e-9), inequality.name
    if s.T > 1:  # and from t = 1, with the corrections of round 0, as the theorem sums
        start = Start(float(problem.value(trace.z[1, 0])) - problem.minimum, q.after[0], q.mean_after[0])
        assert q.gradient[1:].sum() / s.T <= bound(s, start, "corrected").total * (1 + 1e-9) + 1e-15


@given(admissible("tracking"))
@settings(max_examples=120, deadline=None)
def test_tracking_bound_and_its_lemmas(case):
    problem, s, x0 = case
    q = lm.moments(run("fedspeed", problem, s, x0, keep=True, steps=True), problem)
    assert q.gradient.mean() <= bound(s, start_at(problem, x0), "tracking").total * (1 + 1e-12)
    for inequality in (lm.global_update(s, q), lm.offset(s, q), lm.tracking(s, q)):
        assert inequality.holds(1e-9), inequality.name


@pytest.mark.parametrize("form", ["corrected", "tracking"])
@given(st.data())
@settings(max_examples=25, deadline=None)
def test_bounds_hold_in_the_mean_over_minibatches(form, data):
    """Noise: the mean over 40 seeds, less four of its standard errors, stays below the bound."""
    problem, s, x0 = data.draw(admissible(form, noisy=True))
    values = measured(run("fedspeed", problem, s, x0, batch=1, seeds=40), problem).mean(0)
    slack = 4 * values.std(ddof=1) / math.sqrt(len(values))
    assert values.mean() - slack <= bound(s, start_at(problem, x0), form).total


@pytest.mark.parametrize("problem", [random_quadratic(m=5, d=3, seed=1), random_logistic(m=5, d=3, seed=1)])
@pytest.mark.parametrize("form", ["corrected", "tracking"])
def test_bound_holds_on_traces_of_simulate(problem, form):
    """z^t from what our own round loop did: u^{t+1} - u^t = lam mean(-g_hat) = H of the server (Eq. 4)."""
    x0 = problem.optimum + 2.0
    start = start_at(problem, x0)
    s = suggest(Setting(eta=0.5, lam=1.0, K=10, L=problem.L, m=problem.m, T=15, sigma_g=problem.sigma_g), form, start)
    assert form_at(s, form).holds
    method = FedSpeed(lam=s.lam, rho=s.rho, normalise=False)
    loop, u, squares = simulation(problem, method, s, x0), np.asarray(x0), []
    z = u
    for _ in loop:
        squares.append(np.square(problem.gradient(np.broadcast_to(z, (problem.m, problem.d))).mean(0)).sum())
        step = loop.server.H.numpy()
        u = u + step
        z = u + (1 - s.gamma) / s.gamma * step
    assert len(squares) == s.T
    assert np.mean(squares) <= bound(s, start, form).total


def test_lemma_of_the_local_update_needs_its_corrected_noise_term():
    """Erratum 15: with noise the step E||g_tilde||^2 <= 2(1+q)||grad||^2 + sigma_l^2 of the printed lemma fails."""
    problem = random_quadratic(m=2, d=2, n=2, mu=1.0, sigma_g=0.0, sigma_l=1.0)
    alpha, rho = 1.0, 0.4
    g1 = problem.v_samples - problem.v[:, None]  # at the optimum the gradient of a sample is its noise
    quasi = (1 + alpha * rho * problem.L) * g1  # H = I
    mean = np.square(quasi).sum(-1).mean()
    assert mean > 1.0 * (1 + 1e-9)  # printed: 2 (1 + q) 0 + sigma_l^2
    assert math.isclose(mean, (1 + alpha * rho * problem.L) ** 2, rel_tol=1e-9)


@given(st.floats(0.01, 10), st.integers(1, 100), st.floats(0.001, 10))
@settings(max_examples=15, deadline=None)
def test_suggestions_meet_their_form(lam, K, L):
    setting = Setting(eta=lam / 2, lam=lam, K=K, L=L, rho=0.3, sigma_g=1.0, sigma_l=1.0)
    for form in ("corrected", "tracking"):
        near = suggest(setting, form, Start(1.0, tracking=1.0))
        assert near is not None
        assert form_at(near, form).holds
        assert near.lam <= lam
        assert math.isfinite(bound(near, Start(1.0, tracking=1.0), form).total)


def test_largest_L_is_the_edge():
    setting = Setting(eta=0.001, lam=0.1, K=200)
    for form in ("printed", "corrected", "tracking"):
        edge = largest_L(setting, form)
        assert form_at(setting.but(L=edge), form).holds
        assert not form_at(setting.but(L=edge * 1.001), form).holds
    assert largest_L(Setting(), "printed") == 0  # K < lam/eta, whatever L


def test_bound_says_what_dominates():
    setting = Setting(eta=0.001, lam=0.1, K=200, sigma_l=10.0, T=10**9)
    parts = bound(setting, Start(1.0, tracking=1.0), "tracking")
    assert parts.valid
    assert parts.dominant in ("drift", "noise")
    assert math.isclose(parts.total, sum(parts.terms.values()))
    hopeless = bound(Setting(), Start(1.0), "printed")
    assert hopeless.total == math.inf
    assert not hopeless.valid


def test_schedule_refuses_what_cannot_be():
    with pytest.raises(UserError, match="fraction"):
        schedule(Setting(T=10), "printed", fraction=0.0)
    with pytest.raises(UserError, match="no lam meets the conditions `tracking`"):
        schedule(Setting(T=4, rho=5.0), "tracking")
