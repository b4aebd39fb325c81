"""Finished runs as files."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path

from ..errors import UserError
from ..files import write
from .recipes import Tables


class Store:
    """Finished runs as JSON files, one a key: `OUT/runs/KEY.json`; runs in the making are in `OUT/work/KEY`."""

    def __init__(self, out: Path) -> None:
        self.out, self.work = out, out / "work"
        self._read: dict[str, Tables] = {}

    def get(self, key: str, measure: Iterable[str] = ()) -> Tables | None:
        """A finished run that has what is to be measured, or None."""
        path = self.out / "runs" / f"{key}.json"
        if key not in self._read and path.exists():
            try:
                self._read[key] = json.loads(path.read_text("utf-8"))
            except (OSError, ValueError) as error:
                raise UserError(f"{path} cannot be read ({error}); delete it, and the run is made again") from None
        found = self._read.get(key)
        return found if found is not None and all(name in found["measures"] for name in measure) else None

    def put(self, record: Tables) -> None:
        """Keep a finished run, and drop the directory it was made in."""
        (self.out / "runs").mkdir(parents=True, exist_ok=True)
        write(self.out / "runs" / f"{record['key']}.json", json.dumps(record) + "\n")
        self._read[record["key"]] = record
        shutil.rmtree(self.work / record["key"], ignore_errors=True)
