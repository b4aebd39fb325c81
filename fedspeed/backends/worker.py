"""What runs in a worker process: receive a chunk of jobs, run it, leave the replies in shared memory."""

from __future__ import annotations

import ctypes
import pickle
import sys
import traceback
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..client.engines import make_engine
from ..client.evaluate import Score, Sums, score_clients, score_slice
from ..client.trees import tree_map
from ..client.work import Facts, Failed, Job
from ..errors import ClientFailed, Diverged, UserError
from ..methods.source import reason
from .packing import unpack
from .shared_memory import Segment, Slot, at, put, take


class ClientPlaces(NamedTuple):
    """Where a client's state lies, in and out, and its upload."""

    state: list[Slot]
    upload: list[Slot]


class Setup(NamedTuple):
    """Where everything lies."""

    segments: list[tuple[Path, int]]  # of the data, and of the vectors
    data: dict[str, Slot]
    vectors: list[Slot]  # a vector to evaluate, then what the server sends
    slots: list[list[ClientPlaces]]  # each holds a chunk


class RemoteError(NamedTuple):
    """An error as the parent raises it again: its kind, what it says, and where it was raised here."""

    kind: str
    text: str
    trace: str


def worker(pipe: Connection, setup: bytes) -> None:
    """The loop of one worker; it ends when the other end of the pipe is closed, so also when the parent dies."""
    torch.set_num_threads(1)
    try:
        try:
            answers = _prepare(pipe, pickle.loads(setup))
        except (EOFError, OSError):
            raise
        except Exception as error:
            pipe.send(("error", remote_error(error, f"a worker process cannot start: {type(error).__name__}: {error}")))
            return
        keep_memory()  # not before: what the start needed goes back
        pipe.send(("ready", None))
        while True:
            request = pipe.recv()
            try:
                answer = answers[request[0]](*request[1:])
            except Exception as error:
                pipe.send(("error", remote_error(error)))
            else:
                pipe.send(("done", answer))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass


def remote_error(error: Exception, otherwise: str = "") -> RemoteError:
    """An error as it travels."""
    trace = "".join(traceback.format_exception(error))
    if isinstance(error, ClientFailed | Diverged | UserError):
        return RemoteError(type(error).__name__, str(error), trace)
    return RemoteError("UserError", otherwise or reason(error), trace)


def _prepare(pipe: Connection, setup: Setup) -> dict[str, Callable[..., list[Any]]]:
    """Map the memory, unpack the work, and return what answers each request."""
    data_segment, segment = (Segment.attach(path, size) for path, size in setup.segments)
    work = unpack(pipe.recv_bytes(), {name: data_segment.tensor(place) for name, place in setup.data.items()})
    flat = work.flat
    like = work.shapes.client
    x = segment.tensor(setup.vectors[0])
    down = at(segment, work.shapes.down, setup.vectors[1:])
    engine = make_engine(work, buffers=[])
    flat.x = x[: flat.d]  # x^0 is the server's to keep

    def run(jobs: list[Job], slot: int, fresh: set[int]) -> list[Facts | RemoteError]:
        rows = {job.client: row for job, row in zip(jobs, setup.slots[slot], strict=False)}

        def state(client: int) -> Any:
            if client in fresh:
                return tree_map(partial(torch.zeros_like, device=x.device), like)
            return take(segment, like, rows[client].state)

        answer: list[Facts | RemoteError] = []
        for reply in engine.run(jobs, down, state):
            if isinstance(reply, Failed):
                answer.append(remote_error(reply.error))
                continue
            row = rows[reply.job.client]
            if reply.facts.share:
                put(segment, row.upload, reply.up)
            put(segment, row.state, reply.client)
            answer.append(reply.facts)
        return answer

    def evaluate(pieces: list[tuple[int, int]], validation: bool) -> list[Score]:
        return [score_slice(flat, x, work.data, work.loss, a, b, validation) for a, b in pieces]

    def evaluate_clients(pieces: list[tuple[int, int]]) -> list[Sums]:
        return [score_clients(flat, x, work.data, work.loss, a, b) for a, b in pieces]

    return {"run": run, "evaluate": evaluate, "evaluate_clients": evaluate_clients}


def keep_memory() -> None:
    """Keep freed vectors for the next ones (glibc): by default a large block goes back to the system every time, and
    its pages are faulted in again, which costs more than the arithmetic on it."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        if hasattr(libc, "mallopt"):
            libc.mallopt(-3, 2**30)  # M_MMAP_THRESHOLD
            libc.mallopt(-1, 2**30)  # M_TRIM_THRESHOLD
