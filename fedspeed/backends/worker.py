"""What runs in a worker process: receive a job, run the client, leave the reply in shared memory."""

from __future__ import annotations

import ctypes
import pickle
import sys
import traceback
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..client import Work, run_client
from ..contract import reason
from ..errors import ClientFailed, Diverged, UserError
from ..evaluate import score_shard
from ..method import Local
from ..methods import find
from ..usercode import load_file
from ..vec import FlatModel, outline, tree_map
from .shared import Place, Segment, at, put, take


class Setup(NamedTuple):
    """Where everything lies."""

    segments: list[tuple[Path, int]]  # of the data, and of the vectors
    data: dict[str, Place]
    vectors: list[Place]  # a vector to evaluate, then what the server sends
    slots: list[tuple[list[Place], list[Place]]]
    sources: list[tuple[str, str]]  # name and digest of methods that come from the user's files
    files: list[tuple[str, str]]  # the user's files that model, data or loss come from, and their digests


def worker(pipe: Connection, setup: bytes) -> None:
    """The loop of one worker; it ends when the other end of the pipe is closed, so also when the parent dies."""
    torch.set_num_threads(1)
    try:
        try:
            run, evaluate = _prepare(pipe, pickle.loads(setup))
        except (EOFError, OSError):
            raise
        except Exception as error:
            pipe.send(_told(error, f"a worker process cannot start: {type(error).__name__}: {error}"))
            return
        keep_memory()  # not before: what the start needed goes back
        pipe.send(("ready", None))
        while True:
            request = pipe.recv()
            try:
                answer = run(*request[1:]) if request[0] == "run" else evaluate(*request[1:])
            except Exception as error:
                pipe.send(_told(error))
            else:
                pipe.send(("done", answer))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass


def _told(error: Exception, otherwise: str = "") -> tuple[str, tuple[str, str, str]]:
    """An error as the parent raises it again: its kind, what it says, and where it was raised here."""
    trace = "".join(traceback.format_exception(error))
    if isinstance(error, ClientFailed | Diverged | UserError):
        return "error", (type(error).__name__, str(error), trace)
    return "error", ("UserError", otherwise or reason(error), trace)


def _prepare(pipe: Connection, setup: Setup) -> tuple[Any, Any]:
    """Map the memory, unpack the work, and return what answers the two requests."""
    data_segment, segment = (Segment.attach(path, size) for path, size in setup.segments)
    for source, code in setup.sources:
        find(source, code)
    for file, code in setup.files:
        load_file(file, code)
    parts = pickle.loads(pipe.recv_bytes())
    tensors = {name: data_segment.tensor(place) for name, place in setup.data.items()}
    data = parts["data"].__class__(**{**vars_of(parts["data"]), **tensors})
    flat = FlatModel(pickle.loads(parts["module"]), parts["no_decay"])
    work = Work(method=parts["method"], flat=flat, loss=parts["loss"], data=data, **parts["common"])
    hooks, x0, x = work.hooks, flat.x, segment.tensor(setup.vectors[0])
    sent = hooks.broadcast(hooks.init_server(x0.clone()))
    down = at(segment, sent, setup.vectors[1:])
    _, kept = hooks.upload(x0.clone(), sent, tree_map(torch.clone, hooks.init_client(x0)), Local(1, 1.0, 1))
    like = tree_map(outline, kept)
    flat.x = x  # x^0 is the server's to keep
    buffers: list[torch.Tensor] = []

    def run(job: Any, slot: int, fresh: bool) -> tuple[Any, ...]:
        state, upload = setup.slots[slot]
        client = tree_map(partial(torch.zeros_like, device=x.device), like) if fresh else take(segment, like, state)
        reply = run_client(work, job, down, client, buffers)
        put(segment, upload, reply.up)
        put(segment, state, reply.client)
        return reply.K, reply.n, reply.train_loss, reply.drift, reply.grad_evals

    def evaluate(pieces: list[tuple[int, int]], validation: bool) -> list[Any]:
        return [score_shard(flat, x, data, work.loss, a, b, validation) for a, b in pieces]

    return run, evaluate


def vars_of(data: Any) -> dict[str, Any]:
    """The fields of a dataclass instance, without what it has cached."""
    return {name: getattr(data, name) for name in data.__dataclass_fields__}


def keep_memory() -> None:
    """Keep freed vectors for the next ones (glibc): by default a large block goes back to the system every time, and
    its pages are faulted in again, which costs more than the arithmetic on it."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        if hasattr(libc, "mallopt"):
            libc.mallopt(-3, 2**30)  # M_MMAP_THRESHOLD
            libc.mallopt(-1, 2**30)  # M_TRIM_THRESHOLD
