"""Files that may be anybody's: read only if they are plain files of a sensible size, written whole or not at all."""

from __future__ import annotations

import os
import stat
from pathlib import Path

MOST = 2**31
"""Bytes beyond which a file that is read as a whole is refused."""


def read_bytes(path: Path, most: int = MOST) -> bytes:
    """The bytes of a regular file; a pipe, a device or a larger file raises OSError (a pipe would be waited for)."""
    number = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    with open(number, "rb") as file:
        found = os.fstat(number)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(22, "expected a plain file, found something else", str(path))
        if found.st_size > most:
            raise OSError(27, f"expected at most {most} bytes, found {found.st_size}", str(path))
        return file.read(most)


def read_text(path: Path, most: int = MOST) -> str:
    """The text of a regular file, UTF-8 with or without a mark; ValueError if it is not."""
    return read_bytes(path, most).decode("utf-8-sig")


def write(path: Path, content: str | bytes, durable: bool = False) -> None:
    """Write a file whole or not at all; `durable` has its bytes on the disk before it has its name."""
    part = path.with_name(path.name + ".part")
    try:
        part.unlink(missing_ok=True)  # it may be a link
        with part.open("xb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(part, path)
    except OSError:
        part.unlink(missing_ok=True)
        raise
