"""The NumPy runs and the closed forms against `simulate`, and the fixed points of FedAvg, FedProx and FedSpeed."""

from __future__ import annotations

import numpy as np
import pytest
from closed_forms import exact_sequences, fixed_point
from federations_theory import simulation

from fedspeed.data.problems import random_logistic, random_quadratic
from fedspeed.errors import UserError
from fedspeed.methods import FedAvg, FedProx, FedSpeed, Scaffold
from fedspeed.theory import Setting, auxiliary, run

SETTING = Setting(eta=0.05, lam=0.6, K=8, T=6, alpha=0.7, rho=0.2)
PROBLEMS = {
    "own Hessians": random_quadratic(m=4, d=3, n=2, shared=False, seed=3),
    "logistic": random_logistic(m=4, d=3, n=10, spread=2.0, seed=3),
}
METHODS = {
    "fedspeed": FedSpeed(lam=0.6, alpha=0.7, rho=0.2, normalise=False),
    "fedavg": FedAvg(),
    "scaffold": Scaffold(),
}


@pytest.mark.parametrize("kind", PROBLEMS)
@pytest.mark.parametrize("name", METHODS)
def test_a_numpy_run_is_simulate(kind, name):
    problem, x0 = PROBLEMS[kind], np.array([1.0, -2.0, 0.5])
    loop = simulation(problem, METHODS[name], SETTING, x0)
    ours = [loop.x.numpy()] + [loop.x.numpy() for _ in loop]
    trace = run(name, problem, SETTING, x0)
    np.testing.assert_allclose(trace.x[:, 0], ours, atol=1e-13)
    assert np.abs(ours[-1] - ours[0]).max() > 1e-2


def test_a_numpy_run_is_simulate_with_normalised_rho():
    setting, x0 = SETTING.but(normalise=True), np.array([1.0, -2.0, 0.5])
    problem = PROBLEMS["logistic"]
    loop = simulation(problem, FedSpeed(lam=0.6, alpha=0.7, rho=0.2), setting, x0)
    ours = [loop.x.numpy()] + [loop.x.numpy() for _ in loop]
    np.testing.assert_allclose(run("fedspeed", problem, setting, x0).x[:, 0], ours, atol=1e-13)


def test_closed_sequences_are_those_of_simulate():
    """x^t, g_hat_i^t, and u^t by Eq. (4) from the server's H, all without a local step."""
    problem, x0 = PROBLEMS["own Hessians"], np.array([1.0, -2.0, 0.5])
    exact = exact_sequences(problem, SETTING, x0)
    loop = simulation(problem, METHODS["fedspeed"], SETTING, x0)
    u = x0
    for t, _ in enumerate(loop):
        np.testing.assert_allclose(exact.x[t + 1], loop.x.numpy(), atol=1e-13)
        ghat = np.array([loop.states.get(i).h.numpy() for i in range(problem.m)]) / -SETTING.lam
        np.testing.assert_allclose(exact.ghat[t], ghat, atol=1e-12)
        u = u + loop.server.H.numpy()
        np.testing.assert_allclose(exact.u[t + 1], u, atol=1e-13)
    np.testing.assert_allclose(exact.z[1:], u_to_z(exact.u), atol=1e-14)


def u_to_z(u):
    g = SETTING.gamma
    return [u[t] + (1 - g) / g * (u[t] - u[t - 1]) for t in range(1, len(u))]


@pytest.mark.parametrize(
    ("name", "method", "mu"),
    [
        ("fedavg", FedAvg(), 0.0),
        ("fedprox", FedProx(mu=0.8), 0.8),
        ("fedspeed", FedSpeed(lam=2, rho=0), 0.0),
        ("fedspeed", FedSpeed(lam=2, rho=0.2, alpha=0.7, normalise=False), 0.0),
    ],
    ids=["fedavg", "fedprox", "fedspeed", "fedspeed perturbed"],
)
def test_simulate_ends_at_the_fixed_point(name, method, mu):
    problem = random_quadratic(m=3, d=3, n=1, mu=0.6, shared=False, seed=3)
    setting = Setting(eta=0.3, lam=2.0, K=6, T=60, alpha=0.7, rho=getattr(method, "rho", 0.0))
    loop = simulation(problem, method, setting, np.zeros(3))
    for _ in loop:
        pass
    end = fixed_point(problem, setting, name, mu)
    np.testing.assert_allclose(loop.x.numpy(), end, atol=1e-9)
    is_optimum = np.abs(end - problem.optimum).max() < 1e-12
    assert is_optimum == (name == "fedspeed" and setting.rho == 0)


def test_shared_hessians_make_the_optimum_a_fixed_point_of_fedavg():
    """Which is why the rate experiment needs logistic losses to tell FedAvg from SCAFFOLD."""
    problem = random_quadratic(m=4, d=3, seed=5)
    np.testing.assert_allclose(fixed_point(problem, SETTING, "fedavg"), problem.optimum, atol=1e-12)
    trace = {name: run(name, problem, SETTING, np.zeros(3)).x for name in ("fedavg", "scaffold")}
    np.testing.assert_allclose(trace["fedavg"], trace["scaffold"], atol=1e-12)


def test_minibatches_are_unbiased_with_the_stated_noise():
    for problem in (random_quadratic(m=3, d=2, n=4, sigma_l=0.7), random_logistic(m=3, d=2, n=4)):
        x = np.broadcast_to([0.3, -1.2], (3, 2))
        each = [problem.minibatch(np.full((3, 1), j))(x) for j in range(4)]
        np.testing.assert_allclose(np.mean(each, 0), problem.gradient(x), atol=1e-13)
        noise = np.square(np.array(each) - problem.gradient(x)).sum(-1).mean(0).max()
        assert noise <= problem.sigma_l(1) ** 2 * (1 + 1e-9)


def test_seeds_repeat_and_differ():
    problem = random_quadratic(m=3, d=2, n=4, sigma_l=0.7)
    a = run("fedspeed", problem, SETTING, np.zeros(2), batch=2, seeds=2, seed=4).x
    b = run("fedspeed", problem, SETTING, np.zeros(2), batch=2, seeds=1, seed=5).x
    np.testing.assert_array_equal(a[:, 1], b[:, 0])
    assert np.abs(a[:, 0] - a[:, 1]).max() > 1e-3


def test_main_text_index_of_u_fails_where_the_appendix_holds():
    """Erratum 1: Eq. (4) with u^t = mean x_iK^t instead of u^{t+1}."""
    problem = PROBLEMS["logistic"]
    trace = run("fedspeed", problem, SETTING, np.ones(3), keep=True)
    step = -SETTING.lam * trace.ghat.mean(2)[:, 0]
    np.testing.assert_allclose(np.diff(trace.u[:, 0], axis=0), step, atol=1e-13)
    main_text = trace.xK.mean(2)[:, 0]
    assert np.abs(np.diff(main_text, axis=0) - step[:-1]).max() > 1e-2
    u, z = auxiliary(trace.x[0], trace.xK, SETTING.gamma)
    assert u.shape == z.shape == trace.x.shape


def test_refusals():
    problem = random_quadratic(m=2, d=2)
    with pytest.raises(UserError, match="unknown method"):
        run("fedadam", problem, SETTING, np.zeros(2))
    with pytest.raises(UserError, match="seeds"):
        run("fedavg", problem, SETTING, np.zeros(2), seeds=0)
