"""What a server keeps as a mean over all clients, against the mean of what the clients keep."""

from __future__ import annotations

from collections import Counter
from operator import attrgetter
from typing import TYPE_CHECKING

import torch

from .statefile import read_state

if TYPE_CHECKING:
    from .manifest import Saved
    from .record import Record
    from .server import Simulation


def sums(saved: Saved, simulation: Simulation, records: list[Record]) -> tuple[str, list[str]] | None:
    """What was compared at a checkpoint, and how it is wrong; None for a method without such a mean."""
    if simulation.method.running_mean is None:
        return None
    mean_of, is_at = simulation.method.running_mean
    client_part, server_part = attrgetter(mean_of), attrgetter(is_at)
    sizes = simulation.data.sizes
    method = simulation.method
    x0 = simulation.x0.cpu()
    weights = sizes / sizes.sum() if simulation.plan.weighting == "samples" else 0 * sizes + 1 / len(sizes)
    start = method.init_client(x0)
    at_first = client_part(start).double()
    value = server_part(read_state(saved.server, simulation.server))
    mean = torch.zeros_like(at_first)
    largest = float(value.abs().max())
    turns = 0.0
    often = Counter(i for record in records[: saved.t] for i in record.cohort)
    for i in range(len(sizes)):
        state = at_first
        if i in saved.entries:
            state = client_part(saved.state(i, start)).double()
        mean += float(weights[i]) * state
        largest = max(largest, float(state.abs().max()))
        turns += float(weights[i]) * often[i]
    stored = x0.dtype if simulation.plan.state_dtype == "same" else getattr(torch, simulation.plan.state_dtype)
    limit = 16 * torch.finfo(stored).eps * largest * (1 + turns)  # each turn of a client rounds its state once
    off = float((mean - value.double()).abs().max())
    said = f"round {saved.t}: the server's {is_at} is the mean of all clients' {mean_of}"
    wrong = f"{said}: off by {off:.3g}, rounding explains {limit:.3g}; a state or the server's vector was changed"
    return f"{said} (off by {off:.1g}, rounding)", [] if off <= limit else [wrong]
