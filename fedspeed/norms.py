"""Layers with running statistics (batch norm): found, replaced by group norm, their numbers as one vector."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from .errors import UserError

REPLACED = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
"""What becomes a group norm; a class derived from one of these may do more, and stays."""


def tracking(model: nn.Module) -> dict[str, nn.Module]:
    """The layers that keep running statistics, by name."""
    return {
        name: m
        for name, m in model.named_modules()
        if getattr(m, "track_running_stats", False) and getattr(m, "running_mean", None) is not None
    }


def groups(width: int) -> int:
    """Groups of a group norm in place of a batch norm: the paper's two, one for an odd number of channels."""
    return 1 if width % 2 else 2


def with_group_norm(model: nn.Module) -> nn.Module:
    """The model with a group norm in place of every batch norm: its weight, bias, eps and name stay.

    Example:
        >>> with_group_norm(nn.BatchNorm1d(4)).num_groups
        2
    """
    found = {m: _group_norm(m) for m in model.modules() if isinstance(m, REPLACED) and type(m) in REPLACED}
    for module in list(model.modules()):
        for name, child in module._modules.items():
            if child in found:
                setattr(module, name, found[child])
    return found.get(model, model)  # type: ignore[call-overload,no-any-return]


def _group_norm(norm: nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d | nn.SyncBatchNorm) -> nn.GroupNorm:
    made = nn.GroupNorm(groups(norm.num_features), norm.num_features, norm.eps, affine=norm.affine)
    if norm.affine:
        made.weight, made.bias = norm.weight, norm.bias
    return made


class Statistics:
    """The running statistics of a model's layers as one vector; of length 0 for a model without any.

    Args:
        dtype: of the vector; counts of batches are numbers like others in it, rounded when they are put back.

    Example:
        >>> Statistics(nn.BatchNorm1d(2), torch.float32).read()     # means, variances, the number of batches
        tensor([0., 0., 1., 1., 0.])
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.buffers = {
            f"{name}.{end}" if name else end: b
            for name, layer in tracking(model).items()
            for end, b in layer.named_buffers(recurse=False)
        }
        self.first = self.read() if self.buffers else torch.empty(0, dtype=dtype)

    def __len__(self) -> int:
        return len(self.first)

    def read(self) -> torch.Tensor:
        """A copy of the numbers."""
        return torch.cat([b.reshape(-1).to(self.dtype) for b in self.buffers.values()])

    def put(self, values: torch.Tensor) -> None:
        """Give the layers these numbers."""
        parts = values.split([b.numel() for b in self.buffers.values()])  # type: ignore[no-untyped-call]
        for b, part in zip(self.buffers.values(), parts, strict=True):
            b.copy_((part if b.is_floating_point() else part.round()).view(b.shape))

    @contextmanager
    def kept(self) -> Iterator[None]:
        """What passes forward inside changes nothing."""
        before = [b.clone() for b in self.buffers.values()]
        try:
            yield
        finally:
            for b, then in zip(self.buffers.values(), before, strict=True):
                b.copy_(then)


def refuse_tracking(model: nn.Module) -> None:
    """Raise for a layer with running statistics, and name the choices."""
    for name, module in tracking(model).items():
        width = int(getattr(module, "num_features", 0))
        group = f"group (nn.GroupNorm({groups(width)}, {width}) in its place), " if type(module) in REPLACED else ""
        raise UserError(
            f"model: {name or 'the model'} is a {type(module).__name__} with running statistics, which clients cannot "
            f"share; choose --batch-norm {group}local or average, or build it with track_running_stats=False"
        )
