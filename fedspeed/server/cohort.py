"""Cohorts: who takes part in every round, drawn by name (`config/spec.py`) or by a user's sampler.

A draw is a pure function of the seed, the round and what the server knows by then, so that every back end, a resumed
run, a fork and a replay have the same cohorts.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..config.network import Clock
from ..config.plan import Plan
from ..config.spec import Spec, cohort_name, loaded, setting_text
from ..errors import UserError, one_line
from ..record import Record
from ..utils.random import cohort, rng
from ..utils.registry import code_of, file_of, raised


class Turns(NamedTuple):
    """The replies of one past round that were counted, in the order of the clients' ids."""

    round: int  # 1 is the first
    clients: list[int]
    losses: list[float]  # the mean training loss of each, NaN where it was not finite
    seconds: list[float]  # the simulated seconds of each; empty without a network


class History:
    """Knowledge of the server before a round, for a user's sampler; its arrays cannot be written to.

    Attributes:
        sizes: the number of training samples of each client.
        rounds: the past rounds, one `Turns` each.
        losses: the training loss that each client reported last; NaN before its first reply.
        seconds: the simulated seconds of each client's last turn; NaN before it, and without a network.
    """

    def __init__(self, sizes: np.ndarray, clock: Clock | None = None) -> None:
        self.sizes, self._clock = _read_only(sizes), clock
        self.restart([])

    def restart(self, records: Sequence[Record]) -> None:
        """Know these rounds, from the first on, and no others."""
        self.rounds: list[Turns] = []
        self._last = np.full((2, len(self.sizes)), np.nan)
        self.losses, self.seconds = (_read_only(row) for row in self._last)
        for record in records:
            self.add(record)

    def add(self, record: Record) -> None:
        """Add a round."""
        lost = set(record.dropped)
        clients = [i for i in record.cohort if i not in lost]
        losses = [np.nan if loss is None else loss for loss in record.client_losses]
        if len(losses) != len(clients) or not all(0 <= i < len(self.sizes) for i in clients):
            raise UserError(
                f"round {record.round}: expected a loss of each of the clients that were counted, which the sampler of "
                f"the cohort may ask for, found {len(losses)} of {len(clients)}; put the records back as they were"
            )
        seconds = self._clock.turns(record) if self._clock else []
        self.rounds.append(Turns(record.round, clients, losses, seconds))
        self._last[0, clients] = losses
        if seconds:
            self._last[1, clients] = seconds


def _read_only(a: np.ndarray) -> np.ndarray:
    view = a.view()
    view.flags.writeable = False
    return view


class Cohort:
    """The cohorts of a run; it belongs to one plan and one federation.

    `history` is what a user's sampler may know; None for a cohort by name, which needs nothing.
    """

    def __init__(self, plan: Plan, sizes: np.ndarray) -> None:
        self.plan, self.sizes = plan, sizes
        self.clients, self.active = len(sizes), plan.cohort_size(len(sizes))
        self.name = cohort_name(plan.cohort)
        self.history: History | None = None
        if not self.name:
            self.sampler = loaded("cohort", plan.cohort)
            self.history = History(sizes, Clock(plan.network, plan.devices, plan.seed) if plan.network else None)
            self.draw(0)  # A sampler that cannot answer is refused before anything is written.
        elif self.name == "availability":
            self.trace = read_trace(plan.cohort, self.clients, plan.rounds)

    def draw(self, t: int) -> np.ndarray:
        """Return S^t of round t = 0, 1, ..., sorted by id; the streams and the order of the draws fix the bits."""
        seed, stream = self.plan.seed, rng(self.plan.seed, "cohort", t)
        if self.name in ("fixed", "bernoulli"):
            return cohort(seed, t, self.clients, self.active, self.name)
        if self.name == "cyclic":
            turn = np.arange(t * self.active, (t + 1) * self.active) % self.clients
            in_order = self.plan.cohort != "cyclic"
            return np.sort(turn if in_order else rng(seed, "cyclic").permutation(self.clients)[turn])
        if self.name == "weighted":
            return np.sort(stream.choice(self.clients, self.active, replace=False, p=self.sizes / self.sizes.sum()))
        if self.name == "availability":
            there = available(self.trace, t + 1)
            return np.sort(stream.choice(there, min(self.active, len(there)), replace=False, shuffle=False))
        first, again = (self._asked(t) for _ in range(2))
        if first.tolist() != again.tolist():
            raise self._wrong(t, f"{first.tolist()}, then {again.tolist()} when asked again; draw from rng alone")
        return first

    def _asked(self, t: int) -> np.ndarray:
        """Return the answer of the user's sampler, checked."""
        assert self.history is not None
        assert len(self.history.rounds) == t  # it knows all rounds before this one, also where the run was restored
        stream = rng(self.plan.seed, "cohort", t)
        try:
            found = self.sampler(t + 1, stream, self.clients, self.active, self.history)
        except UserError:
            raise
        except Exception as error:
            file = file_of(self.plan.cohort.name) if isinstance(self.plan.cohort, Spec) else ""
            why = raised(error, Path(file)) if file else one_line(error)
            raise UserError(f"cohort {setting_text(self.plan.cohort)}: failed in round {t + 1}: {why}") from error
        return self._checked(t, found)

    def _checked(self, t: int, found: Any) -> np.ndarray:
        """Return a sampler's answer as sorted ids; raise unless they are different clients, at least one."""
        ids = list(found) if isinstance(found, Iterable) and not isinstance(found, str | bytes | dict) else None
        if ids is None or not all(isinstance(i, int | np.integer) and not isinstance(i, bool) for i in ids):
            raise self._wrong(t, " ".join(repr(found).split())[:100])
        if not ids:
            raise self._wrong(t, "none")
        for i in (min(ids), max(ids)):
            if not 0 <= i < self.clients:
                raise self._wrong(t, f"client {i}")
        counted = np.sort(np.array(ids, dtype=np.int64))
        if (twice := counted[1:][np.diff(counted) == 0]).size:
            raise self._wrong(t, f"client {twice[0]} twice")
        return counted

    def _wrong(self, t: int, found: str) -> UserError:
        return UserError(
            f"cohort {setting_text(self.plan.cohort)}: expected different clients, at least one of 0 to "
            f"{self.clients - 1}, in round {t + 1}, found {found}"
        )


# --- traces ---


def read_trace(value: Any, clients: int, rounds: int) -> np.ndarray:
    """Return the trace of `availability:FILE` as rows (client, first round, last round); raise for a wrong one.

    The file is CSV with the columns client, from and to, or JSON with a list of [from, to] per client, such as
    {"0": [[1, 10]]}. Rounds count from 1, and `to` is included. Every round must have a client.
    """
    file = Path(value.name.partition(":")[2])
    content = code_of("cohort", value.name, value.code).text
    try:
        text = content.decode("utf-8")
        rows = _json_rows(text) if file.suffix.lower() == ".json" else _csv_rows(text)
        found = np.array(rows, dtype=np.int64).reshape(-1, 3)
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError, csv.Error) as error:
        raise UserError(
            f"cohort {value.name}: expected CSV with the columns client,from,to in whole rounds, or JSON such as "
            f'{{"0": [[1, 10]]}}, found {one_line(error)}'
        ) from None
    for i, first, last in found.tolist():
        if not 0 <= i < clients or not 1 <= first <= last:
            raise UserError(
                f"cohort {value.name}: expected a client of 0 to {clients - 1} and rounds 1 <= from <= to, found "
                f"client {i} from {first} to {last}"
            )
    _require_everyone(value.name, found, rounds)
    return found


def _csv_rows(text: str) -> list[list[int]]:
    reader = csv.DictReader(io.StringIO(text), strict=True)
    columns, found = ("client", "from", "to"), reader.fieldnames or ()
    reader.fieldnames = [name.strip() for name in found]
    if sorted(reader.fieldnames) != sorted(columns):
        raise ValueError(f"the columns {', '.join(found) or 'of an empty file'}")
    return [[int(row[name]) for name in columns] for row in reader]


def _json_rows(text: str) -> list[list[int]]:
    table = json.loads(text)
    if not isinstance(table, dict):
        raise ValueError(f"a {type(table).__name__}")
    rows = [[int(i), first, last] for i, spans in table.items() for first, last in spans]
    if bad := next((row for row in rows if not all(type(a) is int for a in row)), None):
        raise ValueError(f"{bad[1:]} of client {bad[0]}")
    return rows


def _require_everyone(name: str, trace: np.ndarray, rounds: int) -> None:
    """Raise if a round has no client: spans are counted where they begin and after they end."""
    change = np.zeros(rounds + 1, dtype=np.int64)
    inside = trace[trace[:, 1] <= rounds]
    np.add.at(change, inside[:, 1] - 1, 1)
    np.add.at(change, np.minimum(inside[:, 2], rounds), -1)
    empty = np.flatnonzero(np.cumsum(change)[:rounds] < 1)
    if len(empty):
        raise UserError(
            f"cohort {name}: expected at least one client in each of the {rounds} rounds, found none in round "
            f"{empty[0] + 1}; lengthen the trace, or run fewer rounds"
        )


def available(trace: np.ndarray, round: int) -> np.ndarray:
    """Return the clients whom a trace has in round = 1, 2, ..., sorted by id.

    Example:
        >>> available(np.array([[4, 1, 3], [2, 3, 9], [4, 2, 5]]), 3).tolist()
        [2, 4]
    """
    return np.unique(trace[(trace[:, 1] <= round) & (round <= trace[:, 2]), 0])
