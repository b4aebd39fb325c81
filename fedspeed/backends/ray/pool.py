"""The pool of workers on a Ray cluster: start workers, compare their bits, give them tasks, replace lost ones."""

from __future__ import annotations

import sys
import warnings
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ...config.plan import Plan
from ...errors import UserError, one_line
from ...utils.processes import bits_environment, cores
from ..common import as_error
from .fingerprint import admit, bits
from .worker import Greeting, Setup, actor_class

FLIGHTS = 2
"""Chunks that a worker has at a time: the one it computes, and the next, whose states travel meanwhile."""
AHEAD = 4
"""Maximum chunks per worker ahead of the next one to be summed; this bounds memory."""
RETRIES = 3
"""How often a chunk is run again because its worker was lost, before the run stops."""
PATIENCE = 120.0
"""Seconds to wait for the first worker, or for a new one after all were lost."""
LINGER = 15.0
"""Seconds without a new greeting after which the run begins with the workers that it has."""
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


@dataclass(eq=False)
class Worker:
    """An actor, and what it reported about itself."""

    actor: Any
    node: str = ""
    host: str = ""
    folder: str = ""
    flights: list[int] = field(default_factory=list)  # chunks it was sent and has not answered, in order


Send = Callable[[Worker, int], Any]


class WorkerPool:
    """The workers of one run.

    Args:
        ray: the module; this process is connected.
        workers: the largest number of workers.
        alone: Ray runs for this process alone, so that only GPUs are counted.
    """

    def __init__(self, ray: Any, plan: Plan, workers: int, alone: bool) -> None:
        self.ray, self.allow_mixed = ray, plan.allow_mixed
        self.size = workers if alone else self._room(plan, workers)
        if alone and workers > cores():
            many = f"back end ray: {workers} workers in a Ray of our own, on {cores()} cores"
            warnings.warn(f"{many}; to join a cluster give --ray-address", stacklevel=4)
        self.workers: list[Worker] = []
        self.mixed: list[str] = []
        self._joining: dict[Any, tuple[Worker, str]] = {}  # pending answer -> the worker, and the question
        self._refused: list[str] = []
        self._failures = 0  # of workers that were lost before they could take tasks
        self._here, self._compiled = bits(), plan.layers == "compiled"
        variables = {**dict.fromkeys(THREADS, "1"), "PYTHONSAFEPATH": "1", **bits_environment()}
        share = {"num_cpus": 0.0 if alone else plan.ray_cpus, "num_gpus": plan.ray_gpus}
        options = {"max_restarts": 0, "max_task_retries": 0, "scheduling_strategy": "SPREAD"}
        self._make = ray.remote(**share, **options, runtime_env={"env_vars": variables})(actor_class())

    def _room(self, plan: Plan, workers: int) -> int:
        """Return how many workers fit into the cluster: at most `workers`, or `active` if the plan names no number."""
        total = self.ray.cluster_resources()
        shares = {"CPU": plan.ray_cpus, "GPU": plan.ray_gpus}
        asked = {kind: share for kind, share in shares.items() if share}
        nodes = [node["Resources"] for node in self.ray.nodes() if node["Alive"]]  # a worker is on one of them
        room = workers
        if asked:
            room = sum(min(int(node.get(kind, 0) / share + 1e-6) for kind, share in asked.items()) for node in nodes)
        wanted = workers if plan.workers else plan.active
        if not room:
            found = ", ".join(f"{total.get(kind, 0):g} {kind}" for kind in shares)
            raise UserError(
                f"back end ray: expected room for a worker ({plan.ray_cpus:g} CPU, {plan.ray_gpus:g} GPU), found "
                f"{found} in the cluster; lower --ray-cpus or --ray-gpus, or add nodes"
            )
        if plan.workers and room < wanted:
            warnings.warn(f"back end ray: the cluster has room for {room} of {wanted} workers", stacklevel=5)
        return min(wanted, room)

    def put(self, value: Any) -> Any:
        """Put a value into Ray's memory, one copy for all workers of a node."""
        try:
            return self.ray.put(value)
        except self.ray.exceptions.RayError as error:
            raise UserError(
                f"back end ray: its memory has no room for {getattr(value, 'nbytes', 0) / 1e6:.0f} MB "
                f"({one_line(error)[:200]}); start the nodes with more --object-store-memory, or use fewer --workers"
            ) from None

    def gather(self, packed: bytes, data: np.ndarray, setup: Setup) -> None:
        """Start all workers and wait for them; if the cluster is busy, one is enough to begin with."""
        self._work = self.put(packed), self.put(data), setup
        for _ in range(self.size):
            self._start_worker()
        while self._joining:
            starting = any(asked != "hello" for _, asked in self._joining.values())
            patience = PATIENCE if starting or not self.workers else LINGER
            ready = self.ray.wait(list(self._joining), timeout=patience)[0]
            if not ready:
                break
            for ref in ready:
                self._next_question(ref)
        if not self.workers:
            raise self._no_worker()
        if len(self.workers) < self.size:
            warnings.warn(f"back end ray: {len(self.workers)} of {self.size} workers have joined so far", stacklevel=4)

    def _no_worker(self) -> UserError:
        if self._refused:
            return UserError(f"back end ray: no worker can be used: {self._refused[0]}")
        return UserError(
            f"back end ray: expected a worker within {PATIENCE:.0f} s, found none: the cluster is busy, or its nodes "
            f"were lost; see `ray status`, or use --backend process"
        )

    def _start_worker(self) -> None:
        worker = Worker(self._make.remote([folder for folder in sys.path if folder]))
        self._joining[worker.actor.hello.remote()] = worker, "hello"

    def _next_question(self, ref: Any) -> None:
        """Read the answer of a worker that is joining (`hello`, `where`, `prepare`), and ask the next question."""
        worker, asked = self._joining.pop(ref)
        try:
            answer = self.ray.get(ref)
        except self.ray.exceptions.RayError as error:
            self._failures += 1
            self._discard(worker)
            if self._failures <= RETRIES * self.size:
                self._start_worker()
            else:
                self._refused.append(f"workers cannot start ({one_line(error)[:300]})")
            return
        if asked == "hello":
            if self._welcome(worker, Greeting(*answer)):
                self._joining[worker.actor.where.remote()] = worker, "where"
            else:
                self._discard(worker)
        elif asked == "where":
            worker.node = answer
            self._joining[worker.actor.prepare.remote(*self._work)] = worker, "prepare"
        elif answer is not None:
            self._refused.append(f"node {worker.host}: {as_error(answer)}")
            warnings.warn(f"back end ray: {self._refused[-1]}; this worker is not used", stacklevel=2)
            self._discard(worker)
        else:
            self.workers.append(worker)

    def _welcome(self, worker: Worker, greeting: Greeting) -> bool:
        """Return whether a worker may join; record it if its bits differ."""
        worker.host, worker.folder = greeting.host, greeting.folder
        there = greeting.bits
        if there is not None and not self._compiled:  # then the kernels decide no bit
            there = there._replace(kernels=self._here.kernels)
        welcome, message = admit(self._here, greeting.host, there, greeting.error, self.allow_mixed)
        known = self.mixed if welcome else self._refused
        if message and message not in known:
            known.append(message)
            what = "accepted: the run is mixed" if welcome else "this worker is not used"
            warnings.warn(f"back end ray: {message}; {what}", stacklevel=2)
        return welcome

    def _discard(self, worker: Worker) -> None:
        with suppress(Exception):
            self.ray.kill(worker.actor)

    def stream(
        self,
        doing: Sequence[str],
        send: Send,
        fits: Callable[[Worker, Any], bool] = lambda worker, answer: True,
        far: Send = lambda worker, index: 0,
    ) -> Iterator[Any]:
        """Yield the answers of all tasks, in the order of the tasks, whichever worker computed them.

        Answers come in any order and wait in `done` for their turn: the caller sums them as they are yielded, so this
        order fixes the bits. It must not depend on speed, place or loss of workers.

        Args:
            doing: one text per task, for the message about a worker that is lost meanwhile.
            send: gives a worker the task of an index.
            fits: is called with each answer as it comes; a task whose answer does not fit is sent again.
            far: returns the distance of a worker from the data that a task needs; the nearest task is taken.
        """
        for worker in self.workers:
            worker.flights = []
        tasks = Tasks(self, doing, send, fits, far)
        for number in range(len(doing)):
            tasks.hand_out(number)
            while number not in tasks.done:
                for ref in self._wait([*tasks.flying]):
                    if ref in tasks.flying:  # else its worker was lost with another answer
                        tasks.take(ref)
                tasks.hand_out(number)
            yield tasks.done.pop(number)

    def _wait(self, refs: list[Any]) -> list[Any]:
        """Wait for a result or a new worker; admit new workers, and return the results that are ready."""
        if not self.workers and not self._joining:
            raise self._no_worker()
        ready = self.ray.wait([*refs, *self._joining], timeout=None if self.workers else PATIENCE)[0]
        if not ready:
            raise self._no_worker()
        for ref in ready:
            if ref in self._joining:
                self._next_question(ref)
        return [ref for ref in ready if ref in refs]

    def replace(self, worker: Worker, error: Exception, doing: str, tries: Counter[int]) -> None:
        """Start another worker in place of a lost one; raise if its first task was tried too often."""
        index = worker.flights[0]
        tries[index] += 1
        loss = f"a Ray worker on {worker.host} was lost ({type(error).__name__}) {doing}"
        self.workers.remove(worker)
        self._discard(worker)
        if tries[index] > RETRIES:
            raise UserError(f"{loss}; out of memory? Use fewer --workers, or more --ray-cpus for each")
        warnings.warn(f"{loss}; its work is done again ({tries[index]} of {RETRIES})", stacklevel=2)
        self._start_worker()

    def dismiss(self) -> None:
        """Stop all workers without waiting for their tasks."""
        workers = [*self.workers, *(worker for worker, _ in self._joining.values())]
        self.workers, self._joining = [], {}
        if not self.ray.is_initialized():
            return
        with suppress(Exception):
            self.ray.wait([worker.actor.leave.remote() for worker in workers], num_returns=len(workers), timeout=5)
        for worker in workers:
            self._discard(worker)


@dataclass(eq=False)
class Tasks:
    """The tasks of one `stream`: those that wait, those that workers have, and answers that wait for their turn."""

    pool: WorkerPool
    doing: Sequence[str]
    send: Send
    fits: Callable[[Worker, Any], bool]
    far: Send
    flying: dict[Any, tuple[Worker, int]] = field(default_factory=dict)  # Ray's reference -> who has which task
    done: dict[int, Any] = field(default_factory=dict)
    tries: Counter[int] = field(default_factory=Counter)  # of tasks whose worker was lost

    def __post_init__(self) -> None:
        self.waiting = list(range(len(self.doing)))  # in order

    def hand_out(self, number: int) -> None:
        """Give tasks to workers that have room; the one that is yielded next, `number`, always comes first."""
        while self.waiting:
            worker = min(self.pool.workers, key=lambda worker: len(worker.flights), default=None)
            if worker is None or len(worker.flights) >= FLIGHTS:
                return
            near = self.waiting[: bisect_left(self.waiting, number + AHEAD * self.pool.size)]
            if not near:
                return
            index = number if near[0] == number else min(near, key=lambda i: (self.far(worker, i), i))
            self.flying[self.send(worker, index)] = worker, index
            worker.flights.append(index)
            self.waiting.remove(index)

    def take(self, ref: Any) -> None:
        """Take one answer, or put the tasks of a lost worker back."""
        worker, index = self.flying.pop(ref)
        ray = self.pool.ray
        try:
            answer = ray.get(ref)
        except ray.exceptions.RayTaskError as error:
            raise UserError(f"back end ray: {one_line(error.cause)[:300]} on {worker.host}") from error
        except ray.exceptions.RayError as error:
            for lost in [ref for ref, (whose, _) in self.flying.items() if whose is worker]:
                del self.flying[lost]
            self.pool.replace(worker, error, self.doing[worker.flights[0]], self.tries)
            self.waiting = sorted([*self.waiting, *worker.flights])
            return
        worker.flights.remove(index)
        if self.fits(worker, answer):
            self.done[index] = answer
        else:
            self.waiting = sorted([index, *self.waiting])
