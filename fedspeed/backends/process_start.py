"""Entry point of a worker process: imports no torch, so that signals are handled before that slow import begins."""

from __future__ import annotations

import gc
import signal
from multiprocessing.connection import Connection

from ..utils.collector import paused
from ..utils.processes import end_with_parent


def begin(pipe: Connection, kernel: bool) -> None:
    """Become a worker that ignores Ctrl-C, which the parent handles, and that ends with its parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent(kernel)
    try:
        setup = pipe.recv_bytes()
    except (EOFError, ConnectionResetError):
        return
    with paused():
        from .process_worker import worker
    gc.freeze()  # a worker's later collections need not look through what the imports made

    worker(pipe, setup)
