"""What the signs in a run's records come to: which illness, and since when.

It follows from `rounds.jsonl` alone, so a run that was resumed, and whoever reads it later, finds the same. Nothing
here needs torch: `symptoms.py` measures, `cures.py` says what an illness means and what to try.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from .cures import cures
from .damping import warning
from .observe import Observer
from .record import Record

if TYPE_CHECKING:
    from .server import Simulation

IN_ROW = 3
"""How often in a row a sign must be seen to count."""
GUESSES, LONG = 5, 10
"""Of guessing, which a slow start has too: evaluations in a row, and for the accuracy, rounds that they must span."""

ABOVE, SAME, GROWTH = 1.05, 0.005, 2.0
"""A loss is above guessing by this factor; the same as at first within this part; a norm that doubles grows."""
UNTRAINED = ("untrained ", "still ")
"""How signs of untrained weights begin; the second is that of older versions, which did not ask for a gradient."""
CAUSES = ("constant outputs", "dead layer")
FOLLOWS = ("loss above guessing", "chance", "standing still")
"""What is not told once one of the causes is known."""


@dataclass(frozen=True)
class Illness:
    """What a run has.

    Args:
        name: a key of `cures.MEANS`.
        since: the round in which it was noticed.
        seen: what was measured then, in words.
        about: the layer or the vector, if it is of one.
        values: (round, number) wherever its sign was seen.
    """

    name: str
    since: int
    seen: str
    about: str = ""
    values: tuple[tuple[int, float | None], ...] = ()

    @property
    def title(self) -> str:
        """The name, with what it is of."""
        return f"{self.name}: {self.about}" if self.about else self.name


def illnesses(records: Sequence[Record]) -> list[Illness]:
    """What a run has, in the order in which it was noticed, each once.

    Example:
        >>> illnesses([])
        []
    """
    if not any(record.signs for record in records):
        return []
    scored = [record for record in records if _loss(record) is not None or _accuracy(record) is not None]
    found = [*_constant(scored), *_loss_above(records, scored), *_chance(scored), *_layers(records, scored)]
    found = sorted([*found, *_growing(records)], key=lambda one: one.since)
    cause = min((one.since for one in found if one.name in CAUSES), default=None)
    return [one for one in found if one.name not in FOLLOWS or cause is None or one.since < cause]


def line(one: Illness, config: dict[str, Any], run: str = "RUN") -> str:
    """An illness in one line, with what to try first."""
    first = " or ".join(cure.option for cure in cures(one.name, config)[:2])
    return f"round {one.since}: {one.seen}; try {first or 'another model or start'}; `fedspeed explain {run}` says more"


class Doctor(Observer):
    """Tells each illness of a run once, in the round in which it is noticed; before round 1, whether the server's
    running mean is far from damped.

    Args:
        tell: called with the line; by default it is a warning.
    """

    def __init__(self, tell: Callable[[str], object] | None = None) -> None:
        self.tell = tell or (lambda text: warnings.warn(text, stacklevel=2))
        self.records: list[Record] = []

    def started(self, run: Simulation, config: dict[str, Any]) -> None:
        """What was before."""
        self.config = config
        self.records = list(run.recorder.records if run.recorder else self.records)[: run.t]
        if not run.t and (text := warning(run.method, run.plan, run.data.sizes.tolist())):
            self.tell(text)

    def round(self, record: Record, run: Simulation) -> None:
        """What is new."""
        self.records.append(record)
        for one in illnesses(self.records) if record.signs else ():
            if one.since == record.round:
                self.tell(line(one, self.config, str(run.out or "RUN")))


# --- which illness ---


def _constant(scored: Sequence[Record]) -> Iterator[Illness]:
    sign = "spread of outputs"
    row = _streak(scored, _has(sign), lambda row: len(row) >= IN_ROW and _size(row[-1], sign) <= _size(row[-3], sign))
    if row:
        seen = f"outputs no longer depend on the input (their spread over samples is {_size(row[-1], sign):.2g})"
        yield Illness("constant outputs", row[-1].round, seen, values=_series(scored, sign))


def _loss_above(records: Sequence[Record], scored: Sequence[Record]) -> Iterator[Illness]:
    """On the test set, or at the clients; the earlier of the two."""
    sign, found = "loss of guessing", []
    for what, some, loss in (("test", scored, _loss), ("clients' training", records, _train_loss)):

        def above(record: Record, loss: Callable[[Record], float | None] = loss) -> bool:
            value = loss(record)
            return sign in record.signs and (value is None or value > ABOVE * record.signs[sign])

        row = _streak(some, above, lambda row: len(row) >= GUESSES)
        if row and not _same(loss(some[0]), loss(row[-1])):
            seen = f"the {what} loss is {_text(loss(row[-1]))} and that of guessing {row[-1].signs[sign]:.4g}"
            values = tuple((r.round, loss(r)) for r in some if above(r))
            found.append(Illness("loss above guessing", row[-1].round, seen, values=values))
    yield from sorted(found, key=lambda one: one.since)[:1]


def _chance(scored: Sequence[Record]) -> Iterator[Illness]:
    sign = "accuracy of guessing"

    def enough(row: list[Record]) -> bool:
        long = len(row) >= GUESSES and row[-1].round - row[0].round >= LONG - 1
        return long and (_stands(scored[0], row) or not _falls(row[-GUESSES:]))

    row = _streak(scored, _has(sign), enough)
    if row:
        values = tuple((r.round, _accuracy(r)) for r in scored if sign in r.signs)
        seen = f"the accuracy, {_accuracy(row[-1]) or 0:.1%}, is that of guessing since round {row[0].round}"
        if _stands(scored[0], row):
            seen += f", and the test loss, {_text(_loss(row[-1]))}, is what it was in round {scored[0].round}"
            yield Illness("standing still", row[-1].round, seen, values=values)
        else:
            yield Illness("chance", row[-1].round, seen, values=values)


def _layers(records: Sequence[Record], scored: Sequence[Record]) -> Iterator[Illness]:
    """The first layer that gives zeros, and the first weights that were never trained."""
    for sign in _signs(scored, "zeros from "):
        row = _streak(scored, _has(sign), lambda row: len(row) >= IN_ROW)
        if row:
            about = sign.removeprefix("zeros from ")
            seen = f"layer {about} gives zeros for all of {_size(row[-1], sign):.0f} samples"
            yield Illness("dead layer", row[-1].round, seen, about, _series(scored, sign))
            break
    for kind in UNTRAINED:
        still = next((record for record in records if _signs([record], kind)), None)
        if still:
            names = [sign.removeprefix(kind) for sign in _signs([still], kind)]
            more = f" and {len(names) - 1} more" * (len(names) > 1)
            seen = f"weights {names[0]}{more} were never trained, only scaled"
            yield Illness("untrained weights", still.round, seen, names[0], _series(records, f"{kind}{names[0]}"))
            break


def _growing(records: Sequence[Record]) -> Iterator[Illness]:
    """The vector that was first seen to grow; others grow with it."""
    found = []
    for sign in _signs(records, "norm "):

        def grows(row: list[Record], sign: str = sign) -> bool:
            return len(row) >= IN_ROW and _size(row[-1], sign) >= GROWTH * _size(row[0], sign)

        row = _streak(records, _has(sign), grows)
        if row:
            about, first, last = sign.removeprefix("norm "), _size(row[0], sign), _size(row[-1], sign)
            seen = f"the norm of {about} has grown from {first:.3g} in round {row[0].round} to {last:.3g}"
            found.append(Illness("growing state", row[-1].round, seen, about, _series(records, sign)))
    yield from sorted(found, key=lambda one: one.since)[:1]


def _streak(
    records: Sequence[Record], has: Callable[[Record], bool], enough: Callable[[list[Record]], bool]
) -> list[Record]:
    """The first records in a row that have a sign and are enough of them; empty if there are none."""
    row: list[Record] = []
    for record in records:
        if has(record):
            row.append(record)
            if enough(row):
                return row
        else:
            row = []
    return []


def _has(sign: str) -> Callable[[Record], bool]:
    return lambda record: sign in record.signs


def _signs(records: Sequence[Record], kind: str) -> list[str]:
    """The signs of a kind that records have."""
    return list(dict.fromkeys(sign for record in records for sign in record.signs if sign.startswith(kind)))


def _series(records: Sequence[Record], sign: str) -> tuple[tuple[int, float | None], ...]:
    return tuple((record.round, record.signs[sign]) for record in records if sign in record.signs)


def _size(record: Record, sign: str) -> float:
    value = record.signs[sign]
    return float("inf") if value is None else value  # one beyond what is written down


def _loss(record: Record) -> float | None:
    return record.validation_loss if record.test_loss is None else record.test_loss


def _train_loss(record: Record) -> float | None:
    return record.train_loss


def _accuracy(record: Record) -> float | None:
    return record.validation_accuracy if record.test_accuracy is None else record.test_accuracy


def _same(first: float | None, now: float | None) -> bool:
    """Whether a loss is where it was."""
    return first is not None and now is not None and abs(now - first) <= SAME * abs(first)


def _stands(first: Record, row: Sequence[Record]) -> bool:
    """Whether the loss never left where it was; one that swings may pass there."""
    return all(_same(_loss(first), _loss(record)) for record in row)


def _falls(row: Sequence[Record]) -> bool:
    """Whether the loss is lower every time: a slow start, which gets there."""
    losses = [_loss(record) for record in row]
    return all(a is not None and b is not None and b < a for a, b in pairwise(losses))


def _text(value: float | None) -> str:
    return "beyond numbers" if value is None else f"{value:.4g}"
