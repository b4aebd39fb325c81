"""Client states of a deployed run: on its device, files that are written once; at the server, the round of each.

After its turn in round t a device writes `CLIENT@t` before it replies; it does not know whether its reply is counted.
The next message names the round of this client that was counted last; the state of that round is the client's state.
So a state changes if and only if its reply was counted, also if a message is lost or a process is killed.
"""

from __future__ import annotations

import os
import re
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..client.tree_bytes import no_room, read_state, state_name, write_state
from ..errors import UserError
from ..methods.base import Nothing
from ..runs.directory import NUMBER
from ..server.states import ClientStates
from ..utils.files import flush

if TYPE_CHECKING:
    from ..server.states import SavedStates


NEVER = -1
"""The round counted last of a client that has never been counted."""
RUN = re.compile("[0-9a-f]{32}")
"""The form of a run's name on devices; the name becomes that of a folder."""


class DeviceStates:
    """The states of one client in one run.

    Args:
        folder: the folder of the states of all runs on this device.
        run: the run's name, chosen by the server.
        client: the client's index.
        dtype: the dtype in which vectors are stored; None keeps their own.

    Example:
        >>> from tempfile import mkdtemp
        >>> from fedspeed.methods.scaffold import Client
        >>> states = DeviceStates(Path(mkdtemp()), "0" * 32, client=3)
        >>> states.write(0, Client(torch.ones(2)))
        >>> states.read(0, Client(torch.empty(2))), states.read(7, Client(torch.empty(2)))
        (Client(c=tensor([1., 1.])), None)
    """

    def __init__(self, folder: Path, run: str, client: int, dtype: torch.dtype | None = None) -> None:
        if not RUN.fullmatch(run):
            raise UserError(f"flower: expected a run of 32 hexadecimal digits, found {run[:40]!r}")
        self.folder = folder / run
        self.client = client
        self.dtype = dtype

    def read(self, counted: int, like: Any) -> Any | None:
        """Return the state of the round that was counted last; None if its file is missing or damaged.

        Raise if the file exists but cannot be read now (an unmounted disk, no permission): that state is not lost.
        """
        try:
            return read_state(self._path(counted), like)
        except UserError as error:
            if isinstance(error.__context__, OSError) and not isinstance(error.__context__, FileNotFoundError):
                raise
            return None

    def write(self, t: int, state: Any) -> None:
        """Write the state after round t beside the earlier ones; it is durable when this returns.

        Another process may handle the same message, sent again, at the same time, so each writes its own temporary file
        and renames it.
        """
        made = [folder for folder in (self.folder, *self.folder.parents) if not folder.exists()]
        part = self._path(t).with_name(f"{state_name(self.client, t)}.{secrets.token_hex(8)}")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_state(part, state, self.dtype)
            flush(part)  # fsync before rename: the name never refers to a partial state.
            os.replace(part, self._path(t))
        except OSError as error:
            part.unlink(missing_ok=True)
            raise no_room(self._path(t), error) from None
        for folder in (self.folder, *(folder.parent for folder in made)):
            flush(folder)  # fsync of the directories: the names outlast a power cut.

    def drop(self, before: int) -> None:
        """Remove the states of rounds that the server can no longer ask for, and partial files that a kill left."""
        names = re.compile(rf"{self.client}@({NUMBER})(\.[0-9a-f]{{16}}(\.part)?)?")
        for path in self.folder.glob(f"{self.client}@*"):
            found = names.fullmatch(path.name)
            if found and int(found[1]) < before:
                path.unlink(missing_ok=True)

    def _path(self, t: int) -> Path:
        return self.folder / state_name(self.client, t)


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
