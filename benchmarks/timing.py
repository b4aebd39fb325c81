"""Seconds per round: all contenders of a contest run at once and take turns."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from . import arrays, machine
from .contests import Contest, Entry
from .runner import Contender, Failed
from .stats import median
from .workloads import Part, Workload, find

MEMORY = 1.5e9
"""Bytes that a contender is expected to need, for a warning."""

Say = Callable[[str], None]


@dataclass
class Timed:
    """The times of one contender: its seconds per round, one value per repetition."""

    entry: Entry
    seconds: list[float] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    accuracy: float | None = None
    memory: int = 0
    failure: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return the values that JSON can hold."""
        return {
            "name": self.entry.name,
            "failure": self.failure,
            "median": median(self.seconds) if self.seconds else None,
            "seconds": [round(s, 6) for s in self.seconds],
            "accuracy_after": self.accuracy,
            "peak_rss_bytes": self.memory,
            **self.facts,
        }


@dataclass
class Outcome:
    """A contest that was held."""

    contest: Contest
    active: int  # clients per round
    epochs: int  # of a client
    rows: list[Timed]
    foreign: list[float] = field(default_factory=list)  # cores used by others, in each repetition
    idle: float = 0.0  # cores used by contenders while they waited
    notes: list[str] = field(default_factory=list)

    def row(self, name: str) -> Timed | None:
        """Return a contender that was measured, by name."""
        return next((row for row in self.rows if row.entry.name == name and row.seconds), None)


def hold(
    contest: Contest, pairs: int, quick: bool, unavailable: dict[str, str], say: Say, whole: bool = False
) -> Outcome:
    """Start every contender, let each run a turn to warm up, then `pairs` repetitions in which each has its turn.

    Args:
        quick: fewer clients a round and fewer contenders where the contest says so, and no more repetitions than its
            time allows.
        whole: whole rounds, also where the contest times a part.
        unavailable: peers that could not be installed, and why.
    """
    deadline = time.monotonic() + contest.quick_seconds if quick else float("inf")
    part = contest.part(quick, whole)
    if quick:
        contest = replace(contest, entries=tuple(entry for entry in contest.entries if entry.quick))
    workload = find(contest.workload, part)
    arrays.prepare(workload)
    rows = [Timed(entry, failure=unavailable.get(entry.peer, "")) for entry in contest.entries]
    outcome = Outcome(contest, workload.active, workload.epochs, rows)
    needed, there = MEMORY * len(contest.entries), machine.available_memory()
    if needed > there:
        outcome.notes.append(f"{there / 1e9:.0f} GB of memory free, {needed / 1e9:.0f} may be needed")
    with tempfile.TemporaryDirectory(prefix="fedspeed-bench-") as logs:
        arena = Arena(outcome, workload, part, Path(logs), say)
        try:
            arena.warm_up()
            arena.repeat(pairs, deadline)
            arena.look()
        finally:
            arena.close()
    return outcome


class Arena:
    """The running contenders of a contest."""

    def __init__(self, outcome: Outcome, workload: Workload, part: Part, logs: Path, say: Say) -> None:
        self.outcome, self.turn, self.say = outcome, workload.turn, say
        self.running: dict[str, Contender] = {}
        for number, row in enumerate(outcome.rows):
            if not row.failure:
                contender = Contender(row.entry, workload.name, part, logs / f"{number}.log")
                self.running[row.entry.name] = contender

    def live(self) -> list[Timed]:
        """Return the contenders that have not failed."""
        return [row for row in self.outcome.rows if row.entry.name in self.running]

    def warm_up(self) -> None:
        """Wait for all contenders, then let each run one turn."""
        for row in self.live():
            with self._contender(row) as contender:
                row.facts = contender.ready()
        for row in self.live():
            with self._contender(row) as contender:
                self.say(f"{row.entry.name}: warm-up {contender.rounds(self.turn)[0]:.3g} s")

    def repeat(self, pairs: int, deadline: float) -> None:
        """Run the repetitions; each begins with another contender, and every second one runs in reverse order."""
        waited = total = 0.0
        for repetition in range(pairs):
            begun, meter = time.monotonic(), machine.Meter()
            rows = self.live()
            first = repetition % max(1, len(rows))
            order = rows[first:] + rows[:first]
            for row in order if repetition % 2 == 0 else order[::-1]:
                with self._contender(row) as contender:
                    before = _used(contender)
                    row.seconds.append(median(contender.rounds(self.turn)))
                    after = _used(contender)
                    waited += after[0] - before[0]
                    total += after[1] - before[1]
            self.outcome.foreign.append(meter.foreign())
            took = time.monotonic() - begun
            foreign = self.outcome.foreign[-1]
            self.say(f"repetition {repetition + 1} of {pairs}: {took:.1f} s, others used {foreign:.2f} cores")
            if time.monotonic() + took > deadline and repetition + 1 < pairs:
                self.outcome.notes.append(f"{repetition + 1} repetitions instead of {pairs}, to stay quick")
                break
        self.outcome.idle = max(0.0, waited / total) if total > 0.2 else 0.0

    def look(self) -> None:
        """Ask for the facts that are read after the last round."""
        for row in self.live():
            with self._contender(row) as contender:
                row.memory = machine.tree_peak(contender.process.pid)
                row.accuracy = contender.check()

    def close(self) -> None:
        """Stop all contenders."""
        for contender in self.running.values():
            contender.close()

    @contextmanager
    def _contender(self, row: Timed) -> Iterator[Contender]:
        """Yield a contender for one request; if that fails, drop it and continue with the others."""
        try:
            yield self.running[row.entry.name]
        except Failed as error:
            row.failure, row.seconds = f"failed: {error}", []
            self.say(f"{row.entry.name}: {row.failure}")
            self.running.pop(row.entry.name).close()


def _used(contender: Contender) -> tuple[float, float]:
    """Return the processor time of the other processes in our tree, and the time of day."""
    among = machine.processes()
    everyone = sum(process.seconds for process in machine.tree(os.getpid(), among))
    own = sum(process.seconds for process in machine.tree(contender.process.pid, among))
    return everyone - own, time.monotonic()
