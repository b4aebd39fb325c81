"""Checkpoints against rounds: whose states they hold, and what a server keeps as a mean over all clients."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from operator import attrgetter
from typing import TYPE_CHECKING

import torch

from .carried import of_method
from .rundir import ROUNDS
from .tree_bytes import read_state
from .vec import has_leaves

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
    x0 = simulation.x0.cpu()
    weights = sizes / sizes.sum() if simulation.plan.weighting == "samples" else 0 * sizes + 1 / len(sizes)
    start = simulation.work.hooks.init_client(x0)
    at_first = client_part(of_method(start)).double()
    value = server_part(of_method(read_state(saved.server, simulation.server)))
    mean = torch.zeros_like(at_first)
    largest = float(value.abs().max())
    turns = 0.0
    often = Counter(i for record in records[: saved.t] for i in record.cohort)
    for i in range(len(sizes)):
        state = at_first
        if i in saved.entries:
            state = client_part(of_method(saved.state(i, start))).double()
        mean += float(weights[i]) * state
        largest = max(largest, float(state.abs().max()))
        turns += float(weights[i]) * often[i]
    stored = x0.dtype if simulation.plan.state_dtype == "same" else getattr(torch, simulation.plan.state_dtype)
    limit = 16 * torch.finfo(stored).eps * largest * (1 + turns)  # each turn of a client rounds its state once
    off = float((mean - value.double()).abs().max())
    said = f"round {saved.t}: the server's {is_at} is the mean of all clients' {mean_of}"
    wrong = f"{said}: off by {off:.3g}, rounding explains {limit:.3g}; a state or the server's vector was changed"
    return f"{said} (off by {off:.1g}, rounding)", [] if off <= limit else [wrong]


def counted(saved: Saved, simulation: Simulation, records: list[Record]) -> Iterator[str]:
    """Whose state is not of the last round in which its reply was counted."""
    turns: dict[int, int] = {}
    if has_leaves(simulation.work.hooks.init_client(simulation.x0)):
        turns = {i: r.round - 1 for r in records[: saved.t] for i in r.cohort if i not in r.dropped}
    kept = saved.generations
    for client in sorted(turns.keys() | kept.keys()) if turns != kept else ():
        then, now = (f"of round {found[client] + 1}" if client in found else "none" for found in (turns, kept))
        if then != now:
            yield f"round {saved.t}: by {ROUNDS} the state of client {client} is {then}, in the checkpoint {now}"
