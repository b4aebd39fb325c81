"""Checks of the block engine: a hook that mixes clients, which it could not do in the loop, ends the run.

A hook's call on a block is repeated for one row at a time, as the loop would call it: with a vector instead of a block,
and an oracle that plays back the gradients which that row got. Both must agree to rounding. This finds a norm over the
whole block, a sort over clients, random numbers of another shape, or a state shared by mistake; the error names the
hook.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ..errors import UserError
from ..methods.base import Grad, Local
from ..methods.source import built_in, defined, reason
from .hooks import Hooks
from .trees import named, tree_leaves, tree_map


class Call(NamedTuple):
    """One call of the oracle, for the checked rows: points, part of the minibatch, gradients, a teacher's arguments."""

    points: torch.Tensor
    fraction: float
    gradients: torch.Tensor
    teacher: torch.Tensor | None
    pulled: dict[str, float]


class Recorder:
    """The block's oracle, which records the points and gradients of some rows."""

    def __init__(self, grad: Grad, rows: list[int]) -> None:
        self.grad, self.rows = grad, rows
        self.calls: list[Call] = []

    def __call__(self, x: torch.Tensor, fraction: float = 1.0, **how: Any) -> torch.Tensor:
        points = x[self.rows]  # a copy: the hook may overwrite x before it is compared
        g = self.grad(x, fraction, **how)
        self.calls.append(Call(points, fraction, g[self.rows], how.pop("teacher", None), how))
        return g


class Playback:
    """The oracle of one row alone: it returns the recorded gradients, and raises if it is called otherwise."""

    def __init__(self, calls: list[Call], at: int) -> None:
        self.calls = calls
        self.at = at
        self.used = 0

    def __call__(
        self, x: torch.Tensor, fraction: float = 1.0, *, teacher: torch.Tensor | None = None, **pulled: float
    ) -> torch.Tensor:
        if self.used == len(self.calls):
            raise RowsMixed(f"asks for gradient {self.used + 1} of {len(self.calls)}")
        call = self.calls[self.used]
        self.used += 1
        if fraction != call.fraction:
            raise RowsMixed(f"asks for {fraction:g} of the minibatch, not for {call.fraction:g}")
        if (teacher is None) != (call.teacher is None) or pulled != call.pulled:
            raise RowsMixed(f"asks for another teacher's pull in gradient {self.used}")
        if teacher is not None and call.teacher is not None:
            _compare(f"the teacher of gradient {self.used}", call.teacher, teacher)
        _compare(f"the point of gradient {self.used}", call.points[self.at], x, call.gradients[self.at])
        return call.gradients[self.at].clone()


class RowsMixed(Exception):
    """A row alone gives another result than in its block."""


@dataclass
class CheckedHooks:
    """Hooks of a block that repeat each call for some of its rows alone, and compare.

    Args:
        clients: of the block, in row order.
        own: the method is a user's: `start` and `upload`, called once, are checked in every row, `direction` in two
            rows per step, in turn (a maximum over the block is right for the row that has it). Otherwise one row per
            call is checked.
        everything: check every row in every step.
        turn: where the turns begin.
    """

    hooks: Hooks
    clients: list[int]
    own: bool
    everything: bool
    turn: int

    def start(self, down: Any, client: Any) -> torch.Tensor:
        """Call `Hooks.start`, and check rows of the result."""
        rows = self._rows(len(self.clients))
        alone = [row(client, i) for i in rows]
        start = self.hooks.start(down, client)
        for i, own in zip(rows, alone, strict=True):
            with self._refusing("start", i):
                _compare("the first point", start[i] if start.ndim == 2 else start, self.hooks.start(down, own))
        return start

    def direction(self, x: torch.Tensor, grad: Grad, down: Any, client: Any) -> torch.Tensor:
        """Call `Hooks.direction`, and check rows of the result and of the states."""
        rows = self._rows(2)
        recorder = Recorder(grad, rows)
        points, alone = x[rows], [row(client, i) for i in rows]
        direction = self.hooks.direction(x, recorder, down, client)
        for at, (i, own) in enumerate(zip(rows, alone, strict=True)):
            with self._refusing("direction", i):
                playback = Playback(recorder.calls, at)
                found = self.hooks.direction(points[at], playback, down, own)
                if playback.used < len(recorder.calls):
                    raise RowsMixed(f"asks for {playback.used} of {len(recorder.calls)} gradients")
                _compare("the direction", direction[i], found, points[at])
                _compare_trees("Client", row(client, i), own)
        return direction

    def upload(self, xK: torch.Tensor, down: Any, client: Any, run: Local) -> tuple[Any, Any]:
        """Call `Hooks.upload`, and check rows of the result."""
        rows = self._rows(len(self.clients))
        points, alone = xK[rows], [row(client, i) for i in rows]
        up, kept = self.hooks.upload(xK, down, client, run)
        for at, (i, own) in enumerate(zip(rows, alone, strict=True)):
            with self._refusing("upload", i):
                sent, stored = self.hooks.upload(points[at], down, own, run._replace(client=self.clients[i]))
                _compare_trees("Up", row(up, i), sent, points[at])
                _compare_trees("Client", row(kept, i), stored, points[at])
        return up, kept

    def _rows(self, of_own: int) -> list[int]:
        """Return the rows that the next call checks: `of_own` of them for a user's method."""
        self.turn += 1
        n = len(self.clients)
        many = n if self.everything else min(n, of_own) if self.own else 1
        return sorted({(self.turn + i) % n for i in range(many)})

    @contextmanager
    def _refusing(self, hook: str, i: int) -> Iterator[None]:
        """Keep the random state while a hook runs on row i alone, and turn its failure into a UserError."""
        state = torch.get_rng_state()
        try:
            yield
        except Exception as error:
            why = str(error) if isinstance(error, RowsMixed | UserError) else reason(error)
            method = self.hooks.method
            raise UserError(
                f"{type(method).__name__}.{hook} does on a block of {len(self.clients)} clients what it does not do on "
                f"one (client {self.clients[i]} alone: {why}); let norms, means and sorts go over the last axis "
                f"(dim=-1, keepdim=True) and draw random numbers from rng(run.seed, ..., run.t, i) for i in "
                f"run.clients, or use --engine loop ({defined(method, hook)})"
            ) from error
        finally:
            torch.set_rng_state(state)


def watch(hooks: Hooks, clients: list[int], first: bool, turn: int) -> Hooks | CheckedHooks:
    """Return the hooks for a block: any method is checked in its first block, a user's in all, the first one fully."""
    own = not built_in(hooks.method)
    return CheckedHooks(hooks, clients, own, everything=own and first, turn=turn) if own or first else hooks


def row(tree: Any, i: int) -> Any:
    """Return a private copy of row i; a field that the clients share belongs to every row."""
    return tree_map(lambda a: (a[i] if a.ndim == 2 else a).clone(), tree)


def _compare_trees(what: str, block: Any, alone: Any, *scale: torch.Tensor) -> None:
    for (name, a), b in zip(named("", block), tree_leaves(alone), strict=True):
        _compare(f"{what}.{name}", a, b, *scale)


def _compare(what: str, block: torch.Tensor, alone: torch.Tensor, *scale: torch.Tensor) -> None:
    """Raise unless two vectors are the same to rounding, which is relative to what they were computed from."""
    if torch.equal(block, alone):
        return
    if block.shape != alone.shape:
        raise RowsMixed(f"{what} has shape {tuple(alone.shape)}, not {tuple(block.shape)}")
    size = max(float(a.double().norm()) for a in (block, alone, *scale))
    apart = float((block.double() - alone.double()).norm())
    if apart > torch.finfo(block.dtype).eps ** (2 / 3) * size:  # False for NaN, which ends the turn by itself
        raise RowsMixed(f"{what} is off by {apart:.2g}, of {size:.2g}")
