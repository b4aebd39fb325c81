"""Digests: of names, of files, and of files that grow."""

from __future__ import annotations

import hashlib
import json
import os
import struct
from contextlib import suppress
from pathlib import Path
from typing import Any

SEAL = "seal"
"""The key of a table's own digest."""
MOST_HEADER = 100_000_000
"""Bytes of a safetensors file that are read as its header."""


def key(seed: int, purpose: str, *path: int) -> int:
    """128 bits that are a function of `(seed, purpose, *path)` alone."""
    name = struct.pack(f"<{1 + len(path)}q", seed, *path) + purpose.encode()
    return int.from_bytes(hashlib.blake2b(name, digest_size=16).digest(), "little")


class Hash:
    """blake2b (128 bit) of what was written so far, and how many bytes that was."""

    def __init__(self) -> None:
        self._hash, self.count = hashlib.blake2b(digest_size=16), 0

    def update(self, data: Any) -> None:
        """More bytes."""
        self._hash.update(data)
        self.count += len(data)

    def digest(self) -> str:
        """Of all bytes so far; more may come."""
        return self._hash.hexdigest()

    def take(self, path: Path, end: int) -> None:
        """The bytes of a file from where this stands up to `end`, or to the file's own end."""
        with path.open("rb") as file:
            file.seek(self.count)
            while self.count < end:
                data = file.read(min(2**20, end - self.count))
                if not data:
                    break
                self.update(data)


def prefix(path: Path, length: int) -> Hash:
    """The hash of the first bytes of a file; its `count` says how many there were."""
    found = Hash()
    found.take(path, length)
    return found


def digest(path: Path, flush: bool = False) -> str:
    """blake2b of a file's bytes; `flush` has them on the disk first."""
    with path.open("rb") as file:
        if flush:
            os.fsync(file.fileno())
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def sealed(plain: dict[str, Any], indent: int | None = None) -> str:
    """Return a table as JSON with the digest of that JSON as its last entry, `seal`; one that it has is replaced.

    Example:
        >>> text = sealed({"a": 1})
        >>> seal_holds(text), seal_holds(text.replace("1", "2", 1)), seal_holds('{"a": 1}')
        (True, False, None)
    """
    plain = {key: value for key, value in plain.items() if key != SEAL}
    text = json.dumps(plain, indent=indent)
    return json.dumps({**plain, SEAL: hashlib.blake2b(text.encode(), digest_size=16).hexdigest()}, indent=indent)


def seal_holds(text: str, indent: int | None = None) -> bool | None:
    """Whether JSON is what `sealed` wrote, in every byte; None if it has no seal, as files of older versions."""
    plain = json.loads(text)
    if SEAL not in plain:
        return None
    return sealed(plain, indent) == text


def tensors_digest(path: Path) -> str:
    """blake2b of the tensors of a safetensors file: names, shapes and numbers, not what is noted beside them."""
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


def flush(path: Path) -> None:
    """Have a file's bytes, or a folder's names, on the disk; where there is none, or it cannot be flushed, nothing."""
    with suppress(FileNotFoundError, PermissionError):  # Windows does not open folders
        number = os.open(path, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)


def cut(path: Path, length: int) -> None:
    """Cut off what a file has beyond its first bytes."""
    if path.stat().st_size > length:
        os.truncate(path, length)
