"""The local work of a round, collected in job order: the mean of the uploads, new states, who failed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from .client import Failed, Job, Reply
from .plan import Plan
from .upload_digest import Uploads
from .vec import Mean, accurate, one_thread

if TYPE_CHECKING:
    from .server import Simulation


class Collected(NamedTuple):
    """What came of it: the mean of the uploads, what else was said, and bytes sent up."""

    mean: Mean
    replies: list[Reply]
    bytes_up: int


def collect(run: Simulation, jobs: list[Job], down: Any, lost: set[int], active: int) -> Collected:
    """Have the jobs done; new client states are staged, and who failed is added to `lost`."""
    mean = Mean(accurate(run.work.flat.device))
    replies: list[Reply] = []
    bytes_up = 0
    run.states.discard()
    for done, reply in enumerate(run.backend.run(jobs, down, run.client_state), 1):
        run.observers.tell("client", done, len(jobs))
        if isinstance(reply, Failed):
            if run.plan.on_client_error == "stop" or len(lost) + 1 == active:
                raise reply.error
            lost.add(reply.job.client)
            continue
        if reply.facts.share:
            with one_thread():  # a second one would wait for cores that train clients
                mean.add(reply.up, weight(run.plan, reply) * reply.facts.share)
        bytes_up += reply.facts.sent
        run.health.client(reply.client, first=not replies)
        run.states.stage(reply.job.client, reply.client, reply.job.t, "settle" not in run.work.hooks.reporting)
        replies.append(reply._replace(up=None, client=None))
    return Collected(mean, replies, bytes_up)


def weight(plan: Plan, reply: Reply) -> float:
    """How much a reply counts."""
    return float(reply.facts.n) if plan.weighting == "samples" else 1.0


def sent(replies: list[Reply]) -> Uploads:
    """The digests of what was sent up, as far as they are known: a back end from elsewhere may have lost some."""
    return {r.job.client: r.facts.digest for r in replies if r.facts.digest is not None}
