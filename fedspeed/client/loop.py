"""The loop engine: client by client, `run_client` as it stands."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from ..errors import ClientFailed, Diverged
from .divergence import blamed
from .local_loop import run_client
from .work import Failed, Job, Reply, Work


class Loop:
    """A chunk is one client."""

    most = 1

    def __init__(self, work: Work, buffers: list[torch.Tensor] | None = None) -> None:
        self.work = work
        self.buffers = buffers
        self.dtype = work.flat.dtype

    def chunks(self, jobs: Iterable[Job]) -> Iterator[list[Job]]:
        """Every job by itself."""
        return ([job] for job in jobs)

    def run(self, jobs: list[Job], down: Any, state: Callable[[int], Any]) -> list[Reply | Failed]:
        """The replies of some clients."""
        return [self._one(job, down, state) for job in jobs]

    def _one(self, job: Job, down: Any, state: Callable[[int], Any]) -> Reply | Failed:
        try:
            return run_client(self.work, job, down, state(job.client), self.buffers)
        except ClientFailed as error:
            return Failed(job, error)
        except Diverged as error:
            return Failed(job, blamed(self.work, job, down, state, error))
