"""The terms that methods share, as functions on vectors. They work on a (clients, d) block as well."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from ..errors import UserError
from ..method import Grad

if TYPE_CHECKING:
    from torch import Tensor as Vec

TINY = 1e-7
"""Keeps `rho / norm` finite at a stationary point (the value of the authors' code)."""


def zeros(x: Vec) -> Vec:
    """A zero vector of the kind of x."""
    return x.new_zeros(x.shape)


def norm(v: Vec) -> Vec:
    """||v|| over the last axis, which is kept: global L2 norm, one a client."""
    length: Vec = v.norm(dim=-1, keepdim=True)
    return length


def unit(v: Vec) -> Vec:
    """v / (||v|| + 1e-7)."""
    return v / (norm(v) + TINY)


def ascend(x: Vec, g: Vec, rho: float, normalise: bool = True) -> Vec:
    """The perturbed point x + rho g / (||g|| + 1e-7), or x + rho g."""
    return x.addcmul(g, rho / (norm(g) + TINY)) if normalise else x.add(g, alpha=rho)


def sam_gradient(x: Vec, grad: Grad, rho: float, fraction: float = 1.0) -> Vec:
    """g(x + rho g(x)/||g(x)||), both on the same minibatch; rho = 0 is the plain gradient at half the cost.

    Args:
        fraction: the part of the minibatch on which the ascent gradient is taken.
    """
    return grad(ascend(x, grad(x, fraction), rho)) if rho else grad(x)


def prox(x: Vec, centre: Vec, weight: float) -> Vec:
    """weight (x - centre): gradient of the proximal term (weight/2) ||x - centre||^2."""
    return weight * (x - centre)


def corrected_prox(x: Vec, centre: Vec, h: Vec, weight: float) -> Vec:
    """weight (h + x - centre): the proximal term's gradient and its correction h_i, in parameter units."""
    return weight * (h + x - centre)


def check_prox(name: str, lr: float, weight: float, symbol: str) -> None:
    """Refuse a local iteration x - centre -> (1 - lr weight)(x - centre) that diverges, warn of one that overshoots."""
    if lr * weight >= 2:
        raise UserError(
            f"{name}: lr must be < 2 / ({symbol}), got lr {lr:g} and {symbol} = {weight:g}: the local prox iteration "
            f"diverges; lower --lr or the prox weight"
        )
    if lr * weight > 1:
        warnings.warn(
            f"{name}: lr {lr:g} > 1 / ({symbol}) = {1 / weight:g}: steps overshoot the prox centre", stacklevel=3
        )
