"""The preset `released`: each difference of the authors' code does what the documentation says."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from federations import Softmax, package
from torch import nn

from fedspeed import simulate
from fedspeed.config.config import Config
from fedspeed.config.plan import Plan
from fedspeed.data.federated import Federated
from fedspeed.errors import UserError
from fedspeed.methods import METHODS, FedADMM, FedAvg, FedCM, FedDyn, FedProx, FedSMOO, FedSpeed, MoFedSAM, Scaffold
from fedspeed.reproduce.recipes import settings
from fedspeed.utils.files import key
from fedspeed.utils.random import batch_order


def released(**given) -> Config:
    return Config.from_dict({"preset": "released", **given})


# What the authors' code does and where it says so: woodenchild95/FL-Simulator, commit 502bec6.
THEIRS = {
    "cohort": "bernoulli",  # server/server.py:66-76, each client if uniform <= active_ratio
    "clip": 10.0,  # client/client.py, max_norm; client/fedspeed.py:35
    "clip_mode": "released",  # client/fedspeed.py:12, 30, 35: the optimiser adds (weight_decay + lamb) x afterwards
    "decay_outside_mix": True,  # client/fedcm.py:26, client/client.py:25
    "lr_decay": 0.998,  # train.py:27-50, --lr-decay
    "eval_every": 1,  # server/server.py:83-95, every round
}
PICTURES = {"augment": "released"}  # dataset.py:413-424, crop with probability 1/2, zeros after normalisation
FULL = {"name": "resnet18_gn"}
ZERO = FULL | {"trim": True, "init": "zero-residual"}


def test_the_preset_changes_what_the_documentation_lists_and_nothing_else():
    for data, own in (("digits", {}), ("cifar10", PICTURES), ("cifar100", PICTURES), ("tinyimagenet", PICTURES)):
        plain = Config.from_dict({"preset": "paper", "data": data}).to_dict()
        found = released(data=data).to_dict()
        split = {"split": "dirichlet-refill:0.6"}  # dataset.py:207-227, an empty class is refilled
        assert {key: found[key] for key in {**THEIRS, **own, **split}} == {**THEIRS, **own, **split}
        assert {key for key, value in found.items() if plain[key] != value} == {*THEIRS, *own, "split"} - {"eval_every"}


@pytest.mark.parametrize(
    ("data", "split", "dealt"),
    [
        ("cifar10", "iid", "iid-random"),  # dataset.py:258-269, shares of a permutation
        ("cifar10", " iid ", "iid-random"),
        ("cifar10", "iid-random", "iid-random"),
        ("cifar100", "iid", "iid"),  # dataset.py:240-255, class by class
        ("tinyimagenet", "iid", "iid"),  # not a choice of train.py
        ("digits", "iid", "iid"),
        ("cifar10", "dirichlet:0.3", "dirichlet-refill:0.3"),
        ("cifar10", "pathological:3", "pathological:3"),
    ],
)
def test_how_the_preset_reads_a_split(data, split, dealt):
    table = {"name": data}
    assert [released(data=given, split=split).split for given in (data, table)] == [dealt, dealt]
    assert Config.from_dict({"data": data, "split": split}).split == split


@pytest.mark.parametrize(
    ("model", "found"),
    [
        (FULL | {"trim": True}, FULL | {"trim": True, "keep_norm": True}),
        (FULL | {"trim": True, "keep_norm": False}, FULL | {"trim": True, "keep_norm": False}),
        (ZERO, ZERO | {"keep_norm": True}),
        (FULL | {"trim": False}, FULL | {"trim": False}),
        ("resnet18_gn", FULL),
        ("mlp", {"name": "mlp"}),
    ],
)
def test_the_clip_of_a_trimmed_network_sees_the_whole_norm(model, found):
    """And the start stays the usual one unless another is given."""
    assert released(data="cifar10", model=model).model.to_dict() == found
    assert "keep_norm" not in Config.from_dict({"model": FULL | {"trim": True}}).model.options


def test_when_the_released_clip_is_active_by_arithmetic():
    """0.1 ||x^0|| > 10? A convolution's squared norm is 2 x its input channels, a norm's the number of its channels."""
    stages = [(64, 64), (64, 128), (128, 256), (256, 512)]
    inputs = [3] + [c for a, b in stages for c in (a, b, b, b, *([a] if a != b else []))]
    norms = 64 + sum((4 + (a != b)) * b for a, b in stages)
    usual = 2 * sum(inputs) + norms + 10 * (512 + 1) / (3 * 512)
    zero = usual - sum(2 * b for _, b in stages)  # the last norm of each of two blocks
    dead = 2 * (5 / 9 * 256 + 8 / 9 * 3 * 512)
    clips = [round(0.1 * square**0.5, 1) for square in (usual, usual - dead, zero, zero - dead)]
    assert clips == [11.2, 9.7, 10.3, 8.7]
    page = " ".join((Path(__file__).parents[2] / "docs" / "explanation" / "authors-code.md").read_text("utf-8").split())
    assert "is 11.2 for the usual start, 9.7 if it is trimmed, 10.3 for the zero start, 8.7 for both" in page


@pytest.mark.parametrize("preset", ["released-c10-100", "released-c10-500", "released-c100-500"])
def test_the_recipes_as_released_have_the_values_of_the_preset(preset):
    for name, tables in settings(preset).items():
        if not isinstance(tables, dict) or "data" not in tables:
            continue
        start = tables["model"]["init"]  # which of the two a check before the comparison decided
        word = released(data=tables["data"], model=FULL | {"trim": True, "init": start}, split="iid").to_dict()
        keys = {"split", "model", *THEIRS, *PICTURES} - {"lr_decay", "eval_every"}
        assert {each: tables[each] for each in keys} == {each: word[each] for each in keys}, name


def test_what_is_said_wins_over_the_preset():
    given = {"cohort": "fixed", "clip": 0.0, "clip_mode": "gradient", "decay_outside_mix": False, "lr_decay": 0.5,
             "eval_every": 7, "augment": "flip"}  # fmt: skip
    assert given.keys() == {*THEIRS, *PICTURES}
    for option, value in given.items():
        found = released(data="cifar10", **{option: value}).to_dict()
        assert {name: found[name] for name in given} == {**THEIRS, **PICTURES, option: value}
    config = released(split="iid", method={"name": "fedadam", "tau": 0.5})
    assert (config.split, config.method.tau) == ("iid", 0.5)
    assert released(method="fedadam").method.tau == 0.01
    assert released(method={"name": "topk", "base": "fedadam"}).method.base.tau == 0.01
    assert released(method={"name": "topk", "base": {"name": "fedadam", "tau": 0.5}}).method.base.tau == 0.5
    assert Config.from_dict({"method": "fedadam"}).method.tau == 1e-3


IN_THEIR_CODE = {"fedavg", "fedcm", "feddyn", "scaffold", "fedadam", "fedprox", "fedsam", "mofedsam", "fedgamma",
                 "fedspeed", "fedsmoo"}  # fmt: skip  # train.py, the choices of --method
OTHER_CODE = {"fedwmsam", "fedswa", "fedmoswa"}  # values of their own authors' code: docs/explanation/authors-code.md


@pytest.mark.parametrize("name", METHODS)
def test_a_method_without_released_values_is_refused(name):
    for table in (name, {"name": "topk", "base": name}):
        if name in IN_THEIR_CODE | OTHER_CODE:
            released(method=table, clients=20)
        else:
            with pytest.raises(UserError, match=f"^preset released: expected a method of the .*, found {name}; leave"):
                released(method=table)


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
