"""The block engine agrees with the loop to rounding for every method, and repeats its own bits.

The second half runs the engine alone, on edges, against a plain loop over modules that shares no code with it.
"""

from __future__ import annotations

import copy
import math
from typing import NamedTuple

import numpy as np
import pytest
import torch
from federations import Softmax, package
from torch import nn

from fedspeed import simulate
from fedspeed.client import block, block_gradients
from fedspeed.client.block import Block, mean_row, squared_distances
from fedspeed.client.block_gradients import mapped_gradient, stacked_gradient
from fedspeed.client.engines import Loop, resolve_engine
from fedspeed.client.flat_model import FlatModel
from fedspeed.client.work import Failed, Job, Work
from fedspeed.config.plan import Plan
from fedspeed.data import load
from fedspeed.data.federated import Federated
from fedspeed.errors import ClientFailed, Diverged
from fedspeed.methods import METHODS, FedADMM, FedAvg, FedExP, FedInit, FedProx, FedSpeed, Scaffold
from fedspeed.methods.base import Model, Movement
from fedspeed.models import build_model
from fedspeed.utils.files import key
from fedspeed.utils.random import batch_order

EVERY = [*(cls() for cls in METHODS.values()), FedInit(FedSpeed()), FedExP(Scaffold()), FedADMM(variant="active"),
         FedSpeed(server="active", ascent_fraction=0.5)]  # fmt: skip
PLAN = Plan(rounds=4, active=5, local_epochs=2, batch_size=4, weight_decay=0.01, seed=2)


@pytest.mark.parametrize("method", EVERY, ids=lambda m: m.name)
@pytest.mark.parametrize("problem", [Softmax(equal=10), Softmax()], ids=["equal sizes", "unequal sizes"])
def test_agrees_with_the_loop(method, problem):
    plan = Plan.from_fields({**PLAN.fields(), "active": 7 if method.name == "fedpd" else 5})
    loop = package(problem, method, plan, engine="loop")
    block = package(problem, method, plan, engine="block")
    assert block.plan.engine == "block"
    for a, b in zip(loop, block, strict=True):
        np.testing.assert_allclose(block.x.numpy(), loop.x.numpy(), atol=1e-11)
        for name in ("train_loss", "drift", "grad_evals", "update_norm", "test_loss"):
            np.testing.assert_allclose(getattr(b, name), getattr(a, name), atol=1e-10)
        assert (a.bytes_up, a.bytes_down, a.cohort) == (b.bytes_up, b.bytes_down, b.cohort)
    for i in loop.states:
        for x, y in zip(loop.states.get(i), block.states.get(i), strict=True):
            if isinstance(x, torch.Tensor):
                torch.testing.assert_close(x, y, atol=1e-11, rtol=0)


def test_repeats_its_own_bits_and_clips_as_the_loop():
    plan = Plan.from_fields({**PLAN.fields(), "clip": 0.3})
    runs = [package(Softmax(), FedSpeed(), plan, engine=e) for e in ("block", "block", "loop")]
    for _ in zip(*runs, strict=True):
        assert torch.equal(runs[0].x, runs[1].x)
        torch.testing.assert_close(runs[0].x, runs[2].x, atol=1e-11, rtol=0)


@pytest.mark.parametrize("channels", [1, 3])
def test_any_module_and_random_augmentation(channels):
    """A convolutional model, pictures that are flipped and cropped: the same draws as the loop."""
    from fedspeed.data.augment import Pipeline

    r = np.random.default_rng(0)
    x = r.integers(0, 255, (24, channels, 8, 8), dtype=np.uint8)
    data = Federated.from_arrays(
        x, r.integers(0, 3, 24), list(np.arange(24).reshape(4, 6)), pipeline=Pipeline(flip=0.5, padding=2), classes=3
    )
    model = build_model("cnn", data, widths=[2, 4]).double()
    runs = [simulate(FedAvg(), model, data, rounds=2, active=4, batch_size=4, engine=e) for e in ("loop", "block")]
    for _ in zip(*runs, strict=True):
        torch.testing.assert_close(runs[0].x, runs[1].x, atol=1e-12, rtol=0)


class OneBadClient(nn.Module):
    """NaN where the inputs are large."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)

    def forward(self, x):
        return self.inner(torch.where(x > 50, float("nan"), x))


def test_the_client_that_diverges_is_named():
    x = np.ones((12, 2), "f4")
    x[9] = 100
    data = Federated.from_arrays(x, np.zeros(12, int), list(np.arange(12).reshape(4, 3)), classes=2)
    messages = []
    for engine in ("loop", "block"):
        with pytest.raises(Diverged, match="client 3 diverged") as caught:
            simulate(FedAvg(), OneBadClient(), data, rounds=1, active=4, engine=engine).step()
        messages.append(str(caught.value))
    assert messages[0] == messages[1]


CHAINS = {
    "one layer": nn.Linear(6, 3),
    "no bias": nn.Sequential(nn.Linear(6, 3, bias=False)),
    "nested": nn.Sequential(nn.Flatten(), nn.Linear(6, 5), nn.ReLU(), nn.Sequential(nn.Linear(5, 3, bias=False))),
    "deep": nn.Sequential(nn.Linear(6, 5, bias=False), nn.ReLU(), nn.Linear(5, 4), nn.Linear(4, 4), nn.ReLU(),
                          nn.Linear(4, 3)),
    "ReLU at both ends": nn.Sequential(nn.ReLU(), nn.Flatten(), nn.Linear(6, 3), nn.Flatten(), nn.ReLU()),
}  # fmt: skip
CLASSES = torch.arange(12).reshape(3, 4) % 3
TARGETS = {
    "classes": (nn.functional.cross_entropy, CLASSES, True),
    "squares": (nn.functional.mse_loss, torch.randn(3, 4, 3, dtype=torch.float64), True),
    "probabilities": (nn.functional.cross_entropy, torch.rand(3, 4, 3, dtype=torch.float64), False),
}


def one_by_one(flat, loss, points, x, y):
    """The same through autograd, client by client."""
    g = torch.empty_like(points)
    losses = [flat.gradient(points[i], x[i], y[i], loss, g[i]) for i in range(len(points))]
    return g, torch.stack(losses)


@pytest.mark.parametrize("targets", TARGETS)
@pytest.mark.parametrize("chain", CHAINS)
def test_chains_of_linear_layers_are_written_out_and_agree_with_autograd(chain, targets, monkeypatch):
    used = []
    monkeypatch.setattr(block_gradients, "mapped_gradient", lambda *a: used.append(1) or mapped_gradient(*a))
    loss, y, written = TARGETS[targets]
    flat = FlatModel(copy.deepcopy(CHAINS[chain]).double())
    x = torch.randn(3, 4, 2, 3, dtype=torch.float64) if "Flatten" in str(flat.model) else torch.randn(3, 4, 6).double()
    points = torch.randn(3, flat.d, dtype=torch.float64)
    before = points.clone(), x.clone()
    found, again = (stacked_gradient(flat, loss)(points, x, y) for _ in range(2))
    assert used == ([] if written else [1, 1])
    for a, b, c in zip(found, again, one_by_one(flat, loss, points, x, y), strict=True):
        torch.testing.assert_close(a, c, rtol=1e-13, atol=1e-13)
        assert torch.equal(a, b)
        assert a.data_ptr() != b.data_ptr()  # a method may keep the first of two gradients
    assert torch.equal(points, before[0])
    assert torch.equal(x, before[1])


def test_what_only_a_batch_shows_is_left_to_torch_func():
    """Inputs with a further axis, outputs that the targets are broadcast to, autocast."""
    flat, points = FlatModel(nn.Linear(6, 1).double()), torch.randn(3, 7, dtype=torch.float64)
    x, y = torch.randn(3, 4, 2, 6).double(), torch.randn(3, 4, 2, 1).double()
    loss = nn.functional.mse_loss
    for a, b in zip(stacked_gradient(flat, loss)(points, x, y), one_by_one(flat, loss, points, x, y), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-13)
    flat = FlatModel(nn.Linear(6, 3))
    points, x = torch.randn(3, flat.d), torch.randn(3, 4, 6)
    with torch.autocast("cpu", torch.bfloat16):
        coarse = stacked_gradient(flat, nn.functional.cross_entropy)(points, x, CLASSES)
    fine = one_by_one(flat, nn.functional.cross_entropy, points, x, CLASSES)
    for a, b in zip(coarse, fine, strict=True):
        torch.testing.assert_close(a.float(), b, rtol=0.05, atol=0.05)
        assert not torch.equal(a, b)


def test_other_modules_and_losses_are_not_written_out():
    tied = nn.Linear(6, 6)
    for other in (
        nn.Sequential(nn.Linear(6, 5), nn.Tanh()),
        nn.Sequential(tied, nn.ReLU(), tied),
        nn.Conv2d(1, 1, 1),
        nn.Sequential(nn.Linear(6, 1), nn.Flatten(0)),
    ):
        assert stacked_gradient(FlatModel(other), nn.functional.cross_entropy) is None
    assert stacked_gradient(FlatModel(nn.Linear(6, 3)), lambda out, y: out.sum()) is None


def test_auto_looks_at_model_and_data_only():
    digits = load("digits", split="iid", clients=20)
    uneven = load("digits", split="dirichlet-class:0.3", clients=20)
    mlp, cnn = build_model("mlp", digits), build_model("cnn", digits)

    def engine(model, data, active=10, loss=nn.functional.cross_entropy, method=FedAvg(), asked="auto"):  # noqa: B008
        return resolve_engine(Plan(engine=asked, batch_size=10, active=active), method, model, loss, data)

    assert engine(mlp, digits) == "block"
    assert engine(cnn, digits) == "loop"
    assert engine(mlp, uneven) == "loop"
    assert engine(nn.Sequential(nn.Dropout(0.5), *mlp), digits) == "loop"
    assert engine(nn.Sequential(OneBadClient(), *mlp), digits) == "loop"  # its code may look at numbers
    assert engine(mlp, digits, loss=lambda out, y: nn.functional.cross_entropy(out, y)) == "loop"
    assert engine(build_model("mlp", digits, hidden=[4000]), digits) == "loop"
    assert engine(mlp, digits, active=2) == "loop"
    assert engine(mlp, digits, asked="loop") == "loop"


class Case(NamedTuple):
    """Clients of some sizes, and the plan of their turns; `steps` are a straggler's by client."""

    sizes: tuple[int, ...]
    method: object = FedAvg()
    plan: dict = {}
    no_decay: tuple[str, ...] = ()
    steps: dict = {}
    dtype: torch.dtype = torch.float64

    @property
    def data(self):
        r, n = np.random.default_rng(3), sum(self.sizes)
        x, y = r.normal(size=(n, 5)), r.integers(0, 3, n)
        rows = np.split(r.permutation(n), np.cumsum(self.sizes)[:-1])  # a client's rows are not neighbours
        return Federated.from_arrays(x, y, rows, classes=3)

    @property
    def model(self):
        torch.manual_seed(5)
        return nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3)).to(self.dtype)

    def work(self, model=None, loss=nn.functional.cross_entropy, data=None):
        plan = Plan(**{"active": len(self.sizes), "batch_size": 4, "local_epochs": 2, "seed": 7, "engine": "block",
                       **self.plan})  # fmt: skip
        flat = FlatModel(copy.deepcopy(model or self.model), self.no_decay)
        return Work(self.method, flat, loss, (data or self.data).to(flat.device, flat.dtype), plan)

    def jobs(self, t=2, lr=0.3):
        order = sorted(range(len(self.sizes)), key=lambda i: (self.sizes[i], self.steps.get(i, 0)))
        return [Job(i, t, lr, self.steps.get(i, 0)) for i in order]


class Truth(NamedTuple):
    D: torch.Tensor
    train_loss: float
    K: int


def plain_turn(case, job, mu=0.0):
    """One client's turn with modules, autograd and lists: no vector, no hook, no engine."""
    plan, data, model = case.work().plan, case.data, case.model
    parameters, before = list(model.parameters()), [p.detach().clone() for p in model.parameters()]
    decayed = [not name.endswith(case.no_decay) if case.no_decay else True for name, _ in model.named_parameters()]
    rows = data.rows(job.client)
    K = job.K or plan.local_epochs * math.ceil(len(rows) / plan.batch_size)
    losses = []
    for picked in batch_order(len(rows), plan.batch_size, K, key(plan.seed, "batches", job.t, job.client)):
        x, y = data.x[rows[picked]].to(case.dtype), data.y[rows[picked]]
        loss = nn.functional.cross_entropy(model(x), y)
        losses.append(loss.item())
        parts = list(torch.autograd.grad(loss, parameters))
        if plan.clip and plan.clip_mode == "released":  # the gradient and the constant part of the prox term
            parts = [g - mu * x0 for g, x0 in zip(parts, before, strict=True)]
        if plan.clip:
            norm = math.sqrt(sum(float(g.double().square().sum()) for g in parts))
            parts = [g * min(1.0, plan.clip / norm) for g in parts]
        with torch.no_grad():
            for p, g, x0, wd in zip(parameters, parts, before, decayed, strict=True):
                prox = mu * p if plan.clip and plan.clip_mode == "released" else mu * (p - x0)
                p -= job.lr * (g + prox + plan.weight_decay * wd * p)
    D = torch.cat([(p.detach() - x0).reshape(-1) for p, x0 in zip(parameters, before, strict=True)])
    return Truth(D, sum(losses) / K, K)


def ran(case, jobs=None, work=None):
    """The replies of the block engine, block by block, in job order."""
    work = work or case.work()
    engine, down = Block(work), work.hooks.broadcast(work.hooks.init_server(work.flat.x.clone()))
    chunks = list(engine.chunks(jobs or case.jobs()))
    return chunks, [engine.run(chunk, down, lambda _: work.hooks.init_client(work.flat.x)) for chunk in chunks]


CASES = {
    "unequal sizes": Case((3, 8, 8, 5, 3, 8)),
    "a short last batch": Case((5, 5, 5), plan={"batch_size": 3}),
    "batches of all samples": Case((6, 6), plan={"batch_size": 50}),
    "one sample each": Case((1, 1, 1), plan={"batch_size": 1}),
    "one client": Case((9,)),
    "a cohort of all different sizes": Case((2, 3, 4, 5)),
    "weight decay": Case((7, 7, 4), plan={"weight_decay": 0.05}),
    "no weight decay": Case((7, 7, 4), plan={"weight_decay": 0.0}),
    "weight decay not for biases": Case((7, 7, 4), plan={"weight_decay": 0.05}, no_decay=("bias",)),
    "weight decay not for one layer": Case((7, 7), plan={"weight_decay": 0.05}, no_decay=("2.weight", "0.bias")),
    "gradients clipped": Case((8, 8, 6), plan={"clip": 0.2}),
    "directions clipped": Case((8, 8, 6), FedProx(mu=0.4), plan={"clip": 0.2, "clip_mode": "released"}),
    "clipped and decayed": Case((8, 8), plan={"clip": 0.2, "weight_decay": 0.05}, no_decay=("bias",)),
    "a prox term": Case((8, 8, 6), FedProx(mu=0.4)),
    "stragglers": Case((8, 8, 8, 8, 5), steps={1: 1, 3: 3, 4: 2}),
    "float32": Case((8, 8, 5), plan={"weight_decay": 0.05, "clip": 0.5}, dtype=torch.float32),
}


@pytest.mark.parametrize("name", CASES)
def test_a_turn_is_that_of_a_plain_loop_over_modules(name):
    case = CASES[name]
    mu = getattr(case.method, "mu", 0.0)
    tight = {"rtol": 1e-4, "atol": 1e-6} if case.dtype == torch.float32 else {"rtol": 1e-11, "atol": 1e-13}
    chunks, answers = ran(case)
    assert [job for chunk in chunks for job in chunk] == case.jobs()
    for chunk, replies in zip(chunks, answers, strict=True):
        truths = [plain_turn(case, job, mu) for job in chunk]
        assert [reply.job for reply in replies] == chunk
        assert [reply.facts.represents for reply in replies] == [len(chunk)] + [0] * (len(chunk) - 1)
        mean = torch.stack([truth.D for truth in truths]).double().mean(0)
        torch.testing.assert_close(replies[0].up.D, mean, **tight)
        assert replies[0].up.D.dtype == torch.float64  # the mean of a block is summed and sent so
        for reply, truth in zip(replies, truths, strict=True):
            facts = reply.facts
            assert (facts.K, facts.n, facts.grad_evals) == (truth.K, case.sizes[reply.job.client], truth.K)
            assert facts.train_loss == pytest.approx(truth.train_loss, rel=tight["rtol"])
            assert facts.drift == pytest.approx(float(truth.D.double().square().sum()), rel=10 * tight["rtol"])
            assert facts.sent == truth.D.numel() * truth.D.element_size()


def test_steps_on_one_sample_have_a_closed_form():
    """(a x - b)^2: x_K = b/a + (1 - 2 lr a^2)^K (x_0 - b/a)."""
    a, b, lr, K = np.array([1.0, -0.5, 2.0]), np.array([1.0, 2.0, 3.0]), 0.1, 6
    data = Federated.from_arrays(a[:, None], b[:, None], [[0], [1], [2]])
    model = nn.Linear(1, 1, bias=False).double()
    nn.init.constant_(model.weight, 0.7)
    case = Case((1, 1, 1), plan={"local_steps": K, "batch_size": 1, "weight_decay": 0.0})
    _, [replies] = ran(case, case.jobs(lr=lr), case.work(model, nn.functional.mse_loss, data))
    moved = b / a + (1 - 2 * lr * a**2) ** K * (0.7 - b / a) - 0.7
    assert replies[0].up.D.item() == pytest.approx(moved.mean(), rel=1e-13)
    np.testing.assert_allclose([reply.facts.drift for reply in replies], moved**2, rtol=1e-12)


def test_blocks_are_neighbours_of_one_size_and_number_of_steps(monkeypatch):
    monkeypatch.setattr(block, "ROWS", 2)
    case = Case((8, 8, 8, 5, 8, 8), steps={1: 1})
    chunks, answers = ran(case)
    assert [[job.client for job in chunk] for chunk in chunks] == [[3], [0, 2], [4, 5], [1]]
    monkeypatch.setattr(block, "ROWS", 128)
    wide, others = ran(case)
    assert [[job.client for job in chunk] for chunk in wide] == [[3], [0, 2, 4, 5], [1]]
    cut, whole = ([r.facts for replies in found for r in replies] for found in (answers, others))
    for one, other in zip(cut, whole, strict=True):
        assert one.train_loss == pytest.approx(other.train_loss, rel=1e-13)
        assert one.drift == pytest.approx(other.drift, rel=1e-12)
    monkeypatch.setattr(block, "FLOATS", 3 * case.work().flat.d)
    assert Block(case.work()).most == 3
    monkeypatch.setattr(block, "FLOATS", 1)
    assert Block(case.work()).most == 1  # a model larger than a block is run client by client


class NanAtOnes(nn.Module):
    """NaN for inputs above 50, which some clients have."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(torch.where(x > 50, float("nan"), x))


@pytest.mark.parametrize("bad", [{0}, {2}, {0, 1, 3}, {0, 1, 2, 3}], ids=str)
def test_clients_that_diverge_leave_the_mean_of_the_others(bad):
    case = Case((6, 6, 6, 6))
    data = case.data
    for i in bad:
        data.x[data.rows(i)[0]] = 100.0
    _, [replies] = ran(case, work=case.work(NanAtOnes(case.model), data=data))
    good = [job for job in case.jobs() if job.client not in bad]
    for job, reply in zip(case.jobs(), replies, strict=True):
        assert reply.job == job
        if job.client in bad:
            assert isinstance(reply, Failed)
            assert isinstance(reply.error, Diverged)
            assert f"client {job.client} diverged" in str(reply.error)
        else:
            first = job == good[0]
            assert reply.facts.represents == (len(good) if first else 0)
            assert (reply.up is not None) == first
            assert reply.facts.train_loss == pytest.approx(plain_turn(case, job).train_loss, rel=1e-12)
    if good:
        mean = torch.stack([plain_turn(case, job).D for job in good]).mean(0)
        torch.testing.assert_close(next(r for r in replies if not isinstance(r, Failed)).up.D, mean, rtol=1e-11, atol=0)


class RaisesForTwo(FedAvg):
    block_safe = True

    def upload(self, xK, down, client, run):
        if 2 in run.clients:
            raise RuntimeError("not two")
        return Movement(xK - down.x), client


def test_a_client_that_raises_is_found_and_the_others_count_one_by_one():
    case = Case((6, 6, 6), RaisesForTwo())
    _, [replies] = ran(case)
    assert [getattr(reply, "facts", None) and reply.facts.represents for reply in replies] == [1, 1, None]
    for reply in replies[:2]:
        torch.testing.assert_close(reply.up.D, plain_turn(case, reply.job).D, rtol=1e-11, atol=1e-13)
    error = replies[2].error
    assert isinstance(error, ClientFailed)
    assert "client 2, step 4 of 4: RuntimeError: not two" in str(error)
    assert isinstance(error.__cause__, RuntimeError)


class Count(NamedTuple):
    k: torch.Tensor


class EverySecond(FedAvg):
    """Asks for a gradient in every second step only."""

    block_safe = True

    def init_client(self, x0):
        return Count(x0.new_zeros(1))

    def direction(self, x, grad, down, client):
        client.k.add_(1)
        return grad(x) if int(client.k.reshape(-1)[0]) % 2 == 0 else x.new_zeros(x.shape)

    def upload(self, xK, down, client, run):
        return Movement(xK - down.x), client


class Never(FedAvg):
    block_safe = True

    def direction(self, x, grad, down, client):
        return down.x.expand(x.shape) - 2.0 * x


@pytest.mark.parametrize("method", [EverySecond(), Never()], ids=lambda m: type(m).__name__)
def test_steps_without_a_gradient_count_as_in_the_loop(method):
    case = Case((6, 6, 6), method, plan={"local_steps": 5})
    work = case.work()
    _, [replies] = ran(case, work=work)
    down = Model(work.flat.x.clone())
    loop = Loop(work).run(case.jobs(), down, lambda _: work.hooks.init_client(work.flat.x))
    mean = torch.stack([reply.up.D for reply in loop]).mean(0)
    torch.testing.assert_close(replies[0].up.D, mean, rtol=1e-11, atol=1e-13)
    for one, other in zip(replies, loop, strict=True):
        assert one.facts.train_loss == pytest.approx(other.facts.train_loss, rel=1e-12)
        assert one.facts.grad_evals == other.facts.grad_evals == (2 if isinstance(method, EverySecond) else 0)
        for a, b in zip(one.client, other.client, strict=True):
            assert torch.equal(a, b)


class Falling(FedAvg):
    block_safe = True

    def rate(self, k, K):
        return 1 - k / K


def test_a_straggler_follows_the_planned_rates_in_a_block_of_its_own():
    case = Case((8, 8), Falling(), plan={"local_steps": 4, "batch_size": 8}, steps={1: 2})
    chunks, [[full], [short]] = ran(case)
    assert [[job.client for job in chunk] for chunk in chunks] == [[0], [1]]
    assert (full.facts.K, full.facts.mean_rate) == (4, 0.625)
    assert (short.facts.K, short.facts.mean_rate) == (2, 0.875)  # 1 and 3/4, not 1 and 1/2


@pytest.mark.parametrize("piece", [1, 3, 64, 2**17])
def test_sums_over_a_block_are_in_float64_whatever_the_piece(piece, monkeypatch):
    monkeypatch.setattr(block, "PIECE", piece)
    a, y = torch.randn(5, 37) + 1e4, torch.randn(37)
    exact = a.double()
    torch.testing.assert_close(mean_row(a), exact.mean(0), rtol=1e-15, atol=0)
    expected = [math.fsum(((row - y).double() ** 2).tolist()) for row in a]  # differences are the model's dtype's
    assert squared_distances(a, y) == pytest.approx(expected, rel=1e-13)
