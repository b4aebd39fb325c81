"""Diagnosis of a run from the signs in its records: findings, since when, their usual meaning, what to try.

A finding follows from `rounds.jsonl` alone, so a resumed run and a later reader find the same. Nothing here needs
torch: `server/health.py` measures. `RULES` says when a sign counts, `MEANING` and `ADVICE` explain each finding.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from ..config.damping import warning
from ..config.plan import Plan
from ..record import Record
from ..server.observers import Observer

if TYPE_CHECKING:
    from ..server.simulation import Simulation

IN_ROW = 3
"""How often in a row a sign must be seen to count."""
GUESSES, LONG = 5, 10
"""A slow start guesses too: so many evaluations in a row count, and for the accuracy they must span so many rounds."""
ABOVE, SAME, GROWTH = 1.05, 0.005, 2.0
"""The factor of a loss above guessing, the part within which a loss is the same as at first, the factor of a norm that
grows."""
UNTRAINED = ("untrained ", "still ")
"""The beginnings of signs of untrained weights; the second is of older versions, which did not ask for a gradient."""
CAUSES = ("constant outputs", "dead layer")
FOLLOWS = ("loss above guessing", "chance", "standing still")
"""Findings that are left out once one of the causes is known."""

MEANING = {
    "constant outputs": "The model gives every sample the same scores. Large first steps have driven the features to "
    "one common value (a start where the loss is strongly curved, a high rate, a large rho), and hardly any gradient "
    "leads back. resnet18_gn from its usual start does this; one whose residual branches start at zero does not.",
    "dead layer": "A layer gives zeros for every sample: its units are switched off, by a huge step or by a negative "
    "bias before a ReLU. What lies before it gets no gradient, so no later rate brings it back; the start or the "
    "first steps must be other ones.",
    "untrained weights": "Weights are where they started but for weight decay, and the loss, which needs them, has no "
    "gradient there: a layer behind them is dead, or the forward pass cuts them off (detach, no_grad).",
    "loss above guessing": "Equal odds for all classes would lose less. Local steps overshoot (the rate, or their "
    "number, is too large for this model), or clients go so far apart that their mean is worse than each of them.",
    "chance": "The accuracy is that of always giving the same answer. Training is on a plateau at its start, or what "
    "was learned has been lost again.",
    "standing still": "The model is where it started: steps are far too small to be seen, or no gradient arrives.",
    "growing state": "A vector that server or clients carry from round to round, a correction for example, grows "
    "instead of settling. Corrections that are seldom refreshed (few active clients), or that come from local "
    "steps that overshoot, feed themselves; numbers overflow in the end.",
    "diverged": "Numbers became NaN or Inf, so the run was stopped; nothing of that round was kept.",
}
ADVICE = {
    "constant outputs": ("start", "warmup", "clip", "lr", "rho", "server"),
    "dead layer": ("lr", "warmup", "clip", "he", "start"),
    "untrained weights": ("lr", "warmup", "clip", "he", "start"),
    "loss above guessing": ("start", "warmup", "clip", "lr", "steps", "server"),
    "chance": ("start", "warmup", "lr", "rho", "clip"),
    "standing still": ("higher lr", "start"),
    "growing state": ("lr", "steps", "clip", "active", "server", "warmup"),
    "diverged": ("lr", "clip", "steps", "warmup", "server"),
}
"""Changes to try, in order; keys of `CHANGES`."""


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong with a run."""

    name: str  # a key of `MEANING`
    since: int  # the round in which it was noticed
    seen: str  # the measurement in that round, in words
    about: str = ""  # the layer or the vector that it concerns, if any
    values: tuple[tuple[int, float | None], ...] = ()  # (round, number) in every round with its sign

    @property
    def title(self) -> str:
        """The name, with the layer or vector that it concerns."""
        return f"{self.name}: {self.about}" if self.about else self.name


def diagnose(records: Sequence[Record]) -> list[Finding]:
    """Return the findings of a run, each once, in the order in which they were noticed.

    Example:
        >>> diagnose([])
        []
    """
    if not any(record.signs for record in records):
        return []
    found: list[tuple[Finding, str]] = []
    noticed = [(one, rule.sign) for rule in RULES for one in _apply(rule, records)]
    for one, sign in sorted(noticed, key=lambda pair: pair[0].since):
        if all(one.name != other.name and sign != its for other, its in found):  # One per sign, one per name.
            found.append((one, sign))
    cause = min((one.since for one, _ in found if one.name in CAUSES), default=None)
    return [one for one, _ in found if one.name not in FOLLOWS or cause is None or one.since < cause]


def line(one: Finding, config: dict[str, Any], run: str = "RUN") -> str:
    """Return a finding in one line, with the first two changes to try."""
    first = " or ".join(advice.option for advice in advise(one.name, config)[:2])
    return f"round {one.since}: {one.seen}; try {first or 'another model or start'}; `fedspeed explain {run}` says more"


class WarnObserver(Observer):
    """An observer that reports each finding once, in the round in which it is noticed.

    Before round 1 it reports a running mean of the server that is far from damped.

    Args:
        tell: called with the line; by default it is a warning.
    """

    def __init__(self, tell: Callable[[str], object] | None = None) -> None:
        self.tell = tell or (lambda text: warnings.warn(text, stacklevel=2))
        self.records: list[Record] = []

    def started(self, run: Simulation, config: dict[str, Any]) -> None:
        """Take over the records of earlier rounds."""
        self.config = config
        self.records = list(run.recorder.records if run.recorder else self.records)[: run.t]
        if not run.t and (text := warning(run.method, run.plan, run.data.sizes.tolist())):
            self.tell(text)

    def round(self, record: Record, run: Simulation) -> None:
        """Report the findings of this round."""
        self.records.append(record)
        for one in diagnose(self.records) if record.signs else ():
            if one.since == record.round:
                self.tell(line(one, self.config, str(run.out or "RUN")))


# --- when a sign counts ---


class Streak(NamedTuple):
    """Records in a row that have a sign, and the first record of the run that could have had it."""

    sign: str
    about: str  # the layer or the vector that the sign names
    row: list[Record]
    first: Record

    @property
    def last(self) -> Record:
        """The newest record."""
        return self.row[-1]

    def size(self, i: int) -> float:
        """Return the sign's number in the i-th record; infinity where it is beyond what can be written down."""
        value = self.row[i].signs[self.sign]
        return float("inf") if value is None else value

    @property
    def stands(self) -> bool:
        """Whether the loss never left where it was; one that swings may pass there."""
        return all(_same(_loss(self.first), _loss(record)) for record in self.row)


class Rule(NamedTuple):
    """A rule that makes a sign a finding."""

    name: str  # of the finding; of several findings of one name, or of one sign, the earliest is kept
    sign: str  # its name; if it ends with a space, how it begins: the layer or the vector follows
    enough: Callable[[Streak], bool]  # whether a streak is long enough to count
    seen: Callable[[Streak], str]  # the measurement in words
    value: Callable[[Record], float | None] | None = None  # the number of a record to show; by default the sign's own
    every: bool = False  # look at all rounds; otherwise at those that were evaluated, and others end no streak
    counts: Callable[[Record], bool] = lambda record: True  # whether a record that has the sign belongs to a streak
    unless: Callable[[Streak], bool] = lambda streak: False  # whether a streak that is long enough is not a finding


def _apply(rule: Rule, records: Sequence[Record]) -> Iterator[Finding]:
    """Yield the findings of a rule, one per sign of its kind that counts."""
    some = records if rule.every else [r for r in records if _loss(r) is not None or _accuracy(r) is not None]
    names = dict.fromkeys(sign for record in some for sign in record.signs if sign.startswith(rule.sign))
    for sign in names if rule.sign.endswith(" ") else [rule.sign]:
        streak = _streak(rule, sign, some)
        if streak and not rule.unless(streak):
            having = (r for r in some if sign in r.signs and rule.counts(r))
            values = tuple((r.round, rule.value(r) if rule.value else r.signs[sign]) for r in having)
            yield Finding(rule.name, streak.last.round, rule.seen(streak), streak.about, values)


def _streak(rule: Rule, sign: str, records: Sequence[Record]) -> Streak | None:
    """Return the first records in a row that have a sign and are enough of them; None if there are none."""
    row: list[Record] = []
    for record in records:
        if sign not in record.signs or not rule.counts(record):
            row = []
            continue
        row.append(record)
        streak = Streak(sign, sign.removeprefix(rule.sign), row, records[0])
        if rule.enough(streak):
            return streak
    return None


def _loss(record: Record) -> float | None:
    return record.validation_loss if record.test_loss is None else record.test_loss


def _accuracy(record: Record) -> float | None:
    return record.validation_accuracy if record.test_accuracy is None else record.test_accuracy


def _same(first: float | None, now: float | None) -> bool:
    """Return whether a loss is the same as at first."""
    return first is not None and now is not None and abs(now - first) <= SAME * abs(first)


def _falls(row: Sequence[Record]) -> bool:
    """Return whether the loss falls every time: a slow start is not a finding."""
    losses = [_loss(record) for record in row]
    return all(a is not None and b is not None and b < a for a, b in pairwise(losses))


def _text(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4g}"


def _loss_rule(what: str, loss: Callable[[Record], float | None], every: bool) -> Rule:
    """Return the rule for a loss above that of guessing, on the test set or at the clients, unless it never moved."""
    sign = "loss of guessing"

    def counts(record: Record) -> bool:
        value = loss(record)
        return value is None or value > ABOVE * record.signs[sign]

    def seen(streak: Streak) -> str:
        return f"the {what} loss is {_text(loss(streak.last))} and that of guessing {streak.size(-1):.4g}"

    return Rule(
        "loss above guessing", sign, lambda s: len(s.row) >= GUESSES, seen, loss, every, counts,
        unless=lambda s: _same(loss(s.first), loss(s.last)),
    )  # fmt: skip


def _guesses_long(streak: Streak) -> bool:
    return len(streak.row) >= GUESSES and streak.last.round - streak.row[0].round >= LONG - 1


def _at_chance(streak: Streak) -> str:
    return f"the accuracy, {_accuracy(streak.last) or 0:.1%}, is that of guessing since round {streak.row[0].round}"


def _stands_still(streak: Streak) -> str:
    loss = f"the test loss, {_text(_loss(streak.last))}, is what it was in round {streak.first.round}"
    return f"{_at_chance(streak)}, and {loss}"


def _never_trained(streak: Streak) -> str:
    kind = streak.sign.removesuffix(streak.about)
    others = sum(sign.startswith(kind) for sign in streak.last.signs) - 1
    return f"weights {streak.about}{f' and {others} more' * bool(others)} were never trained, only scaled"


def _grew(streak: Streak) -> str:
    since = f"from {streak.size(0):.3g} in round {streak.row[0].round} to {streak.size(-1):.3g}"
    return f"the norm of {streak.about} has grown {since}"


RULES = (
    Rule(
        "constant outputs",
        "spread of outputs",
        lambda s: len(s.row) >= IN_ROW and s.size(-1) <= s.size(-3),
        lambda s: f"outputs no longer depend on the input (their spread over samples is {s.size(-1):.2g})",
    ),
    _loss_rule("test", _loss, every=False),
    _loss_rule("clients' training", lambda record: record.train_loss, every=True),
    Rule("standing still", "accuracy of guessing", lambda s: _guesses_long(s) and s.stands, _stands_still, _accuracy),
    Rule(
        "chance",
        "accuracy of guessing",
        lambda s: _guesses_long(s) and not s.stands and not _falls(s.row[-GUESSES:]),
        _at_chance,
        _accuracy,
    ),
    Rule(
        "dead layer",
        "zeros from ",
        lambda s: len(s.row) >= IN_ROW,
        lambda s: f"layer {s.about} gives zeros for all of {s.size(-1):.0f} samples",
    ),
    *(Rule("untrained weights", kind, lambda s: True, _never_trained, every=True) for kind in UNTRAINED),
    Rule(
        "growing state",
        "norm ",
        lambda s: len(s.row) >= IN_ROW and s.size(-1) >= GROWTH * s.size(0),
        _grew,
        every=True,
    ),
)
"""All rules; of findings noticed in the same round, the order here is that in which they are reported."""


# --- what to try ---


class Advice(NamedTuple):
    """One thing to try: a key of the config, its value, and why."""

    key: str
    value: str
    why: str

    @property
    def option(self) -> str:
        """The change as an option of the command line.

        Example:
            >>> Advice("model.init", "zero-residual", "").option, Advice("local_steps", "5", "").option
            ('--set model.init=zero-residual', '--local-steps 5')
        """
        return f"--set {self.key}={self.value}" if "." in self.key else f"--{self.key.replace('_', '-')} {self.value}"


def advise(name: str, config: dict[str, Any]) -> list[Advice]:
    """Return the changes to try for a finding, in order: those that a `config.toml` can have and does not have yet."""
    keys = ADVICE[name]
    if _number(config.get("lr")) > 10 * Plan.lr:  # a rate far above the usual one is the first suspect
        keys = tuple(sorted(keys, key=lambda key: key != "lr"))
    made = (CHANGES[key](config) for key in keys)
    return [advice for advice in made if advice is not None]


def _init(model: str, init: str, why: str) -> Change:
    """Return the change to another start of a model that has one."""

    def change(config: dict[str, Any]) -> Advice | None:
        table = _table(config, "model")
        return Advice("model.init", init, why) if table["name"] == model and table.get("init") != init else None

    return change


def _scaled(key: str, scale: Callable[[float], float], why: str) -> Change:
    """Return the change of a number of the config, or of its method."""

    def change(config: dict[str, Any]) -> Advice | None:
        table, _, field = key.rpartition(".")
        now = _number((_table(config, table) if table else config).get(field))
        return Advice(key, f"{float(f'{scale(now):.2g}'):g}", f"{why}; now {now:g}") if now else None

    return change


def _warmup(config: dict[str, Any]) -> Advice | None:
    rounds = min(10, int(_number(config.get("rounds")) or 0) // 4)  # one longer than the run would be refused
    if rounds < 2 or config.get("warmup"):
        return None
    rho = f",rho={rounds}" * bool(_number(_table(config, "method").get("rho")))
    return Advice("warmup", f"lr={rounds}{rho}", "small first steps, while the loss is most curved")


def _clip(config: dict[str, Any]) -> Advice | None:
    now = _number(config.get("clip"))
    value = 10.0 if not now or now > 10 else now / 10
    return Advice("clip", f"{value:g}", f"no gradient is longer than this; now {f'{now:g}' if now else 'not clipped'}")


def _steps(config: dict[str, Any]) -> Advice | None:
    for key in ("local_steps", "local_epochs"):
        now = int(_number(config.get(key)))
        if now:
            less = Advice(key, str(max(1, now // 5)), f"clients stay closer to the model they were sent; now {now}")
            return less if now > 1 else None
    return None


def _active(config: dict[str, Any]) -> Advice | None:
    now, clients = int(_number(config.get("active"))), int(_number(config.get("clients")))
    more = min(clients, 2 * now)
    why = f"what clients keep is refreshed more often; now {now} of {clients}"
    return Advice("active", str(more), why) if more > now > 0 else None


def _server(config: dict[str, Any]) -> Advice | None:
    method = _table(config, "method")
    if method["name"] == "fedspeed" and method.get("server") == "active":
        return Advice("method.server", "all", "the mean of all corrections in place of a random part of them")
    return _scaled("method.eta_g", lambda now: now / 2, "smaller steps of the server")(config)


Change = Callable[[dict[str, Any]], Advice | None]
CHANGES: dict[str, Change] = {
    "start": _init(
        "resnet18_gn", "zero-residual", "residual branches start at zero, so that a block starts as its shortcut"
    ),
    "he": _init("mlp", "he", "biases start at zero, weights as wide as ReLU needs"),
    "warmup": _warmup,
    "clip": _clip,
    "lr": _scaled("lr", lambda now: 0.2 * now if now <= 10 * Plan.lr else Plan.lr, "smaller local steps"),
    "higher lr": _scaled("lr", lambda now: max(10 * now, Plan.lr / 10), "larger local steps"),
    "rho": _scaled("method.rho", lambda now: now / 10, "a shorter ascent step"),
    "steps": _steps,
    "active": _active,
    "server": _server,
}


def _table(config: dict[str, Any], key: str) -> dict[str, Any]:
    """Return a table of a config, which may be written by hand, so any value may be in its place."""
    found = config.get(key)
    return {"name": "", **found} if isinstance(found, dict) else {"name": found}


def _number(value: Any) -> float:
    """Return a number that can be computed with, 0 for anything else."""
    return float(value) if type(value) in (int, float) and 0 < value < 1e300 else 0.0
