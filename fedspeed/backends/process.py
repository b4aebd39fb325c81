"""Persistent worker processes on this machine: one intra-op thread each, data and vectors in shared memory.

Same bits as serial for any number of workers: the same chunks of jobs on the same engine, replies summed in job order.
A worker has two slots in shared memory, so it works on its next chunk while the server still reads its last replies.
"""

from __future__ import annotations

import pickle
import signal
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

from ..client.engines import make_engine
from ..client.evaluate import Score, Sums, client_slices, slices, total
from ..client.trees import tree_leaves, tree_map
from ..client.work import Facts, Failed, Job, Reply, Work
from ..errors import ClientFailed, Diverged, UserError
from ..utils.processes import end_with_parent, in_main_thread, safe_path
from .packing import pack, without_main
from .shared_memory import Segment, Slot, at, lay_out, put
from .worker import ClientPlaces, RemoteError, Setup

SLOTS = 2


RETRIES = 3


"""How often a worker that died is replaced before the run stops."""


STARTED = "as it started"


KINDS = {"Diverged": Diverged, "ClientFailed": ClientFailed, "UserError": UserError}


class Worker(NamedTuple):
    """A process and the pipe to it."""

    process: BaseProcess
    pipe: Connection


class Processes:
    """Runs chunks of jobs in `workers` processes.

    Args:
        touched: clients that have a state; a worker makes that of any other, where it is all zeros, by itself.
    """

    def __init__(self, work: Work, workers: int, touched: Container[int] = ()) -> None:
        device = work.flat.device.type
        x0 = work.flat.x
        shapes = work.shapes
        if device != "cpu":
            raise UserError(f"back end process: works on the cpu, got device {device}; use --backend serial")
        self.work = work
        self.touched = touched
        self.engine = make_engine(work)
        self.workers: list[Worker] = []
        self._owing: set[int] = set()  # workers that were asked and have not answered
        self._starts_at_zero = not any(bool(a.any()) for a in tree_leaves(work.hooks.init_client(x0)))
        packed = pack(work)
        self._payload, self._main = packed.work, packed.main
        up = tree_map(partial(torch.empty_like, dtype=self.engine.dtype), shapes.up)
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
            with suppress(BrokenPipeError, ConnectionResetError):  # it died: seen when its answer is asked for
                here.send_bytes(pickle.dumps(self._setups[w]))
                here.send_bytes(self._payload)
        except BaseException:  # Ctrl-C: nobody has it in a list yet
            end([Worker(process, here)])
            raise
        return Worker(process, here)

    def run(self, jobs: Sequence[Job], down: Any, state: Callable[[int], Any]) -> Iterator[Reply | Failed]:
        """Replies in job order. What a reply holds lies in shared memory, and is gone when the next is asked for.

        A round that fails waits for nobody: workers that still owe an answer are replaced if they are asked again.
        """
        put(self._segment, self._vectors[1:], down)
        queue = list(self.engine.chunks(jobs))
        free = {w: list(range(SLOTS)) for w in range(len(self.workers))}
        running: dict[int, tuple[int, int]] = {}  # worker -> (chunk number, slot)
        done: dict[int, tuple[int, int, list[Facts | RemoteError]]] = {}  # chunk number -> (worker, slot, answers)
        sent = 0

        def feed() -> None:
            """Give work to everybody who has none."""
            nonlocal sent
            for w in free:
                if sent < len(queue) and w not in running and free[w]:
                    slot = free[w].pop()
                    self._send(w, queue[sent], slot, state)
                    running[w] = (sent, slot)  # not before: a state that cannot be read is nobody's work
                    sent += 1

        for number, chunk in enumerate(queue):
            feed()
            while number not in done:
                for w in self._ready(running):
                    index, slot = running.pop(w)
                    again = partial(self._send, w, queue[index], slot, state)
                    done[index] = (w, slot, self._answer(w, again, f"while it ran {called(queue[index])}"))
                feed()  # before the replies are looked at, which takes time
            w, slot, answer = done.pop(number)
            for job, row, told in zip(chunk, self._setups[w].slots[slot], answer, strict=False):
                try:
                    yield self._reply(job, row, told)
                finally:
                    self._segment.leave([*row.state, *row.upload])
            free[w].append(slot)

    def _reply(self, job: Job, row: ClientPlaces, told: Facts | RemoteError) -> Reply | Failed:
        if isinstance(told, RemoteError):
            error = as_error(told)
            if not isinstance(error, ClientFailed | Diverged):
                raise error
            return Failed(job, error)
        up = at(self._segment, self._up, row.upload) if told.share else None
        return Reply(job, up, at(self._segment, self.work.shapes.client, row.state), told)

    def evaluate(self, x: torch.Tensor, validation: bool = False) -> Score:
        """Loss and accuracy of a vector on test or validation set, shared among the workers, summed in order."""
        pieces = slices(self.work.data, validation)
        return total(self._spread(x, pieces, "evaluate", validation), pieces[-1][1] if pieces else 0)

    def evaluate_clients(self, x: torch.Tensor) -> list[Sums]:
        """Sums over the slices of all clients' data, shared among the workers, in order."""
        return self._spread(x, client_slices(self.work.data), "evaluate_clients")

    def _spread(self, x: torch.Tensor, pieces: list[tuple[int, int]], what: str, *about: Any) -> list[Any]:
        """The answers for a vector and some pieces, in order, whoever gave them."""
        self._segment.write(self._vectors[0], x)
        shares = [pieces[w :: len(self.workers)] for w in range(len(self.workers))]
        ask = [partial(self._ask, w, (what, share, *about)) for w, share in enumerate(shares)]
        for send in ask:
            send()
        scores: dict[tuple[int, int], Any] = {}
        error: Exception | None = None
        for w, share in enumerate(shares):
            try:
                scores.update(zip(share, self._answer(w, ask[w], "while it evaluated"), strict=True))
            except Exception as raised:  # the others' answers must be read all the same
                error = raised
        if error:
            raise error
        return [scores[piece] for piece in pieces]

    def close(self) -> None:
        """Stop the workers and let go of the memory."""
        self._finalizer()

    def _send(self, w: int, chunk: list[Job], slot: int, state: Callable[[int], Any]) -> None:
        clients = [job.client for job in chunk]
        fresh = {i for i in clients if i not in self.touched} if self._starts_at_zero else set()
        for i, row in zip(clients, self._setups[w].slots[slot], strict=False):
            if i not in fresh:
                put(self._segment, row.state, state(i))
        self._ask(w, ("run", chunk, slot, fresh))

    def _ask(self, w: int, request: tuple[Any, ...]) -> None:
        if w in self._owing:  # a round ended before its answer, which must not be taken for this one
            self._replace(w)  # asked again when it is ready
            return
        self._owing.add(w)
        with suppress(BrokenPipeError, ConnectionResetError):  # it died: seen when its answer is asked for
            self.workers[w].pipe.send(request)

    def _replace(self, w: int) -> None:
        end([self.workers[w]])
        self.workers[w] = self._spawn(w)
        self._owing.discard(w)  # not before: Ctrl-C may have come

    def _ready(self, running: Iterable[int]) -> list[int]:
        """Workers with an answer, or dead ones."""
        waiting = {self.workers[w].pipe: w for w in running}
        return [waiting[pipe] for pipe in wait(list(waiting)) if isinstance(pipe, Connection)]

    def _answer(self, w: int, again: Callable[[], None] | None, doing: str, retries: int = RETRIES) -> Any:
        """A worker's answer. One that died is replaced and asked `again`, a few times; an error that is not a
        client's is raised here."""
        deaths = 0
        while True:
            try:
                kind, value = self.workers[w].pipe.recv()
            except (EOFError, ConnectionResetError):
                deaths += 1
                self.workers[w].process.join()
                told = f"a worker process died (exit code {self.workers[w].process.exitcode}) {doing}"
                if deaths > retries:
                    guard = "; a script must start runs inside `if __name__ == '__main__':`" if doing == STARTED else ""
                    fix = f"out of memory? Lower --workers, or use --backend serial{guard}"
                    raise UserError(f"{told}; {fix}") from None
                warnings.warn(f"{told}; it is replaced and asked again ({deaths} of {retries})", stacklevel=2)
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


def as_error(told: RemoteError) -> Exception:
    """A worker's error, here."""
    error: Exception = KINDS[told.kind](told.text)
    error.add_note(f"In the worker process:\n{told.trace}")
    return error


def called(chunk: list[Job]) -> str:
    """A chunk in words."""
    first, others = chunk[0], len(chunk) - 1
    beside = f" and {others} other{'s' * (others > 1)} in a block" if others else ""
    return f"client {first.client}{beside} of round {first.t + 1}"


def close(workers: list[Worker], segments: list[Segment]) -> None:
    """Stop every worker and let go of shared memory."""
    end(workers)
    for segment in segments:
        segment.unlink()
    workers.clear()


def end(workers: list[Worker]) -> None:
    """Stop workers, which have nothing that could be lost: killed, since one that was stopped hears nothing else."""
    for each in workers:
        each.pipe.close()
        each.process.kill()
    for each in workers:
        each.process.join()


def share(tensors: dict[str, torch.Tensor]) -> tuple[Segment, dict[str, Slot]]:
    """Tensors in shared memory, and where each lies."""
    places, size = lay_out(list(tensors.values()))
    segment, named = Segment.create(size), dict(zip(tensors, places, strict=True))
    for name, place in named.items():
        segment.write(place, tensors[name])
    return segment, named


def begin(pipe: Connection, kernel: bool) -> None:
    """Become a worker that ignores Ctrl-C, whose meaning the parent decides, and that ends with its parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent(kernel)
    try:
        setup = pipe.recv_bytes()
    except (EOFError, ConnectionResetError):
        return
    from .worker import worker

    worker(pipe, setup)
