"""How local work is computed, wherever that is: the arithmetic, which decides the last bits of a run.

An engine cuts the jobs of a round into chunks, by looking at the jobs alone, and computes one chunk at a time. Chunks
need nothing of each other, so a back end may place them as it likes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from ..config.plan import Plan
from ..data.federated import Federated
from ..methods.base import Method
from ..methods.source import not_block_safe
from .block import Block
from .block_gradients import SLOPES, is_chain
from .flat_model import Loss
from .loop import Loop
from .work import Failed, Job, Reply, Work


class Engine(Protocol):
    """The arithmetic of a round's jobs."""

    most: int
    """Jobs in a chunk, at most."""
    dtype: torch.dtype
    """Of the uploads in its replies."""

    def chunks(self, jobs: Iterable[Job]) -> Iterator[list[Job]]:
        """The jobs, in their order, in the pieces that are computed together."""

    def run(self, jobs: list[Job], down: Any, state: Callable[[int], Any]) -> list[Reply | Failed]:
        """One chunk: a reply per job, in order; `state(i)` gives a private copy of client i's state, at every call."""


def make_engine(work: Work, buffers: list[torch.Tensor] | None = None) -> Engine:
    """The engine that a plan names; with `buffers`, replies are on loan until the next chunk (see `run_client`)."""
    return Block(work) if work.plan.engine == "block" else Loop(work, buffers)


def resolve_engine(plan: Plan, method: Method, model: nn.Module, loss: Loss, data: Federated) -> str:
    """`auto` is `block` where it is faster: small chains of linear layers whose clients come in equal sizes.

    Looks at method, model, data and plan, never at the machine: the engine is arithmetic and decides the last bits.
    A method of the user's runs client by client unless its class says `block_safe = True`; so does any other model or
    loss, whose code may look at numbers as no batched gradient can.
    """
    if plan.engine != "auto":
        return plan.engine
    d = sum(p.numel() for p in model.parameters())
    small = d * min(plan.batch_size, int(data.sizes.max())) <= 2_500_000
    sizes = len(np.unique(data.sizes))
    alike = sizes * 4 <= min(plan.active, data.clients) or sizes <= 2 < plan.active
    fits = small and alike and plan.active >= 4 and is_chain(model) and loss in SLOPES
    return "block" if fits and not_block_safe(method) is None else "loop"
