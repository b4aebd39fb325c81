"""The block engine: many clients of a small model as one batch, on the same hooks.

Clients of equal size (so equal K) become the rows of a (clients, d) block: one batched gradient (`block_gradients`) and
one pass of the method's arithmetic serve all of them. The engine agrees with the loop to rounding and repeats its own
bits: which clients share a block, and the order of its sums, depend on the cohort alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import torch

from ..data.federated import Federated
from ..errors import Diverged, UserError
from ..methods.base import Local, Method
from ..methods.source import defined, not_block_safe
from ..utils.files import key
from ..utils.random import batch_orders, low_keys, rng
from .block_check import watch
from .block_gradients import mapped_gradient, outputs_at, stacked_gradient
from .distillation import PASSES, TeacherTerm
from .evaluate import Score
from .failures import blamed, diverged, failed
from .local_loop import BaseOracle, Steps, own_model
from .trees import all_finite, has_leaves, stack, sum_dtype, tree_map, unstack
from .upload_digest import upload_digests
from .work import Facts, Failed, Job, Reply, Work

ROWS = 128
"""Largest number of clients in a block. It fixes the bits, as `FLOATS` does."""
FLOATS = 2**24
"""Largest number of floats in a block's points."""
PIECE = 2**17
"""Floats that are converted to float64 at a time: a whole block in float64 would be the largest vector of all."""


class Turns(NamedTuple):
    """The finished turns of a block's clients, one row or entry per client, before their numbers are checked."""

    local: Local
    x: torch.Tensor
    up: Any
    kept: Any
    metrics: list[dict[str, float] | None]
    own: list[Score | None]
    sent: list[int]


class Block:
    """The block engine. A chunk is a block: clients of equal size and K that are neighbours in job order."""

    def __init__(self, work: Work) -> None:
        refuse_unsafe(work.method)
        refuse_statistics(work)
        self.work, self.dtype = work, sum_dtype(work.flat.device)
        self.oracle = BlockOracle(work)
        self.most = max(1, min(ROWS, FLOATS // work.flat.d))
        self.blocks = 0  # blocks of several clients that were run
        self.step = 0  # the local step in progress, for messages

    def chunks(self, jobs: Iterable[Job]) -> Iterator[list[Job]]:
        """Yield blocks; job order is by size, so neighbours are alike. Blocks fix the bits: only jobs decide them."""
        jobs = list(jobs)
        sizes = self.work.data.sizes[np.array([job.client for job in jobs], dtype=np.int64)].tolist()
        kinds = list(zip(sizes, [job.K for job in jobs], strict=True))
        start = 0
        for _, same in groupby(kinds):
            end = start + sum(1 for _ in same)
            for a in range(start, end, self.most):
                yield jobs[a : min(a + self.most, end)]
            start = end

    def run(self, jobs: list[Job], down: Any, state: Callable[[int], Any]) -> list[Reply | Failed]:
        """Return the replies of one block; if its work raises, run its clients one by one to find the one that does."""
        work = self.work.at(jobs[0].t)
        K = jobs[0].K or work.local_steps(int(work.data.sizes[jobs[0].client]))
        client = states_of([job.client for job in jobs], state)
        try:
            turns = self._turns(work, jobs, K, down, client)
        except UserError:
            raise
        except Exception as error:
            if len(jobs) > 1:
                return [reply for job in jobs for reply in self.run([job], down, state)]
            if isinstance(error, Diverged):
                return [Failed(jobs[0], error)]
            named = failed(work, jobs[0], self.step, K, error)
            named.__cause__ = error
            return [Failed(jobs[0], named)]
        self.blocks += len(jobs) > 1
        return self._replies(jobs, turns, down, client, state)

    def _turns(self, work: Work, jobs: list[Job], K: int, down: Any, client: Any) -> Turns:
        """Compute the K local steps and the uploads of all clients of a block."""
        t, lr, seed, clients = jobs[0].t, jobs[0].lr, work.plan.seed, [job.client for job in jobs]
        places = np.array(clients)
        # Which rows are checked depends on client and round, never on the worker that runs the block.
        hooks = watch(work.hooks, clients, first=not self.blocks, turn=clients[0] + t)
        n = int(work.data.sizes[clients[0]])
        keys = low_keys(seed, "batches", t, clients)
        streams = [rng(seed, "augment", t, i) for i in clients] if work.data.pipeline.random else None
        masks = key(seed, "masks", t, clients[0]) % 2**62
        self.step = 0
        self.oracle.begin()
        work.flat.model.train()
        rates = work.hooks.rates(work.local_steps(n), K)
        start = hooks.start(down, client)
        x = start.expand(len(jobs), start.shape[-1]).clone()
        step_ = Steps(work)
        for k, positions in enumerate(batch_orders(n, work.plan.batch_size, K, keys), 1):
            self.step = k
            picked = work.data.rows_at(places, positions)
            self.oracle.next_step(*_gather(work.data, picked, streams), masks + k)
            step_(x, hooks.direction(x, self.oracle, down, client), lr * rates[k - 1])
        local = Local(K, lr, n, t, seed, tuple(clients), work.plan.active, sum(rates) / K)
        metrics = self._metrics(work, x, down, client, local)
        own: list[Score | None] = [None] * len(jobs)
        if work.plan.scores_clients(t + 1, own=True):
            own = [own_model(work, job, each) for job, each in zip(jobs, x, strict=True)]
        up, kept = hooks.upload(x, down, client, local)
        if "sent" in work.hooks.overridden:
            sent = [work.hooks.sent(each) for each in unstack(up, len(jobs))]
        else:
            sent = [work.hooks.sent(tree_map(lambda a: a[0] if a.ndim == 2 else a, up))] * len(jobs)
        return Turns(local, x, up, kept, metrics, own, sent)

    def _metrics(
        self, work: Work, x: torch.Tensor, down: Any, client: Any, local: Local
    ) -> list[dict[str, float] | None]:
        """Return each client's metrics; the hook is called row by row, as by the loop."""
        if "client_metrics" not in work.hooks.overridden:
            return [None] * len(x)
        states = unstack(client, len(x))
        each = zip(x, states, local.clients, strict=True)
        return [work.hooks.client_metrics(own, down, one, local._replace(client=i)) for own, one, i in each]

    def _replies(
        self, jobs: list[Job], turns: Turns, down: Any, client: Any, state: Callable[[int], Any]
    ) -> list[Reply | Failed]:
        """Return one reply per job: the first good row's holds the mean of all good rows, the others' hold none.

        The mean of a block is formed here, over its good rows in job order, and the server adds it with the weight of
        all of them. This grouping fixes the bits.
        """
        K, n, mean_rate = turns.local.K, turns.local.n, turns.local.mean_rate
        losses = self.oracle.mean_losses(K, len(jobs))
        drifts, digests = squared_distances(turns.x, down.x), upload_digests(turns.up, len(jobs))
        spent = self.oracle.evals + self.oracle.passes / PASSES
        kepts, good = unstack(turns.kept, len(jobs)), list(range(len(jobs)))
        mean = mean_of_rows(turns.up)
        # A mean with NaN or Inf in a row is not finite, so the rows need no look of their own if it is.
        if not (np.isfinite(losses).all() and all_finite(mean) and all_finite(turns.kept)):
            ups = unstack(turns.up, len(jobs))
            good = [i for i in good if np.isfinite(losses[i]) and all_finite(ups[i] + kepts[i])]
        if len(good) < len(jobs):
            up = tree_map(lambda a: a[good] if a.ndim == 2 else a, turns.up)
            mean = mean_of_rows(up) if good else None
        counted, replies = set(good), list[Reply | Failed]()
        for i, job in enumerate(jobs):
            if i not in counted:
                replies.append(self._lost(jobs, i, K, down, client, state))
                continue
            first = i == good[0]
            many, sent, metrics, own = len(good) if first else 0, turns.sent[i], turns.metrics[i], turns.own[i]
            facts = Facts(K, n, losses[i], drifts[i], spent, many, sent, metrics, own, digests[i], mean_rate)
            replies.append(Reply(job, mean if first else None, kepts[i], facts))
        return replies

    def _lost(self, jobs: list[Job], i: int, K: int, down: Any, client: Any, state: Callable[[int], Any]) -> Failed:
        """Return the failure of a row that is not finite."""
        losses = [float(loss[i]) for loss in self.oracle.losses]
        error = diverged(self.work, jobs[i], K, losses, down, unstack(client, len(jobs))[i])
        return Failed(jobs[i], blamed(self.work, jobs[i], down, state, error))


class BlockOracle(BaseOracle):
    """Gradients of every client's current minibatch at every client's point."""

    def __init__(self, work: Work) -> None:
        super().__init__(work, axis=1)
        self.batched = stacked_gradient(work.flat, work.loss) or mapped_gradient(work.flat, work.loss)

    def outputs(self, teacher: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
        return outputs_at(self.flat, teacher, inputs)

    def gradient(
        self, x: torch.Tensor, inputs: torch.Tensor, targets: torch.Tensor, term: TeacherTerm | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self.batched(x, inputs, targets, term)

    def mean_losses(self, K: int, rows: int) -> list[float]:
        """Return each client's mean loss over K steps; a step without an oracle call counts 0, as in the loop."""
        if not self.losses:
            return [0.0] * rows
        mean = torch.stack(self.losses).mean(0)
        return (mean if len(self.losses) == K else mean * (len(self.losses) / K)).tolist()


def _gather(
    data: Federated, rows: np.ndarray, streams: list[np.random.Generator] | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return every client's minibatch: (clients, batch, ...)."""
    if streams is None:
        x, y = data.batch(rows.reshape(-1))
        return x.view(*rows.shape, *x.shape[1:]), y.view(*rows.shape, *y.shape[1:])
    batches = [data.batch(own, stream) for own, stream in zip(rows, streams, strict=True)]
    return torch.stack([x for x, _ in batches]), torch.stack([y for _, y in batches])


def squared_distances(x: torch.Tensor, y: torch.Tensor) -> list[float]:
    """Return ||x_i - y||^2 of every row, summed in float64."""
    some = x.split(max(1, PIECE // x.shape[1]))  # type: ignore[no-untyped-call]
    return torch.cat([torch.linalg.vector_norm(a - y, dim=-1, dtype=sum_dtype(x)) for a in some]).square().tolist()


def mean_of_rows(tree: Any) -> Any:
    """Return the mean of the clients' trees; a field that they share stays as it is."""
    return tree_map(lambda a: mean_row(a) if a.ndim == 2 else a, tree)


def mean_row(a: torch.Tensor) -> torch.Tensor:
    """Return the mean of the rows in float64; the order of this sum, and so `PIECE`, fixes the bits."""
    some = a.split(max(1, PIECE // len(a)), dim=1)  # type: ignore[no-untyped-call]
    return torch.cat([columns.to(sum_dtype(a)).mean(0) for columns in some])


def states_of(clients: list[int], state: Callable[[int], Any]) -> Any:
    """Return the states of a block's clients as one tree of blocks; one tree if it has no vectors.

    Args:
        state: returns a private copy of a client's state; its `block`, if it has one, those of several at once.
    """
    together = getattr(state, "block", None)
    if together is not None:
        return together(clients)
    one = state(clients[0])
    return stack([one, *(state(client) for client in clients[1:])]) if has_leaves(one) else one


def refuse_statistics(work: Work) -> None:
    """Raise for a model with running statistics: clients side by side would need as many copies of its layers."""
    if work.flat.statistics:
        raise UserError(
            f"engine block: has no running statistics per client, found batch_norm {work.plan.batch_norm}; use "
            f"--engine loop, or --batch-norm group"
        )


def refuse_unsafe(method: Method) -> None:
    """Raise for a user's method that does not declare that its hooks take blocks."""
    unsafe = not_block_safe(method)
    if unsafe is not None:
        raise UserError(
            f"engine block: calls hooks with a (clients, d) block, and {type(unsafe).__name__} does not say that its "
            f"hooks take one; use --engine loop, or see that norms, means and sorts go over the last axis and write "
            f"`block_safe = True` into the class ({defined(unsafe)})"
        )
