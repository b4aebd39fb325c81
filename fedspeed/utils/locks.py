"""Locks between processes, and temporary folders that are locked by their owner.

All are `flock` locks: a process that dies holds none, and a folder is locked itself, without a file in it. Readers of a
run directory share its lock. The package filelock is not used: its locks of a path need a file, those of a descriptor
cannot be shared, and its shared ones are SQLite databases.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

KINDS = ("fedspeed-states-", "fedspeed-verify-", "fedspeed-replay-", "fedspeed-ray-")
HELD = ".held"
"""How the names of temporary folders end: a folder of another name may belong to a process that holds no lock."""


@contextmanager
def locked(path: Path, *, shared: bool = False, tries: int = 1, flags: int = os.O_RDONLY) -> Iterator[bool]:
    """Lock a folder or file until the end, and yield whether that was possible; True where there are no locks.

    Args:
        shared: other processes may share the lock; none can hold it exclusively meanwhile.
        tries: the number of attempts, 20 ms apart; 0 waits until the lock is free.
        flags: how the path is opened.
    """
    held, free = None, True
    try:
        held = _hold(path, flags, shared, tries)
    except BlockingIOError:
        free = False
    except (ImportError, OSError):  # not POSIX, nothing that can be opened, or a file system without locks
        pass
    try:
        yield free
    finally:
        _release(held)


@contextmanager
def locked_beside(folder: Path, *, tries: int = 0) -> Iterator[bool]:
    """Lock `.NAME.lock` beside a folder that may not exist yet; otherwise like `locked`."""
    with suppress(OSError):  # a place that can only be read, for example: there is no lock then
        folder.parent.mkdir(parents=True, exist_ok=True)
    with locked(folder.with_name(f".{folder.name}.lock"), tries=tries, flags=os.O_RDWR | os.O_CREAT) as free:
        yield free


class Scratch:
    """A new temporary folder, removed by `close`, with the object, or when the process ends.

    The next start removes folders of killed processes: an unlocked folder belongs to a dead process.

    Args:
        kind: how its name begins, one of `KINDS`.
    """

    def __init__(self, kind: str) -> None:
        sweep()
        while True:
            self.path = Path(tempfile.mkdtemp(HELD, kind))
            held = _hold_own(self.path, tries=0)
            if self.path.exists():  # else the sweep of another process removed it before it was locked
                break
            _release(held)
        self._finalizer = weakref.finalize(self, _remove, self.path, held, os.getpid())

    def close(self) -> None:
        """Remove the folder."""
        self._finalizer()


@contextmanager
def scratch(kind: str) -> Iterator[Path]:
    """Make a temporary folder that is removed at the end."""
    folder = Scratch(kind)
    try:
        yield folder.path
    finally:
        folder.close()


def sweep() -> None:
    """Remove the temporary folders of processes that have ended."""
    for kind in KINDS:
        for path in Path(tempfile.gettempdir()).glob(f"{kind}*{HELD}"):
            held = _hold_own(path, tries=1)
            if held is not None:
                shutil.rmtree(path, ignore_errors=True)
                _release(held)


def _hold(path: Path, flags: int, shared: bool, tries: int) -> int:
    """Return a descriptor whose lock ends when it is closed. Raises `BlockingIOError` if another process holds it."""
    import fcntl

    kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    held = os.open(path, flags, 0o666)
    try:
        for left in reversed(range(tries)):
            try:
                fcntl.flock(held, kind | fcntl.LOCK_NB)
                return held
            except BlockingIOError:
                if not left:
                    raise
                time.sleep(0.02)
        fcntl.flock(held, kind)
        return held
    except BaseException:
        os.close(held)
        raise


def _hold_own(path: Path, tries: int) -> int | None:
    """Lock a folder of this user; None if it is another user's, in use, or cannot be locked."""
    held = None
    try:
        held = _hold(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, False, tries)
        if os.fstat(held).st_uid == os.geteuid():
            return held
    except (ImportError, OSError, AttributeError):  # Windows has no such locks: what a killed process left stays
        pass
    _release(held)
    return None


def _release(held: int | None) -> None:
    if held is not None:
        with suppress(OSError):
            os.close(held)


def _remove(path: Path, held: int | None, owner: int) -> None:
    if os.getpid() == owner:  # a forked child that ends is not the owner
        shutil.rmtree(path, ignore_errors=True)
    _release(held)
