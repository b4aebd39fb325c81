"""One table of tests that every method must pass; adding a method adds one row."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
import tomllib

import numpy as np
import pytest
import torch
from federations import Softmax, package
from torch import nn

from fedspeed import simulate
from fedspeed.client.local_loop import Oracle
from fedspeed.client.trees import tree_leaves, tree_map
from fedspeed.config.config import Config
from fedspeed.config.plan import Plan
from fedspeed.data.federated import Federated
from fedspeed.errors import UserError
from fedspeed.methods import (
    FAMILIES,
    METHODS,
    WRAPPERS,
    AFedPD,
    FedADMM,
    FedAvg,
    FedExP,
    FedInit,
    FedNSAM,
    FedSpeed,
    FedWMSAM,
    Scaffold,
)
from fedspeed.methods.base import Local, Round

ALL = [cls() for cls in METHODS.values()] + [
    FedInit(FedAvg()),
    FedInit(FedSpeed(), centre="global"),
    FedExP(Scaffold()),
    FedSpeed(server="active", alpha=0.5, normalise=False),
    FedSpeed(correction=False),
    FedSpeed(correction=False, prox=False, ascent_fraction=0.25),
    FedADMM(variant="gong"),
    FedADMM(variant="active"),
    FedInit(AFedPD(), centre="global"),
    FedNSAM(ascent="momentum"),
]
every = pytest.mark.parametrize("method", ALL, ids=lambda m: "-".join(str(v) for v in m.to_dict().values()))

PUBLIC = (
    "fedavg fedprox fedadam fedyogi fedadagrad fednova scaffold fedcm feddyn fedadmm fedpd fedspeed fedsam mofedsam "
    "fedgamma fedsmoo fedlesam afedpd afedpdsam fedgloss fedacg fednsam fedwmsam fedtoga "
    "fedlesamd fedlesams fedswa fedmoswa fedgmt"
)


def vector(seed: int, *shape: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(size=shape or (5,)))


def one_round(method, x0, grad, K=3, lr=0.1, states=None):
    """The engine's round for one client, by hand, checking that hooks leave their inputs alone."""
    server = method.init_server(x0)
    client = states or tree_map(torch.clone, method.init_client(x0))
    down = unchanged(method.broadcast, server)
    x = unchanged(method.start, down, client).clone()
    for _ in range(K):
        before = copy.deepcopy((x, down))
        direction = method.direction(x, grad, down, client)  # may change client
        assert_same((x, down), before)
        assert direction.shape == x.shape
        x = x - lr * direction
    up, kept = unchanged(method.upload, x, down, client, Local(K, lr, 10))
    kept = method.settle(kept, up, Round(0, 1.0, 2.0, float(K), lr))
    new = unchanged(method.update, server, up, Round(0, 1.0, 2.0, float(K), lr))
    return server, down, up, kept, new


def unchanged(hook, *args):
    before = copy.deepcopy(args)
    result = hook(*args)
    assert_same(args, before)
    return result


def assert_same(a, b):
    if isinstance(a, torch.Tensor):
        assert torch.equal(a, b)
    elif isinstance(a, tuple):
        for x, y in zip(a, b, strict=True):
            assert_same(x, y)


def test_the_public_names_are_there():
    assert set(PUBLIC.split()) == set(METHODS)
    assert set(WRAPPERS) == {"fedinit", "fedexp", "clip", "dp", "topk", "quantise"}


def test_every_method_is_of_a_family():
    assert {cls.family for cls in METHODS.values()} == set(FAMILIES)


@every
def test_hooks_return_what_they_declare_and_change_nothing(method):
    x0 = vector(0)
    server, down, up, kept, new = one_round(method, x0, lambda x, fraction=1.0, **teacher: x * x + 1)
    assert hasattr(down, "x")
    assert torch.equal(server.x, x0)
    assert type(new) is type(server)
    assert type(kept) is type(method.init_client(x0))
    for tree in (server, down, up, kept, new):
        assert isinstance(tree, tuple)
        assert hasattr(tree, "_fields")
        for leaf in tree_leaves(tree):
            assert leaf.shape in (x0.shape, (1,))
            assert torch.isfinite(leaf).all()
    assert not torch.equal(new.x, x0)


@every
def test_weight_decay_is_a_part_of_the_fresh_gradient(method):
    """On a linear loss, shifting the gradient by v shifts the direction by mix v, and x by shrink x.

    But for FedWMSAM, whose alpha changes from round to round: its weight decay stands beside the mix.
    """
    g, v, x = vector(1), vector(2), vector(3)
    x0 = vector(4)
    down = method.broadcast(method.init_server(x0))

    def direction(gradient, at):
        client = tree_map(torch.clone, method.init_client(x0))
        return method.direction(at.clone(), lambda _, fraction=1.0, **teacher: gradient.clone(), down, client)

    mix = method.alpha if isinstance(method, FedWMSAM) else method.mix
    torch.testing.assert_close(direction(g + v, x) - direction(g, x), mix * v)
    torch.testing.assert_close(direction(g, x + v) - direction(g, x), method.shrink * v)


@every
def test_hooks_run_on_a_block_of_clients_as_on_each(method):
    """(clients, d) in place of d: every row as if it were alone."""
    B, d = 3, 5
    x0, starts = vector(5, d), vector(6, B, d)

    def grad(x, fraction=1.0, **teacher):
        return (x**3 + fraction).clone()

    down = method.broadcast(method.init_server(x0))
    clients = [tree_map(torch.clone, method.init_client(x0)) for _ in range(B)]
    rows = [method.direction(starts[i], grad, down, clients[i]) for i in range(B)]
    block_client = tree_map(lambda a: a.expand(B, *a.shape).clone(), method.init_client(x0))
    block = method.direction(starts, grad, down, block_client)
    torch.testing.assert_close(block, torch.stack(rows))
    run = Local(2, 0.1, 7)
    up, kept = method.upload(starts, down, block_client, run)
    for i in range(B):
        up_i, kept_i = method.upload(starts[i], down, clients[i], run)
        for whole, part in ((up, up_i), (kept, kept_i)):
            for a, b in zip(tree_leaves(whole), tree_leaves(part), strict=True):
                torch.testing.assert_close(a[i] if a.ndim == 2 else a, b)


@every
def test_a_method_is_a_value(method):
    assert pickle.loads(pickle.dumps(method)) == method
    assert hash(method) == hash(copy.deepcopy(method))
    with pytest.raises(dataclasses.FrozenInstanceError):
        method.anything = 1
    config = Config(method=method, clients=10, active=10)
    assert Config.from_dict(tomllib.loads(config.to_toml())) == config


@every
def test_states_are_kept_for_touched_clients_only(method):
    plan = Plan(rounds=2, active=7, local_steps=1, batch_size=4)
    run = package(Softmax(), method, plan)
    for _ in run:
        pass
    stateless = not list(tree_leaves(method.init_client(run.x0)))
    assert len(run.states) == (0 if stateless else 7)


@pytest.mark.parametrize("name", sorted(set(METHODS) - {"fedpd"}))
def test_a_million_clients_with_ten_touched_cost_ten_states(name):
    m = 1_000_000
    data = Federated(torch.ones(4, 2), torch.tensor([0, 1, 0, 1]), np.zeros(m, np.int64), np.arange(m + 1), classes=2)
    run = simulate(METHODS[name](), nn.Linear(2, 2), data, rounds=2, active=5, local_steps=1)
    touched = {i for record in run for i in record.cohort}
    assert set(run.states) in (touched, set())
    assert len(touched) == 10


@every
def test_the_docstring_has_the_box_the_symbols_and_the_reference(method):
    text = inspect.getdoc(type(method)) or ""
    assert "Reference:" in text
    assert "Example:" in text
    assert "server" in text
    for field in dataclasses.fields(method):
        assert field.name in text


BAD = [
    ("fedavg", {"eta_g": 0.0}),
    ("fedavg", {"eta_g": float("nan")}),
    ("fedprox", {"mu": -0.1}),
    ("fedadam", {"beta1": 1.0}),
    ("fedadam", {"beta2": 1.5}),
    ("fedadam", {"tau": -1.0}),
    ("fedyogi", {"v0": -1.0}),
    ("fedadagrad", {"eta_g": -1.0}),
    ("fednova", {"eta_g": float("inf")}),
    ("scaffold", {"eta_g": "one"}),
    ("fedcm", {"alpha": 0.0}),
    ("fedcm", {"alpha": 1.1}),
    ("feddyn", {"alpha": 0.0}),
    ("fedadmm", {"lam": 0.0}),
    ("fedadmm", {"variant": "boyd"}),
    ("fedpd", {"lam": -1.0}),
    ("fedspeed", {"lam": 0.0}),
    ("fedspeed", {"rho": -0.1}),
    ("fedspeed", {"alpha": 1.5}),
    ("fedspeed", {"server": "some"}),
    ("fedspeed", {"normalise": 1}),
    ("fedspeed", {"ascent_fraction": 0.0}),
    ("fedspeed", {"prox": False}),
    ("fedsam", {"rho": -1.0}),
    ("mofedsam", {"alpha": 0.0}),
    ("fedgamma", {"rho": float("nan")}),
    ("fedsmoo", {"lam": 0.0}),
    ("fedlesam", {"rho": -1.0}),
    ("afedpd", {"lam": 0.0}),
    ("afedpdsam", {"rho": -0.1}),
    ("fedgloss", {"rho_l": -0.1}),
    ("fedacg", {"gamma": 1.0}),
    ("fednsam", {"ascent": "global"}),
    ("fedwmsam", {"alpha": 1.0}),
    ("fedtoga", {"kappa": float("inf")}),
    ("fedlesamd", {"lam": 0.0}),
    ("fedlesams", {"eta_g": 0.0}),
    ("fedswa", {"rho": 1.1}),
    ("fedswa", {"alpha": 0.0}),
    ("fedmoswa", {"gamma": 0.0}),
    ("fedgmt", {"tau": 0.0}),
    ("fedgmt", {"gamma": -1.0}),
    ("fedgmt", {"alpha": 1.0}),
]


@pytest.mark.parametrize(("name", "fields"), BAD, ids=str)
def test_bad_hyper_parameters_are_refused_with_symbol_and_range(name, fields):
    with pytest.raises(UserError) as caught:
        METHODS[name](**fields)
    field, value = next(iter(fields.items()))
    assert str(caught.value).startswith(f"{METHODS[name].__name__}: ")
    assert field in str(caught.value)
    assert str(value).lower() in str(caught.value).lower()


def test_every_method_has_a_bad_case():
    assert {name for name, _ in BAD} == set(METHODS)


def test_fedpd_needs_everybody():
    with pytest.raises(UserError, match="every client in every round"):
        package(Softmax(), METHODS["fedpd"](), Plan(active=6))
    for missing in ({"cohort": "bernoulli"}, {"dropout": 0.1}, {"on_client_error": "drop"}):
        (name,) = missing
        with pytest.raises(UserError, match=f"fedpd: needs {name} = ") as refused:
            package(Softmax(), METHODS["fedpd"](), Plan(active=7, **missing))
        assert "\n" not in str(refused.value)


READS = ["scaffold", "fedgamma", "fedcm", "mofedsam", "fednova", "fedwmsam", "fedtoga", "fedlesams", "fedmoswa"]


@pytest.mark.parametrize("name", READS)
def test_relaxed_initialisation_refuses_a_global_centre_where_d_is_a_gradient(name):
    with pytest.raises(UserError, match="mean gradient"):
        FedInit(METHODS[name](), centre="global")
    FedInit(METHODS[name](), centre="start")


PROX = ["fedspeed", "feddyn", "fedprox", "fedadmm", "fedpd", "fedsmoo", "fedlesamd"]
PROX += ["afedpd", "afedpdsam", "fedgloss", "fedacg", "fedtoga"]


@pytest.mark.parametrize("name", PROX)
def test_a_rate_beyond_the_prox_weight_is_refused_or_warned_of(name):
    field = {"feddyn": "alpha", "fedprox": "mu", "fedacg": "beta"}.get(name, "lam")
    method = METHODS[name](**{field: 10.0 if field != "lam" else 0.1})  # the prox weight is 10
    with pytest.raises(UserError, match="diverges"):
        method.check(lr=0.2, active=7, clients=7)
    with pytest.warns(UserWarning, match="overshoot"):
        method.check(lr=0.15, active=7, clients=7)
    method.check(lr=0.1, active=7, clients=7)


ASCENT = ["fedspeed", "fedsam", "mofedsam", "fedgamma", "fedsmoo"]


@pytest.mark.parametrize("name", ASCENT)
def test_a_part_of_the_minibatch_for_the_ascent(name, monkeypatch):
    """A step costs 1 + fraction gradients; fraction 1 is, bit for bit, the method whose oracle knows no fractions."""
    plan = Plan(rounds=2, active=3, local_steps=2, batch_size=4)

    def final(fraction):
        run = package(Softmax(equal=12), METHODS[name](ascent_fraction=fraction), plan)
        return [r.grad_evals for r in run], run.x

    cost, x = final(1.0)
    cheap, x_cheap = final(0.25)
    assert cost == [3 * 2 * 2] * 2
    assert cheap == [3 * 2 * 1.25] * 2
    assert not torch.equal(x, x_cheap)
    whole = Oracle.__call__
    monkeypatch.setattr(Oracle, "__call__", lambda self, x, fraction=1.0: whole(self, x))
    assert torch.equal(final(1.0)[1], x)
    assert torch.equal(final(0.25)[1], x)


def test_only_methods_with_an_ascent_have_a_fraction():
    assert [name for name, cls in METHODS.items() if hasattr(cls(), "ascent_fraction")] == ASCENT
