"""Errors about a client's turn: it raised, or its update is not finite; each names the likely reason."""

from __future__ import annotations

import math
from typing import Any

from ..errors import ClientFailed, Diverged
from ..methods.source import reason
from ..utils.devices import to_device
from .batch_norm import method_part
from .trees import all_finite, grown, large
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
