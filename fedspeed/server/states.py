"""Where client states live between rounds: in memory, or on disk where they are too large for it.

A new state is staged when its reply is counted and committed when the round is: a round that fails leaves every
client as it was, and a client's state changes if and only if its reply was counted. A state has a generation, the
round it is of; on disk it is a file `client@generation`. Which states changed since the last checkpoint is noted as
they change, so that a checkpoint costs what changed and not what there is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from ..client.tree_bytes import read_state, state_name, write_state
from ..client.trees import has_leaves, meta_like, tree_bytes, tree_leaves, tree_map
from ..utils.locks import Scratch

if TYPE_CHECKING:
    from ..client.hooks import Hooks
    from ..methods.base import Round

LIMIT = 2**30
"""Bytes of states, of all clients that a run may touch, above which `auto` keeps them on disk."""


class SavedState(Protocol):
    """A client's state in a checkpoint."""

    @property
    def digest(self) -> str:
        """Of its file; "" without a file of its own."""


class SavedStates(Protocol):
    """The client states of a checkpoint."""

    @property
    def entries(self) -> Mapping[int, SavedState]:
        """What is known of each client's state."""

    @property
    def generations(self) -> dict[int, int]:
        """The round each client's state is of."""

    def state(self, client: int, like: Any) -> Any:
        """A client's state, of the shapes of `like`."""


class _States:
    """What both places have in common: who has a state, of which round, and what changed since the last checkpoint."""

    def __init__(self) -> None:
        self.generations: dict[int, int] = {}
        self._unsaved: set[int] = set()

    def __len__(self) -> int:
        return len(self.generations)

    def __contains__(self, client: object) -> bool:
        return client in self.generations

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(self.generations))


class ClientStates(_States):
    """States in memory: one entry for every client that was ever counted, made at first touch, none for the rest."""

    def __init__(self) -> None:
        super().__init__()
        self._kept: dict[int, Any] = {}
        self._staged: dict[int, tuple[Any, int]] = {}
        self._bytes = 0  # of one state

    def get(self, client: int) -> Any | None:
        """A private copy of a client's state, or None before its first counted reply."""
        kept = self._kept.get(client)
        return None if kept is None else tree_map(torch.clone, kept)

    def stage(self, client: int, state: Any, t: int, last: bool = True) -> None:
        """A client's new state, of round t, to be kept if the round is: a copy, what a reply holds may be on loan.
        It is not its `last` if `settle` comes after it."""
        if has_leaves(state):
            self._staged[client] = (tree_map(torch.clone, state), t)
            self._bytes = tree_bytes(state)

    def settle(self, settled: Callable[[Any], Any]) -> None:
        """Every staged state becomes what `settled` makes of it."""
        self._staged = {client: (settled(state), t) for client, (state, t) in self._staged.items()}

    def commit(self) -> None:
        """The round is counted: staged states are the clients' states."""
        for client, (state, t) in self._staged.items():
            self._kept[client], self.generations[client] = state, t
        self._unsaved.update(self._staged)
        self._staged = {}

    def discard(self) -> None:
        """The round failed: nothing was staged."""
        self._staged = {}

    def restore(self, saved: SavedStates, like: Any) -> None:
        """Take over the states of a checkpoint."""
        self._kept = {i: saved.state(i, like) for i in saved.entries}
        self.generations = saved.generations
        self._staged = {}
        self._unsaved = set()

    @property
    def unsaved_bytes(self) -> int:
        """What a checkpoint would have to write."""
        return len(self._unsaved) * self._bytes

    def take_unsaved(self) -> list[tuple[int, int, Any]]:
        """(client, generation, state) of what changed since this was last asked. They are never changed in place."""
        taken = [(i, self.generations[i], self._kept[i]) for i in sorted(self._unsaved)]
        self._unsaved = set()
        return taken

    def close(self) -> None:
        """Nothing to remove."""


class DiskStates(_States):
    """States on disk, read and written whole (mapped pages would count as memory). Memory holds one number for every
    touched client.

    Args:
        folder: where; None makes a temporary folder, removed by `close`, with this object, or when the process ends.
        dtype: in which to store vectors, None for their own; float16 and bfloat16 halve the space and round.
        keep_old: leave replaced generations to checkpoints, which remove them.
    """

    def __init__(self, folder: Path | None = None, dtype: torch.dtype | None = None, keep_old: bool = False) -> None:
        super().__init__()
        self._temporary = Scratch("fedspeed-states-") if folder is None else None
        self.folder = self._temporary.path if folder is None else folder  # type: ignore[union-attr]
        self.dtype, self.keep_old = dtype, keep_old
        self._staged: dict[int, int] = {}
        self._like: Any = None

    def path(self, client: int, t: int) -> Path:
        """The file of a client's state as of round t."""
        return self.folder / state_name(client, t)

    def get(self, client: int) -> Any | None:
        """A client's state, read from its file."""
        t = self.generations.get(client)
        return None if t is None else read_state(self.path(client, t), self._like)

    def stage(self, client: int, state: Any, t: int, last: bool = True) -> None:
        """Write a client's new state under a name of its own, beside the old one; unrounded if it is not its last."""
        if not has_leaves(state):
            return
        if self._like is None:
            self._like = tree_map(meta_like, state)
        self._staged[client] = t  # first: what is half written when somebody interrupts is dropped too
        write_state(self.path(client, t), state, self.dtype if last else None)

    def settle(self, settled: Callable[[Any], Any]) -> None:
        """Every staged state becomes what `settled` makes of it, one at a time: in memory there is never more."""
        for client, t in self._staged.items():
            write_state(self.path(client, t), settled(read_state(self.path(client, t), self._like)), self.dtype)

    def commit(self) -> None:
        """The round is counted: drop the states that were replaced, but for those that a checkpoint may name."""
        old = [(i, self.generations[i]) for i, t in self._staged.items() if self.generations.get(i, t) != t]
        needed = set() if not self.keep_old else {i for i, _ in old} - self._unsaved
        self.generations.update(self._staged)
        self._unsaved.update(self._staged)
        self._staged = {}
        for client, before in old:
            if client not in needed:
                self._drop(client, before)

    def discard(self) -> None:
        """The round failed: drop what it wrote."""
        for client, t in self._staged.items():
            if self.generations.get(client) != t:
                self._drop(client, t)
        self._staged = {}

    def _drop(self, client: int, t: int) -> None:
        with suppress(OSError):  # it is left over, and nobody asks for it
            self.path(client, t).unlink(missing_ok=True)

    def restore(self, saved: SavedStates, like: Any) -> None:
        """Take over the states of a checkpoint: files lie in this folder already, others get one."""
        self._like = tree_map(meta_like, like)
        self.generations, self._staged = saved.generations, {}
        self._unsaved = {i for i, entry in saved.entries.items() if not entry.digest}
        for client in self._unsaved:
            write_state(self.path(client, self.generations[client]), saved.state(client, like), self.dtype)

    @property
    def unsaved_bytes(self) -> int:
        """Nothing: a state is on disk before it counts."""
        return 0

    def take_unsaved(self) -> list[tuple[int, int, Any]]:
        """(client, generation, None) of what changed since this was last asked: each is a file."""
        taken = [(i, self.generations[i], None) for i in sorted(self._unsaved)]
        self._unsaved = set()
        return taken

    def close(self) -> None:
        """Remove a temporary folder."""
        if self._temporary is not None:
            self._temporary.close()


def choose_states(
    where: str,
    prototype: Any,
    clients: int,
    folder: Path | None = None,
    dtype: torch.dtype | None = None,
) -> ClientStates | DiskStates:
    """`memory`, `disk`, or `auto`: on disk where the states would take more than 1 GiB.

    In a folder of a run, generations are kept for its checkpoints.

    Args:
        clients: how many may have a state in the end.
    """
    size = clients * sum(a.numel() * a.element_size() for a in tree_leaves(prototype))
    if where == "disk" or (where == "auto" and size > LIMIT) or (dtype is not None and size):
        return DiskStates(folder, dtype, keep_old=folder is not None)
    return ClientStates()


def settle(states: ClientStates | DiskStates, hooks: Hooks, mean: Any, round: Round) -> None:
    """Put the states of this round through the method's `settle`, if it has one: the mean is in the clients' dtype."""
    if "settle" in hooks.overridden:
        seen = tree_map(lambda a: a.to(hooks.dtype, copy=True), mean)  # a copy: `update` may work in the other
        device = next(tree_leaves(seen)).device
        states.settle(lambda kept: hooks.settle(tree_map(lambda a: a.to(device), kept), seen, round))
