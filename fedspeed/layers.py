"""Exact fast layers: the same function to rounding, the same parameters, less work.

A 3x3 convolution with padding 1 on a 1x1 or 2x2 map spends 5/9 to 8/9 of its taps on padding. Written as one matrix
product over the live taps it gives the same values and gradients; dead taps keep their zero gradient, so weight decay
and the method's terms reach them as before. Max-pooling before ReLU is the same function as after it, on a map a
quarter of the size.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

LIVE = [(p - i + 1) * 3 + (q - j + 1) for p in (0, 1) for q in (0, 1) for i in (0, 1) for j in (0, 1)]
"""On a 2x2 map, stride 1: the tap through which input (p, q) reaches output (i, j), inputs first."""


class Layout(nn.Module):
    """Lays pictures out with channels last (or first again) on a CPU, where max-pooling is then ten times cheaper."""

    def __init__(self, last: bool = True) -> None:
        super().__init__()
        self.format = torch.channels_last if last else torch.contiguous_format

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The same values in another order of memory."""
        if x.device.type != "cpu" or torch._C._functorch.is_functorch_wrapped_tensor(x):  # vmap knows one layout
            return x
        return x.contiguous(memory_format=self.format)


class Conv3x3(nn.Conv2d):
    """A 3x3 convolution with padding 1 that does not multiply by padding on maps of 1x1 and 2x2.

    Example:
        >>> Conv3x3(8, 16)(torch.zeros(5, 8, 2, 2)).shape
        torch.Size([5, 16, 2, 2])
    """

    def __init__(self, channels: int, out: int, stride: int = 1) -> None:
        super().__init__(channels, out, 3, stride, 1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The convolution; on a GPU, and on larger maps, the stock one."""
        size = tuple(x.shape[-2:])
        if x.device.type != "cpu" or size not in ((1, 1), (2, 2)):
            return super().forward(x)
        if size == (1, 1):
            return F.linear(x.flatten(1), self.weight.flatten(2)[:, :, 4].contiguous())[:, :, None, None]
        if self.stride == (2, 2):
            return F.linear(x.flatten(1), self.weight[:, :, 1:, 1:].flatten(1))[:, :, None, None]
        return _two_by_two(x, self.weight)


def _two_by_two(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Every output of a 2x2 map sees every input: one product with the (4 in) x (4 out) matrix of live taps."""
    out, channels = weight.shape[:2]
    taps = weight.view(out, -1).t().contiguous().view(channels, 9, out)  # a plain transpose is the quick one
    live = taps.index_select(1, torch.tensor(LIVE, device=weight.device))
    y = x.flatten(1) @ live.view(4 * channels, 4 * out)
    return y.view(-1, 4, out).transpose(1, 2).reshape(-1, out, 2, 2)
