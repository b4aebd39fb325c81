"""Options that check themselves: fields of dataclasses (methods, configs), numbers, and the text `a=1,b=2`."""

from __future__ import annotations

import dataclasses
import math
import numbers
import sys
from collections.abc import Callable, Iterable
from typing import Any, Self

from ..errors import UserError, unknown

MOST = sys.float_info.max
KINDS: dict[Any, str] = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
"""Names of types in messages."""
Allowed = str | tuple[str, ...] | Callable[[], Iterable[str]] | None


def param(
    default: Any,
    allowed: Allowed = "",
    about: str = "",
    *,
    group: str = "",
    placement: bool = False,
    schedulable: bool = False,
    later: bool = False,
    tune: str = "",
) -> Any:
    """Return a field with its default, the values it may take, and what it is.

    Args:
        allowed: an interval as one writes it (`"(0, inf)"`, `"[0, 1]"`), names (a tuple, or a function that knows
            them when asked), "" for any value of the default's type, or None if its class checks it.
        about: completes the sentence "it is ..." of an error message; also the help text.
        group: the heading of its option in `--help`.
        placement: it says where and how a run is computed, and changes no bit of the result (on one kind of device).
        schedulable: a warm-up may change this number of a method from round to round (`config.warmup`).
        later: added after configs were stored: tables leave it out at its default, so that they keep their digests.
        tune: the values that `fedspeed tune` tries by default, `"1..100:log"` or `"1,10,100"`; "" for none.
    """
    if schedulable and not isinstance(default, float):
        raise UserError(f"param: a schedulable field has a float as its default such as 0.1, got {default!r}")
    facts = {"allowed": allowed, "about": about, "group": group, "placement": placement, "schedulable": schedulable}
    return dataclasses.field(default=default, metadata={**facts, "later": later, "tune": tune})


class Params:
    """Base of frozen dataclasses that check types and ranges of their fields."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            if field.metadata.get("allowed") is not None:
                object.__setattr__(self, field.name, self._checked(field, getattr(self, field.name)))

    def _checked(self, field: dataclasses.Field[Any], value: Any) -> Any:
        allowed, kind = field.metadata["allowed"], type(field.default)
        if kind in (int, float) and not isinstance(value, bool):
            value = _plain(value, kind)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            wanted = KINDS.get(kind, "text")
        elif not isinstance(allowed, str) and value not in _names(allowed):
            wanted = f"one of {', '.join(_names(allowed))}"
        elif isinstance(allowed, str) and allowed and not _inside(value, allowed):
            wanted = f"in {allowed}"
        else:
            return value
        about = field.metadata["about"]
        raise UserError(f"{type(self).__name__}: {field.name} must be {wanted}, got {value!r}; it is {about}")

    @classmethod
    def from_fields(cls, fields: dict[str, Any]) -> Self:
        """Make an instance of its fields; an error for an unknown field names the nearest one."""
        known = [f.name for f in dataclasses.fields(cls)]  # type: ignore[arg-type]
        for key in fields:
            if key not in known:
                raise unknown(f"field of {cls.__name__}", key, known)
        return cls(**fields)

    def fields(self) -> dict[str, Any]:
        """Return the fields and their values, in order."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}  # type: ignore[arg-type]


def _names(allowed: Allowed) -> Iterable[Any]:
    return allowed() if callable(allowed) else allowed or ()


def _plain(value: Any, kind: type) -> Any:
    """Return NumPy's numbers as Python's, whole ones as floats where `kind` is float, and other values as they are."""
    if isinstance(value, numbers.Integral):
        whole = int(value)
        return whole if kind is int or abs(whole) > MOST else float(whole)
    return float(value) if kind is float and isinstance(value, numbers.Real) else value


def require_whole(what: str, value: Any, least: int) -> None:
    """Raise unless a value is a whole number that is not less than `least`."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or int(value) < least:
        raise UserError(f"{what} must be a whole number >= {least}, found {value!r}")


def parse_pairs(text: str) -> list[tuple[str, str]]:
    """Return the names and values of `a=1,b=2`; the value of a name without one is "".

    Example:
        >>> parse_pairs("lr=10, rho = 20"), parse_pairs("every=3,own"), parse_pairs(" ")
        ([('lr', '10'), ('rho', '20')], [('every', '3'), ('own', '')], [])
    """
    pairs = [part.partition("=") for part in text.split(",")] if text.strip() else []
    return [(name.strip(), value.strip()) for name, _, value in pairs]


def number(text: str) -> float:
    """Return the number in a text; NaN, which lies in no interval, if there is none."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def _inside(value: Any, interval: str) -> bool:
    """Return whether a number lies in an interval written as usual: '(0, 1]', '[0, inf)'."""
    low, high = (float(end) for end in interval[1:-1].split(","))
    above = value > low if interval[0] == "(" else value >= low
    below = value < high if interval[-1] == ")" else value <= high
    return bool(abs(value) <= MOST and above and below)  # False for NaN
