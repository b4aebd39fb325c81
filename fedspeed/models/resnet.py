"""ResNet-18 with group norm, the network of the paper; trimmed on request."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import nn

from ..errors import UserError, unknown
from .basic import Shape, _image
from .fast_conv import Conv, Layout
from .trim import trimmed


class Block(nn.Module):
    """Two 3x3 convolutions with group norm and a shortcut."""

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
        y = torch.relu_(self.norm1(self.conv1(x)))
        return torch.relu_(self.norm2(self.conv2(y)).add_(self.shortcut(x)))


STARTS = ("usual", "zero-residual")


def resnet18_gn(
    shape: Shape, outputs: int, groups: int = 2, init: str = "usual", trim: bool = False, keep_norm: bool = False
) -> nn.Module:
    """Build ResNet-18 as in the paper: 7x7 stride-2 stem, max-pool, every batch norm a group norm of 2 groups.

    11,181,642 parameters for three channels and 10 classes. Convolutions start from He's normal (fan out), as usual;
    with `init="zero-residual"` the last norm of each block has weight zero, so that a block starts as its shortcut.
    `trim` leaves out taps that never meet a pixel: on 32x32 pictures 6,946,816 parameters, whose gradient is always
    zero. The rest is the same network from the same seed (see `trim.py`); on 64x64 pictures no tap is dead.
    `keep_norm` adds one parameter to a trimmed network that stands for them in norms of the whole vector, so that
    `clip_mode="released"` clips as on the untrimmed network.
    """
    channels, _, _ = _image(shape, "resnet18_gn")
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
    net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, outputs))
    for module in net.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        elif isinstance(module, Block) and init == "zero-residual":
            nn.init.zeros_(module.norm2.weight)
    return trimmed(net, shape, keep_norm) if trim else net
