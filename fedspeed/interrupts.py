"""Ctrl-C or SIGTERM between two things that belong together comes after both."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def together() -> Iterator[None]:
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
