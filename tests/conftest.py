"""Ctrl-C works in the processes that tests start, also where the suite itself was begun in the background."""

from __future__ import annotations

import signal

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # children would ignore it too
    signal.signal(signal.SIGINT, signal.default_int_handler)
