"""The block engine: many clients of a small model as one batch, on the same hooks.

Clients of equal size (so equal K) become the rows of a (clients, d) block: one batched gradient (`gradients`)
and one pass of the method's arithmetic serve all of them. It agrees with the loop to rounding and repeats its own bits;
which clients share a block depends on the cohort alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import nn

from ..client import Failed, Job, Reply, Work, diverged, failed, step_
from ..contract import block_safe, defined, innermost
from ..data.federated import Federated
from ..errors import Diverged, UserError
from ..evaluate import Score, evaluate
from ..method import Local, Method
from ..plan import Plan
from ..sampling import batch_orders, key, rng, seed_device
from ..vec import Loss, accurate, all_finite, arithmetic, clip_, has_leaves, tree_leaves, tree_map
from .alone import watch
from .gradients import SLOPES, is_chain, mapped_gradient, stacked_gradient
from .serial import keep_freed, one_thread, own_randomness

ROWS = 128
"""Clients in a block, at most."""
FLOATS = 2**24
"""Numbers in a block's vector, at most."""
PIECE = 2**17
"""Numbers that are summed in float64 at a time: a whole block would be the largest vector of all, and fresh memory."""


class Block:
    """Runs jobs here, block by block, with one intra-op thread."""

    def __init__(self, work: Work) -> None:
        self.work = work
        keep_freed()
        self.oracle = BlockOracle(work)
        self.blocks = 0  # of several clients that were run
        refuse_unsafe(work.method)

    def run(self, jobs: Iterable[Job], down: Any, state: Callable[[int], Any]) -> Iterator[Reply | Failed]:
        """Replies in job order; job order is by size, so blocks are runs of it."""
        rows = max(1, min(ROWS, FLOATS // self.work.flat.d))
        for _, same in groupby(jobs, key=lambda job: (int(self.work.data.sizes[job.client]), job.K)):
            group = list(same)
            for a in range(0, len(group), rows):
                with one_thread(), own_randomness(self.work):
                    replies = self._block(group[a : a + rows], down, state)
                yield from replies

    def evaluate(self, x: torch.Tensor, validation: bool = False) -> Score:
        """Loss and accuracy of a vector on the test set, or on the validation set."""
        with one_thread(), own_randomness(self.work):
            return evaluate(self.work.flat, x, self.work.data, self.work.loss, validation)

    def close(self) -> None:
        """Nothing to stop."""

    def _block(self, jobs: list[Job], down: Any, state: Callable[[int], Any]) -> list[Reply | Failed]:
        """The replies of one block; if its work raises, of its clients one by one, to see whose fault it is."""
        work, lr, t = self.work, jobs[0].lr, jobs[0].t
        hooks = watch(work.hooks, [job.client for job in jobs], first=not self.blocks, turn=self.blocks + t)
        owned = np.stack([work.data.rows(job.client) for job in jobs])
        n = owned.shape[1]
        K = jobs[0].K or work.local_steps(n)
        keys = [key(work.seed, "batches", t, job.client) for job in jobs]
        streams = [rng(work.seed, "augment", t, job.client) for job in jobs] if work.data.pipeline.random else None
        one = state(jobs[0].client)
        client = stack([one, *(state(job.client) for job in jobs[1:])]) if has_leaves(one) else one
        masks = key(work.seed, "masks", t, jobs[0].client) % 2**62
        oracle, k = self.oracle, 0
        oracle.begin()
        work.flat.model.train()
        try:
            start = hooks.start(down, client)
            x = start.expand(len(jobs), start.shape[-1]).clone()
            for k, positions in enumerate(batch_orders(n, work.batch_size, K, keys), 1):
                picked = np.take_along_axis(owned, positions, axis=1)
                oracle.next_step(*_gather(work.data, picked, streams), masks + k)
                step_(x, hooks.direction(x, oracle, down, client), lr, work)
            up, kept = hooks.upload(x, down, client, Local(K, lr, n, t, work.seed))
        except (UserError, Diverged):
            raise
        except Exception as error:
            if len(jobs) > 1:
                return [reply for job in jobs for reply in self._block([job], down, state)]
            told = failed(work, jobs[0], k, K, error)
            told.__cause__ = error
            return [Failed(jobs[0], told)]
        self.blocks += len(jobs) > 1
        losses = torch.stack(oracle.losses).mean(0).tolist()
        drifts = squared_distances(x, down.x)
        kepts = unstack(kept, len(jobs))
        good = list(range(len(jobs)))
        if not (np.isfinite(losses).all() and all_finite(up) and all_finite(kept)):
            ups = unstack(up, len(jobs))
            good = [i for i in good if np.isfinite(losses[i]) and all_finite(ups[i] + kepts[i])]
        if not good:
            return [Failed(job, diverged(work, job, K)) for job in jobs]
        if len(good) < len(jobs):
            up = tree_map(lambda a: a[good] if a.ndim == 2 else a, up)
        mean = tree_map(lambda a: mean_row(a) if a.ndim == 2 else a, up)
        counted, replies = set(good), list[Reply | Failed]()
        for i, job in enumerate(jobs):
            if i in counted:
                first = i == good[0]
                facts = (K, n, losses[i], drifts[i], oracle.evals, len(good) if first else 0)
                replies.append(Reply(job, mean if first else None, kepts[i], *facts))
            else:
                replies.append(Failed(job, diverged(work, job, K)))
        return replies


class BlockOracle:
    """Gradients of every client's current minibatch at every client's point."""

    def __init__(self, work: Work) -> None:
        self.flat, self.clip = work.flat, work.clip if work.clip_mode == "gradient" else 0.0
        self.precision = work.precision
        self.gradient = stacked_gradient(work.flat, work.loss) or mapped_gradient(work.flat, work.loss)

    def begin(self) -> None:
        """A new block."""
        self.losses: list[torch.Tensor] = []
        self.evals = 0.0

    def next_step(self, inputs: torch.Tensor, targets: torch.Tensor, mask_seed: int) -> None:
        """Move on to new minibatches and dropout masks."""
        self.inputs, self.targets, self.mask_seed, self.first = inputs, targets, mask_seed, True

    def __call__(self, x: torch.Tensor, fraction: float = 1.0) -> torch.Tensor:
        rows = self.inputs.shape[1]
        used = rows if fraction == 1.0 else max(1, round(fraction * rows))
        seed_device(self.flat.device, self.mask_seed)
        with arithmetic(self.precision, self.flat.device):
            g, loss = self.gradient(x, self.inputs[:, :used], self.targets[:, :used])
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
    return torch.cat([torch.linalg.vector_norm(a - y, dim=-1, dtype=accurate(x)) for a in some]).square().tolist()


def mean_row(a: torch.Tensor) -> torch.Tensor:
    """The mean of the rows, in float64."""
    some = a.split(max(1, PIECE // len(a)), dim=1)  # type: ignore[no-untyped-call]
    return torch.cat([columns.to(accurate(a)).mean(0) for columns in some])


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


def refuse_unsafe(method: Method) -> None:
    """Raise for a method of the user's that does not say that its hooks take blocks."""
    if not block_safe(method):
        cls = type(innermost(method)).__name__
        raise UserError(
            f"engine block: calls hooks with a (clients, d) block, and {cls} does not say that its hooks take one; use "
            f"--engine loop, or see that norms, means and sorts go over the last axis and write `block_safe = True` "
            f"into the class ({defined(method)})"
        )


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
    return "block" if fits and block_safe(method) else "loop"
