"""Who works in a round, for how many steps, in which order: a function of plan, data and round alone."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .client import Job, Work
from .presets import paper_decay
from .sampling import cohort, dropped, straggler_steps


class Turns(NamedTuple):
    """The turns of one round.

    Args:
        lr: the local rate.
        active: S^t, by id.
        lost: those of them whose reply is lost by `dropout`; they have no job.
        jobs: in the order in which replies are summed.
    """

    lr: float
    active: list[int]
    lost: set[int]
    jobs: list[Job]


def turns(work: Work, t: int) -> Turns:
    """The turns of round t = 0, 1, ..."""
    plan = work.plan
    lr = plan.rate(t, paper_decay(work.method))
    active = cohort(plan.seed, t, work.data.clients, plan.active, plan.cohort)
    lost = {int(i) for i in dropped(plan.seed, t, active, plan.dropout)}
    jobs = make_jobs(work, [i for i in active if i not in lost], t, lr)
    return Turns(lr, [int(i) for i in active], lost, jobs)


def make_jobs(work: Work, clients: list[int], t: int, lr: float) -> list[Job]:
    """Jobs in job order; a straggler's own number of steps stands in its job."""
    jobs = []
    for i in job_order(np.array(clients, dtype=np.int64), work.data.sizes):
        whole = work.local_steps(int(work.data.sizes[i]))
        done = straggler_steps(work.plan.seed, t, i, whole, work.plan.stragglers)
        jobs.append(Job(i, t, lr, done if done < whole else 0))
    return jobs


def job_order(clients: np.ndarray, sizes: np.ndarray) -> list[int]:
    """Longest jobs first, then by id: the order in which replies are summed."""
    return [int(i) for i in clients[np.lexsort((clients, -sizes[clients]))]]
