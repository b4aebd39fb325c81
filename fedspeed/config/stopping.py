"""Rules that stop a run before its last round: at a score, without improvement, or when its time is used up.

A rule decides whether there is a next round and changes no bit of a round. Its decision follows from the records alone,
so a run that is resumed or verified stops in the same round; with the rule changed or dropped it continues. A rule that
is added when a run is resumed sees the earlier rounds too (patience counts them), and decides from the last one on.
"""

from __future__ import annotations

import dataclasses
import math
import re
import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from ..errors import UserError, unknown
from ..record import MOST, Record, is_number
from ..utils.checked_fields import number, parse_pairs

if TYPE_CHECKING:
    from .plan import Plan

RULES = ("stop_at", "patience", "min_delta", "max_time")
"""The fields of a plan that are rules; they may be changed when a run is resumed."""
SCORES = {
    "accuracy": "test_accuracy",
    "loss": "test_loss",
    "validation_accuracy": "validation_accuracy",
    "validation_loss": "validation_loss",
    "train_loss": "train_loss",
}
"""The scores that `stop_at` may name, and their fields of a record."""
CHOSEN = ("validation_accuracy", "accuracy", "validation_loss", "loss")
"""The scores for `patience`: the first of these that a record has is used."""
UNITS = {"d": 86400, "h": 3600, "min": 60, "m": 60, "s": 1}
TIME = re.compile(r"(?:([0-9]+(?:\.[0-9]+)?)(d|h|min|m|s))+")
P = TypeVar("P", bound="Plan")


class Stop(NamedTuple):
    """The rule that stopped a run, as in its plan, the round, and the reason."""

    by: str
    rule: str
    round: int
    why: str

    @property
    def told(self) -> dict[str, Any]:
        """Return the table of a summary; the reason is in the summary's status."""
        return {"by": self.by, "rule": self.rule, "round": self.round}


def goal_text(given: str) -> str:
    """Return `stop_at` in its one form, `accuracy=0.8` or `accuracy=0.8,mean=5`; "" for none.

    Example:
        >>> goal_text("test_accuracy >= 0.80"), goal_text("accuracy=0.8, mean=5"), goal_text("none")
        ('accuracy=0.8', 'accuracy=0.8,mean=5', '')
    """
    if given.strip() in ("", "none"):
        return ""
    found = re.fullmatch(r"\s*(\w+)\s*(=|==|>=|<=)\s*([^\s=<>,]+)\s*(?:,\s*mean\s*=\s*([1-9][0-9]{0,5}))?\s*", given)
    if not found:
        raise UserError(
            f"stop_at: expected a score and its goal such as accuracy=0.8 or loss=0.3 (accuracy=0.8,mean=5: the mean "
            f"of five scores), got {given!r}"
        )
    name, sign, given_goal, of = found.groups()
    name = name.removeprefix("test_")
    if name not in SCORES:
        raise unknown("score of stop_at", name, SCORES)
    if sign == ("<=" if up(name) else ">="):
        better = f"{name}{'>=' if up(name) else '<='}{given_goal}"
        raise UserError(f"stop_at: expected {better}, the better side, got {given!r}")
    goal = number(given_goal)
    if up(name) and not 0 < goal <= 1:
        percent = given_goal.removesuffix("%")
        likely = re.fullmatch(r"[0-9]{1,3}(\.[0-9]{1,9})?", percent) and 0 < float(percent) <= 100
        hint = f"; {float(percent) / 100:g} is {percent}%" if likely else ""
        raise UserError(f"stop_at: expected {name} as a share in (0, 1], got {given_goal}{hint}")
    if not abs(goal) < MOST:
        raise UserError(f"stop_at: expected a number as the goal of {name} such as 0.3, got {given_goal!r}")
    return f"{name}={goal!r}" + (f",mean={int(of)}" if of and int(of) > 1 else "")


def up(score: str) -> bool:
    """Return whether a higher score is better: of accuracies, not of losses."""
    return score.endswith("accuracy")


def goal_accuracy(goal: str) -> list[float]:
    """Return the accuracy at which runs stop, for tables of its cost; an empty list for other scores.

    Example:
        >>> goal_accuracy("accuracy=0.8,mean=5"), goal_accuracy("loss=0.3"), goal_accuracy("")
        ([0.8], [], [])
    """
    try:
        return [float(value) for name, value in parse_pairs(goal) if name == "accuracy"]
    except ValueError:  # a config that was edited by hand
        return []


def time_text(given: str) -> str:
    """Return `max_time` in its one form, `1h30min`; "" for none.

    Example:
        >>> time_text("90 min"), time_text("1.5h"), time_text("2d"), time_text("45s"), time_text("none")
        ('1h30min', '1h30min', '48h', '45s', '')
    """
    if given.strip() in ("", "none"):
        return ""
    text = given.replace(" ", "")
    left = seconds(text) if TIME.fullmatch(text) else 0.0
    if not 0 < left < 1e9:
        also = f"; {given.strip()} seconds are {given.strip()}s" if given.strip().isdecimal() else ""
        raise UserError(f"max_time: expected a time such as 2h, 90min, 1h30min or 45s, got {given!r}{also}")
    hours, left = divmod(left, 3600)
    minutes, left = divmod(left, 60)
    parts = ((f"{hours:.0f}", "h"), (f"{minutes:.0f}", "min"), (f"{left:.6g}", "s"))
    return "".join(count + unit for count, unit in parts if count != "0")


def seconds(text: str) -> float:
    """Return a time such as `1h30min` in seconds."""
    return math.fsum(float(count) * UNITS[unit] for count, unit in re.findall(r"([0-9.]+)(d|h|min|m|s)", text))


def require_rules(plan: Plan) -> None:
    """Raise for rules that can never stop a run."""
    if plan.min_delta and not plan.patience:
        raise UserError(f"min_delta: {plan.min_delta:g} expects a patience too, found none; add one, --patience 10")
    scored = -(-plan.rounds // plan.eval_every)
    if plan.patience >= scored:
        every = f" (eval_every is {plan.eval_every})" if plan.eval_every > 1 else ""
        raise UserError(
            f"patience: expected less than the {scored} scored rounds of the run{every}, got {plan.patience}, which "
            f"would never stop it; lower it, or raise --rounds"
        )


def require_scores(plan: Plan, test: bool, validation: bool, classes: bool) -> None:
    """Raise for a rule about a score that the data do not give, for lack of a set or of `classes`."""
    name = plan.stop_at.partition("=")[0]
    if name.startswith("validation") and not validation:
        raise UserError(f"stop_at: {name} expects a validation set, found none; add one, --validation 0.1")
    if name in ("accuracy", "loss") and not test:
        raise UserError(f"stop_at: {name} expects a test set, found none; name another score, train_loss=0.1")
    if up(name) and not classes:
        raise UserError(f"stop_at: {name} expects data with classes, found numbers to predict; name a loss, loss=0.1")
    if plan.patience and not (test or validation):
        raise UserError("patience: expected a test or validation set to score, found neither; leave it out")


class Stopping:
    """The rules of a plan while a run lasts; they read every record."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        (self.goal, target), *mean = parse_pairs(plan.stop_at) or [("", "0")]
        self.target, self.mean_of = float(target), int(dict(mean).get("mean", 1))
        self.budget = seconds(plan.max_time)
        self.after = 0  # the rounds that a fork took over from its origin: no rule ends it there
        self.restart_from([])

    def restart_from(self, records: Iterable[Record]) -> Stop | None:
        """Start again after these rounds; return the rule that the last of them meets, if one does."""
        self.fired: Stop | None = None
        self.score = ""
        self.best = (0, math.nan)  # the round, and its score
        self.stale = 0  # scored rounds since then
        self.used = 0.0
        self.scores: list[float] = []  # the last `mean_of` values of the goal's score
        self.begin()
        for record in records:
            self.update(record)
        return self.fired

    @property
    def status(self) -> str:
        """Return `stopped: ...` with the reason; "" if no rule has stopped the run."""
        return f"stopped: {self.fired.why}" if self.fired and self.fired.round > self.after else ""

    def begin(self) -> None:
        """Start counting time: rounds begin or continue now."""
        self.before, self.since = self.used, time.perf_counter()

    def wall_seconds(self) -> float | None:
        """Return the seconds used so far, up to now; None without a time budget."""
        return self.before + time.perf_counter() - self.since if self.budget else None

    def update(self, record: Record) -> None:
        """Apply the rules to the record of a finished round."""
        spent = self.used + record.seconds + record.eval_seconds
        self.used = spent if record.wall_seconds is None else record.wall_seconds
        plan = self.plan.config_at(record.round - 1) or self.plan
        t, goal = record.round, self.target
        due = t % plan.eval_every == 0 or t == plan.rounds
        stale = self._count_stale(record) if self.plan.patience and due else ""
        self.fired = None  # only the rules of the last round decide
        value = self._add_score(record)
        if value is not None and (value >= goal if up(self.goal) else value <= goal):
            what = self.goal if self.mean_of == 1 else f"mean of {self.mean_of} scores of {self.goal}"
            why = f"{what} {value:.6g} {'>=' if up(self.goal) else '<='} {goal:g} in round {t}"
            self.fired = Stop("stop_at", self.plan.stop_at, t, why)
        elif stale:
            self.fired = Stop("patience", rules(self.plan)["patience"], t, f"{stale}, in round {t}")
        elif self.budget and self.used >= self.budget:
            self.fired = Stop("max_time", self.plan.max_time, t, f"{self.plan.max_time} used up in round {t}")

    def _add_score(self, record: Record) -> float | None:
        """Add the goal's score of a round; return the mean of the last `mean_of`, None if there is none."""
        value = _value(record, self.goal) if self.goal else None
        if value is None:
            return None
        self.scores = [*self.scores, value][-self.mean_of :]
        return math.fsum(self.scores) / self.mean_of if len(self.scores) == self.mean_of else None

    def _count_stale(self, record: Record) -> str:
        """Update the best score and the rounds without a better one; return why patience stops the run, or ""."""
        self.score = self.score or next((name for name in CHOSEN if _value(record, name) is not None), "")
        value = _value(record, self.score) if self.score else None
        when, best = self.best
        sign = 1 if up(self.score) else -1
        if value is not None and not sign * (value - best) <= self.plan.min_delta:  # a first one is better than NaN
            self.best, self.stale = (record.round, value), 0
            return ""
        self.stale += bool(self.score)
        if self.stale < self.plan.patience:
            return ""
        by = f" by more than {self.plan.min_delta:g}" if self.plan.min_delta else ""
        return f"{self.score} no better{by} than {best:.6g} of round {when} for {self.stale} scored rounds"


def _value(record: Record, score: str) -> float | None:
    """Return a score of a record as in its line of `rounds.jsonl`: None if there is none or it is not finite."""
    value = getattr(record, SCORES[score])
    return value if value is not None and -MOST < value < MOST else None


def rules(plan: Plan) -> dict[str, str]:
    """Return the rules of a plan that can stop it, each as in a summary."""
    patience = f"{plan.patience} by {plan.min_delta!r}" if plan.patience else ""
    found = {"stop_at": plan.stop_at, "patience": patience, "max_time": plan.max_time}
    return {name: rule for name, rule in found.items() if rule}


def with_rules(plan: P, given: Mapping[str, Any]) -> P:
    """Return a plan with other rules; those given as None stay, `none` and 0 drop a rule."""
    for name in given:
        if name not in RULES:
            raise unknown("keyword of resume", name, RULES)
    new = {name: value for name, value in given.items() if value is not None}
    if new.get("patience") == 0:
        new.setdefault("min_delta", 0.0)
    return dataclasses.replace(plan, **new) if new else plan


def as_targets(targets: Any) -> tuple[float, ...]:
    """Return accuracies; a number stands for a list of it.

    Example:
        >>> as_targets(0.8), as_targets([0.8, 0.9])
        ((0.8,), (0.8, 0.9))
    """
    if isinstance(targets, str) or not isinstance(targets, int | float | Iterable):
        raise UserError(f"targets: expected a list of accuracies, [0.8], found {targets!r}; give one")
    found = (targets,) if isinstance(targets, int | float) else tuple(targets)
    if bad := [a for a in found if not is_number(a) or not 0 < a < 1]:
        raise UserError(f"targets: expected accuracies in (0, 1), found {bad[0]!r}; 0.85 is 85%")
    return tuple(map(float, found))
