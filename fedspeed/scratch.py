"""Temporary folders that do not outlive their process for long: what a killed one left goes at the next start.

The owner holds a lock on its folder (where the file system has locks); a folder that nobody holds is nobody's.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

KINDS = ("fedspeed-states-", "fedspeed-verify-", "fedspeed-replay-", "fedspeed-ray-")
HELD = ".held"
"""How the names end: a folder of another name may belong to a process that holds no lock."""


class Scratch:
    """A new temporary folder, removed by `close`, with the object, or when the process ends.

    Args:
        kind: how its name begins, one of `KINDS`.
    """

    def __init__(self, kind: str) -> None:
        sweep()
        while True:
            self.path = Path(tempfile.mkdtemp(HELD, kind))
            held = _lock(self.path, wait=True)
            if self.path.exists():  # it was ours before somebody else's sweep took it for left over
                break
            _release(held)
        self._finalizer = weakref.finalize(self, _remove, self.path, held, os.getpid())

    def close(self) -> None:
        """Remove the folder."""
        self._finalizer()


@contextmanager
def scratch(kind: str) -> Iterator[Path]:
    """A temporary folder for a while."""
    folder = Scratch(kind)
    try:
        yield folder.path
    finally:
        folder.close()


def sweep() -> None:
    """Remove the folders of processes that are gone."""
    for kind in KINDS:
        for path in Path(tempfile.gettempdir()).glob(f"{kind}*{HELD}"):
            held = _lock(path, wait=False)
            if held is not None:
                shutil.rmtree(path, ignore_errors=True)
                _release(held)


def _lock(path: Path, wait: bool) -> int | None:
    """Hold a folder of our own; None if it is another's, or not to be locked."""
    held = None
    try:
        import fcntl

        held = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        if os.fstat(held).st_uid != os.geteuid():
            raise PermissionError
        fcntl.flock(held, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except (ImportError, OSError):  # Windows has no such locks: what a killed process left stays
        _release(held)
        return None
    return held


def _release(held: int | None) -> None:
    if held is not None:
        with suppress(OSError):
            os.close(held)


def _remove(path: Path, held: int | None, owner: int) -> None:
    if os.getpid() == owner:  # a forked child that ends is not the owner
        shutil.rmtree(path, ignore_errors=True)
    _release(held)
