"""The constants of the problems are what they say, and the problems are data for `simulate` and the CLI."""

from __future__ import annotations

import json

import numpy as np
import pytest
from federations_theory import simulation
from hypothesis import given, settings
from hypothesis import strategies as st

from fedspeed.cli import main
from fedspeed.data import load
from fedspeed.data.problems import Logistic, dissimilarity, random_logistic, random_quadratic
from fedspeed.errors import UserError
from fedspeed.methods import FedAvg
from fedspeed.theory import Setting

KINDS = [
    random_quadratic(m=4, d=3, n=3, L=2.0, mu=0.3, sigma_g=1.5, sigma_l=0.4),
    random_quadratic(m=4, d=3, n=3, L=2.0, mu=0.3, shared=False),
    random_logistic(m=4, d=3, n=15, L=2.0, spread=2.0),
    random_logistic(m=4, d=3, n=15, L=2.0, shared=True),
]


@pytest.mark.parametrize("problem", KINDS, ids=lambda p: f"{type(p).__name__} {p.shared}")
def test_gradient_is_that_of_the_value_and_0_at_the_optimum(problem):
    r = np.random.default_rng(0)
    for x in r.normal(size=(5, 3)):
        step = 1e-6
        numeric = [(problem.value(x + step * e) - problem.value(x - step * e)) / (2 * step) for e in np.eye(3)]
        mean = problem.gradient(np.broadcast_to(x, (4, 3))).mean(0)
        np.testing.assert_allclose(mean, numeric, atol=1e-8)
        assert problem.value(x) >= problem.minimum
    at_best = problem.gradient(np.broadcast_to(problem.optimum, (4, 3))).mean(0)
    assert np.abs(at_best).max() < 1e-12


@pytest.mark.parametrize("problem", KINDS, ids=lambda p: f"{type(p).__name__} {p.shared}")
@given(st.integers(0, 10**6), st.floats(-2, 2))
@settings(max_examples=40, deadline=None)
def test_smoothness_and_heterogeneity_are_bounds_everywhere(problem, seed, size):
    r = np.random.default_rng(seed)
    x, y = 10**size * r.normal(size=(2, 4, 3))
    change = np.linalg.norm(problem.gradient(x) - problem.gradient(y), axis=-1)
    assert (change <= problem.L * np.linalg.norm(x - y, axis=-1) * (1 + 1e-9)).all()
    found = dissimilarity(problem, x[0])
    assert found <= problem.sigma_g**2 * (1 + 1e-9)
    if problem.shared:
        assert found == pytest.approx(problem.sigma_g**2, rel=1e-6)


def test_quadratic_has_the_constants_asked_for():
    problem = random_quadratic(m=6, d=4, n=5, L=3.0, mu=0.5, sigma_g=2.0, sigma_l=0.7, seed=9)
    eigenvalues = np.linalg.eigvalsh(problem.H[0])
    assert eigenvalues[0] == pytest.approx(0.5)
    assert np.isclose(problem.L, 3.0)
    assert problem.sigma_g == pytest.approx(2.0)
    assert problem.sigma_l(1) == pytest.approx(0.7)
    assert problem.sigma_l(4) == pytest.approx(0.35)
    assert random_quadratic(shared=False).sigma_g == np.inf


def test_logistic_hessian_is_the_derivative_of_the_gradient():
    problem, x, step = KINDS[2], np.array([0.2, -0.5, 1.0]), 1e-6

    def grad(point):
        return problem.gradient(np.broadcast_to(point, (4, 3))).mean(0)

    numeric = [(grad(x + step * e) - grad(x - step * e)) / (2 * step) for e in np.eye(3)]
    np.testing.assert_allclose(problem.hessian(x), numeric, atol=1e-8)


def test_separable_data_have_no_optimum():
    a = np.array([[[1.0, 0.0], [2.0, 1.0], [-1.0, 0.0], [-2.0, 1.0]]])
    with pytest.raises(UserError, match="separated"):
        _ = Logistic(a, np.array([[1.0, 1.0, 0.0, 0.0]])).optimum


@pytest.mark.parametrize("problem", KINDS[:3], ids=lambda p: f"{type(p).__name__} {p.shared}")
def test_simulate_sees_the_same_problem(problem):
    """The test loss of the server model is F, and one full-batch step of FedAvg moves by -eta grad F."""
    x0 = np.array([0.5, -1.0, 2.0])
    loop = simulation(problem, FedAvg(), Setting(eta=0.1, lam=1.0, K=1, T=1), x0, eval_every=1)
    record = loop.step()
    x = loop.x.numpy()
    step = -0.1 * problem.gradient(np.broadcast_to(x0, (4, 3))).mean(0)
    np.testing.assert_allclose(x - x0, step, atol=1e-14)
    assert record.test_loss == pytest.approx(float(problem.value(x)), rel=1e-12)


@pytest.mark.parametrize(
    ("name", "bad", "said"),
    [
        ("quadratic", {"mu": 2.0}, "mu must be at most L"),
        ("quadratic", {"L": 0.0}, "L must be > 0"),
        ("quadratic", {"d": 0}, "d must be >= 1"),
        ("quadratic", {"sigma_l": 1.0, "n": 1}, "at least 2 samples"),
        ("logistic", {"flip": 0.9}, "flip must lie in"),
        ("logistic", {"spread": -1.0}, "spread must be >= 0"),
    ],
)
def test_bad_options_are_refused(name, bad, said):
    with pytest.raises(UserError, match=said):
        load(name, split="natural", clients=3, **bad)


@pytest.mark.parametrize("name", ["quadratic", "logistic"])
def test_the_command_line_runs_them(name, tmp_path, capsys):
    call = f"run --data {name} --model vector --split natural --clients 4 --active 4 --rounds 2 --local-steps 3"
    assert (
        main([*call.split(), "--set", "data.d=3", "--weight-decay", "0", "--out", str(tmp_path / "r"), "--json"]) == 0
    )
    summary = json.loads(capsys.readouterr().out)
    assert summary["parameters"] == 3
    assert summary["last_test_loss"] > 0


def test_the_model_says_what_it_is_for(tmp_path, capsys):
    assert main(["run", "--model", "vector", "--rounds", "1", "--out", str(tmp_path / "r")]) == 2
    assert "the data quadratic or logistic" in capsys.readouterr().err
    assert main(["run", "--data", "quadratic", "--out", str(tmp_path / "r")]) == 2
    assert "use natural, or iid" in capsys.readouterr().err
