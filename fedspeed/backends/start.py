"""The first thing a worker process runs, before it imports torch, which takes seconds."""

from __future__ import annotations

import signal
from multiprocessing.connection import Connection

from ..processes import end_with_parent


def begin(pipe: Connection, kernel: bool) -> None:
    """Become a worker that ignores Ctrl-C, whose meaning the parent decides, and that ends with its parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent(kernel)
    try:
        setup = pipe.recv_bytes()
    except (EOFError, ConnectionResetError):
        return
    from .worker import worker

    worker(pipe, setup)
