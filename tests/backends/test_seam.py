"""The seam between server, back end and engine: a back end of one's own, and blocks in worker processes."""

from __future__ import annotations

import os
import signal
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from pathlib import Path

import numpy as np
import pytest
import torch
from same_bits import assert_same_bits
from same_bits import outcome as loop_outcome
from torch import nn

from fedspeed import backends, simulate
from fedspeed.backends.packing import pack, unpack
from fedspeed.cli import main
from fedspeed.client.engines import make_engine
from fedspeed.client.evaluate import score_slice, slices, total
from fedspeed.config.config import Config
from fedspeed.config.plan import Plan
from fedspeed.data.federated import Federated
from fedspeed.errors import ClientFailed, Diverged, UserError
from fedspeed.methods import METHODS, FedAvg, FedInit, FedSpeed
from fedspeed.utils import registry
from fedspeed.utils.registry import BACKENDS


class Threads:
    """A back end in threads: every worker has the work as it would arrive elsewhere."""

    def __init__(self, work, workers, touched):
        packed = pack(work)
        self.data, self.chunks = work.data, make_engine(work).chunks
        self.works = deque(unpack(packed.work, packed.data) for _ in range(workers))  # taken and given back
        self.engines = {id(each): make_engine(each) for each in self.works}
        self.pool = ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,))

    def run(self, jobs, down, state):
        kept = {job.client: state(job.client) for job in jobs}
        copy = {i: (lambda tree=tree: _copy(tree)) for i, tree in kept.items()}
        chunks = list(self.chunks(jobs))
        for replies in self.pool.map(lambda chunk: self._on_a_worker(self._chunk, chunk, down, copy), chunks):
            yield from replies

    def evaluate(self, x, validation=False):
        pieces = slices(self.data, validation)
        scores = self.pool.map(lambda piece: self._on_a_worker(self._score, x, piece, validation), pieces)
        return total(scores, pieces[-1][1])

    def close(self):
        self.pool.shutdown()

    def _on_a_worker(self, task, *args):
        work = self.works.pop()
        try:
            return task(work, *args)
        finally:
            self.works.append(work)

    def _chunk(self, work, chunk, down, copy):
        return self.engines[id(work)].run(chunk, down, lambda client: copy[client]())

    def _score(self, work, x, piece, validation):
        return score_slice(work.flat, x, work.data, work.loss, *piece, validation)


def _copy(tree):
    return type(tree)(*(_copy(a) if isinstance(a, tuple) else a.clone() for a in tree))


@pytest.fixture
def threads(monkeypatch):
    monkeypatch.setitem(BACKENDS, "threads", f"{__name__}:Threads")


def federation(sizes) -> Federated:
    r, owner = np.random.default_rng(0), np.repeat(np.arange(len(sizes)), sizes)
    x, test = (r.normal(size=(n, 6)).astype("f4") for n in (len(owner), 1200))
    return Federated.from_arrays(x, r.integers(0, 4, len(owner)), owner, (test, r.integers(0, 4, 1200)), classes=4)


SIZES = [6] * 140 + [9] * 9 + [3]  # two blocks of one size, one of another, and a client by itself


def outcome(method, **settings):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
    common = {"rounds": 2, "active": len(SIZES), "local_epochs": 2, "batch_size": 4, "engine": "block", **settings}
    with simulate(method, model, federation(SIZES), **common) as run:
        records = [{**r.to_dict(), "seconds": 0, "eval_seconds": 0} for r in run]
        assert run.placement == settings.get("backend", "serial")
        assert run.plan.engine == "block"
        return records, run.x, {i: run.states.get(i) for i in run.states}


@pytest.mark.parametrize(
    "method",
    [
        FedSpeed(),
        *(pytest.param(METHODS[name](), marks=pytest.mark.slow) for name in ("fedavg", "scaffold", "fedsmoo")),
    ],
    ids=str,
)
def test_blocks_in_workers_give_the_bits_of_blocks_here(method, quick_workers):
    settings = {"stragglers": 0.1, "dropout": 0.1}
    assert_same_bits(outcome(method, **settings), outcome(method, backend="process", workers=2, **settings))


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("method", [*(cls() for cls in METHODS.values()), FedInit(FedSpeed())], ids=lambda m: m.name)
def test_blocks_of_every_method_on_every_number_of_workers(method, workers):
    assert_same_bits(outcome(method), outcome(method, backend="process", workers=workers))


@pytest.mark.parametrize("method", [FedAvg(), FedSpeed(), METHODS["fedsmoo"]()], ids=lambda m: m.name)
def test_a_back_end_of_ones_own(method, threads):
    assert_same_bits(outcome(method), outcome(method, backend="threads", workers=3))
    assert_same_bits(loop_outcome(method), loop_outcome(method, backend="threads", workers=3))


@pytest.mark.parametrize("run", [outcome, pytest.param(loop_outcome, marks=pytest.mark.slow)], ids=["block", "loop"])
def test_a_schedule_has_the_same_bits_everywhere(run, threads, quick_workers):
    """A round's method is made where its jobs are run."""
    method, settings = METHODS["fedsmoo"](rho=0.3), {"warmup": "lr=2,rho=3", "rounds": 3}
    here = run(method, **settings)
    for backend, workers in (("process", 1), ("threads", 3)):
        assert_same_bits(here, run(method, backend=backend, workers=workers, **settings))
    assert not torch.equal(here[1], run(method, warmup="lr=2", rounds=3)[1])


def test_names_come_from_the_registry(threads, monkeypatch, capsys):
    assert Plan(backend="threads").backend == Config(backend="threads").backend == "threads"
    foreign = EntryPoint("elsewhere", f"{__name__}:Threads", registry.BACKEND_GROUP)
    monkeypatch.setattr(registry, "entry_points", lambda group: [foreign] if group == registry.BACKEND_GROUP else [])
    assert_same_bits(outcome(FedAvg()), outcome(FedAvg(), backend="elsewhere", workers=2))
    with pytest.raises(UserError, match="must be one of auto, serial, process, ray, threads, elsewhere, got 'dask'"):
        Plan(backend="dask")
    with pytest.raises(SystemExit):
        main(["run", "--help"])
    assert "auto|serial|process|ray|threads|elsewhere" in capsys.readouterr().out.replace("\n", "")


class NoEvaluation:
    def run(self, jobs, down, state): ...

    def close(self): ...


@pytest.mark.parametrize(
    ("place", "says"),
    [
        (f"{__name__}:NoEvaluation", f"back end odd: {__name__}:NoEvaluation has no method evaluate; expected a class"),
        (f"{__name__}:federation", f"back end odd: {__name__}:federation has no method run"),
        (f"{__name__}:Nothing", f"back end odd: {__name__}:Nothing cannot be loaded"),
        ("no_such_module:Ray", "No module named 'no_such_module'.*use --backend serial"),
    ],
)
def test_a_class_that_does_not_fit_is_named(place, says, monkeypatch):
    monkeypatch.setitem(BACKENDS, "odd", place)
    with pytest.raises(UserError, match=says) as caught:
        outcome(FedAvg(), backend="odd")
    assert "\n" not in str(caught.value)


class Allergic(nn.Module):
    """Raises at batches of three, gives NaN for inputs of 99, or kills its process until there is a file."""

    def __init__(self, how: str, file: str = "") -> None:
        super().__init__()
        self.inner, self.how, self.file = nn.Linear(6, 4), how, Path(file)

    def forward(self, x):
        if self.how == "nan":
            return self.inner(torch.where(x == 99, float("nan"), x))
        if self.training and self.how == "raise" and x.shape[0] == 3:
            raise RuntimeError("cannot digest three")
        if self.training and self.how == "die" and x.shape[0] == 3 and not self.file.exists():
            self.file.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return self.inner(x)


@pytest.mark.parametrize(
    ("how", "kind", "says"),
    [
        ("raise", ClientFailed, r"client 4, step 1 of 1: RuntimeError: cannot digest three \(.*line \d+, in forward"),
        pytest.param("nan", Diverged, "client 1 diverged", marks=pytest.mark.slow),
    ],
)
def test_a_failing_client_of_a_block_in_a_worker(how, kind, says, quick_workers):
    """The others of its block count as they do here: bit by bit."""
    data, model = federation([4, 4, 4, 4, 3, 3]), Allergic(how)
    if how == "nan":
        data.x[4] = 99.0
    common = {"rounds": 2, "active": 6, "local_epochs": 1, "batch_size": 4, "engine": "block", "workers": 1}
    with simulate(FedSpeed(), model, data, backend="process", **common) as run, pytest.raises(kind, match=says):
        run.step()
    runs = [
        simulate(FedSpeed(), model, data, on_client_error="drop", backend=b, **common) for b in ("serial", "process")
    ]
    for a, b in zip(*runs, strict=True):
        assert a.dropped == b.dropped == ([4, 5] if how == "raise" else [1])
        assert torch.equal(runs[0].x, runs[1].x)
    assert set(runs[0].states) == set(runs[1].states)


@dataclass(frozen=True)
class Fragile(FedSpeed):
    """Raises where a client has moved far."""

    block_safe = True

    def upload(self, xK, down, client, run):
        if (xK - down.x).abs().max() > 5:
            raise RuntimeError("too far")
        return super().upload(xK, down, client, run)


def test_the_clients_of_a_block_that_raises_are_run_one_by_one(quick_workers):
    """Each has an upload of its own then."""
    data = federation([4] * 6)
    data.x[8:12] *= 1e3
    common = {
        "rounds": 2,
        "active": 6,
        "local_epochs": 1,
        "batch_size": 4,
        "engine": "block",
        "on_client_error": "drop",
    }
    model = nn.Linear(6, 4)
    runs = [simulate(Fragile(), model, data, backend=b, workers=2, **common) for b in ("serial", "process")]
    for a, b in zip(*runs, strict=True):
        assert a.dropped == b.dropped == [2]
        assert torch.equal(runs[0].x, runs[1].x)


def test_a_worker_that_dies_in_a_block_is_replaced_and_the_bits_stay(tmp_path, quick_workers):
    data = federation([4, 4, 4, 4, 3, 3])
    common = {"rounds": 2, "active": 6, "local_epochs": 1, "batch_size": 4, "engine": "block", "workers": 2}
    torch.manual_seed(0)
    dies = Allergic("die", str(tmp_path / "died"))
    with simulate(FedSpeed(), dies, data, backend="process", **common) as run:
        with pytest.warns(
            UserWarning, match=r"died \(exit code -9\) while it ran client 4 and 1 other in a block of round 1"
        ):
            run.step()
        run.step()
    with simulate(FedSpeed(), dies, data, backend="serial", **common) as serial:
        list(serial)
    assert torch.equal(run.x, serial.x)


@pytest.mark.parametrize("backend", ["auto", "process"])
def test_an_upload_that_fails_when_shapes_are_looked_for_is_one_line(backend, monkeypatch):
    def fail(*_):
        raise RuntimeError("mine")

    monkeypatch.setattr(FedAvg, "upload", fail)
    monkeypatch.setattr(backends, "worth_processes", lambda work: True)
    plan = Plan(rounds=1, active=2, backend=backend, workers=2, engine="loop")
    with pytest.raises(UserError, match=r"^FedAvg.* round 1.*: RuntimeError: mine \(.*test_seam\.py, line"):
        list(simulate(FedAvg(), nn.Linear(6, 4), federation([4] * 6), plan))


def test_shapes_are_found_once_where_the_work_was_made(monkeypatch):
    """Nothing that was sent calls a hook to look at what it returns."""
    data = federation([4] * 6)
    with simulate(METHODS["fedsmoo"](), nn.Linear(6, 4), data, engine="block", active=6) as run:
        packed, calls = pack(run.work), []
        monkeypatch.setattr(METHODS["fedsmoo"], "upload", lambda *_: calls.append(1))
        there = unpack(packed.work, packed.data)
        assert [a.shape for a in there.shapes.up] == [a.shape for a in run.work.shapes.up]
        assert type(there.shapes.client) is type(run.client_state(0))
    assert calls == []
    assert type(there.plan) is Plan
    assert torch.equal(there.flat.x, run.x0)
    assert len(packed.work) < 20_000  # no tensor of the data
