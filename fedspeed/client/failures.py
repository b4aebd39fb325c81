"""fedspeed/client/failures.py."""

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
    """What to say when a client raises."""
    return ClientFailed(
        f"{type(work.method).__name__}: round {job.t + 1}, client {job.client}, step {k} of {steps}: {reason(error)}; "
        f"inputs of shape {work.data.shape}, {work.data.sizes[job.client]} samples"
    )


def diverged(work: Work, job: Job, steps: int, losses: list[float], down: Any, client: Any) -> Diverged:
    """What to say when a client's update is not finite: whether its data, what it was given, or its rate is to blame.

    Args:
        losses: at the first oracle call of each step; none of a method that makes no call.
        client: its state; a method may have changed it on the way.
    """
    name, rows, plan = type(work.method).__name__, work.data.rows(job.client), work.plan
    for what, a in (("inputs", work.data.x), ("targets", work.data.y)):
        own = a[to_device(rows, a.device)] if a.is_floating_point() else None
        if own is not None and not all_finite((own,)):
            bad = rows[int((~own.reshape(len(rows), -1).isfinite()).any(1).nonzero()[0, 0])]
            return Diverged(
                f"{name}: the data of client {job.client} hold NaN or Inf (found in round {job.t + 1}: {what} of row "
                f"{bad}); clean them, the learning rate is not to blame"
            )
    told = f"{name}: client {job.client} diverged (NaN or Inf) in round {job.t + 1}"
    clip = 10.0 if not plan.clip or plan.clip > 10 else plan.clip / 10
    cure = f"try a lower --lr (now {job.lr:.4g}), fewer local steps (now {steps}) or --clip {clip:g}"
    most = large(work.flat.x)
    found = {**grown("the server's", method_part(down), most), **grown("its own", method_part(client), most)}
    worst = max((what for what in found if found[what] < math.inf), key=lambda what: found[what], default="")
    if worst:
        return Diverged(
            f"{told}; {worst.replace('.', ' ', 1)} had run away to a norm of {found[worst]:.3g}; {cure} from the start"
        )
    if not losses:
        return Diverged(f"{told}; {cure}")
    first = losses[0]
    if not math.isfinite(first):
        blamed = f"the server's step in round {job.t}" if job.t else "the first model, or the scale of the inputs,"
        return Diverged(f"{told}; its loss is {first} before any step: {blamed} is to blame, not the local rate")
    bad = next((k for k, loss in enumerate(losses, 1) if not math.isfinite(loss)), 0)
    last = losses[bad - 2 if bad else -1]
    course = f"is {losses[bad - 1]} at step {bad}" if bad else "is finite, what came of the last step is not"
    return Diverged(f"{told}; {cure}: its loss was {first:.3g} at first, {last:.3g} at last, and {course}")
