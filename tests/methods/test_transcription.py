"""Every method against a separately written NumPy transcription of its box, in float64."""

from __future__ import annotations

import numpy as np
import pytest
from federations import Softmax, package, transcription

from fedspeed.config.plan import Plan
from fedspeed.methods import METHODS, FedExP, FedInit, FedSpeed, build

TOLERANCE = 1e-10

PLAN = Plan(rounds=6, active=3, local_epochs=2, batch_size=4, lr=0.1, lr_decay=0.9, weight_decay=0.01, seed=3)

CASES = [
    ("fedavg", {}),
    ("fedavg", {"eta_g": 0.7}),
    ("fedprox", {}),
    ("fedprox", {"mu": 1.5, "eta_g": 0.7}),
    ("fedadam", {}),
    ("fedadam", {"eta_g": 0.02, "beta1": 0.5, "beta2": 0.8, "tau": 0.01, "v0": 1e-4}),
    ("fedyogi", {}),
    ("fedyogi", {"beta1": 0.5, "beta2": 0.8, "v0": 0.01}),
    ("fedadagrad", {}),
    ("fedadagrad", {"beta1": 0.4, "v0": 0.1}),
    ("fednova", {}),
    ("fednova", {"eta_g": 0.7}),
    ("scaffold", {}),
    ("scaffold", {"eta_g": 0.7}),
    ("fedcm", {}),
    ("fedcm", {"alpha": 0.6, "eta_g": 0.7}),
    ("feddyn", {}),
    ("feddyn", {"alpha": 1.5}),
    ("fedadmm", {}),
    ("fedadmm", {"lam": 0.7}),
    ("fedadmm", {"variant": "gong", "eta_g": 0.6}),
    ("fedadmm", {"variant": "active", "lam": 2.0}),
    ("fedpd", {}),
    ("fedpd", {"lam": 0.5}),
    ("fedspeed", {}),
    ("fedspeed", {"server": "active"}),
    ("fedspeed", {"lam": 2.0, "rho": 0.5, "alpha": 0.3}),
    ("fedspeed", {"normalise": False, "rho": 0.2, "alpha": 0.9375}),
    ("fedspeed", {"rho": 0.0}),
    ("fedspeed", {"alpha": 0.0}),
    ("fedspeed", {"correction": False}),
    ("fedspeed", {"correction": False, "prox": False}),
    ("fedspeed", {"ascent_fraction": 0.5, "alpha": 0.75}),
    ("fedsam", {}),
    ("fedsam", {"rho": 0.4, "eta_g": 0.7, "ascent_fraction": 0.25}),
    ("mofedsam", {}),
    ("mofedsam", {"alpha": 0.6, "rho": 0.4, "ascent_fraction": 0.25}),
    ("fedgamma", {}),
    ("fedgamma", {"rho": 0.4, "ascent_fraction": 0.25}),
    ("fedsmoo", {}),
    ("fedsmoo", {"lam": 0.7, "rho": 0.4, "ascent_fraction": 0.25}),
    ("fedlesam", {}),
    ("fedlesam", {"rho": 0.5, "eta_g": 0.7}),
    ("afedpd", {}),
    ("afedpd", {"lam": 0.7}),
    ("afedpdsam", {}),
    ("afedpdsam", {"lam": 2.0, "rho": 0.4}),
    ("fedgloss", {}),
    ("fedgloss", {"lam": 0.7, "rho": 0.4, "rho_l": 0.0}),
    ("fedacg", {}),
    ("fedacg", {"gamma": 0.4, "beta": 1.5}),
    ("fednsam", {}),
    ("fednsam", {"gamma": 0.4, "rho": 0.4}),
    ("fednsam", {"ascent": "momentum", "rho": 0.4}),
    ("fedwmsam", {}),
    ("fedwmsam", {"rho": 0.4, "alpha": 0.6, "eta_g": 0.7}),
    ("fedtoga", {}),
    ("fedtoga", {"lam": 2.0, "rho": 0.4, "kappa": 0.5, "beta": 2.0}),
    ("fedlesamd", {}),
    ("fedlesamd", {"rho": 0.5, "lam": 0.7}),
    ("fedlesams", {}),
    ("fedlesams", {"rho": 0.5, "eta_g": 0.7}),
    ("fedswa", {}),
    ("fedswa", {"rho": 0.0, "alpha": 0.7}),
    ("fedmoswa", {}),
    ("fedmoswa", {"rho": 0.6, "alpha": 1.0, "gamma": 0.7}),
    ("fedgmt", {}),
    ("fedgmt", {"gamma": 0.0, "lam": 0.7}),
    ("fedgmt", {"gamma": 2.0, "alpha": 0.3, "tau": 0.5, "lam": 2.0}),
]


def compare(method, name, hyper, plan, **extra) -> None:
    """Round by round, to 1e-10, and the model must have moved."""
    problem = Softmax()
    run = package(problem, method, plan)
    for truth in transcription(problem, name, hyper, plan, decay=0.9, **extra):
        run.step()
        np.testing.assert_allclose(run.x.numpy(), truth["x"], rtol=0, atol=TOLERANCE)
    assert np.abs(run.x.numpy() - run.x0.numpy()).max() > 0.01


def plan_for(name: str, **changes) -> Plan:
    """Partial participation, but for FedPD, which has none."""
    return Plan.from_fields({**PLAN.fields(), **({"active": 7} if name == "fedpd" else {}), **changes})


def test_every_method_has_a_case():
    assert {name for name, _ in CASES} == set(METHODS)


@pytest.mark.parametrize(("name", "hyper"), CASES, ids=str)
@pytest.mark.parametrize("weighting", ["uniform", "samples"])
def test_method_equals_its_transcription(name, hyper, weighting):
    """Partial participation, decay, unequal sizes (so unequal K_i), weight decay."""
    compare(METHODS[name](**hyper), name, hyper, plan_for(name, weighting=weighting))


ONLY_START = {name for name, cls in METHODS.items() if cls.reads_gradient_from_D} | {"fedpd"}  # begins at its own point


@pytest.mark.parametrize(
    ("name", "centre"),
    [(name, "start") for name in METHODS] + [(name, "global") for name in METHODS if name not in ONLY_START],
)
def test_relaxed_initialisation_equals_its_transcription(name, centre):
    """Around every method, and with the paper's centre where that is defined."""
    method = build({"name": "fedinit", "base": name, "beta": 0.3, "centre": centre})
    compare(method, name, {"relaxed_beta": 0.3, "relaxed_centre": centre}, plan_for(name))


def test_relaxed_initialisation_with_beta_0_is_the_base_method():
    for centre in ("start", "global"):
        compare(FedInit(FedSpeed(), beta=0.0, centre=centre), "fedspeed", {}, PLAN)


@pytest.mark.parametrize("name", ["fedavg", "fedprox", "scaffold", "fedlesams"])
@pytest.mark.parametrize("weighting", ["uniform", "samples"])
def test_extrapolation_equals_its_transcription(name, weighting):
    """The model that is evaluated, that which is sent, and the server rate, which is beyond 1 in some round."""
    plan = plan_for(name, weighting=weighting)
    run = package(Softmax(), FedExP(METHODS[name](), eps=1e-4, decay=0.9), plan)
    rates = []
    for truth in transcription(Softmax(), name, {"exp": {"eps": 1e-4, "decay": 0.9}}, plan, decay=0.9):
        before = run.server.base.x.numpy()
        run.step()
        np.testing.assert_allclose(run.x.numpy(), truth["x"], rtol=0, atol=TOLERANCE)
        np.testing.assert_allclose(run.server.base.x.numpy(), 2 * truth["x"] - before, rtol=0, atol=TOLERANCE)
        rates.append(truth["server"]["eta_g"])
    assert max(rates) > 1.05


@pytest.mark.parametrize("name", sorted(METHODS))
def test_with_clipping_steps_and_a_no_decay_group(name):
    plan = plan_for(name, local_steps=5, clip=0.2, weight_decay=0.1)
    problem = Softmax()
    run = package(problem, METHODS[name](), plan, no_decay=("weight",))
    mask = np.zeros(problem.features * problem.classes)
    for truth in transcription(problem, name, {}, plan, decay=0.9, clip=0.2, decay_mask=mask):
        run.step()
        np.testing.assert_allclose(run.x.numpy(), truth["x"], rtol=0, atol=TOLERANCE)


def test_bernoulli_cohorts_of_changing_size():
    """S differs from round to round: S/N must be this round's."""
    for name in ("scaffold", "feddyn", "fedadmm", "fedspeed", "fedsmoo", "afedpd", "fedgloss", "fedwmsam"):
        compare(METHODS[name](), name, {}, plan_for(name, cohort="bernoulli", rounds=8))


@pytest.mark.parametrize(
    ("name", "hyper", "kept", "stored", "scale"),
    [
        ("fedspeed", {"lam": 2.0}, "h", "ghat", -2.0),
        ("feddyn", {"alpha": 0.5}, "h", "ghat", -2.0),
        ("fedadmm", {"lam": 2.0}, "h", "z", 2.0),
        ("fedadmm", {"lam": 2.0}, "xh", "xhat", 1.0),
        ("scaffold", {}, "c", "c", 1.0),
        ("fedgamma", {}, "c", "c", 1.0),
        ("fedsmoo", {"lam": 2.0}, "mu", "mu", 1.0),
        ("fedgloss", {"lam": 2.0}, "h", "sigma", -2.0),
        ("fedwmsam", {}, "c", "c", 1.0),
        ("fedtoga", {"lam": 2.0}, "h", "ghat", -2.0),
        ("fedlesamd", {"lam": 2.0}, "h", "ghat", -2.0),
        ("fedlesams", {}, "c", "c", 1.0),
        ("fedmoswa", {}, "c", "c", 1.0),
        ("fedgmt", {"lam": 2.0}, "h", "u", -2.0),
    ],
    ids=str,
)
@pytest.mark.parametrize("weighting", ["uniform", "samples"])
def test_client_states_equal_the_paper_s(name, hyper, kept, stored, scale, weighting):
    """In the paper's symbols: h_i = -lam g_hat_i, h_i = lam z_i."""
    plan = plan_for(name, weighting=weighting)
    run = package(Softmax(), METHODS[name](**hyper), plan)
    for truth in transcription(Softmax(), name, hyper, plan, decay=0.9):
        run.step()
        for i in run.states:
            value = getattr(run.states.get(i), kept).numpy()
            np.testing.assert_allclose(value, scale * truth["clients"][i][stored], atol=TOLERANCE)
        for field in ("H", "c", "s", "Delta", "alpha", "m", "e"):
            if hasattr(run.server, field):
                np.testing.assert_allclose(getattr(run.server, field).numpy(), truth["server"][field], atol=TOLERANCE)
