"""A residual block and the stem of ResNet as one function each, forward and backward written out.

    block    y1 = conv1 x;   z = relu(norm1 y1);   y2 = conv2 z
             s  = x, or norm_s(conv_s x) where the shape changes
             out = relu(norm2 y2 + s)
    back     gs = g where out > 0, else 0                    (g: the gradient by out)
             gz  = conv2' (norm2' gs)
             gx  = conv1' (norm1' (gz where z > 0, else 0)) + (gs, or conv_s' (norm_s' gs))
    stem     out = relu(pool(norm y));   back: norm' (pool' (g where out > 0, else 0))

' is the transpose of a layer's slope; the gradients by filters, gammas and betas fall out on the way. Autograd sees one
node for each block in place of about forty, and maps stay (n, pixels, channels). `compiled_kernels` computes the lines.
The result is that of the plain layers in `resnet.Block` to rounding. A gradient that is to be differentiated again is
taken through `plain_block`, by itself.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from . import compiled_kernels as kernels
from .fast_conv import Rule, convolve

EPS = 1e-5


class Shape(NamedTuple):
    """Shape of a block: the groups of its norms, and the rules of conv1, conv2 and perhaps the shortcut."""

    groups: int
    rules: tuple[Rule, ...]

    @property
    def norm(self) -> tuple[int, float]:
        """The groups of a norm and its epsilon."""
        return self.groups, EPS


class _Destinations(threading.local):
    """Memory into which gradients are written at once, by the address of the parameter's numbers."""

    def __init__(self) -> None:
        self.free: dict[int, torch.Tensor] = {}


_destinations = _Destinations()


@contextmanager
def gradients_into(parameters: list[nn.Parameter], views: list[torch.Tensor]) -> Iterator[None]:
    """Let backward passes inside write the gradients of these parameters into these views, once each.

    The caller still copies every gradient that autograd returns in other memory.
    """
    pairs = zip(parameters, views, strict=True)
    _destinations.free = {p.data_ptr(): view for p, view in pairs if p.dtype == view.dtype}
    try:
        yield
    finally:
        _destinations.free = {}


def _room(w: torch.Tensor) -> torch.Tensor:
    """Return memory for the gradient by w: its destination if it is free, else fresh."""
    found = _destinations.free.pop(w.data_ptr(), None)
    return torch.empty_like(w) if found is None or found.shape != w.shape or not found.is_contiguous() else found


def _rows(x: torch.Tensor) -> torch.Tensor:
    """Return maps (n, channels, side, side) as (n, pixels, channels), without a copy if channels are last."""
    return x.permute(0, 2, 3, 1).contiguous().view(len(x), -1, x.shape[1])


def _maps(x: torch.Tensor) -> torch.Tensor:
    """Return (n, pixels, channels) as maps with channels last."""
    side = math.isqrt(x.shape[1])
    return x.view(len(x), side, side, -1).permute(0, 3, 1, 2)


class BlockFunction(torch.autograd.Function):
    """The block of the module's docstring; its parameters are filters, gamma and beta of every convolution in turn."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, shape: Shape, *parameters: torch.Tensor) -> torch.Tensor:
        rules, norm = shape.rules, shape.norm
        w1, gamma1, beta1, w2, gamma2, beta2, *shortcut = parameters
        rows = _rows(x)
        y1, V1, U1 = kernels.conv_forward(rows, w1, rules[0])
        z, *stats1 = kernels.norm_forward(y1, gamma1, beta1, norm, True)
        y2, V2, U2 = kernels.conv_forward(z, w2, rules[1])
        s, saved = rows, []
        if shortcut:
            ws, gamma_s, beta_s = shortcut
            ys, Vs, Us = kernels.conv_forward(rows, ws, rules[2])
            s, *stats = kernels.norm_forward(ys, gamma_s, beta_s, norm, False)
            saved = [ys, Vs, Us, *stats]
        out, *stats2 = kernels.norm_forward(y2, gamma2, beta2, norm, True, s)
        ctx.shape, ctx.count = shape, len(parameters)
        ctx.save_for_backward(x, *parameters, out, y1, V1, U1, *stats1, z, y2, V2, U2, *stats2, *saved)
        return _maps(out)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> tuple[Any, ...]:
        x, *saved = ctx.saved_tensors
        parameters, saved = saved[: ctx.count], saved[ctx.count :]
        if torch.is_grad_enabled():
            return _again(lambda x, *p: plain_block(x, ctx.shape, *p), x, parameters, g)
        rules = ctx.shape.rules
        gamma1, gamma2 = parameters[1], parameters[4]
        out, y1, V1, U1, mean1, rstd1, z, y2, V2, U2, mean2, rstd2, *shortcut = saved
        grads = [_room(p) for p in parameters]
        gy2, gs = kernels.norm_backward(_rows(g), out, y2, gamma2, mean2, rstd2, grads[4], grads[5])
        gz = kernels.conv_backward(gy2, V2, U2, rules[1], grads[3])
        gy1, _ = kernels.norm_backward(gz, z, y1, gamma1, mean1, rstd1, grads[1], grads[2])
        if shortcut:
            ys, Vs, Us, mean, rstd = shortcut
            gys, _ = kernels.norm_backward(gs, None, ys, parameters[7], mean, rstd, grads[7], grads[8])
            gs = kernels.conv_backward(gys, Vs, Us, rules[2], grads[6])
        gx = kernels.conv_backward(gy1, V1, U1, rules[0], grads[0], gs)
        return _maps(gx), None, *grads


class StemFunction(torch.autograd.Function):
    """Group norm, max-pooling and ReLU of the stem's maps."""

    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, shape: Shape, gamma: torch.Tensor, beta: torch.Tensor) -> torch.Tensor:
        rows, side = _rows(y), y.shape[-1]
        normed, mean, rstd = kernels.norm_forward(rows, gamma, beta, shape.norm, False)
        out, place = kernels.pool_forward(normed, side)
        ctx.shape = shape
        ctx.save_for_backward(y, gamma, beta, mean, rstd, out, place)
        return _maps(out)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> tuple[Any, ...]:
        y, gamma, beta, mean, rstd, out, place = ctx.saved_tensors
        if torch.is_grad_enabled():
            return _again(lambda y, *p: plain_stem(y, ctx.shape, *p), y, [gamma, beta], g)
        grads = [_room(gamma), _room(beta)]
        gz = kernels.pool_backward(_rows(g), out, place, y.shape[-1])
        gy, _ = kernels.norm_backward(gz, None, _rows(y), gamma, mean, rstd, *grads)
        return _maps(gy), None, *grads


def plain_block(x: torch.Tensor, shape: Shape, *parameters: torch.Tensor) -> torch.Tensor:
    """Return the block layer by layer, which can be differentiated any number of times."""

    def normed_convolution(x: torch.Tensor, rule: Rule, w: Any, gamma: Any, beta: Any) -> torch.Tensor:
        matrices = rule.matrices(x.dtype)
        assert matrices is not None
        return nn.functional.group_norm(convolve(x, w, matrices), shape.groups, gamma, beta, EPS)

    rules = shape.rules
    z = torch.relu(normed_convolution(x, rules[0], *parameters[:3]))
    s = normed_convolution(x, rules[2], *parameters[6:]) if len(parameters) > 6 else x
    return torch.relu(normed_convolution(z, rules[1], *parameters[3:6]) + s)


def plain_stem(y: torch.Tensor, shape: Shape, gamma: torch.Tensor, beta: torch.Tensor) -> torch.Tensor:
    """Return the stem layer by layer, which can be differentiated any number of times."""
    normed = nn.functional.group_norm(y, shape.groups, gamma, beta, EPS)
    return torch.relu(nn.functional.max_pool2d(normed, 3, 2, 1))


def _again(plain: Any, x: torch.Tensor, parameters: list[torch.Tensor], g: torch.Tensor) -> tuple[Any, ...]:
    """Return the gradients of a plain function with a graph behind them."""
    inputs = [a.view_as(a) for a in (x, *parameters)]  # x may depend on a parameter: only what is done here counts
    wanted = [a for a in inputs if a.requires_grad]
    found = iter(torch.autograd.grad(plain(*inputs), wanted, g, create_graph=True))
    gx, *rest = [next(found) if a.requires_grad else None for a in inputs]
    return gx, None, *rest
