"""A rate within the round: what steps are multiplied with, the sum that methods are told, and what is refused."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from federations import Softmax, package

from fedspeed import FedAvg, FedCM, FedMoSWA, FedNova, FedSWA, Local, Plan, Round, Scaffold, UserError, Wrapper
from fedspeed.errors import ClientFailed
from fedspeed.utils.files import key
from fedspeed.utils.random import batch_order, straggler_steps

PLAN = Plan(
    rounds=3, active=4, local_epochs=2, batch_size=4, lr=0.125, lr_decay=0.5, weight_decay=0.01, backend="serial"
)
both = pytest.mark.parametrize("engine", ["loop", "block"])


def ended(method, problem=None, **changes):
    with package(problem or Softmax(), method, Plan.from_fields({**PLAN.fields(), **changes})) as run:
        records = list(run)
        return run.x, records


@dataclass(frozen=True)
class Half(Wrapper):
    """Every step at half the rate."""

    block_safe = True

    def rate(self, k, K):
        return 0.5


@both
@pytest.mark.parametrize("method", [FedAvg(), Scaffold(), FedCM(), FedNova()], ids=lambda m: m.name)
def test_half_the_rate_in_every_step_is_half_the_learning_rate_bit_for_bit(method, engine):
    """Weight decay included, and for methods that read a mean gradient from D; sizes and so K_i differ."""
    assert torch.equal(ended(Half(method), engine=engine)[0], ended(method, engine=engine, lr=PLAN.lr / 2)[0])


@both
def test_wrappers_hand_it_on(engine):
    assert torch.equal(ended(Wrapper(Wrapper(FedSWA())), engine=engine)[0], ended(FedSWA(), engine=engine)[0])


@pytest.mark.parametrize("weighting", ["uniform", "samples"])
@both
def test_methods_are_told_the_sum_of_the_rates(engine, weighting):
    """A client its own, the server the mean under its weights: written out for rates 1, 1/2, 1/3, ..."""
    told: dict[str, list] = {"local": [], "round": []}

    @dataclass(frozen=True)
    class Told(Wrapper):
        block_safe = True

        def rate(self, k, K):
            return 1 / (k + 1)

        def upload(self, xK, down, client, run):
            told["local"].append(run)
            return super().upload(xK, down, client, run)

        def update(self, server, mean, round):
            told["round"].append(round)
            return super().update(server, mean, round)

    _, records = ended(Told(FedAvg()), engine=engine, weighting=weighting)
    sizes = Softmax().sizes
    for run in told["local"][1:]:  # the first call only finds shapes
        assert run.lr_sum == pytest.approx(sum(run.lr / (k + 1) for k in range(run.K)), rel=1e-14)
    for record, told_round in zip(records, told["round"], strict=True):
        sums = [record.lr * sum(1 / (k + 1) for k in range(2 * -(-sizes[i] // 4))) for i in record.cohort]
        weights = [sizes[i] if weighting == "samples" else 1 for i in record.cohort]
        assert told_round.lr_sum == pytest.approx(np.average(sums, weights=weights), rel=1e-14)
        assert told_round.lr == record.lr


def test_without_a_rate_the_sum_is_k_times_lr():
    assert Local(5, 0.1, 10).lr_sum == 5 * 0.1
    assert Round(0, 3.0, 7.0, 2.5, 0.1).lr_sum == 2.5 * 0.1
    assert FedAvg().rate(3, 4) == 1.0


@both
@pytest.mark.parametrize("bad", ["0.5", None, float("nan"), float("inf"), -0.1, 1j, torch.ones(2)], ids=str)
def test_what_is_no_rate_is_refused(bad, engine):
    @dataclass(frozen=True)
    class Wrong(FedAvg):
        block_safe = True

        def rate(self, k, K):
            return bad if k == 1 else 1.0

    with pytest.raises(UserError) as caught:
        ended(Wrong(), engine=engine)
    said = r"^Wrong\.rate must return a number >= 0, found .* in step 1 of \d+ \(.*test_rates\.py, line \d+\)$"
    assert re.search(said, str(caught.value))


@both
def test_rates_that_are_all_0_are_refused_and_a_0_among_them_is_not(engine):
    @dataclass(frozen=True)
    class Rising(FedAvg):
        block_safe = True

        def rate(self, k, K):
            return np.float64(k / K)

    @dataclass(frozen=True)
    class Still(FedAvg):
        block_safe = True

        def rate(self, k, K):
            return 0

    ended(Rising(), engine=engine)
    with pytest.raises(UserError, match=r"Still\.rate must not be 0 in all of a round's \d+ steps"):
        ended(Still(), engine=engine)


@both
def test_a_rate_that_raises_is_named(engine):
    @dataclass(frozen=True)
    class Raises(FedAvg):
        block_safe = True

        def rate(self, k, K):
            raise ValueError("no rate today")

    with pytest.raises(ClientFailed, match=r"Raises: round 1, client \d+, step 0 of .*no rate today"):
        ended(Raises(), engine=engine)


# Stragglers


def steps_done(problem, plan, i, t):
    """Planned steps of a client, and how many of them it does: the scenario's own draw."""
    planned = plan.steps_of(problem.sizes[i])
    return planned, straggler_steps(plan.seed, t, i, planned, plan.stragglers)


@both
@pytest.mark.parametrize("method", [FedSWA(), FedMoSWA()], ids=lambda m: m.name)
def test_a_straggler_does_the_first_of_the_steps_that_were_planned(method, engine):
    """A plain loop in NumPy: eta_k falls along the planned K, and FedMoSWA divides by the rates of the steps done."""
    problem = Softmax()
    plan = Plan.from_fields({**PLAN.fields(), "stragglers": 0.6, "engine": engine, "rounds": 4, "active": 5})
    rows, late = problem.arrays()[2], 0
    with package(problem, method, plan) as run:
        x, m, c = run.x.numpy().copy(), np.zeros(12), {}
        for t, record in enumerate(run):
            ends, variates = [], []
            for i in record.cohort:
                planned, done = steps_done(problem, plan, i, t)
                late += done < planned
                v, own, total = x.copy(), c.get(i, np.zeros(12)), 0.0
                turns = batch_order(problem.sizes[i], 4, planned, key(plan.seed, "batches", t, i))
                for k, batch in enumerate(turns[:done]):
                    eta = record.lr * ((1 - k / planned) + method.rho * k / planned)
                    g = problem.gradient(rows[i][batch], v) + 0.01 * v
                    v, total = v - eta * (g + (m - own if isinstance(method, FedMoSWA) else 0)), total + eta
                ends.append(v - x)
                c[i] = own - m + (x - v) / total
                variates.append(c[i])
            x, m = x + 1.5 * np.mean(ends, 0), m + 0.2 * (np.mean(variates, 0) - m)
            np.testing.assert_allclose(run.x.numpy(), x, rtol=0, atol=1e-10)
            assert sorted(record.stragglers) == [
                i for i in sorted(record.cohort) if len(set(steps_done(problem, plan, i, t))) > 1
            ]
    assert late > 3


@both
def test_rates_that_are_0_as_far_as_a_straggler_comes_are_refused(engine):
    @dataclass(frozen=True)
    class Late(FedAvg):
        block_safe = True

        def rate(self, k, K):
            return float(k > K // 2)

    ended(Late(), engine=engine)
    with pytest.raises(
        UserError, match=r"Late\.rate must not be 0 in all of the \d+ of \d+ steps that a straggler takes"
    ):
        ended(Late(), engine=engine, stragglers=1.0)
