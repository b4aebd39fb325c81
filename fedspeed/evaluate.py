"""Loss and accuracy of a vector, in fixed shards summed in order so that every back end gets the same bits."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from .data.federated import Federated
from .vec import FlatModel, Loss

SHARD = 500


class Score(NamedTuple):
    """Mean loss, and the share of right answers (NaN where there is no score a class to take the largest of)."""

    loss: float
    accuracy: float


def evaluate(flat: FlatModel, x: torch.Tensor, data: Federated, loss: Loss) -> Score:
    """Score of the vector x on the test set; plain mean loss, no weight decay in it."""
    if data.y_test is None or not len(data.y_test):
        return Score(math.nan, math.nan)
    total, right, n = 0.0, 0.0, len(data.y_test)
    flat.load(x)
    flat.model.eval()
    with torch.no_grad():
        for a in range(0, n, SHARD):
            inputs, targets = data.test_batch(a, min(a + SHARD, n))
            output = flat.model(inputs)
            total += float(loss(output, targets)) * len(targets)
            right += _right(output, targets) if data.classes is not None else math.nan
    return Score(total / n, right / n)


def _right(output: Any, targets: torch.Tensor) -> float:
    """How many targets have the largest output; NaN for outputs that are not (n, 2 or more), one logit say."""
    if not isinstance(output, torch.Tensor) or output.ndim != 2 or output.shape[1] < 2 or targets.ndim != 1:
        return math.nan
    return float((output.argmax(-1) == targets).sum())
