"""The server's record of states that are on devices: the round of each client's state."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..methods.base import Nothing
from ..server.states import ClientStates
from .device_states import NEVER

if TYPE_CHECKING:
    from ..server.states import SavedStates


class CountedRounds(ClientStates):
    """Client states whose vectors are on devices: holds the round in which each client was counted last.

    Rounds are staged and committed as states are, so checkpoints hold them.

    Args:
        stateful: whether the method's clients keep a state.
    """

    def __init__(self, stateful: bool) -> None:
        super().__init__()
        self.stateful = stateful
        self._before: dict[int, int] = {}

    def get(self, client: int) -> Any | None:
        """Return None: the state is on the device."""
        return None

    def stage(self, client: int, state: Any, t: int, last: bool = True) -> None:
        """Stage a client's reply of round t; it is counted when the round is committed."""
        if self.stateful:
            self._staged[client] = (Nothing(), t)

    def commit(self) -> None:
        """Count the round; each device keeps its previous state until the next round is counted."""
        self._before |= {client: self.generations.get(client, NEVER) for client in self._staged}
        super().commit()

    def restore(self, saved: SavedStates, like: Any) -> None:
        """Restore the counted rounds from a checkpoint."""
        self._kept = dict.fromkeys(saved.entries, Nothing())
        self.generations, self._before = saved.generations, {}
        self._staged, self._unsaved = {}, set()

    def of(self, client: int) -> tuple[int, int]:
        """Return the round of a client's state, and the oldest round that a resumed run may still ask for."""
        return self.generations.get(client, NEVER), self._before.get(client, NEVER)
