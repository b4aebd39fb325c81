"""Methods as the command line writes them: `fedspeed:rho=0.05+topk:0.01`."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import tomli_w

from ..errors import UserError
from ..experiments.grid import parse_value
from ..methods import METHODS, WRAPPERS, find_method
from ..methods.base import Method


def split_pair(text: str, option: str, expected: str) -> tuple[str, str]:
    """Split `NAME=VALUE`; `parse_value` reads the value.

    Example:
        >>> split_pair("lr = 0.05", "--set", "KEY=VALUE")
        ('lr', ' 0.05')
    """
    name, equals, value = text.partition("=")
    if not equals or not name.strip():
        raise UserError(f"{option}: expected {expected}, got {text!r}")
    return name.strip(), value


def toml_value(value: Any) -> str:
    """Return a value as `--set` takes it; words without quotes if they are read back as words."""
    text = tomli_w.dumps({"v": value}).strip().removeprefix("v = ")
    text = " ".join(part.strip() for part in text.splitlines())
    return value if isinstance(value, str) and parse_value(value) == value else text


def as_text(method: Method) -> str | None:
    """Return a method as `compare` takes it, `fedspeed:rho=0.05`; None if that is not possible.

    Example:
        >>> from fedspeed import FedAvg, FedSpeed
        >>> as_text(FedSpeed(rho=0.05)), as_text(FedAvg())
        ('fedspeed:rho=0.05', 'fedavg')
    """
    table, plain = method.to_dict(), type(method).from_fields({}).to_dict()
    fields = {key: value for key, value in table.items() if key != "name" and value != plain.get(key)}
    base = fields.get("base")
    if isinstance(base, dict):
        plainly = base == find_method(base["name"]).from_fields({}).to_dict()
        inner = None if plainly else as_text(method.base)  # type: ignore[attr-defined]
        if inner and table["name"] in WRAPPERS:
            return f"{inner}+{_written(table['name'], {k: v for k, v in fields.items() if k != 'base'})}"
        fields["base"] = base["name"] if plainly else base
    if any(isinstance(value, dict | list) for value in fields.values()):
        return None
    return _written(table["name"], fields)


def _written(name: str, fields: dict[str, Any]) -> str:
    return ":".join([name, *([",".join(f"{k}={toml_value(v)}" for k, v in fields.items())] if fields else [])])


def chain(text: str) -> list[str]:
    """Split `fedspeed:rho=0+topk:0.01+dp` into the method and the wrappers around it, inside first."""
    return re.split(rf"\+(?=(?:{'|'.join(WRAPPERS)})(?:[:+]|$))", text, flags=re.IGNORECASE)


def lowered(text: str) -> str:
    """Return a text with the package's methods in their one spelling, which labels and folders have.

    Example:
        >>> lowered("FedSpeed:rho=0+TopK:0.1"), lowered("own.py:Mine")
        ('fedspeed:rho=0+topk:0.1', 'own.py:Mine')
    """
    parts = (part.partition(":") for part in chain(text))
    known = METHODS | WRAPPERS
    return "+".join(f"{n.lower() if n.lower() in known else n}{colon}{rest}" for n, colon, rest in parts)


def parse_method(text: str) -> dict[str, Any]:
    """Parse `fedspeed:rho=0.05,lam=100` into a method's table; `file.py:Class:rho=0.05` is a user's method.

    Example:
        >>> parse_method("fedspeed:rho=0+topk:0.01")
        {'name': 'topk', 'fraction': 0.01, 'base': {'name': 'fedspeed', 'rho': 0}}
    """
    first, *around = [_method(part) for part in chain(text)]
    for wrapper in around:
        if "base" in wrapper:
            raise UserError(
                f"method {text!r}: expected wrappers without base after a +, found base in {wrapper['name']}"
            )
        first = {**wrapper, "base": first}
    return first


def _method(text: str) -> dict[str, Any]:
    name, _, given = text.partition(":")
    if name.endswith(".py"):
        cls, _, given = given.partition(":")
        name = f"{name}:{cls}" if cls else name
    elif "," in name:
        raise UserError(f"method {text!r}: expected one method, found a comma; separate methods by blanks")
    elif name.lower() in (METHODS | WRAPPERS):
        name = name.lower()
    fields: dict[str, Any] = {"name": name}
    for number, part in enumerate(given.split(",") if given else []):
        key, found, value = part.partition("=")
        if not found and not number and name in WRAPPERS:  # `topk:0.01`: its first own field
            key, value = dataclasses.fields(WRAPPERS[name])[1].name, part
        elif not found:
            raise UserError(f"method {text!r}: expected NAME:field=value,..., found {part!r}")
        if key.strip() in fields:
            raise UserError(f"method {text!r}: expected one value for {key.strip()}, found two; leave one out")
        fields[key.strip()] = parse_value(value)
    return fields
