"""Every method against a separately written NumPy transcription of its box, in float64."""

from __future__ import annotations

import numpy as np
import pytest
from federations import Softmax, package, transcription

from fedspeed.methods import METHODS
from fedspeed.plan import Plan

TOLERANCE = 1e-10

PLAN = Plan(rounds=6, active=3, local_epochs=2, batch_size=4, lr=0.1, lr_decay=0.9, weight_decay=0.01, seed=3)

CASES = [
    ("fedavg", {}),
    ("fedavg", {"eta_g": 0.7}),
    ("fedspeed", {}),
    ("fedspeed", {"server": "active"}),
    ("fedspeed", {"lam": 2.0, "rho": 0.5, "alpha": 0.3}),
    ("fedspeed", {"normalise": False, "rho": 0.2, "alpha": 0.9375}),
    ("fedspeed", {"rho": 0.0}),
    ("fedspeed", {"alpha": 0.0}),
    ("fedspeed", {"correction": False}),
    ("fedspeed", {"correction": False, "prox": False}),
    ("fedspeed", {"ascent_fraction": 0.5, "alpha": 0.75}),
]


@pytest.mark.parametrize(("name", "hyper"), CASES, ids=str)
@pytest.mark.parametrize("weighting", ["uniform", "samples"])
def test_method_equals_its_transcription(name, hyper, weighting):
    """Partial participation, decay, unequal sizes (so unequal K_i), weight decay."""
    plan = Plan.from_fields({**PLAN.fields(), "weighting": weighting})
    problem, method = Softmax(), METHODS[name](**hyper)
    run = package(problem, method, plan)
    for truth in transcription(problem, name, hyper, plan, decay=0.9):
        run.step()
        np.testing.assert_allclose(run.x.numpy(), truth["x"], rtol=0, atol=TOLERANCE)
    assert np.abs(run.x.numpy() - run.x0.numpy()).max() > 0.01  # it moved


@pytest.mark.parametrize("name", ["fedavg", "fedspeed"])
def test_with_clipping_steps_and_a_no_decay_group(name):
    plan = Plan.from_fields({**PLAN.fields(), "local_steps": 5, "clip": 0.2, "weight_decay": 0.1, "cohort": "bernoulli"})
    problem = Softmax()
    run = package(problem, METHODS[name](), plan, no_decay=("weight",))
    mask = np.zeros(problem.features * problem.classes)
    for truth in transcription(problem, name, {}, plan, decay=0.9, clip=0.2, decay_mask=mask):
        run.step()
        np.testing.assert_allclose(run.x.numpy(), truth["x"], rtol=0, atol=TOLERANCE)


def test_fedspeed_states_equal_the_corrections_of_the_box():
    """What a client keeps is h_i = -lam g_hat_i; the server's H is the mean of h_i over ALL clients."""
    problem, method = Softmax(), METHODS["fedspeed"](lam=2.0)
    run = package(problem, method, PLAN)
    for truth in transcription(problem, "fedspeed", {"lam": 2.0}, PLAN, decay=0.9):
        run.step()
        for i in run.states:
            np.testing.assert_allclose(run.states.get(i).h.numpy(), -2.0 * truth["clients"][i]["ghat"], atol=TOLERANCE)
        np.testing.assert_allclose(run.server.H.numpy(), truth["server"]["H"], atol=TOLERANCE)
