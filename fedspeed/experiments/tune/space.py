"""Search spaces: the values of fields that tuning tries. Imports no torch.

The class of a field declares its values, `param(10.0, "(0, inf)", "...", tune="1..100:log")`; `--space` overrides them.
`1,10,100` are values, `0.01..1` and `0.01..1:log` are ranges.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any

from ...config.config import Config
from ...errors import UserError, unknown
from ...methods import build, class_of
from ...methods.local_optimizers import local_optimizer, optimizer_text
from ..grid import apply, parse_value

EXPECTED = "expected [METHOD.]FIELD=VALUES such as fedspeed.lam=1,10,100 or lr=0.01..1:log"
LOCAL = ("model and local work", "clipping and fidelity")
FIELDS = tuple(
    f.name
    for f in dataclasses.fields(Config)
    if f.metadata.get("group") in LOCAL and f.name not in ("model", "lr_schedule", "warmup", "follow_lr")
)
"""Settings that can be tuned besides a method's own fields; none of them changes data, seeds, scores or faults."""


@dataclasses.dataclass(frozen=True)
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


@dataclasses.dataclass(frozen=True)
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
Point = tuple[tuple[str, Any], ...]
"""Names and values, in the order of the space."""


def parse_axis(name: str, text: str, default: Any = None) -> Axis:
    """Parse `1,10,100`, `0.01..1` or `0.01..1:log`; a field whose default is an integer gets whole numbers.

    Example:
        >>> parse_axis("lam", "1..100:log"), parse_axis("server", "all,active")
        (Range(low=1.0, high=100.0, log=True, whole=False), Values(values=('all', 'active')))
    """
    given, _, how = text.partition(":") if ".." in text else (text, "", "")
    if ".." not in text:
        parts = [parse_value(part) for part in text.split(",") if part.strip()]
        values = tuple(float(v) if isinstance(default, float) and type(v) is int else v for v in parts)
        if not values:
            raise UserError(f"space: {name} is empty; {EXPECTED}")
        if len(set(map(str, values))) < len(values):
            raise UserError(f"space: expected every value of {name} once, got {text}; leave one out")
        return Values(values)
    try:
        low, high = (float(end) for end in given.split(".."))
    except ValueError:
        low = high = math.nan
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
    for label, fields in known.items():
        fixed = {*base, *_given(methods[label])}
        declared = {name: field for name, field in fields.items() if field.metadata.get("tune") and name not in fixed}
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


def _fields(table: Mapping[str, Any]) -> dict[str, dataclasses.Field[Any]]:
    """Return the fields that can be tuned: `lr`, then the method's own fields, then other settings."""
    own = _own(table)
    settings = {field.name: field for field in dataclasses.fields(Config) if field.name in FIELDS}
    return {"lr": settings["lr"], **own, **{name: f for name, f in settings.items() if name not in own}}


def _own(table: Mapping[str, Any]) -> dict[str, dataclasses.Field[Any]]:
    """Return a method's own fields, and those of the method that it wraps, `base.rho`."""
    own = {field.name: field for field in dataclasses.fields(class_of(dict(table))[0])}
    return own | {f"base.{name}": field for name, field in (_own(_base(table)) if "base" in table else {}).items()}


def _given(table: Mapping[str, Any]) -> set[str]:
    """Return the fields that a method's table sets."""
    return {*table, *(f"base.{name}" for name in (_given(_base(table)) if "base" in table else ()))}


def _base(table: Mapping[str, Any]) -> Mapping[str, Any]:
    base = table["base"]
    return base if isinstance(base, Mapping) else {"name": base}


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
        fields = dict.fromkeys(field for label in whose for field in known[label])
        raise unknown(f"field of {', '.join(whose)} to tune", name, fields)
    return values, having


def check(label: str, method: Mapping[str, Any], space: Space) -> None:
    """Raise for a value, or the end of a range, that its field refuses."""
    own = _own(method)
    for name, axis in space.items():
        for value in axis.values if isinstance(axis, Values) else (axis.at(0.0), axis.at(1.0)):
            try:
                build(point_tables({}, method, ((name, value),))["method"]) if name in own else Config.from_dict(
                    {name: value}
                )
            except UserError as error:
                raise UserError(f"space of {label}: {error}") from None


def point_tables(base: Mapping[str, Any], method: Mapping[str, Any], point: Point) -> dict[str, Any]:
    """Return the tables of a config at a point."""
    own = _own(method)
    full = {f"method.{name}" if name in own else name: value for name, value in point}
    return apply({**base, "method": dict(method)}, full)


def usual_point(space: Space, method: Mapping[str, Any]) -> Point | None:
    """Return the point of the defaults; None if the space does not contain it."""
    defaults = {name: field.default for name, field in _fields(method).items()}
    point = tuple((name, defaults[name]) for name in space)
    return point if all(axis.holds(defaults[name]) for name, axis in space.items()) else None


def size(space: Space) -> float:
    """Return the number of points."""
    return math.prod(len(axis.values) if isinstance(axis, Values) else math.inf for axis in space.values())


def point_text(point: Point) -> str:
    """Return a point as text, which is also part of folder names.

    Example:
        >>> point_text((("lr", 0.1), ("lam", 10.0)))
        'lr=0.1,lam=10'
    """
    return ",".join(f"{name}={shown(value)}" for name, value in point)


def shown(value: Any) -> str:
    """Return a value in the notation that `parse_axis` reads."""
    if isinstance(value, bool):
        return str(value).lower()
    return repr(value).removesuffix(".0") if isinstance(value, float) else str(value)
