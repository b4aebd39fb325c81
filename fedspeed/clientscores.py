"""Scores of a vector on every client's data: one pass over all rows in fixed slices, then sums per client, added in
order, so that every back end gets the same bits."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from .data.federated import Federated
from .evaluate import SLICE, Score, right
from .sampling import seed_device
from .vec import FlatModel, Loss


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
