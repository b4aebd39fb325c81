"""One round: plan it, broadcast, collect the replies, update the server by their mean, score, record.

`compute_round` reads as the whole round; the functions below it are its steps, in the order in which it calls them.
Which clients work, for how many steps and in which order follows from plan, data and round. Only a user's sampler may
also use what the server knows of earlier rounds.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from ..client.batch_norm import full_vector, method_part
from ..client.evaluate import Score, slices
from ..client.failures import server_blamed
from ..client.trees import all_finite, chunks, distance, one_thread, sum_dtype, tree_bytes, tree_leaves, tree_map
from ..client.upload_digest import Uploads
from ..client.work import Failed, Job, Reply, Work
from ..config.plan import Plan
from ..config.presets import paper_decay
from ..errors import UserError
from ..methods.base import Method, Round
from ..record import Record, finite
from ..utils.random import dropped, straggler_steps
from .client_metrics import ClientMetrics
from .health import server_diverged
from .states import settle

if TYPE_CHECKING:
    from ..backends import Backend
    from ..client.evaluate import Sums
    from ..data.federated import Federated
    from .cohort import Cohort
    from .simulation import Simulation


class RoundResult(NamedTuple):
    """One round that was computed."""

    server: Any  # the state after it
    record: Record
    client_metrics: ClientMetrics | None  # if the round was one to measure them
    uploads: Uploads


def compute_round(run: Simulation) -> RoundResult:
    """Compute the next round from the present state, which stays as it is; new client states are only staged."""
    started = time.perf_counter()
    planned = plan_round(run.work, run.t, run.cohort)
    work = run.work.at(run.t)
    collected, mean = collect_replies(run, planned, broadcast(run, work))
    updated = update_server(run, work, planned, collected.replies, mean)
    del mean  # Vectors are large: none is kept longer than it is needed.
    trained = time.perf_counter()
    scored = score_round(run.backend, run.work, full_vector(updated.server), run.t + 1, collected.replies, planned.lr)
    train_loss = average(collected.replies, "train_loss")
    signs = run.health.round(run.t + 1, updated.server, train_loss, (scored.test, scored.validation))
    times = trained - started, time.perf_counter() - trained
    record = make_record(run, planned, collected, updated, scored, signs, times)
    # The back end of another package may return replies without digests.
    uploads = {r.job.client: r.facts.digest for r in collected.replies if r.facts.digest is not None}
    return RoundResult(updated.server, record, scored.clients, uploads)


# --- plan ---


class RoundJobs(NamedTuple):
    """The turns of one round."""

    lr: float  # the local rate
    active: list[int]  # S^t, by id
    lost: set[int]  # the active clients whose reply is lost by `dropout`; they have no job
    jobs: list[Job]  # in the order in which replies are summed


def plan_round(work: Work, t: int, cohort: Cohort) -> RoundJobs:
    """Return the turns of round t = 0, 1, ..."""
    plan = work.plan
    lr = plan.rate(t, paper_decay(work.method))
    active = cohort.draw(t)
    lost = set(dropped(plan.seed, t, active, plan.dropout).tolist())
    asked = active.tolist()
    return RoundJobs(lr, asked, lost, make_jobs(work, [i for i in asked if i not in lost], t, lr))


def make_jobs(work: Work, clients: list[int], t: int, lr: float) -> list[Job]:
    """Return the clients' jobs in job order; the job of a straggler has its own number of steps."""
    plan, order = work.plan, job_order(np.array(clients, dtype=np.int64), work.data.sizes)
    if not plan.stragglers:
        return [Job(i, t, lr) for i in order]
    jobs = []
    for i in order:
        whole = work.local_steps(int(work.data.sizes[i]))
        done = straggler_steps(plan.seed, t, i, whole, plan.stragglers)
        jobs.append(Job(i, t, lr, done if done < whole else 0))
    return jobs


def job_order(clients: np.ndarray, sizes: np.ndarray) -> list[int]:
    """Return the clients by number of samples, largest first, then by id: longest jobs begin first.

    Replies are summed in this order, whichever is ready first, so the order fixes the bits.
    """
    found: list[int] = clients[np.lexsort((clients, -sizes[clients]))].tolist()
    return found


# --- broadcast and collect ---


def broadcast(run: Simulation, work: Work) -> Any:
    """Return the server's message to its clients, in the model's dtype."""
    return tree_map(lambda a: a.to(work.flat.dtype, copy=True), work.hooks.broadcast(run.server))


class Mean:
    """Weighted mean of trees as a running sum in the memory of one tree.

    The order of the calls of `add` fixes the bits: every back end yields replies in job order for this reason.

    Example:
        >>> from fedspeed.methods.base import Movement
        >>> mean = Mean(torch.float64)
        >>> for value, weight in ((1.0, 1.0), (4.0, 2.0)):
        ...     mean.add(Movement(torch.tensor([value])), weight)
        >>> mean.result().D.item(), mean.weight
        (3.0, 3.0)
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.weight = 0.0
        self.total: Any = None

    def add(self, tree: tuple[Any, ...], weight: float) -> None:
        """Add one tree to the sum."""
        self.weight += weight
        if self.total is None:
            dense = torch.contiguous_format
            self.total = tree_map(lambda a: a.to(self.dtype, copy=True, memory_format=dense).mul_(weight), tree)
        else:
            for total, a in zip(tree_leaves(self.total), tree_leaves(tree), strict=True):
                # The order of the trees fixes the bits, the size of the chunks does not: the sum is entry by entry.
                # Chunks that are converted first are seven times as fast as one sum over two dtypes.
                for part, more in chunks(total, a, size=2**17):
                    part.add_(more.to(self.dtype), alpha=weight)

    def result(self) -> Any:
        """Return the mean; it overwrites the sum, so this may be called once."""
        return tree_map(lambda a: a.div_(self.weight), self.total)


class Collected(NamedTuple):
    """The replies of a round, without their vectors, and the traffic."""

    replies: list[Reply]  # those that count, in job order
    lost: set[int]  # the active clients without a reply that counts
    bytes_down: int
    bytes_up: int


def collect_replies(run: Simulation, planned: RoundJobs, down: Any) -> tuple[Collected, Mean]:
    """Run the jobs and sum the uploads; new client states are staged.

    A client that fails ends the round, or is lost if `on_client_error` is `drop` and another client is left.
    """
    mean, lost = Mean(sum_dtype(run.work.flat.device)), set(planned.lost)
    replies: list[Reply] = []
    bytes_up = 0
    final = (
        "settle" not in run.work.hooks.overridden
    )  # a method's `settle` changes states again, when the mean is known
    run.states.discard()
    for done, reply in enumerate(run.backend.run(planned.jobs, down, run.state_reader), 1):
        if run.observers.all:
            run.observers.tell("client", done, len(planned.jobs))
        if isinstance(reply, Failed):
            if run.plan.on_client_error == "stop" or len(lost) + 1 == len(planned.active):
                raise reply.error
            lost.add(reply.job.client)
            continue
        if reply.facts.represents:  # 0: the upload of another reply is a mean that contains this one
            with one_thread():  # A second thread would wait for cores that train clients.
                # Back ends yield replies in job order: the order of this sum fixes the bits.
                mean.add(reply.up, weight(run.plan, reply) * reply.facts.represents)
        bytes_up += reply.facts.sent
        if not replies:
            run.health.client(reply.client)
        run.states.stage(reply.job.client, reply.client, reply.job.t, last=final)
        replies.append(Reply(reply.job, None, None, reply.facts))
    return Collected(replies, lost, len(planned.active) * tree_bytes(down), bytes_up), mean


def weight(plan: Plan, reply: Reply) -> float:
    """Return the weight of a reply in the mean."""
    return float(reply.facts.n) if plan.weighting == "samples" else 1.0


# --- update ---


class Updated(NamedTuple):
    """The server after its step, the metrics of method and clients, and ||x^{t+1} - x^t||."""

    server: Any
    metrics: dict[str, float]
    update_norm: float


def update_server(run: Simulation, work: Work, planned: RoundJobs, replies: list[Reply], mean: Mean) -> Updated:
    """Take the mean of the uploads and return the server after its step; staged client states are settled."""
    t, method = run.t, run.method
    K, rate = mean_steps(run.plan, replies, mean.weight)
    round = Round(t, mean.weight, run.total_weight, K, planned.lr, run.plan.seed, len(planned.active), rate)
    with one_thread():  # The bits of a sum depend on the number of threads.
        upload = mean.result()
        result = work.hooks.received(upload, round)
        settle(run.states, work.hooks, result, round)
        server = work.hooks.update(run.server, result, round)
        if not all_finite(server):
            blame = server_blamed(method, t, run.server, upload, result)
            raise blame or server_diverged(method, server, t, planned.lr)
        reported = merged(method, work.hooks.metrics(server, result, round), replies)
        metrics = norms(method, method_part(server)) | reported
        return Updated(server, metrics, distance(server.x, run.server.x))


def mean_steps(plan: Plan, replies: list[Reply], total: float) -> tuple[float, float]:
    """Return the weighted mean of the clients' local steps, and the mean rate of all steps.

    Args:
        total: the sum of the weights.
    """
    weighted = [weight(plan, reply) * reply.facts.K for reply in replies]
    steps, rates = sum(weighted), sum([k * reply.facts.mean_rate for k, reply in zip(weighted, replies, strict=True)])
    return steps / total, rates / steps


def merged(method: Method, own: dict[str, float], replies: Iterable[Reply]) -> dict[str, float]:
    """Return the metrics of a record: the mean of each client metric over the clients that report it, in job order,
    then the method's own metrics of the round."""
    found: dict[str, list[float]] = {}
    for reported in [reply.facts.metrics for reply in replies]:
        for name, value in reported.items() if reported else ():
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


# --- score ---


class Scored(NamedTuple):
    """The scores of a round; None where there is none."""

    test: Score | None = None
    validation: Score | None = None
    clients: ClientMetrics | None = None


def score_round(backend: Backend, work: Work, x: torch.Tensor, t: int, replies: list[Reply], lr: float) -> Scored:
    """Score the server's full vector after t rounds; if the plan asks, also after each client has trained it for some
    steps with rate lr. The scores of the clients' own models are in their replies."""
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
    found = measured(backend.evaluate_clients(vector), data, t, own)
    if plan.personal_steps:
        loss, accuracy = np.array(backend.personalise(vector, t - 1, lr)).T
        found = found._replace(personalised_loss=loss[None], personalised_accuracy=accuracy[None])
    return Scored(test, validation, found)


def measured(parts: Iterable[Sums], data: Federated, t: int, own: dict[int, Score | None] | None) -> ClientMetrics:
    """Return the client scores of round t from sums over pieces of data; `own` is None if it was not asked for."""
    m, sizes = data.clients, np.diff(data.scored.offsets)
    loss, correct = np.zeros((2, m))
    for part in parts:
        here = slice(part.first, part.first + len(part.loss))
        loss[here] += part.loss
        correct[here] += part.right
    counts = np.where(sizes, sizes, math.nan)  # NaN is the score of a client without a test part
    found = ClientMetrics(np.array([t]), sizes, (loss / counts)[None], (correct / counts)[None])
    found = found._replace(on="train" if data.client_test is None else "test")
    if own is None:
        return found
    scores = np.full((2, 1, m), math.nan)
    for client, score in own.items():
        if score is not None:  # An external back end may have lost it.
            scores[:, 0, client] = score
    return found._replace(own_loss=scores[0], own_accuracy=scores[1])


# --- record ---


def make_record(
    run: Simulation,
    planned: RoundJobs,
    collected: Collected,
    updated: Updated,
    scored: Scored,
    signs: dict[str, float],
    times: tuple[float, float],
) -> Record:
    """Return the record of a round; `times` are the seconds of training and of evaluation."""
    replies, (test, validation, clients) = collected.replies, scored
    record = Record(
        round=run.t + 1,
        cohort=planned.active,
        lr=planned.lr,
        train_loss=average(replies, "train_loss"),
        test_loss=test and test.loss,
        test_accuracy=test and test.known_accuracy,
        drift=average(replies, "drift"),
        update_norm=updated.update_norm,
        bytes_down=collected.bytes_down,
        bytes_up=collected.bytes_up,
        grad_evals=sum([reply.facts.grad_evals for reply in replies]),
        dropped=sorted(collected.lost),
        stragglers=sorted([reply.job.client for reply in replies if reply.job.K]),
        seconds=times[0],
        eval_seconds=times[1],
        validation_loss=validation and validation.loss,
        validation_accuracy=validation and validation.known_accuracy,
        metrics=updated.metrics,
        signs=signs,
        client_test=clients.statistics() if clients and clients.on == "test" else {},
        client_train=clients.statistics() if clients and clients.on == "train" else {},
        wall_seconds=run.stopping.wall_seconds(),
        client_losses=client_losses(replies) if run.cohort.history is not None else [],
    )
    return run.meter.with_costs(record, replies, run.elapsed) if run.meter else record


def client_losses(replies: list[Reply]) -> list[float | None]:
    """Return the loss of every reply in the order of the cohort, as the record holds it.

    A resumed run reads them from the record, and a user's sampler must see equal numbers in both.
    """
    return [finite(float(reply.facts.train_loss)) for reply in sorted(replies, key=lambda reply: reply.job.client)]


def average(replies: list[Reply], name: str) -> float:
    """Return the mean over clients of a fact that every reply has, `drift` for example."""
    return float(sum([getattr(reply.facts, name) for reply in replies])) / len(replies)
