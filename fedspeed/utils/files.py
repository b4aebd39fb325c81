"""Files: read with limits, written whole or not at all, and identified by digests.

Files may come from other people: only plain files of a sensible size are read. A file gets its name when all of its
bytes are written. Digests are blake2b with 128 bits; a table that holds its own digest is sealed.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import struct
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
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
