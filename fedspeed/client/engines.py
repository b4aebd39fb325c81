"""Engines: the arithmetic of local work, which decides the last bits of a run, on whatever back end it runs.

An engine cuts the jobs of a round into chunks, by looking at the jobs alone, and computes one chunk at a time. Chunks
do not depend on each other, so a back end may place them as it likes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import torch
from torch import nn

from ..config.plan import Plan
from ..data.federated import Federated
from ..errors import ClientFailed, Diverged
from ..methods.base import Method
from ..methods.source import not_block_safe
from .block import Block
from .block_gradients import is_chain, slope_of
from .failures import blamed
from .flat_model import Loss
from .local_loop import run_client
from .work import Failed, Job, Reply, Work


class Engine(Protocol):
    """The arithmetic of a round's jobs."""

    most: int
    """Largest number of jobs in a chunk."""
    dtype: torch.dtype
    """Dtype of the uploads in its replies."""

    def chunks(self, jobs: Iterable[Job]) -> Iterator[list[Job]]:
        """Yield the jobs, in their order, in the chunks that are computed together."""

    def run(self, jobs: list[Job], down: Any, state: Callable[[int], Any]) -> list[Reply | Failed]:
        """Return one reply per job of a chunk, in order; `state(i)` returns a new private copy of client i's state."""


class Loop:
    """The loop engine: client by client, by `run_client`. A chunk is one client."""

    most = 1

    def __init__(self, work: Work, buffers: list[torch.Tensor] | None = None) -> None:
        self.work = work
        self.buffers = buffers
        self.dtype = work.flat.dtype

    def chunks(self, jobs: Iterable[Job]) -> Iterator[list[Job]]:
        """Yield every job by itself."""
        return ([job] for job in jobs)

    def run(self, jobs: list[Job], down: Any, state: Callable[[int], Any]) -> list[Reply | Failed]:
        """Return one reply per job."""
        return [self._one(job, down, state) for job in jobs]

    def _one(self, job: Job, down: Any, state: Callable[[int], Any]) -> Reply | Failed:
        try:
            return run_client(self.work, job, down, state(job.client), self.buffers)
        except ClientFailed as error:
            return Failed(job, error)
        except Diverged as error:
            return Failed(job, blamed(self.work, job, down, state, error))


def make_engine(work: Work, buffers: list[torch.Tensor] | None = None) -> Engine:
    """Return the engine that the plan names; with `buffers`, replies are valid until the next chunk is run."""
    return Block(work) if work.plan.engine == "block" else Loop(work, buffers)


def resolve_engine(plan: Plan, method: Method, model: nn.Module, loss: Loss, data: Federated) -> str:
    """Return the name of the engine; `auto` is `block` for small chains of linear layers with clients of equal sizes.

    The choice depends on method, model, data and plan, never on the machine: the engine decides the last bits. A user's
    method runs client by client unless its class says `block_safe = True`; so does any other model or loss, whose code
    may branch on numbers, which a batched gradient cannot.
    """
    if plan.engine != "auto":
        return plan.engine
    d = sum(p.numel() for p in model.parameters())
    small = d * min(plan.batch_size, int(data.sizes.max())) <= 2_500_000
    sizes = len(set(data.sizes.tolist()))  # `np.unique` would import `numpy.ma`
    alike = sizes * 4 <= min(plan.active, data.clients) or sizes <= 2 < plan.active
    fits = small and alike and plan.active >= 4 and is_chain(model) and slope_of(loss) is not None
    return "block" if fits and not_block_safe(method) is None else "loop"
