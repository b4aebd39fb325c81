"""Client states in memory and on disk: the same bits, kept if and only if the reply was counted."""

from __future__ import annotations

import errno
import os

import numpy as np
import pytest
import torch
from federations import Softmax, package

import fedspeed
from fedspeed.client.trees import tree_leaves
from fedspeed.config.plan import Plan
from fedspeed.errors import UserError
from fedspeed.methods import METHODS, FedAvg, FedInit, FedSMOO, FedSpeed
from fedspeed.server.states import LIMIT, ClientStates, DiskStates, choose_states

PLAN = Plan(rounds=5, active=3, local_steps=2, batch_size=4)


def outcome(method, **settings):
    with package(Softmax(), method, PLAN, **settings) as run:
        for _ in run:
            pass
        states = {i: [a.clone() for a in tree_leaves(run.states.get(i))] for i in run.states}
    return run, states


EVERY = [*(cls() for name, cls in METHODS.items() if name != "fedpd"), FedInit(FedSpeed())]


@pytest.mark.parametrize("method", EVERY, ids=lambda m: m.name)
def test_disk_gives_the_bits_of_memory(method):
    (a, kept), (b, stored) = outcome(method, states="memory"), outcome(method, states="disk")
    assert torch.equal(a.x, b.x)
    assert kept.keys() == stored.keys()
    for i in kept:
        assert all(torch.equal(x, y) for x, y in zip(kept[i], stored[i], strict=True))


def test_one_file_a_touched_client_and_none_after_close(tmp_path):
    run = package(Softmax(), FedSpeed(), PLAN, states="disk")
    touched = {i for record in run for i in record.cohort}
    names = sorted(os.listdir(run.states.folder))
    assert {int(name.split("@")[0]) for name in names} == touched
    assert len(names) == len(touched)
    run.close()
    assert not run.states.folder.exists()


def test_a_failed_round_leaves_states_as_they_were(tmp_path):
    for store in (ClientStates(), DiskStates(tmp_path / "s")):
        state = FedSpeed().init_client(torch.zeros(3))
        store.stage(4, state._replace(h=torch.ones(3)), 0)
        assert store.get(4) is None
        store.commit()
        store.stage(4, state._replace(h=torch.full((3,), 2.0)), 1)
        store.stage(5, state, 1)
        store.discard()
        assert list(store) == [4]
        assert torch.equal(store.get(4).h, torch.ones(3))
    assert os.listdir(tmp_path / "s") == ["4@0"]


def test_what_get_returns_is_private(tmp_path):
    for store in (ClientStates(), DiskStates(tmp_path)):
        store.stage(1, FedSpeed().init_client(torch.zeros(3)), 0)
        store.commit()
        store.get(1).h.fill_(7)
        assert torch.equal(store.get(1).h, torch.zeros(3))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sixteen_bits_halve_the_file_and_round(tmp_path, dtype):
    h = torch.from_numpy(np.random.default_rng(0).normal(size=1000)).float()
    small, whole = DiskStates(tmp_path / "a", dtype), DiskStates(tmp_path / "b")
    for store in (small, whole):
        store.stage(1, FedSpeed().init_client(h)._replace(h=h), 0)
        store.commit()
    assert torch.equal(whole.get(1).h, h)
    assert torch.equal(small.get(1).h, h.to(dtype).float())
    assert small.path(1, 0).stat().st_size < 0.52 * whole.path(1, 0).stat().st_size


def test_a_full_disk_is_a_clear_error_and_loses_nothing(tmp_path, monkeypatch):
    store = DiskStates(tmp_path)
    state = FedSMOO().init_client(torch.zeros(3))
    store.stage(1, state, 0)
    store.commit()

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(UserError, match="No space left"):
        store.stage(1, state, 1)
    store.discard()
    assert os.listdir(tmp_path) == ["1@0"]
    assert store.get(1) is not None


def test_auto_goes_to_disk_above_the_limit(tmp_path):
    one = FedSpeed().init_client(torch.zeros(1024))
    fits = LIMIT // 4096
    assert isinstance(choose_states("auto", one, fits), ClientStates)
    assert isinstance(choose_states("auto", one, fits + 1, tmp_path), DiskStates)
    assert isinstance(choose_states("auto", FedAvg().init_client(torch.zeros(1024)), 10**9), ClientStates)
    assert isinstance(choose_states("memory", one, 10**9), ClientStates)


def test_auto_counts_the_clients_that_a_run_can_touch(monkeypatch):
    data = fedspeed.load_data("digits", split="iid", clients=50)
    model = fedspeed.build_model("linear", data)
    monkeypatch.setattr("fedspeed.server.states.LIMIT", 5 * 4 * 650)
    for rounds, where in ((2, ClientStates), (3, DiskStates)):
        with fedspeed.simulate("scaffold", model, data, rounds=rounds, active=2) as run:
            assert isinstance(run.states, where)


def test_clients_begin_with_the_same_state_and_do_not_share_it():
    data = fedspeed.load_data("digits", split="iid", clients=50)
    with fedspeed.simulate("fedpd", fedspeed.build_model("linear", data), data, rounds=1, active=50) as run:
        first = run.client_state(0)
        assert torch.equal(first.x, run.x0)
        first.x.add_(1)
        assert torch.equal(run.client_state(0).x, run.x0)
