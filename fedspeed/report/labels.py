"""Labels of runs in a comparison: the method, and the fields that differ."""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..config.config import TABLES
from ..config.lr_schedule import shown
from ..config.plan import PLACEMENT
from ..config.spec import FROM_FILES, OWN_CODE, UNSET, setting_text
from ..utils.files import flat

ELSEWHERE = (*PLACEMENT, "engine", "layers", "format", "seed", "targets", OWN_CODE)
"""Keys of a config that do not distinguish rows: the seed, and where and how the run was computed."""

NOT_BESIDES = ("method", "lr_decay", "lr_schedule", "warmup", "follow_lr", "client_metrics", "data_dir")
"""Tables and keys of the method and its schedules, and those that train nothing."""


def kind_of(config: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a config that distinguishes rows (method and setting), flat."""
    named = {key: config[key] for key in FROM_FILES if isinstance(config.get(key), dict)}  # files, like the code below
    texts = {key: setting_text(table) for key, table in named.items()}
    texts |= {f"{key}.code": str(table.get("code"))[:8] for key, table in named.items()}
    kind = flat({key: value for key, value in (config | texts).items() if key not in ELSEWHERE})
    for key in [key for key in kind if key.partition(".")[0] in TABLES and key.endswith(".origin")]:
        table = key.removesuffix(".origin")  # code is named by the user's file, not by the copy in the run
        kind[f"{table}.name"] = f"{Path(str(kind.pop(key))).name}:{str(kind.get(f'{table}.name')).rpartition(':')[2]}"
        kind[f"{table}.code"] = str(kind.get(f"{table}.code"))[:8]
    for table, own in (("model", "digest"), ("data", "split_fingerprint")):
        if kind.get(f"{table}.name") == "given":  # objects of the caller differ in every seed
            kind.pop(f"{table}.{own}", None)
    parts = (part.partition("=") for part in str(kind.pop("warmup", "")).split(",") if part)
    return kind | {f"warmup.{name}": rounds for name, _, rounds in parts}


def besides_method(configs: Sequence[dict[str, Any]]) -> dict[str, list[str]]:
    """Return what differs between runs besides the method and its schedules: by key, one value per config.

    Example:
        >>> besides_method([{"rounds": 20, "lr": 0.1, "method": {"name": "fedavg"}}, {"rounds": 40, "lr": 0.1}])
        {'rounds': ['20', '40']}
    """
    kinds = [kind_of(config) for config in configs]
    keys = dict.fromkeys(key for kind in kinds for key in kind if key.partition(".")[0] not in NOT_BESIDES)
    values = {key: [_plain(kind.get(key) or UNSET.get(key, "none")) for kind in kinds] for key in keys}
    return {key: of for key, of in values.items() if len(set(of)) > 1}


def labels(kinds: list[dict[str, Any]], usual: dict[str, dict[str, Any]]) -> list[str]:
    """Return `NAME:field=value,... key=value`: fields that differ within a name or from defaults, keys that differ.

    A method in wrappers is written as on the command line, `fedspeed:rho=0.3+topk:fraction=0.1`.
    """
    found = []
    for kind in kinds:
        own, outer = [other for other in kinds if _names(other) == _names(kind)], str(kind.get("method.name"))
        alike = [*own, *([flat({"method": usual[outer]}), _usual(kind, usual, "method")] if outer in usual else [])]
        fields: dict[str, list[str]] = {table: [] for table in _names(kind)}
        rest = []
        for key, value in kind.items():
            table, _, field = key.rpartition(".")
            if table in fields:
                if field != "name" and any(other.get(key) != value for other in alike if _same(key, kind, other)):
                    fields[table].append(f"{field}={_plain(value)}")
            elif any(other.get(key) != value for other in (kinds if _shares(key) else own)):
                rest.append(f"{key}={_plain(value)}")
        parts = [
            name + (":" + ",".join(fields[table]) if fields[table] else "") for table, name in _names(kind).items()
        ]
        found.append(" ".join(["+".join(reversed(parts)), *rest]))
    return found


def _names(kind: dict[str, Any]) -> dict[str, str]:
    """Return the names of a method's wrappers, the outermost first, and of the method, each by its table."""
    found, table = {"method": str(kind.get("method.name", "?"))}, "method.base"
    while f"{table}.name" in kind:
        found[table], table = str(kind[f"{table}.name"]), f"{table}.base"
    return found


def paper_names(labels: Sequence[str]) -> dict[str, str]:
    """Return the labels as a paper writes them; those of which two would be the same stay.

    Example:
        >>> paper_names(["scaffold", "fedspeed:rho=0,lam=10", "mine.py:FedMom", "fedavg lr=0.1"])
        {'scaffold': 'SCAFFOLD', 'fedspeed:rho=0,lam=10': 'FedSpeed (rho=0, lam=10)', 'mine.py:FedMom': 'FedMom', \
'fedavg lr=0.1': 'fedavg lr=0.1'}
    """
    found = {label: _paper_name(label) for label in labels}
    shared = [name for name, times in Counter(found.values()).items() if times > 1]
    return {label: label if name in shared else name for label, name in found.items()}


def _paper_name(label: str) -> str:
    from ..methods import IN_PAPERS  # late: it imports every method

    parts = re.fullmatch(r"(?:[^:+ ]*\.py:(\w+)|(\w+))(?::([^+ ]+))?", label)
    name = parts and (parts[1] or IN_PAPERS.get(parts[2], ""))
    fields = f" ({parts[3].replace(',', ', ')})" if parts and parts[3] else ""
    return f"{name}{fields}" if name else label


def find_label(text: str, labels: Sequence[str]) -> str | None:
    """Return the label that a text means; None if not just one.

    Fields may have any order, text any case; a method may be written as in papers, a wrapper as `topk:0.05`.

    Example:
        >>> known = ["fedavg", "fedspeed:lam=10,rho=0.1"]
        >>> find_label("FedAvg", known), find_label("fedspeed:rho=0.10,lam=10", known), find_label("fedspeed", known)
        ('fedavg', 'fedspeed:lam=10,rho=0.1', None)
        >>> find_label("FedSpeed (rho=0.1, lam=10)", known)
        'fedspeed:lam=10,rho=0.1'
        >>> find_label("fedspeed+topk:0.050", ["fedspeed+topk:fraction=0.05"])
        'fedspeed+topk:fraction=0.05'
        >>> find_label("FedSpeed+TopK:fraction=0.05", ["fedspeed+topk:0.05"])
        'fedspeed+topk:0.05'
    """
    if text in labels:
        return text
    meant = _ordered(text)
    found = [label for label in labels if meant in (_ordered(label), _ordered(_paper_name(label)))]
    return found[0] if len(found) == 1 else None


def _with_field(part: str) -> str:
    """Return `topk:fraction=0.05` for `topk:0.05`; any other text as it is."""
    from ..methods import WRAPPERS  # late: it imports every method

    name, _, given = part.partition(":")
    if name not in WRAPPERS or not given or "=" in given.split(",")[0]:
        return part
    return f"{name}:{dataclasses.fields(WRAPPERS[name])[1].name}={given}"


def _ordered(label: str) -> str:
    """Return a label in small letters, the fields of each of its methods in order, numbers in one way of writing."""
    plain = re.sub(r" \(([^()]*)\)$", lambda fields: ":" + fields[1].replace(", ", ","), label.strip().casefold())
    parts = []
    for part in re.split(r"([+ ])", plain):
        name, colon, fields = _with_field(part).rpartition(":")
        parts.append(name + colon + ",".join(sorted(map(_number, fields.split(",")))))
    return "".join(parts)


def _number(field: str) -> str:
    name, sign, value = field.partition("=")
    try:
        return f"{name}{sign}{float(value):g}"
    except ValueError:
        return field


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
    return f"{value:g}" if isinstance(value, float) and math.isfinite(value) else shown(str(value)).replace(" ", "")
