"""Dataclasses whose fields check themselves: methods and run configurations are such values."""

from __future__ import annotations

import dataclasses
import numbers
import sys
from collections.abc import Callable, Iterable
from typing import Any, Self

from ..errors import UserError, unknown

MOST = sys.float_info.max


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
    """A field: its default, the values it may take, and what it is.

    Args:
        allowed: an interval as one writes it (`"(0, inf)"`, `"[0, 1]"`), names (a tuple, or a function that knows
            them when asked), "" for any value of the default's type, or None if its class checks it.
        about: completes the sentence "it is ..." of an error message; also the help text.
        group: of options in `--help`.
        placement: it says where and how a run is computed, and changes no bit of the result (on one kind of device).
        schedulable: of a method's number: a warm-up may change it from round to round (`schedule`).
        later: it is younger than stored configs: tables leave it out at its default, so that they keep their digests.
        tune: what `fedspeed tune` tries unless told otherwise, `"1..100:log"` or `"1,10,100"`; "" for nothing.
    """
    if schedulable and not isinstance(default, float):
        raise UserError(f"param: a schedulable field has a float as its default such as 0.1, got {default!r}")
    about_it = {
        "allowed": allowed,
        "about": about,
        "group": group,
        "placement": placement,
        "schedulable": schedulable,
        "later": later,
        "tune": tune,
    }
    return dataclasses.field(default=default, metadata=about_it)


class Params:
    """Base of frozen dataclasses: checks types and ranges, and goes to and from plain dicts."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            if field.metadata.get("allowed") is not None:
                object.__setattr__(self, field.name, self._checked(field, getattr(self, field.name)))

    def _checked(self, field: dataclasses.Field[Any], value: Any) -> Any:
        allowed, kind = field.metadata["allowed"], type(field.default)
        if kind in (int, float) and not isinstance(value, bool):
            value = _plain(value, kind)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            wanted = {int: "a whole number", float: "a number", bool: "true or false"}.get(kind, "text")
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
        """An instance from its fields; an unknown one is an error that names the nearest."""
        known = [f.name for f in dataclasses.fields(cls)]  # type: ignore[arg-type]
        for key in fields:
            if key not in known:
                raise unknown(f"field of {cls.__name__}", key, known)
        return cls(**fields)

    def fields(self) -> dict[str, Any]:
        """The fields and their values, in order."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}  # type: ignore[arg-type]


def _names(allowed: Allowed) -> Iterable[Any]:
    return allowed() if callable(allowed) else allowed or ()


def _plain(value: Any, kind: type) -> Any:
    """A whole number where a float is wanted, and NumPy's numbers, as Python's; anything else as it is."""
    if isinstance(value, numbers.Integral):
        whole = int(value)
        return whole if kind is int or abs(whole) > MOST else float(whole)
    return float(value) if kind is float and isinstance(value, numbers.Real) else value


def _inside(value: Any, interval: str) -> bool:
    """Whether a number lies in an interval written as usual: '(0, 1]', '[0, inf)'."""
    low, high = (float(end) for end in interval[1:-1].split(","))
    above = value > low if interval[0] == "(" else value >= low
    below = value < high if interval[-1] == ")" else value <= high
    return bool(abs(value) <= MOST and above and below)  # False for NaN
