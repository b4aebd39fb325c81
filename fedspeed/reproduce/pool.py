"""Several runs side by side, each process making one after another; a process that dies is replaced."""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..processes import end_with_parent, safe_path
from .recipes import Tables
from .records import Order, carry_out
from .store import Store

ATTEMPTS = 3
"""How often a run whose process dies is taken up again."""


def make(
    orders: list[Order],
    store: Store,
    jobs: int,
    on_round: Callable[[Order, int], None],
    on_done: Callable[[Tables], None],
) -> None:
    """Make runs, `jobs` at a time in processes of their own; a run that was stopped goes on from its checkpoint.

    Args:
        on_round: called with the order and how many of its rounds are done.
        on_done: called with the record of every run that is finished, which is stored by then.
    """
    spawn = multiprocessing.get_context("spawn")
    waiting, tries = list(orders), dict.fromkeys((order.key for order in orders), 0)
    running: dict[Connection, tuple[Any, Order | None]] = {}

    def start() -> None:
        here, there = spawn.Pipe()
        process = spawn.Process(target=_serve, args=(there, store.work))
        with safe_path():
            process.start()
        there.close()
        running[here] = (process, None)
        hand_over(here)

    def hand_over(pipe: Connection) -> None:
        order = waiting.pop(0) if waiting else None
        running[pipe] = (running[pipe][0], order)
        if order is None:
            pipe.close()
            running.pop(pipe)[0].join()
        else:
            tries[order.key] += 1
            pipe.send(order)

    try:
        for _ in range(min(jobs, len(orders))):
            start()
        while running:
            for pipe in wait(list(running)):
                assert isinstance(pipe, Connection)
                process, order = running[pipe]
                assert order is not None
                try:
                    kind, told = pipe.recv()
                except (EOFError, ConnectionResetError):
                    running.pop(pipe)
                    process.join()
                    if tries[order.key] >= ATTEMPTS:
                        raise UserError(
                            f"{order.label}: its process died {ATTEMPTS} times (exit code {process.exitcode}); the run "
                            f"is kept in {store.work / order.key}. Free memory or use fewer --jobs, then repeat this"
                        ) from None
                    waiting.insert(0, order)
                    start()
                    continue
                if kind == "round":
                    on_round(order, told)
                elif kind == "error":
                    raise UserError(f"{order.label}: {told}")
                else:
                    store.put(told)
                    on_done(told)
                    hand_over(pipe)
    finally:
        for process, _ in running.values():
            process.terminate()
        for process, _ in running.values():
            process.join()


def _serve(pipe: Connection, work: Path) -> None:
    """A process that makes runs; it ends when whoever asked for them does."""
    end_with_parent()
    try:
        while True:
            order: Order = pipe.recv()
            try:
                pipe.send(
                    ("record", carry_out(order, work / order.key, lambda record: pipe.send(("round", record.round))))
                )
            except UserError as error:
                pipe.send(("error", str(error)))
            except (BrokenPipeError, ConnectionResetError):
                raise
            except Exception:
                pipe.send(("error", traceback.format_exc()))
    except (EOFError, BrokenPipeError, ConnectionResetError, KeyboardInterrupt):
        return


def cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
