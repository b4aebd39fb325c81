"""Nested tables as one."""

from __future__ import annotations

from typing import Any


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
