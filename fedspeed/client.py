"""THE local loop, written once: minibatches, weight decay, clipping, the step, and what to say when it fails."""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch

from .carried import Carrying, of_method
from .clientscores import own_score
from .contract import Hooks
from .data.federated import Federated
from .devices import own_randomness, placed
from .errors import ClientFailed, Diverged, UserError
from .evaluate import Score
from .fields import grown, large
from .methods.base import Local, Method
from .methods.source import reason
from .plan import Plan
from .presets import paper_decay
from .sampling import batch_order, key, rng, seed_device
from .teacher import PASSES, Pull, is_taught
from .upload_digest import upload_digests
from .vec import FlatModel, Loss, all_finite, arithmetic, clip_, outline, squared_distance, tree_map


class Shapes(NamedTuple):
    """What the messages of a method look like: trees of tensors without numbers (device meta)."""

    down: Any
    client: Any
    up: Any


@dataclass(frozen=True)
class Work:
    """What the local work of all clients has in common; `backends.packing` sends it elsewhere."""

    method: Method
    flat: FlatModel
    loss: Loss
    data: Federated
    plan: Plan

    @cached_property
    def hooks(self) -> Hooks:
        """The method's hooks, each call checked."""
        if self.flat.statistics:
            return Carrying(self.method, self.flat, local=self.plan.batch_norm == "local")
        return Hooks(self.method, self.flat.d, self.flat.dtype)

    @cached_property
    def shapes(self) -> Shapes:
        """Found by one call of the hooks at x^0, where the work was made; it travels with it."""
        hooks, x0 = self.hooks, self.flat.x
        down, client = hooks.broadcast(hooks.init_server(x0.clone())), hooks.init_client(x0)
        with hooks.hook("upload"):
            up, kept = hooks.upload(x0.clone(), down, tree_map(torch.clone, client), Local(1, 1.0, 1, active=1))
        return Shapes(*(tree_map(outline, tree) for tree in (down, kept, up)))

    def at(self, t: int) -> Work:
        """The work of round t = 0, 1, ...: with the method of that round, where a schedule changes it."""
        method = self.plan.method_at(self.method, t, paper_decay(self.method))
        if method is self.method:
            return self
        work = replace(self, method=method)
        work.__dict__["hooks"] = self.hooks.of(method)
        return work

    def local_steps(self, n: int) -> int:
        """K_i of a client with n samples."""
        return self.plan.steps_of(n)

    @property
    def gradient_clip(self) -> float:
        """The largest norm of each loss gradient; 0 for none."""
        return self.plan.clip if self.plan.clip_mode == "gradient" else 0.0


class Job(NamedTuple):
    """One client's turn in one round."""

    client: int
    t: int
    lr: float
    K: int = 0  # local steps of a straggler; 0 takes the plan's


class Failed(NamedTuple):
    """What comes back instead of a reply when a client's work raised, or its update was not finite."""

    job: Job
    error: ClientFailed | Diverged


class Facts(NamedTuple):
    """What happened in a client's turn, in numbers."""

    K: int
    n: int
    train_loss: float  # mean loss at the first oracle call of each step
    drift: float  # ||x_iK - x^t||^2
    grad_evals: float  # in whole minibatches; a teacher's pass forward is a third
    share: int = 1  # of how many replies `up` is the mean; 0 if it is counted with another's
    sent: int = 0  # bytes of its own upload
    metrics: dict[str, float] | None = None  # what the method's `client_metrics` reports
    own: Score | None = None  # of its own model on its own data, in a round that asks for it
    digest: int | None = None  # of its own upload
    mean_rate: float = 1.0  # of the method's `rate` over its steps


class Reply(NamedTuple):
    """What comes back: the upload, the state to keep if it is counted, and what happened; both trees may be on loan
    until the next reply is asked for."""

    job: Job
    up: Any
    client: Any
    facts: Facts


class Oracle:
    """The gradient of the current minibatch at any point; see `method.Grad`."""

    def __init__(self, work: Work, buffers: list[torch.Tensor]) -> None:
        self.flat = work.flat
        self.loss = work.loss
        self.precision = work.plan.precision
        self.clip = work.gradient_clip
        self.taught = partial(is_taught, work.flat, work.data.classes, type(work.method).__name__)
        self.buffers = buffers  # one a call of a step, made when it is needed
        self.losses: list[torch.Tensor] = []  # of the first call of each step, read once at the end
        self.evals = 0.0
        self.passes = 0.0  # forward alone, of teachers

    def next_step(self, inputs: torch.Tensor, targets: torch.Tensor, mask_seed: int) -> None:
        """Move on to a new minibatch and dropout mask."""
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
        rows = len(self.inputs)
        used = rows if fraction == 1.0 else max(1, round(fraction * rows))
        if self.calls == len(self.buffers):
            self.buffers.append(torch.empty_like(self.flat.x))
        out = self.buffers[self.calls]
        inputs, term = self.inputs[:used], None
        if teacher is not None and self.taught(teacher, pull, tau):
            seed_device(self.flat.device, self.mask_seed)
            with (
                arithmetic(self.precision, self.flat.device),
                self.flat.statistics.kept(),
            ):  # autocast remembers weights
                term = Pull(self.flat.outputs(teacher, inputs), pull, tau).term
            self.passes += used / rows
        seed_device(self.flat.device, self.mask_seed)
        later = self.flat.statistics.kept() if self.calls and self.flat.statistics else nullcontext()
        with arithmetic(self.precision, self.flat.device), later:  # a step counts once in running statistics
            loss = self.flat.gradient(x, inputs, self.targets[:used], self.loss, out, term)
        if self.calls == 0:
            self.losses.append(loss)
        self.calls += 1
        self.evals += used / rows
        return clip_(out, self.clip) if self.clip else out


def run_client(work: Work, job: Job, down: Any, client: Any, buffers: list[torch.Tensor] | None = None) -> Reply:
    """K local steps of one client: `x -= lr * rate(k, K) * (direction + mix * wd * x)`.

    Args:
        down: what the server sent, in the model's dtype.
        client: a private copy of the client's state; `init_client` at first touch is the caller's part.
        buffers: gradients' memory, from one client to the next: large vectors that come and go split the heap.
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
    flat.model.train()
    k = 0
    try:
        rates = hooks.rates(work.local_steps(len(rows)), steps)  # a straggler follows the plan as far as it comes
        x = hooks.start(down, client).clone()
        for k, positions in enumerate(order, 1):
            oracle.next_step(*data.batch(rows[positions], stream), mask_seed=masks + k)
            step_(x, hooks.direction(x, oracle, down, client), job.lr * rates[k - 1], work)
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
    spent, digest = oracle.evals + oracle.passes / PASSES, upload_digests(up)[0]
    facts = Facts(steps, len(rows), train_loss, drift, spent, 1, sent, metrics, own, digest, local.mean_rate)
    return Reply(job, up, kept, facts)


def own_model(work: Work, job: Job, x: torch.Tensor) -> Score | None:
    """The score of a client's own model at the end of its turn; None in a round that does not ask for it."""
    if not work.plan.measures(job.t + 1, own=True):
        return None
    with own_randomness(work.flat.device):  # an upload that draws draws the same, asked or not
        return own_score(work.flat, x, work.data, work.loss, job.client)


def step_(x: torch.Tensor, direction: torch.Tensor, lr: float, work: Work) -> None:
    """x -= lr * (direction + mix * wd * x), in place."""
    plan = work.plan
    if plan.clip and plan.clip_mode == "released":
        shrink = work.method.shrink
        direction = clip_(direction - shrink * x, plan.clip).add_(x, alpha=shrink)
    wd = plan.weight_decay * (1.0 if plan.decay_outside_mix else work.method.mix)
    if wd and work.flat.decay is not None:
        x.addcmul_(x, work.flat.decay, value=-lr * wd)
    elif wd:
        x.mul_(1 - lr * wd)
    x.sub_(direction, alpha=lr)


def failed(work: Work, job: Job, k: int, steps: int, error: Exception) -> ClientFailed:
    """What to say when a client raises."""
    return ClientFailed(
        f"{type(work.method).__name__}: round {job.t + 1}, client {job.client}, step {k} of {steps}: {reason(error)}; "
        f"inputs of shape {work.data.shape}, {work.data.sizes[job.client]} samples"
    )


def diverged(work: Work, job: Job, steps: int, losses: list[float], down: Any, client: Any) -> Diverged:
    """What to say when a client's update is not finite: whether its data, what it was given, or its rate is to blame.

    Args:
        losses: at the first oracle call of each step; none of a method that makes no call.
        client: its state; a method may have changed it on the way.
    """
    name, rows, plan = type(work.method).__name__, work.data.rows(job.client), work.plan
    for what, a in (("inputs", work.data.x), ("targets", work.data.y)):
        own = a[placed(rows, a.device)] if a.is_floating_point() else None
        if own is not None and not all_finite((own,)):
            bad = rows[int((~own.reshape(len(rows), -1).isfinite()).any(1).nonzero()[0, 0])]
            return Diverged(
                f"{name}: the data of client {job.client} hold NaN or Inf (found in round {job.t + 1}: {what} of row "
                f"{bad}); clean them, the learning rate is not to blame"
            )
    told = f"{name}: client {job.client} diverged (NaN or Inf) in round {job.t + 1}"
    clip = 10.0 if not plan.clip or plan.clip > 10 else plan.clip / 10
    cure = f"try a lower --lr (now {job.lr:.4g}), fewer local steps (now {steps}) or --clip {clip:g}"
    most = large(work.flat.x)
    found = {**grown("the server's", of_method(down), most), **grown("its own", of_method(client), most)}
    worst = max((what for what in found if found[what] < math.inf), key=lambda what: found[what], default="")
    if worst:
        return Diverged(
            f"{told}; {worst.replace('.', ' ', 1)} had run away to a norm of {found[worst]:.3g}; {cure} from the start"
        )
    if not losses:
        return Diverged(f"{told}; {cure}")
    first = losses[0]
    if not math.isfinite(first):
        blamed = f"the server's step in round {job.t}" if job.t else "the first model, or the scale of the inputs,"
        return Diverged(f"{told}; its loss is {first} before any step: {blamed} is to blame, not the local rate")
    bad = next((k for k, loss in enumerate(losses, 1) if not math.isfinite(loss)), 0)
    last = losses[bad - 2 if bad else -1]
    course = f"is {losses[bad - 1]} at step {bad}" if bad else "is finite, what came of the last step is not"
    return Diverged(f"{told}; {cure}: its loss was {first:.3g} at first, {last:.3g} at last, and {course}")
