"""Client states between rounds: in memory, or on disk if they are too large.

A new state is staged when its reply is counted and committed when the round is: a round that fails leaves every
client as it was, and a client's state changes if and only if its reply was counted. A state has a generation, the
round it is of: 0 is the first, so a checkpoint `server@T` goes with generations below T. On disk it is a file
`client@generation`. Which states changed since the last checkpoint is noted as they change, so that a checkpoint writes
only those.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from ..client.tree_bytes import read_state, state_name, write_state
from ..client.trees import has_leaves, meta_like, stack, tree_bytes, tree_leaves, tree_map
from ..utils.files import Scratch

if TYPE_CHECKING:
    from ..client.hooks import Hooks
    from ..methods.base import Round

LIMIT = 2**30
"""Bytes of states, of all clients that may take part in a run, above which `auto` keeps them on disk."""


class SavedStates(Protocol):
    """The client states of a checkpoint."""

    @property
    def entries(self) -> Mapping[int, Any]:
        """Client -> its saved state, with the digest of its file; "" without a file of its own."""

    @property
    def generations(self) -> dict[int, int]:
        """Client -> the round its state is of."""

    def state(self, client: int, like: Any) -> Any:
        """Return a client's state, with the shapes of `like`."""


class _States:
    """Base of both kinds: the generation of each client's state, and the clients that changed since a checkpoint.

    `_bytes` is what a checkpoint must write of one state, and `_kept` holds the states in memory. On disk they are
    0 and empty: a state is a file before its round counts, which a checkpoint only hashes and flushes.
    """

    def __init__(self) -> None:
        self.generations: dict[int, int] = {}
        self._unsaved: set[int] = set()
        self._kept: dict[int, Any] = {}
        self._bytes = 0

    def __len__(self) -> int:
        return len(self.generations)

    def __contains__(self, client: object) -> bool:
        return client in self.generations

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(self.generations))

    @property
    def unsaved_bytes(self) -> int:
        """The bytes that a checkpoint would write."""
        return len(self._unsaved) * self._bytes

    def take_unsaved(self) -> list[tuple[int, int, Any]]:
        """Return (client, generation, state) of the states that changed since the last call; None for one in a file.

        They are never changed in place, so a thread may write them while the next round runs.
        """
        taken = [(i, self.generations[i], self._kept.get(i)) for i in sorted(self._unsaved)]
        self._unsaved = set()
        return taken

    def close(self) -> None:
        """Remove temporary files, if there are any."""


class ClientStates(_States):
    """States in memory: one entry per client that was ever counted, none for the rest."""

    def __init__(self) -> None:
        super().__init__()
        self._staged: dict[int, tuple[Any, int]] = {}

    def get(self, client: int) -> Any | None:
        """Return a private copy of a client's state, or None before its first counted reply."""
        kept = self._kept.get(client)
        return None if kept is None else tree_map(torch.clone, kept)

    def block(self, clients: list[int], first: Any) -> Any:
        """Return private copies of some clients' states as one tree of blocks; `first` is that of a client without."""
        return stack([self._kept.get(client, first) for client in clients])

    def stage(self, client: int, state: Any, t: int, last: bool = True) -> None:
        """Stage a client's new state of round t, to be kept if the round is; it is not the `last` if `settle` follows.

        It is copied: a back end may reuse the memory of a reply.
        """
        if state and has_leaves(state):
            if not self._staged:
                self._bytes = tree_bytes(state)
            self._staged[client] = (tree_map(torch.clone, state), t)

    def settle(self, settled: Callable[[Any], Any]) -> None:
        """Replace every staged state by `settled` of it."""
        self._staged = {client: (settled(state), t) for client, (state, t) in self._staged.items()}

    def commit(self) -> None:
        """Count the round: the staged states become the clients' states."""
        for client, (state, t) in self._staged.items():
            self._kept[client], self.generations[client] = state, t
        self._unsaved.update(self._staged)
        self._staged = {}

    def discard(self) -> None:
        """Forget the staged states: the round failed."""
        self._staged = {}

    def restore(self, saved: SavedStates, like: Any) -> None:
        """Take over the states of a checkpoint, which are saved by definition."""
        self._kept = {i: saved.state(i, like) for i in saved.entries}
        self.generations = saved.generations
        self._staged, self._unsaved = {}, set()


class DiskStates(_States):
    """States on disk, read and written whole (mapped pages would count as memory); in memory is one number per client.

    Args:
        folder: where; None makes a temporary folder, removed by `close`, with this object, or when the process ends.
        dtype: the stored dtype of vectors, None for their own; float16 and bfloat16 halve the space and round.
        keep_old: keep replaced generations for checkpoints, which remove them.
    """

    def __init__(self, folder: Path | None = None, dtype: torch.dtype | None = None, keep_old: bool = False) -> None:
        super().__init__()
        self._temporary = Scratch("fedspeed-states-") if folder is None else None
        self.folder = self._temporary.path if folder is None else folder  # type: ignore[union-attr]
        self.dtype, self.keep_old = dtype, keep_old
        self._staged: dict[int, int] = {}
        self._like: Any = None

    def path(self, client: int, t: int) -> Path:
        """Return the path of a client's state as of round t."""
        return self.folder / state_name(client, t)

    def get(self, client: int) -> Any | None:
        """Read a client's state from its file; return None if it has none."""
        t = self.generations.get(client)
        return None if t is None else read_state(self.path(client, t), self._like)

    def block(self, clients: list[int], first: Any) -> Any:
        """Return some clients' states as one tree of blocks; `first` is that of a client without one."""
        found = [self.get(client) for client in clients]
        return stack([first if state is None else state for state in found])

    def stage(self, client: int, state: Any, t: int, last: bool = True) -> None:
        """Write a client's new state beside the old one, under another name; not rounded if it is not the last."""
        if not has_leaves(state):
            return
        if self._like is None:
            self._like = tree_map(meta_like, state)
        self._staged[client] = t  # before the write, so that `discard` also removes a file that is half written
        write_state(self.path(client, t), state, self.dtype if last else None)

    def settle(self, settled: Callable[[Any], Any]) -> None:
        """Replace every staged state by `settled` of it, one at a time to bound memory."""
        for client, t in self._staged.items():
            write_state(self.path(client, t), settled(read_state(self.path(client, t), self._like)), self.dtype)

    def commit(self) -> None:
        """Count the round: remove the states that were replaced, except those that a checkpoint may name."""
        old = [(i, self.generations[i]) for i, t in self._staged.items() if self.generations.get(i, t) != t]
        # A state that changed since the last checkpoint is in no manifest; an older one may be, and must stay.
        needed = {i for i, _ in old} - self._unsaved if self.keep_old else set()
        self.generations.update(self._staged)
        self._unsaved.update(self._staged)
        self._staged = {}
        for client, before in old:
            if client not in needed:
                self._drop(client, before)

    def discard(self) -> None:
        """Remove the files of the staged states: the round failed."""
        for client, t in self._staged.items():
            if self.generations.get(client) != t:
                self._drop(client, t)
        self._staged = {}

    def _drop(self, client: int, t: int) -> None:
        with suppress(OSError):  # A file that stays is never read: its generation is not the client's.
            self.path(client, t).unlink(missing_ok=True)

    def restore(self, saved: SavedStates, like: Any) -> None:
        """Take over the states of a checkpoint: files are in this folder already, states of the log get a file."""
        self._like = tree_map(meta_like, like)
        self.generations, self._staged = saved.generations, {}
        self._unsaved = {i for i, entry in saved.entries.items() if not entry.digest}
        for client in self._unsaved:
            write_state(self.path(client, self.generations[client]), saved.state(client, like), self.dtype)

    def close(self) -> None:
        """Remove a temporary folder."""
        if self._temporary is not None:
            self._temporary.close()


class StateReader:
    """The function that reads a client's state for a back end; the block engine reads those of a block together."""

    def __init__(self, one: Callable[[int], Any], states: ClientStates | DiskStates, first: Any) -> None:
        self.one, self.states = one, states
        self.first = first  # the state of a client before its first counted reply

    def __call__(self, client: int) -> Any:
        """Return a private copy of a client's state."""
        return self.one(client)

    def block(self, clients: list[int]) -> Any:
        """Return private copies of some clients' states as one tree of blocks; one tree if it has no vectors."""
        some = next(tree_leaves(self.first), None)
        if some is None:
            return self.one(clients[0])
        if some.device.type != "cpu":  # States may be kept on another device than they are used on.
            return stack([self.one(client) for client in clients])
        return self.states.block(clients, self.first)


def choose_states(
    where: str,
    prototype: Any,
    clients: int,
    folder: Path | None = None,
    dtype: torch.dtype | None = None,
) -> ClientStates | DiskStates:
    """Return the states for `memory`, `disk` or `auto`: on disk if those of all `clients` take more than 1 GiB.

    States that are stored in another `dtype` are always on disk: files round.

    In the folder of a run, replaced generations are kept for its checkpoints.
    """
    size = clients * tree_bytes(prototype)
    if where == "disk" or (where == "auto" and size > LIMIT) or (dtype is not None and size):
        return DiskStates(folder, dtype, keep_old=folder is not None)
    return ClientStates()


def settle(states: ClientStates | DiskStates, hooks: Hooks, mean: Any, round: Round) -> None:
    """Apply the method's `settle`, if it has one, to the states of this round; the mean is in the clients' dtype."""
    if "settle" in hooks.overridden:
        # A copy: `update` may change the other one in place.
        seen = tree_map(lambda a: a.to(hooks.dtype, copy=True), mean)
        device = next(tree_leaves(seen)).device
        states.settle(lambda kept: hooks.settle(tree_map(lambda a: a.to(device), kept), seen, round))
