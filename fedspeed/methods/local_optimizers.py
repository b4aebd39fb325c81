"""Local optimisers: what a client's steps make of its directions g_1, g_2, ..., by name: `momentum:0.9`, `adam`.

Each is that of `torch.optim`, on the whole vector of the model, element by element: rows of a block are clients, and
do not meet. Its state begins at 0 in every client's turn and ends with it; nothing is kept between rounds, nothing is
sent. A method whose algebra needs plain SGD says why (`Method.reads_gradient_from_D`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from functools import cache
from typing import Any, ClassVar

from ..errors import UserError, unknown
from ..utils.checked_fields import Params, param, parse_pairs
from .base import Vec

EXPECTED = "expected sgd, momentum:0.9, nesterov:0.9, adam, adamw or adam:beta1=0.9,beta2=0.999,eps=1e-8"


@dataclass(frozen=True)
class SGD(Params):
    """Plain steps, x -= lr g."""

    decoupled: ClassVar[bool] = False  # weight decay shrinks x by itself; otherwise mix wd x is a part of g
    tune_lr: ClassVar[str] = ""  # the rates that `fedspeed tune` tries; "" for those of the plan

    def step(self, g: Vec, kept: list[Vec], k: int) -> Vec:
        """Return the vector u of the step `x -= lr u`.

        Args:
            g: the direction of step k = 1, 2, ... of a turn; it stays as it is.
            kept: the state of the turn, empty at first, which changes.
        """
        return g


@dataclass(frozen=True)
class Momentum(SGD):
    """Heavy-ball momentum: m = beta m + g, x -= lr m."""

    beta: float = param(0.9, "[0, 1)", "beta, the momentum's memory")
    tune_lr: ClassVar[str] = "0.001..0.1:log"  # many steps along g move x by lr / (1 - beta) g each

    def step(self, g: Vec, kept: list[Vec], k: int) -> Vec:
        return state(g, kept, 1)[0].mul_(self.beta).add_(g)


@dataclass(frozen=True)
class Nesterov(Momentum):
    """Nesterov's momentum as torch has it: m = beta m + g, x -= lr (g + beta m)."""

    def step(self, g: Vec, kept: list[Vec], k: int) -> Vec:
        return super().step(g, kept, k).mul(self.beta).add_(g)


@dataclass(frozen=True)
class Adam(SGD):
    """Adam: m = beta1 m + (1 - beta1) g, v = beta2 v + (1 - beta2) g^2, both without their bias towards 0,

        x -= lr (m / (1 - beta1^k)) / (sqrt(v / (1 - beta2^k)) + eps)

    Example:
        >>> Adam(beta1=0.8)
        Adam(beta1=0.8, beta2=0.999, eps=1e-08)

    Reference: Kingma and Ba, Adam: A Method for Stochastic Optimization, ICLR 2015.
    """

    beta1: float = param(0.9, "[0, 1)", "beta1, the memory of the first moment")
    beta2: float = param(0.999, "[0, 1)", "beta2, the memory of the second moment")
    eps: float = param(1e-8, "[1e-30, inf)", "eps, added to the root of the second moment")
    tune_lr: ClassVar[str] = "0.0001..0.01:log"  # a step moves every entry of x by about lr

    def step(self, g: Vec, kept: list[Vec], k: int) -> Vec:
        m, v = state(g, kept, 2)
        m.mul_(self.beta1).add_(g, alpha=1 - self.beta1)
        v.mul_(self.beta2).addcmul_(g, g, value=1 - self.beta2)
        root = v.sqrt().div_(math.sqrt(1 - self.beta2**k)).add_(self.eps)
        return (m / (1 - self.beta1**k)).div_(root)


@dataclass(frozen=True)
class AdamW(Adam):
    """Adam whose weight decay does not enter g: x -= lr mix wd x, then Adam's step.

    Reference: Loshchilov and Hutter, Decoupled Weight Decay Regularization, ICLR 2019.
    """

    decoupled: ClassVar[bool] = True


OPTIMIZERS: dict[str, type[SGD]] = {cls.__name__.lower(): cls for cls in (SGD, Momentum, Nesterov, Adam, AdamW)}
"""The values of `local_optimizer` by name."""


def state(g: Vec, kept: list[Vec], count: int) -> list[Vec]:
    """Return the vectors that a turn keeps; in its first step `count` vectors of zeros."""
    if not kept:
        kept.extend(g.new_zeros(g.shape) for _ in range(count))
    return kept


@cache
def local_optimizer(text: str) -> SGD:
    """Return the optimiser that a text names; a value without a name is that of its first field.

    Example:
        >>> local_optimizer("momentum:0.5"), local_optimizer("adam:eps=1e-6")
        (Momentum(beta=0.5), Adam(beta1=0.9, beta2=0.999, eps=1e-06))
    """
    name, colon, rest = text.strip().partition(":")
    cls = OPTIMIZERS.get(name.strip().lower())
    if cls is None:
        raise unknown("local_optimizer", name, OPTIMIZERS)
    names = [field.name for field in fields(cls)]
    pairs = parse_pairs(rest)
    if len(pairs) == 1 and not pairs[0][1] and names:  # momentum:0.9
        pairs = [(names[0], pairs[0][0])]
    wrong = UserError(f"local_optimizer: {EXPECTED}, found {text!r}")
    if (colon and not pairs) or len(dict(pairs)) < len(pairs) or (pairs and not names):
        raise wrong
    try:
        return cls.from_fields({key: float(value) for key, value in pairs})
    except UserError as error:  # a ValueError too
        raise UserError(f"local_optimizer: {error}") from None
    except ValueError:
        raise wrong from None


def optimizer_text(given: Any) -> str:
    """Return a local optimiser in its one spelling: fields with another value than their default, or the only one.

    Example:
        >>> optimizer_text("momentum"), optimizer_text("Adam : beta1=0.9, eps=1e-6"), optimizer_text("sgd")
        ('momentum:0.9', 'adam:eps=1e-06', 'sgd')
    """
    if not isinstance(given, str):
        raise UserError(f"local_optimizer: {EXPECTED}, found {given!r}")
    found = local_optimizer(given)
    name, values = type(found).__name__.lower(), found.fields()
    if len(values) == 1:
        return f"{name}:{next(iter(values.values()))!r}"
    changed = [f"{f.name}={values[f.name]!r}" for f in fields(found) if values[f.name] != f.default]
    return f"{name}:{','.join(changed)}" if changed else name
