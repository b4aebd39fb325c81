"""Persistent worker processes on this machine: one intra-op thread each, data and vectors in shared memory.

The bits are those of the serial back end for any number of workers: the same engine runs the same chunks of jobs, and
replies are summed in job order. A worker has two slots in shared memory, so it works on its next chunk while the server
still reads its last replies.
"""

from __future__ import annotations

import pickle
import warnings
import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple

import torch

from ..client.trees import meta_like, tree_leaves, tree_map, tree_of
from ..client.work import Facts, Failed, Job, Reply, Work
from ..errors import UserError
from ..utils.pages import release
from ..utils.processes import in_main_thread, safe_path, without_main
from .common import Piece, RemoteBackend, RemoteError, as_error, called, failed_job
from .packing import pack
from .process_start import begin
from .process_worker import ClientPlaces, Setup
from .shared_memory import Segment, Slot, lay_out, put

SLOTS = 2
"""Chunks per worker in shared memory: one that it computes, one whose replies the server reads."""
RETRIES = 3
"""How often a worker that died is replaced before the run stops."""
STARTED = "as it started"


class Worker(NamedTuple):
    """A process and the pipe to it."""

    process: BaseProcess
    pipe: Connection


class Processes(RemoteBackend):
    """Back end that runs chunks of jobs in `workers` processes; for the arguments see `Backend`."""

    def __init__(self, work: Work, workers: int, touched: Container[int] = ()) -> None:
        device = work.flat.device.type
        if device != "cpu":
            raise UserError(f"back end process: works on the cpu, got device {device}; use --backend serial")
        super().__init__(work, touched)
        x0, shapes = work.flat.x, work.shapes
        self.size = workers
        self.workers: list[Worker] = []
        self._owing: set[int] = set()  # workers that were asked and have not answered
        packed = pack(work, values=False)  # every vector that a worker computes with comes through shared memory
        self._payload, self._main = packed.work, packed.main
        up = tree_map(partial(meta_like, dtype=self.engine.dtype), shapes.up)
        self._vectors, size = lay_out([x0.new_empty(len(x0) + len(work.flat.statistics)), *tree_leaves(shapes.down)])
        slots: list[list[ClientPlaces]] = [[] for _ in range(SLOTS * workers)]
        for slot in slots:  # a page that is never written takes no memory
            for _ in range(min(self.engine.most, work.data.clients)):
                state, size = lay_out(list(tree_leaves(shapes.client)), size)
                upload, size = lay_out(list(tree_leaves(up)), size)
                slot.append(ClientPlaces(state, upload))
        self._up = up
        data, places = share(packed.data)
        self._segment = segment = Segment.create(size)
        names = [(s.path, s.size) for s in (data, segment)]
        own = [slots[SLOTS * w : SLOTS * (w + 1)] for w in range(workers)]
        self._setups = [Setup(names, places, self._vectors, some) for some in own]
        self._finalizer = weakref.finalize(self, close, self.workers, [data, segment])
        try:
            for w in range(workers):
                self.workers.append(self._spawn(w))
            for w in range(workers):
                self._answer(w, None, STARTED, retries=0)
        except BaseException:
            self.close()
            raise

    def _spawn(self, w: int) -> Worker:
        """Start worker number w; its first answer says that it is ready."""
        context = get_context("spawn")
        here, there = context.Pipe()
        process = context.Process(target=begin, args=(there, in_main_thread()), daemon=True, name=f"fedspeed-{w}")
        with safe_path(), nullcontext() if self._main else without_main():
            process.start()
        there.close()
        try:
            with suppress(BrokenPipeError, ConnectionResetError):  # it died, which `_answer` will see
                here.send_bytes(pickle.dumps(self._setups[w]))
                here.send_bytes(self._payload)
        except BaseException:  # Ctrl-C: the worker is not in `self.workers` yet, so `close` would not end it
            end([Worker(process, here)])
            raise
        return Worker(process, here)

    def run(self, jobs: Sequence[Job], down: Any, state: Callable[[int], Any]) -> Iterator[Reply | Failed]:
        """Yield one reply per job, in job order; the order fixes the bits of the server's sums.

        A reply's tensors lie in shared memory until the next reply is asked for. A round that fails does not wait for
        its workers: those that still owe an answer are replaced when they are asked again.
        """
        put(self._segment, self._vectors[1:], down)
        queue = list(self.engine.chunks(jobs))
        free = {w: list(range(SLOTS)) for w in range(len(self.workers))}
        running: dict[int, tuple[int, int]] = {}  # worker -> (chunk number, slot)
        done: dict[int, tuple[int, int, list[Facts | RemoteError]]] = {}  # chunk number -> (worker, slot, answers)
        sent = 0

        def feed() -> None:
            """Give a chunk to every worker that has none."""
            nonlocal sent
            for w in free:
                if sent < len(queue) and w not in running and free[w]:
                    slot = free[w].pop()
                    self._send(w, queue[sent], slot, state)
                    running[w] = (sent, slot)  # not earlier: `_send` raises if a state cannot be read
                    sent += 1

        for number, chunk in enumerate(queue):
            feed()
            while number not in done:
                for w in self._ready(running):
                    index, slot = running.pop(w)
                    again = partial(self._send, w, queue[index], slot, state)
                    done[index] = (w, slot, self._answer(w, again, f"while it ran {called(queue[index])}"))
                feed()  # before the replies are read, so that no worker waits for the server
            w, slot, answer = done.pop(number)
            for job, row, result in zip(chunk, self._setups[w].slots[slot], answer, strict=False):
                try:
                    yield self._reply(job, row, result)
                finally:
                    self._segment.leave([*row.state, *row.upload])
            free[w].append(slot)

    def _reply(self, job: Job, row: ClientPlaces, result: Facts | RemoteError) -> Reply | Failed:
        if isinstance(result, RemoteError):
            return failed_job(job, result)
        up = tree_of(self._up, map(self._segment.tensor, row.upload)) if result.represents else None
        return Reply(job, up, tree_of(self.work.shapes.client, map(self._segment.tensor, row.state)), result)

    def _answers(
        self, x: torch.Tensor, shares: list[list[Piece]], what: str, about: tuple[Any, ...]
    ) -> list[list[Any]]:
        self._segment.write(self._vectors[0], x)
        asks = [partial(self._ask, w, ("evaluate", what, share, *about)) for w, share in enumerate(shares)]
        for ask in asks:
            ask()
        answers: list[list[Any]] = []
        error: Exception | None = None
        for w, ask in enumerate(asks):
            try:
                answers.append(self._answer(w, ask, "while it evaluated"))
            except Exception as raised:  # the other workers' answers must be read all the same
                error = raised
        if error:
            raise error
        return answers

    def close(self) -> None:
        """Stop the workers and free the memory."""
        self._finalizer()

    def _send(self, w: int, chunk: list[Job], slot: int, state: Callable[[int], Any]) -> None:
        clients = [job.client for job in chunk]
        fresh = self._fresh(clients)
        for i, row in zip(clients, self._setups[w].slots[slot], strict=False):
            if i not in fresh:
                put(self._segment, row.state, state(i))
        self._ask(w, ("run", chunk, slot, fresh))

    def _ask(self, w: int, request: tuple[Any, ...]) -> None:
        if w in self._owing:  # a round ended before its answer came, which must not be taken for this one
            self._replace(w)  # `_answer` asks the new worker when it is ready
            return
        self._owing.add(w)
        with suppress(BrokenPipeError, ConnectionResetError):  # it died, which `_answer` will see
            self.workers[w].pipe.send(request)

    def _replace(self, w: int) -> None:
        end([self.workers[w]])
        self.workers[w] = self._spawn(w)
        self._owing.discard(w)  # last: after Ctrl-C in between, the worker must be replaced again

    def _ready(self, running: Iterable[int]) -> list[int]:
        """Wait, and return the workers that have answered or died."""
        waiting = {self.workers[w].pipe: w for w in running}
        return [waiting[pipe] for pipe in wait(list(waiting)) if isinstance(pipe, Connection)]

    def _answer(self, w: int, again: Callable[[], None] | None, doing: str, retries: int = RETRIES) -> Any:
        """Return a worker's answer; raise an error that is not a client's.

        A worker that died is replaced and asked `again`, at most `retries` times.
        """
        deaths = 0
        while True:
            try:
                kind, value = self.workers[w].pipe.recv()
            except (EOFError, ConnectionResetError):
                deaths += 1
                self.workers[w].process.join()
                death = f"a worker process died (exit code {self.workers[w].process.exitcode}) {doing}"
                if deaths > retries:
                    guard = "; a script must start runs inside `if __name__ == '__main__':`" if doing == STARTED else ""
                    fix = f"out of memory? Lower --workers, or use --backend serial{guard}"
                    raise UserError(f"{death}; {fix}") from None
                warnings.warn(f"{death}; it is replaced and asked again ({deaths} of {retries})", stacklevel=2)
                self._replace(w)
                continue
            if kind != "ready":
                break
            if again is None:
                return None
            again()
        self._owing.discard(w)
        if kind == "error":
            raise as_error(value)
        return value


def close(workers: list[Worker], segments: list[Segment]) -> None:
    """Stop every worker and free the shared memory."""
    end(workers)
    for segment in segments:
        segment.unlink()
    workers.clear()


def end(workers: list[Worker]) -> None:
    """Kill workers: they hold nothing that could be lost, and one that was stopped (SIGSTOP) reacts to nothing else."""
    for each in workers:
        each.pipe.close()
        each.process.kill()
    for each in workers:
        each.process.join()


def share(tensors: dict[str, torch.Tensor]) -> tuple[Segment, dict[str, Slot]]:
    """Copy tensors to shared memory; return the segment and the slot of each.

    Those that were mapped from files leave this process's memory, since only workers read them from now on.
    """
    places, size = lay_out(list(tensors.values()))
    segment, named = Segment.create(size), dict(zip(tensors, places, strict=True))
    for name, place in named.items():
        segment.write(place, tensors[name])
        release(tensors[name].detach().contiguous().view(-1).view(torch.uint8).numpy())
    return segment, named
