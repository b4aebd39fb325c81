"""Finished runs as files: one file of packed results, and one file per new result beside it."""

from __future__ import annotations

import gzip
import json
import shutil
import time
import zlib
from collections.abc import Iterable
from contextlib import AbstractContextManager, suppress
from pathlib import Path

from ..errors import UserError
from ..utils.files import read_bytes, write
from ..utils.locks import locked_beside
from .table import Result


class Store:
    """The results of a folder by key.

    `OUT/runs.jsonl.gz` has one line per result, sorted by key. A new result is `OUT/runs/KEY.json` until `pack` moves
    it into that file. Unfinished runs are in `OUT/work/KEY`, each claimed by one process. Processes may share a folder.
    """

    def __init__(self, out: Path) -> None:
        self.out = out
        self.work = out / "work"
        self.packed = out / "runs.jsonl.gz"
        self._known: dict[str, Result] | None = None
        self.read_at = 0.0  # the time at which `_known` was read

    def results(self) -> dict[str, Result]:
        """Return all results by key."""
        if self._known is None:
            self._known = self._read()
        return self._known

    def get(self, key: str, measure: Iterable[str] = ()) -> Result | None:
        """Return a finished run that has these measures, or None."""
        found = self.results().get(key)
        return found if found is not None and all(name in found["measures"] for name in measure) else None

    def put(self, result: Result) -> None:
        """Store a finished run, and remove its run directory.

        The result is durable (fsync) before the directory is removed, so a crash loses neither.
        """
        with self.alone():
            (self.out / "runs").mkdir(parents=True, exist_ok=True)
            write(self._file(result["key"]), _line(result), durable=True)
        self.learn(result)
        shutil.rmtree(self.work / result["key"], ignore_errors=True)
        (self.work / f".{result['key']}.lock").unlink(missing_ok=True)

    def learn(self, result: Result) -> None:
        """Remember a result that another process has stored."""
        if self._known is not None:
            self._known[result["key"]] = result

    def later(self, key: str, since: float) -> Result | None:
        """Return a finished run that was stored or packed after a time, or None."""
        with suppress(FileNotFoundError):
            return _parse(self._file(key), read_bytes(self._file(key))).get(key)
        with suppress(FileNotFoundError):
            if self.packed.stat().st_mtime > since - 1:  # the time of a file may lag behind the clock
                return _parse(self.packed, read_bytes(self.packed)).get(key)
        return None

    def claim(self, key: str) -> AbstractContextManager[bool]:
        """Claim a run inside the `with`; yield False while another process makes it (where locks exist)."""
        return locked_beside(self.work / key, tries=1)

    def pack(self) -> None:
        """Move the new results into the packed file; the same results give the same bytes."""
        if not self._new():  # without results, do not create the folder of the lock
            return
        with self.alone():
            new = self._new()
            if not new:
                return
            self._known = self._read()
            lines = "".join(map(_line, self._known.values()))
            write(self.packed, gzip.compress(lines.encode(), mtime=0), durable=True)
            for path in new:  # only after the packed file is durable (fsync before unlink)
                path.unlink()
            with suppress(OSError):  # the user's own files are in it
                (self.out / "runs").rmdir()

    def _read(self) -> dict[str, Result]:
        """Read new results first: one that is packed meanwhile is then found in the packed file."""
        self.read_at = time.time()
        new: dict[str, Result] = {}
        for path in self._new():
            with suppress(FileNotFoundError):
                new |= _parse(path, read_bytes(path))
        with suppress(FileNotFoundError):
            new = _parse(self.packed, read_bytes(self.packed)) | new
        return dict(sorted(new.items()))

    def _file(self, key: str) -> Path:
        return self.out / "runs" / f"{key}.json"

    def _new(self) -> list[Path]:
        try:
            return sorted((self.out / "runs").glob("*.json"))
        except FileNotFoundError:  # another process packed the results and removed the folder meanwhile
            return []

    def alone(self) -> AbstractContextManager[bool]:
        """Lock the folder, so that results are stored and packed, and pages written, by one process at a time."""
        return locked_beside(self.work / "runs")


def _line(result: Result) -> str:
    return json.dumps(result) + "\n"


def _parse(path: Path, data: bytes) -> dict[str, Result]:
    """Parse the results of a file, compressed or not, by key."""
    try:
        text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode()
        found = {result["key"]: result for result in map(json.loads, text.splitlines())}
        if not found or not all(
            isinstance(r["measures"], dict) and r.get("wall_seconds", 0) >= 0 for r in found.values()
        ):
            raise ValueError("no result, or one without measures")
        return found
    except (OSError, EOFError, zlib.error, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(
            f"{path}: expected results of runs, found a damaged file ({error!r}); restore it, or delete it, and its "
            f"runs are made again"
        ) from None
