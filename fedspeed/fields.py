"""What is in a tree of vectors, in words: for the checks of the contract."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from .vec import accurate

GROWN = 10.0
"""How many times the first model's norm a vector of server or client must have to be written down; healthy ones have
a tenth of that norm. The model itself may be this many times larger again."""


class Field(NamedTuple):
    """A vector of a tree: its name and the length of its last axis."""

    name: str
    length: int


def fields_of(tree: Any) -> list[Field]:
    """The vectors of a tree."""
    return [Field(name, a.shape[-1] if a.ndim else 0) for name, a in named("", tree)]


def named(name: str, tree: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of a tree with its place, `down.x` for example."""
    if isinstance(tree, torch.Tensor):
        yield name, tree
    elif isinstance(tree, tuple):
        for field, value in zip(tree._fields, tree, strict=True):  # type: ignore[attr-defined]
            yield from named(f"{name}.{field}" if name else field, value)


def kind(value: Any) -> str:
    """What a value is, in a few words."""
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value)
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {shape_text(value.shape)}"
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def shape_text(shape: tuple[int, ...]) -> str:
    """A shape as people write it; -1 stands for the clients of a block."""
    return "(" + ", ".join("clients" if n == -1 else str(n) for n in shape) + ")"


def large(x0: torch.Tensor) -> float:
    """The norm above which a vector is too large beside the first model."""
    return GROWN * max(1.0, norm(x0))


def grown(whose: str, tree: Any, most: float) -> dict[str, float]:
    """The norms of those vectors of a NamedTuple that are too large, by names: server.c.

    Args:
        most: as `large` says.

    Example:
        >>> from fedspeed.methods.fedavg import Up
        >>> grown("up", Up(torch.tensor([3e3, 4e3])), most=10.0), grown("up", Up(torch.ones(2)), most=10.0)
        ({'up.D': 5000.0}, {})
    """
    norms = {name: norm(a) for name, a in named(whose, tree)}
    return {name: size for name, size in norms.items() if size > most * (GROWN if name.endswith(".x") else 1.0)}


def norm(a: torch.Tensor) -> float:
    """The norm of a tensor, summed as accurately as its device can."""
    return float(torch.linalg.vector_norm(a, dtype=accurate(a)))
