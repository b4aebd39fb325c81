"""`split.json`: who owns what, for those who read a run directory and do not have its data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from .files import read_json, write

if TYPE_CHECKING:
    from .data.federated import Federated

CELLS = 1_000_000
"""Counts beyond which only the sizes are written down."""


class Split(NamedTuple):
    """A split in numbers.

    Args:
        fingerprint: what a summary calls `split_fingerprint`.
        sizes: samples of every client.
        counts: for every client its samples of every class; none without classes, or where there are too many.
        classes: their names, if they have any.
    """

    fingerprint: str
    data: str
    split: str
    sizes: list[int]
    counts: list[list[int]]
    classes: list[str]


def write_split(path: Path, data: Federated) -> None:
    """Write it down, unless it is there."""
    if not path.exists():
        write(path, split_text(data))


def split_text(data: Federated) -> str:
    """Return the file's text; it follows from the data alone."""
    from .data.summary import class_counts

    few = data.classes and data.classes * data.clients <= CELLS
    counts = class_counts(data).tolist() if few else []
    found = Split(data.split_fingerprint, data.name, data.split, data.sizes.tolist(), counts, list(data.class_names))
    return json.dumps(found._asdict()) + "\n"


def read_split(path: Path) -> Split | None:
    """What it says, None where there is none or something in it is not of its kind."""
    plain: dict[str, Any] = {"classes": [], "counts": [], **read_json(path)}
    if set(plain) != set(Split._fields):
        return None
    found = Split(**plain)
    texts = [found.fingerprint, found.data, found.split]
    lists = isinstance(found.counts, list) and isinstance(found.classes, list)
    if not lists or not _whole(found.sizes) or not all(isinstance(text, str) for text in [*texts, *found.classes]):
        return None
    as_many = len(found.counts) in (0, len(found.sizes)) and all(map(_whole, found.counts))
    return found if as_many and len(set(map(len, found.counts))) < 2 else None


def _whole(values: Any) -> bool:
    return isinstance(values, list) and bool(values) and all(type(a) is int and 0 <= a < 2**53 for a in values)
