"""What two runs are compared by: named vectors in the order in which they come to be."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from ..errors import UserError


class Key(NamedTuple):
    """Whose vector of which round: `client` is None for the server."""

    round: int  # from 1
    client: int | None
    what: str

    def __str__(self) -> str:
        return f"round {self.round}, {'server' if self.client is None else f'client {self.client}'}, {self.what}"


class Difference(NamedTuple):
    """The first vector that differs."""

    key: Key
    found: np.ndarray
    expected: np.ndarray
    error: float
    call: int = (
        0  # of that client's gradients, the first that was asked for at another point, from 1; 0: none, or unknown
    )
    calls: tuple[int, int] = (0, 0)  # gradients asked for in that turn: found, expected


class Trace:
    """The vectors of one run, and the points at which clients asked for gradients."""

    def __init__(self) -> None:
        self.vectors: dict[Key, np.ndarray] = {}
        self.points: dict[tuple[int, int], list[np.ndarray]] = {}
        self.changed = ""  # where a gradient that was handed out was first changed in place; "" for nowhere

    def add(self, round: int, client: int | None, what: str, value: Any) -> None:
        """Keep a copy."""
        array = value.detach().numpy() if hasattr(value, "detach") else value
        self.vectors[Key(round, client, what)] = np.array(array, dtype=np.float64)

    def finite(self) -> bool:
        """Whether no vector has NaN or Inf."""
        return all(bool(np.isfinite(v).all()) for v in self.vectors.values())


def error(found: np.ndarray, expected: np.ndarray) -> float:
    """The largest difference of two vectors, relative where the expected one has numbers above 1.

    Example:
        >>> error(np.array([1.0, 21.0]), np.array([1.0, 20.0]))
        0.05
    """
    return float(np.abs(found - expected).max() / max(1.0, np.abs(expected).max()))


def first_difference(found: Trace, expected: Trace, tolerance: float) -> Difference | None:
    """The first vector of a run that another does not have so; only what both have is compared."""
    for key, value in found.vectors.items():
        wanted = expected.vectors.get(key)
        if wanted is not None and not error(value, wanted) <= tolerance:
            return Difference(key, value, wanted, error(value, wanted), *_calls(key, found, expected, tolerance))
    return None


def _calls(key: Key, found: Trace, expected: Trace, tolerance: float) -> tuple[int, tuple[int, int]]:
    """In which gradient of the turn the two parted, and how many there were."""
    if key.client is None or not found.points:
        return 0, (0, 0)
    ours, theirs = (trace.points.get((key.round, key.client), []) for trace in (expected, found))
    pairs = enumerate(zip(theirs, ours, strict=False), 1)
    return next((k for k, (a, b) in pairs if error(a, b) > tolerance), 0), (len(theirs), len(ours))


def vector(value: Any, d: int, where: str) -> np.ndarray:
    """A flat finite vector of length d out of what somebody's code returned."""
    if hasattr(value, "detach"):
        value = value.detach().cpu().numpy()
    try:
        array = np.asarray(value, dtype=np.float64)
    except (TypeError, ValueError):
        raise UserError(f"{where}: expected a vector of {d} numbers, found {type(value).__name__}") from None
    if array.shape != (d,):
        raise UserError(
            f"{where}: expected a vector of shape ({d},), found shape {array.shape}; flatten the model first"
        )
    if not np.isfinite(array).all():
        raise UserError(f"{where}: NaN or Inf; it diverged, so there is nothing to compare: try a lower --lr")
    return array


def named(value: Any, where: str, known: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """States by the names they have here."""
    if not isinstance(value, Mapping):
        raise UserError(f"{where}: expected a dict of vectors by name, found {type(value).__name__}")
    for name in value:
        if name not in known:
            raise UserError(f"{where}: no state is called {name!r}; this method has {', '.join(known) or 'none'}")
    return {name: vector(one, len(known[name]), f"{where}, {name}") for name, one in value.items()}
