"""Wrappers around every method: vectors of the model are changed, numbers about the work are not, and the server's step
is that of a plain NumPy loop; what cannot be right is refused in one line."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from federations import Softmax, package
from test_wrappers import moves

from fedspeed import (
    DP,
    METHODS,
    Clip,
    Config,
    FedAvg,
    FedExP,
    FedInit,
    Method,
    Plan,
    Quantise,
    Scaffold,
    TopK,
    UserError,
    Wrapper,
    simulate,
)
from fedspeed.cli import main
from fedspeed.client.trees import has_leaves, named, tree_map
from fedspeed.data.federated import Federated
from fedspeed.methods import FedCM, FedNova, FedWMSAM, wrapper
from fedspeed.methods.base import Local, Round

PLAN = Plan(rounds=3, active=4, local_steps=2, batch_size=4, lr=0.1, weight_decay=0.0, seed=5, backend="serial")
CLIP, D = 0.05, 12
WRAPPERS = [lambda base: Clip(base, CLIP), lambda base: TopK(base, 0.2), lambda base: Quantise(base, 4)]
NAMES = ["clip", "topk", "quantise"]


def sent(method: Method, client: int = 3) -> dict[str, np.ndarray]:
    """What one client sends from a state, a broadcast and an end point of random numbers, by field."""
    r = np.random.default_rng(0)

    def some(v: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(r.uniform(0.1, 0.6, v.shape))

    inner = method
    while isinstance(inner, Wrapper):
        inner = inner.base
    x0 = torch.zeros(D, dtype=torch.float64)
    down = tree_map(some, inner.broadcast(inner.init_server(x0.clone())))
    own = tree_map(some, inner.init_client(x0.clone()))
    fresh = method.init_client(x0.clone())
    client_state = fresh._replace(base=own) if "base" in getattr(fresh, "_fields", ()) else own
    up, _ = method.upload(some(x0), down, client_state, Local(5, 0.1, 8, t=2, client=client, active=4))
    return {name: v.numpy() for name, v in named("", up)}


@pytest.mark.parametrize("method", [*(cls() for cls in METHODS.values()), FedExP(Scaffold())], ids=lambda m: m.name)
def test_what_is_no_vector_of_the_model_is_declared_a_number(method):
    assert set(method.numbers) == {name for name, v in sent(method).items() if len(v) != D}


def test_some_methods_send_numbers():
    assert {name for name, cls in METHODS.items() if cls().numbers} == {"fednova", "fedwmsam"}
    assert FedInit(FedExP(FedInit(Scaffold()))).numbers == ("square",)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("wrap", WRAPPERS, ids=NAMES)
def test_a_wrapper_changes_vectors_and_leaves_numbers(name, wrap):
    """Clipping against NumPy: one factor, from the norm over the vectors alone."""
    base = METHODS[name]()
    plain, wrapped = sent(base), sent(wrap(base))
    assert plain.keys() == wrapped.keys()
    vectors = [field for field in plain if field not in base.numbers]
    for field in base.numbers:
        np.testing.assert_array_equal(wrapped[field], plain[field])
    assert any(not np.array_equal(wrapped[field], plain[field]) for field in vectors)
    if isinstance(wrap(base), Clip):
        length = np.linalg.norm(np.concatenate([plain[field] for field in vectors]))
        for field in vectors:
            np.testing.assert_allclose(wrapped[field], plain[field] * min(1, CLIP / length), rtol=1e-12)


@pytest.mark.parametrize("engine", ["loop", "block"])
@pytest.mark.parametrize("name", ["clip", "topk"])
def test_the_step_of_fednova_inside_a_wrapper(name, engine):
    """x += mean(K_i) mean(what is left of D_i / K_i) by NumPy, sizes and so K_i unequal."""
    problem = Softmax()
    plan = Plan.from_fields({**PLAN.fields(), "local_steps": 0, "local_epochs": 2, "engine": engine})
    method = Clip(FedNova(), CLIP) if name == "clip" else TopK(FedNova(), 0.2, feedback=False)
    with package(problem, method, plan) as run:
        for t in range(2):
            before = run.x.numpy().copy()
            cohort = run.step().cohort
            K = {i: 2 * -(-problem.sizes[i] // 4) for i in cohort}
            assert len(set(K.values())) > 1
            rest = {i: D / K[i] for i, D in moves(before, t, cohort, problem, plan).items()}
            for i, v in rest.items():
                if name == "clip":
                    rest[i] = v * min(1, CLIP / np.linalg.norm(v))
                else:
                    rest[i] = np.where(np.abs(v) >= np.sort(np.abs(v))[-3], v, 0.0)
            step = np.mean(list(K.values())) * np.mean(list(rest.values()), 0)
            np.testing.assert_allclose(run.x.numpy(), before + step, rtol=1e-9, atol=1e-12)


def test_clipping_leaves_the_scalar_of_fedwmsam():
    """alpha = 0.99 alpha + 0.01 clip(mean v_i, 0.1, 0.9), from cosines of the clients' real movements."""
    tight = Plan.from_fields({**PLAN.fields(), "rounds": 2, "active": 7})
    with package(Softmax(), Clip(FedWMSAM(), 1e-4), tight) as run:
        run.step()
        x, Delta, alpha = run.x.numpy().copy(), run.server.Delta.numpy().copy(), float(run.server.alpha)
        ends = {}
        upload = FedWMSAM.upload

        def spy(self, xK, down, client, told):
            ends[told.client] = xK.numpy().copy()
            return upload(self, xK, down, client, told)

        FedWMSAM.upload = spy
        try:
            run.step()
        finally:
            FedWMSAM.upload = upload
    v = [1 + (e - x) @ Delta / np.linalg.norm(e - x) / np.linalg.norm(Delta) for e in ends.values()]
    assert len(v) == 7
    np.testing.assert_allclose(float(run.server.alpha), 0.99 * alpha + 0.01 * np.clip(np.mean(v), 0.1, 0.9), rtol=1e-9)


# FedExP measures what is sent


@pytest.mark.parametrize("name", ["clip", "topk"])
def test_extrapolation_around_a_wrapper_is_of_what_was_sent(name):
    """eta_g = max(1, mean ||v_i||^2 / 2 (||mean v_i||^2 + eps)), v_i what is sent; y += eta_g mean v_i."""
    problem, eps = Softmax(equal=8), 1e-6
    inner = Clip(FedAvg(), CLIP) if name == "clip" else TopK(FedAvg(), 0.2, feedback=False)
    with package(problem, FedExP(inner, eps=eps, decay=1.0), PLAN) as run:
        y, rates = run.x.numpy().copy(), []
        for t, record in enumerate(run):
            v = np.array(list(moves(y, t, record.cohort).values()))
            if name == "clip":
                v *= np.minimum(1, CLIP / np.linalg.norm(v, axis=1))[:, None]
            else:
                v[np.abs(v) < np.sort(np.abs(v))[:, -3:-2]] = 0
            rates.append(max(1, np.mean(np.sum(v**2, 1)) / (2 * (np.sum(v.mean(0) ** 2) + eps))))
            x, y = y + rates[-1] * v.mean(0) / 2, y + rates[-1] * v.mean(0)
            np.testing.assert_allclose(run.x.numpy(), x, rtol=1e-9, atol=1e-12)
            assert record.metrics["eta_g"] == pytest.approx(rates[-1], rel=1e-9)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("fedavg+fedexp+clip:0.5", "Clip: expected FedExP around it, found it around FedExP, whose numbers are of"),
        ("fedavg+fedexp+clip:0.5", "write +clip+fedexp"),
        ("fedavg+fedexp+topk:0.1", "write +topk+fedexp"),
        ("fedavg+fedexp+fedinit+quantise:4", "write +quantise+fedexp"),
        ("fedavg+fedexp+dp:1", "DP: expected a base that sends vectors alone, found square of fedexp"),
        ("fedavg+dp:1+fedexp", "FedExP: expected a base without DP, found one: FedExP sends ||D_i||^2"),
        ("fednova+dp:1", "DP: expected a base that sends vectors alone, found a of fednova, which it cannot bound"),
        ("fednova+topk:0.1+dp:1", "DP: expected a base that sends vectors alone, found a of topk"),
        ("fedwmsam+dp:1", "found v of fedwmsam"),
        ("fedcm+dp:1", "DP: expected local_steps, since its server reads how many steps clients take"),
        ("fedtoga+topk:0.1+dp:1", "set --local-steps"),
        ("fedavg+dp:1 --on-client-error drop", "needs on_client_error = stop, got drop; --on-client-error stop"),
        ("fedavg+dp:1 --stop-at train_loss=0.1", "got stop_at train_loss=0.1, a loss on their data"),
    ],
)
def test_what_cannot_be_right_is_refused_in_one_line(words, told, tmp_path, capsys):
    method, *rest = words.split()
    given = ["run", "--method", method, *rest, "--data", "digits", "--clients", "20", "--active", "4"]
    assert main([*given, "--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert told.lower() in " ".join(said.split()).lower()
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("hook", ["upload", "received"])
def test_a_wrapper_of_the_users_stands_inside_dp(hook):
    """`received` around DP would be given the mean without noise."""
    own = dataclass(frozen=True)(type("Own", (Wrapper,), {hook: lambda self, *given: getattr(self.base, hook)(*given)}))
    with pytest.raises(UserError, match=r"Own: expected DP around it, .* write \+own\+dp"):
        own(DP(FedAvg()))
    assert DP(own(FedAvg())).clip == 1.0


def test_what_is_right_is_not_refused():
    for table in (
        {"name": "fedexp", "base": {"name": "topk", "base": {"name": "clip", "base": "scaffold"}}},
        {"name": "fedinit", "base": {"name": "fedexp", "base": "fedavg"}},
        {"name": "dp", "base": "fedcm"},
    ):
        Config.from_dict({"method": table, "local_steps": 3})


# A method of the user's


class Counted(NamedTuple):
    D: Any
    steps: Any


@dataclass(frozen=True)
class Counts(FedAvg):
    """FedAvg that also sends its number of steps."""

    def upload(self, xK, down, client, run):
        return Counted(xK - down.x, xK.new_full((1,), run.K)), client


@dataclass(frozen=True)
class Says(Counts):
    numbers = ("steps",)


@dataclass(frozen=True)
class Misspells(Counts):
    numbers = ("stepps",)


@pytest.mark.parametrize("wrap", [*WRAPPERS, lambda base: DP(base, 1.0, CLIP)], ids=[*NAMES, "dp"])
def test_a_number_that_is_not_declared_is_refused(wrap):
    for method in (Counts(), *(() if isinstance(wrap(FedAvg()), DP) else (Misspells(),))):
        with pytest.raises(UserError, match=r"expected vectors of one length from .*D \(12\), steps \(1\); name what"):
            package(Softmax(), wrap(method), PLAN).step()
    package(Softmax(), Counts(), PLAN).step()  # without a wrapper it says nothing, as before


@pytest.mark.parametrize(
    ("method", "size"),
    [(TopK(Says(), 0.2), 2 + 3 * 4 + 4), (Quantise(Says(), 3), 4 + 5 + 4), (TopK(FedNova(), 0.2), 2 + 3 * 4 + 4)],
    ids=["topk", "quantise", "topk-fednova"],
)
def test_bytes_of_an_upload_with_a_number(method, size):
    """Three values of twelve and a bit for each, or a scale and twelve times three bits; then 4 bytes of a number."""
    x = torch.linspace(-1, 1, D)
    down = FedAvg().broadcast(FedAvg().init_server(torch.zeros(D)))
    up, kept = method.upload(x, down, method.init_client(torch.zeros(D)), Local(5, 0.1, 8, active=1))
    data = method.encode(up)
    assert len(data) == method.sent(up) == size
    for a, b in zip(method.decode(data, tree_map(torch.zeros_like, up)), up, strict=True):
        assert torch.equal(a, b)
    assert float(up[1]) == 5
    if isinstance(method, TopK):
        assert float(kept.error[1]) == 0


# What DP accepts, it bounds


class Watched(NamedTuple):
    mean: np.ndarray
    server: list[np.ndarray]


def one_round(method: Method, data: Federated, plan: Plan, garbage: bool) -> Watched:
    """The mean before noise, and what the server would make of a mean of ones."""
    seen: list[Watched] = []

    @dataclass(frozen=True)
    class Spy(DP):
        def update(self, server, mean, round):
            flat = np.concatenate([v.numpy() for v in wrapper.leaves(mean)])
            new = super().update(server, tree_map(torch.ones_like, mean), round)
            seen.append(Watched(flat, [v.numpy() for v in wrapper.leaves(new)]))
            return super().update(server, mean, round)

    with simulate(Spy(method, 0.0, CLIP), Softmax().model(), data, plan) as run:
        if garbage and has_leaves(run.client_state(0)):
            run.states.stage(0, tree_map(lambda v: v - 70.0, run.client_state(0)), 0)
            run.states.commit()
        run.step()
    return seen[0]


def neighbours() -> tuple[Federated, Federated]:
    """Two federations that differ in all data of client 0: inputs, labels, and how many there are."""
    x, y, rows = Softmax().arrays()
    other = x.copy()
    other[rows[0]] *= -40.0
    more = np.concatenate([rows[0], np.arange(len(x), len(x) + 30)])
    r = np.random.default_rng(3)
    far = np.concatenate([other, 40 * r.normal(size=(30, x.shape[1]))])
    labels = np.concatenate([(y + np.isin(np.arange(len(y)), rows[0])) % 3, r.integers(0, 3, 30)])
    return (
        Federated.from_arrays(x, y, rows, classes=3),
        Federated.from_arrays(far, labels, [more, *rows[1:]], classes=3),
    )


@pytest.mark.parametrize(
    "inside",
    [lambda base: base, lambda base: TopK(base, 0.3), Quantise, FedInit],
    ids=["alone", "topk", "quantise", "fedinit"],
)
@pytest.mark.parametrize("name", METHODS)
def test_one_client_moves_the_mean_by_no_more_than_the_bound_and_nothing_else(name, inside):
    """All data and the state of one client replaced: the mean before noise moves by at most 2 clip / S, and all else
    that the server computes with is the same. What DP does not accept is refused."""
    method = inside(METHODS[name]())
    if METHODS[name]().numbers:
        with pytest.raises(UserError, match="expected a base that sends vectors alone"):
            DP(method)
        return
    plan = Plan.from_fields({**PLAN.fields(), "active": 7, "rounds": 1, "engine": "loop"})
    epochs = Plan.from_fields({**plan.fields(), "local_steps": 0, "local_epochs": 1})
    if name in ("fedcm", "mofedsam", "fedtoga"):
        with pytest.raises(UserError, match="expected local_steps"):
            one_round(method, neighbours()[0], epochs, False)
    else:
        plan = epochs
    plain, other = (one_round(method, data, plan, bool(i)) for i, data in enumerate(neighbours()))
    moved = np.linalg.norm(plain.mean - other.mean)
    assert 0.1 * CLIP / 7 < moved <= 2 * CLIP / 7 * (1 + 1e-12)
    for a, b in zip(plain.server, other.server, strict=True):
        np.testing.assert_array_equal(a, b)


def test_the_server_reads_k_where_it_says_so():
    """Two rounds that differ in K alone; `FedCM` is one of those."""
    told = set()
    for name, cls in METHODS.items():
        method = cls()
        x = torch.linspace(0.1, 1.2, D, dtype=torch.float64)
        server, client = method.init_server(x), method.init_client(x)
        up, _ = method.upload(x + 1, method.broadcast(server), client, Local(2, 0.1, 5, active=3))
        ends = [method.update(server, up, Round(0, 3.0, 7.0, K, 0.1)) for K in (2.0, 3.0)]
        if not all(torch.equal(a, b) for a, b in zip(*map(wrapper.leaves, ends), strict=True)):
            told.add(name)
    assert told == {name for name, cls in METHODS.items() if cls.reads_K}
    assert FedCM.reads_K
