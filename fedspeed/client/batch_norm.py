"""Batch norm: replace it by group norm, or carry its running statistics as a vector beside the model's.

`Statistics` reads and writes the layers' numbers; `BatchNormHooks` adds them to the messages and states of any method.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from ..errors import UserError
from .hooks import Hooks

if TYPE_CHECKING:
    from ..methods.base import Grad, Local, Method, Round
    from .flat_model import FlatModel

REPLACED = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
"""Layers that become a group norm; a class derived from one of these may do more, and stays."""


def tracking(model: nn.Module) -> dict[str, nn.Module]:
    """Return the layers that keep running statistics, by name."""
    return {
        name: m
        for name, m in model.named_modules()
        if getattr(m, "track_running_stats", False) and getattr(m, "running_mean", None) is not None
    }


def groups(width: int) -> int:
    """Return the groups of a group norm in place of a batch norm: the paper's two, one for an odd width."""
    return 1 if width % 2 else 2


def with_group_norm(model: nn.Module) -> nn.Module:
    """Return the model with a group norm in place of every batch norm; its weight, bias, eps and name stay.

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
        dtype: of the vector; counts of batches are in it too, and are rounded when they are put back.

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
        """Return a copy of the numbers."""
        return torch.cat([b.reshape(-1).to(self.dtype) for b in self.buffers.values()])

    def put(self, values: torch.Tensor) -> None:
        """Write these numbers into the layers."""
        parts = values.split([b.numel() for b in self.buffers.values()])  # type: ignore[no-untyped-call]
        for b, part in zip(self.buffers.values(), parts, strict=True):
            b.copy_((part if b.is_floating_point() else part.round()).view(b.shape))

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Restore the statistics after forward passes inside."""
        before = [b.clone() for b in self.buffers.values()]
        try:
            yield
        finally:
            for b, then in zip(self.buffers.values(), before, strict=True):
                b.copy_(then)


def refuse_tracking(model: nn.Module) -> None:
    """Raise for a layer with running statistics; the message names the choices."""
    for name, module in tracking(model).items():
        width = int(getattr(module, "num_features", 0))
        group = f"group (nn.GroupNorm({groups(width)}, {width}) in its place), " if type(module) in REPLACED else ""
        raise UserError(
            f"model: {name or 'the model'} is a {type(module).__name__} with running statistics, which clients cannot "
            f"share; choose --batch-norm {group}local or average, or build it with track_running_stats=False"
        )


class WithStatistics(NamedTuple):
    """A message or state of a method, with running statistics beside it.

    Methods know nothing of statistics: they get and return `base`, which holds vectors of the model's length.
    """

    base: Any
    statistics: torch.Tensor

    @property
    def x(self) -> torch.Tensor:
        """The model's vector in `base`."""
        x: torch.Tensor = self.base.x
        return x


def method_part(tree: Any) -> Any:
    """Return the method's part of a tree, without statistics."""
    return tree.base if isinstance(tree, WithStatistics) else tree


def full_vector(server: Any) -> torch.Tensor:
    """Return the server's model as `FlatModel.load` takes it: its vector, then its statistics if there are any."""
    x: torch.Tensor = server.x
    return torch.cat([x, server.statistics]) if isinstance(server, WithStatistics) else x


class BatchNormHooks(Hooks):
    """Hooks of a method for a model with running statistics: each call adds or removes them.

    If they are `local`, each client keeps its own; otherwise all use the server's mean.
    """

    def __init__(self, method: Method, flat: FlatModel, local: bool) -> None:
        super().__init__(method, flat.d, flat.dtype)
        self.held = flat.statistics
        self.local = local

    def expect(self, up: Any) -> None:
        super().expect(up.base)

    def init_server(self, x0: torch.Tensor) -> Any:
        return WithStatistics(super().init_server(x0), self.held.first.to(x0, copy=True))

    def init_client(self, x0: torch.Tensor) -> Any:
        client = super().init_client(x0)
        return WithStatistics(client, self.held.first.to(x0, copy=True)) if self.local else client

    def broadcast(self, server: Any) -> Any:
        down = super().broadcast(server.base)
        return down if self.local else WithStatistics(down, server.statistics)

    def start(self, down: Any, client: Any) -> torch.Tensor:
        """Write the first statistics into the layers, and return the first point."""
        self.held.put((client if self.local else down).statistics)
        return super().start(method_part(down), method_part(client))

    def direction(self, x: torch.Tensor, grad: Grad, down: Any, client: Any) -> torch.Tensor:
        return super().direction(x, grad, method_part(down), method_part(client))

    def upload(self, xK: torch.Tensor, down: Any, client: Any, run: Local) -> tuple[Any, Any]:
        """Return upload and state with the statistics that the layers have now."""
        up, kept = super().upload(xK, method_part(down), method_part(client), run)
        found = self.held.read()
        return WithStatistics(up, found), WithStatistics(kept, found.clone()) if self.local else kept

    def sent(self, up: Any) -> int:
        """Return the bytes of an upload; statistics count if they are sent."""
        own = 0 if self.local else up.statistics.numel() * up.statistics.element_size()
        return super().sent(up.base) + own

    def received(self, mean: Any, round: Round) -> Any:
        return WithStatistics(super().received(mean.base, round), mean.statistics)

    def settle(self, client: Any, mean: Any, round: Round) -> Any:
        kept = super().settle(method_part(client), mean.base, round)
        return WithStatistics(kept, client.statistics) if self.local else kept

    def update(self, server: Any, mean: Any, round: Round) -> Any:
        """Return the next server state; its statistics are the mean of the uploaded ones."""
        return WithStatistics(super().update(server.base, mean.base, round), mean.statistics)

    def client_metrics(self, xK: torch.Tensor, down: Any, client: Any, run: Local) -> dict[str, float] | None:
        return super().client_metrics(xK, method_part(down), method_part(client), run)

    def metrics(self, server: Any, mean: Any, round: Round) -> dict[str, float]:
        return super().metrics(server.base, mean.base, round)
