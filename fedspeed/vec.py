"""Flat vectors: a model whose parameters are views of one, NamedTuples of them, their streaming mean."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch import nn

from .compat import version
from .devices import convolutions
from .errors import UserError
from .norms import Statistics, refuse_tracking

Tree = TypeVar("Tree", bound=tuple[Any, ...])
Loss = Callable[[Any, torch.Tensor], torch.Tensor]


def tree_map(f: Callable[[torch.Tensor], torch.Tensor], tree: Tree) -> Tree:
    """Apply f to every tensor of a NamedTuple (of NamedTuples)."""
    return type(tree)(*(tree_map(f, a) if isinstance(a, tuple) else f(a) for a in tree))


def tree_leaves(tree: tuple[Any, ...]) -> Iterator[torch.Tensor]:
    """Every tensor of a NamedTuple (of NamedTuples), in order."""
    for a in tree:
        if isinstance(a, tuple):
            yield from tree_leaves(a)
        else:
            yield a


def has_leaves(tree: tuple[Any, ...]) -> bool:
    """Whether there is any tensor in a tree."""
    return next(tree_leaves(tree), None) is not None


def outline(a: torch.Tensor) -> torch.Tensor:
    """Shape and dtype without the numbers."""
    return torch.empty_like(a, device="meta")


def tree_bytes(tree: tuple[Any, ...]) -> int:
    """Bytes of all tensors of a tree: what it costs to send."""
    return sum(a.numel() * a.element_size() for a in tree_leaves(tree))


def accurate(a: torch.Tensor | torch.device) -> torch.dtype:
    """The dtype of running sums: float64, but float32 on mps, which has no other."""
    device = a if isinstance(a, torch.device) else a.device
    return torch.float32 if device.type == "mps" else torch.float64


@contextmanager
def arithmetic(precision: str, device: torch.device) -> Iterator[None]:
    """Forward and backward passes in `full` precision, under `bfloat16` autocast, or with `tf32` matrix products."""
    if precision == "bfloat16":
        with torch.autocast(device.type, torch.bfloat16):
            yield
    elif precision == "tf32":
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("high")
        try:
            with convolutions(tf32=True) if device.type == "cuda" else nullcontext():
                yield
        finally:
            torch.set_float32_matmul_precision(before)
    else:
        yield


@contextmanager
def one_thread() -> Iterator[None]:
    """Run a block with one intra-op thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def all_finite(tree: tuple[Any, ...]) -> bool:
    """Whether no tensor of a tree holds NaN or Inf; one pass, no temporary."""
    ends = [end for a in tree_leaves(tree) if a.numel() for end in torch.aminmax(a)]
    return all(math.isfinite(float(end)) for end in ends)


def pieces(*vectors: torch.Tensor, size: int = 2**20) -> Iterator[tuple[torch.Tensor, ...]]:
    """Vectors cut up alike: what is computed on the way stays in the cache and needs no fresh memory."""
    return zip(*(v.reshape(-1).split(size) for v in vectors), strict=True)  # type: ignore[no-untyped-call]


def distance(x: torch.Tensor, y: torch.Tensor) -> float:
    """||x - y||, summed in float64."""
    return math.hypot(*(float(torch.linalg.vector_norm(a - b, dtype=accurate(x))) for a, b in pieces(x, y)))


def squared_distance(x: torch.Tensor, y: torch.Tensor) -> float:
    """||x - y||^2, summed in float64, a piece at a time: a whole vector in float64 would be the largest of all."""
    return sum(float(torch.linalg.vector_norm(a - b, dtype=accurate(x))) ** 2 for a, b in pieces(x, y))


def clip_(v: torch.Tensor, limit: float) -> torch.Tensor:
    """Scale v in place to a norm of at most `limit` (over the last axis); the norm's square may not overflow."""
    norm = torch.linalg.vector_norm(v, dim=-1, keepdim=True, dtype=accurate(v))
    return v.mul_((limit / norm.clamp_(min=limit)).to(v.dtype))


class Mean:
    """Weighted mean of trees, streamed: memory is one tree, and the order of `add` fixes the bits.

    Example:
        >>> from fedspeed.methods.base import Movement
        >>> mean = Mean(torch.float64)
        >>> for value, weight in ((1.0, 1.0), (4.0, 2.0)):
        ...     mean.add(Movement(torch.tensor([value])), weight)
        >>> mean.result().D.item(), mean.weight
        (3.0, 3.0)
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.weight = 0.0
        self.total: Any = None

    def add(self, tree: tuple[Any, ...], weight: float) -> None:
        """Count one more reply."""
        self.weight += weight
        if self.total is None:
            dense = torch.contiguous_format
            self.total = tree_map(lambda a: a.to(self.dtype, copy=True, memory_format=dense).mul_(weight), tree)
        else:
            for total, a in zip(tree_leaves(self.total), tree_leaves(tree), strict=True):
                for part, more in pieces(total, a, size=2**17):
                    part.add_(more.to(self.dtype), alpha=weight)  # seven times as fast as one sum over two dtypes

    def result(self) -> Any:
        """The mean of what was added, in place of the sum: ask once."""
        return tree_map(lambda a: a.div_(self.weight), self.total)


class FlatModel:
    """A module whose trainable parameters are views of one vector of length d.

    Tied parameters appear once, frozen ones and buffers stay in the module, parameters of a narrower dtype are cast
    from the vector (which has the widest). Refused by name: parameters that are lazy, complex, empty, on several
    devices, or two that share memory; buffers that a forward pass changes, running statistics unless asked for.

    Args:
        model: any `nn.Module`; it is taken over, so hand in a copy if you want to keep yours.
        no_decay: names, or ends of names, of parameters without weight decay, e.g. `("bias",)`.
        tracks: take a model with running statistics (batch norm): they are a vector of their own, `statistics`.

    Example:
        >>> flat = FlatModel(nn.Linear(3, 2))
        >>> flat.d, flat.x.shape
        (8, torch.Size([8]))
    """

    def __init__(self, model: nn.Module, no_decay: Sequence[str] = (), tracks: bool = False) -> None:
        self.model, self.no_decay = model, (no_decay,) if isinstance(no_decay, str) else tuple(no_decay)
        named = dict(model.named_parameters())  # removes duplicates, so tied parameters come once
        _refuse(model, named, tracks)
        trainable = {name: p for name, p in named.items() if p.requires_grad}
        self.names, self.parameters = list(trainable), list(trainable.values())
        self.dtype = self.parameters[0].dtype
        for p in self.parameters:
            self.dtype = torch.promote_types(self.dtype, p.dtype)
        self.device = self.parameters[0].device
        self.sizes = [p.numel() for p in self.parameters]
        self.shapes = [p.shape for p in self.parameters]
        self.d = sum(self.sizes)
        self.x = torch.cat([p.detach().reshape(-1).to(self.dtype) for p in self.parameters])
        self.decay = self._decay_mask(self.no_decay)
        self.statistics = Statistics(model, self.dtype)
        self._buffers = {name: (b, version(b)) for name, b in model.named_buffers()}
        self.load(self.x)

    def _decay_mask(self, no_decay: tuple[str, ...]) -> torch.Tensor | None:
        """1 where weight decay applies, or None where it applies everywhere."""
        unused = [end for end in no_decay if not any(name.endswith(end) for name in self.names)]
        if unused:
            raise UserError(f"no_decay: {unused[0]!r} ends no parameter's name; the names are {', '.join(self.names)}")
        if not no_decay:
            return None
        ones = [float(not name.endswith(no_decay)) for name in self.names]
        return torch.repeat_interleave(torch.tensor(ones, dtype=self.dtype), torch.tensor(self.sizes)).to(self.device)

    @property
    def size(self) -> str:
        """How many parameters there are, in words."""
        frozen = sum(p.numel() for p in self.model.parameters() if not p.requires_grad)
        return f"{self.d:,} parameters" + (f" and {frozen:,} frozen ones" if frozen else "")

    def load(self, x: torch.Tensor) -> None:
        """Make the parameters views of x (no copy but for parameters of another dtype); what follows them in x are
        running statistics."""
        if len(x) > self.d:
            self.statistics.put(x[self.d :])
            x = x[: self.d]
        parts = x.split(self.sizes)  # type: ignore[no-untyped-call]
        for p, part, shape in zip(self.parameters, parts, self.shapes, strict=True):
            p.data = part.view(shape) if p.dtype == x.dtype else part.view(shape).to(p.dtype)

    @contextmanager
    def apart(self) -> Iterator[None]:
        """The model as it was at first, its parameters in memory of their own: a view is pickled with its vector."""
        self.load(torch.cat([self.x, self.statistics.first.to(self.x)]) if self.statistics else self.x)
        for p in self.parameters:
            p.data = p.data.clone()
        try:
            yield
        finally:
            self.load(self.x)

    def outputs(self, x: torch.Tensor, inputs: torch.Tensor) -> Any:
        """What the model at x says, without a graph behind it."""
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
        """Write the gradient of the loss at x, plus a term of the model's outputs, into `out`; returns the loss."""
        self.load(x)
        with torch.enable_grad():  # the caller may be inside torch.no_grad()
            outputs = self.model(inputs)
            value = loss(outputs, targets)
            whole = value if term is None else value + term(outputs)
            grads = torch.autograd.grad(whole, self.parameters, allow_unused=True)
        parts = out.split(self.sizes)  # type: ignore[no-untyped-call]
        for g, part, shape in zip(grads, parts, self.shapes, strict=True):
            part.view(shape).copy_(g) if g is not None else part.zero_()
        return value.detach()

    def hvp(
        self, x: torch.Tensor, v: torch.Tensor, inputs: torch.Tensor, targets: torch.Tensor, loss: Loss
    ) -> torch.Tensor:
        """Hessian of the loss at x times v, by double backward."""
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


def _refuse(model: nn.Module, named: dict[str, nn.Parameter], tracks: bool) -> None:
    """Raise a UserError that names what a flat vector cannot hold."""
    if not tracks:
        refuse_tracking(model)
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
