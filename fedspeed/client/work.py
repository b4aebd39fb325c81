"""fedspeed/client/work.py."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch

from ..config.plan import Plan
from ..config.presets import paper_decay
from ..data.federated import Federated
from ..errors import ClientFailed, Diverged
from ..methods.base import Local, Method
from .batch_norm import BatchNormHooks
from .evaluate import Score
from .flat_model import FlatModel, Loss
from .hooks import Hooks
from .trees import meta_like, tree_map


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
            return BatchNormHooks(self.method, self.flat, local=self.plan.batch_norm == "local")
        return Hooks(self.method, self.flat.d, self.flat.dtype)

    @cached_property
    def shapes(self) -> Shapes:
        """Found by one call of the hooks at x^0, where the work was made; it travels with it."""
        hooks, x0 = self.hooks, self.flat.x
        down, client = hooks.broadcast(hooks.init_server(x0.clone())), hooks.init_client(x0)
        with hooks.hook("upload"):
            up, kept = hooks.upload(x0.clone(), down, tree_map(torch.clone, client), Local(1, 1.0, 1, active=1))
        return Shapes(*(tree_map(meta_like, tree) for tree in (down, kept, up)))

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
