"""One client's turn: K local steps with the gradient oracle, then the upload, the kept state and facts."""

from __future__ import annotations

import math
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch

from ..errors import Diverged, UserError
from ..methods.base import Local
from ..methods.local_optimizers import local_optimizer
from ..utils.devices import preserve_rng
from ..utils.files import key
from ..utils.random import batch_order, rng, seed_device
from .distillation import PASSES, TeacherTerm, check_teacher
from .evaluate import Score, own_score
from .failures import diverged, failed
from .trees import all_finite, clip_, precision, squared_distance
from .upload_digest import upload_digests
from .work import Facts, Job, Reply, Work


class BaseOracle:
    """The part of the gradient oracle that both engines share; see `methods.base.Grad`."""

    def __init__(self, work: Work, axis: int) -> None:
        self.flat = work.flat
        self.loss = work.loss
        self.axis = axis  # of the samples, in inputs and targets
        self.precision = work.plan.precision
        self.clip = work.plan.clip if work.plan.clip_mode == "gradient" else 0.0  # largest norm of each gradient
        self.taught = partial(check_teacher, work.flat, work.data.classes, type(work.method).__name__)
        self.begin()

    def begin(self) -> None:
        """Reset losses and counts for a new turn."""
        self.losses: list[torch.Tensor] = []  # of the first gradient of each step; read after the last step
        self.evals = 0.0
        self.passes = 0.0  # forward passes of teachers

    def next_step(self, inputs: torch.Tensor, targets: torch.Tensor, mask_seed: int) -> None:
        """Set the minibatch and the dropout mask of the next step."""
        self.inputs = inputs
        self.targets = targets
        self.mask_seed = mask_seed
        self.calls = 0

    def __call__(
        self,
        x: torch.Tensor,
        fraction: float = 1.0,
        *,
        teacher: torch.Tensor | None = None,
        pull: float = 1.0,
        tau: float = 1.0,
    ) -> torch.Tensor:
        rows = self.inputs.shape[self.axis]
        used, inputs, targets = rows, self.inputs, self.targets
        if fraction != 1.0:
            used = max(1, round(fraction * rows))
            inputs, targets = inputs.narrow(self.axis, 0, used), targets.narrow(self.axis, 0, used)
        term = None
        if teacher is not None and self.taught(teacher, pull, tau):
            seed_device(self.flat.device, self.mask_seed)
            with precision(self.precision, self.flat.device):  # closed before the gradient: autocast caches weights
                term = TeacherTerm(self.outputs(teacher, inputs), pull, tau)
            self.passes += used / rows
        seed_device(self.flat.device, self.mask_seed)
        with precision(self.precision, self.flat.device):
            g, loss = self.gradient(x, inputs, targets, term)
        if self.calls == 0:
            self.losses.append(loss.detach())
        self.calls += 1
        self.evals += used / rows
        return clip_(g, self.clip) if self.clip else g

    def outputs(self, teacher: torch.Tensor, inputs: torch.Tensor) -> Any:
        """Return a teacher's outputs, without a graph."""
        raise NotImplementedError

    def gradient(
        self, x: torch.Tensor, inputs: torch.Tensor, targets: torch.Tensor, term: TeacherTerm | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the gradient at x, and the loss without the teacher's term."""
        raise NotImplementedError


class Oracle(BaseOracle):
    """The gradient of one client's current minibatch at any point."""

    def __init__(self, work: Work, buffers: list[torch.Tensor]) -> None:
        super().__init__(work, axis=0)
        self.buffers = buffers  # one per oracle call within a step, allocated on demand

    def outputs(self, teacher: torch.Tensor, inputs: torch.Tensor) -> Any:
        with self.flat.statistics.kept():
            return self.flat.outputs(teacher, inputs)

    def gradient(
        self, x: torch.Tensor, inputs: torch.Tensor, targets: torch.Tensor, term: TeacherTerm | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self.calls == len(self.buffers):
            self.buffers.append(torch.empty_like(self.flat.x))
        out = self.buffers[self.calls]
        unchanged = self.flat.statistics.kept() if self.calls and self.flat.statistics else nullcontext()
        with unchanged:  # running statistics see each step once
            return out, self.flat.gradient(x, inputs, targets, self.loss, out, term and term.term)


def run_client(work: Work, job: Job, down: Any, client: Any, buffers: list[torch.Tensor] | None = None) -> Reply:
    """Run K local steps of one client: `x -= lr * rate(k, K) * (direction + mix * wd * x)`; see `Steps`.

    Args:
        down: the server's message, in the model's dtype.
        client: a private copy of the client's state; the caller makes a first one by `init_client`.
        buffers: memory of gradients, reused from client to client: large vectors that come and go fragment the heap.
    """
    work = work.at(job.t)
    hooks = work.hooks
    data = work.data
    flat = work.flat
    seed = work.plan.seed
    rows = data.rows(job.client)
    steps = job.K or work.local_steps(len(rows))
    order = batch_order(len(rows), work.plan.batch_size, steps, key(seed, "batches", job.t, job.client))
    stream = rng(seed, "augment", job.t, job.client) if data.pipeline.random else None
    masks = key(seed, "masks", job.t, job.client) % 2**62
    oracle = Oracle(work, [] if buffers is None else buffers)
    step_ = Steps(work)
    flat.model.train()
    k = 0
    try:
        rates = hooks.rates(work.local_steps(len(rows)), steps)  # a straggler follows the plan's rates
        x = hooks.start(down, client).clone()
        for k, positions in enumerate(order, 1):
            oracle.next_step(*data.batch(rows[positions], stream), mask_seed=masks + k)
            step_(x, hooks.direction(x, oracle, down, client), job.lr * rates[k - 1])
            if k == 1:
                flat.refuse_changed_buffers()
        local = Local(steps, job.lr, len(rows), job.t, seed, job.client, work.plan.active, sum(rates) / steps)
        metrics = hooks.client_metrics(x, down, client, local)
        own = own_model(work, job, x)
        up, kept = hooks.upload(x, down, client, local)
        sent = hooks.sent(up)
    except (UserError, Diverged):
        raise
    except Exception as error:
        raise failed(work, job, k, steps, error) from error
    train_loss = sum(float(loss) for loss in oracle.losses) / steps
    if not (math.isfinite(train_loss) and all_finite(up) and all_finite(kept)):
        raise diverged(work, job, steps, [float(loss) for loss in oracle.losses], down, client)
    drift = squared_distance(x, down.x)
    spent = oracle.evals + oracle.passes / PASSES
    digest = upload_digests(up)[0]
    facts = Facts(steps, len(rows), train_loss, drift, spent, 1, sent, metrics, own, digest, local.mean_rate)
    return Reply(job, up, kept, facts)


def own_model(work: Work, job: Job, x: torch.Tensor) -> Score | None:
    """Return the score of a client's own model at the end of its turn; None in a round that does not score clients."""
    if not work.plan.scores_clients(job.t + 1, own=True):
        return None
    with preserve_rng(work.flat.device):  # so that a hook which draws afterwards draws the same numbers, scored or not
        return own_score(work.flat, x, work.data, work.loss, job.client)


class Steps:
    """The steps of one turn, of one client or of a block: `step_(x, direction, lr)` does, in place,

        g = direction + mix * wd * x;   x -= lr * u,   u what the local optimiser makes of this turn's g

    wd is 0 for parameters in `no_decay`; with `decay_outside_mix` it is not multiplied by mix. `clip_mode = "released"`
    takes a method's multiple of x out of the direction, clips the rest and adds it again, since the authors' code has
    that multiple in the optimiser's weight decay, after its clip; with "gradient" the oracle clips.
    Decoupled weight decay (adamw) does not enter g: `x -= lr * mix * wd * x` comes first.
    """

    def __init__(self, work: Work) -> None:
        self.work = work
        self.optimizer = local_optimizer(work.plan.local_optimizer)
        self.plain = work.plan.local_optimizer == "sgd"
        self.kept: list[torch.Tensor] = []  # the optimiser's state, which ends with the turn
        self.k = 0

    def __call__(self, x: torch.Tensor, direction: torch.Tensor, lr: float) -> None:
        plan, decay = self.work.plan, self.work.flat.decay
        if plan.clip and plan.clip_mode == "released":
            shrink = self.work.method.shrink
            direction = clip_(direction - shrink * x, plan.clip).add_(x, alpha=shrink)
        wd = plan.weight_decay * (1.0 if plan.decay_outside_mix else self.work.method.mix)
        if not self.plain:
            self.k += 1
            if wd and not self.optimizer.decoupled:
                direction, wd = torch.add(direction, x if decay is None else decay * x, alpha=wd), 0.0
            direction = self.optimizer.step(direction, self.kept, self.k)
        if wd and decay is not None:  # do not reorder: the order of these operations fixes the bits
            x.addcmul_(x, decay, value=-lr * wd)
        elif wd:
            x.mul_(1 - lr * wd)
        x.sub_(direction, alpha=lr)
