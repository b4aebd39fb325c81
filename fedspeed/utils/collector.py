"""Python's garbage collector, kept out of imports and out of the end of a process.

Importing torch makes half a million objects, and none of them is garbage: looking through them takes about a tenth of
the import's time, and, as the interpreter ends, more than all that a short command computes. Nothing here imports torch
by itself.
"""

from __future__ import annotations

import atexit
import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused() -> Iterator[None]:
    """Let no garbage be collected inside; afterwards the collector is on again if it was.

    What was made inside counts as old then: the next collection of young objects would look through all of it.

    Example:
        >>> with paused():
        ...     gc.isenabled()
        False
    """
    on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if on:
            if not gc.get_freeze_count():  # otherwise the program that froze objects would find them thawed
                gc.freeze()
                gc.unfreeze()  # into the oldest generation
            gc.enable()


def skip_at_exit() -> None:
    """Let this process end without looking through its objects for garbage once more.

    It is for programs of this package. Functions that others registered with `atexit` are still called: this one was
    registered before them and is called after them.
    """
    atexit.unregister(gc.freeze)  # one call is enough, however often a program calls this
    atexit.register(gc.freeze)
