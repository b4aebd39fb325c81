"""Ctrl-C works in the processes that tests start, also where the suite was begun in the background; a browser."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

import pytest
from browsing import chromium

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # children would ignore it too
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    yield from chromium()
