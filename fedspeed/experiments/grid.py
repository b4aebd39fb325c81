"""Points of a sweep: values of some fields of a config, `{"lr": 0.1, "method.lam": 10}`; a grid is all combinations.

Any field can be named: `lr`, `split`, `method`, `method.rho` (or `rho` if the config has no such field), `model`,
`model.hidden`, `data`, `data.alpha`.
"""

from __future__ import annotations

import itertools
import math
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from ..config.config import NAMED, TABLES, Config, resolved, without_augment
from ..config.plan import PLACEMENT
from ..config.spec import FROM_FILES
from ..errors import UserError, unknown
from ..methods import class_of
from ..utils.files import read_toml

Point = dict[str, Any]
Tables = dict[str, Any]

PLAIN = tuple(field.name for field in fields(Config) if field.name not in TABLES)


def points_of(
    grid: Mapping[str, Iterable[Any]] | None,
    points: Iterable[Point] | Path | str | None,
    seeds: int,
    most: int,
) -> list[Point]:
    """Return the points of a grid, a list or a file; raise for too many before they are built."""
    if (grid is None) == (points is None):
        both = "both; leave one out" if grid is not None else "neither: lr=0.05,0.1 as a grid for example"
        raise UserError(f"sweep: expected a grid or points, got {both}")
    if grid is not None:
        axes = {name: _values(name, values) for name, values in grid.items()}
        require_few(math.prod(map(len, axes.values())) * seeds, most)
        return combinations(axes)
    found = read_points(Path(points)) if isinstance(points, Path | str) else list(points or ())
    require_few(len(found) * seeds, most)
    return found


def require_few(runs: int, most: int) -> None:
    """Raise for more runs than the limit."""
    if runs > most:
        raise UserError(f"sweep: expected at most {most} runs, got {runs}; if all are meant: --max-runs {runs}")


def read_points(path: Path) -> list[Point]:
    """Return the points of a TOML file, one table `[[points]]` each; relative paths start at the file's folder."""
    tables = read_toml(path)
    points = tables.pop("points", None)
    if tables:
        raise unknown(f"key of {path}", next(iter(tables)), ["points"])
    if not isinstance(points, list) or not points or not all(isinstance(point, dict) for point in points):
        raise UserError(f"{path}: expected tables [[points]], each with fields such as lr = 0.1; found {points!r}")
    return [resolved(point, path.parent) for point in points]


def combinations(axes: Mapping[str, Iterable[Any]]) -> list[Point]:
    """Return every combination of the values of fields; the last field changes fastest.

    Example:
        >>> combinations({"lr": [0.1, 0.2], "method.lam": [1]})
        [{'lr': 0.1, 'method.lam': 1}, {'lr': 0.2, 'method.lam': 1}]
    """
    given = {name: _values(name, values) for name, values in axes.items()}
    if not given:
        raise UserError("sweep: expected fields with values, such as lr=0.05,0.1; got an empty grid")
    return [dict(zip(given, values, strict=True)) for values in itertools.product(*given.values())]


def _values(name: str, values: Iterable[Any]) -> list[Any]:
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise UserError(f"sweep: expected a list of values for {name}, got {values!r}")
    found = list(values)
    if not found:
        raise UserError(f"sweep: expected values for {name}, such as {name}=1,2; got none")
    return found


def qualify(base: Tables, point: Mapping[str, Any]) -> Point:
    """Return a point with full field names, sorted so that method, model and data come before their own fields.

    Example:
        >>> qualify({}, {"rho": 0.1, "method": "fedsam"})
        {'method': 'fedsam', 'method.rho': 0.1}
    """
    if not isinstance(point, Mapping) or not all(isinstance(name, str) for name in point):
        raise UserError(f"sweep: expected a point such as {{'lr': 0.1, 'rho': 0.05}}, got {point!r}")
    flat: Point = {}
    for name, value in point.items():
        if name in TABLES and isinstance(value, dict):
            flat |= {f"{name}.{key}" if key != "name" else name: inner for key, inner in value.items()}
        else:
            flat[name.removesuffix(".name") if name.removesuffix(".name") in TABLES else name] = value
    if not flat:
        raise UserError("sweep: expected a point such as lr=0.1,rho=0.05, got an empty one")
    method = apply(base, {"method": flat["method"]} if "method" in flat else {}).get("method", TABLES["method"])
    found: Point = {}
    for name in sorted(flat, key=lambda name: (name not in TABLES, "." in name and name.split(".")[0] in FROM_FILES)):
        path = _path(name, method)
        if path in found:
            raise UserError(f"sweep: expected one value for {path}, got {found[path]!r} and {flat[name]!r}")
        found[path] = _plain(flat[name])
    return found


def _plain(value: Any) -> Any:
    """Return a value with NumPy numbers and tuples replaced by TOML's types."""
    if isinstance(value, tuple | list):
        return [_plain(one) for one in value]
    return value.item() if hasattr(value, "item") and not getattr(value, "ndim", 0) else value


def _path(name: str, method: Any) -> str:
    """Return the full name of a field; raise if it cannot be swept over."""
    if name == "seed":
        raise UserError(
            "sweep: `seed` cannot be swept over, results are averaged over seeds; give --seeds 5,7 (seeds=[5, 7])"
        )
    if name in (*PLACEMENT, "targets"):
        raise UserError(f"sweep: {name} has no effect on results: there is nothing to sweep over; give it as an option")
    target, dot, key = name.partition(".")
    if name in (*TABLES, *PLAIN, "preset") or (target in NAMED and key):
        return name
    table = method if isinstance(method, dict) else {"name": method}
    own = [field.name for field in fields(class_of(table)[0]) if field.init]
    if not dot and name in own:
        return f"method.{name}"
    raise unknown("field", name, [*TABLES, *PLAIN, *own])


def apply(base: Tables, point: Point) -> Tables:
    """Return the tables of a config at a point; another name drops the fields of the one it replaces.

    Example:
        >>> apply({"method": {"name": "fedspeed", "rho": 0.1}, "lr": 1}, {"method.lam": 10, "lr": 0.5})
        {'method': {'name': 'fedspeed', 'rho': 0.1, 'lam': 10}, 'lr': 0.5}
    """
    tables = dict(base)
    for name, value in point.items():
        target, *keys = name.split(".")
        if target not in TABLES and not (target in NAMED and keys):
            tables[target] = value
            continue
        table = _table(tables.get(target, NAMED[target]))
        if not keys:
            if target == "data" and "augment" not in point:
                tables = without_augment(tables, str(table.get("name")), str(value))
            tables[target] = {**(table if table.get("name") == value else {}), "name": value}
            continue
        tables[target] = inner = table
        for key in keys[:-1]:
            inner[key] = inner = _table(inner.get(key, {}))
        inner[keys[-1]] = value
    return tables


def _table(value: Any) -> Tables:
    """Return a copy of a table, or the table of a name."""
    return dict(value) if isinstance(value, dict) else {"name": value}


def parse_value(text: str) -> Any:
    """Parse a TOML value; anything else, such as a bare word, is a string."""
    try:
        return tomllib.loads(f"v = {text}")["v"]
    except ValueError:
        return text.strip()


def label_of(point: Point) -> str:
    """Return the label of a point: `lr=0.1,lam=10`."""
    return ",".join(f"{short_name(name)}={_text(value)}" for name, value in point.items())


def short_name(name: str) -> str:
    """Return a field's name without `method.`, unless something else has the short name."""
    own = name.removeprefix("method.")
    return name if own in (*TABLES, *PLAIN, "name", "preset") else own


def _text(value: Any) -> str:
    if isinstance(value, dict):  # a method inside another
        inner = ",".join(f"{key}={_text(one)}" for key, one in value.items() if key != "name")
        return f"{value.get('name', '')}({inner})" if inner else str(value.get("name", ""))
    if isinstance(value, bool):
        return str(value).lower()
    return str(value).replace(" ", "") if not isinstance(value, str) else value
