"""Rows of a block: cutting jobs into blocks, trees of blocks, states, means, digests, and rows that are lost.

Everything is compared with a plain loop over clients, or with NumPy and exact sums.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import pytest
import torch
from federations import Softmax, package
from torch import nn

from fedspeed import simulate
from fedspeed.client import block
from fedspeed.client.block import Block, mean_of_rows, mean_row, states_of
from fedspeed.client.engines import Loop
from fedspeed.client.flat_model import FlatModel
from fedspeed.client.trees import all_finite, stack, tree_leaves, unstack
from fedspeed.client.work import Failed, Job, Work
from fedspeed.config.plan import Plan
from fedspeed.data.federated import Federated
from fedspeed.errors import Diverged
from fedspeed.methods import FedAvg, FedInit, FedSpeed, Scaffold
from fedspeed.methods.base import Movement, Nothing
from fedspeed.server.states import StateReader


def made(sizes, method=FedAvg(), steps=None, **plan):  # noqa: B008
    """Work of the block engine on random clients of some sizes, and their jobs, largest first; `steps` by client."""
    r, n, steps = np.random.default_rng(11), sum(sizes), steps or {}
    rows = np.split(r.permutation(n), np.cumsum(sizes)[:-1])
    data = Federated.from_arrays(r.normal(size=(n, 4)), r.integers(0, 3, n), rows, classes=3)
    torch.manual_seed(1)
    flat = FlatModel(nn.Linear(4, 3).double())
    settings = {"active": len(sizes), "batch_size": 4, "local_epochs": 1, "engine": "block", **plan}
    order = sorted(range(len(sizes)), key=lambda i: (-sizes[i], i))
    work = Work(method, flat, nn.functional.cross_entropy, data.to("cpu", flat.dtype), Plan(**settings))
    return work, [Job(i, 0, 0.2, steps.get(i, 0)) for i in order]


def replies_of(engine, work, jobs):
    down = work.hooks.broadcast(work.hooks.init_server(work.flat.x.clone()))
    first = work.hooks.init_client(work.flat.x)
    return [
        reply
        for chunk in engine.chunks(jobs)
        for reply in engine.run(chunk, down, lambda _: type(first)(*(a.clone() for a in first)))
    ]


# --- cutting jobs into blocks ---


def plain_blocks(jobs, sizes, most):
    """Walk through the jobs; a block ends where size or K changes, or where it is full."""
    blocks = []
    for job in jobs:
        last = blocks[-1] if blocks else []
        alike = last and (sizes[last[-1].client], last[-1].K) == (sizes[job.client], job.K)
        if alike and len(last) < most:
            last.append(job)
        else:
            blocks.append([job])
    return blocks


@pytest.mark.parametrize("seed", range(6))
def test_blocks_are_those_of_a_plain_walk(seed, monkeypatch):
    """Unequal sizes and stragglers, which split their neighbours' block."""
    r = np.random.default_rng(seed)
    sizes = r.choice([3, 4, 9], 40).tolist()
    work, jobs = made(sizes, steps={int(i): int(r.integers(1, 3)) for i in r.choice(40, 12, replace=False)})
    for most in (1, 2, 5, 128):
        monkeypatch.setattr(block, "ROWS", most)
        assert list(Block(work).chunks(iter(jobs))) == plain_blocks(jobs, sizes, most)
    assert list(Block(work).chunks([])) == []


@pytest.mark.parametrize(("clients", "expected"), [(5, [5]), (6, [6]), (7, [6, 1]), (12, [6, 6]), (13, [6, 6, 1])])
@pytest.mark.parametrize("limit", ["ROWS", "FLOATS"])
def test_a_block_may_be_full_to_the_last_row(limit, clients, expected, monkeypatch):
    work, jobs = made([4] * clients)
    monkeypatch.setattr(block, limit, 6 if limit == "ROWS" else 7 * work.flat.d - 1)  # no room for a seventh row
    engine = Block(work)
    assert [len(chunk) for chunk in engine.chunks(jobs)] == expected
    replies = replies_of(engine, work, jobs)
    counts = [reply.facts.represents for reply in replies if reply.facts.represents]
    assert counts == expected
    means = [reply.up.D for reply in replies if reply.up is not None]
    alone = torch.stack([reply.up.D for reply in replies_of(Loop(work), work, jobs)])
    for a, b in zip(means, alone.split(6), strict=True):
        torch.testing.assert_close(a, b.mean(0), rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("method", [FedAvg(), FedSpeed(), Scaffold()], ids=lambda m: m.name)
def test_a_block_of_one_client_is_a_turn_of_the_loop(method):
    work, jobs = made([7], method)
    [one], [alone] = replies_of(Block(work), work, jobs), replies_of(Loop(work), work, jobs)
    assert one.facts.represents == 1
    for a, b in zip((*one.up, *one.client), (*alone.up, *alone.client), strict=True):
        assert a.shape == b.shape
        torch.testing.assert_close(a, b.to(a.dtype), rtol=1e-11, atol=1e-13)


def test_stragglers_split_a_block_and_each_does_its_own_steps():
    """SCAFFOLD with K of 4, 1 and 2: c_i = -D_i / (K_i lr) in the first round, from D_i of the loop."""
    work, jobs = made([8] * 5, Scaffold(), steps={1: 1, 3: 2}, local_steps=4)
    engine = Block(work)
    assert [[job.client for job in chunk] for chunk in engine.chunks(jobs)] == [[0], [1], [2], [3], [4]]
    jobs.sort(key=lambda job: job.K)  # a back end may be given jobs in any order
    assert [[job.client for job in chunk] for chunk in engine.chunks(jobs)] == [[0, 2, 4], [1], [3]]
    for reply, other in zip(replies_of(engine, work, jobs), replies_of(Loop(work), work, jobs), strict=True):
        K = {1: 1, 3: 2}.get(reply.job.client, 4)
        assert reply.facts.K == K
        torch.testing.assert_close(reply.client.c, -other.up.D / (K * 0.2), rtol=1e-10, atol=1e-12)


# --- trees of blocks ---


class Inner(NamedTuple):
    a: torch.Tensor
    none: Nothing


class Outer(NamedTuple):
    inner: Inner
    shared: torch.Tensor
    b: torch.Tensor


def test_rows_of_a_tree_are_views_and_stack_to_the_same_tree():
    a, b, shared = np.arange(12.0).reshape(4, 3), np.arange(4.0).reshape(4, 1), np.array([7.0, 8.0])
    tree = Outer(Inner(torch.tensor(a), Nothing()), torch.tensor(shared), torch.tensor(b))
    rows = unstack(tree, 4)
    assert [type(row) for row in rows] == [Outer] * 4
    for i, row in enumerate(rows):
        assert row.inner.a.tolist() == a[i].tolist()
        assert row.b.tolist() == b[i].tolist()
        assert row.shared is tree.shared
        assert row.inner.none == Nothing()
        row.inner.a.add_(100)  # a view of its own row only
    assert tree.inner.a.tolist() == (a + 100).tolist()
    again = stack(rows)
    assert again.inner.a.tolist() == (a + 100).tolist()
    assert again.b.tolist() == b.tolist()
    assert again.inner.a.data_ptr() != tree.inner.a.data_ptr()
    assert unstack(Nothing(), 3) == [Nothing()] * 3


@pytest.mark.parametrize("shape", [(1, 5), (3, 1), (128, 700), (100, 1337)], ids=str)
def test_the_mean_of_rows_is_exact_to_a_few_last_digits_of_float64(shape, monkeypatch):
    monkeypatch.setattr(block, "PIECE", 2**14)  # several pieces, the last one narrower
    a = torch.randn(shape, generator=torch.Generator().manual_seed(3)) * 100
    found = mean_row(a)
    assert found.dtype == torch.float64
    exact = np.array([math.fsum(column) / shape[0] for column in a.double().T.tolist()])
    np.testing.assert_allclose(found.numpy(), exact, rtol=0, atol=2e-14 * 100 * math.sqrt(shape[0]))
    shared = torch.ones(2)
    both = mean_of_rows(Outer(Inner(a, Nothing()), shared, a))
    assert both.shared is shared
    assert torch.equal(both.b, found)


# --- states ---


@pytest.mark.parametrize("where", ["memory", "disk"])
@pytest.mark.parametrize("method", [FedSpeed(), Scaffold(), FedInit(FedSpeed()), FedAvg()], ids=lambda m: m.name)
def test_states_of_a_block_are_private_copies_of_each_clients(method, where):
    plan = Plan(rounds=3, active=3, local_steps=2, batch_size=4, states=where, engine="block")
    with package(Softmax(equal=6), method, plan) as run:
        run.step()
        clients = [6, *run.step().cohort, 0]  # some of them without a counted reply
        read = run.state_reader
        together = states_of(clients, read)
        plain = states_of(clients, lambda i: run.client_state(i))
        for a, b in zip(tree_leaves(together), tree_leaves(plain), strict=True):
            assert a.shape == (len(clients), b.shape[1])
            assert torch.equal(a, b)
            a.fill_(torch.nan)
        for i in clients:
            alone = list(tree_leaves(read(i)))
            assert all(bool(torch.isfinite(a).all()) for a in alone)
            assert all(torch.equal(a, b) for a, b in zip(alone, tree_leaves(run.client_state(i)), strict=True))


def test_states_that_live_on_another_device_are_read_one_by_one():
    first = Movement(torch.empty(3, device="meta"))
    asked = []

    def one(i):
        asked.append(i)
        return Movement(torch.full((3,), float(i)))

    found = states_of([4, 2], StateReader(one, None, first))
    assert asked == [4, 2]
    assert found.D.tolist() == [[4.0] * 3, [2.0] * 3]


# --- rows that are lost ---


class NanWhereLarge(nn.Module):
    """NaN for inputs above 50, which some clients have."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.inner = nn.Linear(4, 3).double()

    def forward(self, x):
        return self.inner(torch.where(x > 50, float("nan"), x))


@pytest.mark.parametrize("bad", [{1}, {0, 4}, {0, 1, 2, 3}], ids=str)
@pytest.mark.parametrize("method", [FedSpeed(), Scaffold()], ids=lambda m: m.name)
def test_lost_rows_change_no_state_and_the_others_are_those_of_the_loop(method, bad):
    r = np.random.default_rng(5)
    x, y = r.normal(size=(30, 4)), r.integers(0, 3, 30)
    x[[6 * i for i in bad]] = 100.0
    data = Federated.from_arrays(x, y, list(np.arange(30).reshape(5, 6)), classes=3)
    found = {}
    for engine in ("block", "loop"):
        run = simulate(method, NanWhereLarge(), data, rounds=2, active=5, batch_size=6, engine=engine,
                       on_client_error="drop", backend="serial")  # fmt: skip
        records = list(run)
        assert [record.dropped for record in records] == [sorted(bad)] * 2
        assert set(run.states) == set(range(5)) - bad
        found[engine] = run
    block_run, loop_run = found["block"], found["loop"]
    torch.testing.assert_close(block_run.x, loop_run.x, rtol=1e-11, atol=1e-13)
    for i in block_run.states:
        for a, b in zip(block_run.states.get(i), loop_run.states.get(i), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


class KeepsNan(FedAvg):
    """Sends finite vectors, and keeps NaN as the state of client 2."""

    block_safe = True

    def init_client(self, x0):
        return Movement(x0.new_zeros(2))

    def upload(self, xK, down, client, run):
        kept = torch.where(torch.tensor(run.clients).eq(2).view(-1, 1), torch.nan, client.D.reshape(-1, 2))
        return Movement(xK - down.x), Movement(kept if xK.ndim == 2 else kept[0])


class SendsInf(FedAvg):
    """Sends Inf in the row of client 2, after steps with finite losses."""

    block_safe = True

    def upload(self, xK, down, client, run):
        odd = torch.tensor(run.clients).eq(2).view(-1, 1)
        return Movement(torch.where(odd, torch.inf, xK - down.x).view(xK.shape)), client


@pytest.mark.parametrize("method", [KeepsNan(), SendsInf()], ids=lambda m: type(m).__name__)
def test_a_vector_that_is_not_finite_loses_its_row_alone(method):
    work, jobs = made([6] * 4, method)
    replies = replies_of(Block(work), work, jobs)
    assert [isinstance(reply, Failed) for reply in replies] == [False, False, True, False]
    assert isinstance(replies[2].error, Diverged)
    assert replies[0].facts.represents == 3
    alone = [reply.up.D for reply in replies_of(Loop(work), work, jobs) if not isinstance(reply, Failed)]
    torch.testing.assert_close(replies[0].up.D, torch.stack(alone).mean(0), rtol=1e-11, atol=1e-13)


class Huge(FedAvg):
    """Sends numbers that are finite, and whose sum over clients is not."""

    block_safe = True

    def upload(self, xK, down, client, run):
        return Movement(torch.full_like(xK, 1.5e308)), client


def test_a_sum_that_overflows_loses_no_row():
    work, jobs = made([6] * 4, Huge())
    replies = replies_of(Block(work), work, jobs)
    assert not any(isinstance(reply, Failed) for reply in replies)
    assert replies[0].facts.represents == 4


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_all_finite_sees_a_single_number_and_no_overflow_of_sums(dtype):
    largest = torch.finfo(dtype).max
    a = torch.full((3, 50), largest, dtype=dtype)
    assert all_finite((a, torch.zeros(0)))
    for bad in (math.nan, math.inf, -math.inf):
        b = torch.zeros(3, 50, dtype=dtype)
        b[2, 49] = bad
        assert not all_finite((a, b))
    both = torch.zeros(2, dtype=dtype)
    both[0], both[1] = math.inf, -math.inf
    assert not all_finite((both,))
