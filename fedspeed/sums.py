"""What a server keeps as a mean over all clients, against the mean of what the clients keep."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import torch

from .statefile import read_state

if TYPE_CHECKING:
    from .manifest import Saved
    from .method import Method
    from .record import Record
    from .server import Simulation


def sums(saved: Saved, simulation: Simulation, records: list[Record]) -> tuple[str, list[str]] | None:
    """What was compared at a checkpoint, and how it is wrong; None for a method without such a mean."""
    kept = running_sum(simulation.method)
    if kept is None:
        return None
    mean_of, is_at = kept
    sizes, method, x0 = simulation.data.sizes, simulation.method, simulation.x0.cpu()
    weights = sizes / sizes.sum() if simulation.plan.weighting == "samples" else 0 * sizes + 1 / len(sizes)
    start = method.init_client(x0)
    at_first = getattr(getattr(start, "base", start), mean_of).double()
    value = getattr(read_state(saved.server, simulation.server), is_at)
    mean, largest, turns = torch.zeros_like(at_first), float(value.abs().max()), 0.0
    often = Counter(i for record in records[: saved.t] for i in record.cohort)
    for i in range(len(sizes)):
        state = at_first
        if i in saved.entries:
            kept_state = saved.state(i, start)
            state = getattr(getattr(kept_state, "base", kept_state), mean_of).double()
        mean += float(weights[i]) * state
        largest = max(largest, float(state.abs().max()))
        turns += float(weights[i]) * often[i]
    stored = x0.dtype if simulation.plan.state_dtype == "same" else getattr(torch, simulation.plan.state_dtype)
    limit = 16 * torch.finfo(stored).eps * largest * (1 + turns)  # each turn of a client rounds its state once
    off = float((mean - value.double()).abs().max())
    said = f"round {saved.t}: the server's {is_at} is the mean of all clients' {mean_of}"
    wrong = f"{said}: off by {off:.3g}, rounding explains {limit:.3g}; a state or the server's vector was changed"
    return f"{said} (off by {off:.1g}, rounding)", [] if off <= limit else [wrong]


def running_sum(method: Method) -> tuple[str, str] | None:
    """(field of the client, field of the server that is its mean over all clients), or None if there is none.

    Example:
        >>> from fedspeed.methods import METHODS
        >>> running_sum(METHODS["scaffold"]()), running_sum(METHODS["fedavg"]())
        (('c', 'c'), None)
    """
    from .methods import FedADMM, FedDyn, FedGamma, FedInit, FedSMOO, FedSpeed, Scaffold

    base = method.base if isinstance(method, FedInit) else method
    if isinstance(base, FedADMM):
        return ("xh", "x") if base.variant == "wang" else None
    if isinstance(base, FedSpeed):
        return ("h", "H") if base.correction and base.server == "all" else None
    if isinstance(base, Scaffold | FedGamma):
        return ("c", "c")
    return ("h", "H") if isinstance(base, FedDyn | FedSMOO) else None
