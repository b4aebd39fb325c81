"""Files inside a folder, a .zip or a .tar(.gz), read by name; nothing is ever unpacked onto the disk."""

from __future__ import annotations

import gzip
import tarfile
import zipfile
import zlib
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path, PurePosixPath

from ..errors import UserError

DAMAGED = (EOFError, tarfile.TarError, zipfile.BadZipFile, zlib.error, gzip.BadGzipFile, OSError)


class Tree:
    """A read-only view of the files below a path.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> _ = (folder / "a.txt").write_bytes(b"hello")
        >>> Tree(folder).read("a.txt")
        b'hello'
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.exists():
            raise UserError(f"data: expected a folder or an archive, found nothing at {path}")
        self.kind = "folder" if path.is_dir() else "zip" if path.suffix.lower() == ".zip" else "tar"

    @contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except DAMAGED as error:
            raise UserError(
                f"data: {self.path} is truncated or damaged ({type(error).__name__}: {error}); get it again"
            ) from error

    @cached_property
    def names(self) -> list[str]:
        """Paths of all files inside, with forward slashes, sorted."""
        with self._reading():
            if self.kind == "folder":
                found = [p.relative_to(self.path).as_posix() for p in self.path.rglob("*") if p.is_file()]
            elif self.kind == "zip":
                with zipfile.ZipFile(self.path) as archive:
                    found = [m.filename for m in archive.infolist() if not m.is_dir()]
            else:
                with tarfile.open(self.path) as archive:
                    found = [m.name for m in archive if m.isfile()]
        return sorted(found)

    def read(self, name: str) -> bytes:
        """The bytes of one file."""
        return next(iter(self.each([name])))[1]

    def each(self, names: Collection[str]) -> Iterator[tuple[str, bytes]]:
        """(name, bytes) of some files, in one pass; for folders and zip files in the order asked for."""
        if self.kind == "folder":
            for name in names:
                with self._reading():
                    blob = (self.path / name).read_bytes()
                yield name, blob
        elif self.kind == "zip":
            with self._reading():
                archive = zipfile.ZipFile(self.path)
            with archive:
                for name in names:
                    with self._reading():
                        blob = archive.read(name)
                    yield name, blob
        else:
            yield from self._each_of_tar(set(names))

    def _each_of_tar(self, wanted: set[str]) -> Iterator[tuple[str, bytes]]:
        with self._reading():
            archive = tarfile.open(self.path, "r|*")  # noqa: SIM115 (closed below; a stream, one pass)
        with archive:
            while True:
                with self._reading():
                    member = archive.next()
                    stream = archive.extractfile(member) if member and member.name in wanted else None
                    blob = stream.read() if stream else b""
                if member is None:
                    return
                if stream:
                    yield member.name, blob

    def collect(self, basenames: Collection[str]) -> dict[str, bytes] | None:
        """The bytes of files with these last names, or None if one is not there; of a folder, just inside it."""
        wanted: dict[str, str] = {}
        if self.kind == "folder":
            wanted = {name: name for name in basenames if (self.path / name).is_file()}
        else:
            for name in self.names:
                wanted.setdefault(PurePosixPath(name).name, name)
        if not all(name in wanted for name in basenames):
            return None
        found = dict(self.each([wanted[name] for name in basenames]))
        return {name: found[wanted[name]] for name in basenames}


def candidates(path: Path, inside: Collection[str]) -> Iterator[Tree]:
    """Where a copy may be: the path itself, or folders and archives of these names within it."""
    if not path.exists():
        raise UserError(f"data: expected a folder or an archive, found nothing at {path}")
    if path.is_file():
        yield Tree(path)
        return
    yield from (Tree(path / name) for name in inside if (path / name).exists())
    yield Tree(path)
