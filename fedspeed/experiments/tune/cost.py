"""Cost of a run in minibatch gradients, computed before it is run; equal to what its records will count."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import accumulate
from typing import Any

import numpy as np

from ...config.cohort import cohort_name
from ...config.plan import Plan
from ...methods.base import Method
from ...server.cohort import Cohort
from ...utils.random import dropped, straggler_steps


def gradients(method: Method, plan: Plan, sizes: np.ndarray) -> list[float]:
    """Return the gradients up to every round of a run that does not diverge.

    A user's sampler may choose by losses, which are not known before: for it they are those of cohorts drawn uniformly.

    Args:
        sizes: the number of training samples of each client.
    """

    @cache
    def of_batch(rows: int) -> float:
        return per_step(method, rows)

    @cache
    def of_client(n: int, steps: int) -> float:
        epoch = [min(plan.batch_size, n - a) for a in range(0, n, plan.batch_size)]
        whole, rest = divmod(steps, len(epoch))
        return whole * sum(map(of_batch, epoch)) + sum(map(of_batch, epoch[:rest]))

    rounds = []
    cohort = Cohort(plan if cohort_name(plan.cohort) else replace(plan, cohort="fixed"), sizes)
    for t in range(plan.rounds):
        active = cohort.draw(t)
        lost = {int(i) for i in dropped(plan.seed, t, active, plan.dropout)}
        cost = 0.0
        for i in (int(i) for i in active if i not in lost):
            steps = straggler_steps(plan.seed, t, i, plan.steps_of(int(sizes[i])), plan.stragglers)
            cost += of_client(int(sizes[i]), steps)
        rounds.append(cost)
    return list(accumulate(rounds))


def per_step(method: Method, rows: int) -> float:
    """Return how many gradients of a minibatch of `rows` rows one local step takes, by running it on a small vector."""
    import torch

    from ...client.distillation import PASSES

    evals = 0.0

    def grad(x: Any, fraction: float = 1.0, *, teacher: Any = None, pull: float = 1.0, tau: float = 1.0) -> Any:
        nonlocal evals
        part = 1.0 if fraction == 1.0 else max(1, round(fraction * rows)) / rows
        evals += part * (1.0 + 1 / PASSES if teacher is not None and pull else 1.0)
        return torch.ones_like(x)

    x0 = torch.arange(1.0, 4.0)
    down, client = method.broadcast(method.init_server(x0.clone())), method.init_client(x0)
    method.direction(method.start(down, client).clone(), grad, down, client)
    return evals
