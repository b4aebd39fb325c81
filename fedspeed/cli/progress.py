"""Progress displays: live bars on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Self

from ..experiments.batch import BLINK, Progress
from ..report.run_files import minutes, score_of, short
from ..server.observers import Observer

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import ProgressColumn, TaskID

    from ..experiments.batch import RunTask
    from ..record import Record
    from ..reproduce.runs import Run
    from ..server.simulation import Simulation

    Several = RunTask | Run

LINES = 20
"""Approximate number of plain lines of a run, where there is no live display."""
QUIET = 30.0
"""Seconds without output after which a plain line reports progress."""


class Display:
    """A bar on a terminal, plain lines elsewhere.

    Args:
        title: the description of the bar; "" for no bar at first.
        show: False prints nothing at all.
        fields: texts of the bar's columns.
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
    """Display of downloads and decoding: a bar for each on a terminal, nothing elsewhere."""

    def __init__(self, console: Console, show: bool = True) -> None:
        super().__init__(console, "", None, show, transient=True)
        self.tasks: dict[str, TaskID] = {}

    def _columns(self) -> Iterable[ProgressColumn]:
        from rich.progress import BarColumn, TextColumn, TimeRemainingColumn

        percentage = TextColumn("{task.percentage:>3.0f}%")
        return TextColumn("{task.description}"), BarColumn(), percentage, TimeRemainingColumn()

    def on_progress(self, what: str, done: int, total: int) -> None:
        """Show how much is loaded; a total of 0 means unknown."""
        if not self.live:
            return
        if what not in self.tasks:
            self.tasks[what] = self.bar.add_task(what)
        self.bar.update(self.tasks[what], completed=done, total=total or None)


class Live(Display, Observer):
    """Display of one run: round, accuracy, loss, time left; inside a long round, its clients."""

    def __init__(self, console: Console, rounds: int, title: str, show: bool = True) -> None:
        super().__init__(console, title, rounds, show, score="")
        self.rounds = rounds
        self.percent = -1
        self.rounds_done = 0
        self.score = ""
        self.tested = False

    def _columns(self) -> Iterable[ProgressColumn]:
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn

        title, score = (TextColumn(text, markup=False) for text in ("{task.description}", "{task.fields[score]}"))
        bar = BarColumn(bar_width=max(8, min(40, self.console.width - 70)))
        return title, bar, MofNCompleteColumn(), score, TimeRemainingColumn()

    def started(self, run: Simulation, config: dict[str, Any]) -> None:
        if self.show:
            self._say(f"{self.title}: {run.settings}")

    def round(self, record: Record, run: Simulation) -> None:
        if not self.show:
            return
        tested = record.test_accuracy is not None or record.test_loss is not None
        score = score_of(record) if tested else f"train loss {short(record.train_loss)}"
        self.tested, self.rounds_done = self.tested or tested, record.round
        if tested or not self.tested:
            self.score = score  # the bar keeps the last test, a line is of its own round only
        if self.live:
            self.said = time.monotonic()
            self.bar.update(self.task, completed=record.round, score=self.score)
        elif record.round == self.rounds or record.round % max(1, self.rounds // LINES) == 0:
            self._say(f"{self.title}: round {record.round}/{self.rounds}  {score}  {record.seconds:.2f} s")

    def client(self, done: int, total: int) -> None:
        passed = time.monotonic() - self.said
        if self.live and passed > BLINK:
            self.said += passed
            score = f"{self.score}  client {done}/{total}".strip()
            self.bar.update(self.task, completed=self.rounds_done + done / total, score=score)
        elif self.show and not self.live and passed > QUIET:
            self._say(f"{self.title}: round {self.rounds_done + 1}/{self.rounds}, client {done}/{total}")

    def on_warning(self, text: str) -> None:
        """Print a diagnosis of the run."""
        if self.show:
            self.console.print(f"{self.title}: {text}", style="yellow")

    def on_progress(self, what: str, done: int, total: int) -> None:
        """Show the progress of a download or a decoding before round 1."""
        percent = 100 * done // total if total else 0
        if not self.show or percent // 10 == self.percent // 10:
            return
        self.percent = percent
        if self.live:
            self.bar.update(self.task, score=f"{what} {percent}%")
        else:
            self.console.print(f"{what}: {percent}%")


class ManyRunsProgress(Display, Progress):
    """Display of several runs in one bar: runs done, and time left, estimated from the remaining work.

    Args:
        every: seconds between two plain lines about finished runs; 0 for a line per run.
    """

    def __init__(self, console: Console, title: str, runs: Sequence[Several], show: bool, every: float = 0.0) -> None:
        self.work = sum(run.cost for run in runs)
        super().__init__(console, title, self.work, show, transient=True, left="")
        self.count = len(runs)
        self.every = every
        self.done: dict[str, float] = {}
        self.before: dict[str, float] = {}  # work that resumed runs had done before
        self.runs = 0
        self.began = 0.0

    def _columns(self) -> Iterable[ProgressColumn]:
        from rich.progress import BarColumn, TextColumn
        from rich.table import Column

        wide = max(8, min(30, self.console.width - 68))
        latest = Column(no_wrap=True, overflow="ellipsis")
        left = TextColumn("{task.fields[left]}", markup=False)
        return BarColumn(bar_width=wide), left, TextColumn("{task.description}", markup=False, table_column=latest)

    def on_part(self, run: Several, part: float, note: str = "") -> None:
        """Show which fraction of a run is done; a resumed run counts from where it was."""
        text = f"{run.label}: {note}" if note else run.label
        self._count(run, run.cost * part, text)
        if self.show and not self.live and time.monotonic() - self.said > max(QUIET, 6 * self.every):
            self._say(f"{text}  ({self._left()})")

    def on_warning(self, run: Several, text: str) -> None:
        if self.show:
            self._say(f"{run.label}: {text}", "yellow")

    def on_done(self, run: Several, note: str = "", bad: bool = False) -> None:
        """Count a finished run; one that diverged is named also on a terminal."""
        self.runs += 1
        self._count(run, run.cost, run.label)
        if self.show and (bad or (not self.live and time.monotonic() - self.said >= self.every)):
            text = f"{run.label}: {note}" if note else self.title
            self._say(text if self.live else f"{text}  ({self._left()})", "red" if bad else None)

    def _count(self, run: Several, work: float, text: str) -> None:
        self.began = self.began or time.monotonic()  # the time to start does not count
        self.done[run.key] = work
        self.before.setdefault(run.key, work)
        if self.live:
            self.bar.update(self.task, completed=sum(self.done.values()), description=text, left=self._left())

    def on_failed(self, run: Several, why: str) -> None:
        """Print why a run failed, also with --quiet."""
        sys.stderr.write(f"fedspeed: {run.label}: {why}\n")

    def _left(self) -> str:
        done, passed = sum(self.done.values()), time.monotonic() - self.began
        new = done - sum(self.before.values())
        left = f", {minutes(passed * (self.work - done) / new)} left" if new > 0 and self.runs < self.count else ""
        return f"{self.runs}/{self.count} runs{left}"
