"""Files inside a folder, a .zip or a .tar(.gz), read by name; nothing is ever unpacked onto the disk.

Each reader passes the size of the published files: a file or an archive that unpacks to much more is refused before it
is read, and so is anything that is not a regular file (a FIFO would block).
"""

from __future__ import annotations

import bz2
import gzip
import lzma
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import IO, Any

from ..errors import UserError

DAMAGED = (EOFError, OSError, RuntimeError, ValueError, OverflowError, KeyError, MemoryError, tarfile.TarError,
           zipfile.BadZipFile, zlib.error, lzma.LZMAError, struct.error)  # fmt: skip
"""Exceptions of the readers of archives; RuntimeError is an encrypted or unknown member."""
MOST = 2**28
"""The largest size of one file in bytes where nothing else is known."""
HEADER = 2**20
"""The largest size of a header inside a tar file in bytes."""
WHOLE = 4
"""An archive may unpack to at most this many times the largest file."""


def too_long(where: str, most: int) -> UserError:
    """Return the error for a file that is longer than any published one."""
    return UserError(f"data: {where} is longer than {most / 1e6:.0f} MB, expected less; it is not what was published")


def read_file(path: Path, most: int = MOST) -> bytes:
    """Return the bytes of a regular file that is not longer than `most`."""
    try:
        if not path.is_file():
            raise UserError(f"data: {path} is not a regular file, expected one; replace or remove it")
        with path.open("rb") as file:
            blob = file.read(min(most, path.stat().st_size) + 1)
    except OSError as error:
        raise UserError(f"data: cannot read {path} ({error.strerror or error}); check that it can be read") from None
    if len(blob) > most:
        raise too_long(str(path), most)
    return blob


class Unpacked:
    """A compressed stream that raises an error after more than `most` bytes."""

    def __init__(self, path: Path, most: int) -> None:
        self.path = path
        self.most = most
        self.left = most
        with path.open("rb") as file:
            begins = file.read(6)
        kinds = {b"\x1f\x8b": gzip.open, b"BZ": bz2.open, b"\xfd7": lzma.open}
        opened: Any = kinds.get(begins[:2], open)
        self.file: IO[bytes] = opened(path, "rb")

    def read(self, size: int = -1) -> bytes:
        """Return the next bytes."""
        blob = self.file.read(size if 0 <= size <= self.left else self.left + 1)
        self.left -= len(blob)
        if self.left < 0:
            raise too_long(f"what {self.path} unpacks to", self.most)
        return blob


class Member(tarfile.TarInfo):
    """A member of a tar file; headers that are read into memory, long names for example, are limited."""

    def _proc_member(self, archive: tarfile.TarFile) -> Any:
        header = not self.isreg() and self.type not in (tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE)
        if header and self.size > HEADER:
            raise tarfile.ReadError(f"a header of {self.size} bytes")
        return super()._proc_member(archive)  # type: ignore[misc]


class FileTree:
    """A read-only view of the files below a path.

    Args:
        most: the largest size of one file in bytes.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> _ = (folder / "a.txt").write_bytes(b"hello")
        >>> FileTree(folder).read("a.txt")
        b'hello'
    """

    def __init__(self, path: Path, most: int = MOST) -> None:
        self.path, self.most = path, most
        if not path.is_dir() and not path.is_file():
            found = "something else" if path.exists() else "nothing"
            raise UserError(f"data: expected a folder or an archive, found {found} at {path}")
        self.kind = "folder" if path.is_dir() else "zip" if path.suffix.lower() == ".zip" else "tar"

    @contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except UserError:
            raise
        except DAMAGED as error:
            raise UserError(
                f"data: {self.path} is truncated or damaged ({type(error).__name__}: {error}); get it again"
            ) from error

    @cached_property
    def names(self) -> list[str]:
        """Return the paths of all files inside, with forward slashes, sorted."""
        with self._reading():
            if self.kind == "folder":
                found = [p.relative_to(self.path).as_posix() for p in self.path.rglob("*") if p.is_file()]
            elif self.kind == "zip":
                with zipfile.ZipFile(self.path) as archive:
                    found = [m.filename for m in archive.infolist() if not m.is_dir()]
            else:
                with self._tar() as archive:
                    found = [m.name for m in archive if m.isreg()]
        return sorted(found)

    def read(self, name: str) -> bytes:
        """Return the bytes of one file."""
        return next(iter(self.each([name])))[1]

    def text(self, name: str) -> str:
        """Return the text of one file."""
        try:
            return self.read(name).decode()
        except UnicodeDecodeError as error:
            raise UserError(f"data: {self.path}: {name} is not UTF-8 text ({error.reason}); get it again") from None

    def each(self, names: Collection[str]) -> Iterator[tuple[str, bytes]]:
        """Yield (name, bytes) of some files, in one pass; for folders and zip files in the given order."""
        if self.kind == "folder":
            for name in names:
                yield name, read_file(self.path / name, self.most)
        elif self.kind == "zip":
            with self._reading():
                archive = zipfile.ZipFile(self.path)
            with archive:
                for name in names:
                    with self._reading():
                        self._check(name, archive.getinfo(name).file_size)
                        blob = archive.read(name)
                    yield name, blob
        else:
            yield from self._each_of_tar(set(names))

    @contextmanager
    def _tar(self) -> Iterator[tarfile.TarFile]:
        """Open the archive as a stream, for one pass."""
        with self._reading():
            stream = Unpacked(self.path, WHOLE * self.most)
        with stream.file:
            with self._reading():
                opened: Any = tarfile.open  # it takes any stream that can be read
                archive = opened(fileobj=stream, mode="r|", tarinfo=Member)
            with archive:
                yield archive

    def _each_of_tar(self, wanted: set[str]) -> Iterator[tuple[str, bytes]]:
        with self._tar() as archive:
            while True:
                with self._reading():
                    member = archive.next()
                    stream = None
                    if member and member.isreg() and member.name in wanted:
                        self._check(member.name, member.size)
                        stream = archive.extractfile(member)
                    blob = stream.read() if stream else b""
                if member is None:
                    return
                if stream:
                    yield member.name, blob

    def _check(self, name: str, size: int) -> None:
        if size > self.most:
            raise too_long(f"{self.path}: {name}", self.most)

    def collect(self, basenames: Collection[str]) -> dict[str, bytes] | None:
        """Return the bytes of files with these base names, None if one is missing; in a folder, directly inside."""
        if self.kind == "folder":
            wanted = {name: name for name in basenames if (self.path / name).exists()}
        else:  # the first of several files with one name
            wanted = {PurePosixPath(name).name: name for name in reversed(self.names)}
        if not all(name in wanted for name in basenames):
            return None
        found = dict(self.each([wanted[name] for name in basenames]))
        return {name: found[wanted[name]] for name in basenames}


def candidates(path: Path, inside: Collection[str], most: int = MOST) -> Iterator[FileTree]:
    """Yield the places of a copy: folders and archives of these names within a path, then the path itself."""
    if path.is_dir():
        yield from (FileTree(path / name, most) for name in inside if (path / name).exists())
    yield FileTree(path, most)
