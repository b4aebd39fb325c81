"""Strategies: pure functions from the known trials to the trials to make next. Optuna is imported on demand.

A strategy gets all results so far and returns the missing trials that it wants; none once it is done. A search that was
killed therefore repeats itself from the start and finds the earlier results there. Costs are gradients; a trial that is
not known yet counts with its largest possible cost.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from typing import Any, NamedTuple

from ...errors import UserError
from ...report.export import need
from ..grid import Axis, Pairs, Space, Values, size

ETA = 3
"""Halving keeps one of this many points, and gives those it keeps this many times the rounds."""
FIRST = 9
"""Halving first compares points after this part of the rounds, 1/9: earlier scores predict little."""
BEGIN = 10
"""Number of random points before Optuna's estimator is used."""
REPEATS = 64
"""Number of consecutive draws without a new point after which a space counts as exhausted."""


class Trial(NamedTuple):
    """A point, a seed and a number of rounds; more rounds of the same point and seed continue the same run."""

    point: Pairs
    seed: int
    rounds: int


class Found(NamedTuple):
    """The result of a trial: held-out score (larger is better, None if it diverged) and gradients."""

    score: float | None
    gradients: float


Known = Mapping[Trial, Found]


@dataclass(frozen=True)
class Search:
    """The search space of one method, its budget and its costs.

    Args:
        budget: the largest number of gradients.
        rounds: the rounds of a whole run.
        seeds: the seeds of every point; its score is the mean over them. Optuna draws with the first.
        further: i -> the i-th additional seed, for the leaders when budget is left.
        cost: trial -> its gradients if it does not diverge.
        draw: i -> the i-th random point, None if it cannot be run; the first may be the point of the defaults.
        valid: whether a point can be run.
        every, least: halving compares points after multiples of `every` rounds (those with scores), from `least` on.
    """

    space: Space
    budget: float
    rounds: int
    seeds: tuple[int, ...]
    further: Callable[[int], int]
    cost: Callable[[Trial], float]
    draw: Callable[[int], Pairs | None]
    valid: Callable[[Pairs], bool] = lambda point: True
    every: int = 1
    least: int = 1

    def trials(self, point: Pairs, rounds: int) -> list[Trial]:
        """Return the trials of a point, one per seed."""
        return [Trial(point, seed, rounds) for seed in self.seeds]

    def price(self, point: Pairs, rounds: int, known: Known) -> float:
        """Return the gradients of a point with every seed: counted ones where they are known."""
        trials = self.trials(point, rounds)
        return sum(known[trial].gradients if trial in known else self.cost(trial) for trial in trials)

    def points(self) -> Iterator[Pairs]:
        """Yield random points, each once, until draws bring nothing new."""
        seen: set[Pairs] = set()
        repeats = 0
        for i in count():
            point = self.draw(i)
            repeats += 1
            if point is not None and point not in seen:
                seen.add(point)
                repeats = 0
                yield point
            if len(seen) >= size(self.space) or repeats >= REPEATS:
                return


def mean_score(known: Known, trials: list[Trial]) -> float:
    """Return the mean score of trials; -inf if one diverged. It does not depend on their order (`fmean` is exact)."""
    scores = [known[trial].score for trial in trials]
    return -math.inf if None in scores else statistics.fmean(one for one in scores if one is not None)


def ranked(scores: Mapping[Pairs, float]) -> list[Pairs]:
    """Return points, best first, without those that diverged; equal ones keep their order."""
    return sorted((point for point in scores if scores[point] > -math.inf), key=lambda point: -scores[point])


def missing(trials: list[Trial], known: Known) -> list[Trial]:
    """Return the trials that are not known yet."""
    return [trial for trial in trials if trial not in known]


def random(search: Search, known: Known) -> tuple[list[Pairs], list[Trial]]:
    """Return random points while the budget pays for one more, and their missing trials."""
    spent, points, wanted = 0.0, [], []
    for point in search.points():
        spent += search.price(point, search.rounds, known)
        if spent > search.budget:
            break
        points.append(point)
        wanted += missing(search.trials(point, search.rounds), known)
    return points, wanted


def rungs(rounds: int, every: int = 1, least: int = 1) -> list[int]:
    """Return the numbers of rounds after which halving compares points, `least` or more; the last is `rounds`.

    Example:
        >>> rungs(60), rungs(60, every=10), rungs(60, least=9), rungs(5)
        ([7, 20, 60], [10, 20, 60], [20, 60], [1, 2, 5])
    """
    parts = [rounds / part for part in (ETA, FIRST)]
    looks = [every * math.ceil(part / every) if every > 1 else max(1, round(part)) for part in parts]
    return sorted({rounds, *(look for look in looks if least <= look <= rounds)})


def kept(first: int, levels: int) -> list[int]:
    """Return the number of points of every rung.

    Example:
        >>> kept(30, 4), kept(2, 3)
        ([30, 10, 3, 1], [2, 1, 1])
    """
    return [max(1, first // ETA**level) for level in range(levels)]


def halving(search: Search, known: Known) -> tuple[list[Pairs], list[Trial]]:
    """Try many points for few rounds; the better third continues in the same runs, so no round is run twice."""
    steps = rungs(search.rounds, search.every, search.least)
    points = _entrants(search, steps)
    numbers = kept(len(points), len(steps))
    for level, rounds in enumerate(steps):
        wanted = missing([trial for point in points for trial in search.trials(point, rounds)], known)
        if wanted:
            return points, wanted
        if level + 1 < len(steps):
            scores = {point: mean_score(known, search.trials(point, rounds)) for point in points}
            points = ranked(scores)[: numbers[level + 1]]
    return points, []


def _entrants(search: Search, steps: list[int]) -> list[Pairs]:
    """Return as many points as the budget pays for if the most expensive ones continue."""
    points: list[Pairs] = []
    dearest = [0.0] * len(steps)
    begun = 0.0
    for point in search.points():
        costs = [search.price(point, rounds, {}) for rounds in steps]
        most = [max(pair) for pair in zip(dearest, costs, strict=True)]
        numbers = kept(len(points) + 1, len(steps))
        later = sum(n * (most[i] - most[i - 1]) for i, n in enumerate(numbers) if i)
        if begun + costs[0] + later > search.budget:
            break
        points.append(point)
        dearest, begun = most, begun + costs[0]
    return points


def optuna(search: Search, known: Known) -> tuple[list[Pairs], list[Trial]]:
    """Let Optuna's tree-structured Parzen estimator suggest one point at a time, given the scores of those before it.

    The study is rebuilt from the known trials, so that a search that was killed continues in the same way.
    """
    package = need("optuna", "'fedspeed[optuna]'")
    package.logging.set_verbosity(package.logging.ERROR)
    sampler = package.samplers.TPESampler(seed=search.seeds[0], n_startup_trials=BEGIN)
    study = package.create_study(direction="maximize", sampler=sampler)
    axes = {name: _distribution(package, axis) for name, axis in search.space.items()}
    if (first := search.draw(0)) is not None:
        study.enqueue_trial(dict(first))
    points: list[Pairs] = []
    spent, repeats = 0.0, 0
    while repeats < REPEATS:
        trial = study.ask(axes)
        point = tuple((name, _rounded(axis, trial.params[name])) for name, axis in search.space.items())
        new = point not in points and search.valid(point)
        repeats = 0 if new else repeats + 1
        if new:
            spent += search.price(point, search.rounds, known)
            if spent > search.budget:
                break
            points.append(point)
            wanted = missing(search.trials(point, search.rounds), known)
            if wanted:
                return points, wanted
        value = mean_score(known, search.trials(point, search.rounds)) if point in points else -math.inf
        if value > -math.inf:
            study.tell(trial, value)
        else:  # Optuna ranks a pruned trial below all that have a score
            study.tell(trial, state=package.trial.TrialState.PRUNED)
    return points, []


def _distribution(package: Any, axis: Axis) -> Any:
    kinds = package.distributions
    if isinstance(axis, Values):
        return kinds.CategoricalDistribution(axis.values)
    if axis.whole:
        return kinds.IntDistribution(int(axis.low), int(axis.high), log=axis.log)
    return kinds.FloatDistribution(axis.low, axis.high, log=axis.log)


def _rounded(axis: Axis, value: Any) -> Any:
    if isinstance(axis, Values) or axis.whole:
        return value
    return min(max(float(f"{value:.3g}"), axis.low), axis.high)


def further_seeds(search: Search, known: Known, points: list[Pairs]) -> tuple[dict[Pairs, list[Trial]], list[Trial]]:
    """Spend the rest of the budget on the leaders, best first: one more seed each per turn, as long as it lasts.

    Return all whole trials of every point, and those of them that are missing.
    """
    asked = {point: search.trials(point, search.rounds) for point in points}
    longest = {(trial.point, trial.seed): trial for trial in sorted(known, key=lambda trial: trial.rounds)}
    spent = sum(known[trial].gradients for trial in longest.values())
    for turn in count():
        full = {point: trials for point, trials in asked.items() if len(trials) == len(search.seeds) + turn}
        leaders = ranked({point: mean_score(known, trials) for point, trials in full.items()})
        wanted: list[Trial] = []
        for point in leaders:
            trial = Trial(point, search.further(turn), search.rounds)
            if trial not in known:
                spent += search.cost(trial)
                if spent > search.budget:
                    return asked, wanted
                wanted.append(trial)
            asked[point] = [*asked[point], trial]
        if wanted or not leaders:
            break
    return asked, wanted


def choose(label: str, known: Known, asked: Mapping[Pairs, list[Trial]]) -> Pairs:
    """Return the best of the points that were tried with the most seeds; of equal ones the earlier."""
    most = max(map(len, asked.values()), default=0)
    best = ranked({point: mean_score(known, trials) for point, trials in asked.items() if len(trials) == most})
    if not best:
        raise UserError(
            f"tune: every point of {label} that was left diverged; give it smaller rates, --space lr=0.001..0.1:log"
        )
    return best[0]


def propose(name: str, search: Search, known: Known) -> tuple[dict[Pairs, list[Trial]], list[Trial]]:
    """Return what a strategy, and after it the further seeds of the leaders, need next.

    The first are the whole trials of every point that may be chosen, complete once the search is done; the second are
    the missing trials.
    """
    points, wanted = STRATEGIES[name](search, known)
    return ({}, wanted) if wanted else further_seeds(search, known, points)


STRATEGIES: dict[str, Callable[[Search, Known], tuple[list[Pairs], list[Trial]]]] = {
    "random": random,
    "halving": halving,
    "optuna": optuna,
}
