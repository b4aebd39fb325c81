"""`settle`, the hook that sees the mean: exact on every engine and back end; A-FedPD, lazy, is the eager algorithm."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pytest
import torch
from federations import Softmax, package
from same_bits import assert_same_bits
from test_optima import Quadratics, finish

from fedspeed.client.hooks import Hooks
from fedspeed.config.plan import Plan
from fedspeed.errors import Diverged, UserError
from fedspeed.methods import METHODS, AFedPD, AFedPDSAM, FedAvg, FedInit, FedSpeed, Wrapper
from fedspeed.methods.base import Method, Nothing
from fedspeed.server.states import ClientStates, DiskStates
from fedspeed.utils.random import cohort

PLAN = Plan(rounds=4, active=3, local_steps=2, batch_size=8, lr=0.1, weight_decay=0.0, seed=5, backend="serial")
EQUAL = Softmax(equal=8)


def plan(**changes) -> Plan:
    return Plan.from_fields({**PLAN.fields(), **changes})


# A-FedPD: nobody is absent


@pytest.mark.parametrize("weighting", ["uniform", "samples"])
def test_lazy_is_the_eager_loop_over_all_clients(weighting):
    """Full batches; h_i of every client, and every absent client's virtual update, written out."""
    problem = Softmax(clients=9)
    run = package(problem, AFedPD(lam=0.5), plan(rounds=25, batch_size=100, lr_decay=0.97, weighting=weighting))
    rows = problem.arrays()[2]
    p = np.array([len(r) for r in rows], float) if weighting == "samples" else np.ones(9)
    x, h = run.x.numpy().copy(), np.zeros((9, 12))
    for t in range(25):
        active = cohort(5, t, 9, 3, "fixed")
        ends = {}
        for i in active:
            y = x
            for _ in range(2):
                y = y - 0.1 * 0.97**t * (problem.gradient(rows[i], y) + (h[i] + y - x) / 0.5)
            ends[i] = y - x
        mean = sum(p[i] * ends[i] for i in active) / sum(p[i] for i in active)
        for i in range(9):
            h[i] = h[i] + ends.get(i, mean)
        x = x + mean + p @ h / p.sum()
        run.step()
        np.testing.assert_allclose(run.x.numpy(), x, rtol=0, atol=1e-12)
        H = run.server.H.numpy()
        np.testing.assert_allclose(H, p @ h / p.sum(), rtol=0, atol=1e-12)
        for i in range(9):  # also of those who were never asked
            np.testing.assert_allclose(run.client_state(i).q.numpy() + H, h[i], rtol=0, atol=1e-12)
    assert 3 < len(run.states) <= 9
    assert np.abs(h - h.mean(0)).max() > 0.01


@pytest.mark.parametrize(
    ("method", "rounds", "near"),
    [
        (AFedPD(lam=0.2), 200, 1e-3),
        pytest.param(AFedPD(lam=0.2), 1000, 1e-11, marks=pytest.mark.slow),
        pytest.param(AFedPDSAM(lam=0.2, rho=0), 1000, 1e-11, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_it_reaches_the_optimum_with_a_tenth_of_the_clients(method, rounds, near):
    """Three of thirty clients per round, K > 1: the optimum, and the duals are the clients' gradients there."""
    problem = Quadratics(clients=30)
    run = finish(problem.run(method, rounds=rounds, active=3, steps=5))
    best = problem.optimum()
    assert np.abs(run.x.numpy() - best).max() < near
    gradients = problem.gradients(best)
    assert np.abs(gradients).max() > 0.1
    for i in range(30):
        h = run.client_state(i).q.numpy() + run.server.H.numpy()
        np.testing.assert_allclose(-h / 0.2, gradients[i], atol=100 * near)


def test_with_one_client_per_round_no_dual_differs_from_another():
    """As the box has it: whoever is absent takes the only D there is. So it is FedAvg's trouble again."""
    run = finish(package(EQUAL, AFedPD(), plan(active=1)))
    assert all(float(run.states.get(i).q.abs().max()) < 1e-15 for i in run.states)


# Every engine, back end and place of states; dropped clients; wrappers


class Server(NamedTuple):
    x: torch.Tensor


class Client(NamedTuple):
    own: torch.Tensor
    mean: torch.Tensor
    when: torch.Tensor


class Up(NamedTuple):
    D: torch.Tensor


@dataclass(frozen=True)
class Told(Method):
    """Keeps what it sent, the mean it was then told, and t, S and how often it was settled."""

    block_safe = True

    def init_server(self, x0):
        return Server(x0)

    def init_client(self, x0):
        return Client(torch.zeros_like(x0), torch.zeros_like(x0), x0.new_zeros(3))

    def broadcast(self, server):
        return Server(server.x)

    def direction(self, x, grad, down, client):
        return grad(x)

    def upload(self, xK, down, client, run):
        D = xK - down.x
        return Up(D), Client(D, client.mean, client.when)

    def settle(self, client, mean, round):
        client.when.copy_(torch.tensor([round.t, round.S, float(client.when[2]) + 1]))  # it is its own
        return Client(client.own, mean.D, client.when)

    def update(self, server, mean, round):
        return Server(server.x + mean.D.mul_(1.0))


@pytest.mark.parametrize("states", ["memory", "disk"])
@pytest.mark.parametrize("engine", ["loop", "block"])
def test_each_counted_client_is_settled_once_with_the_mean(engine, states):
    run = package(EQUAL, Told(), plan(engine=engine, states=states, dropout=0.4, rounds=8))
    last, often = {}, dict.fromkeys(range(7), 0)
    for record in run:
        counted = [i for i in record.cohort if i not in record.dropped]
        mean = np.mean([run.states.get(i).own.numpy() for i in counted], axis=0)
        for i in counted:
            often[i] += 1
            last[i] = (mean, [record.round - 1, len(counted), often[i]])
        for i in last:  # nobody else was touched
            np.testing.assert_allclose(run.states.get(i).mean.numpy(), last[i][0], rtol=0, atol=1e-14)
            assert run.states.get(i).when.tolist() == last[i][1]
    assert any(len(c) > 1 for c in (record.cohort,))
    assert set(run.states) == set(last)
    run.close()


def ended(method, **changes):
    with package(EQUAL, method, plan(**changes)) as run:
        numbers = [(record.train_loss, record.drift, record.update_norm) for record in run]
        return numbers, run.x, {i: run.states.get(i) for i in run.states}


@pytest.mark.parametrize("engine", ["loop", pytest.param("block", marks=pytest.mark.slow)])
def test_worker_processes_and_files_give_the_same_bits(engine, quick_workers):
    method = FedInit(AFedPDSAM())
    here = ended(method, engine=engine)
    assert_same_bits(here, ended(method, engine=engine, states="disk"))
    assert_same_bits(here, ended(method, engine=engine, backend="process", workers=2, states="disk"))
    assert all(float(kept.base.q.abs().max()) > 0 for kept in here[2].values())


def test_states_in_half_precision_are_rounded_once(tmp_path):
    """What lies on disk is the settled state, rounded; not the difference of two rounded vectors."""
    whole, half = (ended(AFedPD(), rounds=1, states="disk", state_dtype=dtype) for dtype in ("same", "bfloat16"))
    for i, kept in whole[2].items():
        assert torch.equal(kept.q.to(torch.bfloat16).to(kept.q.dtype), half[2][i].q)


def test_wrappers_pass_it_on():
    plain = ended(AFedPD())
    assert_same_bits(plain, ended(Wrapper(Wrapper(AFedPD()))))
    relaxed = ended(FedInit(AFedPD(), beta=0.0))
    assert all(torch.equal(kept.base.q, plain[2][i].q) for i, kept in relaxed[2].items())


def test_who_does_not_ask_for_it_pays_nothing(monkeypatch):
    """Not a method of before: no state is read or written again, and no hook is called."""
    asks = {name for name, cls in METHODS.items() if "settle" in Hooks(cls(), 3, torch.float64).overridden}
    assert asks == {"afedpd", "afedpdsam"}
    for states in (ClientStates, DiskStates):
        monkeypatch.setattr(states, "settle", lambda *_: pytest.fail("nobody asked"))
    for states in ("memory", "disk"):
        ended(FedInit(Wrapper(FedSpeed())), states=states)
    ended(FedAvg())


# Mistakes

MISTAKES = {
    "nothing": (lambda client, mean: None, r"must return a NamedTuple as Client, found None; is there a return\?"),
    "another": (lambda client, mean: Nothing(), r"must return a Client with own \(12\), .* as `upload` returned it"),
    "dtype": (
        lambda client, mean: client._replace(own=mean.D.float()),
        "must return Client.own of torch.float64, found torch.f",
    ),
    "in place": (lambda client, mean: client._replace(own=mean.D.zero_()), r"must not change mean\.D in place"),
    "exits": (lambda client, mean: exit(), "must not end the program"),
    "raises": (lambda client, mean: {}["q"], r": round 1: KeyError: 'q' \(.*test_settle\.py, line \d+"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize("states", ["memory", "disk"])
def test_a_mistake_is_one_line_and_leaves_everything_as_it_was(mistake, states):
    do, says = MISTAKES[mistake]

    @dataclass(frozen=True)
    class Wrong(Told):
        def settle(self, client, mean, round):
            return do(client, mean)

    with package(EQUAL, Wrong(), plan(states=states)) as run:
        before = run.server
        with pytest.raises(UserError, match=rf"^Wrong\.settle ?{says}") as told:
            run.step()
        assert "\n" not in str(told.value)
        assert re.search(r"test_settle\.py, line \d+", str(told.value))
        assert run.server is before
        assert len(run.states) == run.t == 0
        if states == "disk":
            assert not any(run.states.folder.iterdir())


def test_a_state_that_is_not_finite_ends_the_run():
    @dataclass(frozen=True)
    class Blown(Told):
        def settle(self, client, mean, round):
            return client._replace(own=client.own / 0)

    with pytest.raises(Diverged, match=r"^Blown\.settle: round 1: a client's state became NaN or Inf"):
        ended(Blown())
