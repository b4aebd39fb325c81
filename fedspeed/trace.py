"""What one client does in its turn, written down step by step: hooks that look on and change nothing."""

from __future__ import annotations

import pdb
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, Self

import torch

from .contract import Hooks
from .engines.alone import row as row_of
from .methods.base import Grad, Local
from .vec import accurate

PARTS = ("gradients", "method", "upload")
LOOPS = ("run_client", "run")
"""The functions that hold a local loop, of the engines `loop` and `block`."""


@dataclass(frozen=True)
class Step:
    """One local step.

    Args:
        samples: the numbers of the minibatch's samples, in the order of the training data.
        loss: at the step's first gradient; None if it asked for none.
        gradients: the norm of each gradient that it was given.
        direction: the norm of the direction that it took, without weight decay.
    """

    samples: list[int]
    loss: float | None
    gradients: list[float]
    direction: float


@dataclass
class Trace:
    """What was seen.

    Args:
        row: the client's in a block of `rows` clients; None where it is alone with its vectors.
        debug: stop in the debugger before the first step.
    """

    row: int | None
    rows: int
    debug: bool = False
    left: bool = False  # the debugger was left by `quit`
    steps: list[tuple[float | None, list[float], float]] = field(default_factory=list)
    x: torch.Tensor | None = None
    up: Any = None
    client: Any = None
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))

    def own(self, a: torch.Tensor) -> torch.Tensor | None:
        """The client's part of what a hook was given; None where the call is about others."""
        if self.row is None:
            return a if a.ndim == 1 else None
        return a[self.row] if a.ndim == 2 and len(a) == self.rows else None

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Count what a block takes."""
        begun = time.perf_counter()
        yield
        self.seconds[part] += time.perf_counter() - begun


class Traced(Hooks):
    """Hooks that write into a trace."""

    trace: Trace

    @classmethod
    def around(cls, hooks: Hooks, trace: Trace) -> Self:
        """The same hooks, traced; they may be of a class of their own, as those for running statistics are."""
        both: type[Self] = type(cls.__name__, (cls, type(hooks)), {})
        traced = object.__new__(both)
        traced.__dict__.update(hooks.__dict__)
        traced.trace = trace
        return traced

    def start(self, down: Any, client: Any) -> torch.Tensor:
        """`Hooks.start`; then the debugger, in the function that holds the loop."""
        start = super().start(down, client)
        if self.trace.debug:
            self.trace.debug = False
            frame = sys._getframe()
            while frame.f_back is not None and frame.f_code.co_name not in LOOPS:
                frame = frame.f_back
            Debugger(self.trace, frame).set_trace(frame)
        return start

    def direction(self, x: torch.Tensor, grad: Grad, down: Any, client: Any) -> torch.Tensor:
        """`Hooks.direction`, with losses and norms."""
        trace, norms = self.trace, list[float]()
        if trace.own(x) is None:
            return super().direction(x, grad, down, client)
        inside = trace.seconds["gradients"]

        def asked(x: torch.Tensor, fraction: float = 1.0, **teacher: Any) -> torch.Tensor:
            with trace.timed("gradients"):
                g = grad(x, fraction, **teacher)
            norms.append(_norm(trace.own(g)))
            return g

        with trace.timed("method"):
            direction = super().direction(x, asked, down, client)
        trace.seconds["method"] -= trace.seconds["gradients"] - inside
        oracle: Any = getattr(grad, "grad", grad)  # a block that is watched has one around it
        loss = float(oracle.losses[-1] if trace.row is None else oracle.losses[-1][trace.row]) if norms else None
        trace.steps.append((loss, norms, _norm(trace.own(direction))))
        return direction

    def upload(self, xK: torch.Tensor, down: Any, client: Any, run: Local) -> tuple[Any, Any]:
        """`Hooks.upload`, with what came of it."""
        trace = self.trace
        own = trace.own(xK)
        if own is None:
            return super().upload(xK, down, client, run)
        trace.x = own.clone()
        with trace.timed("upload"):
            up, kept = super().upload(xK, down, client, run)
        trace.up, trace.client = (row_of(tree, trace.row or 0) for tree in (up, kept))
        return up, kept


class Debugger(pdb.Pdb):
    """Python's own, which stops in one function first, not in what that has called, and says whether it was left by
    `quit`: that is no failure of the client's."""

    def __init__(self, trace: Trace, first: FrameType) -> None:
        super().__init__()
        self.trace = trace
        self.first: FrameType | None = first

    def set_step(self) -> None:
        """Stop at the next line: at first, of the one function."""
        if self.first is None:
            super().set_step()
        else:
            self.set_next(self.first)
            self.first = None

    def set_quit(self) -> None:
        """Leave."""
        self.trace.left = True
        super().set_quit()


def _norm(a: torch.Tensor | None) -> float:
    return 0.0 if a is None else float(torch.linalg.vector_norm(a, dtype=accurate(a)))
