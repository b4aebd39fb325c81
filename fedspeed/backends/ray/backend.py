"""The Ray back end: one actor per worker, data and broadcasts in Ray's shared memory, states cached on their nodes.

The bits are those of the serial back end for any number of workers on any number of nodes: the same engine runs the
same chunks of jobs, and replies are summed in job order. The driver has every client's state; a node's files only save
sending it, so a node that is lost takes nothing with it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ...client.tree_bytes import state_name
from ...client.trees import has_leaves, meta_like, tree_leaves, tree_of
from ...client.work import Failed, Job, Reply, Work
from ...errors import UserError
from ..common import Piece, RemoteBackend, RemoteError, as_error, called, failed_job
from ..packing import pack, pack_tensors, unpack_tensors
from .pool import Worker, WorkerPool
from .session import Joined, import_ray, join, leave
from .worker import Answer, Missing, Request, Setup, reply_leaves


class StateOnNode(NamedTuple):
    """A copy of a client's state on a node: the worker that wrote it, its file, and the round it is of."""

    owner: Worker
    file: str
    t: int


class Ray(RemoteBackend):
    """Back end that runs chunks of jobs on the workers of a Ray cluster.

    Args:
        touched: clients that have a state; its attribute `generations`, if there is one, says of which round.
    """

    def __init__(self, work: Work, workers: int, touched: Container[int] = ()) -> None:
        ray = import_ray()
        plan, device = work.plan, work.flat.device
        if (device.type == "cpu") != (plan.ray_gpus == 0):
            raise UserError(
                f"back end ray: device {device.type} expects --ray-gpus {'0' if device.type == 'cpu' else 'above 0'}, "
                f"got {plan.ray_gpus:g}; give each worker a share of a GPU for --device cuda, none for --device cpu"
            )
        packed = pack(work, "ray")
        if packed.main:
            raise UserError(
                f"back end ray: {packed.main} is defined in the program itself (__main__), which workers elsewhere "
                f"cannot import; write it into a module (a .py file) and import it, or use backend='process'"
            )
        super().__init__(work, touched)
        self._kept: dict[int, StateOnNode] = {}
        self._drops: dict[Worker, list[str]] = {}  # files that are not needed any more, sent with the next request
        keep = has_leaves(work.shapes.client) and plan.state_dtype == "same" and "settle" not in work.hooks.overridden
        private = [] if type(work.flat.model).__module__.startswith("fedspeed.") else ["x_test"]
        named = {name: meta_like(a) for name, a in packed.data.items()}
        setup = Setup(named, [name for name in private if name in named], str(device), keep)
        joined = join(plan.ray_address, workers * plan.ray_gpus)
        try:
            self.pool = WorkerPool(ray, plan, workers, alone=joined.alone)
        except BaseException:
            leave(joined)
            raise
        self._finalizer = weakref.finalize(self, close, self.pool, joined)
        self._gather: Callable[[], None] | None = lambda: self.pool.gather(
            packed.work, pack_tensors(packed.data.values()), setup
        )
        if not getattr(plan, "until", ()):  # else an earlier segment of the run may need the whole cluster first
            self._begin()

    def _begin(self) -> None:
        """Start the workers, if that is not done yet."""
        gather, self._gather = self._gather, None
        try:
            if gather:
                gather()
        except BaseException:
            self.close()
            raise

    @property
    def size(self) -> int:  # type: ignore[override]
        """The number of workers."""
        return self.pool.size

    @property
    def mixed(self) -> list[str]:
        """Workers whose bits may differ from the driver's, and how."""
        return sorted(self.pool.mixed)

    def run(self, jobs: Sequence[Job], down: Any, state: Callable[[int], Any]) -> Iterator[Reply | Failed]:
        """Yield one reply per job, in job order; a reply's tensors lie in Ray's memory until the next is asked for."""
        if not jobs:
            return
        self._begin()
        broadcast = self.pool.put(pack_tensors(tree_leaves(down)))
        queue = list(self.engine.chunks(jobs))
        for client in [i for i, kept in self._kept.items() if kept.t >= jobs[0].t]:  # of a failed round
            self._drop(client)

        def send(worker: Worker, index: int) -> Any:
            request = self._request(worker, queue[index], self._drops.pop(worker, []))
            leaves = chain.from_iterable(tree_leaves(state(i)) for i in request.sent)
            return worker.actor.run.remote(broadcast, self.pool.put(pack_tensors(leaves)), request)

        def fits(worker: Worker, answer: Any) -> bool:
            if isinstance(answer, Missing):
                for client in answer.clients:
                    self._drop(client)
                return False
            if isinstance(answer, Answer):
                self._note(worker, answer, jobs[0].t)
            return True

        def far(worker: Worker, index: int) -> int:
            places = {kept.owner.node for job in queue[index] if (kept := self._at_hand(job.client))}
            return 0 if worker.node in places else 1 + bool(places)

        doing = [f"while it ran {called(chunk)}" for chunk in queue]
        for chunk, answer in zip(queue, self.pool.stream(doing, send, fits, far), strict=True):
            if isinstance(answer, RemoteError):
                raise as_error(answer)
            yield from self._replies(chunk, answer)

    def _replies(self, chunk: list[Job], answer: Answer) -> Iterator[Reply | Failed]:
        shapes, device = self.work.shapes, self.work.flat.device
        looks = list(reply_leaves(self.work, self.engine.dtype, answer.results))
        tensors = iter(unpack_tensors(answer.raw, chain.from_iterable(looks)))
        for job, result, look in zip(chunk, answer.results, looks, strict=True):
            if isinstance(result, RemoteError):
                yield failed_job(job, result)
                continue
            leaves = iter([next(tensors).to(device) for _ in look])
            client = tree_of(shapes.client, leaves)
            yield Reply(job, tree_of(shapes.up, leaves) if result.represents else None, client, result)

    def _at_hand(self, client: int) -> StateOnNode | None:
        """Return the copy of a client's present state on a node, or None if no node has it."""
        kept = self._kept.get(client)
        wanted = getattr(self.touched, "generations", {}).get(client)
        return kept if kept is not None and kept.t == wanted and kept.owner in self.pool.workers else None

    def _request(self, worker: Worker, chunk: list[Job], drop: list[str]) -> Request:
        clients = [job.client for job in chunk]
        fresh = self._fresh(clients) if has_leaves(self.work.shapes.client) else set(clients)
        near = {i: kept.file for i in clients if (kept := self._at_hand(i)) and kept.owner.node == worker.node}
        return Request(chunk, fresh, near, [i for i in clients if i not in fresh and i not in near], drop)

    def _drop(self, client: int) -> None:
        """Forget the copy of a client's state, and have its file removed."""
        kept = self._kept.pop(client, None)
        if kept is not None and kept.owner in self.pool.workers:
            self._drops.setdefault(kept.owner, []).append(kept.file)

    def _note(self, worker: Worker, answer: Answer, t: int) -> None:
        """Remember which states a worker has kept; have the files that they replace removed."""
        for client in answer.kept:
            self._drop(client)
            self._kept[client] = StateOnNode(worker, str(Path(worker.folder) / state_name(client, t)), t)

    def _answers(
        self, x: torch.Tensor, shares: list[list[Piece]], what: str, about: tuple[Any, ...]
    ) -> Iterator[list[Any]]:
        self._begin()
        vector = self.pool.put(pack_tensors([x.to(self.work.flat.dtype)]))

        def send(worker: Worker, index: int) -> Any:
            return worker.actor.evaluate.remote(vector, what, shares[index], *about)

        for answer in self.pool.stream(["while it evaluated"] * len(shares), send):
            if isinstance(answer, RemoteError):
                raise as_error(answer)
            yield answer

    def close(self) -> None:
        """Stop the workers, and Ray itself if this back end started it."""
        self._finalizer()


def close(pool: WorkerPool, joined: Joined) -> None:
    """Stop the workers, and leave Ray if this process joined or started it."""
    pool.dismiss()
    leave(joined)
