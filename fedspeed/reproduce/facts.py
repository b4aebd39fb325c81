"""Cells that need no training: counts of data sets (Table 3) and of splits (Figure 3)."""

from __future__ import annotations

from typing import Any

import numpy as np

from .runs import ROUNDS
from .table import Cell, Result


def of_data(cell: Cell) -> dict[str, float]:
    """Return counts and shape of a data set as it is loaded."""
    from ..data import read

    samples = read(**cell.tables["data"])
    per_class = np.bincount(samples.y)
    return {
        "training pictures": len(samples.y),
        "test pictures": 0 if samples.y_test is None else len(samples.y_test),
        "classes": len(per_class),
        "fewest of a class": int(per_class.min()),
        "most of a class": int(per_class.max()),
        "channels": samples.x.shape[1],
        "pixels a side": samples.x.shape[2],
    }


def of_split(cell: Cell, seed: int) -> tuple[dict[str, float], np.ndarray]:
    """Return means over clients of a split, and the samples of every class (columns) at every client (rows)."""
    from ..data import describe, load

    tables = cell.tables
    data = load(**tables["data"], split=tables["split"], clients=tables["clients"], seed=seed, augment="none")
    found = describe(data)
    largest = found.counts.max(1) / found.sizes
    return {"half-mass classes": float(found.half.mean()), "largest class %": 100 * float(largest.mean())}, found.counts


def result(value: float, seed: int) -> Result:
    """Return a number in the form of a result, which sheets and claims accept."""
    rounds: dict[str, list[Any]] = {name: [] for name in ROUNDS}
    return {"key": "fact", "seed": seed, "status": "finished", "measures": {"value": value}, "rounds": rounds}
