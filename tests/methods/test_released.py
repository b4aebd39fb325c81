"""The preset `released`: each difference of the authors' code does what the documentation says."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from federations import Softmax, package
from torch import nn

from fedspeed.config import Config
from fedspeed.data.federated import Federated
from fedspeed.methods import FedADMM, FedAvg, FedCM, FedDyn, FedProx, FedSMOO, FedSpeed, MoFedSAM, Scaffold
from fedspeed.plan import Plan
from fedspeed.sampling import batch_order, key
from fedspeed.server import simulate


def released(**given) -> Config:
    return Config.from_dict({"preset": "released", **given})


def test_the_preset_changes_what_the_documentation_lists_and_nothing_else():
    plain, preset = Config.from_dict({"preset": "paper"}).to_dict(), released().to_dict()
    assert {key: value for key, value in preset.items() if plain[key] != value} == {
        "cohort": "bernoulli",
        "clip": 10.0,
        "clip_mode": "released",
        "decay_outside_mix": True,
        "augment": "released",
        "lr_decay": 0.998,
        "split": "dirichlet-refill:0.6",
    }


def test_what_is_said_wins_over_the_preset():
    config = released(clip=0.0, split="iid", method={"name": "fedadam", "tau": 0.5})
    assert (config.clip, config.split, config.method.tau) == (0.0, "iid", 0.5)
    assert released(method="fedadam").method.tau == 0.01
    assert released(method={"name": "topk", "base": "fedadam"}).method.base.tau == 0.01
    assert released(method={"name": "topk", "base": {"name": "fedadam", "tau": 0.5}}).method.base.tau == 0.5
    assert Config.from_dict({"method": "fedadam"}).method.tau == 1e-3


def test_the_preset_is_resolved_in_the_config():
    config = released(method="fedcm")
    assert "preset" not in config.to_dict()
    assert Config.from_dict(config.to_dict()) == config


def local_model(method, h=None, **changes) -> tuple[np.ndarray, np.ndarray]:
    """x_iK - x^t after one step of one client from a state h, and x^t."""
    problem = Softmax(clients=1, equal=8)
    plan = Plan(rounds=1, active=1, local_steps=1, batch_size=8, lr=0.1, lr_decay=1.0, weight_decay=0.01)
    run = package(problem, method, Plan.from_fields({**plan.fields(), **changes}))
    if h is not None:
        run.states.stage(0, method.init_client(run.x0)._replace(h=torch.from_numpy(h)), 0)
        run.states.commit()
    before = run.x.numpy()
    run.step()
    after = run.states.get(0).h.numpy() - (0 if h is None else h) if h is not None else run.x.numpy() - before
    return after, before


@pytest.mark.parametrize("limit", [1e-2, 0.5, 1e6], ids=["active", "partly", "inactive"])
def test_released_clipping_of_a_fedspeed_step(limit):
    """clip(g2 + (h_i - x^t)/lam) + x/lam + wd x: with c the factor, c (g2 + h/lam) and a shrinkage (1 - c)/lam x^t."""
    problem, method = Softmax(clients=1, equal=8), FedSpeed(lam=2.0, rho=0.3)
    h = np.random.default_rng(0).normal(size=12)
    D, x = local_model(method, h, clip=limit, clip_mode="released")
    rows = np.arange(8)
    g1 = problem.gradient(rows, x)
    g2 = problem.gradient(rows, x + 0.3 * g1 / (np.linalg.norm(g1) + 1e-7))
    q = g2 + (h - x) / 2.0
    c = min(1.0, limit / np.linalg.norm(q))
    np.testing.assert_allclose(D, -0.1 * (c * (g2 + h / 2.0) + (1 - c) / 2.0 * x + 0.01 * x), atol=1e-12)


@pytest.mark.parametrize("method", [FedSpeed(lam=2), FedDyn(), FedProx(), FedADMM(), FedSMOO(), FedAvg(), Scaffold()])
def test_an_inactive_released_clip_changes_nothing(method):
    plan = Plan(rounds=3, active=3, local_steps=3, batch_size=4)
    loose = Plan.from_fields({**plan.fields(), "clip": 1e6, "clip_mode": "released"})
    runs = [package(Softmax(), method, p) for p in (plan, loose)]
    for _ in zip(*runs, strict=True):
        np.testing.assert_allclose(runs[0].x.numpy(), runs[1].x.numpy(), atol=1e-13)


def fixed_point(method, outside: bool, wd: float) -> np.ndarray:
    """Where a method ends on F(x) = ||x - b||^2 / 2 with weight decay, one client: divided by b."""
    b = np.array([1.0, -2.0, 0.5])
    A = np.sqrt(3) * np.eye(3)
    data = Federated.from_arrays(A, A @ b[:, None], [np.arange(3)])
    run = simulate(
        method, nn.Linear(3, 1, bias=False).double(), data, loss=lambda out, y: 0.5 * (out - y).square().mean(),
        rounds=300, active=1, local_steps=4, batch_size=3, lr=0.1, lr_decay=1.0, weight_decay=wd,
        decay_outside_mix=outside,
    )  # fmt: skip
    for _ in run:
        pass
    return run.x.numpy() / b


@pytest.mark.parametrize("method", [FedCM(alpha=0.2), MoFedSAM(alpha=0.2, rho=0)])
def test_weight_decay_outside_the_mix_is_inflated(method):
    """Fixed point b/(1 + wd/alpha) as released, b/(1 + wd) by default."""
    wd = 0.05
    np.testing.assert_allclose(fixed_point(method, False, wd), 1 / (1 + wd), atol=1e-6)
    np.testing.assert_allclose(fixed_point(method, True, wd), 1 / (1 + wd / 0.2), atol=1e-6)


@pytest.mark.parametrize("method", [FedAvg(), Scaffold()])
def test_weight_decay_elsewhere_does_not_depend_on_the_option(method):
    for outside in (False, True):
        np.testing.assert_allclose(fixed_point(method, outside, 0.05), 1 / 1.05, atol=1e-6)


def test_fedmoswa_as_its_flag_runs_it():
    """update_scafplus of the authors' file, in NumPy: a constant rate, c_i over K lr, the mean itself, 0.4."""
    method = released(method="fedmoswa").method
    problem = Softmax(equal=8)
    plan = Plan(rounds=3, active=4, local_steps=3, batch_size=4, lr=0.1, lr_decay=1.0, weight_decay=1e-3)
    rows = problem.arrays()[2]
    with package(problem, method, plan) as run:
        x, m, c = run.x.numpy().copy(), np.zeros(12), np.zeros((7, 12))
        for t, record in enumerate(run):
            ends = []
            for i in record.cohort:
                v = x.copy()
                for batch in batch_order(8, 4, 3, key(plan.seed, "batches", t, i)):
                    v = v - 0.1 * (problem.gradient(rows[i][batch], v) + 1e-3 * v + m - c[i])
                c[i] = (x - v) / (3 * 0.1) + c[i] - m
                ends.append(v)
            x, m = np.mean(ends, 0), m + 0.4 * np.mean(c[record.cohort] - m, 0)
            np.testing.assert_allclose(run.x.numpy(), x, rtol=0, atol=1e-12)
