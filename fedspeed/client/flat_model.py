"""The flat model that a run trains: a copy of a module whose parameters are views of one vector."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from ..config.plan import Plan
from ..data.federated import Federated
from ..errors import UserError
from ..methods.base import Method
from ..models.residual import gradients_into
from ..models.resnet import choose_layers, resolve_layers
from ..utils.devices import version
from ..utils.random import torch_seed
from .batch_norm import Statistics, refuse_tracking, with_group_norm

Loss = Callable[[Any, torch.Tensor], torch.Tensor]


class FlatModel:
    """A module whose trainable parameters are views of one vector of length d.

    Tied parameters appear once, frozen ones and buffers stay in the module, parameters of a narrower dtype are cast
    from the vector (which has the widest). Errors name parameters that are lazy, complex, empty, on several devices, or
    two that share memory; buffers that a forward pass changes; and running statistics unless `tracks` is true.

    Args:
        model: any `nn.Module`; it is taken over, so hand in a copy if you want to keep yours.
        no_decay: names, or ends of names, of parameters without weight decay, e.g. `("bias",)`.
        tracks: accept a model with running statistics (batch norm); they are a second vector, `statistics`.

    Example:
        >>> flat = FlatModel(nn.Linear(3, 2))
        >>> flat.d, flat.x.shape
        (8, torch.Size([8]))
    """

    def __init__(self, model: nn.Module, no_decay: Sequence[str] = (), tracks: bool = False) -> None:
        self.model, self.no_decay = model, (no_decay,) if isinstance(no_decay, str) else tuple(no_decay)
        trainable = _trainable(model, tracks)
        self.names, self.parameters = list(trainable), list(trainable.values())
        self.dtype = self.parameters[0].dtype
        for p in self.parameters:
            self.dtype = torch.promote_types(self.dtype, p.dtype)
        self.device = self.parameters[0].device
        self.sizes = [p.numel() for p in self.parameters]
        self.shapes = [p.shape for p in self.parameters]
        self.d = sum(self.sizes)
        self.x = torch.cat([p.detach().reshape(-1).to(self.dtype) for p in self.parameters])
        self.decay = self._decay_mask()
        self.statistics = Statistics(model, self.dtype)
        self._buffers = {name: (b, version(b)) for name, b in model.named_buffers()}
        self.load(self.x)

    def _decay_mask(self) -> torch.Tensor | None:
        """Return a vector that is 1 where weight decay applies and 0 elsewhere, or None if it applies everywhere."""
        unused = [end for end in self.no_decay if not any(name.endswith(end) for name in self.names)]
        if unused:
            raise UserError(f"no_decay: {unused[0]!r} ends no parameter's name; the names are {', '.join(self.names)}")
        if not self.no_decay:
            return None
        ones = [float(not name.endswith(self.no_decay)) for name in self.names]
        return torch.repeat_interleave(torch.tensor(ones, dtype=self.dtype), torch.tensor(self.sizes)).to(self.device)

    @property
    def size(self) -> str:
        """The number of parameters, in words."""
        frozen = sum(p.numel() for p in self.model.parameters() if not p.requires_grad)
        return f"{self.d:,} parameters" + (f" and {frozen:,} frozen ones" if frozen else "")

    def load(self, x: torch.Tensor) -> None:
        """Make the parameters views of x; those of another dtype are copied.

        If x is longer than d, the rest are running statistics.
        """
        if len(x) > self.d:
            self.statistics.put(x[self.d :])
            x = x[: self.d]
        parts = x.split(self.sizes)  # type: ignore[no-untyped-call]
        for p, part, shape in zip(self.parameters, parts, self.shapes, strict=True):
            p.data = part.view(shape) if p.dtype == x.dtype else part.view(shape).to(p.dtype)

    @contextmanager
    def detached(self) -> Iterator[None]:
        """Reset the model to x^0, with parameters in memory of their own: a view would be pickled with its vector."""
        self.load(torch.cat([self.x, self.statistics.first.to(self.x)]) if self.statistics else self.x)
        for p in self.parameters:
            p.data = p.data.clone()
        try:
            yield
        finally:
            self.load(self.x)

    def outputs(self, x: torch.Tensor, inputs: torch.Tensor) -> Any:
        """Return the model's outputs at x, without a graph."""
        self.load(x)
        with torch.no_grad():
            return self.model(inputs)

    def gradient(
        self,
        x: torch.Tensor,
        inputs: torch.Tensor,
        targets: torch.Tensor,
        loss: Loss,
        out: torch.Tensor,
        term: Callable[[Any], torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Write the gradient of the loss at x, plus a term of the model's outputs, into `out`; return the loss."""
        self.load(x)
        with torch.enable_grad():  # the caller may be inside torch.no_grad()
            outputs = self.model(inputs)
            value = loss(outputs, targets)
            whole = value if term is None else value + term(outputs)
            parts = out.split(self.sizes)  # type: ignore[no-untyped-call]
            views = [part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)]
            with gradients_into(self.parameters, views):
                grads: tuple[torch.Tensor | None, ...] = torch.autograd.grad(whole, self.parameters, allow_unused=True)
        for g, view in zip(grads, views, strict=True):
            if g is None:
                view.zero_()
            elif g.data_ptr() != view.data_ptr():  # else the gradient was written there
                view.copy_(g)
        return value.detach()

    def hvp(
        self, x: torch.Tensor, v: torch.Tensor, inputs: torch.Tensor, targets: torch.Tensor, loss: Loss
    ) -> torch.Tensor:
        """Return the Hessian of the loss at x times v, by double backward."""
        self.load(x)
        grads = torch.autograd.grad(
            loss(self.model(inputs), targets), self.parameters, create_graph=True, materialize_grads=True
        )
        parts = v.split(self.sizes)  # type: ignore[no-untyped-call]
        dot = torch.stack([(g.reshape(-1).to(self.dtype) @ a) for g, a in zip(grads, parts, strict=True)])
        second = torch.autograd.grad(dot.sum(), self.parameters, materialize_grads=True)
        return torch.cat([g.reshape(-1).to(self.dtype) for g in second])

    def refuse_changed_buffers(self) -> None:
        """Raise if a forward pass in training changed a buffer: it would differ between clients and be lost."""
        for name, b in self.model.named_buffers():
            before, then = self._buffers.get(name, (None, 0))
            if b is not before or (version(b) != then and name not in self.statistics.buffers):
                raise UserError(
                    f"model: buffer {name!r} changes in a forward pass; only parameters travel, so running "
                    f"statistics would be lost. Make it a parameter, or use a layer without it (nn.GroupNorm)"
                )


def _trainable(model: nn.Module, tracks: bool) -> dict[str, nn.Parameter]:
    """Return the trainable parameters by name; raise for a parameter or layer that a flat vector cannot hold."""
    if not tracks:
        refuse_tracking(model)
    named = dict(model.named_parameters())  # removes duplicates, so tied parameters come once
    lazy = [name for name, p in named.items() if nn.parameter.is_lazy(p)]
    if lazy:
        raise UserError(f"model: parameter {lazy[0]!r} is lazy, it has no shape yet; run one batch through the model")
    trainable = {name: p for name, p in named.items() if p.requires_grad}
    if not trainable:
        raise UserError("model: expected trainable parameters, found none; set requires_grad=True on some")
    first = next(iter(trainable.values()))
    places: dict[int, str] = {}
    for name, p in trainable.items():
        if p.is_complex() or p.is_sparse:
            raise UserError(f"model: parameter {name!r} is {p.dtype} ({p.layout}); only dense real ones can be trained")
        if p.device != first.device:
            raise UserError(f"model: parameter {name!r} is on {p.device}, the first on {first.device}; use one device")
        if not math.prod(p.shape):
            raise UserError(f"model: parameter {name!r} is empty (shape {tuple(p.shape)}); give it a size or drop it")
        twin = places.setdefault(p.data_ptr(), name)
        if twin != name:
            raise UserError(
                f"model: parameters {twin!r} and {name!r} share memory but are two; tie them by assigning one "
                f"nn.Parameter to both places, or clone one"
            )
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise UserError(f"model: {name or 'the model'} gives sparse gradients; build it with sparse=False")
    return trainable


def copied(model: nn.Module) -> nn.Module:
    """Return a copy of a model, which a run trains in place of the user's."""
    try:
        return copy.deepcopy(model)
    except Exception as error:
        reason = (str(error).splitlines() or [""])[0]
        raise UserError(
            f"model: {type(model).__name__} cannot be copied, and it is a copy that is trained ({reason}); run one "
            f"batch through lazy modules, use torch.nn.utils.parametrizations for weight norm"
        ) from error


def flat_model(
    model: nn.Module,
    data: Federated,
    plan: Plan,
    device: torch.device,
    no_decay: Sequence[str],
    method: Method | None = None,
) -> FlatModel:
    """Return a flat copy of a model, with its batch norm treated and its blocks computed as the plan says.

    Args:
        method: its `ascent_fraction`, if it has one, takes a part of every batch.
    """
    module = copied(model).to(device)
    module = with_group_norm(module) if plan.batch_norm == "group" else module
    choose_layers(module, resolve_layers(module, plan.layers))
    flat = FlatModel(module, no_decay, plan.keeps_statistics)
    if flat.statistics:
        fraction = getattr(method, "ascent_fraction", 1.0)
        _refuse_single(flat, data.to(device, flat.dtype), plan.batch_size, fraction, method)
    return flat


def _with_single(n: np.ndarray, batch_size: int, fraction: float) -> np.ndarray:
    """Return the clients that have a batch of one sample, or a batch whose `fraction` is one sample."""
    lone = np.array([b and max(1, round(fraction * b)) == 1 for b in range(batch_size + 1)], dtype=bool)
    return np.flatnonzero(lone[n % batch_size] | (lone[batch_size] & (n >= batch_size)))


def _refuse_single(flat: FlatModel, data: Federated, batch_size: int, fraction: float, method: Method | None) -> None:
    """Raise if some client has a batch of one sample and the model's batch norm cannot take that."""
    n = data.sizes
    alone = _with_single(n, batch_size, fraction)
    if not len(alone):
        return
    client = int(alone[n[alone].argmin()])
    try:
        with torch_seed(0, "batch norm"), torch.no_grad(), flat.statistics.kept():
            flat.model.train()(data.batch(data.rows(client)[:1])[0])
    except ValueError as error:
        if "more than 1 value" not in str(error):
            raise
        sizes = range(batch_size + 1, batch_size + 100)
        other = next((b for b in sizes if not len(_with_single(n, b, fraction))), 0)
        part = f", with ascent_fraction {fraction:g} of {method.label}" if method and fraction < 1 else ""
        raise UserError(
            f"batch_norm: one sample has no variance, and client {client} with {n[client]} samples has a batch of one "
            f"at batch size {batch_size}{part}; {f'--batch-size {other} leaves none, or' if other else 'choose'} "
            f"--batch-norm group"
        ) from None
