"""`Record`: one round as a value, to and from JSON, and costs of rounds. Imports no torch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import cache
from typing import Any

TIMES = ("seconds", "eval_seconds", "checkpoint_seconds", "wall_seconds")
"""Keys of records and summaries that differ between two runs of the same config."""

PLACED = ("backend", "workers")
"""Keys of a summary that say where a run was computed, which changes no result."""

MOST = 1e300
"""The bound of numbers in records; larger ones, Inf and NaN are written as null."""

CLIENT_SCORES = ("client_test", "client_train")
"""Keys of records and summaries with the scores over clients, by the data of a client that were scored."""

TABLES = ("metrics", "signs", *CLIENT_SCORES)
"""Fields of a record that are tables of numbers; an empty one is left out of the file."""


@dataclass(frozen=True)
class Record:
    """One round, and a line of `rounds.jsonl`. The order of the fields is that of the keys in the file."""

    round: int  # 1 is the first
    cohort: list[int]
    lr: float
    train_loss: float  # mean over clients of the mean loss at the first oracle call of each local step
    test_loss: float | None  # of the new server model; None in a round that is not evaluated
    test_accuracy: float | None
    drift: float  # mean ||x_iK - x^t||^2
    update_norm: float  # ||x^{t+1} - x^t||
    bytes_down: int
    bytes_up: int
    grad_evals: float  # in minibatches
    dropped: list[int]  # active clients whose reply was not counted
    stragglers: list[int]  # counted clients that finished only some of their steps
    seconds: float  # without evaluation
    eval_seconds: float
    validation_loss: float | None = None  # as test_loss, on the validation set; None without one
    validation_accuracy: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)  # reported by the method and its clients
    # signs of trouble (server/health.py), none in a healthy round
    signs: dict[str, float] = field(default_factory=dict)
    virtual_seconds: float | None = None  # simulated, up to its end; None, and no lists below, without a network
    client_flops: list[int] = field(default_factory=list)  # of each counted client, in the order of the cohort
    client_bytes_up: list[int] = field(default_factory=list)
    # scores over all clients, each on its test part (server/client_metrics.py); none in a round that has no such
    client_test: dict[str, float] = field(default_factory=dict)
    client_train: dict[str, float] = field(default_factory=dict)  # the same on training data, for clients without tests
    wall_seconds: float | None = None  # real, up to its end, in all processes that ran it; None without a time budget
    client_losses: list[float | None] = field(default_factory=list)  # as client_flops, train_loss; for a user's sampler

    def to_dict(self) -> dict[str, Any]:
        """Return the record for JSON: a number beyond `MOST` becomes None; fields that a run lacks are left out."""
        plain: dict[str, Any] = vars(self.copy())
        if self.validation_loss is None and self.validation_accuracy is None:
            del plain["validation_loss"], plain["validation_accuracy"]
        if self.virtual_seconds is None:
            del plain["virtual_seconds"], plain["client_flops"], plain["client_bytes_up"]
        if self.wall_seconds is None:
            del plain["wall_seconds"]
        if not self.client_losses:
            del plain["client_losses"]
        tables = {key: {k: finite(v) for k, v in plain.pop(key).items()} for key in TABLES}
        return {k: finite(v) for k, v in plain.items()} | {key: table for key, table in tables.items() if table}

    def copy(self) -> Record:
        """Return a copy that shares no list or table with this record."""
        own: dict[str, Any] = {k: v.copy() for k, v in vars(self).items() if isinstance(v, list | dict)}
        return replace(self, **own)

    @classmethod
    def from_dict(cls, plain: dict[str, Any]) -> Record:
        """Return the record of a line of JSON; a TypeError names a field that is not of its type.

        Example:
            >>> Record.from_dict({"round": "1"})
            Traceback (most recent call last):
            TypeError: round is '1'
        """
        plain = {"dropped": [], "stragglers": [], **plain}  # the first version of format 1 did not write these two
        for name, fits, optional in _checks():
            if not (optional and name not in plain) and not fits(plain.get(name)):
                raise TypeError(f"{name} is {plain.get(name)!r}")
        return cls(**plain)


def rounds_digest(records: Iterable[Record]) -> str:
    """Return the digest of rounds without their times, which is equal for equal runs."""
    # Scores of clients on training data are computed from client_metrics.bin, and older versions did not write them.
    left_out = (*TIMES, "client_train")
    rounds = [{k: v for k, v in record.to_dict().items() if k not in left_out} for record in records]
    return hashlib.blake2b(json.dumps(rounds).encode(), digest_size=16).hexdigest()


def older(record: Record) -> Record:
    """Return a record without the norms of x and of the running mean, which earlier versions did not write.

    Example:
        >>> older(Record.from_dict({**dict.fromkeys(["round", "bytes_down", "bytes_up"], 1), "cohort": [], "lr": 0.1,
        ...     "train_loss": 1.0, "test_loss": None, "test_accuracy": None, "drift": 0.0, "update_norm": 0.0,
        ...     "grad_evals": 1.0, "seconds": 0.0, "eval_seconds": 0.0,
        ...     "metrics": {"x_norm": 1.0, "H_norm": 2.0, "own_norm": 3.0}})).metrics
        {'own_norm': 3.0}
    """
    names = list(record.metrics)
    if names[:1] != ["x_norm"]:
        return record
    dropped = {"x_norm", *(name for name in names[1:2] if name.endswith("_norm"))}
    return replace(record, metrics={name: value for name, value in record.metrics.items() if name not in dropped})


COSTS = {"bytes": ("bytes_down", "bytes_up"), "grad_evals": ("grad_evals",), "seconds": ("seconds",)}
"""The costs of rounds beside their number, each with the fields of a record that add up to it."""


def first_at(scores: Iterable[float | None], target: float) -> int | None:
    """Return the index of the first score that is at a target; None if no score is.

    Example:
        >>> first_at([None, 0.5, 0.9], 0.8), first_at([None, 0.5], 0.8)
        (2, None)
    """
    return next((i for i, score in enumerate(scores) if score is not None and score >= target), None)


def cost_to(
    rounds: Sequence[dict[str, Any]], target: float, costs: Iterable[str] = ("bytes",)
) -> dict[str, Any] | None:
    """Return what it cost to be tested at a target accuracy; None if the target was not reached.

    Args:
        rounds: records as JSON holds them.
        costs: names of `COSTS`. The round, and the simulated time where it is counted, come in any case.

    Example:
        >>> first = {"round": 1, "test_accuracy": 0.5, "bytes_down": 8, "bytes_up": 2}
        >>> cost_to([first, {**first, "round": 2, "test_accuracy": 0.9}], 0.8)
        {'round': 2, 'bytes': 20}
    """
    last = first_at((record.get("test_accuracy") for record in rounds), target)
    if last is None:
        return None
    spent = rounds[: last + 1]
    sums = {cost: sum(record[key] for record in spent for key in COSTS[cost]) for cost in costs}
    virtual = {key: spent[-1][key] for key in ("virtual_seconds",) if key in spent[-1]}
    return {"round": spent[-1]["round"], **sums, **virtual}


def planned_rounds(config: dict[str, Any], status: str, done: int) -> int:
    """Return the rounds that a run was given: the bound of a target that it never reached.

    A run that diverged early was given all rounds of its config; one that a rule stopped, those that it has.
    """
    rounds = None if status.startswith("stopped") else config.get("rounds")
    return int(done if rounds is None else rounds)


def finite(value: Any) -> Any:
    """Return a number as a record holds it: None beyond `MOST`."""
    return None if isinstance(value, float) and not -MOST < value < MOST else value


@cache
def _checks() -> list[tuple[str, Callable[[Any], bool], bool]]:
    """Return every field's name, the check of a value, and whether a line of JSON may leave the field out."""
    optional = {e.name for e in fields(Record) if e.default is not MISSING or e.default_factory is not MISSING}
    return [(entry.name, _check(str(entry.type), entry.name), entry.name in optional) for entry in fields(Record)]


def _check(kind: str, name: str) -> Callable[[Any], bool]:
    if kind.startswith("list[float"):
        return lambda value: isinstance(value, list) and all(a is None or is_number(a) for a in value)
    if kind.startswith("list"):
        return lambda value: isinstance(value, list) and all(type(a) is int for a in value)
    if kind.startswith("dict"):
        return lambda value: isinstance(value, dict) and all(a is None or is_number(a) for a in value.values())
    if kind.startswith("int"):
        return lambda value: type(value) is int
    may_miss = "None" in kind or name in ("train_loss", "drift", "update_norm")
    return (lambda value: value is None or is_number(value)) if may_miss else is_number


def is_number(value: Any) -> bool:
    """Return whether a value of JSON is a number within `MOST`."""
    return type(value) in (int, float) and -MOST < value < MOST
