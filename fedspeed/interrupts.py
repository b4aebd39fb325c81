"""Ctrl-C between two things that belong together comes after both."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def together() -> Iterator[None]:
    """What is done in here is done whole: Ctrl-C is held back until the end. For a moment only."""
    main = threading.current_thread() is threading.main_thread()  # interrupts reach no other
    before = signal.getsignal(signal.SIGINT) if main else None
    if before is None:
        yield
        return
    pending: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _: pending.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if pending:
            signal.raise_signal(signal.SIGINT)
