"""Scores of single clients, for the page's section on fairness."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..rundir import RunDir


def last_scores(path: Path) -> dict[str, Any] | None:
    """Accuracy and loss of the last server model on every client's data that a run measured; None without."""
    try:
        found = RunDir(path).client_metrics()
    except UserError:  # damaged: `fedspeed verify` says so
        return None
    if found is None or not len(found.rounds):
        return None
    return {
        "round": int(found.rounds[-1]),
        "on": str(found.on),
        "accuracy": _finite(found.accuracy[-1].tolist()),
        "loss": _finite(found.loss[-1].tolist()),
    }


def _finite(values: list[float]) -> list[float | None]:
    return [float(f"{value:.6g}") if math.isfinite(value) else None for value in values]
