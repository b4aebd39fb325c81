"""What a server knows of states that lie on devices: of which round each client's is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..methods.base import Nothing
from ..server.states import ClientStates
from .device_states import NEVER

if TYPE_CHECKING:
    from ..server.states import SavedStates


class CountedRounds(ClientStates):
    """In the place of states: the round in which each client was counted last, staged and committed as states are, so
    that checkpoints hold it.

    Args:
        stateful: whether the method's clients keep anything.
    """

    def __init__(self, stateful: bool) -> None:
        super().__init__()
        self.stateful = stateful
        self._before: dict[int, int] = {}

    def get(self, client: int) -> Any | None:
        """Nothing: it is on the device."""
        return None

    def stage(self, client: int, state: Any, t: int, last: bool = True) -> None:
        """A client's reply of round t is counted if the round is."""
        if self.stateful:
            self._staged[client] = (Nothing(), t)

    def commit(self) -> None:
        """The round is counted; the state before is kept by its device until the next one is."""
        self._before |= {client: self.generations.get(client, NEVER) for client in self._staged}
        super().commit()

    def restore(self, saved: SavedStates, like: Any) -> None:
        """Take over what a checkpoint holds."""
        self._kept = dict.fromkeys(saved.entries, Nothing())
        self.generations, self._before = saved.generations, {}
        self._staged, self._unsaved = {}, set()

    def of(self, client: int) -> tuple[int, int]:
        """The round of a client's state, and the oldest round that a resumed run may still ask for."""
        return self.generations.get(client, NEVER), self._before.get(client, NEVER)
