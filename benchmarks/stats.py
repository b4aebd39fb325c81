"""Medians, and ratios with intervals from repetitions that were interleaved."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

DRAWS = 10_000
FEWEST = 5
"""Repetitions below which an interval would say nothing and is not shown."""


class Ratio(NamedTuple):
    """A ratio of medians, its 95% interval, and from how many repetitions."""

    value: float
    low: float
    high: float
    n: int

    def interval(self) -> str:
        """As the tables show it."""
        return f"{self.low:.2f} to {self.high:.2f}" if self.n >= FEWEST else ""

    def __str__(self) -> str:
        return f"{self.value:.2f}" + (f" ({self.interval()})" if self.interval() else "")


def median(seconds: Sequence[float]) -> float:
    """Return the middle value."""
    return float(np.median(seconds))


def ratio(above: Sequence[float], below: Sequence[float]) -> Ratio:
    """Return median(above) / median(below), with a bootstrap interval over whole repetitions.

    Entry i of both was measured in the same repetition, minutes or less apart: they are drawn together, so what slowed
    the machine down for a while slows both down and does not widen the interval.

    Example:
        >>> str(ratio([2.0, 4.0, 6.0], [1.0, 2.0, 3.0]))
        '2.00'
    """
    if len(above) != len(below) or not above:
        raise ValueError(f"expected pairs, found {len(above)} and {len(below)} repetitions")
    a, b = np.asarray(above, dtype=float), np.asarray(below, dtype=float)
    drawn = np.random.default_rng(0).integers(0, len(a), (DRAWS, len(a)))
    ratios = np.median(a[drawn], axis=1) / np.median(b[drawn], axis=1)
    low, high = np.quantile(ratios, (0.025, 0.975))
    return Ratio(float(np.median(a) / np.median(b)), float(low), float(high), len(a))
