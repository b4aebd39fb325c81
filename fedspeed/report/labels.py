"""Labels of runs in a comparison: the method, and the fields that differ."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from ..config.plan import PLACEMENT
from ..utils.tables import flat

ELSEWHERE = (*PLACEMENT, "engine", "format", "seed", "targets")
"""Keys of a config that do not distinguish rows: the seed, and where and how the run was computed."""
CODED = ("method.", "model.", "data.")
"""Tables of a config that may name a Python file."""


def kind_of(config: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a config that distinguishes rows (method and setting), flat."""
    kind = flat({key: value for key, value in config.items() if key not in ELSEWHERE})
    for key in [key for key in kind if key.startswith(CODED) and key.endswith(".origin")]:
        table = key.removesuffix(".origin")  # code is named by the user's file, not by the copy in the run
        kind[f"{table}.name"] = f"{Path(str(kind.pop(key))).name}:{str(kind.get(f'{table}.name')).rpartition(':')[2]}"
        kind[f"{table}.code"] = str(kind.get(f"{table}.code"))[:8]
    for table, own in (
        ("model", "digest"),
        ("data", "split_fingerprint"),
    ):  # objects of the caller differ in every seed
        if kind.get(f"{table}.name") == "given":
            kind.pop(f"{table}.{own}", None)
    parts = (part.partition("=") for part in str(kind.pop("warmup", "")).split(",") if part)
    return kind | {f"warmup.{name}": rounds for name, _, rounds in parts}


def labels(kinds: list[dict[str, Any]], usual: dict[str, dict[str, Any]]) -> list[str]:
    """Return `NAME:field=value,... key=value`: fields that differ within a name or from defaults, keys that differ."""
    found = []
    for kind in kinds:
        name = str(kind.get("method.name", "?"))
        alike = [other for other in kinds if other.get("method.name") == name]
        alike += [flat({"method": usual[name]}), _usual(kind, usual, "method")] if name in usual else []
        own = [
            key
            for key in kind
            if key.startswith("method.") and any(o.get(key) != kind[key] for o in alike if _same(key, kind, o))
        ]
        rest = [
            key
            for key in kind
            if not key.startswith("method.")
            and any(o.get(key) != kind[key] for o in kinds if _shares(key) or o.get("method.name") == name)
        ]
        fields = ",".join(f"{key.removeprefix('method.')}={_plain(kind[key])}" for key in own)
        found.append(" ".join([name + (f":{fields}" if fields else ""), *(f"{k}={_plain(kind[k])}" for k in rest)]))
    return found


def _usual(kind: dict[str, Any], usual: dict[str, dict[str, Any]], table: str) -> dict[str, Any]:
    """Return the default fields of the method and of the method inside it, flat."""
    found, inner = flat({table: usual[str(kind[f"{table}.name"])]}), f"{table}.base"
    if kind.get(f"{inner}.name") not in usual:
        return found
    return {key: value for key, value in found.items() if not key.startswith(inner)} | _usual(kind, usual, inner)


def _same(key: str, kind: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether a key is a field of the same method in both; names of methods always are."""
    table, _, field = key.rpartition(".")
    return field == "name" or kind.get(f"{table}.name") == other.get(f"{table}.name")


def _shares(key: str) -> bool:
    """Whether all methods have a key; schedules of fields other than the rate are for methods with the field."""
    return key != "follow_lr" and (not key.startswith("warmup.") or key == "warmup.lr")


def _plain(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) and math.isfinite(value) else str(value).replace(" ", "")
