"""The block engine: many clients of a small model as one batch, on the same hooks.

Clients of equal size (so equal K) become the rows of a (clients, d) block: one batched gradient (`gradients`)
and one pass of the method's arithmetic serve all of them. It agrees with the loop to rounding and repeats its own bits;
which clients share a block depends on the cohort alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import groupby
from typing import Any

import numpy as np
import torch

from ..data.federated import Federated
from ..errors import Diverged, UserError
from ..methods.base import Local, Method
from ..methods.source import defined, not_block_safe
from ..utils.files import key
from ..utils.random import batch_orders, rng, seed_device
from .block_check import watch
from .block_gradients import mapped_gradient, outputs_at, stacked_gradient
from .distillation import PASSES, TeacherTerm, check_teacher
from .divergence import blamed
from .failures import diverged, failed
from .local_loop import own_model, step_
from .trees import all_finite, clip_, has_leaves, precision, sum_dtype, tree_leaves, tree_map
from .upload_digest import upload_digests
from .work import Facts, Failed, Job, Reply, Work

ROWS = 128
"""Clients in a block, at most."""
FLOATS = 2**24
"""Numbers in a block's vector, at most."""
PIECE = 2**17
"""Numbers that are summed in float64 at a time: a whole block would be the largest vector of all, and fresh memory."""


class Block:
    """A chunk is a block: clients of equal size and K, which stand side by side in job order."""

    def __init__(self, work: Work) -> None:
        refuse_unsafe(work.method)
        refuse_statistics(work)
        self.work, self.dtype = work, sum_dtype(work.flat.device)
        self.oracle = BlockOracle(work)
        self.most = max(1, min(ROWS, FLOATS // work.flat.d))
        self.blocks = 0  # of several clients that were run

    def chunks(self, jobs: Iterable[Job]) -> Iterator[list[Job]]:
        """Job order is by size, so blocks are runs of it."""
        for _, same in groupby(jobs, key=lambda job: (int(self.work.data.sizes[job.client]), job.K)):
            group = list(same)
            for a in range(0, len(group), self.most):
                yield group[a : a + self.most]

    def run(self, jobs: list[Job], down: Any, state: Callable[[int], Any]) -> list[Reply | Failed]:
        """The replies of one block; if its work raises, of its clients one by one, to see whose fault it is."""
        lr = jobs[0].lr
        t = jobs[0].t
        work = self.work.at(t)
        seed = work.plan.seed
        clients = [job.client for job in jobs]
        hooks = watch(work.hooks, clients, first=not self.blocks, turn=clients[0] + t)  # whoever runs it
        owned = np.stack([work.data.rows(job.client) for job in jobs])
        n = owned.shape[1]
        K = jobs[0].K or work.local_steps(n)
        keys = [key(seed, "batches", t, job.client) for job in jobs]
        streams = [rng(seed, "augment", t, job.client) for job in jobs] if work.data.pipeline.random else None
        one = state(jobs[0].client)
        client = stack([one, *(state(job.client) for job in jobs[1:])]) if has_leaves(one) else one
        masks = key(seed, "masks", t, jobs[0].client) % 2**62
        oracle, k = self.oracle, 0
        oracle.begin()
        work.flat.model.train()
        try:
            rates = work.hooks.rates(work.local_steps(n), K)
            start = hooks.start(down, client)
            x = start.expand(len(jobs), start.shape[-1]).clone()
            for k, positions in enumerate(batch_orders(n, work.plan.batch_size, K, keys), 1):
                picked = np.take_along_axis(owned, positions, axis=1)
                oracle.next_step(*_gather(work.data, picked, streams), masks + k)
                step_(x, hooks.direction(x, oracle, down, client), lr * rates[k - 1], work)
            local = Local(K, lr, n, t, seed, tuple(clients), work.plan.active, sum(rates) / K)
            metrics: list[dict[str, float] | None] = [None] * len(jobs)
            if "client_metrics" in work.hooks.reporting:  # row by row, as the loop calls it
                states = unstack(client, len(jobs))
                metrics = [
                    work.hooks.client_metrics(own, down, states[i], local._replace(client=clients[i]))
                    for i, own in enumerate(x)
                ]
            own = [own_model(work, job, each) for job, each in zip(jobs, x, strict=True)]
            up, kept = hooks.upload(x, down, client, local)
            alike = "sent" not in work.hooks.reporting
            sent = [work.hooks.sent(each) for each in unstack(up, 1 if alike else len(jobs))]
            sent *= len(jobs) if alike else 1
        except UserError:
            raise
        except Exception as error:
            if len(jobs) > 1:
                return [reply for job in jobs for reply in self.run([job], down, state)]
            if isinstance(error, Diverged):
                return [Failed(jobs[0], error)]
            told = failed(work, jobs[0], k, K, error)
            told.__cause__ = error
            return [Failed(jobs[0], told)]
        self.blocks += len(jobs) > 1
        losses = torch.stack(oracle.losses).mean(0).tolist()
        drifts = squared_distances(x, down.x)
        sums, spent = upload_digests(up, len(jobs)), oracle.evals + oracle.passes / PASSES
        kepts = unstack(kept, len(jobs))
        good = list(range(len(jobs)))
        if not (np.isfinite(losses).all() and all_finite(up) and all_finite(kept)):
            ups = unstack(up, len(jobs))
            good = [i for i in good if np.isfinite(losses[i]) and all_finite(ups[i] + kepts[i])]
        if not good:
            return [self._lost(jobs, i, K, down, client, state) for i in range(len(jobs))]
        if len(good) < len(jobs):
            up = tree_map(lambda a: a[good] if a.ndim == 2 else a, up)
        mean = tree_map(lambda a: mean_row(a) if a.ndim == 2 else a, up)
        counted, replies = set(good), list[Reply | Failed]()
        for i, job in enumerate(jobs):
            if i in counted:
                first = i == good[0]
                share = len(good) if first else 0
                facts = Facts(K, n, losses[i], drifts[i], spent, share, sent[i], metrics[i], own[i], sums[i])
                facts = facts._replace(mean_rate=local.mean_rate)
                replies.append(Reply(job, mean if first else None, kepts[i], facts))
            else:
                replies.append(self._lost(jobs, i, K, down, client, state))
        return replies

    def _lost(self, jobs: list[Job], i: int, K: int, down: Any, client: Any, state: Callable[[int], Any]) -> Failed:
        """The job of a row that is not finite."""
        losses = [float(loss[i]) for loss in self.oracle.losses]
        error = diverged(self.work, jobs[i], K, losses, down, unstack(client, len(jobs))[i])
        return Failed(jobs[i], blamed(self.work, jobs[i], down, state, error))


class BlockOracle:
    """Gradients of every client's current minibatch at every client's point."""

    def __init__(self, work: Work) -> None:
        self.flat = work.flat
        self.clip = work.gradient_clip
        self.precision = work.plan.precision
        self.taught = partial(check_teacher, work.flat, work.data.classes, type(work.method).__name__)
        self.gradient = stacked_gradient(work.flat, work.loss) or mapped_gradient(work.flat, work.loss)

    def begin(self) -> None:
        """A new block."""
        self.losses: list[torch.Tensor] = []
        self.evals = 0.0
        self.passes = 0.0

    def next_step(self, inputs: torch.Tensor, targets: torch.Tensor, mask_seed: int) -> None:
        """Move on to new minibatches and dropout masks."""
        self.inputs = inputs
        self.targets = targets
        self.mask_seed = mask_seed
        self.first = True

    def __call__(
        self,
        x: torch.Tensor,
        fraction: float = 1.0,
        *,
        teacher: torch.Tensor | None = None,
        pull: float = 1.0,
        tau: float = 1.0,
    ) -> torch.Tensor:
        rows = self.inputs.shape[1]
        used = rows if fraction == 1.0 else max(1, round(fraction * rows))
        inputs, targets, held = self.inputs[:, :used], self.targets[:, :used], None
        if teacher is not None and self.taught(teacher, pull, tau):
            seed_device(self.flat.device, self.mask_seed)
            with precision(self.precision, self.flat.device):
                held = TeacherTerm(outputs_at(self.flat, teacher, inputs), pull, tau)
            self.passes += used / rows
        seed_device(self.flat.device, self.mask_seed)
        with precision(self.precision, self.flat.device):
            g, loss = self.gradient(x, inputs, targets, held)
        if self.first:
            self.losses.append(loss.detach())
            self.first = False
        self.evals += used / rows
        return clip_(g, self.clip) if self.clip else g


def _gather(
    data: Federated, rows: np.ndarray, streams: list[np.random.Generator] | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Every client's minibatch: (clients, batch, ...)."""
    if streams is None:
        x, y = data.batch(rows.reshape(-1))
        return x.view(*rows.shape, *x.shape[1:]), y.view(*rows.shape, *y.shape[1:])
    batches = [data.batch(own, stream) for own, stream in zip(rows, streams, strict=True)]
    return torch.stack([x for x, _ in batches]), torch.stack([y for _, y in batches])


def squared_distances(x: torch.Tensor, y: torch.Tensor) -> list[float]:
    """||x_i - y||^2 of every row, summed in float64."""
    some = x.split(max(1, PIECE // x.shape[1]))  # type: ignore[no-untyped-call]
    return torch.cat([torch.linalg.vector_norm(a - y, dim=-1, dtype=sum_dtype(x)) for a in some]).square().tolist()


def mean_row(a: torch.Tensor) -> torch.Tensor:
    """The mean of the rows, in float64."""
    some = a.split(max(1, PIECE // len(a)), dim=1)  # type: ignore[no-untyped-call]
    return torch.cat([columns.to(sum_dtype(a)).mean(0) for columns in some])


def stack(trees: list[Any]) -> Any:
    """Trees of vectors as one tree of blocks."""
    columns = zip(*(tree_leaves(tree) for tree in trees), strict=True)
    blocks = iter([torch.stack(column) for column in columns])
    return tree_map(lambda _: next(blocks), trees[0])


def unstack(tree: Any, rows: int) -> list[Any]:
    """A tree of blocks as trees of vectors; a field that the clients share stays shared."""

    def row(i: int) -> Any:
        return tree_map(lambda a: a[i] if a.ndim == 2 else a, tree)

    return [row(i) for i in range(rows)] if has_leaves(tree) else [tree] * rows


def refuse_statistics(work: Work) -> None:
    """Raise for a model with running statistics: clients side by side would need as many copies of its layers."""
    if work.flat.statistics:
        raise UserError(
            f"engine block: has no running statistics per client, found batch_norm {work.plan.batch_norm}; use "
            f"--engine loop, or --batch-norm group"
        )


def refuse_unsafe(method: Method) -> None:
    """Raise for a method of the user's that does not say that its hooks take blocks."""
    unsafe = not_block_safe(method)
    if unsafe is not None:
        raise UserError(
            f"engine block: calls hooks with a (clients, d) block, and {type(unsafe).__name__} does not say that its "
            f"hooks take one; use --engine loop, or see that norms, means and sorts go over the last axis and write "
            f"`block_safe = True` into the class ({defined(unsafe)})"
        )
