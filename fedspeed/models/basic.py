"""Small models: softmax regression, a plain vector, fully connected and convolutional networks, LeNet."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import nn

from ..errors import UserError, unknown
from .fast_conv import Layout, RowConv

Shape = tuple[int, ...]


def linear(shape: Shape, outputs: int) -> nn.Module:
    """Build one affine layer: softmax regression under cross-entropy."""
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), outputs))


class Vector(nn.Module):
    """One weight per column and no bias: inputs are matrices A, outputs A x."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.randn(d))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return A x for every input A."""
        return inputs @ self.x


def vector(shape: Shape, outputs: int) -> nn.Module:
    """Build the parameter vector itself: an input is a matrix A, the outputs are A x (data `quadratic`, `logistic`)."""
    if len(shape) != 2 or shape[0] != outputs:
        raise UserError(
            f"model vector: expected inputs of shape ({outputs}, d), one row per output, found {shape}; use linear, or "
            f"the data quadratic or logistic"
        )
    return Vector(shape[1])


INITS = ("torch", "he")


def mlp(shape: Shape, outputs: int, hidden: Sequence[int] = (64,), init: str = "torch") -> nn.Module:
    """Build fully connected layers with ReLU between them.

    `init` is `torch`, PyTorch's uniform initialisation, or `he`, He's normal (fan in) with zero biases.
    """
    if init not in INITS:
        raise unknown("init of model mlp", init, INITS)
    net = nn.Sequential(nn.Flatten(), *_dense([math.prod(shape), *hidden, outputs]))
    for layer in net if init == "he" else ():
        if isinstance(layer, nn.Linear):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
            nn.init.zeros_(layer.bias)
    return net


def cnn(shape: Shape, outputs: int, widths: Sequence[int] = (16, 32, 64), padding: int = 2) -> nn.Module:
    """Build 5x5 convolutions, each with ReLU and 2x2 max-pooling, then one hidden layer (the last width).

    `widths=(16, 32, 64), padding=2` is the CPU-scale net on CIFAR-10 (145,834 parameters);
    `widths=(32, 64, 128), padding=0` is the classic net of the benchmarks.
    """
    channels, height, width = _image(shape, "cnn")
    if not widths:
        raise UserError(
            "model cnn: widths must hold at least the hidden layer's width, got []; for example [16, 32, 64]"
        )
    for _ in widths[:-1]:
        height, width = ((side + 2 * padding - 4) // 2 for side in (height, width))
        if height < 1 or width < 1:
            raise UserError(
                f"model cnn: pictures of {shape[1]}x{shape[2]} are too small for {len(widths) - 1} convolutions "
                f"with padding {padding}; use fewer widths or padding=2"
            )
    kept = [channels, *widths[:-1]]
    layers = _convolutions(kept, padding)
    return nn.Sequential(*layers, nn.Flatten(), *_dense([kept[-1] * height * width, widths[-1], outputs]))


def lenet(shape: Shape, outputs: int) -> nn.Module:
    """Build LeNet of the federated literature: 5x5 convolutions of 64 channels twice, then 384 and 192 units."""
    channels, height, width = _image(shape, "lenet")
    size = [((side - 4) // 2 - 4) // 2 for side in (height, width)]
    if min(size) < 1:
        raise UserError(f"model lenet: expected pictures of at least 16x16, found {height}x{width}; use mlp or cnn")
    layers = _convolutions([channels, 64, 64], padding=0)
    return nn.Sequential(*layers, nn.Flatten(), *_dense([64 * size[0] * size[1], 384, 192, outputs]))


def _convolutions(channels: Sequence[int], padding: int) -> list[nn.Module]:
    """Return 5x5 convolutions from channels to channels, each with 2x2 max-pooling and ReLU."""
    layers: list[nn.Module] = [Layout()]
    for a, b in pairwise(channels):
        layers += [RowConv(a, b, 5, padding), nn.MaxPool2d(2), nn.ReLU()]
    return layers


def _dense(widths: Sequence[int]) -> list[nn.Module]:
    """Return affine layers from width to width, with ReLU between them."""
    layers: list[nn.Module] = []
    for a, b in pairwise(widths):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return layers[:-1]


def _image(shape: Shape, name: str) -> Shape:
    if len(shape) != 3:
        raise UserError(
            f"model {name}: expected pictures of shape (channels, height, width), found inputs of shape {shape}; "
            f"use linear or mlp"
        )
    return shape
