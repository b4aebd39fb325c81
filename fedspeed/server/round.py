"""Who works in a round, for how many steps, in which order: a function of plan, data and round alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..client.evaluate import Score, slices
from ..client.trees import Mean, one_thread, sum_dtype
from ..client.upload_digest import Uploads
from ..client.work import Failed, Job, Reply, Work
from ..config.plan import Plan
from ..config.presets import paper_decay
from ..errors import UserError
from ..methods.base import Method
from ..utils.random import cohort, dropped, straggler_steps
from .client_metrics import ClientMetrics

if TYPE_CHECKING:
    import torch

    from ..backends import Backend
    from ..client.evaluate import Sums
    from ..data.federated import Federated
    from .simulation import Simulation


class RoundJobs(NamedTuple):
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


def plan_round(work: Work, t: int) -> RoundJobs:
    """The turns of round t = 0, 1, ..."""
    plan = work.plan
    lr = plan.rate(t, paper_decay(work.method))
    active = cohort(plan.seed, t, work.data.clients, plan.active, plan.cohort)
    lost = {int(i) for i in dropped(plan.seed, t, active, plan.dropout)}
    jobs = make_jobs(work, [i for i in active if i not in lost], t, lr)
    return RoundJobs(lr, [int(i) for i in active], lost, jobs)


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


class Collected(NamedTuple):
    """What came of it: the mean of the uploads, what else was said, and bytes sent up."""

    mean: Mean
    replies: list[Reply]
    bytes_up: int


def collect_replies(run: Simulation, jobs: list[Job], down: Any, lost: set[int], active: int) -> Collected:
    """Have the jobs done; new client states are staged, and who failed is added to `lost`."""
    mean = Mean(sum_dtype(run.work.flat.device))
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
        if reply.facts.represents:
            with one_thread():  # a second one would wait for cores that train clients
                mean.add(reply.up, weight(run.plan, reply) * reply.facts.represents)
        bytes_up += reply.facts.sent
        run.health.client(reply.client, first=not replies)
        run.states.stage(reply.job.client, reply.client, reply.job.t, "settle" not in run.work.hooks.overridden)
        replies.append(reply._replace(up=None, client=None))
    return Collected(mean, replies, bytes_up)


def weight(plan: Plan, reply: Reply) -> float:
    """How much a reply counts."""
    return float(reply.facts.n) if plan.weighting == "samples" else 1.0


def sent(replies: list[Reply]) -> Uploads:
    """The digests of what was sent up, as far as they are known: a back end from elsewhere may have lost some."""
    return {r.job.client: r.facts.digest for r in replies if r.facts.digest is not None}


class Scored(NamedTuple):
    """The scores of a round; None where there is none."""

    test: Score | None = None
    validation: Score | None = None
    clients: ClientMetrics | None = None


def score_round(backend: Backend, work: Work, x: torch.Tensor, t: int, replies: list[Reply]) -> Scored:
    """Scores of the server's vector after t rounds (`carried.whole`), and of the clients' own, in their replies."""
    plan, data = work.plan, work.data
    due, each = t % plan.eval_every == 0 or t == plan.rounds, plan.scores_clients(t)
    if not due and not each:
        return Scored()
    vector = x.to(work.flat.dtype, copy=True)
    test = backend.evaluate(vector) if due and slices(data, False) else None
    validation = backend.evaluate(vector, validation=True) if due and slices(data, True) else None
    if not each:
        return Scored(test, validation)
    own = {reply.job.client: reply.facts.own for reply in replies} if plan.scores_clients(t, own=True) else None
    return Scored(test, validation, measured(backend.evaluate_clients(vector), data, t, own))


def measured(parts: Iterable[Sums], data: Federated, t: int, own: dict[int, Score | None] | None) -> ClientMetrics:
    """The scores of round t, from the slices' sums; `own` are the active clients' own, None if not asked for."""
    m = data.clients
    loss, correct = np.zeros(m), np.zeros(m)
    for part in parts:
        here = slice(part.first, part.first + len(part.loss))
        loss[here] += part.loss
        correct[here] += part.right
    found = ClientMetrics(np.array([t]), data.sizes, (loss / data.sizes)[None], (correct / data.sizes)[None])
    if own is None:
        return found
    scores = np.full((2, 1, m), math.nan)
    for client, score in own.items():
        if score is not None:  # a back end from elsewhere may have lost it
            scores[:, 0, client] = score
    return found._replace(own_loss=scores[0], own_accuracy=scores[1])


def merged(method: Method, own: dict[str, float], replies: Iterable[Reply]) -> dict[str, float]:
    """What a record holds: of what clients report, each name's mean over those who do, in job order; then the method's
    own of the round."""
    found: dict[str, list[float]] = {}
    for reply in replies:
        for name, value in (reply.facts.metrics or {}).items():
            found.setdefault(name, []).append(value)
    twice = next((name for name in own if name in found), None)
    if twice:
        raise UserError(
            f"{type(method).__name__}: metrics and client_metrics both report {twice}; give one of them another name"
        )
    return {name: sum(values) / len(values) for name, values in found.items()} | own


def norms(method: Method, server: Any) -> dict[str, float]:
    """Return the norms of x and of the server's running mean (`x_norm`, `H_norm`) for a method that keeps one.

    The server adds its running mean to x in every round, so these two numbers show whether it has settled.
    """
    if method.running_mean is None:
        return {}
    place = method.running_mean[1]
    name = place.rpartition(".")[2]
    return {"x_norm": float(server.x.norm()), f"{name}_norm": float(attrgetter(place)(server).norm())}


def average(replies: list[Reply], name: str) -> float:
    """The mean over clients of one of the facts that every reply has, `drift` for example."""
    return float(sum(getattr(reply.facts, name) for reply in replies)) / len(replies)


def steps_of(replies: list[Reply], weight: Callable[[Reply], float], total: float) -> tuple[float, float]:
    """The mean number of local steps under the weights, whose sum is `total`, and the mean rate of those steps."""
    steps = sum(weight(reply) * reply.facts.K for reply in replies)
    return steps / total, sum(weight(reply) * reply.facts.K * reply.facts.mean_rate for reply in replies) / steps
