"""The back end whose clients are SuperNodes: jobs become messages, valid replies are returned in job order.

A message that cannot be answered (its SuperNode was killed, or started again) is sent again: a device computes the same
bits again. A client whose reply is refused, or does not come in time, has failed and drops out of the round.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch

from ..backends.serial import Serial
from ..client.evaluate import Score, Sums
from ..client.work import Failed, Job, Reply, Work
from ..errors import ClientFailed, Diverged, UserError
from .messages import Refused, Vector, cut, failure, pulled, read_reply, read_sums, refusal, server_metrics, to_arrays
from .roster import ClientsFile, Node, Roster
from .states import CountedRounds

log = logging.getLogger("flwr.fedspeed")
TRIES = 3
"""Number of times that a job is sent to a device that answers with an error of Flower."""


class FlowerBackend(Serial):
    """Back end that runs jobs on devices and evaluates the server's test set in this process.

    Args:
        work: the local work, with the sizes of all clients and none of their data.
        counted: the round of each client that was counted last.
        grid: Flower's `Grid`, which sends and receives messages.
        timeout, poll: see `server_app`.
    """

    def __init__(
        self, work: Work, counted: CountedRounds, grid: Any, roster: Roster, timeout: float, poll: float
    ) -> None:
        super().__init__(work)
        self.counted, self.grid, self.roster = counted, grid, roster
        self.timeout, self.poll = timeout, poll
        self.clients_file: ClientsFile = roster.clients_file
        self.t = 0

    def run(self, jobs: Sequence[Job], down: Any, state: Callable[[int], Any]) -> Iterator[Reply | Failed]:
        """Yield the replies in job order; states are on the devices, so `state` is not called."""
        self.clients_file.begin()
        self.t = jobs[0].t if jobs else self.t
        by_client = {job.client: job for job in jobs}
        exchange = Exchange(self, by_client, "train", to_arrays(down), self._details, self._read)
        for job in jobs:
            yield exchange.result(job.client)

    def evaluate_clients(self, x: torch.Tensor) -> list[Sums]:
        """Return sums over every client's data, computed on the devices; NaN for a client that does not answer."""
        jobs = {i: Job(i, self.t, 0.0) for i in range(self.clients_file.clients)}
        exchange = Exchange(self, dict(jobs), "evaluate", to_arrays(Vector(x)), lambda job: {}, self._sums)
        found = [exchange.result(i) for i in jobs]
        none = Sums(0, np.array([math.nan]), np.array([math.nan]))
        return [none._replace(first=i) if isinstance(f, Failed) else f for i, f in zip(jobs, found, strict=True)]

    def personalise(self, x: torch.Tensor, t: int, lr: float) -> list[Score]:
        """Refuse: `agreement` has refused the setting before."""
        raise UserError("flower: devices have no personalised scores; leave `personalised` out of client_metrics")

    @cached_property
    def _taken(self) -> set[str]:
        return server_metrics(self.work)

    def _details(self, job: Job) -> dict[str, Any]:
        counted, before = self.counted.of(job.client)
        return {"lr": job.lr, "K": job.K, "counted": counted, "before": before}

    def _read(self, content: Any, job: Job) -> Reply:
        reply, lost = read_reply(content, self.clients_file.run, job, self.work, self._taken)
        if lost:  # it is counted all the same
            node = self.roster.at[job.client].id if job.client in self.roster.at else 0
            why = "started from the initial state: a mean over all clients that the server keeps is off by its share"
            self.clients_file.refuse("lost state", why, node, job.client, job.t)
        return reply

    def _sums(self, content: Any, job: Job) -> Sums:
        loss, right = read_sums(content, self.clients_file.run, job, self.work)
        return Sums(job.client, np.array([loss]), np.array([right]))


@dataclass
class Exchange:
    """One message per client, sent until each has answered, failed or run out of time."""

    backend: FlowerBackend
    waiting: dict[int, Job]  # client -> its job; those that are done are removed
    kind: str  # Flower's type of message
    arrays: Any  # the vectors, the same for all clients
    details: Callable[[Job], dict[str, Any]]  # returns the other fields of a job's message
    read: Callable[[Any, Job], Any]  # makes a result of a reply's content, or raises `Refused`
    done: dict[int, Any] = field(default_factory=dict)
    sent: dict[str, tuple[int, Node]] = field(default_factory=dict)
    tries: Counter[int] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.end = time.monotonic() + self.backend.timeout

    def result(self, client: int) -> Any:
        """Return one client's result, or its failure; send and receive until there is one."""
        while client not in self.done:
            self._send()
            self._receive()
            for i in [i for i in self.waiting if self.backend.roster.away(i)]:
                log.warning("fedspeed: client %d: no SuperNode is this client; the round continues without it", i)
                self._fail(i, "no SuperNode is this client")
            if client not in self.done:
                if time.monotonic() > self.end:
                    self._give_up()
                else:
                    time.sleep(self.backend.poll)
        return self.done.pop(client)

    def _send(self) -> None:
        """Send to the clients that are connected and have no message in progress."""
        roster = self.backend.roster
        roster.look()
        self.sent = {key: (i, node) for key, (i, node) in self.sent.items() if roster.at.get(i) == node}
        in_progress = {i for i, _ in self.sent.values()}
        to = [(i, roster.at[i]) for i in self.waiting if i not in in_progress and i in roster.at]
        messages = [self._message(self.waiting[i], node) for i, node in to]
        keys = list(self.backend.grid.push_messages(messages)) if messages else []
        if not keys:
            # Flower returns no key at all if the SuperLink, or a proxy in front of it, finds one message too large.
            for i, node in to:
                self._again(self.waiting[i], node, "the message is too large for the SuperLink, see Flower's log")
            return
        for (i, node), key in zip(to, keys, strict=True):
            if key:
                self.sent[key] = (i, node)

    def _message(self, job: Job, node: Node) -> Any:
        from flwr.app import ConfigRecord, Message, RecordDict

        run = self.backend.clients_file
        about = {"run": run.run, "clients": run.clients, "client": job.client, "round": job.t, **self.details(job)}
        content = RecordDict({"down": self.arrays, "job": ConfigRecord(about)})
        return Message(content, node.id, self.kind, ttl=max(1.0, self.end - time.monotonic()), group_id=str(job.t + 1))

    def _receive(self) -> None:
        for key, (client, node) in list(self.sent.items()):
            try:
                replies = pulled(self.backend.grid, key)
            except Refused as error:
                del self.sent[key]
                self._refuse(client, node, error)
                continue
            for reply in replies:
                self._take(reply)

    def _take(self, reply: Any) -> None:
        """Count one reply once, or refuse it."""
        about = reply.metadata
        found = self.sent.pop(about.reply_to_message_id, None)
        if found is None:
            why = "expected one reply to each message, found another"
            self.backend.clients_file.refuse("duplicate", why, about.src_node_id)
            return
        client, node = found
        job = self.waiting[client]
        if reply.has_error():
            self._again(job, node, cut(str(reply.error.reason)))
            return
        try:
            if about.src_node_id != node.id:
                raise Refused("stale", f"expected a reply of node {node.id}")
            failed = failure(reply.content)
            if failed is not None:
                raise Refused("diverged" if failed[0] == Diverged.__name__ else "failed", failed[1])
            self.done[client] = self.read(reply.content, job)
            del self.waiting[client]
        except Exception as error:
            self._refuse(client, node, refusal(error))

    def _refuse(self, client: int, node: Node, error: Refused) -> None:
        self.backend.clients_file.refuse(error.kind, str(error), node.id, client, self.waiting[client].t)
        self._fail(client, str(error))

    def _again(self, job: Job, node: Node, why: str) -> None:
        self.tries[job.client] += 1
        if self.tries[job.client] < TRIES:
            log.warning("fedspeed: round %d, client %d (node %d): no reply (%s)", job.t + 1, job.client, node.id, why)
            return
        self._refuse(job.client, node, Refused("failed", f"no reply in {TRIES} tries ({why})"))

    def _give_up(self) -> None:
        for client in list(self.waiting):
            node = self.backend.roster.at.get(client)
            absent = "no SuperNode is this client; is it started, with its key registered?"
            where = f"node {node.id} has it" if node else absent
            log.warning("fedspeed: client %d: no reply within %g s; %s", client, self.backend.timeout, where)
            self._fail(client, f"no reply within {self.backend.timeout:g} s")

    def _fail(self, client: int, why: str) -> None:
        job = self.waiting.pop(client)
        self.done[client] = Failed(job, ClientFailed(f"flower: round {job.t + 1}, client {client}: {why}"))
