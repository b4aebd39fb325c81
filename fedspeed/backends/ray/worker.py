"""A worker of a Ray cluster: it reports its bits, takes the work, then runs chunks of jobs and evaluates pieces."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from ...client.engines import Engine, make_engine
from ...client.tree_bytes import read_state, state_name, write_state
from ...client.trees import meta_like, tree_leaves, tree_map, tree_of, zeros_of
from ...client.work import Facts, Failed, Job, Reply, Work
from ...errors import UserError
from ...methods.source import built_in
from ...utils.devices import deterministic
from ...utils.files import Scratch
from ..common import Piece, RemoteError, keep_memory, remote_error, score_pieces
from ..packing import pack_tensors, unpack, unpack_tensors
from .fingerprint import Fingerprint, bits

SPARE = 2**30
"""Bytes of disk space that kept states leave free."""


class Greeting(NamedTuple):
    """The identity of a worker: its machine, and what decides its bits; or why it cannot work."""

    host: str
    process: int
    bits: Fingerprint | None
    folder: str = ""  # where it keeps states
    error: str = ""


class Setup(NamedTuple):
    """Settings that a worker gets with the work."""

    data: dict[str, torch.Tensor]  # the data's tensors without their numbers (device meta)
    private: list[str]  # tensors that are copied for each worker, because a user's model may write to its inputs
    device: str  # the device that computes
    keep: bool  # whether new states are kept on the node for the client's next turn


class Request(NamedTuple):
    """A chunk of jobs."""

    jobs: list[Job]
    fresh: set[int]  # clients whose state is all zeros
    kept: dict[int, str]  # clients whose state is a file on this node
    sent: list[int]  # clients whose state comes with the request, in order: all others of the chunk
    drop: list[str]  # files of this worker that are not needed any more


class Missing(NamedTuple):
    """The answer to a request whose state files are gone: the driver must send these clients' states."""

    clients: list[int]


class Answer(NamedTuple):
    """The replies to the jobs of a chunk, and the clients whose new states are kept on this node too."""

    results: list[Facts | RemoteError]
    raw: np.ndarray  # states and uploads: `reply_leaves`
    kept: list[int]


def reply_leaves(
    work: Work, dtype: torch.dtype, results: Sequence[Facts | RemoteError]
) -> Iterator[list[torch.Tensor]]:
    """Yield tensors of the shapes in a chunk's replies, job by job: the state, then the upload if it has its own."""
    state = list(tree_leaves(work.shapes.client))
    upload = [meta_like(a, dtype) for a in tree_leaves(work.shapes.up)]
    for facts in results:
        if isinstance(facts, RemoteError):
            yield []
        else:
            yield state + (upload if facts.represents else [])


class RayWorker:
    """A worker: it runs chunks of jobs and evaluates vectors.

    It receives everything it needs, and reads no files but states that it kept itself.
    """

    work: Work
    engine: Engine

    def __init__(self) -> None:
        with suppress(ValueError):  # not the main thread
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the driver
        torch.set_num_threads(1)
        self.scratch: Scratch | None = None
        threading.Thread(target=self._end_with, args=(os.getppid(),), daemon=True, name="fedspeed-parent").start()

    def _end_with(self, parent: int) -> None:
        """End when Ray's own process on this node has ended; otherwise workers look for another one for a minute."""
        while os.getppid() == parent:
            time.sleep(1)
        self.leave()
        os._exit(1)

    def hello(self) -> Greeting:
        """Return the identity of this worker; for the fingerprint in it a fixed job is run."""
        self.scratch = Scratch("fedspeed-ray-")
        return Greeting(socket.gethostname(), os.getpid(), bits(), str(self.scratch.path))

    def prepare(self, packed: bytes, data: np.ndarray, setup: Setup) -> RemoteError | None:
        """Unpack the work, and return an error or None; the data stay in Ray's memory, one copy per node."""
        try:
            tensors = dict(zip(setup.data, unpack_tensors(data, setup.data.values()), strict=True))
            for name in tensors if setup.device != "cpu" else setup.private:
                tensors[name] = tensors[name].to(setup.device, copy=True)
            self.work, self.keep = unpack(packed, tensors), setup.keep
            self.engine = make_engine(self.work, buffers=[])
            keep_memory()
        except Exception as error:
            return remote_error(error, f"back end ray: a worker cannot start: {type(error).__name__}: {error}")
        return None

    @property
    def _device(self) -> torch.device:
        return self.work.flat.device

    def run(self, down: np.ndarray, states: np.ndarray, request: Request) -> Answer | Missing | RemoteError:
        """Run one chunk."""
        for name in request.drop:
            Path(name).unlink(missing_ok=True)
        like = self.work.shapes.client
        views = iter(unpack_tensors(states, list(tree_leaves(like)) * len(request.sent)))
        sent = {i: tree_of(like, views) for i in request.sent}
        kept, missing = self._read(request.kept)
        if missing:
            return Missing(missing)

        def state(client: int) -> Any:
            if client in request.fresh:
                return zeros_of(like, self._device)
            return tree_map(lambda a: a.to(self._device, copy=True), kept.get(client) or sent[client])

        leaves = unpack_tensors(down, tree_leaves(self.work.shapes.down))
        if self._device.type != "cpu" or not built_in(self.work.method):  # a user's hook may write to it
            leaves = [a.to(self._device, copy=True) for a in leaves]
        try:
            with deterministic(self._device):
                replies = self.engine.run(request.jobs, tree_of(self.work.shapes.down, leaves), state)
        except Exception as error:
            return remote_error(error)
        return self._answer(replies)

    def _read(self, files: dict[int, str]) -> tuple[dict[int, Any], list[int]]:
        """Return the states that were kept on this node, and the clients whose file is gone."""
        found: dict[int, Any] = {}
        for client, name in files.items():
            with suppress(UserError):
                found[client] = read_state(Path(name), self.work.shapes.client)
        return found, [client for client in files if client not in found]

    def _answer(self, replies: list[Reply | Failed]) -> Answer:
        results: list[Facts | RemoteError] = []
        tensors: list[torch.Tensor] = []
        kept: list[int] = []
        for reply in replies:
            if isinstance(reply, Failed):
                results.append(remote_error(reply.error))
                continue
            results.append(reply.facts)
            tensors += [*tree_leaves(reply.client), *(tree_leaves(reply.up) if reply.facts.represents else ())]
            if self._keep_state(reply):
                kept.append(reply.job.client)
        return Answer(results, pack_tensors(tensors), kept)

    def _keep_state(self, reply: Reply) -> bool:
        """Keep a copy of a new state on this node if there is room, and return whether it is kept."""
        if not self.keep or self.scratch is None:
            return False
        try:
            if shutil.disk_usage(self.scratch.path).free < SPARE:
                return False
            write_state(self.scratch.path / state_name(reply.job.client, reply.job.t), reply.client)
        except (UserError, OSError):
            return False
        return True

    def evaluate(self, x: np.ndarray, what: str, pieces: list[Piece], *about: Any) -> list[Any] | RemoteError:
        """Evaluate a vector on some pieces, see `score_pieces`."""
        try:
            flat = self.work.flat
            like = flat.x.new_empty(flat.d + len(flat.statistics), device="meta")
            vector = unpack_tensors(x, [like])[0].to(self._device, copy=True)
            with deterministic(self._device):
                return score_pieces(self.work, vector, what, pieces, *about)
        except Exception as error:
            return remote_error(error)

    def leave(self) -> None:
        """Remove the files of this worker."""
        if self.scratch is not None:
            self.scratch.close()


def actor_class() -> type:
    """Return the class of Ray's actors.

    Ray sends a class that is local to a function as code, so that it can report that the package is missing on a node.
    For the same reason `RayWorker` must be imported inside: a name of this module would be looked up on arrival.
    """

    class FedspeedWorker:
        def __init__(self, path: list[str]) -> None:
            import sys

            sys.path += [folder for folder in path if folder not in sys.path]
            try:
                from fedspeed.backends.ray.worker import RayWorker

                self.node, self.error = RayWorker(), ""
            except Exception as error:
                self.error = f"{type(error).__name__}: {error}"

        def hello(self) -> Any:
            if not self.error:
                return self.node.hello()
            import os
            import socket

            return socket.gethostname(), os.getpid(), None, "", self.error  # a Greeting, without the class

        def prepare(self, *args: Any) -> Any:
            return self.node.prepare(*args)

        def run(self, *args: Any) -> Any:
            return self.node.run(*args)

        def evaluate(self, *args: Any) -> Any:
            return self.node.evaluate(*args)

        def where(self) -> str:
            import ray

            return str(ray.get_runtime_context().get_node_id())

        def leave(self) -> None:
            if not self.error:
                self.node.leave()

    return FedspeedWorker
