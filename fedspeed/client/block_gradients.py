"""Gradients at the points of a (clients, d) block, each of its own client's minibatch.

Any module goes through `torch.func`. Chains of linear layers and ReLU are written out, forward and backward, with one
batched product per layer: autograd would take three times as long for them, and `torch.func` two seconds to load.

The products and sums below fix the bits of every run with the block engine: another order, another layout or another
fused operation is another result.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from .distillation import TeacherTerm
from .flat_model import FlatModel, Loss

Pair = tuple[torch.Tensor, torch.Tensor]
Gradient = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, TeacherTerm | None], Pair]
"""A function of points (clients, d), inputs and targets (clients, batch, ...): gradients, and one loss per client.

Gradients are in fresh memory. A teacher's pull is part of the gradients, not of the losses."""
Slope = Callable[[torch.Tensor, torch.Tensor], Pair | None]
"""A function of outputs and targets: one loss per client, and its gradient by the outputs; None if they do not fit."""


def mapped_gradient(flat: FlatModel, loss: Loss) -> Gradient:
    """Return the gradient of any module, through `torch.func`."""

    def one(v: torch.Tensor, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return loss(_call(flat, v, inputs), targets)

    def gradient(x: torch.Tensor, inputs: torch.Tensor, targets: torch.Tensor, pull: TeacherTerm | None = None) -> Pair:
        if pull is None:
            found: Pair = alone(x, inputs, targets)
            return found

        def pulled(v: torch.Tensor, inputs: torch.Tensor, targets: torch.Tensor, logits: torch.Tensor) -> Any:
            outputs = _call(flat, v, inputs)
            value = loss(outputs, targets)
            return value + pull._replace(logits=logits).term(outputs), value

        both = torch.func.vmap(torch.func.grad(pulled, has_aux=True), randomness="different")
        found = both(x, inputs, targets, pull.logits)
        return found

    alone = torch.func.vmap(torch.func.grad_and_value(one), randomness="different")
    return gradient


def outputs_at(flat: FlatModel, v: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
    """Return the outputs of one vector for every client's minibatch (clients, batch, ...), without a graph."""
    if is_chain(flat.model):  # no layer sees more than its own sample
        found: torch.Tensor = flat.outputs(v, inputs.flatten(0, 1)).unflatten(0, inputs.shape[:2])
        return found
    with torch.no_grad():
        found = torch.func.vmap(lambda own: _call(flat, v, own), randomness="different")(inputs)
    return found


def _call(flat: FlatModel, v: torch.Tensor, inputs: torch.Tensor) -> Any:
    """Return the model's outputs with the parameters of a vector."""
    parts = v.split(flat.sizes)  # type: ignore[no-untyped-call]
    named = {
        name: part.view(shape).to(p.dtype)
        for name, part, shape, p in zip(flat.names, parts, flat.shapes, flat.parameters, strict=True)
    }
    return torch.func.functional_call(flat.model, named, (inputs,))


class Linear(NamedTuple):
    """The places of a linear layer's parameters in a vector."""

    weight: slice
    shape: torch.Size
    bias: slice | None

    def weights(self, x: torch.Tensor) -> torch.Tensor:
        """Return the weights as (clients, out, in), sharing memory with a block."""
        return x[:, self.weight].view(-1, *self.shape)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return y W^T + b for every client."""
        turned = self.weights(x).transpose(1, 2)
        return torch.bmm(y, turned) if self.bias is None else torch.baddbmm(x[:, None, self.bias], y, turned)

    def backward(self, g: torch.Tensor, y: torch.Tensor, e: torch.Tensor) -> None:
        """Write the parameters' gradient into g, from the inputs y and the outputs' gradient e."""
        # One batched product and a copy: with out=g, which is strided, the product would run client by client.
        self.weights(g).copy_(torch.bmm(e.transpose(1, 2), y))
        if self.bias is not None:
            torch.sum(e, 1, out=g[:, self.bias])


def stacked_gradient(flat: FlatModel, loss: Loss) -> Gradient | None:
    """Return the gradient of a chain of linear layers and ReLU, written out; None for any other module or loss.

    Cases that only a batch shows are left to `mapped_gradient`: targets that are not class numbers, or not of the
    outputs' shape, inputs with further axes, autocast.
    """
    layers = list(_chain(flat.model))
    linear = [p for m in layers if isinstance(m, nn.Linear) for p in (m.weight, m.bias) if p is not None]
    plain = [id(p) for p in linear] == [id(p) for p in flat.parameters] and all(p.dtype == flat.dtype for p in linear)
    slope = slope_of(loss)
    if slope is None or not (is_chain(flat.model) and plain):
        return None
    first = next(i for i, m in enumerate(layers) if isinstance(m, nn.Linear))
    steps = [_linear(m, flat) if isinstance(m, nn.Linear) else m for m in layers]

    def gradient(x: torch.Tensor, inputs: torch.Tensor, targets: torch.Tensor, pull: TeacherTerm | None = None) -> Pair:
        y, seen = inputs, []
        for step in steps:
            if isinstance(step, Linear) and (y.ndim != 3 or torch.is_autocast_enabled(x.device.type)):
                return mapped_gradient(flat, loss)(x, inputs, targets, pull)
            seen.append(y)
            if isinstance(step, Linear):
                y = step.forward(x, y)
            else:
                y = torch.relu(y) if isinstance(step, nn.ReLU) else y.flatten(2)
        found = slope(y, targets)
        if found is None:
            return mapped_gradient(flat, loss)(x, inputs, targets, pull)
        losses, e = found
        if pull is not None:
            e.add_(pull.slope(y))
        g = torch.empty_like(x)
        for number in reversed(range(first, len(steps))):
            step, y = steps[number], seen[number]
            if isinstance(step, Linear):
                step.backward(g, y, e)
                e = torch.bmm(e, step.weights(x)) if number > first else e
            elif isinstance(step, nn.ReLU):
                e = torch.ops.aten.threshold_backward(e, y, 0)
        return g, losses  # flattening does nothing after the first linear layer

    return gradient


def is_chain(model: nn.Module) -> bool:
    """Return whether a model is a chain of linear layers, ReLU and flattening."""
    layers = list(_chain(model))
    plain = all((m.start_dim, m.end_dim) == (1, -1) for m in layers if isinstance(m, nn.Flatten))
    return plain and all(type(m) in (nn.Linear, nn.ReLU, nn.Flatten) for m in layers)


def _chain(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the layers of (nested) Sequentials in order; a layer that is used twice comes twice."""
    if isinstance(module, nn.Sequential):
        for inner in module:
            yield from _chain(inner)
    else:
        yield module


def _linear(layer: nn.Linear, flat: FlatModel) -> Linear:
    starts = dict(zip(map(id, flat.parameters), itertools.accumulate(flat.sizes, initial=0), strict=False))

    def place(p: torch.Tensor) -> slice:
        return slice(starts[id(p)], starts[id(p)] + p.numel())

    return Linear(place(layer.weight), layer.weight.shape, None if layer.bias is None else place(layer.bias))


def _cross_entropy(y: torch.Tensor, targets: torch.Tensor) -> Pair | None:
    """Return every client's mean cross-entropy and its gradient by the outputs; None without class numbers."""
    if targets.is_floating_point() or targets.shape != y.shape[:2]:
        return None
    e, chosen = torch.log_softmax(y, -1), targets[..., None]
    losses = e.gather(-1, chosen).mean((1, 2)).neg_()
    e.exp_().scatter_add_(-1, chosen, e.new_full((), -1.0).expand(chosen.shape))
    return losses, e.div_(y.shape[1])


def _squares(y: torch.Tensor, targets: torch.Tensor) -> Pair | None:
    """Return every client's mean squared error and its gradient by the outputs; None unless shapes and dtypes agree."""
    if targets.dtype != y.dtype or targets.shape != y.shape:
        return None
    e = y - targets
    return e.square().mean((1, 2)), e.mul_(2 / y[0].numel())


SLOPES: dict[Loss, Slope] = {nn.functional.cross_entropy: _cross_entropy, nn.functional.mse_loss: _squares}


def slope_of(loss: Loss) -> Slope | None:
    """Return the written-out gradient of a loss; None if it has none. A user's loss may not be hashable."""
    return next((slope for known, slope in SLOPES.items() if known is loss), None)
