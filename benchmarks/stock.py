"""The models as one writes them in plain PyTorch: stock layers, ReLU before pooling, NCHW.

The same functions, with the same parameters in the same order, as `fedspeed.models` builds: see
tests/project/test_benchmarks.py.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import nn

from .workloads import Arrays


class Block(nn.Module):
    """Two 3x3 convolutions with group norm and a shortcut."""

    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, out, 3, stride, 1, bias=False)
        self.norm1 = nn.GroupNorm(2, out)
        self.conv2 = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.norm2 = nn.GroupNorm(2, out)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels != out:
            self.shortcut = nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), nn.GroupNorm(2, out))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return relu(norm(conv(relu(norm(conv x)))) + shortcut x)."""
        y = self.relu(self.norm1(self.conv1(x)))
        y = self.norm2(self.conv2(y))
        y += self.shortcut(x)
        return self.relu(y)


def resnet18_gn() -> nn.Module:
    """ResNet-18 with group norm in place of batch norm, 7x7 stem, 10 classes: 11,181,642 parameters."""
    layers: list[nn.Module] = [
        nn.Conv2d(3, 64, 7, 2, 3, bias=False),
        nn.GroupNorm(2, 64),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, 1),
    ]
    widths = [64, 64, 64, 128, 128, 256, 256, 512, 512]
    for i, (a, b) in enumerate(pairwise(widths)):
        layers.append(Block(a, b, 2 if i in (2, 4, 6) else 1))
    net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))
    for module in net.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return net


def cnn() -> nn.Module:
    """conv5x5(32)-pool-conv5x5(64)-pool-128-10 without padding."""
    return nn.Sequential(
        nn.Conv2d(3, 32, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(1600, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


def mlp() -> nn.Module:
    """64-64-10."""
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def build(name: str) -> nn.Module:
    """Return a model by name, from seed 0."""
    torch.manual_seed(0)
    return {"resnet18_gn": resnet18_gn, "cnn": cnn, "mlp": mlp}[name]()


def count(model: nn.Module) -> int:
    """Return the number of parameters."""
    return sum(p.numel() for p in model.parameters())


def accuracy(model: nn.Module, arrays: Arrays) -> float:
    """Return the share of the test samples that the model gets right."""
    model.eval()
    with torch.no_grad():
        right = model(torch.from_numpy(arrays.x_test)).argmax(1) == torch.from_numpy(arrays.y_test)
    model.train()
    return float(right.float().mean())
