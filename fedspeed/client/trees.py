"""Trees of vectors, NamedTuples of NamedTuples of tensors: map and sum them, compare vectors, describe values."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar

import torch

from ..methods.base import dense_bytes
from ..utils.devices import convolutions

Tree = TypeVar("Tree", bound=tuple[Any, ...])
Fields = list[tuple[str, int]]  # the vectors of a tree, in order: name, and length of the last axis
tree_bytes = dense_bytes  # of all tensors of a tree: the cost to send it


def tree_map(f: Callable[[torch.Tensor], torch.Tensor], tree: Tree) -> Tree:
    """Apply f to every tensor of a NamedTuple (of NamedTuples)."""
    return type(tree)(*(tree_map(f, a) if isinstance(a, tuple) else f(a) for a in tree))


def tree_leaves(tree: tuple[Any, ...]) -> Iterator[torch.Tensor]:
    """Yield every tensor of a NamedTuple (of NamedTuples), in order."""
    for a in tree:
        if isinstance(a, tuple):
            yield from tree_leaves(a)
        else:
            yield a


def tree_of(like: Any, leaves: Iterable[torch.Tensor]) -> Any:
    """Return a tree like another, with these tensors as leaves."""
    remaining = iter(leaves)
    return tree_map(lambda _: next(remaining), like)


def has_leaves(tree: tuple[Any, ...]) -> bool:
    """Return whether there is any tensor in a tree."""
    return next(tree_leaves(tree), None) is not None


def stack(trees: list[Any]) -> Any:
    """Return trees of vectors as one tree of blocks, in new memory."""
    columns = zip(*(tree_leaves(tree) for tree in trees), strict=True)
    return tree_of(trees[0], [torch.stack(column) for column in columns])


def unstack(tree: Any, rows: int) -> list[Any]:
    """Return a tree of blocks as trees of vectors, views of its rows; a field that clients share stays shared."""
    if not has_leaves(tree):
        return [tree] * rows
    columns = [unstack(a, rows) if isinstance(a, tuple) else a.unbind() if a.ndim == 2 else [a] * rows for a in tree]
    return [type(tree)(*row) for row in zip(*columns, strict=True)]


def meta_like(a: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return the shape of a tensor, and its dtype or another, without numbers."""
    return a.new_empty(a.shape, dtype=dtype, device="meta")


def zeros_of(shapes: Tree, device: torch.device) -> Tree:
    """Return a tree of zeros of these shapes.

    `torch.zeros_like` and `empty_like` of tensors without numbers import sympy, 0.25 s and 30 MB per process.
    """
    return tree_map(lambda a: a.new_zeros(a.shape, device=device), shapes)


def sum_dtype(a: torch.Tensor | torch.device) -> torch.dtype:
    """Return the dtype of running sums: float64, but float32 on mps, which has no float64."""
    device = a if isinstance(a, torch.device) else a.device
    return torch.float32 if device.type == "mps" else torch.float64


@contextmanager
def precision(precision: str, device: torch.device) -> Iterator[None]:
    """Run forward and backward passes in `full` precision, under `bfloat16` autocast, or with `tf32` products."""
    if precision == "bfloat16":
        with torch.autocast(device.type, torch.bfloat16):
            yield
    elif precision == "tf32":
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("high")
        try:
            with convolutions(tf32=True) if device.type == "cuda" else nullcontext():
                yield
        finally:
            torch.set_float32_matmul_precision(before)
    else:
        yield


@contextmanager
def one_thread() -> Iterator[None]:
    """Run a block with one intra-op thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def all_finite(tree: tuple[Any, ...]) -> bool:
    """Return whether no tensor of a tree holds NaN or Inf; one pass, no temporary."""
    return all(_finite(a) for a in tree_leaves(tree) if a.numel())


def _finite(a: torch.Tensor) -> bool:
    # A sum with NaN or Inf in it is not finite, and takes half the time. A sum of finite numbers may overflow.
    return math.isfinite(float(a.sum())) or all(math.isfinite(float(end)) for end in torch.aminmax(a))


def chunks(*vectors: torch.Tensor, size: int = 2**20) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yield vectors in equal chunks, so that intermediate results stay in the cache; sizes fix the bits of norms."""
    return zip(*(v.reshape(-1).split(size) for v in vectors), strict=True)  # type: ignore[no-untyped-call]


def distance(x: torch.Tensor, y: torch.Tensor) -> float:
    """Return ||x - y||, summed in float64."""
    return math.hypot(*(float(torch.linalg.vector_norm(a - b, dtype=sum_dtype(x))) for a, b in chunks(x, y)))


def squared_distance(x: torch.Tensor, y: torch.Tensor) -> float:
    """Return ||x - y||^2, summed in float64 chunk by chunk: a whole float64 vector would be the largest of all."""
    return sum(float(torch.linalg.vector_norm(a - b, dtype=sum_dtype(x))) ** 2 for a, b in chunks(x, y))


def clip_(v: torch.Tensor, limit: float) -> torch.Tensor:
    """Scale v in place to a norm of at most `limit` (over the last axis); the square of the norm must not overflow."""
    norm = torch.linalg.vector_norm(v, dim=-1, keepdim=True, dtype=sum_dtype(v))
    return v.mul_((limit / norm.clamp_(min=limit)).to(v.dtype))


GROWN = 10.0
"""Factor on the first model's norm above which a vector of server or client counts as too large; healthy ones have a
tenth of that norm. For the model itself the factor applies twice."""


def fields_of(tree: Any) -> Fields:
    """Return names and lengths of the vectors of a tree."""
    return [(name, a.shape[-1] if a.ndim else 0) for name, a in named("", tree)]


def named(name: str, tree: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor of a tree with its path, in order.

    Example:
        >>> from fedspeed.methods import FedInit, FedSpeed
        >>> [path for path, _ in named("client", FedInit(FedSpeed()).init_client(torch.zeros(2)))]
        ['client.last', 'client.base.h']
    """
    if isinstance(tree, torch.Tensor):
        yield name, tree
    elif isinstance(tree, tuple):
        for field, value in zip(tree._fields, tree, strict=True):  # type: ignore[attr-defined]
            yield from named(f"{name}.{field}" if name else field, value)


def kind(value: Any) -> str:
    """Return a value in a few words, for messages."""
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value)
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {shape_text(value.shape)}"
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def shape_text(shape: tuple[int, ...]) -> str:
    """Return a shape in parentheses; -1 stands for the clients of a block."""
    return "(" + ", ".join("clients" if n == -1 else str(n) for n in shape) + ")"


def large(x0: torch.Tensor) -> float:
    """Return the norm above which a vector is too large beside the first model."""
    return GROWN * max(1.0, norm(x0))


def grown(whose: str, tree: Any, most: float) -> dict[str, float]:
    """Return the norms of those vectors of a tree that are too large, by path (`server.c`); `large` returns `most`.

    Example:
        >>> from fedspeed.methods.base import Movement
        >>> grown("up", Movement(torch.tensor([3e3, 4e3])), most=10.0), grown("up", Movement(torch.ones(2)), most=10.0)
        ({'up.D': 5000.0}, {})
    """
    norms = {name: norm(a) for name, a in named(whose, tree)}
    return {name: size for name, size in norms.items() if size > most * (GROWN if name.endswith(".x") else 1.0)}


def norm(a: torch.Tensor) -> float:
    """Return the norm of a tensor, summed as accurately as its device can."""
    return float(torch.linalg.vector_norm(a, dtype=sum_dtype(a)))
