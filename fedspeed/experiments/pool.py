"""A pool of processes that run tasks side by side and report progress; a process that dies is replaced."""

from __future__ import annotations

import multiprocessing
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import Any, Protocol, TypeVar

from ..errors import UserError
from ..utils.collector import skip_at_exit
from ..utils.processes import end_with_parent, in_main_thread, safe_path, without_main

ATTEMPTS = 3
"""How many processes may die on one task before it counts as failed."""

Report = Callable[[Any], None]


class Task(Protocol):
    """A picklable piece of work with a unique key."""

    @property
    def key(self) -> str: ...


T = TypeVar("T", bound=Task)


def run_tasks(
    tasks: Sequence[T],
    work: Callable[[T, Report], Any],
    jobs: int,
    *,
    on_report: Callable[[T, Any], None],
    on_done: Callable[[T, Any], None],
    on_failed: Callable[[T, str], None],
    here: bool = False,
) -> None:
    """Run tasks, `jobs` at a time in processes of their own.

    Args:
        work: runs one task; its reports on the way are passed to `on_report`, its result to `on_done`.
        on_failed: called with the error of a task (one line of a `UserError`, otherwise a traceback), or with a
            message that its process died; the other tasks continue unless `on_failed` raises.
        here: run the tasks one after another in this process.
    """
    if here:
        for task in tasks:
            kind, news = _attempt(work, task, partial(on_report, task))
            (on_done if kind == "done" else on_failed)(task, news)
    elif tasks:
        _Processes(tasks, work, on_report, on_done, on_failed).run(jobs)


class _Processes:
    """The running processes, each with its current task."""

    def __init__(self, tasks: Sequence[Any], work: Any, on_report: Any, on_done: Any, on_failed: Any) -> None:
        self.waiting, self.work = list(tasks), work
        self.on_report, self.on_done, self.on_failed = on_report, on_done, on_failed
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
                process.kill()  # a run survives SIGKILL at any instant; a suspended process would not react to SIGTERM
            for process, _ in self.running.values():
                process.join()

    def start(self) -> None:
        spawn = multiprocessing.get_context("spawn")
        here, there = spawn.Pipe()
        process = spawn.Process(target=_serve, args=(there, self.work, in_main_thread(), _default_dtype()))
        with _interrupts_held(), safe_path(), without_main():
            process.start()
        there.close()
        self.running[here] = (process, None)
        self.hand_over(here)

    def hand_over(self, pipe: Connection) -> None:
        """Send the next task to a process, or end the process if no task is left."""
        task = self.waiting.pop(0) if self.waiting else None
        process, _ = self.running[pipe]
        self.running[pipe] = (process, task)
        if task is None:
            pipe.close()
            self.running.pop(pipe)[0].join()
        else:
            self.tries[task.key] += 1
            with suppress(BrokenPipeError, ConnectionResetError):  # the process died; `hear` finds out next
                pipe.send(task)

    def hear(self, pipe: Connection) -> None:
        """Handle one message of a process, or its death."""
        process, task = self.running[pipe]
        try:
            kind, news = pipe.recv()
        except (EOFError, ConnectionResetError):
            self.running.pop(pipe)
            process.join()
            if self.tries[task.key] < ATTEMPTS:
                self.waiting.insert(0, task)
            else:
                why = f"its process died {ATTEMPTS} times (exit code {process.exitcode})"
                self.on_failed(
                    task, f"{why}; what it had done is kept. Free memory or use fewer --jobs, then repeat this"
                )
            if self.waiting:
                self.start()
            return
        if kind == "report":
            self.on_report(task, news)
        elif kind == "warning":
            warnings.warn(news, stacklevel=1)
        else:
            (self.on_done if kind == "done" else self.on_failed)(task, news)
            self.hand_over(pipe)


def _attempt(work: Callable[[Any, Report], Any], task: Any, tell: Report) -> tuple[str, Any]:
    """Return `done` with the result, or `failed` with the error."""
    try:
        return "done", work(task, tell)
    except UserError as error:
        return "failed", str(error)
    except (BrokenPipeError, ConnectionResetError):
        raise
    except Exception:
        return "failed", traceback.format_exc()


def _default_dtype() -> str:
    """Return torch's default dtype by name, which a script may have set."""
    return str(sys.modules["torch"].get_default_dtype()) if "torch" in sys.modules else ""


def _serve(pipe: Connection, work: Callable[[Any, Report], Any], kernel: bool, dtype: str) -> None:
    """Run tasks in a process of the pool; it ends with its parent."""
    end_with_parent(kernel)
    skip_at_exit()
    if dtype not in ("", "torch.float32"):  # It decides bits, and the script that set it is not executed here.
        import torch

        torch.set_default_dtype(getattr(torch, dtype.removeprefix("torch.")))
    warnings.showwarning = lambda message, *_, **__: pipe.send(("warning", str(message)))

    def tell(news: Any) -> None:
        try:
            pipe.send(("report", news))
        except (BrokenPipeError, ConnectionResetError):  # the parent has ended
            raise KeyboardInterrupt from None

    try:
        while True:
            pipe.send(_attempt(work, pipe.recv(), tell))
    except (EOFError, BrokenPipeError, ConnectionResetError, KeyboardInterrupt):
        return


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Block SIGINT in processes started inside, also while they import: on Ctrl-C the parent ends them."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
