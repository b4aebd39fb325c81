"""Optuna's tree-structured Parzen estimator as a strategy; optuna is imported when it is asked for."""

from __future__ import annotations

from typing import Any

from ..report.trackers import need
from .space import Axis, Point, Values
from .strategies import REPEATS, Known, Search, Trial, missing, score

BEGIN = 10
"""Points at random before the estimator has a say."""


def suggest(search: Search, known: Known) -> tuple[list[Point], list[Trial]]:
    """One point at a time, told what the points before it came to. The study is made anew from what is known, so that
    one that was killed goes on alike."""
    optuna = need("optuna", "'fedspeed[optuna]'")
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    sampler = optuna.samplers.TPESampler(seed=search.sampling, n_startup_trials=BEGIN)
    study = optuna.create_study(direction="maximize", sampler=sampler)
    axes = {name: _distribution(optuna, axis) for name, axis in search.space.items()}
    first = search.draw(0)
    if first is not None:
        study.enqueue_trial(dict(first))
    points: list[Point] = []
    spent, repeats = 0.0, 0
    while repeats < REPEATS:
        trial = study.ask(axes)
        point = tuple((name, _rounded(search.space[name], value)) for name, value in trial.params.items())
        point = tuple((name, dict(point)[name]) for name in search.space)
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
        value = score(search, known, point) if point in points else float("-inf")
        if value > float("-inf"):
            study.tell(trial, value)
        else:  # counts as worse than all that have a score
            study.tell(trial, state=optuna.trial.TrialState.PRUNED)
    return points, []


def _distribution(optuna: Any, axis: Axis) -> Any:
    kinds = optuna.distributions
    if isinstance(axis, Values):
        return kinds.CategoricalDistribution(axis.values)
    if axis.whole:
        return kinds.IntDistribution(int(axis.low), int(axis.high), log=axis.log)
    return kinds.FloatDistribution(axis.low, axis.high, log=axis.log)


def _rounded(axis: Axis, value: Any) -> Any:
    if isinstance(axis, Values) or axis.whole:
        return value
    return min(max(float(f"{value:.3g}"), axis.low), axis.high)
