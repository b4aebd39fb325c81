"""The back end whose clients are SuperNodes: jobs become messages, valid replies are given in job order.

A message that cannot be answered (its SuperNode was killed, or started again) is sent once more: a device computes the
same bits again. What is refused, or does not come in time, is a client that failed, and drops out of the round.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch

from ..backends.serial import Serial
from ..client.evaluate import Score, Sums
from ..client.work import Failed, Job, Reply, Work
from ..errors import ClientFailed, Diverged
from .clients_file import ClientsFile
from .messages import Refused, Vector, cut, failure, pulled, read_reply, read_sums, refusal, server_metrics, to_arrays
from .roster import Node, Roster
from .server_states import CountedRounds

log = logging.getLogger("flwr.fedspeed")
TRIES = 3
"""How often a job is sent to a device that answers with an error of Flower's."""


class FlowerBackend:
    """Runs jobs on devices, evaluates the server's test set here.

    Args:
        work: with the sizes of all clients; it holds no data of theirs.
        counted: which round of each client was counted last.
        timeout: seconds that a round waits.
        poll: seconds between two looks.
    """

    def __init__(
        self, work: Work, counted: CountedRounds, grid: Any, roster: Roster, timeout: float, poll: float
    ) -> None:
        self.work, self.counted, self.grid, self.roster = work, counted, grid, roster
        self.timeout, self.poll = timeout, poll
        self.book: ClientsFile = roster.book
        self.here = Serial(work)
        self.t = 0

    def run(self, jobs: Sequence[Job], down: Any, state: Callable[[int], Any]) -> Iterator[Reply | Failed]:
        """Replies in job order; states are on the devices, so `state` is not asked."""
        self.book.begin()
        self.t = jobs[0].t if jobs else self.t
        errand = Exchange(self, {job.client: job for job in jobs}, "train", to_arrays(down), self._told, self._read)
        for job in jobs:
            yield errand.result(job.client)

    def evaluate(self, x: torch.Tensor, validation: bool = False) -> Score:
        """Loss and accuracy of a vector on the server's own test set."""
        return self.here.evaluate(x, validation)

    def evaluate_clients(self, x: torch.Tensor) -> list[Sums]:
        """Sums over every client's data, computed on the devices; NaN for one that does not answer."""
        jobs = {i: Job(i, self.t, 0.0) for i in range(self.book.clients)}
        errand = Exchange(self, jobs, "evaluate", to_arrays(Vector(x)), lambda job: {}, self._sums)
        found = [errand.result(i) for i in jobs]
        none = Sums(0, np.array([math.nan]), np.array([math.nan]))
        return [none._replace(first=i) if isinstance(f, Failed) else f for i, f in zip(jobs, found, strict=True)]

    def close(self) -> None:
        """Nothing to stop: SuperLink and SuperNodes are Flower's."""

    @cached_property
    def _taken(self) -> set[str]:
        return server_metrics(self.work)

    def _told(self, job: Job) -> dict[str, Any]:
        counted, before = self.counted.of(job.client)
        return {"lr": job.lr, "K": job.K, "counted": counted, "before": before}

    def _read(self, content: Any, job: Job) -> Reply:
        told = read_reply(content, self.book.run, job, self.work, self._taken)
        if told.lost:
            node = self.roster.at[job.client].id if job.client in self.roster.at else 0
            self.book.note_lost(node, job.client, job.t)
        return told.reply

    def _sums(self, content: Any, job: Job) -> Sums:
        loss, right = read_sums(content, self.book.run, job, self.work)
        return Sums(job.client, np.array([loss]), np.array([right]))


class Exchange:
    """The same message to some clients, sent until each has answered, failed or run out of time.

    Args:
        jobs: client -> its job.
        told: what else the message says to a client.
        read: makes a result of a reply's content, or raises `Refused`.
    """

    def __init__(
        self,
        at: FlowerBackend,
        jobs: dict[int, Job],
        kind: str,
        arrays: Any,
        told: Callable[[Job], dict[str, Any]],
        read: Callable[[Any, Job], Any],
    ) -> None:
        self.at, self.kind, self.arrays, self.told, self.read = at, kind, arrays, told, read
        self.waiting = dict(jobs)
        self.done: dict[int, Any] = {}
        self.sent: dict[str, tuple[int, Node]] = {}
        self.tries: Counter[int] = Counter()
        self.end = time.monotonic() + at.timeout

    def result(self, client: int) -> Any:
        """What came of one client's message."""
        while client not in self.done:
            self._send()
            self._receive()
            for i in [i for i in self.waiting if self.at.roster.away(i)]:
                log.warning("fedspeed: client %d: no SuperNode is this client; the round goes on without it", i)
                self._fail(i, "no SuperNode is this client")
            if client not in self.done:
                if time.monotonic() > self.end:
                    self._give_up()
                else:
                    time.sleep(self.at.poll)
        return self.done.pop(client)

    def _send(self) -> None:
        """To those who are there and have no message."""
        roster = self.at.roster
        roster.look()
        self.sent = {key: (i, node) for key, (i, node) in self.sent.items() if roster.at.get(i) == node}
        under_way = {i for i, _ in self.sent.values()}
        to = [(i, roster.at[i]) for i in self.waiting if i not in under_way and i in roster.at]
        messages = [self._message(self.waiting[i], node) for i, node in to]
        keys = list(self.at.grid.push_messages(messages)) if messages else []
        if not keys:  # Flower gives none at all if the SuperLink, or what is before it, finds a message too large
            for i, node in to:
                self._again(self.waiting[i], node, "the message is too large for the SuperLink, see Flower's log")
            return
        for (i, node), key in zip(to, keys, strict=True):
            if key:
                self.sent[key] = (i, node)

    def _message(self, job: Job, node: Node) -> Any:
        from flwr.app import ConfigRecord, Message, RecordDict

        book = self.at.book
        about = {"run": book.run, "clients": book.clients, "client": job.client, "round": job.t, **self.told(job)}
        content = RecordDict({"down": self.arrays, "job": ConfigRecord(about)})
        return Message(content, node.id, self.kind, ttl=max(1.0, self.end - time.monotonic()), group_id=str(job.t + 1))

    def _receive(self) -> None:
        for key, (client, node) in list(self.sent.items()):
            try:
                replies = pulled(self.at.grid, key)
            except Refused as error:
                del self.sent[key]
                self._refuse(client, node, error)
                continue
            for reply in replies:
                self._take(reply)

    def _take(self, reply: Any) -> None:
        """One reply: counted once, or refused."""
        about = reply.metadata
        found = self.sent.pop(about.reply_to_message_id, None)
        if found is None:
            self.at.book.refuse("duplicate", "expected one reply to each message, found another", about.src_node_id)
            return
        client, node = found
        job = self.waiting[client]
        if reply.has_error():
            self._again(job, node, cut(str(reply.error.reason)))
            return
        try:
            if about.src_node_id != node.id:
                raise Refused("stale", f"expected a reply of node {node.id}")
            told = failure(reply.content)
            if told is not None:
                raise Refused("diverged" if told[0] == Diverged.__name__ else "failed", told[1])
            self.done[client] = self.read(reply.content, job)
            del self.waiting[client]
        except Exception as error:
            self._refuse(client, node, refusal(error))

    def _refuse(self, client: int, node: Node, error: Refused) -> None:
        self.at.book.refuse(error.kind, str(error), node.id, client, self.waiting[client].t)
        self._fail(client, str(error))

    def _again(self, job: Job, node: Node, why: str) -> None:
        self.tries[job.client] += 1
        if self.tries[job.client] < TRIES:
            log.warning("fedspeed: round %d, client %d (node %d): no reply (%s)", job.t + 1, job.client, node.id, why)
            return
        self.at.book.refuse("failed", f"no reply in {TRIES} tries ({why})", node.id, job.client, job.t)
        self._fail(job.client, f"no reply in {TRIES} tries ({why})")

    def _give_up(self) -> None:
        for client in list(self.waiting):
            node = self.at.roster.at.get(client)
            where = (
                f"node {node.id} has it"
                if node
                else "no SuperNode is this client; is it started, with its key registered?"
            )
            log.warning("fedspeed: client %d: no reply within %g s; %s", client, self.at.timeout, where)
            self._fail(client, f"no reply within {self.at.timeout:g} s")

    def _fail(self, client: int, why: str) -> None:
        job = self.waiting.pop(client)
        self.done[client] = Failed(job, ClientFailed(f"flower: round {job.t + 1}, client {client}: {why}"))
