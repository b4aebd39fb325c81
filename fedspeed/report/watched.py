"""A folder of runs that go on: whoever looks again reads only what has changed. Nothing is ever written."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from ..errors import UserError
from ..rundir import CODE, FILES, INSPECTION, MODEL, beside
from .collect import read_any, rows_of
from .runs import Row, RunFiles, folders_of_runs

READ = (*(name for name in FILES if name != MODEL), INSPECTION)
"""The files of a run that a page is made from."""


class Seen(NamedTuple):
    """A run as it was when read: what its files looked like, and what they said or why they could not be read."""

    stamp: tuple[object, ...]
    run: RunFiles | UserError


class Watched:
    """The runs of a folder, which may still be empty, as rows (`rows`), and why others are not among them (`left_out`).

    Args:
        folder: of runs, or a run; nothing outside of it is read, wherever links in it lead.
    """

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise UserError(f"{folder}: expected a folder of runs, found none; make it, or start a run in it")
        self.folder = folder
        self.rows: list[Row] = []
        self.left_out: list[str] = []
        self._seen: dict[Path, Seen] = {}

    def look(self) -> bool:
        """Read what is new; whether anything was."""
        try:
            folders = folders_of_runs(self.folder)
        except UserError:  # there are none yet
            folders = []
        before, self._seen = self._seen, {path: self._read(path) for path in folders}
        if before.keys() == self._seen.keys() and all(before[path] is seen for path, seen in self._seen.items()):
            return False
        self.rows, self.left_out = rows_of(folders, self._found, unfinished=True, in_order=True)
        return True

    def _found(self, path: Path) -> RunFiles:
        run = self._seen[path].run
        if isinstance(run, UserError):
            raise run
        return run

    def _read(self, path: Path) -> Seen:
        """A run, read again if its files changed, or if it has ended without a word."""
        seen = self._seen.get(path)
        stamp: tuple[object, ...] = tuple(_stamp(path / name) for name in READ)
        if seen and isinstance(seen.run, RunFiles) and seen.run.done and seen.stamp[1:] == stamp:
            return seen
        with beside(path) as busy:
            stamp = (busy, *stamp)
        if seen and seen.stamp == stamp:
            return seen
        try:
            self._refuse_links(path)
            return Seen(stamp, read_any(path))
        except UserError as error:
            return Seen(stamp, error)

    def _refuse_links(self, path: Path) -> None:
        root = self.folder.resolve()
        for place in (path, *(path / name for name in (*READ, CODE))):
            if not place.resolve().is_relative_to(root):
                raise UserError(f"{place.name} is a link that leads out of {self.folder}; copy what it leads to")


def _stamp(path: Path) -> tuple[int, ...]:
    try:
        found = path.stat()
    except OSError:
        return ()
    return found.st_mtime_ns, found.st_size, found.st_ino
