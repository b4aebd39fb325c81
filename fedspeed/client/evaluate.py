"""Loss and accuracy of a vector, in fixed slices summed in order so that every back end gets the same bits."""

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

SLICE = 500


class Score(NamedTuple):
    """Mean loss, and the share of right answers (NaN where outputs are not one score per class)."""

    loss: float
    accuracy: float

    @property
    def known_accuracy(self) -> float | None:
        """The accuracy as a record holds it: None where there is none."""
        return None if math.isnan(self.accuracy) else self.accuracy


def slices(data: Federated, validation: bool = False) -> list[tuple[int, int]]:
    """The test set, or the validation set, in fixed pieces, (start, stop) each."""
    rows = data.validation if validation else data.y_test
    n = 0 if rows is None else len(rows)
    return [(a, min(a + SLICE, n)) for a in range(0, n, SLICE)]


def score_slice(
    flat: FlatModel, x: torch.Tensor, data: Federated, loss: Loss, start: int, stop: int, validation: bool = False
) -> Score:
    """Sums, not means, over one piece of the test set, or of the validation set."""
    flat.load(x)
    flat.model.eval()
    seed_device(flat.device, start)  # a model that draws in evaluation, too, gives the same bits on every back end
    with torch.no_grad():
        inputs, targets = (data.validation_batch if validation else data.test_batch)(start, stop)
        output = flat.model(inputs)
        hits = right(output, targets) if data.classes is not None else None
        return Score(float(loss(output, targets)) * len(targets), math.nan if hits is None else float(hits.sum()))


def total(parts: Iterable[Score], n: int) -> Score:
    """Means from the sums of the pieces, added in order."""
    loss, correct = 0.0, 0.0
    for part in parts:
        loss, correct = loss + part.loss, correct + part.accuracy
    return Score(loss / n, correct / n) if n else Score(math.nan, math.nan)


def evaluate(flat: FlatModel, x: torch.Tensor, data: Federated, loss: Loss, validation: bool = False) -> Score:
    """Score of the vector x on the test set, or on the validation set; plain mean loss, no weight decay in it."""
    pieces = slices(data, validation)
    parts = (score_slice(flat, x, data, loss, a, b, validation) for a, b in pieces)
    return total(parts, pieces[-1][1] if pieces else 0)


def right(output: Any, targets: torch.Tensor) -> torch.Tensor | None:
    """Which targets have the largest output; None unless outputs are (n, 2 or more): for one logit, for example."""
    if not isinstance(output, torch.Tensor) or output.ndim != 2 or output.shape[1] < 2 or targets.ndim != 1:
        return None
    return output.argmax(-1) == targets


class Sums(NamedTuple):
    """Sums of loss and of right answers over one slice, for clients `first`, `first + 1`, ..., which stand in it."""

    first: int
    loss: np.ndarray
    right: np.ndarray


def client_slices(data: Federated, client: int | None = None) -> list[tuple[int, int]]:
    """Positions of the clients' rows, or of one client's, in fixed pieces, (start, stop) each."""
    ends = data.offsets if client is None else data.offsets[client : client + 2]
    end = int(ends[-1])
    return [(a, min(a + SLICE, end)) for a in range(int(ends[0]), end, SLICE)]


def score_clients(flat: FlatModel, x: torch.Tensor, data: Federated, loss: Loss, start: int, stop: int) -> Sums:
    """Of positions `start..stop-1` of the clients' rows, one forward pass; nothing is augmented."""
    flat.load(x)
    flat.model.eval()
    seed_device(flat.device, start)  # as `evaluate.score_slice`
    first, last = (int(np.searchsorted(data.offsets, at, side="right")) - 1 for at in (start, stop - 1))
    edges = np.clip(data.offsets[first : last + 2], start, stop) - start
    with torch.no_grad():
        inputs, targets = data.batch(data.indices[start:stop])
        output = flat.model(inputs)
        if loss is cross_entropy and targets.ndim == 1:
            losses = _summed(cross_entropy(output, targets, reduction="none"), edges)
        else:  # a mean over a batch, whatever else it is
            alike = isinstance(output, torch.Tensor) and len(output) == len(targets)
            each = ((a, b, output[a:b] if alike else flat.model(inputs[a:b])) for a, b in pairwise(edges.tolist()))
            losses = np.array([float(loss(some, targets[a:b])) * (b - a) for a, b, some in each])
        hits = right(output, targets) if data.classes is not None else None
    correct = np.full(last + 1 - first, math.nan) if hits is None else _summed(hits, edges)
    return Sums(first, losses, correct)


def own_score(flat: FlatModel, x: torch.Tensor, data: Federated, loss: Loss, client: int) -> Score:
    """Of a client's own model on its own data."""
    parts = [score_clients(flat, x, data, loss, a, b) for a, b in client_slices(data, client)]
    n = int(data.sizes[client])
    return Score(sum(float(part.loss[0]) for part in parts) / n, sum(float(part.right[0]) for part in parts) / n)


def _summed(values: torch.Tensor, edges: np.ndarray) -> np.ndarray:
    """Sums between the edges, in float64 and in order."""
    owner = np.repeat(np.arange(len(edges) - 1), np.diff(edges))
    return np.bincount(owner, values.cpu().double().numpy(), len(edges) - 1)
