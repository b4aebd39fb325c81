"""A live display on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self

from ..batch import BLINK, Shown
from ..observe import Observer
from ..report.run_files import minutes, score_of, short

if TYPE_CHECKING:
    from rich.console import Console

    from ..record import Record
    from ..server import Simulation

LINES = 20
"""About how many plain lines a run prints when nobody watches live."""

QUIET = 30.0
"""Seconds after which something that takes long says in a plain line how far it is."""


class Live(Observer):
    """Shows rounds as they finish: round, accuracy, loss, time left; inside a long round, its clients.

    Args:
        show: False prints nothing at all.
    """

    def __init__(self, console: Console, rounds: int, title: str, show: bool = True) -> None:
        self.console = console
        self.rounds = rounds
        self.title = title
        self.show = show
        self.live = show and console.is_terminal
        self.last: Any = None
        self.percent = -1
        self.rounds_done = 0
        self.score = ""
        self.said = time.monotonic()

    def __enter__(self) -> Self:
        if self.live:
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            self.bar = Progress(
                TextColumn("{task.description}", markup=False),
                BarColumn(bar_width=max(8, min(40, self.console.width - 70))),
                MofNCompleteColumn(),
                TextColumn("{task.fields[score]}", markup=False),
                TimeRemainingColumn(),
                console=self.console,
            )
            self.task = self.bar.add_task(self.title, total=self.rounds, score="")
            self.bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: Any, trace: TracebackType | None) -> None:
        if self.live:
            self.bar.stop()

    def started(self, run: Simulation, config: dict[str, Any]) -> None:
        """Rounds begin: with which settings."""
        if self.show:
            self._say(run.settings)

    def round(self, record: Record, run: Simulation) -> None:
        """A round is done."""
        if not self.show:
            return
        if record.test_accuracy is not None or record.test_loss is not None:
            self.last = record
        self.rounds_done = record.round
        self.score = score_of(self.last) if self.last else f"train loss {short(record.train_loss)}"
        if self.live:
            self.said = time.monotonic()
            self.bar.update(self.task, completed=record.round, score=self.score)
        elif record.round == self.rounds or record.round % max(1, self.rounds // LINES) == 0:
            self._say(f"round {record.round}/{self.rounds}  {self.score}  {record.seconds:.2f} s")

    def client(self, done: int, total: int) -> None:
        """A client of the current round has answered."""
        passed = time.monotonic() - self.said
        if self.live and passed > BLINK:
            self.said += passed
            score = f"{self.score}  client {done}/{total}".strip()
            self.bar.update(self.task, completed=self.rounds_done + done / total, score=score)
        elif self.show and not self.live and passed > QUIET:
            self._say(f"round {self.rounds_done + 1}/{self.rounds}, client {done}/{total}")

    def on_ill(self, text: str) -> None:
        """Something ails the run."""
        if self.show:
            self.console.print(f"{self.title}: {text}", style="yellow")

    def _say(self, text: str) -> None:
        self.said = time.monotonic()
        self.console.print(f"{self.title}: {text}")

    def on_progress(self, what: str, done: int, total: int) -> None:
        """Something slow before round 1, a download or a decoding, moves on."""
        percent = 100 * done // total if total else 0
        if not self.show or percent // 10 == self.percent // 10:
            return
        self.percent = percent
        if self.live:
            self.bar.update(self.task, score=f"{what} {percent}%")
        else:
            self.console.print(f"{what}: {percent}%")


class Costly(Protocol):
    """A run of several: its key, what to call it, and about how much work it is."""

    @property
    def key(self) -> str: ...
    @property
    def label(self) -> str: ...
    @property
    def cost(self) -> float: ...


class Runs(Shown):
    """One bar for several runs, side by side or not: runs done, time left by the work that is left.

    Args:
        every: seconds between two plain lines about runs that are done; 0 for a line per run.
    """

    def __init__(self, console: Console, title: str, runs: Sequence[Costly], show: bool, every: float = 0.0) -> None:
        self.console = console
        self.title = title
        self.count = len(runs)
        self.show = show
        self.every = every
        self.live = show and console.is_terminal
        self.total = sum(run.cost for run in runs)
        self.done: dict[str, float] = {}
        self.before: dict[str, float] = {}  # what had been done of runs that go on
        self.runs = 0
        self.began = 0.0
        self.said = time.monotonic()

    def __enter__(self) -> Self:
        if self.live:
            from rich.progress import BarColumn, Progress, TextColumn
            from rich.table import Column

            texts = [
                TextColumn("{task.fields[left]}", markup=False),
                TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis")),
            ]
            wide = max(8, min(30, self.console.width - 68))
            self.bar = Progress(BarColumn(bar_width=wide), *texts, console=self.console, transient=True)
            self.task = self.bar.add_task(self.title, total=self.total, left="")
            self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.live:
            self.bar.stop()

    def on_part(self, run: Costly, part: float, note: str = "") -> None:
        """So much of a run is done; one that was resumed counts from where it was."""
        self.began = self.began or time.monotonic()  # without what it takes to start
        self.done[run.key] = run.cost * part
        self.before.setdefault(run.key, run.cost * part)
        told = f"{run.label}: {note}" if note else run.label
        if self.live:
            self.bar.update(self.task, completed=sum(self.done.values()), description=told, left=self._left())
        elif self.show and time.monotonic() - self.said > max(QUIET, 6 * self.every):
            self._say(f"{told}  ({self._left()})")

    def on_ill(self, run: Costly, text: str) -> None:
        """Something ails a run."""
        if self.show:
            self._say(f"{run.label}: {text}", "yellow")

    def on_done(self, run: Costly, note: str = "", bad: bool = False) -> None:
        """A run is done; one that ended badly is named also on a terminal."""
        self.began = self.began or time.monotonic()
        self.runs, self.done[run.key] = self.runs + 1, run.cost
        self.before.setdefault(run.key, run.cost)
        if self.live:
            self.bar.update(self.task, completed=sum(self.done.values()), description=run.label, left=self._left())
        if self.show and (bad or (not self.live and time.monotonic() - self.said >= self.every)):
            told = f"{run.label}: {note}" if note else self.title
            self._say(told if self.live else f"{told}  ({self._left()})", "red" if bad else None)

    def on_failed(self, run: Costly, why: str) -> None:
        """A run failed: said also where nothing else is."""
        sys.stderr.write(f"fedspeed: {run.label}: {why}\n")

    def _left(self) -> str:
        done, passed = sum(self.done.values()), time.monotonic() - self.began
        new = done - sum(self.before.values())
        left = f", {minutes(passed * (self.total - done) / new)} left" if new > 0 and self.runs < self.count else ""
        return f"{self.runs}/{self.count} runs{left}"

    def _say(self, text: str, style: str | None = None) -> None:
        self.said = time.monotonic()
        self.console.print(text, style=style)
