"""The source of a NaN: a client's turn that ended in NaN or Inf is run again, and the user's hooks are checked.

A hook that makes NaN or Inf of finite values of usual size has a mistake in it; a lower rate would not help. Nothing
here runs while all values are finite.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch

from ..errors import Diverged
from ..methods.base import Grad, Local, Method
from ..methods.source import built_in, defined, wrote
from .hooks import Hooks
from .local_loop import run_client
from .trees import all_finite, tree_leaves
from .work import Job, Work

USUAL = 1e12
"""Largest size of numbers in a run that does not diverge: its square, summed over a model, is far from overflow."""


def blamed(work: Work, job: Job, down: Any, state: Callable[[int], Any], error: Diverged) -> Diverged:
    """Return the error of a turn that ended in NaN or Inf; it names a user's hook that made them of finite values.

    Args:
        state: returns a private copy of a client's state.
        error: the error to return if no hook did.
    """
    if built_in(work.method):
        return error
    again = copy.copy(work)
    again.__dict__["hooks"] = NanHooks(work.hooks, job)
    client = state(job.client)
    for hook, made in (("broadcast", down), ("init_client", client)):  # servers and stored states are always finite
        if not all_finite(made) and wrote(work.method, hook):
            return made_nan(work.method, hook, f"round {job.t + 1}")
    try:
        run_client(again, job, down, client)
    except Found as found:
        return made_nan(work.method, *found.args)
    except Exception:  # reported already, by the turn itself
        return error
    return error


def server_blamed(method: Method, t: int, given: Any, mean: Any, received: Any) -> Diverged | None:
    """Return the error of round t = 0, 1, ... if a user's server hook made NaN or Inf of finite values, else None.

    Args:
        given: the server's state before the round.
        mean, received: the mean of the uploads, before and after the hook `received`.
    """
    hook = "received" if not all_finite(received) else "update"
    if not wrote(method, hook) or not usual(given, mean):
        return None
    return made_nan(method, hook, f"round {t + 1}")


def made_nan(method: Method, hook: str, when: str) -> Diverged:
    """Return the error about a hook that made NaN or Inf of finite values."""
    return Diverged(
        f"{type(method).__name__}.{hook} made NaN or Inf of finite values in {when}; look for a division by zero, or a "
        f"root or logarithm of what has none: the learning rate is not to blame ({defined(method, hook)})"
    )


class Found(Diverged):
    """The hook that made NaN or Inf of finite values, and when; a `Diverged`, so that `run_client` passes it on."""


class NanHooks:
    """The hooks of a client's turn; the first that makes NaN or Inf of finite values raises `Found`."""

    def __init__(self, hooks: Hooks, job: Job) -> None:
        self.hooks, self.job, self.step = hooks, job, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.hooks, name)

    def with_method(self, method: Method) -> NanHooks:
        """Return the same checks around `Hooks.with_method`."""
        return NanHooks(self.hooks.with_method(method), self.job)

    def start(self, down: Any, client: Any) -> torch.Tensor:
        """Call `Hooks.start`, and check the result."""
        good = usual(down, client)
        x = self.hooks.start(down, client)
        self._judge("start", good, (x,))
        return x

    def direction(self, x: torch.Tensor, grad: Grad, down: Any, client: Any) -> torch.Tensor:
        """Call `Hooks.direction`, and check the result and the points at which it asks for gradients."""
        self.step += 1
        seen = [usual(x, down, client)]

        def oracle(x: torch.Tensor, fraction: float = 1.0, **how: Any) -> torch.Tensor:
            self._judge("direction", all(seen), (x,))
            g = grad(x, fraction, **how)
            seen.append(usual(g))  # at once, because the hook may overwrite it
            return g

        found = self.hooks.direction(x, oracle, down, client)
        self._judge("direction", all(seen), (found, client))
        return found

    def upload(self, xK: torch.Tensor, down: Any, client: Any, run: Local) -> tuple[Any, Any]:
        """Call `Hooks.upload`, and check the result."""
        good = usual(xK, down, client)
        both = self.hooks.upload(xK, down, client, run)
        self._judge("upload", good, both)
        return both

    def _judge(self, hook: str, good: bool, made: Any) -> None:
        method = self.hooks.method
        if good and not all_finite(made) and wrote(method, hook):
            step = f", step {self.step}" if hook == "direction" else ""
            raise Found(hook, f"round {self.job.t + 1}, client {self.job.client}{step}")


def usual(*trees: Any) -> bool:
    """Return whether all numbers are finite and at most `USUAL`.

    Example:
        >>> usual(torch.ones(2)), usual(torch.tensor([1e30])), usual(torch.ones(2) / 0 * 0)
        (True, False, False)
    """
    return all(not a.numel() or float(a.abs().max()) <= USUAL for a in tree_leaves(trees))  # False for NaN
