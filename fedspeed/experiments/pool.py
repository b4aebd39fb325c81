"""Tasks done one after another, here or side by side in processes; a process that dies is replaced."""

from __future__ import annotations

import multiprocessing
import signal
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import Any, Protocol, TypeVar

from ..errors import UserError
from ..utils.processes import end_with_parent, in_main_thread, safe_path

ATTEMPTS = 3
"""How often a task whose process dies is taken up again."""

Tell = Callable[[Any], None]


class Task(Protocol):
    """Something to do, with a key of its own; it must be possible to send it to another process."""

    @property
    def key(self) -> str:
        """What it is known by."""
        ...


T = TypeVar("T", bound=Task)


def run_tasks(
    tasks: Sequence[T],
    work: Callable[[T, Tell], Any],
    jobs: int,
    *,
    on_told: Callable[[T, Any], None],
    on_done: Callable[[T, Any], None],
    on_failed: Callable[[T, str], None],
    here: bool = False,
) -> None:
    """Run tasks, `jobs` at a time in processes of their own.

    Args:
        work: does one; what it tells on the way goes to `on_told`, its result to `on_done`.
        on_failed: called with what a task raised (one line of a `UserError`, else a traceback), or that its process
            died; the others continue unless this raises.
        here: one after another in this process.
    """
    if here:
        for task in tasks:
            _settle(task, *_attempt(work, task, partial(on_told, task)), on_done, on_failed)
    elif tasks:
        _Processes(tasks, work, on_told, on_done, on_failed).run(jobs)


class _Processes:
    """The processes that are at work, each with the task that it has."""

    def __init__(self, tasks: Sequence[Any], work: Any, on_told: Any, on_done: Any, on_failed: Any) -> None:
        self.waiting, self.work = list(tasks), work
        self.on_told = on_told
        self.on_done = on_done
        self.on_failed = on_failed
        self.tries = dict.fromkeys((task.key for task in tasks), 0)
        self.running: dict[Connection, tuple[Any, Any]] = {}

    def run(self, jobs: int) -> None:
        try:
            for _ in range(min(jobs, len(self.waiting))):
                self.start()
            while self.running:
                for pipe in wait(list(self.running)):
                    assert isinstance(pipe, Connection)
                    self.hear(pipe)
        finally:
            for process, _ in self.running.values():
                process.kill()  # a run can be killed at any instant; one that is stopped would not hear a gentler word
            for process, _ in self.running.values():
                process.join()

    def start(self) -> None:
        spawn = multiprocessing.get_context("spawn")
        here, there = spawn.Pipe()
        process = spawn.Process(target=_serve, args=(there, self.work, in_main_thread()))
        with _interrupts_held(), safe_path():
            process.start()
        there.close()
        self.running[here] = (process, None)
        self.hand_over(here)

    def hand_over(self, pipe: Connection) -> None:
        """The next task to a process; one that has none left ends."""
        task = self.waiting.pop(0) if self.waiting else None
        process, _ = self.running[pipe]
        self.running[pipe] = (process, task)
        if task is None:
            pipe.close()
            self.running.pop(pipe)[0].join()
        else:
            self.tries[task.key] += 1
            with suppress(BrokenPipeError, ConnectionResetError):  # it has died, which is heard next
                pipe.send(task)

    def hear(self, pipe: Connection) -> None:
        process, task = self.running[pipe]
        try:
            kind, told = pipe.recv()
        except (EOFError, ConnectionResetError):
            self.running.pop(pipe)
            process.join()
            if self.tries[task.key] < ATTEMPTS:
                self.waiting.insert(0, task)
            else:
                self.on_failed(
                    task,
                    f"its process died {ATTEMPTS} times (exit code {process.exitcode}); what it had done is kept. Free "
                    f"memory or use fewer --jobs, then repeat this",
                )
            if self.waiting:
                self.start()
            return
        if kind == "told":
            self.on_told(task, told)
        elif kind == "warning":
            warnings.warn(told, stacklevel=1)
        else:
            _settle(task, kind, told, self.on_done, self.on_failed)
            self.hand_over(pipe)


def _settle(task: Any, kind: str, told: Any, on_done: Callable[..., None], on_failed: Callable[..., None]) -> None:
    (on_done if kind == "done" else on_failed)(task, told)


def _attempt(work: Callable[[Any, Tell], Any], task: Any, tell: Tell) -> tuple[str, Any]:
    """`done` with the result, or `failed` with what was raised."""
    try:
        return "done", work(task, tell)
    except UserError as error:
        return "failed", str(error)
    except (BrokenPipeError, ConnectionResetError):
        raise
    except Exception:
        return "failed", traceback.format_exc()


def _serve(pipe: Connection, work: Callable[[Any, Tell], Any], kernel: bool) -> None:
    """A process that does tasks; it ends when whoever gives them does."""
    end_with_parent(kernel)
    warnings.showwarning = lambda message, *_, **__: pipe.send(("warning", str(message)))

    def tell(told: Any) -> None:
        try:
            pipe.send(("told", told))
        except (BrokenPipeError, ConnectionResetError):  # nobody is left to work for
            raise KeyboardInterrupt from None

    try:
        while True:
            pipe.send(_attempt(work, pipe.recv(), tell))
    except (EOFError, BrokenPipeError, ConnectionResetError, KeyboardInterrupt):
        return


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Processes started inside never see Ctrl-C, also not while they import: whoever started them decides."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
