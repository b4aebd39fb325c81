"""Clients that fail, drop out or straggle, and workers that die."""

from __future__ import annotations

import os
import signal
import threading
import time

import numpy as np
import oracle
import pytest
import torch
from federations import Softmax, package, transcription
from same_bits import SETTINGS, assert_same_bits, digits, leaves, outcome
from torch import nn

from fedspeed import simulate
from fedspeed.config.plan import Plan
from fedspeed.data.federated import Federated
from fedspeed.errors import ClientFailed, Diverged, UserError
from fedspeed.methods import METHODS, FedAvg, FedSpeed
from fedspeed.utils.random import cohort, dropped, straggler_steps

PLAN = Plan(rounds=6, active=4, local_epochs=2, batch_size=4, lr=0.1, lr_decay=0.9, weight_decay=0.01, seed=3)


def truth(name: str, plan: Plan, monkeypatch) -> list[dict]:
    """The NumPy transcription with the clients that were lost left out, and the stragglers' own K_i."""
    whole = oracle.run

    def run(method, hyper, *, cohorts, steps, m, **rest):
        kept = []
        for t, active in enumerate(cohorts):
            lost = set(dropped(plan.seed, t, np.array(active), plan.dropout).tolist())
            kept.append([i for i in active if i not in lost])
        done = [
            {i: straggler_steps(plan.seed, t, i, K, plan.stragglers) for i, K in steps[t].items()}
            for t in range(plan.rounds)
        ]
        return whole(method, hyper, cohorts=kept, steps=done, m=m, **rest)

    monkeypatch.setattr(oracle, "run", run)
    return transcription(Softmax(), name, {}, plan, decay=0.9)


@pytest.mark.parametrize("name", ["fedavg", "scaffold", "fedcm", "fednova", "feddyn", "fedadmm", "fedspeed", "fedsmoo"])
@pytest.mark.parametrize("engine", ["loop", "block"])
@pytest.mark.parametrize(
    "scenario", [{"dropout": 0.5}, {"stragglers": 0.6}, {"dropout": 0.3, "stragglers": 0.5}], ids=str
)
def test_scenarios_equal_the_transcription(name, engine, scenario, monkeypatch):
    """The mean is over the replies received, S counts them, states of lost clients stay, K_i are what was run."""
    plan = Plan.from_fields({**PLAN.fields(), **scenario})
    run = package(Softmax(), METHODS[name](), plan, engine=engine)
    seen: dict[str, set] = {"dropped": set(), "stragglers": set()}
    for expected in truth(name, plan, monkeypatch):
        record = run.step()
        np.testing.assert_allclose(run.x.numpy(), expected["x"], rtol=0, atol=1e-10)
        assert set(record.dropped) <= set(record.cohort)
        for key in seen:
            seen[key] |= {(record.round, i) for i in getattr(record, key)}
    assert bool(seen["dropped"]) == ("dropout" in scenario)
    assert bool(seen["stragglers"]) == ("stragglers" in scenario)


class Allergic(nn.Module):
    """Raises, or gives NaN, when it sees a picture that is all `poison`."""

    def __init__(self, poison: float, how: str) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 3).double()
        self.poison, self.how = poison, how

    def forward(self, x):
        if self.training and (x == self.poison).any():
            if self.how == "raise":
                raise RuntimeError("cannot digest this")
            return self.inner(x) * float("nan")
        return self.inner(x)


def federation(poisoned: int) -> Federated:
    r = np.random.default_rng(0)
    x = r.normal(size=(24, 2))
    x[4 * poisoned] = 99.0
    return Federated.from_arrays(x, r.integers(0, 3, 24), list(np.arange(24).reshape(6, 4)), classes=3)


@pytest.mark.parametrize(
    ("backend", "how"),
    [
        ("serial", "raise"),
        ("serial", "nan"),
        ("process", "raise"),
        pytest.param("process", "nan", marks=pytest.mark.slow),
    ],
)
def test_a_failing_client_stops_the_run_or_is_dropped(backend, how, quick_workers):
    data, model = federation(poisoned=2), Allergic(99.0, how)
    settings = {"rounds": 2, "active": 6, "local_epochs": 1, "batch_size": 4, "backend": backend, "workers": 2}
    with simulate(FedSpeed(), model, data, **settings) as run:
        kind, says = (ClientFailed, "client 2, step 1 of 1: RuntimeError: cannot digest this") if how == "raise" else (
            Diverged, "client 2 diverged")  # fmt: skip
        with pytest.raises(kind, match=says):
            run.step()
        assert run.t == 0
        assert len(run.states) == 0
    with simulate(FedSpeed(), model, data, on_client_error="drop", **settings) as run:
        records = list(run)
        assert [r.dropped for r in records] == [[2], [2]]
        assert set(run.states) == {0, 1, 3, 4, 5}
        mean = sum(run.states.get(i).h for i in run.states) / 6  # the lost client still counts among all
        torch.testing.assert_close(run.server.H, mean, rtol=0, atol=1e-14)


@pytest.mark.parametrize("states", ["memory", "disk"])
def test_a_round_interrupted_in_its_evaluationleaves_everything_as_before(states, monkeypatch):
    run = package(Softmax(), FedSpeed(), PLAN, states=states)
    run.step()
    before = run.t, run.server, dict(run.states.generations), {i: run.states.get(i).h for i in run.states}
    with monkeypatch.context() as patch:
        patch.setattr(run.backend, "evaluate", lambda x: os.kill(os.getpid(), signal.SIGINT) or time.sleep(5))
        with pytest.raises(KeyboardInterrupt):
            run.step()
    assert (run.t, run.server, run.states.generations) == before[:3]
    assert all(torch.equal(run.states.get(i).h, h) for i, h in before[3].items())
    if states == "disk":
        assert len(os.listdir(run.states.folder)) == len(before[3])  # nothing of the round is left
    whole = package(Softmax(), FedSpeed(), PLAN)
    assert [r.to_dict()["drift"] for r in run] == [r.to_dict()["drift"] for r in list(whole)[1:]]
    assert torch.equal(run.x, whole.x)


def test_ctrl_c_while_a_round_is_committed_comes_after_it(monkeypatch):
    """The interrupt is real, and arrives between the states and the server."""
    run = package(Softmax(), FedSpeed(), PLAN)
    commit = run.states.commit

    def interrupted():
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.01)
        commit()

    with monkeypatch.context() as patch:
        patch.setattr(run.states, "commit", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run.step()
    assert run.t == 1
    assert set(run.states.generations.values()) == {0}
    whole = package(Softmax(), FedSpeed(), PLAN)
    list(run), list(whole)
    assert torch.equal(run.x, whole.x)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_diverging_client_is_dropped_from_a_block_too():
    data, model = federation(poisoned=2), nn.Linear(2, 3).double()
    data.x[8] = torch.inf
    settings = {"rounds": 2, "active": 6, "local_epochs": 1, "batch_size": 4, "on_client_error": "drop"}
    runs = [simulate(FedSpeed(), model, data, engine=engine, **settings) for engine in ("loop", "block")]
    for a, b in zip(*runs, strict=True):
        assert a.dropped == b.dropped == [2]
        torch.testing.assert_close(runs[0].x, runs[1].x, rtol=0, atol=1e-13)


def test_a_round_in_which_everybody_fails_is_an_error():
    data = federation(poisoned=0)
    with pytest.raises(Diverged):
        simulate(FedAvg(), Allergic(99.0, "nan"), data, active=1, rounds=9, on_client_error="drop", cohort="fixed",
                 local_epochs=1, seed=next(s for s in range(99) if cohort(s, 0, 6, 1)[0] == 0)).step()  # fmt: skip


@pytest.mark.filterwarnings("ignore:a worker process died")
def test_a_worker_killed_in_a_round_is_replaced_and_the_bits_stay(quick_workers):
    serial = outcome(FedSpeed(), rounds=6, local_epochs=4)
    data, model = digits()
    with simulate(
        FedSpeed(), model, data, backend="process", workers=2, **{**SETTINGS, "rounds": 6, "local_epochs": 4}
    ) as run:
        killed = []

        def kill() -> None:
            for delay in (0.01, 0.4, 0.2):
                time.sleep(delay)
                if victims := list(run.backend.workers):  # none once the run is over, which may be soon
                    victims[len(killed) % 2].process.kill()
                    killed.append(victims[len(killed) % 2].process.pid)

        killer = threading.Thread(target=kill, daemon=True)
        killer.start()
        records = [{**r.to_dict(), "seconds": 0, "eval_seconds": 0} for r in run]
        killer.join()
        states = {i: run.states.get(i) for i in run.states}
        assert killed
    assert_same_bits(serial, (records, run.x, states))
    assert all(leaves(state) for state in states.values())


@pytest.mark.filterwarnings("ignore:a worker process died")
def test_a_client_that_always_kills_its_worker_stops_the_run_with_the_reason(quick_workers):
    data = federation(poisoned=2)
    with (
        simulate(FedAvg(), Deadly(), data, rounds=1, active=6, local_epochs=1, backend="process", workers=2) as run,
        pytest.raises(UserError, match=r"worker process died \(exit code -9\) while it ran client 2 of round 1"),
    ):
        run.step()


class Deadly(nn.Module):
    """Kills its process when it sees the poison, as running out of memory would."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 3).double()

    def forward(self, x):
        if (x == 99.0).any():
            os.kill(os.getpid(), signal.SIGKILL)
        return self.inner(x)
