"""What differs between two run directories; reads their files only."""

from __future__ import annotations

import hashlib
import json
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..files import read_bytes, read_text
from ..record import PLACED, TIMES

MOST_HEADER = 100_000_000
FINGERPRINTS = ("data_fingerprint", "split_fingerprint")
SECTIONS = ("config", "data", "environment", "results", "model")


class Absent:
    """Stands where a run says nothing, which is not the same as saying None."""

    def __repr__(self) -> str:
        return "-"


ABSENT = Absent()


@dataclass(frozen=True)
class Difference:
    """One thing that two runs say differently.

    Args:
        section: one of `SECTIONS`.
        name: what, e.g. `method.rho` or `round 7: drift`.
        a, b: what each run says; `ABSENT` where it says nothing.
    """

    section: str
    name: str
    a: Any
    b: Any


def differences(a: Path, b: Path) -> list[Difference]:
    """Config, fingerprints, versions, the first round that differs, the model: what is not the same but for times."""
    return [*_tables("config", _config(a), _config(b)), *_summaries(a, b), *_rounds(a, b), *_models(a, b)]


def _summaries(a: Path, b: Path) -> list[Difference]:
    """Fingerprints and environment, and what else the summaries say. Rounds and totals follow from the rounds."""
    first, second = _json(a / "summary.json"), _json(b / "summary.json")
    for summary in (first, second):
        for name in ("digests", "engine", *PLACED):  # what was computed is compared as rounds, model and config
            summary.pop(name, None)
    data = _tables("data", *({k: s.pop(k, ABSENT) for k in FINGERPRINTS} for s in (first, second)))
    made_on = _tables("environment", *(_dict(s.pop("environment", None)) for s in (first, second)))
    return [*data, *made_on, *_tables("results", _timeless(first), _timeless(second))]


def _rounds(a: Path, b: Path) -> list[Difference]:
    """The first round that is not the same but for times, and which of its fields."""
    first, second = _lines(a / "rounds.jsonl"), _lines(b / "rounds.jsonl")
    for t, (one, other) in enumerate(zip(first, second, strict=False), 1):
        found = _tables("results", _timeless(one), _timeless(other))
        if found:
            return [Difference("results", f"round {t} (the first that differs): {f.name}", f.a, f.b) for f in found]
    lengths = (len(first), len(second))
    return [] if lengths[0] == lengths[1] else [Difference("results", "rounds in rounds.jsonl", *lengths)]


def _models(a: Path, b: Path) -> list[Difference]:
    first, second = (model_digest(run / "model.safetensors") or ABSENT for run in (a, b))
    return [] if first == second else [Difference("model", "digest of the parameters", first, second)]


def model_digest(path: Path) -> str | None:
    """blake2b of the tensors of a safetensors file: names, shapes and numbers, not what is noted beside them."""
    if not path.is_file():
        return None
    with path.open("rb") as file:
        start = file.read(8)
        start += file.read(min(int.from_bytes(start, "little"), MOST_HEADER))
        try:
            header = json.loads(start[8:])
            header.pop("__metadata__", None)
            layout = json.dumps(header, sort_keys=True).encode()
        except (ValueError, AttributeError, RecursionError):
            layout = b"damaged" + start
        found = hashlib.blake2b(layout, digest_size=16)
        while chunk := file.read(2**20):
            found.update(chunk)
    return found.hexdigest()


def _tables(section: str, a: dict[str, Any], b: dict[str, Any]) -> list[Difference]:
    """Keys whose values differ; those of nested tables as `method.rho`."""
    found = []
    for key in [*a, *(key for key in b if key not in a)]:
        if key == "origin":  # where the user had the method's file; its code is compared
            continue
        one, other = a.get(key, ABSENT), b.get(key, ABSENT)
        if isinstance(one, dict) and isinstance(other, dict):
            inner = _tables(section, one, other)
            found += [Difference(section, f"{key}.{f.name}", f.a, f.b) for f in inner]
        elif one != other or type(one) is not type(other):
            found.append(Difference(section, key, one, other))
    return found


def flat(tables: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables as one.

    Example:
        >>> flat({"lr": 0.1, "method": {"name": "fedavg"}})
        {'lr': 0.1, 'method.name': 'fedavg'}
    """
    found: dict[str, Any] = {}
    for key, value in tables.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return found


def _config(run: Path) -> dict[str, Any]:
    try:
        return _shallow(tomllib.loads(read_text(run / "config.toml", 100_000)))
    except OSError as error:
        raise UserError(f"{run} holds no run: expected a config.toml ({error.strerror})") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{run / 'config.toml'} is not valid TOML: {error}") from None


def _json(path: Path) -> dict[str, Any]:
    """A summary, nothing where the run is not finished."""
    try:
        return _shallow(_dict(json.loads(read_text(path)))) if path.exists() else {}
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read: {error}; `fedspeed verify` looks closer") from None


def _lines(path: Path) -> list[dict[str, Any]]:
    """The rounds; a last line that was cut off is not one."""
    lines: list[dict[str, Any]] = []
    for text in read_bytes(path).decode("utf-8", "replace").splitlines() if path.exists() else []:
        try:
            lines.append(dict(json.loads(text)))
        except (ValueError, TypeError, RecursionError):
            break
    return lines


def _shallow(tables: dict[str, Any], most: int = 50) -> dict[str, Any]:
    """Tables, if they are not nested beyond any use."""
    layer: list[Any] = [tables]
    for _ in range(most):
        layer = [value for table in layer for value in table.values() if isinstance(value, dict)]
    if layer:
        raise ValueError(f"tables nested more than {most} deep")
    return tables


def _timeless(table: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in table.items() if key not in TIMES}


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
