"""Convolution, group norm and max-pooling of a residual block, with the compiled kernels of `kernels.c`.

The library is built with the package where a C compiler is found; without it, layers are plain. Maps are (n, pixels,
channels), filters (taps, channels, out). A product is one call of the library (of torch where a width
does not fill the processor's vectors), and everything between two products is one pass of the library over the maps.
These functions do not use autograd: `residual` calls forward and backward passes in their order.
"""

from __future__ import annotations

import ctypes
import importlib.machinery
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..utils import devices
from .fast_conv import Rule, whole_maps

VERSION = 1
"""The interface and the arithmetic of kernels.c; a run with compiled layers is bound to it. Raise it in both files."""
NUMBER, POINTER = ctypes.c_int64, ctypes.c_void_p
SIGNATURES: dict[str, list[Any]] = {
    "multiply": [POINTER] * 4 + [NUMBER] * 11 + [ctypes.c_int],
    "transform": [POINTER] * 3 + [NUMBER] * 5 + [POINTER] * 4,
    "norm_forward": [POINTER] * 8 + [NUMBER] * 4 + [ctypes.c_double, ctypes.c_int],
    "norm_backward": [POINTER] * 11 + [NUMBER] * 4,
    "pool_forward": [POINTER] * 3 + [NUMBER] * 3,
    "pool_backward": [POINTER] * 4 + [NUMBER] * 3,
}


@cache
def library() -> ctypes.CDLL | None:
    """Return the compiled library; None if the package was installed without it, or with one that does not load."""
    for suffix in importlib.machinery.EXTENSION_SUFFIXES:
        path = Path(__file__).with_name("_kernels" + suffix)
        if path.exists():
            try:
                found = ctypes.CDLL(str(path))
                return found if found.kernels_version() == VERSION else None
            except (OSError, AttributeError):
                return None
    return None


@cache
def _function(name: str, dtype: torch.dtype) -> Any:
    found = getattr(library(), f"{name}_{'f32' if dtype == torch.float32 else 'f64'}")
    found.argtypes, found.restype = SIGNATURES[name], None
    return found


def _at(a: torch.Tensor | None) -> int | None:
    return None if a is None else a.data_ptr()


class Places(NamedTuple):
    """Places of the rows of maps in memory: row r of picture i lies at i * step + rows[r]."""

    rows: torch.Tensor
    step: int


class Transform:
    """A constant matrix by its non-zero entries, from rows of maps x, at `source`, to rows of maps y, at `target`."""

    def __init__(self, matrix: torch.Tensor, source: Places, target: Places) -> None:
        row, column = matrix.nonzero(as_tuple=True)
        first = torch.zeros(len(matrix) + 1, dtype=torch.int64)
        first[1:] = torch.bincount(row, minlength=len(matrix)).cumsum(0)
        self.entries = (first, source.rows[column].contiguous(), matrix[row, column].contiguous(), target.rows)
        self.rows = len(matrix)
        # Hundreds of calls a step: the function and the addresses of what it reads are looked up once.
        self.steps, self.places = (source.step, target.step, self.rows), [a.data_ptr() for a in self.entries]
        self.call = _function("transform", matrix.dtype)

    def __call__(
        self, x: torch.Tensor, y: torch.Tensor, n: int, channels: int, add: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Write the rows of n maps into y, plus those of `add`, which lie as y's; return y."""
        self.call(x.data_ptr(), y.data_ptr(), _at(add), n, *self.steps, channels, *self.places)
        return y


def _pixels(rows: int, channels: int) -> Places:
    """Return the places of maps (n, rows, channels)."""
    return Places(torch.arange(rows) * channels, rows * channels)


def _products(tiles: int, products: int, n: int, channels: int) -> Places:
    """Return the places of transformed maps (products, n * tiles, channels), tile by tile."""
    tile, product = torch.arange(tiles)[:, None], torch.arange(products)[None]
    return Places((product * (n * tiles * channels) + tile * channels).flatten(), tiles * channels)


PAD = 48
"""Numbers between two transformed filters: a distance of a power of two would put all of them into the same places of
the cache."""


class Transforms(NamedTuple):
    """The transforms of a rule for n maps, and their transposes; None for the identity."""

    B: Transform | None  # of inputs
    Bt: Transform | None
    A: Transform | None  # of outputs
    At: Transform | None
    G: Transform | None  # of filters
    Gt: Transform | None
    tiles: int
    products: int
    pad: int  # numbers between transformed filters


@cache
@devices.constants()
def _transforms(rule: Rule, dtype: torch.dtype, n: int, channels: int, out: int) -> Transforms:
    found = rule.matrices(dtype)
    assert found is not None
    A, B = whole_maps(found)
    tiles, products = found.tiles, found.products
    pad = 0 if A is None else PAD  # without A the transformed filters are read as one matrix
    inputs = _pixels(tiles * products, channels) if A is None else _products(tiles, products, n, channels)
    filters = Places(torch.arange(products) * (channels * out + pad), 0)
    return Transforms(
        *_both(B, lambda rows: _pixels(rows, channels), lambda _: inputs),
        *_both(A, lambda _: _products(tiles, products, n, out), lambda rows: _pixels(rows, out)),
        *_both(found.G, lambda taps: _pixels(taps, channels * out), lambda _: filters),
        *(tiles, products, pad),
    )


def _both(
    matrix: torch.Tensor | None, source: Callable[[int], Places], target: Callable[[int], Places]
) -> tuple[Transform | None, Transform | None]:
    """Return a matrix and its transpose as transforms, between the places of its columns and those of its rows."""
    if matrix is None:
        return None, None
    columns, rows = source(matrix.shape[1]), target(len(matrix))
    return Transform(matrix, columns, rows), Transform(matrix.t(), rows, columns)


def _filters(like: torch.Tensor, products: int, c: int, out: int, pad: int) -> torch.Tensor:
    """Return memory for transformed filters (products, c, out)."""
    return like.new_empty(products * (c * out + pad)).as_strided((products, c, out), (c * out + pad, out, 1))


def _multiply(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Return the products of two batches of matrices, one of which may be a transpose; see `multiply` in kernels.c."""
    batch, rows, depth = a.shape
    columns = b.shape[2]
    lanes = 64 // a.element_size()
    turned = b.stride(2) != 1
    if columns % lanes or (turned and depth % lanes) or (out is not None and out.stride(2) != 1):
        return torch.bmm(a, b) if out is None else torch.bmm(a, b, out=out)
    c = a.new_empty(batch, rows, columns) if out is None else out
    work = a.new_empty(4 * lanes * depth if turned else 0)
    _function("multiply", a.dtype)(
        *(a.data_ptr(), b.data_ptr(), c.data_ptr(), work.data_ptr(), batch, rows, columns, depth),
        *(*a.stride(), b.stride(0), b.stride(2) if turned else b.stride(1), c.stride(0), c.stride(1), turned),
    )
    return c


def conv_forward(x: torch.Tensor, w: torch.Tensor, rule: Rule) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the convolution of maps (n, pixels, channels) with filters (taps, channels, out), and both transforms."""
    (n, _, c), out = x.shape, w.shape[-1]
    B, _, A, _, G, _, tiles, products, pad = _transforms(rule, x.dtype, n, c, out)
    U = w if G is None else G(w, _filters(w, products, c, out, pad), 1, c * out)
    if A is None:
        V = (x if B is None else B(x, x.new_empty(n, tiles * products, c), n, c)).view(1, n * tiles, products * c)
        U = U.view(1, products * c, out)
        return _multiply(V, U).view(n, tiles, out), V, U
    assert B is not None
    V = B(x, x.new_empty(products, n * tiles, c), n, c)
    M = _multiply(V, U)
    return A(M, x.new_empty(n, A.rows, out), n, out), V, U


def conv_backward(
    gy: torch.Tensor,
    V: torch.Tensor,
    U: torch.Tensor,
    rule: Rule,
    gw: torch.Tensor,
    add: torch.Tensor | None = None,
) -> torch.Tensor:
    """Write the gradient by the filters into `gw`, and return that by the maps, plus `add`."""
    (n, _, out), c = gy.shape, gw.shape[1]
    _, Bt, _, At, _, Gt, tiles, products, pad = _transforms(rule, gy.dtype, n, c, out)
    gM = gy.view(1, n * tiles, out) if At is None else At(gy, gy.new_empty(products, n * tiles, out), n, out)
    gV = _multiply(gM, U.transpose(1, 2))
    room = gw if Gt is None else _filters(gw, products, c, out, pad)
    gU = _multiply(V.transpose(1, 2), gM, room.view(U.shape))
    if Gt is not None:
        Gt(gU, gw, 1, c * out)
    if Bt is None:
        gx = gV.view(n, -1, c)
        return gx if add is None else gx.add_(add)
    return Bt(gV, gy.new_empty(n, Bt.rows, c), n, c, add)


def norm_forward(
    y: torch.Tensor, gamma: torch.Tensor, beta: torch.Tensor, rule: tuple[int, float], relu: bool, add: Any = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return relu(group norm of y, plus `add`), and the mean and the reciprocal deviation of every group."""
    (n, pixels, c), (groups, eps) = y.shape, rule
    out, mean, rstd = torch.empty_like(y), y.new_empty(n, groups), y.new_empty(n, groups)
    sums = y.new_empty(2 * c)
    _function("norm_forward", y.dtype)(
        *(y.data_ptr(), gamma.data_ptr(), beta.data_ptr(), _at(add), out.data_ptr(), mean.data_ptr(), rstd.data_ptr()),
        *(sums.data_ptr(), n, pixels, c, groups, eps, relu),
    )
    return out, mean, rstd


def norm_backward(
    g: torch.Tensor,
    out: torch.Tensor | None,
    y: torch.Tensor,
    gamma: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    ggamma: torch.Tensor,
    gbeta: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Write the gradients by gamma and beta; return the gradient by y, and that behind the ReLU whose output is `out`.

    Without `out` there was no ReLU.
    """
    (n, pixels, c), groups = y.shape, mean.shape[1]
    gy, masked, sums = torch.empty_like(y), g if out is None else torch.empty_like(g), y.new_empty(2 * c)
    _function("norm_backward", y.dtype)(
        *(g.data_ptr(), _at(out), y.data_ptr(), gamma.data_ptr(), mean.data_ptr(), rstd.data_ptr(), gy.data_ptr()),
        *(masked.data_ptr(), ggamma.data_ptr(), gbeta.data_ptr(), sums.data_ptr()),
        *(n, pixels, c, groups),
    )
    return gy, masked


def pool_forward(x: torch.Tensor, side: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return relu(maximum of 3x3 windows, two pixels apart), and the pixel that each maximum comes from."""
    n, _, c = x.shape
    half = (side - 1) // 2 + 1
    out, place = x.new_empty(n, half * half, c), x.new_empty(n, half * half, c, dtype=torch.int32)
    _function("pool_forward", x.dtype)(x.data_ptr(), out.data_ptr(), place.data_ptr(), n, side, c)
    return out, place


def pool_backward(g: torch.Tensor, out: torch.Tensor, place: torch.Tensor, side: int) -> torch.Tensor:
    """Return the gradient by x."""
    n, _, c = g.shape
    gx = g.new_empty(n, side * side, c)
    _function("pool_backward", g.dtype)(g.data_ptr(), out.data_ptr(), place.data_ptr(), gx.data_ptr(), n, side, c)
    return gx
