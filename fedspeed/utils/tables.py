"""Nested tables, as in TOML: flattened, merged, compared."""

from __future__ import annotations

from typing import Any


def flat(tables: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested tables as one table with dotted keys.

    Example:
        >>> flat({"lr": 0.1, "method": {"name": "fedavg"}})
        {'lr': 0.1, 'method.name': 'fedavg'}
    """
    found: dict[str, Any] = {}
    for key, value in tables.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return found


def merged(tables: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """Return tables with other values for some fields.

    Example:
        >>> merged({"lr": 0.1, "method": {"name": "fedspeed", "rho": 0.1}}, {"method": {"rho": 0.2}})
        {'lr': 0.1, 'method': {'name': 'fedspeed', 'rho': 0.2}}
    """
    inner = {key: merged(tables[key], value) for key, value in over.items() if _both(tables.get(key), value)}
    return {**tables, **over, **inner}


def difference(then: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """Return the values of `then` that differ from `now`: `merged(now, ...)` of them gives `then`.

    Example:
        >>> difference({"lr": 0.1, "method": {"rho": 0.1, "lam": 10}}, {"lr": 0.1, "method": {"rho": 0.2, "lam": 10}})
        {'method': {'rho': 0.1}}
    """
    found = {}
    for key, value in then.items():
        differs = difference(value, now[key]) if _both(value, now.get(key)) else value
        if differs != now.get(key) and (differs or not isinstance(differs, dict)):
            found[key] = differs
    return found


def _both(a: Any, b: Any) -> bool:
    return isinstance(a, dict) and isinstance(b, dict)
