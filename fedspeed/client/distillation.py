"""Distillation in the gradient oracle: a term that pulls class probabilities towards those of a teacher vector."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any, NamedTuple

import torch

from ..errors import UserError
from .flat_model import FlatModel

PASSES = 3
"""Cost of a gradient in forward passes; `server.simulated_time.gradient_flops` counts the same."""


class TeacherTerm(NamedTuple):
    """The term weight tau^2 KL(softmax(logits / tau) || softmax(outputs / tau)), the mean over the minibatch.

    Classes are the axis after the minibatch's, as cross-entropy has them.

    Example:
        >>> pull = TeacherTerm(torch.tensor([[0.0, 1.0]]), weight=2.0, tau=3.0)
        >>> bool(pull.term(torch.tensor([[5.0, 6.0]])).abs() < 1e-6)  # probabilities know no shift
        True
    """

    logits: Any
    weight: float
    tau: float

    def term(self, outputs: Any) -> torch.Tensor:
        """Return the term, to be differentiated by the outputs."""
        require_logits(outputs)
        p, q = (torch.log_softmax(a / self.tau, 1) for a in (self.logits, outputs))
        apart = torch.nn.functional.kl_div(q, p, reduction="none", log_target=True)
        return self.weight * self.tau**2 * apart.sum(1).mean()

    def slope(self, outputs: torch.Tensor) -> torch.Tensor:
        """Return its gradient by the outputs (clients, batch, classes) of a block."""
        require_logits(outputs[0])
        q, p = (torch.softmax(a / self.tau, -1) for a in (outputs, self.logits))
        return q.sub_(p).mul_(self.weight * self.tau / outputs.shape[1])


def require_logits(outputs: Any) -> None:
    """Raise unless a model's outputs are scores of at least two classes."""
    good = isinstance(outputs, torch.Tensor) and outputs.is_floating_point()
    if not good or outputs.ndim < 2 or outputs.shape[1] < 2:
        found = f"of shape {tuple(outputs.shape)}" if isinstance(outputs, torch.Tensor) else type(outputs).__name__
        raise UserError(
            f"grad(x, teacher=...) compares class probabilities: expected outputs of shape (batch, classes) with two "
            f"classes or more, found {found}; use another model, or a method without a teacher"
        )


def check_teacher(flat: FlatModel, classes: int | None, method: str, teacher: Any, pull: Any, tau: Any) -> bool:
    """Return whether a teacher has any pull; raise for arguments of the oracle that are not valid, or no classes."""
    if classes is None:
        raise UserError(
            f"{method}: grad(x, teacher=...) compares class probabilities, and these data have no classes; use a "
            f"method without a teacher, or data whose targets are class numbers"
        )
    for name, value, above in (("pull", pull, -1.0), ("tau", tau, 0.0)):
        real = isinstance(value, Real) and not isinstance(value, bool)
        if not real or not (max(above, 0.0) <= value < math.inf and value > above):
            wanted = "> 0" if above == 0 else ">= 0"
            raise UserError(f"{method}: grad(x, teacher=...): {name} must be a number {wanted}, got {value!r}")
    vector = isinstance(teacher, torch.Tensor)
    if not vector or tuple(teacher.shape) != (flat.d,) or teacher.dtype != flat.dtype:
        found = f"{teacher.dtype} of shape {tuple(teacher.shape)}" if vector else repr(teacher)
        raise UserError(
            f"{method}: grad(x, teacher=...): the teacher must be one vector for all clients, {flat.dtype} of shape "
            f"({flat.d}), got {found}; send it down with x"
        )
    return bool(pull)
