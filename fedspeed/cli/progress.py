"""A live display on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, Self

from ..experiments.batch import BLINK, Progress
from ..report.run_files import minutes, score_of, short
from ..server.observers import Observer

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import ProgressColumn, TaskID

    from ..record import Record
    from ..server.simulation import Simulation

LINES = 20
"""About how many plain lines a run prints when nobody watches live."""

QUIET = 30.0
"""Seconds after which something that takes long says in a plain line how far it is."""


class Display:
    """A bar on a terminal, plain lines elsewhere.

    Args:
        title: names the bar; without one there is none at first.
        total: the length of the bar.
        show: False prints nothing at all.
        transient: whether the bar disappears at the end.
        fields: texts that the columns of the bar name.
    """

    def __init__(
        self, console: Console, title: str, total: float | None, show: bool, transient: bool = False, **fields: Any
    ) -> None:
        self.console = console
        self.title = title
        self.total = total
        self.show = show
        self.live = show and console.is_terminal
        self.transient = transient
        self.fields = fields
        self.said = time.monotonic()

    def _columns(self) -> Iterable[ProgressColumn]:
        raise NotImplementedError

    def __enter__(self) -> Self:
        if self.live:
            from rich.progress import Progress

            self.bar = Progress(*self._columns(), console=self.console, transient=self.transient)
            if self.title:
                self.task = self.bar.add_task(self.title, total=self.total, **self.fields)
            self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.live:
            self.bar.stop()

    def _say(self, text: str, style: str | None = None) -> None:
        self.said = time.monotonic()
        self.console.print(text, style=style)


class Loading(Display):
    """Downloads and decoding: a bar for each of them on a terminal, nothing elsewhere."""

    def __init__(self, console: Console, show: bool = True) -> None:
        super().__init__(console, "", None, show, transient=True)
        self.tasks: dict[str, TaskID] = {}

    def _columns(self) -> Iterable[ProgressColumn]:
        from rich.progress import BarColumn, TextColumn, TimeRemainingColumn

        percentage = TextColumn("{task.percentage:>3.0f}%")
        return TextColumn("{task.description}"), BarColumn(), percentage, TimeRemainingColumn()

    def on_progress(self, what: str, done: int, total: int) -> None:
        """Show how much of something is loaded; a total of 0 is not known."""
        if not self.live:
            return
        if what not in self.tasks:
            self.tasks[what] = self.bar.add_task(what)
        self.bar.update(self.tasks[what], completed=done, total=total or None)


class Live(Display, Observer):
    """The rounds of a run as they finish: round, accuracy, loss, time left; inside a long round, its clients."""

    def __init__(self, console: Console, rounds: int, title: str, show: bool = True) -> None:
        super().__init__(console, title, rounds, show, score="")
        self.rounds = rounds
        self.last: Any = None
        self.percent = -1
        self.rounds_done = 0
        self.score = ""

    def _columns(self) -> Iterable[ProgressColumn]:
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn

        title, score = (TextColumn(text, markup=False) for text in ("{task.description}", "{task.fields[score]}"))
        bar = BarColumn(bar_width=max(8, min(40, self.console.width - 70)))
        return title, bar, MofNCompleteColumn(), score, TimeRemainingColumn()

    def started(self, run: Simulation, config: dict[str, Any]) -> None:
        """Rounds begin: with which settings."""
        if self.show:
            self._say(f"{self.title}: {run.settings}")

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
            self._say(f"{self.title}: round {record.round}/{self.rounds}  {self.score}  {record.seconds:.2f} s")

    def client(self, done: int, total: int) -> None:
        """A client of the current round has answered."""
        passed = time.monotonic() - self.said
        if self.live and passed > BLINK:
            self.said += passed
            score = f"{self.score}  client {done}/{total}".strip()
            self.bar.update(self.task, completed=self.rounds_done + done / total, score=score)
        elif self.show and not self.live and passed > QUIET:
            self._say(f"{self.title}: round {self.rounds_done + 1}/{self.rounds}, client {done}/{total}")

    def on_ill(self, text: str) -> None:
        """Something ails the run."""
        if self.show:
            self.console.print(f"{self.title}: {text}", style="yellow")

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


class ManyRunsProgress(Display, Progress):
    """One bar for several runs, side by side or not: runs done, time left by the work that is left.

    Args:
        every: seconds between two plain lines about runs that are done; 0 for a line per run.
    """

    def __init__(self, console: Console, title: str, runs: Sequence[Costly], show: bool, every: float = 0.0) -> None:
        self.work = sum(run.cost for run in runs)
        super().__init__(console, title, self.work, show, transient=True, left="")
        self.count = len(runs)
        self.every = every
        self.done: dict[str, float] = {}
        self.before: dict[str, float] = {}  # what had been done of runs that continue
        self.runs = 0
        self.began = 0.0

    def _columns(self) -> Iterable[ProgressColumn]:
        from rich.progress import BarColumn, TextColumn
        from rich.table import Column

        wide = max(8, min(30, self.console.width - 68))
        latest = Column(no_wrap=True, overflow="ellipsis")
        left = TextColumn("{task.fields[left]}", markup=False)
        return BarColumn(bar_width=wide), left, TextColumn("{task.description}", markup=False, table_column=latest)

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
        left = f", {minutes(passed * (self.work - done) / new)} left" if new > 0 and self.runs < self.count else ""
        return f"{self.runs}/{self.count} runs{left}"
