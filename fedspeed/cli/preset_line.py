"""The line that says what a preset changes in a run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from ..config.config import TABLES, Config, apply_preset
from ..config.presets import THEIR_DATA
from ..methods import build
from .method_syntax import toml_value

if TYPE_CHECKING:
    from rich.console import Console


def preset_line(given: dict[str, Any]) -> str:
    """Return the line that says which values a preset changes in the tables of a run; "" without a preset.

    Example:
        >>> preset_line({"preset": "paper", "method": "fedavg"})
        'preset paper: lr_decay=0 (the decay that the paper gives the method)'
    """
    if (word := given.get("preset")) is None:
        return ""
    before, after = _whole(given), _whole(apply_preset(given))
    changed = ", ".join(f"{key}={value}" for key, value in _changes(before, after))
    data, note = before["data"]["name"], ""
    if word == "paper" and changed:
        note = " (the decay that the paper gives the method)"
    elif word == "released" and data not in THEIR_DATA:
        note = f"; {data} is not in the authors' code, its augmentation stays"
    return f"preset {word}: {changed or 'nothing to change'}{note}"


def tell_presets(console: Console, methods: Iterable[tuple[str, dict[str, Any]]]) -> None:
    """Print what a preset changes in the tables of several methods: one line, and one per method with own values."""
    lines: dict[str, str] = {}
    for name, given in methods:
        lines.setdefault(preset_line(given), name)
    for line, name in lines.items():
        if line:
            console.print(f"{name}: {line}" if "method." in line else line)


def _whole(tables: dict[str, Any]) -> dict[str, Any]:
    """Return tables with the defaults of what they leave out, fields of the method included."""
    found: dict[str, Any] = {field.name: field.default for field in fields(Config)}
    found |= TABLES | tables
    named: dict[str, Any] = {key: {"name": found[key]} if isinstance(found[key], str) else found[key] for key in TABLES}
    return found | named | {"method": build(named["method"]).to_dict()}


def _changes(before: dict[str, Any], after: dict[str, Any], place: str = "") -> Iterator[tuple[str, str]]:
    """Yield the keys whose values differ, and the values as the command line takes them."""
    for key, value in after.items():
        if isinstance(value, dict):
            yield from _changes(before.get(key) or {}, value, f"{place}{key}.")
        elif before.get(key) != value:
            yield place + key, f"{value:g}" if isinstance(value, float) else toml_value(value)
