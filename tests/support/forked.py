"""Workers that are forked from one process that has torch, so that each is there a second of CPU earlier."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    [
        "fedspeed.backends.process_worker",
        "fedspeed.runs.launch",
        "fedspeed.server.simulation",
        "fedspeed.cli",
        "fedspeed.data",
        "numpy.random",
    ]
)


@contextmanager
def forked() -> Iterator[None]:
    """Fork workers instead of starting them, for tests of what they compute, which is the same.

    Such a worker has the environment of when the first one was forked, and Linux takes the process it was forked from
    for its parent. How workers start and how they end with their parent is tested without this.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fedspeed.backends.process.get_context", lambda kind: CONTEXT)
        patch.setattr("fedspeed.experiments.pool.multiprocessing", SimpleNamespace(get_context=lambda kind: CONTEXT))
        yield
