"""Loss and accuracy of a vector, in fixed shards summed in order so that every back end gets the same bits; and how
sharp the training loss is there.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from .data.federated import Federated
from .sampling import rng, seed_device
from .vec import FlatModel, Loss, accurate

SHARD = 500


class Score(NamedTuple):
    """Mean loss, and the share of right answers (NaN where there is no score a class to take the largest of)."""

    loss: float
    accuracy: float


def shards(data: Federated, validation: bool = False) -> list[tuple[int, int]]:
    """The test set, or the validation set, in fixed pieces, (start, stop) each."""
    rows = data.validation if validation else data.y_test
    n = 0 if rows is None else len(rows)
    return [(a, min(a + SHARD, n)) for a in range(0, n, SHARD)]


def score_shard(
    flat: FlatModel, x: torch.Tensor, data: Federated, loss: Loss, start: int, stop: int, validation: bool = False
) -> Score:
    """Sums, not means, over one piece of the test set, or of the validation set."""
    flat.load(x)
    flat.model.eval()
    seed_device(flat.device, start)  # a model that draws in evaluation, too, gives the same bits on every back end
    with torch.no_grad():
        inputs, targets = (data.validation_batch if validation else data.test_batch)(start, stop)
        output = flat.model(inputs)
        right = _right(output, targets) if data.classes is not None else math.nan
        return Score(float(loss(output, targets)) * len(targets), right)


def total(parts: Iterable[Score], n: int) -> Score:
    """Means from the sums of the pieces, added in order."""
    loss, right = 0.0, 0.0
    for part in parts:
        loss, right = loss + part.loss, right + part.accuracy
    return Score(loss / n, right / n) if n else Score(math.nan, math.nan)


def evaluate(flat: FlatModel, x: torch.Tensor, data: Federated, loss: Loss, validation: bool = False) -> Score:
    """Score of the vector x on the test set, or on the validation set; plain mean loss, no weight decay in it."""
    pieces = shards(data, validation)
    parts = (score_shard(flat, x, data, loss, a, b, validation) for a, b in pieces)
    return total(parts, pieces[-1][1] if pieces else 0)


def _right(output: Any, targets: torch.Tensor) -> float:
    """How many targets have the largest output; NaN for outputs that are not (n, 2 or more), one logit say."""
    if not isinstance(output, torch.Tensor) or output.ndim != 2 or output.shape[1] < 2 or targets.ndim != 1:
        return math.nan
    return float((output.argmax(-1) == targets).sum())


class Eigenvalue(NamedTuple):
    """The largest eigenvalue of a Hessian, ||H v - value v|| at its vector, and the Hessian products it took."""

    value: float
    residual: float
    products: int


Batches = Sequence[tuple[torch.Tensor, torch.Tensor]]


def batches(data: Federated, rows: np.ndarray) -> Batches:
    """Some training samples in pieces of at most `SHARD`, not augmented."""
    return [data.batch(rows[a : a + SHARD]) for a in range(0, len(rows), SHARD)]


def mean_gradient(flat: FlatModel, x: torch.Tensor, data: Batches, loss: Loss) -> tuple[float, torch.Tensor]:
    """Mean loss over samples and its gradient at x, in evaluation mode."""
    flat.model.eval()
    n = sum(len(targets) for _, targets in data)
    value, total_gradient, part = 0.0, torch.zeros_like(x, dtype=accurate(x)), torch.empty_like(x)
    for inputs, targets in data:
        value += float(flat.gradient(x, inputs, targets, loss, part)) * len(targets) / n
        total_gradient.add_(part, alpha=len(targets) / n)
    return value, total_gradient.to(x.dtype)


def top_eigenvalue(
    flat: FlatModel,
    x: torch.Tensor,
    data: Batches,
    loss: Loss,
    *,
    iterations: int = 100,
    tolerance: float = 1e-3,
    seed: int = 0,
) -> Eigenvalue:
    """The largest (not the largest in size) eigenvalue of the mean loss's Hessian at x, by power iteration.

    v <- H v / ||H v|| converges to the eigenvalue of largest size; where that is negative, the same is done with
    H - value I, whose largest in size is the other end of the spectrum.

    Args:
        iterations: at most so many products with H, an end.
        tolerance: stop when ||H v - value v|| <= tolerance |value|.

    Example:
        >>> flat = FlatModel(torch.nn.Linear(2, 1, bias=False))
        >>> data = [(torch.tensor([[2.0, 0.0], [0.0, 1.0]]), torch.zeros(2, 1))]
        >>> round(top_eigenvalue(flat, flat.x, data, torch.nn.functional.mse_loss).value, 3)   # of diag(4, 1)
        4.0
    """
    flat.model.eval()
    n = sum(len(targets) for _, targets in data)

    def product(v: torch.Tensor, shift: float) -> torch.Tensor:
        out = torch.zeros_like(v, dtype=accurate(v))
        for inputs, targets in data:
            out.add_(flat.hvp(x, v, inputs, targets, loss), alpha=len(targets) / n)
        return out.to(v.dtype) - shift * v

    def power(shift: float) -> Eigenvalue:
        v = torch.from_numpy(rng(seed, "eigenvector").standard_normal(len(x))).to(x)
        value, residual, k = 0.0, math.inf, 0
        while k < iterations and residual > tolerance * abs(value + shift):
            v = v / v.norm()
            image = product(v, shift)
            value, k = float(v @ image), k + 1
            residual = float((image - value * v).norm())
            if not float(image.norm()):
                break
            v = image
        return Eigenvalue(value, residual, k)

    end = power(0.0)
    if end.value >= 0:
        return end
    other = power(end.value)
    return Eigenvalue(other.value + end.value, other.residual, end.products + other.products)


def sam_gap(flat: FlatModel, x: torch.Tensor, data: Batches, loss: Loss, rho: float) -> float:
    """loss(x + rho g/||g||) - loss(x): how much one ascent step of length rho finds."""
    value, g = mean_gradient(flat, x, data, loss)
    length = float(g.norm())
    return mean_gradient(flat, x + rho / length * g, data, loss)[0] - value if length else 0.0
