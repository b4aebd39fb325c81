"""Files and folders: read with limits, written whole or not at all, digested, locked; and the tables in them.

Files may come from other people: only plain files of a sensible size are read. A file gets its name when all of its
bytes are written. Digests are blake2b with 128 bits; a table that holds its own digest is sealed.

All locks are `flock` locks: a process that dies holds none, and a folder is locked itself, without a file in it.
Readers of a run directory share its lock. The package filelock is not used: its locks of a path need a file, those of a
descriptor cannot be shared, and its shared ones are SQLite databases.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import stat
import struct
import tempfile
import time
import tomllib
import weakref
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from ..errors import UserError

MOST = 2**31
"""Bytes beyond which a file that is read as a whole is refused."""
LARGEST = 100_000
"""Bytes of a TOML file; the time to read nested tables grows with the square of them."""
MOST_HEADER = 100_000_000
"""Bytes of a safetensors file that are read as its header."""
SEAL = "seal"
"""The key of a table's own digest."""


def read_bytes(path: Path, most: int = MOST) -> bytes:
    """Return the bytes of a regular file; raise OSError for a pipe, which would block, a device or a larger file."""
    with open(path, "rb", opener=lambda name, how: os.open(name, how | getattr(os, "O_NONBLOCK", 0))) as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise OSError(22, "expected a plain file, found something else", str(path))
        if found.st_size > most:
            raise OSError(27, f"expected at most {most} bytes, found {found.st_size}", str(path))
        return file.read(most)


def read_text(path: Path, most: int = MOST) -> str:
    """Return the text of a regular file, UTF-8 with or without a mark; raise ValueError if it is not."""
    return read_bytes(path, most).decode("utf-8-sig")


def read_toml(path: Path) -> dict[str, Any]:
    """Return the tables of a TOML file; raise UserError if it cannot be read, is not TOML or is empty."""
    try:
        tables = tomllib.loads(read_text(path, LARGEST))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}; expected a TOML file") from None
    except (ValueError, RecursionError) as error:  # not UTF-8, not TOML, a number of thousands of digits, too deep
        raise UserError(f"{path} is not valid TOML: {error}") from None
    if not tables:
        raise UserError(f"{path} is empty; expected keys such as rounds = 100 (`fedspeed run --help` lists them)")
    refuse_depth(tables)
    return tables


def read_json(path: Path, most: int = 20_000_000) -> dict[str, Any]:
    """Return the table of a JSON file; an empty one if there is no file or it cannot be read."""
    try:
        found = json.loads(read_text(path, most))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def refuse_depth(tables: dict[str, Any], most: int = 20) -> None:
    """Raise for tables nested too deeply: the functions that read them are recursive."""
    layer: list[Any] = [tables]
    for _ in range(most):
        inner = [list(a.values()) if isinstance(a, dict) else a for a in layer]
        layer = [a for values in inner for a in values if isinstance(a, dict | list | tuple)]
    if layer:
        raise UserError(f"config: expected at most {most} tables inside each other, found more; flatten it")


def write(path: Path, content: str | bytes, durable: bool = False) -> None:
    """Write a file whole or not at all; `durable` flushes its bytes to the disk before it gets its name."""
    with atomic(path, durable) as file:
        file.write(content.encode() if isinstance(content, str) else content)


@contextmanager
def atomic(path: Path, durable: bool = False) -> Iterator[BinaryIO]:
    """Yield a file that replaces `path`, with its permissions, once it is written; on failure `path` is kept."""
    part = path.with_name(path.name + ".part")
    try:
        part.unlink(missing_ok=True)  # it may be a link, which must not be followed
        with part.open("xb") as file:
            yield file
            if durable:
                file.flush()
                os.fsync(file.fileno())  # fsync before rename: a crash must not leave the name without the bytes
        with suppress(OSError):  # no such file yet, or a file system without permissions
            part.chmod(stat.S_IMODE(path.stat().st_mode))
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def flush(path: Path) -> None:
    """Flush a file's bytes, or a folder's names, to the disk; do nothing if it does not exist or cannot be flushed."""
    with suppress(FileNotFoundError, PermissionError):  # Windows does not open folders
        number = os.open(path, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)


def cut(path: Path, length: int) -> None:
    """Truncate a file to at most its first `length` bytes."""
    if path.stat().st_size > length:
        os.truncate(path, length)


def key(seed: int, purpose: str, *path: int) -> int:
    """Return 128 bits that are a function of `(seed, purpose, *path)` alone; they fix every random stream."""
    name = struct.pack(f"<{1 + len(path)}q", seed, *path) + purpose.encode()
    return int.from_bytes(hashlib.blake2b(name, digest_size=16).digest(), "little")


class Hash:
    """The digest of all bytes so far, and their number `count`."""

    def __init__(self) -> None:
        self._hash, self.count = hashlib.blake2b(digest_size=16), 0

    def update(self, data: Any) -> None:
        """Add bytes."""
        self._hash.update(data)
        self.count += len(data)

    def digest(self) -> str:
        """Return the digest of all bytes so far; more may follow."""
        return self._hash.hexdigest()

    def take(self, path: Path, end: int) -> None:
        """Add the bytes of a file from position `count` up to `end`, or to the file's own end."""
        with path.open("rb") as file:
            file.seek(self.count)
            while self.count < end:
                data = file.read(min(2**20, end - self.count))
                if not data:
                    break
                self.update(data)


def prefix(path: Path, length: int) -> Hash:
    """Return the hash of the first `length` bytes of a file; its `count` is lower where the file is shorter."""
    found = Hash()
    found.take(path, length)
    return found


def digest(path: Path, flush: bool = False) -> str:
    """Return the digest of a file; `flush` writes its bytes to the disk first."""
    with path.open("rb") as file:
        if flush:
            os.fsync(file.fileno())
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def sealed(plain: dict[str, Any], indent: int | None = None) -> str:
    """Return a table as JSON with the digest of that JSON as its last entry, `seal`; an earlier seal is replaced.

    Example:
        >>> text = sealed({"a": 1})
        >>> seal_holds(text), seal_holds(text.replace("1", "2", 1)), seal_holds('{"a": 1}')
        (True, False, None)
    """
    plain = {key: value for key, value in plain.items() if key != SEAL}
    text = json.dumps(plain, indent=indent)
    return json.dumps({**plain, SEAL: hashlib.blake2b(text.encode(), digest_size=16).hexdigest()}, indent=indent)


def seal_holds(text: str, indent: int | None = None) -> bool | None:
    """Return whether JSON is exactly what `sealed` wrote; None if it has no seal, as files of older versions."""
    plain = json.loads(text)
    if SEAL not in plain:
        return None
    return sealed(plain, indent) == text


def tensors_digest(path: Path) -> str:
    """Return the digest of the tensors of a safetensors file: names, shapes and numbers, not the metadata."""
    with path.open("rb") as file:
        start = file.read(8)
        start += file.read(min(int.from_bytes(start, "little"), MOST_HEADER))
        try:
            header = json.loads(start[8:])
            header.pop("__metadata__", None)
            layout = json.dumps(header, sort_keys=True).encode()
        except (ValueError, TypeError, AttributeError, RecursionError):
            layout = b"damaged" + start
        found = hashlib.blake2b(layout, digest_size=16)
        while chunk := file.read(2**20):
            found.update(chunk)
    return found.hexdigest()


KINDS = ("fedspeed-states-", "fedspeed-verify-", "fedspeed-replay-", "fedspeed-ray-")
"""How the names of temporary folders begin."""
HELD = ".held"
"""How they end: a folder of another name may belong to a process that holds no lock."""


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
    """A new temporary folder of one of `KINDS`, removed by `close`, with the object, or when the process ends.

    The next start removes folders of killed processes: an unlocked folder belongs to a dead process.
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
    with closing(Scratch(kind)) as folder:
        yield folder.path


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


def flat(tables: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested tables as one table with dotted keys.

    Example:
        >>> flat({"lr": 0.1, "method": {"name": "fedavg"}})
        {'lr': 0.1, 'method.name': 'fedavg'}
    """
    found: dict[str, Any] = {}
    for key, value in tables.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return found


def merged(tables: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """Return tables with other values for some fields.

    Example:
        >>> merged({"lr": 0.1, "method": {"name": "fedspeed", "rho": 0.1}}, {"method": {"rho": 0.2}})
        {'lr': 0.1, 'method': {'name': 'fedspeed', 'rho': 0.2}}
    """
    inner = {key: merged(tables[key], value) for key, value in over.items() if _both(tables.get(key), value)}
    return {**tables, **over, **inner}


def difference(then: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """Return the values of `then` that differ from `now`: `merged(now, ...)` of them gives `then`.

    Example:
        >>> difference({"lr": 0.1, "method": {"rho": 0.1, "lam": 10}}, {"lr": 0.1, "method": {"rho": 0.2, "lam": 10}})
        {'method': {'rho': 0.1}}
    """
    found = {}
    for key, value in then.items():
        differs = difference(value, now[key]) if _both(value, now.get(key)) else value
        if differs != now.get(key) and (differs or not isinstance(differs, dict)):
            found[key] = differs
    return found


def _both(a: Any, b: Any) -> bool:
    return isinstance(a, dict) and isinstance(b, dict)
