"""A run as other programs are told of it: a name, hyper-parameters, tags, and numbers per round."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import UserError
from ..record import Record
from ..report.runs import folders_of_runs
from ..rundir import RunDir, beside
from ..stopping import RULES
from ..tables import flat

MAY_CHANGE = ("rounds", "data_dir", "targets", *RULES)
"""Keys of a config that may be others when a run is continued."""


class Told(NamedTuple):
    """One round: when it was done, in seconds since 1970, and its numbers by name."""

    round: int
    time: float
    numbers: dict[str, float]


@dataclass(frozen=True)
class Source:
    """What a run directory says, of a run that is over or still under way."""

    path: Path
    config: dict[str, Any]
    records: Sequence[Record]
    status: str = "running"

    @classmethod
    def read(cls, path: Path) -> Source:
        """Read a run directory, whatever its state; a UserError says what is wrong with it. Nothing is executed."""
        files = RunDir(path)
        config = files.config()
        if not str(_table(config, "method").get("name", "")):
            raise UserError(f"{files.config_file} names no method")
        with beside(path) as going:
            told, records = files.told(), files.records()
            lines = len(files.rounds_file.read_bytes().splitlines()) if files.rounds_file.exists() else 0
        over = told is not None and not going
        wanted = (told or {}).get("rounds") if over else max(lines - 1, len(records))  # a last line may be half written
        if wanted != len(records):
            if wanted is None:
                raise UserError(f"{files.summary_file} is damaged: it cannot be read")
            raise UserError(f"{files.rounds_file} is damaged: expected {wanted} rounds, found {len(records)}")
        status = str((told or {}).get("status", "")) if over else "running" if going else "interrupted"
        return cls(path, config, records, status)

    @property
    def name(self) -> str:
        """The last two parts of its path, `demo/fedavg-s0`."""
        return "/".join(self.path.resolve().parts[-2:]).lstrip("/")

    @property
    def key(self) -> str:
        """What tells it from other runs, in a tracker for example: its name and config. The same when it continues."""
        config = {key: value for key, value in self.config.items() if key not in MAY_CHANGE}
        text = json.dumps([self.name, config], sort_keys=True, default=str)
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    @property
    def tags(self) -> dict[str, str]:
        """Method, data and seed."""
        method, data = (_label(_table(self.config, name)) for name in ("method", "data"))
        return {"method": method, "data": data, "seed": str(self.config.get("seed", 0))}

    @property
    def parameters(self) -> dict[str, Any]:
        """The config, flat: `method.rho`; lists are text."""
        values = flat(self.config).items()
        return {key: value if isinstance(value, bool | int | float | str) else str(value) for key, value in values}

    @property
    def began(self) -> float:
        """When the config was written, in seconds since 1970."""
        return RunDir(self.path).config_file.stat().st_mtime

    def rounds(self, last: int = 0) -> list[Told]:
        """The rounds, the `last` ones only unless 0; times are the beginning and what all rounds until then took."""
        done = accumulate(record.seconds + record.eval_seconds for record in self.records)
        pairs = list(zip(self.records, done, strict=True))[-last:]
        return [Told(record.round, self.began + spent, numbers(record)) for record, spent in pairs]


def numbers(record: Record) -> dict[str, float]:
    """What of a record is a number, by name: of a list its length, metrics as `metrics/NAME`; None is left out.

    Example:
        >>> sizes = {"bytes_down": 8, "bytes_up": 8, "grad_evals": 10.0, "seconds": 0.5, "eval_seconds": 0.0}
        >>> losses = {"train_loss": 2.3, "test_loss": None, "test_accuracy": None, "drift": 0.0, "update_norm": 1.0}
        >>> lists = {"cohort": [4, 7], "dropped": [7], "stragglers": []}
        >>> found = numbers(Record(round=1, lr=0.1, **sizes, **losses, **lists, metrics={"a": 1}))
        >>> found["cohort"], found["dropped"], found["metrics/a"], "test_loss" in found, "round" in found
        (2, 1, 1, False, False)
    """
    found: dict[str, float] = {}
    for key, value in record.to_dict().items():
        values = {f"{key}/{name}": one for name, one in value.items()} if isinstance(value, dict) else {key: value}
        found |= {name: len(one) if isinstance(one, list) else one for name, one in values.items()}
    return {name: value for name, value in found.items() if value is not None and name != "round"}


def read_runs(given: Iterable[Path]) -> tuple[list[Source], list[str]]:
    """The runs of run directories, and of folders of them; and why others are left out. At least one, each once."""
    found: dict[str, Source] = {}
    out = []
    for path in {folder.resolve(): folder for each in given for folder in folders_of_runs(each)}.values():
        try:
            run = Source.read(path)
        except (UserError, OSError) as error:
            out.append(f"{path}: {error}")
            continue
        if run.name in found:
            both = f"{found[run.name].path} and {path}"
            raise UserError(f"two runs are called {run.name}: {both}; export them one by one, to different places")
        found[run.name] = run
    if not found:
        raise UserError(f"no run can be read: {'; '.join(out) or 'none was given'}")
    return list(found.values()), out


def _table(config: dict[str, Any], name: str) -> dict[str, Any]:
    found = config.get(name)
    return found if isinstance(found, dict) else {"name": found or ""}


def _label(table: dict[str, Any]) -> str:
    """A name; of code from a file, that file's and the class."""
    name = str(table.get("name", ""))
    return f"{Path(str(table['origin'])).name}:{name.rpartition(':')[2]}" if "origin" in table else name
