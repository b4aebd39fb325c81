"""Where client states live between rounds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from .vec import tree_leaves, tree_map


class ClientStates:
    """States in memory: one entry a client that was ever counted, made at first touch, none for the rest.

    `get` hands out a private copy, so that a client may be run again after a failure; `put` is called if and only
    if the client's reply was counted.
    """

    def __init__(self) -> None:
        self._kept: dict[int, Any] = {}

    def get(self, client: int) -> Any | None:
        """A copy of a client's state, or None before its first counted reply."""
        kept = self._kept.get(client)
        return None if kept is None else tree_map(lambda a: a.clone(), kept)

    def put(self, client: int, state: Any) -> None:
        """Keep a client's new state; a stateless method costs nothing."""
        if any(True for _ in tree_leaves(state)):
            self._kept[client] = tree_map(_own, state)

    def __len__(self) -> int:
        return len(self._kept)

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(self._kept))


def _own(a: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy of it where it is a row of something larger that it would keep alive."""
    return a.clone() if a.untyped_storage().nbytes() > a.nbytes else a
