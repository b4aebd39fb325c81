"""Workers of a Ray cluster: one actor each, data and broadcasts in Ray's shared memory, states kept where they were.

Same bits as serial for any number of workers on any number of nodes: the same chunks of jobs on the same engine,
replies summed in job order. The driver has every client's state; a node's files spare it from being sent, no more, so
a node that is lost takes nothing with it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ...client.engines import make_engine
from ...client.evaluate import Score, Sums, client_slices, slices, total
from ...client.tree_bytes import state_name
from ...client.trees import has_leaves, meta_like, tree_leaves
from ...client.work import Failed, Job, Reply, Work
from ...errors import ClientFailed, Diverged, UserError
from ..packing import PackedTensors, pack, pack_tensors, tree_of
from ..process import as_error, called
from ..worker import RemoteError
from .pool import Worker, WorkerPool
from .session import Joined, import_ray, join, leave
from .worker import Answer, Missing, Request, Setup, reply_leaves


class StatesOnNodes(NamedTuple):
    """Where a client's state lies beside the driver's own: whose file, on which node, of which round."""

    owner: Worker
    file: str
    t: int


class Ray:
    """Runs chunks of jobs on the workers of a Ray cluster.

    Args:
        touched: clients that have a state, by round (`generations`); a worker makes that of any other, where it is all
            zeros, by itself.
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
        self.work = work
        self.touched = touched
        self.engine = make_engine(work)
        self._starts_at_zero = not any(bool(a.any()) for a in tree_leaves(work.hooks.init_client(work.flat.x)))
        self._kept: dict[int, StatesOnNodes] = {}
        self._drops: dict[Worker, list[str]] = {}  # files that nobody will ask for, told with the next request
        keep = has_leaves(work.shapes.client) and plan.state_dtype == "same" and "settle" not in work.hooks.reporting
        private = [] if type(work.flat.model).__module__.startswith("fedspeed.") else ["x_test"]
        named = {name: meta_like(a) for name, a in packed.data.items()}
        setup = Setup(named, [name for name in private if name in named], str(device), keep)
        joined = join(plan.ray_address, workers * plan.ray_gpus)
        try:
            self.crew = WorkerPool(ray, plan, workers, alone=joined.alone)
        except BaseException:
            leave(joined)
            raise
        self._finalizer = weakref.finalize(self, close, self.crew, joined)
        self._gather: Callable[[], None] | None = lambda: self.crew.gather(
            packed.work, pack_tensors(list(packed.data.values())), setup
        )
        if not getattr(plan, "until", ()):  # else another may need all of the cluster before us: `stretches`
            self._begin()

    def _begin(self) -> None:
        """Hire everybody, if that is not done yet."""
        gather, self._gather = self._gather, None
        try:
            if gather:
                gather()
        except BaseException:
            self.close()
            raise

    @property
    def size(self) -> int:
        """How many workers there are."""
        return self.crew.size

    @property
    def mixed(self) -> list[str]:
        """Workers whose bits may differ from the driver's, and how."""
        return sorted(self.crew.mixed)

    def run(self, jobs: Sequence[Job], down: Any, state: Callable[[int], Any]) -> Iterator[Reply | Failed]:
        """Replies in job order. What a reply holds lies in Ray's memory, and is gone when the next is asked for."""
        if not jobs:
            return
        self._begin()
        broadcast = self.crew.put(pack_tensors(list(tree_leaves(down))))
        queue = list(self.engine.chunks(jobs))
        for client in [i for i, kept in self._kept.items() if kept.t >= jobs[0].t]:  # of a round that failed
            self._drop(client)

        def send(worker: Worker, index: int) -> Any:
            request = self._request(worker, queue[index], self._drops.pop(worker, []))
            leaves = [leaf for i in request.sent for leaf in tree_leaves(state(i))]
            return worker.actor.run.remote(broadcast, self.crew.put(pack_tensors(leaves)), request)

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
        for chunk, answer in zip(queue, self.crew.stream(doing, send, fits, far), strict=True):
            if isinstance(answer, RemoteError):
                raise as_error(answer)
            yield from self._replies(chunk, answer)

    def _replies(self, chunk: list[Job], answer: Answer) -> Iterator[Reply | Failed]:
        shapes, device = self.work.shapes, self.work.flat.device
        looks = list(reply_leaves(self.work, self.engine.dtype, answer.told))
        tensors = iter(PackedTensors(answer.raw).tensors(a for look in looks for a in look))
        for job, told, look in zip(chunk, answer.told, looks, strict=True):
            if isinstance(told, RemoteError):
                error = as_error(told)
                if not isinstance(error, ClientFailed | Diverged):
                    raise error
                yield Failed(job, error)
                continue
            leaves = iter([next(tensors).to(device) for _ in look])
            client = tree_of(shapes.client, leaves)
            yield Reply(job, tree_of(shapes.up, leaves) if told.share else None, client, told)

    def _at_hand(self, client: int) -> StatesOnNodes | None:
        """Where a node has the very state that a client has now."""
        kept = self._kept.get(client)
        wanted = getattr(self.touched, "generations", {}).get(client)
        return kept if kept is not None and kept.t == wanted and kept.owner in self.crew.workers else None

    def _request(self, worker: Worker, chunk: list[Job], drop: list[str]) -> Request:
        clients = [job.client for job in chunk]
        fresh = {i for i in clients if i not in self.touched} if self._starts_at_zero else set()
        fresh = fresh if has_leaves(self.work.shapes.client) else set(clients)
        near = {i: kept.file for i in clients if (kept := self._at_hand(i)) and kept.owner.node == worker.node}
        return Request(chunk, fresh, near, [i for i in clients if i not in fresh and i not in near], drop)

    def _drop(self, client: int) -> None:
        """Forget where a client's state is; its file may go."""
        kept = self._kept.pop(client, None)
        if kept is not None and kept.owner in self.crew.workers:
            self._drops.setdefault(kept.owner, []).append(kept.file)

    def _note(self, worker: Worker, answer: Answer, t: int) -> None:
        """Remember where states are; files that they replace may go."""
        for client in answer.kept:
            self._drop(client)
            self._kept[client] = StatesOnNodes(worker, str(Path(worker.folder) / state_name(client, t)), t)

    def evaluate(self, x: torch.Tensor, validation: bool = False) -> Score:
        """Loss and accuracy of a vector on test or validation set, shared among the workers, summed in order."""
        pieces = slices(self.work.data, validation)
        return total(self._spread(x, pieces, "evaluate", validation), pieces[-1][1] if pieces else 0)

    def evaluate_clients(self, x: torch.Tensor) -> list[Sums]:
        """Sums over the slices of all clients' data, shared among the workers, in order."""
        return self._spread(x, client_slices(self.work.data), "evaluate_clients")

    def _spread(self, x: torch.Tensor, pieces: list[tuple[int, int]], what: str, *about: Any) -> list[Any]:
        """The answers for a vector and some pieces, in order, whoever gave them."""
        self._begin()
        vector = self.crew.put(pack_tensors([x.to(self.work.flat.dtype)]))
        count = min(len(pieces), self.size)
        shares = [pieces[w::count] for w in range(count)]

        def send(worker: Worker, index: int) -> Any:
            return getattr(worker.actor, what).remote(vector, shares[index], *about)

        scores: dict[tuple[int, int], Any] = {}
        for share, answer in zip(shares, self.crew.stream(["while it evaluated"] * count, send), strict=True):
            if isinstance(answer, RemoteError):
                raise as_error(answer)
            scores.update(zip(share, answer, strict=True))
        return [scores[piece] for piece in pieces]

    def close(self) -> None:
        """Stop the workers; a Ray of our own ends."""
        self._finalizer()


def close(crew: WorkerPool, joined: Joined) -> None:
    """Let the workers go, and Ray if we started it or joined it."""
    crew.dismiss()
    leave(joined)
