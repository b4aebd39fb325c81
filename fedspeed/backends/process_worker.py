"""The loop of a worker process: receive a chunk of jobs, run it, leave the replies in shared memory."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..client.engines import make_engine
from ..client.trees import tree_of, zeros_of
from ..client.work import Facts, Failed, Job
from .common import RemoteError, keep_memory, remote_error, score_pieces
from .packing import unpack
from .shared_memory import Segment, Slot, put


class ClientPlaces(NamedTuple):
    """Slots of one client in shared memory: its state, read and then overwritten, and its upload."""

    state: list[Slot]
    upload: list[Slot]


class Setup(NamedTuple):
    """Slots of everything a worker reads and writes."""

    segments: list[tuple[Path, int]]  # of the data, and of the vectors
    data: dict[str, Slot]
    vectors: list[Slot]  # a vector to evaluate, then what the server sends
    slots: list[list[ClientPlaces]]  # each holds a chunk


def worker(pipe: Connection, setup: bytes) -> None:
    """Answer requests until the other end of the pipe is closed, which also happens when the parent dies."""
    torch.set_num_threads(1)
    try:
        try:
            answers, leave_data = _prepare(pipe, pickle.loads(setup))
        except (EOFError, OSError):
            raise
        except Exception as error:
            pipe.send(("error", remote_error(error, f"a worker process cannot start: {type(error).__name__}: {error}")))
            return
        keep_memory()  # not earlier, so that memory which only the start needed goes back to the system
        pipe.send(("ready", None))
        while True:
            request = pipe.recv()
            try:
                answer = answers[request[0]](*request[1:])
                leave_data()  # Otherwise every worker ends with all data mapped, which counts as its memory.
            except Exception as error:
                pipe.send(("error", remote_error(error)))
            else:
                pipe.send(("done", answer))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass


def _prepare(pipe: Connection, setup: Setup) -> tuple[dict[str, Callable[..., list[Any]]], Callable[[], None]]:
    """Map the memory and unpack the work.

    Returns:
        The function that answers each kind of request, and one that unmaps the data.
    """
    data_segment, segment = (Segment(os.open(path, os.O_RDWR), path, size) for path, size in setup.segments)
    work = unpack(pipe.recv_bytes(), {name: data_segment.tensor(place) for name, place in setup.data.items()})
    flat = work.flat
    like = work.shapes.client
    x = segment.tensor(setup.vectors[0])
    down = tree_of(work.shapes.down, map(segment.tensor, setup.vectors[1:]))
    engine = make_engine(work, buffers=[])
    flat.x = x[: flat.d]  # frees the model's own copy of x^0, which only the server needs

    def run(jobs: list[Job], slot: int, fresh: set[int]) -> list[Facts | RemoteError]:
        rows = {job.client: row for job, row in zip(jobs, setup.slots[slot], strict=False)}

        def state(client: int) -> Any:
            if client in fresh:
                return zeros_of(like, x.device)
            return tree_of(like, map(segment.read, rows[client].state))

        answer: list[Facts | RemoteError] = []
        for reply in engine.run(jobs, down, state):
            if isinstance(reply, Failed):
                answer.append(remote_error(reply.error))
                continue
            row = rows[reply.job.client]
            if reply.facts.represents:
                put(segment, row.upload, reply.up)
            put(segment, row.state, reply.client)
            answer.append(reply.facts)
        return answer

    leave_data = partial(data_segment.leave, list(setup.data.values()))
    return {"run": run, "evaluate": partial(score_pieces, work, x)}, leave_data
