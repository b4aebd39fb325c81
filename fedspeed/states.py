"""Where client states live between rounds: in memory, or on disk where they are too large for it.

A new state is staged when its reply is counted and committed when the round is: a round that fails leaves every
client as it was, and a client's state changes if and only if its reply was counted. A state has a generation, the
round it is of; on disk it is a file `client@generation`.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .errors import UserError
from .vec import has_leaves, outline, tree_leaves, tree_map

LIMIT = 2**30
"""Bytes of states, were every client touched, above which `auto` keeps them on disk."""


class ClientStates:
    """States in memory: one entry a client that was ever counted, made at first touch, none for the rest."""

    def __init__(self) -> None:
        self._kept: dict[int, Any] = {}
        self._staged: dict[int, tuple[Any, int]] = {}
        self.generations: dict[int, int] = {}

    def get(self, client: int) -> Any | None:
        """A private copy of a client's state, or None before its first counted reply."""
        kept = self._kept.get(client)
        return None if kept is None else tree_map(torch.clone, kept)

    def stage(self, client: int, state: Any, t: int) -> None:
        """A client's new state, of round t, to be kept if the round is: a copy, what a reply holds may be on loan."""
        if has_leaves(state):
            self._staged[client] = (tree_map(torch.clone, state), t)

    def commit(self) -> None:
        """The round is counted: staged states are the clients' states."""
        for client, (state, t) in self._staged.items():
            self._kept[client], self.generations[client] = state, t
        self._staged = {}

    def discard(self) -> None:
        """The round failed: nothing was staged."""
        self._staged = {}

    def restore(self, folder: Path, like: Any, generations: dict[int, int]) -> None:
        """Take over the states of a checkpoint."""
        self._kept = {i: read_state(folder / f"{i}@{t}", like) for i, t in generations.items()}
        self.generations, self._staged = dict(generations), {}

    def unwritten(self, folder: Path) -> dict[Path, Any]:
        """States that have no file of their generation in a folder yet."""
        paths = {folder / f"{i}@{t}": self._kept[i] for i, t in self.generations.items()}
        return {path: state for path, state in paths.items() if not path.exists()}

    def close(self) -> None:
        """Nothing to remove."""

    def __len__(self) -> int:
        return len(self.generations)

    def __contains__(self, client: object) -> bool:
        return client in self.generations

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(self.generations))


class DiskStates:
    """States on disk, read and written whole (mapped pages would count as memory). Memory holds one number a touched
    client.

    Args:
        folder: where; None makes a temporary folder that `close` removes.
        dtype: in which to store vectors, None for their own; float16 and bfloat16 halve the space and round.
        keep_old: leave replaced generations to whoever needs them (checkpoints), who removes them.
    """

    def __init__(self, folder: Path | None = None, dtype: torch.dtype | None = None, keep_old: bool = False) -> None:
        self._temporary = folder is None
        self.folder = Path(tempfile.mkdtemp(prefix="fedspeed-states-")) if folder is None else folder
        self.dtype, self.keep_old = dtype, keep_old
        self.generations: dict[int, int] = {}
        self._staged: dict[int, int] = {}
        self._like: Any = None

    def path(self, client: int, t: int) -> Path:
        """The file of a client's state as of round t."""
        return self.folder / f"{client}@{t}"

    def get(self, client: int) -> Any | None:
        """A client's state, read from its file."""
        t = self.generations.get(client)
        return None if t is None else read_state(self.path(client, t), self._like)

    def stage(self, client: int, state: Any, t: int) -> None:
        """Write a client's new state under a name of its own, beside the old one."""
        if not has_leaves(state):
            return
        if self._like is None:
            self._like = tree_map(outline, state)
        write_state(self.path(client, t), state, self.dtype)
        self._staged[client] = t

    def commit(self) -> None:
        """The round is counted: drop the states that were replaced."""
        for client, t in self._staged.items():
            before = self.generations.get(client)
            self.generations[client] = t
            if before is not None and before != t and not self.keep_old:
                self.path(client, before).unlink(missing_ok=True)
        self._staged = {}

    def discard(self) -> None:
        """The round failed: drop what it wrote."""
        for client, t in self._staged.items():
            if self.generations.get(client) != t:
                self.path(client, t).unlink(missing_ok=True)
        self._staged = {}

    def restore(self, folder: Path, like: Any, generations: dict[int, int]) -> None:
        """Take over the states of a checkpoint, which lie in this folder already."""
        self._like = tree_map(outline, like)
        self.generations, self._staged = dict(generations), {}

    def unwritten(self, folder: Path) -> dict[Path, Any]:
        """Nothing: a state is on disk before it counts."""
        return {}

    def close(self) -> None:
        """Remove a temporary folder."""
        if self._temporary:
            shutil.rmtree(self.folder, ignore_errors=True)

    def __len__(self) -> int:
        return len(self.generations)

    def __contains__(self, client: object) -> bool:
        return client in self.generations

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(self.generations))


def choose_states(
    where: str,
    prototype: Any,
    clients: int,
    folder: Path | None = None,
    dtype: torch.dtype | None = None,
) -> ClientStates | DiskStates:
    """`memory`, `disk`, or `auto`: on disk where all clients' states would take more than 1 GiB.

    In a folder of a run, generations are kept for its checkpoints.
    """
    size = clients * sum(a.numel() * a.element_size() for a in tree_leaves(prototype))
    if where == "disk" or (where == "auto" and size > LIMIT) or (dtype is not None and size):
        return DiskStates(folder, dtype, keep_old=folder is not None)
    return ClientStates()


def write_state(path: Path, state: Any, dtype: torch.dtype | None = None) -> None:
    """A line that says what follows, then the tensors' bytes; under a temporary name, then renamed."""
    leaves = list(tree_leaves(state))
    stored = [a.detach().cpu().to(dtype or a.dtype).contiguous() for a in leaves]
    header = [[list(a.shape), _name(s.dtype), _name(a.dtype)] for a, s in zip(leaves, stored, strict=True)]
    part = path.with_name(path.name + ".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.unlink(missing_ok=True)  # it may be a link
        with part.open("wb") as file:
            file.write(json.dumps(header).encode() + b"\n")
            for a in stored:
                file.write(a.view(torch.uint8).numpy().data)
        os.replace(part, path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise UserError(
            f"cannot write {path} ({error.strerror}); what was written before is kept. Free some space, then "
            f"`fedspeed resume` the run"
        ) from None


def read_state(path: Path, like: Any) -> Any:
    """The tree of tensors in a file, of the shapes and dtypes of `like`; nothing in it is executed."""
    wanted = [(list(a.shape), _name(a.dtype)) for a in tree_leaves(like)]
    try:
        with path.open("rb") as file:
            header = json.loads(file.readline())
            found = [(shape, dtype) for shape, stored, dtype in header if stored in DTYPES]
            if found != wanted or len(header) != len(wanted):
                raise ValueError(f"expected {wanted}, found {header}")
            leaves = iter([_read(file, shape, stored, dtype) for shape, stored, dtype in header])
    except (OSError, ValueError, TypeError, RecursionError, RuntimeError) as error:
        raise UserError(
            f"{path} is no state of this run ({type(error).__name__}: {str(error)[:200]}); it was changed, or "
            f"config.toml was: put it back"
        ) from None
    return tree_map(lambda _: next(leaves), like)


DTYPES = {name: getattr(torch, name) for name in ("float16", "bfloat16", "float32", "float64")}


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _read(file: Any, shape: list[int], stored: str, dtype: str) -> torch.Tensor:
    kind = DTYPES[stored]
    raw = np.fromfile(file, np.uint8, int(np.prod(shape, dtype=np.int64)) * kind.itemsize)
    return torch.from_numpy(raw).view(kind).view(shape).to(DTYPES[dtype])
