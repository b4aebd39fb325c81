"""The playground's loop computes what the package does, and its page runs the package's own method files."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from fedspeed import Federated, Plan, UserError, simulate
from fedspeed.methods import METHODS
from fedspeed.sampling import cohort

PLAYGROUND = Path(__file__).parents[2] / "docs" / "playground"


def _module(name: str):
    spec = importlib.util.spec_from_file_location(f"playground_{name}", PLAYGROUND / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


federation = _module("federation")
CLIENTS, ROUNDS, K, LR = 5, 8, 6, 0.2
X0 = [2.0, -1.0]


def quadratics() -> list:
    r = np.random.default_rng(0)
    made = []
    for _ in range(CLIENTS):
        angle, (big, small) = r.uniform(0, np.pi), r.uniform([0.6, 0.1], [1.0, 0.4])
        turn = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
        H = turn @ np.diag([big, small]) @ turn.T
        made.append(federation.Quadratic(tuple(r.normal(size=2) * 2), H[0, 0], H[0, 1], H[1, 1]))
    return made


def simulation(method, clients, active: int):
    """The package's run: two samples a client, the rows of the root of its Hessian."""
    roots = [np.linalg.cholesky([[q.a, q.b], [q.b, q.c]]).T for q in clients]
    targets = [A @ q.optimum for A, q in zip(roots, clients, strict=True)]
    data = Federated.from_arrays(
        np.concatenate(roots), np.concatenate(targets)[:, None], np.arange(2 * CLIENTS).reshape(-1, 2)
    )
    model = torch.nn.Linear(2, 1, bias=False).double()
    with torch.no_grad():
        model.weight.copy_(torch.tensor([X0]))
    plan = Plan(rounds=ROUNDS, active=active, local_steps=K, lr=LR, lr_decay=1.0, weight_decay=0.0)
    return simulate(method, model, data, plan, loss=torch.nn.functional.mse_loss, backend="serial")


@pytest.mark.parametrize("active", [CLIENTS, 2])
@pytest.mark.parametrize("name", federation.NAMES)
def test_the_loop_computes_what_the_package_does(name, active):
    clients = quadratics()
    method = METHODS[name]()
    if federation.complaint(method, LR, active, CLIENTS):
        with pytest.raises(UserError):
            simulation(method, clients, active)
        assert (name, active) == ("fedpd", 2)
        return
    ours = federation.Federation(method, clients, X0, K, LR)
    run = simulation(method, clients, active)
    for t, record in enumerate(run):
        chosen = [int(i) for i in cohort(0, t, CLIENTS, active, "fixed")]
        assert record.cohort == chosen
        ours.round(chosen)
        np.testing.assert_allclose(ours.x, run.x.numpy(), rtol=0, atol=1e-10)
    for i, kept in ours.states.items():
        for name, vector in kept._asdict().items():
            np.testing.assert_allclose(vector.a, getattr(run.client_state(i), name).numpy(), rtol=0, atol=1e-10)
    assert np.linalg.norm(np.subtract(ours.x, X0)) > 0.1
