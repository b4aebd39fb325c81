"""Measurements of the training loss at a vector: gradient, the Hessian's top eigenvalue, gain of a SAM step, noise.

Noise is the part of an ascent step that the minibatch decides instead of the loss.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from ..data.federated import Federated
from ..errors import UserError
from ..methods.base import nested
from ..utils.files import key
from ..utils.random import rng
from .evaluate import SLICE
from .flat_model import FlatModel, Loss
from .local_loop import Oracle
from .trees import one_thread, sum_dtype
from .work import Work


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


class Noise(NamedTuple):
    """Gradients of pairs of independent minibatches, each pair from one population of samples.

    Args:
        cosine, error: the mean cosine of the two gradients of a pair, and its standard error.
        share: 1 - mean ||E g||^2 / mean E ||g||^2: the part of a gradient's square that is noise. Both means are over
            the populations, and estimated without bias: ||E g||^2 by products of pairs.
        norm: the root of the mean of ||g||^2.
        full_norm: the same of the gradient over all samples of a population, without augmentation and clipping.
        pairs: the number of pairs.
    """

    cosine: float
    error: float
    share: float
    norm: float
    full_norm: float
    pairs: int


def ascent_noise(
    work: Work, x: torch.Tensor, populations: Mapping[int, np.ndarray], pairs: int, seed: int = 0
) -> Noise:
    """Return the noise of the gradients that an ascent step takes at x.

    A minibatch has the plan's size, drawn without replacement; the two of a pair are drawn independently. Gradients are
    those of the local steps: augmented, clipped and in the precision of the plan, without prox term and weight decay,
    and of the part of the minibatch that the method's ascent takes.

    Args:
        populations: the rows of each population by its number, for example those of each client.
        pairs: pairs per population.
        seed: of the draws, which depend on it and on the number of the population alone.
    """
    products, squares, cosines, full = list[float](), list[float](), list[float](), list[float]()
    with one_thread():  # it fixes the bits
        for number, rows in populations.items():
            with work.flat.statistics.kept():  # Minibatches change them.
                g = _gradients(work, x, rows, 2 * pairs, seed, number)
                for first, second in zip(g, g, strict=True):  # two at a time from one iterator
                    product, a, b = float(first @ second), float(first @ first), float(second @ second)
                    products.append(product)
                    squares.append((a + b) / 2)
                    cosines.append(product / math.sqrt(a * b) if a * b else 0.0)
            full.append(float(mean_gradient(work.flat, x, batches(work.data, rows), work.loss)[1].norm()) ** 2)
    if not all(map(math.isfinite, (*squares, *full))):
        raise UserError("inspect: expected finite gradients, found NaN or Inf; measure an earlier round of the run")
    square = statistics.fmean(squares)
    return Noise(
        cosine=statistics.fmean(cosines),
        error=statistics.stdev(cosines) / math.sqrt(len(cosines)) if len(cosines) > 1 else 0.0,
        share=1 - statistics.fmean(products) / square if square else 0.0,
        norm=math.sqrt(square),
        full_norm=math.sqrt(statistics.fmean(full)),
        pairs=len(cosines),
    )


def _gradients(
    work: Work, x: torch.Tensor, rows: np.ndarray, count: int, seed: int, number: int
) -> Iterator[torch.Tensor]:
    """Yield gradients of independent minibatches of some rows."""
    fraction = next((m.ascent_fraction for m in nested(work.method) if hasattr(m, "ascent_fraction")), 1.0)
    oracle = Oracle(work, [])
    size = min(work.plan.batch_size, len(rows))
    for i in range(count):
        chosen = rng(seed, "noise", number, i).choice(rows, size, replace=False)
        stream = rng(seed, "noise augment", number, i) if work.data.pipeline.random else None
        work.flat.model.train()
        oracle.next_step(*work.data.batch(chosen, stream), mask_seed=key(seed, "noise masks", number, i) % 2**62)
        yield oracle(x, fraction).to(sum_dtype(x), copy=True)
        oracle.begin()
