"""Values of one client's turn: the work that clients share, a job, its reply or failure, and the facts about it."""

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
    """Shapes of a method's messages: trees of tensors without numbers (device meta)."""

    down: Any
    client: Any
    up: Any


@dataclass(frozen=True)
class Work:
    """The part of the local work that all clients share; `backends.packing` makes it ready to be sent."""

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
        """Shapes of the messages, found by one call of the hooks at x^0 in the driver; they travel with the work."""
        hooks, x0 = self.hooks, self.flat.x
        down, client = hooks.broadcast(hooks.init_server(x0.clone())), hooks.init_client(x0)
        with hooks.hook("upload"):
            up, kept = hooks.upload(x0.clone(), down, tree_map(torch.clone, client), Local(1, 1.0, 1, active=1))
        return Shapes(*(tree_map(meta_like, tree) for tree in (down, kept, up)))

    def at(self, t: int) -> Work:
        """Return the work of round t = 0, 1, ..., with the method of that round if a schedule changes it."""
        method = self.plan.method_at(self.method, t, paper_decay(self.method))
        if method is self.method:
            return self
        work = replace(self, method=method)
        work.__dict__["hooks"] = self.hooks.with_method(method)
        return work

    def local_steps(self, n: int) -> int:
        """Return K_i of a client with n samples."""
        return self.plan.steps_of(n)


class Job(NamedTuple):
    """One client's turn in one round."""

    client: int
    t: int
    lr: float
    K: int = 0  # local steps of a straggler; 0 for the plan's


class Failed(NamedTuple):
    """The result of a turn that raised, or whose update was not finite."""

    job: Job
    error: ClientFailed | Diverged


class Facts(NamedTuple):
    """Numbers about a client's turn."""

    K: int
    n: int
    train_loss: float  # mean loss at the first oracle call of each step
    drift: float  # ||x_iK - x^t||^2
    grad_evals: float  # in whole minibatches; a teacher's forward pass counts a third
    represents: int = 1  # replies whose mean `up` is; 0 (and no `up`) if the block engine put this one into another's
    sent: int = 0  # bytes of its own upload
    metrics: dict[str, float] | None = None  # what the method's `client_metrics` reports
    own: Score | None = None  # of its own model on its own data, in a round that scores clients
    digest: int | None = None  # of its own upload
    mean_rate: float = 1.0  # mean of the method's `rate` over its steps


class Reply(NamedTuple):
    """The result of a turn: the upload, the state to keep if it is counted, and facts.

    Both trees may lie in memory that is reused when the next reply is asked for.
    """

    job: Job
    up: Any
    client: Any
    facts: Facts
