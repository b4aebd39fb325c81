"""The examples of the gallery run, each draws one figure, and what their texts say is so."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pytest
from closed_forms import fixed_point
from gallery import GALLERY
from matplotlib import pyplot as plt

from fedspeed.theory import Setting


@pytest.fixture
def run(monkeypatch):
    """Runs an example as a script; its names, when it has drawn one figure whose axes all have labels."""
    mpl.use("agg")
    monkeypatch.setattr(plt, "show", lambda: None)

    def names(example: str) -> dict[str, Any]:
        found = runpy.run_path(str(GALLERY / f"plot_{example}.py"), run_name="__main__")
        (number,) = plt.get_fignums()
        figure = plt.figure(number)
        figure.canvas.draw()
        drawn = figure.axes
        assert any(axis.get_xlabel() for axis in drawn)
        assert any(axis.get_ylabel() for axis in drawn)
        return found

    yield names
    plt.close("all")


def test_each_example_is_here():
    tested = Path(__file__).read_text()
    for path in GALLERY.glob("*.py"):
        assert f'run("{path.stem.removeprefix("plot_")}")' in tested
        text = path.read_text()
        assert text.count("**What to see.**") == 1
        assert text.count("plt.show()") == 1


def test_splits_own_every_sample_once(run):
    counts = run("splits")["counts"]
    for count in counts.values():
        assert count.sum() == 1437
    kinds = [float((count > 0).sum(0).mean()) for count in counts.values()]
    assert kinds == sorted(kinds, reverse=True)
    assert (counts["shards:2"] > 0).sum(0).max() <= 4  # a shard holds at most two digits


def test_drift_ends_where_clients_know_each_other(run):
    curves = run("drift")["curves"]
    for name in ("SCAFFOLD", "FedSpeed"):
        drift, distance = curves[name]
        assert drift[-1] < 1e-9
        assert distance[-1] < 1e-9
    drift, distance = curves["FedAvg"]
    assert drift[-1] > drift[0] / 4
    assert distance[-1] == pytest.approx(distance[-2], rel=1e-6)
    assert distance[-1] > 1e-2


def test_duals_become_minus_the_gradients(run):
    found = run("duals")
    problem = found["problem"]
    H, v = problem.H, problem.v
    optimum = np.linalg.solve(H.sum(0), v.sum(0))
    np.testing.assert_allclose(found["history"][-1], v - H @ optimum, atol=1e-12)
    assert np.abs(v - H @ optimum).max() > 0.5


def test_the_printed_rule_stays_where_predicted(run):
    found = run("server_rule")
    settled = np.array(found["curves"]["active"][40:])
    assert np.sqrt(np.square(settled).mean()) == pytest.approx(found["predicted"], rel=0.15)
    assert found["curves"]["all"][-1] < 1e-3


def test_fedavg_ends_at_its_fixed_point(run):
    found = run("fixed_point")
    for K, x in found["fedavg"].items():
        setting = Setting(eta=found["LR"], lam=1.0, K=K, L=1.0, m=3, T=1, rho=0.0, normalise=False)
        np.testing.assert_allclose(x, fixed_point(found["problem"], setting, "fedavg"), atol=1e-10)
    np.testing.assert_allclose(found["speedy"], found["problem"].optimum, atol=1e-10)
    np.testing.assert_allclose(found["fedavg"][1], found["problem"].optimum, atol=1e-10)
    assert np.linalg.norm(found["fedavg"][16] - found["problem"].optimum) > 0.5


def test_the_printed_bound_is_broken_where_lam_L_is_large(run):
    small, large = run("counterexample")["found"]
    assert [small.setting.lam, large.setting.lam] == [1.0, 4.0]
    assert small.bound.valid
    assert large.bound.valid
    assert [small.violated, large.violated] == [False, True]
    assert large.average == pytest.approx(0.0497, abs=5e-5)  # as the text says
    assert large.bound.total == pytest.approx(0.0127, abs=5e-5)


def test_the_quasi_gradient_is_that_of_the_appendix_penalty_to_second_order(run):
    found = run("perturbation")["found"]
    assert [round(fit.slope) for fit in found.order.values()] == [2, 1, 2]
    assert found.order["(beta/2) ||grad L||^2"].slope == pytest.approx(2, abs=0.01)


@pytest.mark.slow
def test_participation_is_worth_orders_of_magnitude_to_methods_with_states(run):
    found = run("participation")
    problem, far = found["problem"], found["found"]
    setting = Setting(eta=found["LR"], lam=1.0, K=found["K"], L=1.0, m=100, T=1, rho=0.0, normalise=False)
    end = fixed_point(problem, setting, "fedavg")
    assert found["floor"] == pytest.approx(np.linalg.norm(end - problem.optimum), rel=1e-9)
    assert far["FedAvg"][-1] == pytest.approx(found["floor"], rel=1e-3)
    for name in ("SCAFFOLD", "FedSpeed"):
        assert far[name] == sorted(far[name], reverse=True)
        assert far[name][0] > 0.5 * far["FedAvg"][0]  # one in a hundred: no better
        assert far[name][-2] < far["FedAvg"][-2] / 100


@pytest.mark.slow
def test_sharpness_is_the_curvature_that_is_drawn(run):
    found = run("sharpness")
    steps, eigenvalues = found["steps"], []
    for along, eigenvalue, accuracy in found["found"].values():
        middle = len(steps) // 2
        second = (along[middle + 1] + along[middle - 1] - 2 * along[middle]) / steps[middle + 1] ** 2
        assert second == pytest.approx(eigenvalue, rel=0.25)
        assert accuracy > 0.85
        assert 0.04 < along.min() < 0.09  # as the text says
        eigenvalues.append(eigenvalue)
    assert eigenvalues == sorted(eigenvalues, reverse=True)


@pytest.mark.slow
def test_bytes_are_saved_by_the_factors_of_the_text(run):
    curves = run("bytes")["curves"]
    (dense, best), (quantised, second), (largest, third) = curves.values()
    assert dense[-1] / quantised[-1] == pytest.approx(4, rel=0.05)
    assert dense[-1] / largest[-1] > 10
    assert min(second[-1], third[-1]) > best[-1] - 3
