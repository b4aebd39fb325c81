"""Strategies against truths computed here: textbook successive halving, budgets added up by hand."""

from __future__ import annotations

import itertools
import math
import random as python_random
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec

import numpy as np
import pytest

from fedspeed.errors import UserError
from fedspeed.experiments.grid import Pairs, Range, Space, Values, parse_axis, spaces
from fedspeed.experiments.tune.strategies import Found, Search, Trial, choose, halving, kept, propose, rungs

SPACE: Space = {"lr": Range(0.01, 1, log=True), "lam": Values((1.0, 10.0, 100.0))}
COST = 7.0  # gradients per round


def drawn(space: Space) -> Callable[[int], Pairs]:
    @cache
    def draw(i: int) -> Pairs:
        stream = np.random.default_rng(i)
        return tuple((name, axis.at(stream.random())) for name, axis in space.items())

    return draw


def make_search(space: Space = SPACE, budget: float = 2000.0, rounds: int = 27, **more: object) -> Search:
    given: dict = {
        "space": space,
        "budget": budget,
        "rounds": rounds,
        "seeds": (1000,),
        "further": lambda turn: 1001 + turn,
        "cost": lambda trial: COST * trial.rounds,
        "draw": drawn(space),
    }
    return Search(**{**given, **more})


def truth(trial: Trial) -> Found:
    """A score that depends on everything: best at lr 0.1 and lam 10, and rising with rounds; large rates diverge."""
    point = dict(trial.point)
    if point["lr"] > 0.7:
        return Found(None, COST)  # after one round
    far = math.log(point["lr"] / 0.1) ** 2 + math.log(point["lam"] / 10) ** 2
    noise = python_random.Random(str(trial)).random() / 50
    return Found(trial.rounds / (1 + trial.rounds) - far + noise, COST * trial.rounds)


def finish(name: str, search: Search, lose: python_random.Random | None = None) -> tuple[dict[Trial, Found], dict]:
    """Ask until nothing is wanted; `lose`: now and then only some of what was wanted is done before a new start."""
    known: dict[Trial, Found] = {}
    for _ in range(1000):
        asked, wanted = propose(name, search, known)
        if not wanted:
            return known, asked
        done = wanted if lose is None else lose.sample(wanted, lose.randint(1, len(wanted)))
        known |= {trial: truth(trial) for trial in done}
    raise AssertionError("it does not end")


def spent(known: dict[Trial, Found]) -> float:
    """What the runs cost: the longest trial of every run."""
    runs: dict[tuple[Pairs, int], float] = {}
    for trial, found in known.items():
        runs[trial.point, trial.seed] = max(found.gradients, runs.get((trial.point, trial.seed), 0.0))
    return sum(runs.values())


no_optuna = pytest.mark.skipif(find_spec("optuna") is None, reason="optuna is not installed: pip install optuna")
STRATEGIES = ["random", "halving", pytest.param("optuna", marks=no_optuna)]


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("budget", [600.0, 1000.0, 4321.0])
@pytest.mark.parametrize("seeds", [(1000,), (1000, 1001)])
def test_a_search_spends_its_budget_up_to_one_run(name: str, budget: float, seeds: tuple[int, ...]) -> None:
    search = make_search(budget=budget * len(seeds), seeds=seeds, further=lambda turn: 2000 + turn)
    known, _ = finish(name, search)
    run = COST * search.rounds * len(seeds)
    assert search.budget - run < spent(known) <= search.budget


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_search_that_is_killed_again_and_again_is_the_same_search(name: str) -> None:
    search = make_search(budget=3000.0)
    whole, asked = finish(name, search)
    for i in range(3):
        parts, again = finish(name, search, python_random.Random(i))
        assert parts == whole
        assert choose("x", parts, again) == choose("x", whole, asked)


def test_halving_is_successive_halving() -> None:
    search = make_search(budget=5000.0)
    steps = rungs(27)
    assert steps == [3, 9, 27]
    known, asked = finish("halving", search)
    first = [trial.point for trial in known if trial.rounds == 3]
    for n in itertools.count(1):  # as many as the budget pays for, were none to diverge
        numbers = [n, max(1, n // 3), max(1, n // 9)]
        if sum(k * COST * (b - a) for k, a, b in zip(numbers, [0, *steps], steps, strict=False)) > 5000.0:
            break
    assert len(first) == n - 1
    alive = first
    for rounds, keep in zip(steps, kept(len(first), 3), strict=True):
        assert len(alive) <= keep
        scores = [truth(Trial(point, 1000, rounds)).score for point in alive]
        assert {t.point for t in known if t.rounds == rounds and t.seed == 1000} == set(alive)
        order = sorted((i for i, s in enumerate(scores) if s is not None), key=lambda i: -(scores[i] or 0))
        alive = [alive[i] for i in order[: max(1, len(first) // 3 ** (steps.index(rounds) + 1))]]
    assert choose("x", known, asked) == alive[0]


def test_points_stay_the_same_when_the_budget_grows() -> None:
    few, _ = finish("random", make_search(budget=1000.0))
    more, _ = finish("random", make_search(budget=2000.0))
    assert list(more)[: len(few)] == list(few)


def test_a_small_space_is_tried_with_further_seeds() -> None:
    """Eleven runs for three points: each with seeds 1000 to 1002, the two leaders with 1003 too, best first."""
    space: Space = {"lr": Values((0.05, 0.1, 0.4)), "lam": Values((10.0,))}
    known, asked = finish("random", make_search(space, budget=11.5 * COST * 27))
    assert len(known) == 11
    lrs = {seed: [dict(t.point)["lr"] for t in known if t.seed == seed] for seed in range(1000, 1004)}
    assert [len(lrs[seed]) for seed in sorted(lrs)] == [3, 3, 3, 2]
    assert lrs[1003] == [0.1, 0.05]
    means = {lr: np.mean([f.score for t, f in known.items() if dict(t.point)["lr"] == lr]) for lr in lrs[1003]}
    assert dict(choose("x", known, asked))["lr"] == max(means, key=lambda lr: means[lr])


def test_what_diverged_is_paid_for_by_what_it_cost() -> None:
    space: Space = {"lr": Values((0.8, 0.9, 0.1)), "lam": Values((10.0,))}
    known, asked = finish("random", make_search(space, budget=3.1 * COST * 27))
    assert sum(found.score is None for found in known.values()) == 2
    assert dict(choose("x", known, asked))["lr"] == 0.1
    assert len(known) == 5  # the two that ended at once left enough for two further seeds of the third
    with pytest.raises(UserError, match="every point of x that was left diverged"):
        choose("x", known, {p: t for p, t in asked.items() if dict(p)["lr"] > 0.7})


@pytest.mark.parametrize("name", STRATEGIES)
def test_points_that_cannot_be_run_are_not_asked_for(name: str) -> None:
    def valid(point: Pairs) -> bool:
        return dict(point)["lam"] > 5

    draw = drawn(SPACE)
    search = make_search(valid=valid, draw=lambda i: draw(i) if valid(draw(i)) else None)
    known, _ = finish(name, search)
    assert known
    assert all(dict(trial.point)["lam"] > 5 for trial in known)


def test_of_equals_the_first_is_chosen() -> None:
    trials = [Trial((("lr", lr),), 0, 1) for lr in (0.3, 0.1, 0.2)]
    known = {trial: Found(0.5, 1.0) for trial in trials}
    assert choose("x", known, {trial.point: [trial] for trial in trials}) == trials[0].point


def test_draws_of_a_log_range_are_even_in_logarithms() -> None:
    axis = parse_axis("lr", "0.001..1:log")
    logs = [math.log10(axis.at(u)) for u in np.linspace(0, 1, 1001)[:-1]]
    assert np.histogram(logs, bins=3, range=(-3, 0))[0] == pytest.approx([333, 333, 333], abs=4)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("lr=", "lr is empty"),
        ("lr", "expected [METHOD.]FIELD=VALUES"),
        ("fedspeed.lan=1,2", "did you mean 'lam'"),
        ("fedsped.lam=1,2", "unknown method in --space 'fedsped'; did you mean 'fedspeed'"),
        ("rounds=5,10", "unknown field of fedavg, fedspeed to tune 'rounds'"),
        ("fedavg.lam=1", "unknown field of fedavg to tune 'lam'"),
        ("lr=1..0.1", "needs LOW < HIGH"),
        ("lr=0..1:log", "needs 0 < LOW < HIGH"),
        ("lr=0.1..1:lin", "is log or linear, got 'lin'"),
        ("lr=0.1,0.1", "every value of lr once"),
        ("lr=a..b", "needs LOW < HIGH"),
    ],
)
def test_a_bad_space_is_one_line(text: str, told: str) -> None:
    methods = {name: {"name": name} for name in ("fedavg", "fedspeed")}
    with pytest.raises(UserError) as error:
        spaces(methods, {}, [text])
    assert told in str(error.value)
    assert "\n" not in str(error.value)


def test_what_is_given_is_not_tuned() -> None:
    methods = {"fedspeed:lam=2": {"name": "fedspeed", "lam": 2.0}, "fedprox": {"name": "fedprox"}}
    assert {label: list(space) for label, space in spaces(methods, {}).items()} == {
        "fedspeed:lam=2": ["lr", "rho"],
        "fedprox": ["lr", "mu"],
    }
    assert list(spaces(methods, {"lr": 0.1})["fedprox"]) == ["mu"]
    assert list(spaces(methods, {"lr": 0.1, "local_optimizer": "adam"})["fedprox"]) == ["mu"]
    both = spaces(methods, {"lr": 0.1}, ["lr=0.1,0.3", "fedspeed:lam=2.rho=0,0.1", "weight_decay=0,0.001"])
    assert both["fedspeed:lam=2"]["rho"] == Values((0.0, 0.1))
    assert list(both["fedprox"]) == ["mu", "lr", "weight_decay"]
    with pytest.raises(UserError, match="nothing of fedavg is left to tune"):
        spaces({"fedavg": {"name": "fedavg"}}, {"lr": 0.1})


def test_every_prox_sam_and_adaptive_method_declares_what_is_tuned() -> None:
    from fedspeed.experiments.grid import check, usual_point
    from fedspeed.methods import METHODS

    found = spaces({name: {"name": name} for name in METHODS}, {})
    for name, cls in METHODS.items():
        fields = set(cls().fields())
        assert "lr" in found[name]
        assert {"lam", "rho", "mu"} & fields <= set(found[name])
        assert ("eta_g" in found[name]) == (name in ("fedadam", "fedyogi", "fedadagrad"))
        check(name, {"name": name}, found[name])
        assert usual_point(found[name], {"name": name}) is not None  # the defaults are in every space
    lam, mu, alpha = found["fedspeed"]["lam"], found["fedprox"]["mu"], found["feddyn"]["alpha"]
    assert isinstance(lam, Range)
    assert mu == alpha == Range(1 / lam.high, 1 / lam.low, log=True)  # the same prox weights for all


def test_the_first_rungs_are_never_longer_than_the_run() -> None:
    for rounds, every in itertools.product(range(1, 80), (1, 4, 10)):
        steps = rungs(rounds, every)
        assert steps[-1] == rounds
        assert steps == sorted(set(steps))
        assert all(step % every == 0 for step in steps[:-1])


def test_nothing_is_asked_for_beyond_the_last_rung() -> None:
    search = make_search(budget=COST * 27)
    known, asked = finish("halving", search)
    assert halving(search, known)[1] == []
    assert [trial.rounds for trial in known] == [3, 9, 27]
    assert len(asked) == 1
