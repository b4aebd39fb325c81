"""The terms that methods share, as functions on vectors. They work on a (clients, d) block as well.

A name that ends in _ works in place on its first vector, as torch's own do: give it a gradient, which is yours to
overwrite. At eleven million parameters a fresh vector costs several passes over one that is there.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable

from ..errors import UserError
from .base import Grad, Vec

VARIATE = (
    "its control variate takes (x - x_iK) / (K eta_l) as the mean of a client's gradients, which it is after plain SGD "
    "steps alone"
)
MIXED = "its Delta takes -mean D_i / (K eta_l) as a gradient, which it is after plain SGD steps alone"
"""Reasons of `Method.reads_gradient_from_D`."""
TINY = 1e-7
"""Keeps `rho / norm` finite at a stationary point (the value of the authors' code)."""


def zeros(x: Vec) -> Vec:
    """Return a zero vector of the shape, dtype and device of x."""
    return x.new_zeros(x.shape)


def chunks(g: Vec, *others: Vec) -> Iterable[tuple[Vec, ...]]:
    """Cut long vectors up alike, so that several operations on a piece find it in the cache; a block stays whole."""
    if g.ndim > 1:
        return [(g, *others)]
    return zip(*(v.expand_as(g).split(2**17) for v in (g, *others)), strict=True)  # type: ignore[no-untyped-call]


def norm(v: Vec) -> Vec:
    """Return ||v|| over the last axis, which is kept: global L2 norm, one per client."""
    length: Vec = v.norm(dim=-1, keepdim=True)
    return length


def unit(v: Vec) -> Vec:
    """Return v / (||v|| + 1e-7)."""
    return v / (norm(v) + TINY)


def ascent_(g: Vec, rho: float) -> Vec:
    """Return rho g / (||g|| + 1e-7), in place."""
    return g.mul_(rho / (norm(g) + TINY))


def ascend_(x: Vec, g: Vec, rho: float, normalise: bool = True) -> Vec:
    """Return the perturbed point x + rho g / (||g|| + 1e-7), or x + rho g, in place of g."""
    length = rho / (norm(g) + TINY) if normalise else rho
    for a, b in chunks(g, x):
        a.mul_(length).add_(b)
    return g


def sam_gradient(x: Vec, grad: Grad, rho: float, fraction: float = 1.0) -> Vec:
    """Return g(x + rho g(x)/||g(x)||), both on the same minibatch; rho = 0 is the plain gradient at half the cost.

    Args:
        fraction: the part of the minibatch on which the ascent gradient is taken.
    """
    return grad(ascend_(x, grad(x, fraction), rho)) if rho else grad(x)


def add_prox_(g: Vec, x: Vec, centre: Vec, weight: float) -> Vec:
    """Return g + weight (x - centre), in place: add the gradient of the prox term (weight/2) ||x - centre||^2."""
    for a, b, c in chunks(g, x, centre):
        a.add_(b, alpha=weight).sub_(c, alpha=weight)
    return g


def add_corrected_prox_(g: Vec, x: Vec, centre: Vec, h: Vec, weight: float) -> Vec:
    """Return g + weight (h + x - centre), in place: the proximal term and its correction h_i, in parameter units."""
    for a, b, c, e in chunks(g, x, centre, h):
        a.add_(b, alpha=weight).sub_(c, alpha=weight).add_(e, alpha=weight)
    return g


def check_prox(name: str, lr: float, weight: float, symbol: str) -> None:
    """Raise if the local iteration x - centre -> (1 - lr weight)(x - centre) diverges, warn if it overshoots."""
    if lr * weight >= 2:
        raise UserError(
            f"{name}: lr must be < 2 / ({symbol}), got lr {lr:g} and {symbol} = {weight:g}: the local prox iteration "
            f"diverges; lower --lr or the prox weight"
        )
    if lr * weight > 1:
        warnings.warn(
            f"{name}: lr {lr:g} > 1 / ({symbol}) = {1 / weight:g}: steps overshoot the prox centre", stacklevel=3
        )


def falling(k: int, K: int, rest: float) -> float:
    """Return the factor of the rate in step k of K: 1 in step 0, in a line towards `rest`, which step K would have.

    Example:
        >>> [falling(k, 4, rest=0.2) for k in range(4)]
        [1.0, 0.8, 0.6, 0.4]
    """
    return (1 - k / K) + rest * k / K
