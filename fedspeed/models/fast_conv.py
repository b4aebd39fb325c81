"""Exact fast layers: the same function to rounding, the same parameters, less work.

A convolution of a small map with a 3x3 filter w is bilinear in both, so it can be written as

    y = A [(G w) * (B x)]

with constant matrices: each row of G w and B x is one matrix product over channels, A puts the products together. On
maps of 1x1, 2x2, 4x4 and 8x8 this needs 1, 9, 36 and 144 products where the plain sum over taps takes 9, 36, 144 and
576: on the smallest most taps only meet the padding, on the others Winograd's algorithms save the rest. Dead taps keep
their zero gradient, so weight decay and the method's terms reach them as before; `trim.py` leaves them out. Of larger
filters over many channels (`RowConv`) only the gradient is summed in another order. Max-pooling before ReLU is the same
function as after it, on a map a quarter of the size.

Reference: Winograd, Arithmetic Complexity of Computations, 1980; Lavin & Gray, Fast Algorithms for Convolutional
Neural Networks, CVPR 2016.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import nn

from ..utils import devices

POINTS = (0.0, -1.0, 1.0, 0.5, -2.0)
"""Points, besides infinity, at which polynomials are evaluated for four outputs at a time. They fix the bits;
0, 1, -1, 2, -2 round worse."""


class Layout(nn.Module):
    """Layer that puts channels last on a CPU: max-pooling and group norm are then up to ten times cheaper."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the same values in another memory layout."""
        if x.device.type != "cpu" or not devices.can_ask() or devices.transformed(x):  # vmap knows one layout
            return x
        return x.contiguous(memory_format=torch.channels_last)


class Bilinear(NamedTuple):
    """y = A [(G w) * (B x)] on flattened maps, tile by tile; a matrix that would be the identity is None.

    Without A the products of a tile, which has one output, are summed by the matrix product itself.
    """

    A: torch.Tensor | None  # (outputs of a tile, products)
    G: torch.Tensor | None  # (products, taps)
    B: torch.Tensor | None  # (tiles products, inputs)
    tiles: int  # of a map
    products: int  # of a tile


class Rule(NamedTuple):
    """The shape of a convolution with padding, which decides its matrices: square maps and filters, one stride."""

    side: int  # of the maps
    stride: int
    size: int = 3  # of the filters: 3 or 1
    live: bool = False  # whether filters come without their dead taps

    def matrices(self, dtype: torch.dtype) -> Bilinear | None:
        """Return the matrices; None where the stock layer is best."""
        if self.size == 1:
            return pointwise(self.side, self.stride, dtype)
        return bilinear(self.side, self.stride, dtype, self.live)


class Conv(nn.Conv2d):
    """A 3x3 convolution with padding 1, or a 1x1 without, that is fast for small maps on a CPU.

    It expects maps with channels last, and returns them so.

    Example:
        >>> Conv(8, 16)(torch.zeros(5, 8, 2, 2)).shape
        torch.Size([5, 16, 2, 2])
    """

    def __init__(self, channels: int, out: int, size: int = 3, stride: int = 1) -> None:
        super().__init__(channels, out, size, stride, size // 2, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the convolution; on a GPU, for other maps and in low precision the stock one."""
        if special(x, self.weight) or x.ndim != 4 or not x.numel():
            return super().forward(x)
        if self.kernel_size == (1, 1):
            step = self.stride[0]
            y = nn.functional.linear(x[:, :, ::step, ::step].permute(0, 2, 3, 1), self.weight.flatten(1))
            return y.permute(0, 3, 1, 2)
        rule = bilinear(x.shape[-1], self.stride[0], x.dtype) if x.shape[-2] == x.shape[-1] else None
        return super().forward(x) if rule is None else convolve(x, self.weight.permute(2, 3, 1, 0).flatten(0, 1), rule)


def convolve(x: torch.Tensor, w: torch.Tensor, rule: Bilinear) -> torch.Tensor:
    """Return the convolution of square maps (n, c, side, side) with filters tap by tap, (taps, c, out)."""
    pixels = x.permute(0, 2, 3, 1).flatten(1, 2)  # no copy of maps with channels last
    if devices.transforming():
        y, _, _ = _convolve(pixels, w, rule)
    else:
        y = _Convolve.apply(pixels, w, rule)  # type: ignore[no-untyped-call]
    side = math.isqrt(y.shape[1])
    if side == 1:  # of either layout: vmap has no rule for channels last
        return y.view(len(x), -1, 1, 1)
    return y.view(len(x), side, side, -1).permute(0, 3, 1, 2)


def special(x: torch.Tensor, w: torch.Tensor) -> bool:
    """Return whether a layer is left to PyTorch: on a GPU, in low or mixed precision, for a compiler."""
    if not devices.can_ask():
        return True
    same = x.dtype == w.dtype and x.dtype in (torch.float32, torch.float64)
    return x.device.type != "cpu" or not same or torch.is_autocast_enabled("cpu") or torch.compiler.is_compiling()


@cache
@devices.constants()
def bilinear(side: int, stride: int, dtype: torch.dtype, live: bool = False) -> Bilinear | None:
    """Return the matrices for 3x3 filters, `live` ones without dead taps; None where the stock layer is best."""
    line = _line(side, stride)
    if line is None:
        return None
    A = None if line[0] is None else torch.as_tensor(line[0], dtype=torch.float64)
    G, B = (torch.as_tensor(rows, dtype=torch.float64) for rows in line[1:])
    if live:
        G = G[:, G.any(0)]
    products, tiles = len(G), len(B) // len(G)
    B = torch.kron(B, B).reshape(tiles, products, tiles, products, -1).transpose(1, 2).flatten(0, 3)

    def stored(matrix: torch.Tensor) -> torch.Tensor | None:
        identity = matrix.shape[0] == matrix.shape[1] and torch.equal(matrix, torch.eye(len(matrix)).to(matrix))
        return None if identity else matrix.to(dtype).contiguous()

    together = None if A is None else torch.kron(A, A).to(dtype)
    return Bilinear(together, stored(torch.kron(G, G)), stored(B), tiles**2, products**2)


@cache
@devices.constants()
def pointwise(side: int, stride: int, dtype: torch.dtype) -> Bilinear:
    """Return the matrices for 1x1 filters: B picks every stride-th pixel of a line."""
    picked = torch.eye(side, dtype=dtype)[::stride]
    return Bilinear(None, None, None if stride == 1 else torch.kron(picked, picked), len(picked) ** 2, 1)


def whole_maps(rule: Bilinear) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return A for a map of all its tiles, and B."""
    if rule.A is None:
        return None, rule.B
    each = torch.eye(rule.tiles * rule.products).to(rule.A).view(1, -1, rule.tiles, rule.products)
    tiles = each.permute(0, 2, 3, 1).reshape(rule.tiles, rule.products, -1)
    return _join(rule.A @ tiles, rule.tiles)[0], rule.B


def _line(side: int, stride: int) -> tuple[Any, Any, Any] | None:
    """Return A, G, B of one dimension; the rows of B tile by tile."""
    match side, stride:
        case 1, 1:
            return None, [[0, 1, 0]], [[1]]
        case 2, 1:  # w1 (x0 + x1), (w2 - w1) x1, (w0 - w1) x0
            return [[1, 1, 0], [1, 0, 1]], [[0, 1, 0], [0, -1, 1], [1, -1, 0]], [[1, 1], [0, 1], [1, 0]]
        case 4, 1:
            A, G, B = _toom_cook(4)
            return A, G, B[:, 1:5]
        case 8, 1:  # two tiles of four outputs: a map with its padding is 0..9, a tile sees 0..5 or 4..9
            A, G, B = _toom_cook(4)
            seen = torch.zeros(2, 6, 10, dtype=torch.float64)
            seen[0, :, 0:6], seen[1, :, 4:10] = B, B
            return A, G, seen.view(12, 10)[:, 1:9]
        case 2, 2:
            return None, [[0, 1, 0], [0, 0, 1]], [[1, 0], [0, 1]]
        case ((4 | 8), 2):  # every output with the three inputs that it sees
            padded = torch.eye(side + 2)[:, 1:-1]
            return None, torch.eye(3), torch.cat([padded[at : at + 3] for at in range(0, side, 2)])
    return None


def _toom_cook(outputs: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return A, G, B for three taps: products of polynomials by their values at POINTS, transposed."""

    def values(length: int) -> torch.Tensor:
        finite = [[point**power for power in range(length)] for point in POINTS]
        return torch.tensor([*finite, [0.0] * (length - 1) + [1.0]], dtype=torch.float64)

    B = torch.linalg.inv(values(outputs + 2)).T.contiguous()
    size = B.abs().amax(1, keepdim=True)  # rows of one size round best
    return values(outputs).T.contiguous(), values(3) * size, B / size


def _cut(y: torch.Tensor, tiles: int) -> torch.Tensor:
    """Return maps (n, pixels, c) as tiles (n tiles, pixels of one, c)."""
    if tiles == 1:
        return y
    n, pixels, c = y.shape
    across, side = math.isqrt(tiles), math.isqrt(pixels // tiles)
    return y.reshape(n, across, side, across, side, c).transpose(2, 3).reshape(n * tiles, side * side, c)


def _join(y: torch.Tensor, tiles: int) -> torch.Tensor:
    """Undo `_cut`."""
    if tiles == 1:
        return y
    n, (pixels, c) = len(y) // tiles, y.shape[1:]
    across, side = math.isqrt(tiles), math.isqrt(pixels)
    return y.reshape(n, across, across, side, side, c).transpose(2, 3).reshape(n, tiles * pixels, c)


def _seen(x: torch.Tensor, rule: Bilinear) -> torch.Tensor:
    """Return B @ x of every map, from (n, pixels, c) to (products, n tiles, c); without A to (n tiles, products c)."""
    V = x if rule.B is None else rule.B @ x
    if rule.A is None:
        return V.reshape(len(x) * rule.tiles, -1)
    return V.view(len(x) * rule.tiles, rule.products, -1).transpose(0, 1)


def _met(w: torch.Tensor, rule: Bilinear) -> torch.Tensor:
    """Return G @ w of every filter, from (taps, c, out) to (products, c, out); without A to (products c, out)."""
    U = w if rule.G is None else (rule.G @ w.flatten(1)).view(-1, *w.shape[1:])
    return U.flatten(0, 1) if rule.A is None else U


def _convolve(x: torch.Tensor, w: torch.Tensor, rule: Bilinear) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return outputs as (n, pixels, out), and both transforms."""
    V, U = _seen(x, rule), _met(w, rule)
    M = V @ U
    if rule.A is None:
        return M.view(len(x), rule.tiles, -1), V, U
    return _join(rule.A @ M.transpose(0, 1), rule.tiles), V, U


class _Convolve(torch.autograd.Function):
    """`_convolve` with a backward pass that copies nothing but tiles."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor, rule: Bilinear) -> torch.Tensor:
        y, V, U = _convolve(x, w, rule)
        ctx.rule = rule
        ctx.save_for_backward(x, w, V, U)
        return y

    @staticmethod
    def backward(ctx: Any, gy: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        x, w, V, U = ctx.saved_tensors
        A, G, B, tiles, products = rule = ctx.rule
        if torch.is_grad_enabled():  # to be differentiated again: as functions of x and w
            V, U = _seen(x, rule), _met(w, rule)
        gM = gy.flatten(0, 1) if A is None else (A.t() @ _cut(gy, tiles)).transpose(0, 1)
        gx = gw = None
        if ctx.needs_input_grad[0]:
            gV = gM @ U.transpose(-1, -2)
            if A is not None:
                gV = gV.view(products, len(x), tiles, -1).permute(1, 2, 0, 3)
            gV = gV.reshape(len(x), tiles * products, -1)
            gx = gV if B is None else B.t() @ gV
        if ctx.needs_input_grad[1]:
            gU = (V.transpose(-1, -2) @ gM).view(products, -1)
            gw = (gU if G is None else G.t() @ gU).view(w.shape)
        return gx, gw, None


class RowConv(nn.Conv2d):
    """A convolution of stride 1 whose filters' gradient is one matrix product for each row of taps.

        dw[a] = sum over rows i of  unrolled(x)[i + a]^T dy[i]

    Pictures are unrolled along their columns only, a fifth of the memory of im2col for 5x5 filters. On a CPU and with
    32 channels or more that is quicker than the stock layer; elsewhere it is the stock layer.

    Example:
        >>> RowConv(32, 64, 5)(torch.zeros(2, 32, 14, 14)).shape
        torch.Size([2, 64, 10, 10])
    """

    def __init__(self, channels: int, out: int, size: int, padding: int = 0) -> None:
        super().__init__(channels, out, size, padding=padding)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the convolution."""
        many = self.in_channels >= 32 and x.ndim == 4 and x.numel() > 0
        if not many or special(x, self.weight) or devices.transforming():
            return super().forward(x)
        y: torch.Tensor = _RowConv.apply(x, self.weight, self.bias, self.padding[0])  # type: ignore[no-untyped-call]
        return y


class _RowConv(torch.autograd.Function):
    """The stock convolution, with the filters' gradient of `RowConv`."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, padding: int) -> torch.Tensor:
        ctx.padding = padding
        ctx.save_for_backward(x, w)
        return nn.functional.conv2d(x, w, b, padding=padding)

    @staticmethod
    def backward(ctx: Any, gy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, w = ctx.saved_tensors
        padding, (need_x, need_w, need_b, _) = ctx.padding, ctx.needs_input_grad
        again = torch.is_grad_enabled()  # to be differentiated again: the stock gradient is
        gx, gw, _ = torch.ops.aten.convolution_backward(
            gy, x, w, None, (1, 1), (padding, padding), (1, 1), False, (0, 0), 1, (need_x, need_w and again, False)
        )
        if need_w and not again:
            gw = _row_gradient(nn.functional.pad(x, (padding,) * 4) if padding else x, gy, w.shape[-1])
        return gx, gw, gy.sum((0, 2, 3)) if need_b else None, None


def _row_gradient(x: torch.Tensor, gy: torch.Tensor, size: int) -> torch.Tensor:
    """Return (out, c, size, size) from padded pictures (n, c, h, w) and outputs' gradient (n, out, rows, columns)."""
    x, g = x.permute(0, 2, 3, 1).contiguous(), gy.permute(2, 0, 3, 1)
    (n, h, w, c), (rows, _, columns, out) = x.shape, g.shape
    unrolled = x.as_strided((h, n, columns, size * c), (w * c, h * w * c, c, 1)).contiguous()
    step = n * columns * size * c  # one row of pixels
    below = unrolled.as_strided((size, size * c, rows * n * columns), (step, 1, size * c))  # from the a-th row on
    return torch.bmm(below, g.reshape(1, -1, out).expand(size, -1, -1)).view(size, size, c, out).permute(3, 2, 0, 1)
