"""How our processes start, and how they end with the one that started them. No torch: they arm themselves first."""

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
    """Processes that are started within find no module in the current folder, which may be somebody's run directory.

    multiprocessing starts them, and its resource tracker, as `python -c`, which looks there first. What this process
    has on `sys.path`, a script's own folder for example, they are given later by multiprocessing itself.

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
    """Whether this is the thread that lives as long as the process."""
    return threading.current_thread() is threading.main_thread()


def end_with_parent(kernel: bool = False) -> None:
    """Have this process end as soon as the one that started it has, whatever it is doing.

    Args:
        kernel: have Linux see to it, also while C code holds the interpreter; only if the parent's main thread started
            this process, since Linux takes the end of the thread for that of the parent.
    """
    parent = parent_process()
    if parent is None:
        return
    if kernel and sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    threading.Thread(target=_end_after, args=(parent.sentinel,), daemon=True, name="fedspeed-parent").start()


def _end_after(sentinel: int) -> None:
    wait([sentinel])  # at once if the parent has gone by now
    os._exit(1)


@contextmanager
def delay_signals() -> Iterator[None]:
    """What is done in here is done whole: Ctrl-C and SIGTERM are held back until the end. For a moment only."""
    main = threading.current_thread() is threading.main_thread()  # signals reach no other
    held = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)} if main else {}
    held = {number: handler for number, handler in held.items() if callable(handler)}  # the others raise nothing
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
