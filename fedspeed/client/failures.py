"""Errors about a client's turn: it raised, or its update is not finite; each names the likely reason.

A turn that ended in NaN or Inf is run again, and the user's hooks are checked: a hook that makes NaN or Inf of finite
values of usual size has a mistake in it, and a lower rate would not help. Nothing here runs while values are finite.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import torch

from ..errors import ClientFailed, Diverged
from ..methods.base import Grad, Local, Method
from ..methods.source import built_in, defined, reason, wrote
from ..utils.devices import to_device
from .batch_norm import method_part
from .hooks import Hooks
from .trees import all_finite, grown, large, tree_leaves
from .work import Job, Work


def failed(work: Work, job: Job, k: int, steps: int, error: Exception) -> ClientFailed:
    """Return the error about a client whose turn raised."""
    return ClientFailed(
        f"{type(work.method).__name__}: round {job.t + 1}, client {job.client}, step {k} of {steps}: {reason(error)}; "
        f"inputs of shape {work.data.shape}, {work.data.sizes[job.client]} samples"
    )


def diverged(work: Work, job: Job, steps: int, losses: list[float], down: Any, client: Any) -> Diverged:
    """Return the error about a client whose update is not finite: because of its data, the server, or its rate.

    Args:
        losses: at the first oracle call of each step; empty for a method that makes no call.
        client: its state; the method may have changed it meanwhile.
    """
    method, rows, plan = type(work.method).__name__, work.data.rows(job.client), work.plan
    for which, a in (("inputs", work.data.x), ("targets", work.data.y)):
        own = a[to_device(rows, a.device)] if a.is_floating_point() else None
        if own is not None and not all_finite((own,)):
            bad = rows[int((~own.reshape(len(rows), -1).isfinite()).any(1).nonzero()[0, 0])]
            return Diverged(
                f"{method}: the data of client {job.client} hold NaN or Inf (found in round {job.t + 1}: {which} of "
                f"row {bad}); clean them, the learning rate is not to blame"
            )
    what = f"{method}: client {job.client} diverged (NaN or Inf) in round {job.t + 1}"
    clip = 10.0 if not plan.clip or plan.clip > 10 else plan.clip / 10
    advice = f"try a lower --lr (now {job.lr:.4g}), fewer local steps (now {steps}) or --clip {clip:g}"
    most = large(work.flat.x)
    found = {**grown("the server's", method_part(down), most), **grown("its own", method_part(client), most)}
    worst = max((name for name in found if found[name] < math.inf), key=lambda name: found[name], default="")
    if worst:
        return Diverged(
            f"{what}; {worst.replace('.', ' ', 1)} had run away to a norm of {found[worst]:.3g}; {advice} from the "
            f"start"
        )
    if not losses:
        return Diverged(f"{what}; {advice}")
    first = losses[0]
    if not math.isfinite(first):
        blamed = f"the server's step in round {job.t}" if job.t else "the first model, or the scale of the inputs,"
        return Diverged(f"{what}; its loss is {first} before any step: {blamed} is to blame, not the local rate")
    bad = next((k for k, loss in enumerate(losses, 1) if not math.isfinite(loss)), 0)
    last = losses[bad - 2 if bad else -1]
    course = f"is {losses[bad - 1]} at step {bad}" if bad else "is finite, what came of the last step is not"
    return Diverged(f"{what}; {advice}: its loss was {first:.3g} at first, {last:.3g} at last, and {course}")


USUAL = 1e12
"""Largest size of numbers in a run that does not diverge: its square, summed over a model, is far from overflow."""


def blamed(work: Work, job: Job, down: Any, state: Callable[[int], Any], error: Diverged) -> Diverged:
    """Return the error of a turn that ended in NaN or Inf; it names a user's hook that made them of finite values.

    Args:
        state: returns a private copy of a client's state.
        error: the error to return if no hook did.
    """
    from .local_loop import run_client  # which imports this file

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
