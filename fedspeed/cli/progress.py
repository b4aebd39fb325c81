"""A live display on a terminal, plain lines elsewhere."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from rich.console import Console

    from ..server import Record

LINES = 20
"""About how many plain lines a run prints when nobody watches live."""


class Live:
    """Shows rounds as they finish: round, accuracy, loss, time left.

    Args:
        rounds: of each run; `runs` of them share one bar.
        show: False prints nothing at all.
    """

    def __init__(self, console: Console, rounds: int, title: str, show: bool = True, runs: int = 1) -> None:
        self.console, self.rounds, self.title, self.show, self.runs = console, rounds, title, show, runs
        self.live = show and console.is_terminal
        self.last: Any = None
        self.percent = -1

    def __enter__(self) -> Self:
        if self.live:
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            self.bar = Progress(
                TextColumn("{task.description}", markup=False),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[score]}"),
                TimeRemainingColumn(),
                console=self.console,
            )
            self.task = self.bar.add_task(self.title, total=self.rounds * self.runs, score="")
            self.bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: Any, trace: TracebackType | None) -> None:
        if self.live:
            self.bar.stop()

    def begin(self, title: str) -> None:
        """Another run of the same batch starts."""
        self.title, self.last = title, None
        if self.live:
            self.bar.update(self.task, description=title)

    def on_round(self, record: Record) -> None:
        """A round is done."""
        if not self.show:
            return
        if record.test_accuracy is not None or record.test_loss is not None:
            self.last = record
        score = _score(self.last) if self.last else f"train loss {record.train_loss:.4f}"
        if self.live:
            if self.runs == 1:
                self.bar.update(self.task, completed=record.round, score=score)
            else:
                self.bar.update(self.task, advance=1, score=score)
        elif record.round == self.rounds or record.round % max(1, self.rounds // LINES) == 0:
            self.console.print(f"{self.title}: round {record.round}/{self.rounds}  {score}  {record.seconds:.2f} s")

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


def _score(record: Record) -> str:
    accuracy = "" if record.test_accuracy is None else f"accuracy {record.test_accuracy:.2%}  "
    return f"{accuracy}test loss {record.test_loss:.4f}"
