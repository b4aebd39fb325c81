"""Loss and accuracy of a vector on the test set, the validation set or the clients' data.

Slices are fixed and summed in order, so that every back end gets the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from ..data.federated import Federated
from ..utils.random import seed_device
from .flat_model import FlatModel, Loss
from .losses import bce, has_accuracy

SLICE = 500
"""Samples per forward pass. It fixes the bits of scores: sums are over slices."""


class Score(NamedTuple):
    """Mean loss, and the share of right answers (NaN where there are neither classes nor labels).

    With several labels per row (`bce`) it is the share of right labels, over all rows and labels.
    """

    loss: float
    accuracy: float

    @property
    def known_accuracy(self) -> float | None:
        """The accuracy as in a record: None instead of NaN."""
        return None if math.isnan(self.accuracy) else self.accuracy


def slices(data: Federated, validation: bool = False) -> list[tuple[int, int]]:
    """Return the test set, or the validation set, in fixed slices, (start, stop) each."""
    rows = data.validation if validation else data.y_test
    n = 0 if rows is None else len(rows)
    return [(a, min(a + SLICE, n)) for a in range(0, n, SLICE)]


def score_slice(
    flat: FlatModel, x: torch.Tensor, data: Federated, loss: Loss, start: int, stop: int, validation: bool = False
) -> Score:
    """Return sums, not means, over one slice of the test set, or of the validation set."""
    flat.load(x)
    flat.model.eval()
    seed_device(flat.device, start)  # so that a model that draws random numbers gives the same bits on every back end
    with torch.no_grad():
        inputs, targets = (data.validation_batch if validation else data.test_batch)(start, stop)
        output = flat.model(inputs)
        hits = right(output, targets, loss) if has_accuracy(data, loss) else None
        return Score(float(loss(output, targets)) * len(targets), math.nan if hits is None else float(hits.sum()))


def total(parts: Iterable[Score], n: int) -> Score:
    """Return means from the sums of the slices; the order of this sum fixes the bits."""
    loss, correct = 0.0, 0.0
    for part in parts:
        loss, correct = loss + part.loss, correct + part.accuracy
    return Score(loss / n, correct / n) if n else Score(math.nan, math.nan)


def evaluate(flat: FlatModel, x: torch.Tensor, data: Federated, loss: Loss, validation: bool = False) -> Score:
    """Return the score of x on the test set, or on the validation set; the loss is without weight decay."""
    pieces = slices(data, validation)
    parts = (score_slice(flat, x, data, loss, a, b, validation) for a, b in pieces)
    return total(parts, pieces[-1][1] if pieces else 0)


def right(output: Any, targets: torch.Tensor, loss: Loss) -> torch.Tensor | None:
    """Return which targets have the largest output; None unless outputs are (n, 2 or more): for one logit.

    With `bce` it is the share of a row's labels that are right: a logit above 0 is a probability above 0.5.

    Example:
        >>> right(torch.tensor([[3.0, -1.0], [3.0, 1.0]]), torch.tensor([[1, 0], [1, 0]]), bce).tolist()
        [1.0, 0.5]
    """
    if loss is bce:
        same = ((output > 0) == (targets > 0.5)).reshape(len(targets), -1)
        labels: torch.Tensor = same.sum(1).cpu().double() / same.shape[1]
        return labels
    if not isinstance(output, torch.Tensor) or output.ndim != 2 or output.shape[1] < 2 or targets.ndim != 1:
        return None
    return output.argmax(-1) == targets


class Sums(NamedTuple):
    """Sums of loss and of right answers over one slice, for its clients `first`, `first + 1`, ..."""

    first: int
    loss: np.ndarray
    right: np.ndarray


def client_slices(data: Federated, client: int | None = None) -> list[tuple[int, int]]:
    """Return the positions of all scored rows, or of one client's, in fixed slices, (start, stop) each."""
    offsets = data.scored.offsets
    ends = offsets if client is None else offsets[client : client + 2]
    end = int(ends[-1])
    return [(a, min(a + SLICE, end)) for a in range(int(ends[0]), end, SLICE)]


def score_clients(flat: FlatModel, x: torch.Tensor, data: Federated, loss: Loss, start: int, stop: int) -> Sums:
    """Return sums over positions `start..stop-1` of the scored rows, by one forward pass without augmentation."""
    flat.load(x)
    flat.model.eval()
    seed_device(flat.device, start)  # as in `score_slice`
    offsets = data.scored.offsets
    first, last = (int(np.searchsorted(offsets, at, side="right")) - 1 for at in (start, stop - 1))
    edges = np.clip(offsets[first : last + 2], start, stop) - start
    with torch.no_grad():
        inputs, targets = data.scored_batch(start, stop)
        output = flat.model(inputs)
        if loss is cross_entropy and targets.ndim == 1:
            losses = _summed(cross_entropy(output, targets, reduction="none"), edges)
        else:  # any other loss is known only as a mean over a batch
            alike = isinstance(output, torch.Tensor) and len(output) == len(targets)
            losses = np.zeros(len(edges) - 1)
            for i, (a, b) in enumerate(pairwise(edges.tolist())):
                if a < b:  # a client may have no row to be scored on
                    some = output[a:b] if alike else flat.model(inputs[a:b])
                    losses[i] = float(loss(some, targets[a:b])) * (b - a)
        hits = right(output, targets, loss) if has_accuracy(data, loss) else None
    correct = np.full(last + 1 - first, math.nan) if hits is None else _summed(hits, edges)
    return Sums(first, losses, correct)


def own_score(flat: FlatModel, x: torch.Tensor, data: Federated, loss: Loss, client: int) -> Score:
    """Return the score of a client's own model on the rows that it is scored on; NaN without any."""
    parts = [score_clients(flat, x, data, loss, a, b) for a, b in client_slices(data, client)]
    n = int(np.diff(data.scored.offsets[client : client + 2])[0]) or math.nan
    return Score(sum(float(part.loss[0]) for part in parts) / n, sum(float(part.right[0]) for part in parts) / n)


def _summed(values: torch.Tensor, edges: np.ndarray) -> np.ndarray:
    """Return sums between the edges, in float64; `bincount` adds in order, which fixes the bits."""
    owner = np.repeat(np.arange(len(edges) - 1), np.diff(edges))
    return np.bincount(owner, values.cpu().double().numpy(), len(edges) - 1)
