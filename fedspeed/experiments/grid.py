"""Values of fields of a config: the points of a sweep and their grids, and the search spaces of `tune`. No torch.

A point is `{"lr": 0.1, "method.lam": 10}`; a grid is all combinations. Any field can be named: `lr`, `split`, `method`,
`method.rho` (or `rho` if the config has no such field), `model`, `model.hidden`, `data`, `data.alpha`.

The class of a field declares the values to search, `param(10.0, "(0, inf)", "...", tune="1..100:log")`; `--space`
overrides them. `1,10,100` are values, `0.01..1` and `0.01..1:log` are ranges.
"""

from __future__ import annotations

import itertools
import math
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import Field, dataclass, fields
from pathlib import Path
from typing import Any

from ..config.config import NAMED, TABLES, Config, resolved, without_augment
from ..config.plan import PLACEMENT
from ..config.spec import FROM_FILES
from ..errors import UserError, unknown
from ..methods import build, class_of
from ..methods.local_optimizers import local_optimizer, optimizer_text
from ..utils.checked_fields import number
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
    own = [field.name for field in fields(class_of(_table(method))[0]) if field.init]
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
    return dict(value) if isinstance(value, Mapping) else {"name": value}


def parse_value(text: str) -> Any:
    """Parse a TOML value; anything else, such as a bare word, is a string."""
    try:
        return tomllib.loads(f"v = {text}")["v"]
    except ValueError:
        return text.strip()


def label_of(point: Point) -> str:
    """Return the label of a point: `lr=0.1,lam=10`, without `method.` unless something else has the short name."""
    short = {name: name.removeprefix("method.") for name in point}
    taken = (*TABLES, *PLAIN, "name", "preset")
    return ",".join(f"{name if short[name] in taken else short[name]}={_text(point[name])}" for name in point)


def _text(value: Any) -> str:
    if isinstance(value, dict):  # a method inside another
        inner = ",".join(f"{key}={_text(one)}" for key, one in value.items() if key != "name")
        return f"{value.get('name', '')}({inner})" if inner else str(value.get("name", ""))
    if isinstance(value, bool):
        return str(value).lower()
    return str(value).replace(" ", "") if not isinstance(value, str) else value


EXPECTED = "expected [METHOD.]FIELD=VALUES such as fedspeed.lam=1,10,100 or lr=0.01..1:log"
LOCAL = ("model and local work", "clipping and fidelity")
FIELDS = tuple(
    f.name
    for f in fields(Config)
    if f.metadata.get("group") in LOCAL and f.name not in ("model", "lr_schedule", "warmup", "follow_lr")
)
"""Settings that can be tuned besides a method's own fields; none of them changes data, seeds, scores or faults."""


@dataclass(frozen=True)
class Values:
    """A list of values."""

    values: tuple[Any, ...]

    def at(self, u: float) -> Any:
        """Return the value at position u in [0, 1)."""
        return self.values[int(u * len(self.values))]

    def holds(self, value: Any) -> bool:
        """Return whether a value is one of them."""
        return value in self.values

    def __str__(self) -> str:
        return ",".join(shown(value) for value in self.values)


@dataclass(frozen=True)
class Range:
    """All numbers from low to high with three digits, drawn uniformly, or log-uniformly if `log`.

    Example:
        >>> Range(0, 10, whole=True).at(0.5), Range(0.01, 1, log=True).at(0.25)
        (5, 0.0316)
    """

    low: float
    high: float
    log: bool = False
    whole: bool = False

    def at(self, u: float) -> Any:
        """Return the value at position u in [0, 1)."""
        value = self.low * (self.high / self.low) ** u if self.log else self.low + (self.high - self.low) * u
        value = min(max(float(f"{value:.3g}"), self.low), self.high)
        return round(value) if self.whole else value

    def holds(self, value: Any) -> bool:
        """Return whether a value lies in the range."""
        return isinstance(value, int | float) and self.low <= value <= self.high

    def __str__(self) -> str:
        return f"{shown(self.low)}..{shown(self.high)}{':log' * self.log}"


Axis = Values | Range
Space = dict[str, Axis]
"""Field name -> axis; a name is a method's own field if it has one, else a config key."""
Pairs = tuple[tuple[str, Any], ...]
"""Names and values, in the order of the space."""


def parse_axis(name: str, text: str, default: Any = None) -> Axis:
    """Parse `1,10,100`, `0.01..1` or `0.01..1:log`; a field whose default is an integer gets whole numbers.

    Example:
        >>> parse_axis("lam", "1..100:log"), parse_axis("server", "all,active")
        (Range(low=1.0, high=100.0, log=True, whole=False), Values(values=('all', 'active')))
    """
    if ".." not in text:
        parts = [parse_value(part) for part in text.split(",") if part.strip()]
        values = tuple(float(v) if isinstance(default, float) and type(v) is int else v for v in parts)
        if not values:
            raise UserError(f"space: {name} is empty; {EXPECTED}")
        if len(set(map(str, values))) < len(values):
            raise UserError(f"space: expected every value of {name} once, got {text}; leave one out")
        return Values(values)
    given, _, how = text.partition(":")
    ends = [number(end) for end in given.split("..")]
    low, high = ends if len(ends) == 2 else (math.nan, math.nan)
    if how.strip() not in ("", "log", "linear"):
        raise UserError(f"space: a range of {name} is log or linear, got {how.strip()!r}; write {given.strip()}:log")
    log = how.strip() == "log"
    if not (math.isfinite(low) and math.isfinite(high) and low < high and (low > 0 or not log)):
        least = "0 < LOW < HIGH" if log else "LOW < HIGH"
        raise UserError(f"space: a range of {name} needs {least}, got {text.strip()!r}; {EXPECTED}")
    return Range(low, high, log, whole=isinstance(default, int) and not isinstance(default, bool))


def spaces(
    methods: Mapping[str, dict[str, Any]], base: Mapping[str, Any], given: Iterable[str] = ()
) -> dict[str, Space]:
    """Return the space of every method: the axes that its fields declare, without fixed fields, with `given` on top.

    Args:
        methods: label -> table, for example `fedspeed:rho=0`; a field in the table is not tuned.
        base: config keys with a value, for example `lr`; they are not tuned either.
        given: entries `[METHOD.]FIELD=VALUES`; without METHOD, for every method that has the field.

    Example:
        >>> found = spaces({"fedavg": {"name": "fedavg"}, "fedprox": {"name": "fedprox"}}, {}, ["lr=0.1,0.2"])
        >>> {label: {name: str(axis) for name, axis in space.items()} for label, space in found.items()}
        {'fedavg': {'lr': '0.1,0.2'}, 'fedprox': {'lr': '0.1,0.2', 'mu': '0.01..1:log'}}
    """
    known = {label: _fields(table) for label, table in methods.items()}
    found: dict[str, Space] = {}
    rates = local_optimizer(optimizer_text(base.get("local_optimizer", Config.local_optimizer))).tune_lr
    for label, own in known.items():
        fixed = {*base, *(prefix + name for prefix, table in _tables(methods[label]) for name in table)}
        declared = {name: field for name, field in own.items() if field.metadata.get("tune") and name not in fixed}
        tried = {name: (name == "lr" and rates) or field.metadata["tune"] for name, field in declared.items()}
        found[label] = {name: parse_axis(name, text, declared[name].default) for name, text in tried.items()}
    for text in given:
        values, whose = _entry(text, known, {label: str(table["name"]) for label, table in methods.items()})
        for label, name in whose.items():
            found[label][name] = parse_axis(name, values, known[label][name].default)
    for label, space in found.items():
        if not space:
            raise UserError(f"space: nothing of {label} is left to tune; leave a field of it open, or add --space")
    return found


def _fields(table: Mapping[str, Any]) -> dict[str, Field[Any]]:
    """Return the fields that can be tuned: `lr`, then the method's own fields, then other settings."""
    own = _own(table)
    settings = {field.name: field for field in fields(Config) if field.name in FIELDS}
    return {"lr": settings["lr"], **own, **{name: f for name, f in settings.items() if name not in own}}


def _own(table: Mapping[str, Any]) -> dict[str, Field[Any]]:
    """Return a method's own fields, and those of the method that it wraps, `base.rho`."""
    return {prefix + field.name: field for prefix, one in _tables(table) for field in fields(class_of(one)[0])}


def _tables(table: Mapping[str, Any]) -> Iterator[tuple[str, Tables]]:
    """Yield a method's table and those of the methods inside it, each with the prefix of its fields."""
    yield "", dict(table)
    if "base" in table:
        yield from ((f"base.{prefix}", inner) for prefix, inner in _tables(_table(table["base"])))


def _entry(text: str, known: Mapping[str, Mapping[str, Any]], names: Mapping[str, str]) -> tuple[str, dict[str, str]]:
    """Return the values of an entry of `--space` as text, and the field's name by the label of each method."""
    owners = sorted({*known, *names.values()}, key=len, reverse=True)
    owner = next((one for one in owners if text.strip().startswith(f"{one}.")), "")
    name, equals, values = text.strip().removeprefix(f"{owner}." if owner else "").partition("=")
    name = name.strip()
    if not equals or not name:
        raise UserError(f"space: {EXPECTED}, got {text!r}")
    if "." in name and not name.startswith("base."):
        raise unknown("method in --space", name.rpartition(".")[0], known)
    whose = [label for label in known if not owner or owner in (label, names[label])]
    inside = {label: [one for one in known[label] if one.rpartition("base.")[2] == name] for label in whose}
    having = {label: one for label in whose for one in (name, *inside[label])[::-1] if one in known[label]}
    if not having:
        possible = dict.fromkeys(field for label in whose for field in known[label])
        raise unknown(f"field of {', '.join(whose)} to tune", name, possible)
    return values, having


def check(label: str, method: Mapping[str, Any], space: Space) -> None:
    """Raise for a value, or the end of a range, that its field refuses."""
    own = _own(method)
    for name, axis in space.items():
        for value in axis.values if isinstance(axis, Values) else (axis.at(0.0), axis.at(1.0)):
            try:
                if name in own:
                    build(point_tables({}, method, ((name, value),))["method"])
                else:
                    Config.from_dict({name: value})
            except UserError as error:
                raise UserError(f"space of {label}: {error}") from None


def point_tables(base: Mapping[str, Any], method: Mapping[str, Any], point: Pairs) -> dict[str, Any]:
    """Return the tables of a config at a point."""
    own = _own(method)
    full = {f"method.{name}" if name in own else name: value for name, value in point}
    return apply({**base, "method": dict(method)}, full)


def usual_point(space: Space, method: Mapping[str, Any]) -> Pairs | None:
    """Return the point of the defaults; None if the space does not contain it."""
    known = _fields(method)
    point = tuple((name, known[name].default) for name in space)
    return point if all(space[name].holds(value) for name, value in point) else None


def size(space: Space) -> float:
    """Return the number of points."""
    return math.prod(len(axis.values) if isinstance(axis, Values) else math.inf for axis in space.values())


def point_text(point: Pairs) -> str:
    """Return a point as text, `lr=0.1,lam=10`, which is also part of folder names."""
    return ",".join(f"{name}={shown(value)}" for name, value in point)


def shown(value: Any) -> str:
    """Return a value in the notation that `parse_axis` reads."""
    if isinstance(value, bool):
        return str(value).lower()
    return repr(value).removesuffix(".0") if isinstance(value, float) else str(value)
