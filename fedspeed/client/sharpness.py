"""Sharpness of the training loss at a vector: its gradient, the Hessian's top eigenvalue, the gain of a SAM step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from ..data.federated import Federated
from ..utils.random import rng
from .evaluate import SLICE
from .flat_model import FlatModel, Loss
from .trees import sum_dtype


class Eigenvalue(NamedTuple):
    """The largest eigenvalue of a Hessian, ||H v - value v|| at its vector, and the Hessian products it took."""

    value: float
    residual: float
    products: int


Batches = Sequence[tuple[torch.Tensor, torch.Tensor]]


def batches(data: Federated, rows: np.ndarray) -> Batches:
    """Return some training samples in batches of at most `SLICE`, not augmented."""
    return [data.batch(rows[a : a + SLICE]) for a in range(0, len(rows), SLICE)]


def mean_gradient(flat: FlatModel, x: torch.Tensor, data: Batches, loss: Loss) -> tuple[float, torch.Tensor]:
    """Return the mean loss over samples and its gradient at x, in evaluation mode."""
    flat.model.eval()
    n = sum(len(targets) for _, targets in data)
    value = 0.0
    total_gradient = torch.zeros_like(x, dtype=sum_dtype(x))
    part = torch.empty_like(x)
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
    """Return the largest (not the largest in size) eigenvalue of the mean loss's Hessian at x, by power iteration.

    v <- H v / ||H v|| converges to the eigenvalue of largest size; where that is negative, the same is done with
    H - value I, whose largest in size is the other end of the spectrum.

    Args:
        iterations: at most this many products with H per end of the spectrum.
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
        out = torch.zeros_like(v, dtype=sum_dtype(v))
        for inputs, targets in data:
            out.add_(flat.hvp(x, v, inputs, targets, loss), alpha=len(targets) / n)
        return out.to(v.dtype) - shift * v

    def power(shift: float) -> Eigenvalue:
        v = torch.from_numpy(rng(seed, "eigenvector").standard_normal(len(x))).to(x)
        value = 0.0
        residual = math.inf
        k = 0
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
    """Return loss(x + rho g/||g||) - loss(x), the increase along one ascent step of length rho."""
    value, g = mean_gradient(flat, x, data, loss)
    length = float(g.norm())
    return mean_gradient(flat, x + rho / length * g, data, loss)[0] - value if length else 0.0
