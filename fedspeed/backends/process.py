"""Persistent worker processes on this machine: one intra-op thread each, data and vectors in shared memory.

Same bits as serial for any number of workers: the same `run_client`, replies summed in job order. A worker has two
slots in shared memory, so it works on its next client while the server still reads its last reply.
"""

from __future__ import annotations

import os
import pickle
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple

import torch

from ..client import Job, Reply, Work
from ..errors import Diverged, UserError
from ..evaluate import Score, shards, total
from ..method import Local, Method
from ..vec import tree_leaves, tree_map
from .shared import Place, Segment, at, copy_into, lay_out
from .worker import Setup, worker

SLOTS = 2


class Worker(NamedTuple):
    """A process, the pipe to it, and its slots: (state, upload) trees in shared memory."""

    process: BaseProcess
    pipe: Connection
    slots: list[tuple[Any, Any]]


class Processes:
    """Runs jobs in `workers` processes; `module` is the pickled model before it was made flat."""

    def __init__(self, work: Work, down: Any, x0: torch.Tensor, module: bytes, workers: int) -> None:
        self.work, self.workers = work, []
        client = work.method.init_client(x0)
        up, kept = work.method.upload(x0.clone(), down, tree_map(torch.clone, client), Local(1, 1.0, 1))
        data, self.data_places, rest = _data_segment(work)
        places, size = lay_out([x0, *tree_leaves(down)])
        slots: list[tuple[list[Place], list[Place]]] = []
        for _ in range(SLOTS * workers):
            state, size = lay_out(list(tree_leaves(kept)), size)
            upload, size = lay_out(list(tree_leaves(up)), size)
            slots.append((state, upload))
        segment = Segment.create(size)
        self.x, self.down = segment.tensor(places[0]), at(segment, down, places[1:])
        payload = _payload(work, rest, module)
        context = get_context("spawn")
        try:
            for w in range(workers):
                own = slots[SLOTS * w : SLOTS * (w + 1)]
                here, there = context.Pipe()
                names = [(s.path, s.size) for s in (data, segment)]
                setup = Setup(names, self.data_places, places, own, sources(work.method))
                process = context.Process(target=worker, args=(there, setup), daemon=True, name=f"fedspeed-{w}")
                process.start()
                there.close()
                here.send_bytes(payload)
                self.workers.append(Worker(process, here, [(at(segment, kept, a), at(segment, up, b)) for a, b in own]))
            for each in self.workers:
                self._receive(each)
        except BaseException:
            close(self.workers)
            raise
        finally:
            data.unlink()
            segment.unlink()
        self._finalizer = weakref.finalize(self, close, self.workers)

    def run(self, jobs: Iterable[Job], down: Any, state: Callable[[int], Any]) -> Iterator[Reply]:
        """Replies in job order; a reply's upload is valid until the next one is asked for."""
        copy_into(self.down, down)
        queue = list(jobs)
        free = {w: list(range(SLOTS)) for w in range(len(self.workers))}
        running: dict[int, tuple[int, int]] = {}  # worker -> (job number, slot)
        done: dict[int, tuple[int, int, tuple[Any, ...]]] = {}  # job number -> (worker, slot, what happened)
        sent = 0
        try:
            for number, job in enumerate(queue):
                while number not in done:
                    for w in free:
                        if sent < len(queue) and w not in running and free[w]:
                            running[w] = (sent, free[w].pop())
                            self._send(w, queue[sent], running[w][1], state)
                            sent += 1
                    for w in self._ready(running):
                        index, slot = running.pop(w)
                        done[index] = (w, slot, self._receive(self.workers[w], queue[index]))
                w, slot, facts = done.pop(number)
                kept, up = self.workers[w].slots[slot]
                yield Reply(job, up, tree_map(torch.clone, kept), *facts)
                free[w].append(slot)
        finally:
            for w in running:  # the round failed: nobody's answer may wait for the next one
                with suppress(UserError, Diverged):
                    self._receive(self.workers[w])

    def evaluate(self, x: torch.Tensor) -> Score:
        """Test loss and accuracy of a vector, shared among the workers, summed in order."""
        self.x.copy_(x)
        pieces = shards(self.work.data)
        shares = [pieces[w :: len(self.workers)] for w in range(len(self.workers))]
        for each, share in zip(self.workers, shares, strict=True):
            each.pipe.send(("evaluate", share))
        scores: dict[tuple[int, int], Score] = {}
        for each, share in zip(self.workers, shares, strict=True):
            scores.update(zip(share, self._receive(each), strict=True))
        return total((scores[piece] for piece in pieces), pieces[-1][1] if pieces else 0)

    def close(self) -> None:
        """Stop the workers."""
        self._finalizer()

    def _send(self, w: int, job: Job, slot: int, state: Callable[[int], Any]) -> None:
        copy_into(self.workers[w].slots[slot][0], state(job.client))
        self.workers[w].pipe.send(("run", job, slot))

    def _ready(self, running: Iterable[int]) -> list[int]:
        """Workers with an answer, or dead ones."""
        waiting = {self.workers[w].pipe: w for w in running}
        return [waiting[pipe] for pipe in wait(list(waiting)) if isinstance(pipe, Connection)]

    def _receive(self, each: Worker, job: Job | None = None) -> Any:
        """A worker's answer; its error is raised here."""
        try:
            kind, value = each.pipe.recv()
        except (EOFError, ConnectionResetError):
            each.process.join(5)
            during = f" while it ran client {job.client} of round {job.t + 1}" if job else ""
            raise UserError(
                f"a worker process died (exit code {each.process.exitcode}){during}; out of memory? "
                f"Lower --workers, or use --backend serial"
            ) from None
        if kind == "error":
            raise {"Diverged": Diverged, "UserError": UserError}[value[0]](value[1])
        return value


def close(workers: list[Worker]) -> None:
    """Stop every worker; it has nothing that could be lost."""
    for each in workers:
        each.pipe.close()
        each.process.kill()
    for each in workers:
        each.process.join()
    workers.clear()


def sources(method: Method) -> list[str]:
    """How to find the classes of a method that come from a user's file; a worker loads these first."""
    own = [method.source] if method.source else []
    return own + [name for value in method.fields().values() if isinstance(value, Method) for name in sources(value)]


def _data_segment(work: Work) -> tuple[Segment, dict[str, Place], Any]:
    """The data's tensors in shared memory, where each lies, and the data without them."""
    tensors = {k: getattr(work.data, k) for k in ("x", "y", "x_test", "y_test") if getattr(work.data, k) is not None}
    places, size = lay_out(list(tensors.values()))
    segment = Segment.create(size)
    named = dict(zip(tensors, places, strict=True))
    for name, place in named.items():
        segment.tensor(place).copy_(tensors[name])
    empty: dict[str, Any] = {name: torch.empty(0) for name in tensors}
    return segment, named, replace(work.data, **empty)


def _payload(work: Work, data: Any, module: bytes) -> bytes:
    """Everything a worker needs that is not in shared memory."""
    parts = {"method": work.method, "loss": work.loss, "data": data, "no_decay": work.flat.no_decay}
    common = {name: getattr(work, name) for name in Work.__dataclass_fields__ if name not in {*parts, "flat"}}
    for name, value in parts.items():
        check_picklable(name, value)
    return pickle.dumps({**parts, "module": module, "common": common})


def check_picklable(name: str, value: Any) -> bytes:
    """Pickle a value, or say that this one cannot be sent to a worker."""
    try:
        return pickle.dumps(value)
    except Exception as error:
        raise UserError(
            f"back end process: the {name} cannot be sent to worker processes ({type(error).__name__}: {error}); "
            f"define it at the top level of a module, or use backend='serial'"
        ) from None


def available_cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
