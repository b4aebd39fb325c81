"""ResNet-18 with group norm, the network of the paper; trimmed on request."""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from ..errors import UserError, unknown
from ..utils import devices
from . import basic, compiled_kernels
from .fast_conv import Conv, Layout, Rule, special
from .residual import BlockFunction, Shape, StemFunction
from .trim import TrimmedConv, trimmed

LAYERS = ("plain", "compiled")
"""How residual blocks are computed: layer by layer, or as one function each with compiled kernels."""


class Block(nn.Module):
    """Two 3x3 convolutions with group norm and a shortcut; as one function (`residual`) if `layers` says so."""

    layers = "plain"

    def __init__(self, channels: int, out: int, stride: int, groups: int) -> None:
        super().__init__()
        self.conv1 = Conv(channels, out, stride=stride)
        self.norm1 = nn.GroupNorm(groups, out)
        self.conv2 = Conv(out, out)
        self.norm2 = nn.GroupNorm(groups, out)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels != out:
            self.shortcut = nn.Sequential(Conv(channels, out, 1, stride), nn.GroupNorm(groups, out))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return relu(norm(conv(relu(norm(conv x)))) + shortcut x)."""
        shape = self._shape(x) if _compiled(self) else None
        if shape is not None:
            out: torch.Tensor = BlockFunction.apply(x, shape, *self._numbers())  # type: ignore[no-untyped-call]
            return out
        y = torch.relu_(self.norm1(self.conv1(x)))
        return torch.relu_(self.norm2(self.conv2(y)).add_(self.shortcut(x)))

    def _parts(self) -> list[Any]:
        """Return every convolution and its norm in turn, those of the shortcut last."""
        shortcut = [] if type(self.shortcut) is nn.Identity else [*self.shortcut.children()]
        return [self.conv1, self.norm1, self.conv2, self.norm2, *shortcut]

    def _numbers(self) -> list[torch.Tensor]:
        """Return filters tap by tap, gamma and beta of every convolution in turn."""
        found: list[torch.Tensor] = []
        for part in self._parts():
            if isinstance(part, nn.GroupNorm):
                found += [part.weight, part.bias]
            elif isinstance(part, TrimmedConv):
                found.append(part.weight)
            else:
                found.append(part.weight.permute(2, 3, 1, 0).flatten(0, 1).contiguous())
        return found

    def _shape(self, x: torch.Tensor) -> Shape | None:
        """Return the block's shape on these maps; None if the plain layers are to compute it.

        They do wherever a part is not as `__init__` built it: the compiled kernels look at sizes and numbers alone.
        """
        parts = self._parts()
        if not _square(x) or not _untouched([*parts, self.shortcut]):
            return None
        if type(self.shortcut) not in (nn.Identity, nn.Sequential) or len(parts) not in (4, 6):
            return None
        if not all(type(conv) in (Conv, TrimmedConv) for conv in parts[::2]):
            return None
        convolutions, norms, side, stride = parts[::2], parts[1::2], x.shape[-1], self.conv1.stride[0]
        trimmed = tuple(type(conv) is TrimmedConv for conv in convolutions)
        found = block_shape(getattr(norms[0], "num_groups", 0), side, stride, trimmed)
        if found is None or not all(_group_norm(norm, found, x) for norm in norms):
            return None
        out = norms[1].num_channels
        if (norms[2].num_channels if len(norms) == 3 else x.shape[1]) != out or (len(norms) == 2 and stride != 1):
            return None  # the shortcut's maps do not have the shape of the sum; the plain layers say so
        wide = (x.shape[1], norms[0].num_channels, x.shape[1])
        return found if all(map(_convolution, convolutions, found.rules, wide, norms)) else None


def _compiled(module: Block | ResNet) -> bool:
    """Return whether a module is to use the compiled kernels and can: a saved model may come from another machine."""
    return module.layers != "plain" and compiled_kernels.library() is not None


def _square(x: torch.Tensor) -> bool:
    """Return whether maps are square, not empty, and known not to be inside a transform or watched."""
    maps = type(x) is torch.Tensor and x.ndim == 4 and x.shape[-1] == x.shape[-2] and x.numel() > 0
    return maps and devices.can_ask() and not devices.transforming() and not devices.watched()


def _untouched(parts: list[nn.Module]) -> bool:
    """Return whether no part has a hook, or a `forward` of its own, which only a call of the layer runs."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return not any("forward" in vars(part) or any(getattr(part, hook) for hook in hooks) for part in parts)


def _group_norm(norm: Any, shape: Shape, x: torch.Tensor) -> bool:
    """Return whether a layer is a group norm as `shape` says, with numbers that the kernels take beside x."""
    plain = type(norm) is nn.GroupNorm and norm.affine and (norm.num_groups, norm.eps) == shape.norm
    return plain and all(
        not special(x, a) and a.is_contiguous() and a.shape == (norm.num_channels,) for a in (norm.weight, norm.bias)
    )


def _convolution(conv: Any, rule: Rule, channels: int, norm: Any) -> bool:
    """Return whether a convolution's filters are those of a rule, from `channels` to the channels of its norm."""
    out = norm.num_channels
    if conv.weight.dtype != norm.weight.dtype or conv.weight.device != norm.weight.device:
        return False
    if isinstance(conv, TrimmedConv):
        matrices = rule.matrices(torch.float32)
        assert matrices is not None
        taps = matrices.products if matrices.G is None else matrices.G.shape[1]
        same = conv.square and conv.size == (rule.side, rule.side) and conv.weight.is_contiguous()
        return same and conv.weight.shape == (taps, channels, out) and conv.stride == (rule.stride,) * 2
    two = (conv.kernel_size, conv.stride, conv.padding, conv.dilation)
    expected = ((rule.size,) * 2, (rule.stride,) * 2, (rule.size // 2,) * 2, (1, 1))
    return two == expected and conv.weight.shape == (out, channels, rule.size, rule.size) and conv.bias is None


@cache
def block_shape(groups: int, side: int, stride: int, trimmed: tuple[bool, ...]) -> Shape | None:
    """Return the shape of a block on maps of this side; None if one of its convolutions has no rule there."""
    kinds = zip((side, (side - 1) // stride + 1, side), (stride, 1, stride), (3, 3, 1), trimmed, strict=False)
    rules = tuple(Rule(*kind) for kind in kinds)
    fits = all(rule.matrices(torch.float32) is not None for rule in rules)
    return Shape(groups, rules) if fits else None


class ResNet(nn.Sequential):
    """The network's layers in a row; unless `layers` is plain, norm, pooling and ReLU of the stem are one function."""

    layers = "plain"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the outputs of the last layer."""
        layers = list(self)
        fused = _compiled(self) and _stem(layers)
        while layers:
            norm: Any = layers[0]
            if fused and len(self) - len(layers) == 2 and _fits(norm, x):
                x = StemFunction.apply(x, Shape(norm.num_groups, ()), norm.weight, norm.bias)  # type: ignore[no-untyped-call]
                layers = layers[3:]
            else:
                x = layers.pop(0)(x)
        return x


def _fits(norm: Any, x: torch.Tensor) -> bool:
    """Return whether the stem's norm, pooling and ReLU of these maps can be one function."""
    return _square(x) and _group_norm(norm, Shape(norm.num_groups, ()), x) and norm.num_channels == x.shape[1]


def _stem(layers: list[nn.Module]) -> bool:
    """Return whether the layers 2 to 4 are group norm, 3x3 max-pooling with stride 2, and ReLU, without hooks."""
    if [type(layer) for layer in layers[2:5]] != [nn.GroupNorm, nn.MaxPool2d, nn.ReLU] or not _untouched(layers[2:5]):
        return False
    pool: Any = layers[3]
    return (pool.kernel_size, pool.stride, pool.padding, pool.dilation, pool.ceil_mode) == (3, 2, 1, 1, False)


def choose_layers(model: nn.Module, layers: str) -> None:
    """Let a model compute its residual blocks in one of the ways of `LAYERS`."""
    for module in model.modules():
        if isinstance(module, Block | ResNet):
            module.layers = layers


def resolve_layers(model: nn.Module, layers: str = "auto") -> str:
    """Return the way in which a run computes residual blocks, one of `LAYERS`; raise if it is not possible here.

    For a model without such blocks nothing is decided: it stays `auto`. The kernels compute on the CPU alone.
    """
    block = next((module for module in model.modules() if isinstance(module, Block)), None)
    if block is None:
        return "auto"
    built = compiled_kernels.library() is not None
    if layers == "auto":
        return "compiled" if built and all(p.is_cpu for p in block.parameters()) else "plain"
    if layers == "compiled" and not built:
        raise UserError(
            "layers: expected an installation with compiled kernels, found none: install GCC and the package "
            "again (pip install .), or use layers plain, which gives the same results to rounding"
        )
    return layers


STARTS = ("usual", "zero-residual")


def resnet18_gn(
    shape: basic.Shape, outputs: int, groups: int = 2, init: str = "usual", trim: bool = False, keep_norm: bool = False
) -> nn.Module:
    """Build ResNet-18 as in the paper: 7x7 stride-2 stem, max-pool, every batch norm a group norm of 2 groups.

    11,181,642 parameters for three channels and 10 classes. Convolutions start from He's normal (fan out), as usual;
    with `init="zero-residual"` the last norm of each block has weight zero, so that a block starts as its shortcut.
    `trim` leaves out taps that never meet a pixel: on 32x32 pictures 6,946,816 parameters, whose gradient is always
    zero. The rest is the same network from the same seed (see `trim.py`); on 64x64 pictures no tap is dead.
    `keep_norm` adds one parameter to a trimmed network that stands for them in norms of the whole vector, so that
    `clip_mode="released"` clips as on the untrimmed network.
    """
    channels, _, _ = basic._image(shape, "resnet18_gn")
    if init not in STARTS:
        raise unknown("init of model resnet18_gn", init, STARTS)
    if keep_norm and not trim:
        raise UserError("model resnet18_gn: keep_norm expects trim=true, found trim=false; without it no norm is lost")
    layers: list[nn.Module] = [
        Layout(),
        nn.Conv2d(channels, 64, 7, 2, 3, bias=False),
        nn.GroupNorm(groups, 64),
        nn.MaxPool2d(3, 2, 1),
        nn.ReLU(),
        Layout(),  # does nothing here; it stays because names of parameters, which are stored, count the layers
    ]
    widths = [64, 64, 64, 128, 128, 256, 256, 512, 512]
    for i, (a, b) in enumerate(pairwise(widths)):
        layers.append(Block(a, b, 2 if i in (2, 4, 6) else 1, groups))
    net = ResNet(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, outputs))
    for module in net.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        elif isinstance(module, Block) and init == "zero-residual":
            nn.init.zeros_(module.norm2.weight)
    return trimmed(net, shape, keep_norm) if trim else net
