"""The serial back end: one chunk of clients after the other, in this process."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ..client.engines import make_engine
from ..client.evaluate import Score, Sums, client_slices, evaluate, score_clients
from ..client.personalise import personalised
from ..client.trees import one_thread
from ..client.work import Failed, Job, Reply, Work
from ..utils.devices import deterministic, preserve_rng


class Scoring:
    """Base of the back ends that score vectors in this process."""

    def __init__(self, work: Work) -> None:
        self.work = work

    def evaluate(self, x: torch.Tensor, validation: bool = False) -> Score:
        """Return loss and accuracy of a vector on the test set, or on the validation set."""
        with alone(self.work):
            return evaluate(self.work.flat, x, self.work.data, self.work.loss, validation)

    def evaluate_clients(self, x: torch.Tensor) -> list[Sums]:
        """Return sums over the slices of all clients' data, in order."""
        work = self.work
        with alone(work):
            return [score_clients(work.flat, x, work.data, work.loss, a, b) for a, b in client_slices(work.data)]

    def personalise(self, x: torch.Tensor, t: int, lr: float) -> list[Score]:
        """Return the personalised score of every client, in order."""
        with alone(self.work):
            return [personalised(self.work, x, i, t, lr) for i in range(self.work.data.clients)]


class Serial(Scoring):
    """Back end of this process, with one intra-op thread: the bits of a sum must not depend on the number of cores."""

    def __init__(self, work: Work, workers: int = 0, touched: Container[int] = ()) -> None:
        super().__init__(work)
        self.engine = make_engine(work)
        keep_freed()

    def run(self, jobs: Sequence[Job], down: Any, state: Callable[[int], Any]) -> Iterator[Reply | Failed]:
        """Yield one reply per job, in job order."""
        for chunk in self.engine.chunks(jobs):
            with alone(self.work):
                replies = self.engine.run(chunk, down, state)
            yield from replies

    def close(self) -> None:
        """Do nothing: no worker was started."""


def keep_freed() -> None:
    """Keep freed vectors in this process (glibc).

    Pages that go back to the system are faulted in again at every step, which may cost more than the arithmetic on
    them. The largest block ever freed, up to 32 MB, sets the limit. Worker processes, which run nothing else, keep
    more: `common.keep_memory`.
    """
    torch.empty(2**25 - 2**16, dtype=torch.uint8)


@contextmanager
def alone(work: Work) -> Iterator[None]:
    """Set one thread and deterministic kernels; restore the caller's settings and random generators afterwards."""
    device = work.flat.device
    with one_thread(), preserve_rng(device), deterministic(device):
        yield
