"""What must hold in every run, whatever the setting: property-based."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from federations import Softmax, package
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fedspeed import simulate
from fedspeed.config.plan import Plan
from fedspeed.data.federated import Federated
from fedspeed.methods import METHODS, FedInit, FedSpeed

plans = st.builds(
    Plan,
    rounds=st.integers(1, 4),
    active=st.integers(1, 7),
    cohort=st.sampled_from(["fixed", "bernoulli"]),
    local_steps=st.integers(1, 4),
    batch_size=st.integers(1, 9),
    lr=st.floats(0.01, 0.3),
    lr_decay=st.floats(0.5, 1.0),
    weight_decay=st.sampled_from([0.0, 0.1]),
    weighting=st.sampled_from(["uniform", "samples"]),
    seed=st.integers(0, 10),
)


def mean_of_states(run, field: str) -> np.ndarray:
    """The (weighted) mean over ALL clients of a stored vector; untouched clients hold 0."""
    sizes = run.data.sizes
    p = sizes / sizes.sum() if run.plan.weighting == "samples" else np.full(len(sizes), 1 / len(sizes))
    return sum(p[i] * getattr(run.states.get(i), field).numpy() for i in run.states)


@settings(max_examples=12, deadline=None)
@given(plan=plans, eta_g=st.floats(0.5, 1.0))
def test_scaffold_keeps_c_the_mean_of_all_c_i(plan, eta_g):
    for name in ("scaffold", "fedgamma"):
        run = package(Softmax(), METHODS[name](eta_g=eta_g), plan)
        for _ in run:
            np.testing.assert_allclose(run.server.c.numpy(), mean_of_states(run, "c"), atol=1e-12)


@settings(max_examples=12, deadline=None)
@given(plan=plans, lam=st.floats(0.4, 20.0))
def test_primal_dual_methods_keep_H_the_mean_of_all_h_i(plan, lam):
    for method in (METHODS["feddyn"](alpha=1 / lam), FedSpeed(lam=lam), METHODS["fedsmoo"](lam=lam)):
        run = package(Softmax(), method, plan)
        for _ in run:
            np.testing.assert_allclose(run.server.H.numpy(), mean_of_states(run, "h"), atol=1e-12)


@settings(max_examples=12, deadline=None)
@given(plan=plans, lam=st.floats(0.4, 20.0))
def test_fedadmm_wang_keeps_x_the_mean_of_the_latest_x_hat(plan, lam):
    run = package(Softmax(), METHODS["fedadmm"](lam=lam), plan)
    sizes = run.data.sizes
    p = sizes / sizes.sum() if plan.weighting == "samples" else np.full(len(sizes), 1 / len(sizes))
    for _ in run:
        latest = sum(p[i] * run.client_state(i).xh.numpy() for i in range(len(sizes)))
        np.testing.assert_allclose(run.x.numpy(), latest, atol=1e-12)


@pytest.mark.parametrize(
    "method", [*(cls() for cls in METHODS.values()), FedInit(FedSpeed())], ids=lambda method: method.name
)
@settings(max_examples=4, deadline=None)
@given(seed=st.integers(0, 100))
def test_a_common_stationary_point_is_at_rest(method, seed):
    """All F_i have their minimum at one point: nobody moves, not by one bit.

    Small whole numbers and a cohort of four, so that gradients there and means of equal vectors are exact zeros
    and exact values: a sharpness-aware step would blow up a rounding error by rho / 1e-7.
    """
    r = np.random.default_rng(seed)
    common = r.integers(-8, 9, size=(3, 1)) / 4
    A = r.integers(-3, 4, size=(8 * 4, 3)).astype(float)
    data = Federated.from_arrays(A, A @ common, list(np.arange(32).reshape(8, 4)))
    model = nn.Linear(3, 1, bias=False).double()
    with torch.no_grad():
        model.weight.copy_(torch.from_numpy(common.T))
    if method.name == "fedgmt":
        method = METHODS["fedgmt"](gamma=0.0)  # no classes here, so no teacher
    active = 8 if method.name == "fedpd" else 4
    run = simulate(
        method, model, data, loss=nn.functional.mse_loss, rounds=3, active=active, local_steps=3, batch_size=2,
        weight_decay=0.0, seed=seed,
    )  # fmt: skip
    for _ in run:
        np.testing.assert_array_equal(run.x.numpy(), common[:, 0])
