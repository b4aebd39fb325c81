"""What a user writes is right, or refused: hooks that mix the clients of a block, and hooks that break the contract."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pytest
import torch
from federations import Softmax, package
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import nn

from fedspeed import simulate
from fedspeed.cli import main
from fedspeed.config.plan import Plan
from fedspeed.data.federated import Federated
from fedspeed.errors import ClientFailed, Diverged, UserError
from fedspeed.methods import METHODS, FedAvg, FedInit, FedSAM, FedSpeed
from fedspeed.methods.base import Method
from fedspeed.methods.terms import TINY
from fedspeed.utils.checked_fields import param

PLAN = Plan(rounds=3, active=6, local_epochs=2, batch_size=4, weight_decay=0.01, seed=2, backend="serial")
EQUAL = Softmax(equal=8)


class Vector(NamedTuple):
    x: torch.Tensor


class Memory(NamedTuple):
    m: torch.Tensor
    n: torch.Tensor


REDUCTIONS = {
    "norm": lambda v, **axis: v.norm(**axis),
    "mean": lambda v, **axis: v.abs().mean(**axis),
    "sum": lambda v, **axis: v.sum(**axis),
    "max": lambda v, **axis: v.abs().amax(**axis),
    "std": lambda v, **axis: v.std(**axis),
    "logsumexp": lambda v, **axis: v.logsumexp(**({"dim": tuple(range(v.ndim))} | axis)),
}
AXES = {"all": {}, "last": {"dim": -1, "keepdim": True}, "first": {"dim": 0, "keepdim": True}}
TURNS = {
    "none": lambda v: v,
    "sort over clients": lambda v: v.sort(dim=0).values,
    "sort": lambda v: v.sort(dim=-1).values,
    "roll": lambda v: v.roll(1),
    "flat sort": lambda v: v.flatten().sort().values.view_as(v),
    "softmax": lambda v: v.softmax(0),
    "cumulate": lambda v: v.cumsum(-1),
    "noise": lambda v: v + torch.randn_like(v),
}


@dataclass(frozen=True)
class Random(Method):
    """A method put together by chance: a reduction over some axes, a reordering, a state changed in place."""

    block_safe = True
    reduce: str = param("norm", tuple(REDUCTIONS), "what is divided by")
    axes: str = param("last", tuple(AXES), "over which axes")
    of: str = param("g", ("g", "move", "memory"), "of what")
    turn: str = param("none", tuple(TURNS), "what is done to the gradient")
    twice: bool = param(False, about="whether the gradient is taken at a perturbed point")
    memory: str = param("none", ("none", "new", "in place", "shared"), "how the state is used")
    where: str = param("direction", ("direction", "upload", "start"), "where the reduction is used")
    late: bool = param(False, about="whether it only begins in round 2")

    def init_server(self, x0):
        return Vector(x0)

    def init_client(self, x0):
        return Memory(x0.new_zeros(x0.shape), x0.new_zeros(1))

    def broadcast(self, server):
        return Vector(server.x)

    def scaled(self, v, x, down, client):
        if self.late and not client.n.any():
            return v
        base = {"g": v, "move": x - down.x + 0.1 * down.x, "memory": client.m + v}[self.of]
        return TURNS[self.turn](v) / (REDUCTIONS[self.reduce](base, **AXES[self.axes]).abs() + 0.1)

    def start(self, down, client):
        return self.scaled(down.x + client.m, down.x, down, client) if self.where == "start" else down.x

    def direction(self, x, grad, down, client):
        g = grad(x)
        if self.twice:
            g = grad(x + 0.1 * self.scaled(g, x, down, client))
        if self.where == "direction":
            g = self.scaled(g, x, down, client)
        if self.memory == "in place":
            client.m.mul_(0.5).add_(g)
            return g + 0.1 * client.m
        if self.memory == "shared":
            return g + 0.1 * client.m.mean(0)
        return g

    def upload(self, xK, down, client, run):
        D = xK - down.x
        if self.where == "upload":
            D = self.scaled(D, xK, down, client)
        kept = client.m if self.memory in ("none", "in place") else client.m + D
        return Vector(D), Memory(kept, client.n + 1)

    def update(self, server, mean, round):
        return Vector(server.x + 0.5 * mean.x)


RANDOM = st.builds(
    Random,
    reduce=st.sampled_from(list(REDUCTIONS)),
    axes=st.sampled_from(list(AXES)),
    of=st.sampled_from(["g", "move", "memory"]),
    turn=st.sampled_from(list(TURNS)),
    twice=st.booleans(),
    memory=st.sampled_from(["none", "new", "in place", "shared"]),
    where=st.sampled_from(["direction", "upload", "start"]),
    late=st.booleans(),
)


def ended(method, engine, problem=EQUAL, plan=PLAN):
    """The last vector of a run, or why there is none."""
    with package(problem, method, plan, engine=engine) as run:
        try:
            for _ in run:
                pass
        except (UserError, Diverged) as error:
            return error
        return run.x


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(method=RANDOM, equal=st.sampled_from([2, 8]), clients=st.sampled_from([2, 7]))
def test_block_and_loop_agree_or_the_block_refuses(method, equal, clients):
    """Norms over all axes, means, sorts, noise, states changed in place: never silently another algorithm."""
    problem = Softmax(equal=equal, clients=clients)
    plan = Plan.from_fields({**PLAN.fields(), "active": clients})
    loop = ended(method, "loop", problem, plan)
    assume(not isinstance(loop, Exception))  # what one client refuses (a softmax over axis 0 is fine there) is no test
    block = ended(method, "block", problem, plan)
    if isinstance(block, UserError):
        assert re.search(r"Random\.(start|direction|upload)", str(block)), block
    else:
        torch.testing.assert_close(block, loop, rtol=1e-9, atol=1e-9)


def test_hooks_that_keep_to_the_last_axis_are_not_refused():
    """The property test does not hold by refusing everything."""
    for reduce in REDUCTIONS:
        for memory in ("none", "new", "in place"):
            method = Random(reduce=reduce, memory=memory, twice=True, turn="sort", of="memory")
            block, loop = ended(method, "block"), ended(method, "loop")
            torch.testing.assert_close(block, loop, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("method", "hook"),
    [
        (Random(axes="all"), "direction"),
        (Random(axes="all", late=True), "direction"),
        (Random(reduce="max", axes="all", late=True), "direction"),
        (Random(reduce="max", axes="all", where="upload", late=True), "upload"),
        (Random(reduce="max", axes="all", where="start", late=True), "start"),
        (Random(axes="all", where="upload"), "upload"),
        (Random(axes="all", where="start"), "start"),
        (Random(axes="first", twice=True), "direction"),
        (Random(turn="noise"), "direction"),
        (Random(turn="sort over clients"), "direction"),
        (Random(memory="shared"), "direction"),
        (FedInit(Random(axes="all")), "direction"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_the_block_names_the_hook(method, hook):
    error = ended(method, "block")
    assert isinstance(error, UserError)
    assert f"{type(method).__name__}.{hook} " in str(error)
    assert re.search(r"test_traps\.py, line \d+\)$", str(error))
    assert "--engine loop" in str(error)


@dataclass(frozen=True)
class NaiveSAM(FedAvg):
    """FedSAM as anyone writes it."""

    rho: float = param(0.5, "[0, inf)", "rho")

    def direction(self, x, grad, down, client):
        g = grad(x)
        return grad(x + self.rho * g / (g.norm() + TINY))


def test_a_method_as_anyone_writes_it_is_itself_by_default_and_refused_in_a_block():
    """A1: by default it ran in a block, where its norm went over all clients."""
    with package(EQUAL, NaiveSAM(), PLAN) as run, package(EQUAL, FedSAM(rho=0.5), PLAN, engine="loop") as truth:
        assert run.plan.engine == "loop"
        for _ in zip(run, truth, strict=True):
            torch.testing.assert_close(run.x, truth.x, rtol=1e-12, atol=1e-12)
    with pytest.raises(
        UserError, match=r"NaiveSAM does not say that its hooks take one.*block_safe.*test_traps.py, line"
    ):
        package(EQUAL, NaiveSAM(), PLAN, engine="block")
    with pytest.raises(UserError, match="NaiveSAM does not say"):  # a wrapper does not hide it
        package(EQUAL, FedInit(NaiveSAM()), PLAN, engine="block")

    @dataclass(frozen=True)
    class Heir(Random):
        """What its base says of itself it has not said."""

    with pytest.raises(UserError, match="Heir does not say"):
        package(EQUAL, Heir(), PLAN, engine="block")


def test_python_and_the_command_line_have_the_same_defaults(tmp_path):
    """B6: one default engine, the same numbers."""
    from fedspeed.config.config import Config
    from fedspeed.data import load
    from fedspeed.models import build_model

    for name, value in Plan().fields().items():
        assert getattr(Config(), name) == (value if name != "active" else Plan().cohort_size(100)), name
    small = {"rounds": 2, "active": 6, "batch_size": 5, "lr_decay": 0.998}
    data = load("digits", split="iid", clients=12)
    run = simulate(FedSpeed(), build_model("mlp", data), data, **small)
    list(run)
    assert run.plan.engine == "block"
    options = "--rounds 2 --active 6 --batch-size 5 --clients 12 --split iid --lr-decay 0.998"
    assert main(["run", *options.split(), "--out", str(tmp_path / "a"), "--quiet"]) == 0
    from safetensors.torch import load_file

    saved = load_file(tmp_path / "a" / "model.safetensors")
    for name, p in run.model.named_parameters():
        assert torch.equal(saved[name], p), name


# What happens when every client of a block fails


@pytest.mark.parametrize("engine", ["loop", "block"])
def test_divergence_in_a_block_ends_as_in_the_loop(engine, tmp_path, capsys):
    """A2: a block in which nobody was left divided by zero."""
    options = f"--method fedavg --model linear --lr 1e30 --clients 20 --active 5 --rounds 3 --engine {engine}"
    assert main(["run", *options.split(), "--out", str(tmp_path / "a"), "--quiet"]) == 1
    assert re.match(
        r"fedspeed: FedAvg: client \d+ diverged \(NaN or Inf\) in round 1; try a lower --lr", capsys.readouterr().err
    )


def test_the_random_numbers_of_the_caller_are_not_touched():
    torch.manual_seed(5)
    expected = torch.rand(3)
    for engine in ("loop", "block"):
        run = package(EQUAL, FedSpeed(), PLAN, engine=engine)
        torch.manual_seed(5)
        list(run)
        assert torch.equal(torch.rand(3), expected)


class Choosy(nn.Module):
    """Raises where the targets are of a kind that the loss does not take."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 3).double()

    def forward(self, x):
        if x.shape[0] == 3:
            raise RuntimeError("cannot digest three")
        return self.inner(x)


def sized(sizes) -> Federated:
    r, owner = np.random.default_rng(0), np.repeat(np.arange(len(sizes)), sizes)
    return Federated.from_arrays(r.normal(size=(len(owner), 2)), r.integers(0, 3, len(owner)), owner, classes=3)


@pytest.mark.parametrize("engine", ["loop", "block"])
def test_a_client_that_raises_in_a_block_obeys_on_client_error(engine):
    data = sized([4, 4, 4, 3, 3])
    common = {"rounds": 2, "active": 5, "local_epochs": 1, "batch_size": 4, "engine": engine}
    with pytest.raises(
        ClientFailed, match=r"client 3, step 1 of 1: RuntimeError: cannot digest three \(.*line \d+, in forward"
    ):
        simulate(FedSpeed(), Choosy(), data, **common).step()
    run = simulate(FedSpeed(), Choosy(), data, on_client_error="drop", **common)
    assert [r.dropped for r in run] == [[3, 4], [3, 4]]
    assert set(run.states) == {0, 1, 2}


def test_nan_in_the_data_is_found_as_such():
    x = np.zeros((12, 2))
    data = Federated.from_arrays(x, np.arange(12) % 2, np.repeat(np.arange(4), 3), classes=2)
    data.x[7, 1] = torch.nan  # past the checks of the data themselves
    for engine in ("loop", "block"):
        with pytest.raises(Diverged, match=r"the data of client 2 hold NaN or Inf .*inputs of row 7") as caught:
            simulate(FedAvg(), nn.Linear(2, 2).double(), data, rounds=1, active=4, engine=engine).step()
        assert "try a lower" not in str(caught.value)


@pytest.mark.parametrize("cls", METHODS.values(), ids=list(METHODS))
def test_every_method_of_the_package_is_watched_in_its_first_block(cls, monkeypatch):
    from fedspeed.client import block_check

    seen = []
    compare = block_check._compare
    monkeypatch.setattr(block_check, "_compare", lambda what, *a: seen.append(what) or compare(what, *a))
    with package(EQUAL, cls(), Plan.from_fields({**PLAN.fields(), "active": 7}), engine="block") as run:
        run.step()
        first = len(seen)
        run.step()
    assert "the direction" in seen
    assert any(what.startswith("Up.") for what in seen)
    assert len(seen) == first  # and in no other
