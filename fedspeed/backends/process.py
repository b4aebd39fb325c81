"""Persistent worker processes on this machine: one intra-op thread each, data and vectors in shared memory.

Same bits as serial for any number of workers: the same `run_client`, replies summed in job order. A worker has two
slots in shared memory, so it works on its next client while the server still reads its last reply.
"""

from __future__ import annotations

import pickle
import warnings
import weakref
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple

import torch

from ..client import Failed, Job, Reply, Work
from ..data.federated import Federated
from ..environment import cores
from ..errors import ClientFailed, Diverged, UserError
from ..evaluate import Score, shards, total
from ..method import Local
from ..plan import Plan
from ..processes import in_main_thread, safe_path
from ..vec import outline, tree_leaves, tree_map
from .packing import files, in_main, payload, sources, without_main
from .shared import Place, Segment, at, lay_out, put
from .start import begin
from .worker import Setup

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
    """Runs jobs in `workers` processes.

    Args:
        module: the pickled model before it was made flat.
        touched: clients that have a state; a worker makes that of any other, where it is all zeros, by itself.
    """

    def __init__(
        self, work: Work, down: Any, x0: torch.Tensor, module: bytes, workers: int, touched: Container[int]
    ) -> None:
        self.work, self.touched = work, touched
        self.workers: list[Worker] = []
        self._setups: list[Setup] = []
        self._owing: set[int] = set()  # workers that were asked and have not answered
        client = work.hooks.init_client(x0)
        self._starts_at_zero = not any(bool(a.any()) for a in tree_leaves(client))
        up, kept = work.hooks.upload(x0.clone(), down, tree_map(torch.clone, client), Local(1, 1.0, 1))
        data, self.data_places, rest = _data_segment(work)
        places, size = lay_out([x0, *tree_leaves(down)])
        slots: list[tuple[list[Place], list[Place]]] = []
        for _ in range(SLOTS * workers):
            state, size = lay_out(list(tree_leaves(kept)), size)
            upload, size = lay_out(list(tree_leaves(up)), size)
            slots.append((state, upload))
        self._segment = segment = Segment.create(size)
        self._vectors, self._like = places, (tree_map(outline, kept), tree_map(outline, up))
        self._payload = payload(work, rest, module)
        self._main = in_main(self._payload) or in_main(module)
        names = [(s.path, s.size) for s in (data, segment)]
        own_files = files(self._payload, module)
        for w in range(workers):
            own = slots[SLOTS * w : SLOTS * (w + 1)]
            self._setups.append(Setup(names, self.data_places, places, own, sources(work.method), own_files))
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

    def run(self, jobs: Iterable[Job], down: Any, state: Callable[[int], Any]) -> Iterator[Reply | Failed]:
        """Replies in job order. What a reply holds lies in shared memory, and is gone when the next is asked for.

        A round that fails waits for nobody: workers that still owe an answer are replaced if they are asked again.
        """
        put(self._segment, self._vectors[1:], down)
        queue = list(jobs)
        free = {w: list(range(SLOTS)) for w in range(len(self.workers))}
        running: dict[int, tuple[int, int]] = {}  # worker -> (job number, slot)
        done: dict[int, tuple[int, int, Any]] = {}  # job number -> (worker, slot, what happened)
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

        for number, job in enumerate(queue):
            feed()
            while number not in done:
                for w in self._ready(running):
                    index, slot = running.pop(w)
                    again = partial(self._send, w, queue[index], slot, state)
                    doing = f"while it ran client {queue[index].client} of round {queue[index].t + 1}"
                    done[index] = (w, slot, self._answer(w, again, doing))
                feed()  # before the reply is looked at, which takes time
            w, slot, facts = done.pop(number)
            failed = isinstance(facts, ClientFailed | Diverged)
            try:
                yield Failed(job, facts) if failed else self._reply(job, w, slot, facts)
            finally:
                self._segment.leave([*self._setups[w].slots[slot][0], *self._setups[w].slots[slot][1]])
            free[w].append(slot)

    def _reply(self, job: Job, w: int, slot: int, facts: tuple[Any, ...]) -> Reply:
        (kept, up), (state, upload) = self._like, self._setups[w].slots[slot]
        return Reply(job, at(self._segment, up, upload), at(self._segment, kept, state), *facts)

    def evaluate(self, x: torch.Tensor, validation: bool = False) -> Score:
        """Loss and accuracy of a vector on test or validation set, shared among the workers, summed in order."""
        self._segment.write(self._vectors[0], x)
        pieces = shards(self.work.data, validation)
        shares = [pieces[w :: len(self.workers)] for w in range(len(self.workers))]
        ask = [partial(self._ask, w, ("evaluate", share, validation)) for w, share in enumerate(shares)]
        for send in ask:
            send()
        scores: dict[tuple[int, int], Score] = {}
        error: Exception | None = None
        for w, share in enumerate(shares):
            try:
                scores.update(zip(share, self._answer(w, ask[w], "while it evaluated"), strict=True))
            except Exception as raised:  # the others' answers must be read all the same
                error = raised
        if error:
            raise error
        return total((scores[piece] for piece in pieces), pieces[-1][1] if pieces else 0)

    def close(self) -> None:
        """Stop the workers and let go of the memory."""
        self._finalizer()

    def _send(self, w: int, job: Job, slot: int, state: Callable[[int], Any]) -> None:
        fresh = self._starts_at_zero and job.client not in self.touched
        if not fresh:
            put(self._segment, self._setups[w].slots[slot][0], state(job.client))
        self._ask(w, ("run", job, slot, fresh))

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
        """A worker's answer. One that died is replaced and asked `again`, a few times; a client's error is returned,
        any other is raised here."""
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
            kind, told, trace = value
            error: Exception = KINDS[kind](told)
            error.add_note(f"In the worker process:\n{trace}")
            if isinstance(error, ClientFailed | Diverged):
                return error
            raise error
        return value


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


def _data_segment(work: Work) -> tuple[Segment, dict[str, Place], Any]:
    """The data's tensors in shared memory, where each lies, and the data without them."""
    tensors = {k: getattr(work.data, k) for k in ("x", "y", "x_test", "y_test") if getattr(work.data, k) is not None}
    places, size = lay_out(list(tensors.values()))
    segment = Segment.create(size)
    named = dict(zip(tensors, places, strict=True))
    for name, place in named.items():
        segment.write(place, tensors[name])
    empty: dict[str, Any] = {name: torch.empty(0) for name in tensors}
    return segment, named, replace(work.data, **empty)


def worker_count(plan: Plan, device: torch.device, data: Federated, d: int) -> int:
    """How many worker processes a plan asks for; 0 is the serial back end.

    `auto` takes them where they save more time than they need to start: on the cpu, with two or more, for a run of
    more than about ten seconds (a local step costs some 0.3 ms, and 6 d operations a sample at 50 GFLOP/s).
    """
    wanted = min(plan.workers or cores(), plan.active)
    if plan.backend == "process" and device.type != "cpu":
        raise UserError(f"back end process: works on the cpu, got device {device.type}; use --backend serial")
    if plan.engine == "block":
        if plan.backend == "process":
            warnings.warn(
                "engine block: runs in this process, so --backend process is not used; --engine loop uses workers",
                stacklevel=2,
            )
        return 0
    if plan.backend == "auto":
        n = float(data.sizes.mean())
        samples = plan.local_steps * plan.batch_size or plan.local_epochs * n
        seconds = plan.rounds * plan.active * (3e-4 * samples / min(plan.batch_size, n) + 6 * d * samples / 5e10)
        return wanted if device.type == "cpu" and wanted > 1 and seconds > 10 else 0
    return wanted if plan.backend == "process" else 0
