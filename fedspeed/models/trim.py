"""Convolutions without dead taps: on a map smaller than a filter's reach, some taps only ever meet padding.

Tap a of a line meets pixel i at output o where i = o stride + a - padding. A 3x3 filter on a 1x1 map has one such tap
of nine, with stride 2 on a 2x2 map four. The gradient of the others is zero at every point, so a network trained
without them is the same network: the same live values to rounding, from the same seed. In the untrimmed network dead
values move by weight decay and a method's linear terms alone, and nothing reads them but norms of the whole vector:

- loss gradients (clipping, SAM's and FedSpeed's ascent, FedSMOO's ascent vectors) are zero there: the same;
- FedLESAM's ascent divides by ||x_old - x^t||, which counts what weight decay did to dead taps, as the ascents of
  FedGloSS, FedWMSAM and FedTOGA do: another step length, unless weight_decay is 0;
- clip_mode="released" counts a method's linear terms: the dead part of x^t for methods with a prox term (FedProx,
  FedDyn, FedADMM, FedPD, FedSpeed, FedSMOO, FedACG, ...), of what weight decay did for those that carry a past movement
  (SCAFFOLD, FedGamma, FedCM, MoFedSAM, FedWMSAM): another scale wherever it clips.

There the trimmed run is the method on the smaller network, unless `keep_norm` adds the parameter `dead_norm`: the norm
of the dead values at the start, with gradient zero. They only ever move along their start, by linear updates, so this
one number moves as they would, and every norm is that of the untrimmed network, to rounding. (FedAdam divides element
by element; nothing reads dead values there.) Without it drift, update norms and bytes in records are of the shorter
vector everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ..errors import UserError
from .fast_conv import Bilinear, bilinear, convolve, special

DEAD_NORM = "dead_norm"
"""Name of the parameter that `keep_norm` adds; it is stored in model files."""


def live(side: int, taps: int, stride: int, padding: int) -> range:
    """Return the taps of a line of `taps` that meet a pixel of a line of `side`, first to last.

    Example:
        >>> live(1, 3, 1, 1), live(2, 3, 2, 1), live(2, 3, 1, 1)
        (range(1, 2), range(1, 3), range(0, 3))
    """
    outputs = range((side + 2 * padding - taps) // stride + 1)
    met = [a for a in range(taps) if any(0 <= o * stride + a - padding < side for o in outputs)]
    return range(met[0], met[-1] + 1)


class TrimmedConv(nn.Module):
    """The live taps of a convolution without bias, padded by half its filter, on maps of one size.

    Its weight is (live taps, channels, out): tap by tap, as the fast layers multiply them, so that neither the filters
    nor their gradient are laid out again at every step. Values are copied, and no random number is drawn.

    Example:
        >>> TrimmedConv(nn.Conv2d(8, 16, 3, padding=1, bias=False), (1, 1)).weight.shape
        torch.Size([1, 8, 16])
    """

    stored_as = "tap by tap"  # order of its values in the vector; a checkpoint with another order is not resumed

    def __init__(self, full: nn.Conv2d, size: tuple[int, int]) -> None:
        super().__init__()
        self.size = tuple(size)
        self.stride = full.stride
        half = [taps // 2 for taps in full.kernel_size]
        rows, columns = map(live, size, full.kernel_size, full.stride, half)
        self.kept = (len(rows), len(columns))
        self.padding = (half[0] - rows.start, half[1] - columns.start)
        dead = [(a.start, taps - a.stop) for a, taps in zip((rows, columns), full.kernel_size, strict=True)]
        self.dead = (*dead[1], *dead[0])  # left, right, above, below
        self.square = full.kernel_size == (3, 3) and size[0] == size[1] and full.stride[0] == full.stride[1]
        values = full.weight.detach()[:, :, rows.start : rows.stop, columns.start : columns.stop]
        self.weight = nn.Parameter(
            values.permute(2, 3, 1, 0).flatten(0, 1).clone(memory_format=torch.contiguous_format)
        )

    @property
    def pays(self) -> bool:
        """Whether it saves work: there is a dead tap, or a fast rule."""
        return any(self.dead) or self._rule(torch.float32) is not None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the convolution; raise for maps of another size, which have other live taps."""
        if tuple(x.shape[-2:]) != self.size:
            raise UserError(
                f"trimmed network: expected maps of {self.size[0]}x{self.size[1]}, found {x.shape[-2]}x{x.shape[-1]}; "
                f"it is trimmed for one size of pictures: build it for this one, or leave it untrimmed (trim=False)"
            )
        plain = special(x, self.weight) or x.ndim != 4 or not x.numel()
        rule = None if plain else self._rule(x.dtype)
        if rule is None:
            return nn.functional.conv2d(x, self._filters(self.weight), None, self.stride, self.padding)
        return convolve(x, self.weight, rule)

    def untrimmed(self, weight: torch.Tensor) -> torch.Tensor:
        """Return such a weight as full filters (out, channels, height, width), zero in their dead taps."""
        return nn.functional.pad(self._filters(weight), self.dead)

    def _filters(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.permute(2, 1, 0).reshape(*weight.shape[:0:-1], *self.kept)

    def _rule(self, dtype: torch.dtype) -> Bilinear | None:
        return bilinear(self.size[0], self.stride[0], dtype, live=True) if self.square else None


def trimmed(net: nn.Module, shape: tuple[int, ...], keep_norm: bool = False) -> nn.Module:
    """Return the network with every convolution that has dead taps on this shape, or a fast rule, kept tap by tap.

    `keep_norm` adds the parameter `dead_norm`, which stands for all dead values in norms of the whole vector.

    Example:
        >>> net = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1, bias=False))
        >>> trimmed(net, (3, 1, 1))[0].weight.shape
        torch.Size([1, 3, 4])
    """
    convolutions = {name: module for name, module in net.named_modules() if isinstance(module, nn.Conv2d)}
    sizes: dict[nn.Module, tuple[int, int]] = {}

    def note(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        sizes[module] = tuple(inputs[0].shape[-2:])

    hooks = [module.register_forward_pre_hook(note) for module in convolutions.values()]
    with torch.no_grad():
        net(torch.zeros(1, *shape, dtype=next(net.parameters()).dtype))
    for hook in hooks:
        hook.remove()
    dead = []
    for name, module in convolutions.items():
        smaller = TrimmedConv(module, sizes[module])
        if smaller.pays:
            net.set_submodule(name, smaller)
            dead.append(_square(module.weight) - _square(smaller.weight))
    if keep_norm:
        norm = torch.stack([torch.zeros((), dtype=torch.float64), *dead]).sum(0, keepdim=True).clamp_(min=0).sqrt()
        net.register_parameter(DEAD_NORM, nn.Parameter(norm.to(next(net.parameters()).dtype)))
    return net


def _square(weight: torch.Tensor) -> torch.Tensor:
    """Return the squared norm of a weight, summed in float64."""
    return weight.detach().double().square().sum()


def untrim(model: nn.Module, state: Mapping[str, torch.Tensor] | None = None) -> dict[str, torch.Tensor]:
    """Return the state of a trimmed model as one for the untrimmed: the same outputs; dead taps are zero.

    In an untrimmed run they would not be zero: they would hold their initial values, reduced by weight decay. `state`
    may be another one of such a model, a `model.safetensors` for example; None takes the model's own.

    Example:
        >>> from fedspeed.models import resnet18_gn
        >>> small, full = (resnet18_gn((3, 32, 32), 10, trim=trim) for trim in (True, False))
        >>> full.load_state_dict(untrim(small))
        <All keys matched successfully>
    """
    full = dict(model.state_dict() if state is None else state)
    full.pop(DEAD_NORM, None)
    for name, module in model.named_modules():
        if isinstance(module, TrimmedConv):
            key = f"{name}.weight" if name else "weight"
            full[key] = module.untrimmed(full[key])
    return full
