"""Worker processes and signals: safe start, end with the parent, critical sections.

Imports no torch, so that workers can install their parent watch before the slow import.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import parent_process
from multiprocessing.connection import wait

from ..errors import UserError

VARIABLE = "PYTHONSAFEPATH"
PR_SET_PDEATHSIG = 1


@contextmanager
def safe_path() -> Iterator[None]:
    """Keep processes that are started within from importing modules of the current folder, an untrusted run directory.

    multiprocessing starts them, and its resource tracker, as `python -c`, which looks there first. The entries of this
    process's `sys.path`, a script's own folder for example, are passed on later by multiprocessing itself.

    Example:
        >>> with safe_path():
        ...     os.environ["PYTHONSAFEPATH"]
        '1'
    """
    if sys.flags.ignore_environment and not sys.flags.safe_path:
        raise UserError(
            "worker processes: Python was started with -E, so they would import modules from the current folder; start "
            "it with -P as well (python -P -E ...), or use --backend serial"
        )
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[VARIABLE]
        else:
            os.environ[VARIABLE] = before


def in_main_thread() -> bool:
    """Return whether this is the main thread, which lives as long as the process and receives its signals."""
    return threading.current_thread() is threading.main_thread()


def end_with_parent(kernel: bool = False) -> None:
    """End this process as soon as its parent has ended, whatever it is doing.

    Args:
        kernel: let Linux do it, also while C code holds the interpreter. Only if the parent's main thread started this
            process: Linux takes the end of the starting thread for that of the parent.
    """
    parent = parent_process()
    if parent is None:
        return
    if kernel and sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    threading.Thread(target=_end_after, args=(parent.sentinel,), daemon=True, name="fedspeed-parent").start()


def _end_after(sentinel: int) -> None:
    wait([sentinel])  # returns at once if the parent has already ended
    os._exit(1)


@contextmanager
def delay_signals() -> Iterator[None]:
    """Delay SIGINT and SIGTERM until a short critical section is complete."""
    numbers = (signal.SIGINT, signal.SIGTERM) if in_main_thread() else ()
    # Only handlers written in Python are held back: SIG_DFL and SIG_IGN raise nothing between two statements.
    held = {number: handler for number in numbers if callable(handler := signal.getsignal(number))}
    pending: list[int] = []
    for number in held:
        signal.signal(number, lambda number, _: pending.append(number))
    try:
        yield
    finally:
        for number, handler in held.items():
            signal.signal(number, handler)
        if pending:
            signal.raise_signal(pending[0])
