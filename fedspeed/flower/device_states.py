"""A client's state on its device: files that are written once and never changed.

After its turn in round t a device writes `CLIENT@t`, before it replies; whether the reply is counted it does not know.
The next message says which round of this client was counted last, and the state of that round is the client's state.
So a state changes if and only if its reply was counted, whatever is lost, killed or started again.
"""

from __future__ import annotations

import os
import re
import secrets
from pathlib import Path
from typing import Any

import torch

from ..client.tree_bytes import no_room, read_state, state_name, write_state
from ..errors import UserError
from ..runs.directory import NUMBER
from ..utils.files import flush

NEVER = -1
"""The round counted last of a client that has never been counted."""
RUN = re.compile("[0-9a-f]{32}")
"""What a run is called on devices; it becomes the name of a folder."""


class DeviceStates:
    """The states of one client in one run.

    Args:
        folder: where the device keeps states, of all runs.
        run: as the server calls it.
        dtype: in which vectors are stored, None for their own.

    Example:
        >>> from tempfile import mkdtemp
        >>> from fedspeed.methods.scaffold import Client
        >>> kept = DeviceStates(Path(mkdtemp()), "0" * 32, client=3)
        >>> kept.write(0, Client(torch.ones(2)))
        >>> kept.read(0, Client(torch.empty(2))), kept.read(7, Client(torch.empty(2)))
        (Client(c=tensor([1., 1.])), None)
    """

    def __init__(self, folder: Path, run: str, client: int, dtype: torch.dtype | None = None) -> None:
        if not RUN.fullmatch(run):
            raise UserError(f"flower: expected a run of 32 hexadecimal digits, found {run[:40]!r}")
        self.folder = folder / run
        self.client = client
        self.dtype = dtype

    def read(self, counted: int, like: Any) -> Any | None:
        """The state of the round that was counted last; None if its file is not there, or is damaged. One that cannot
        be read just now (a disk that is away, no permission) is not lost: it raises."""
        try:
            return read_state(self._path(counted), like)
        except UserError as error:
            if isinstance(error.__context__, OSError) and not isinstance(error.__context__, FileNotFoundError):
                raise
            return None

    def write(self, t: int, state: Any) -> None:
        """The state after round t, on the disk when this returns; beside those there are.

        A message that was sent again may be worked off by another process at the same time, so each writes a file of
        its own before it gets its name.
        """
        made = [folder for folder in (self.folder, *self.folder.parents) if not folder.exists()]
        part = self._path(t).with_name(f"{state_name(self.client, t)}.{secrets.token_hex(8)}")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_state(part, state, self.dtype)
            flush(part)
            os.replace(part, self._path(t))
        except OSError as error:
            part.unlink(missing_ok=True)
            raise no_room(self._path(t), error) from None
        for folder in (self.folder, *(folder.parent for folder in made)):
            flush(folder)

    def drop(self, before: int) -> None:
        """Remove the states of rounds that nobody can ask for any more, and what a kill left of them."""
        names = re.compile(rf"{self.client}@({NUMBER})(\.[0-9a-f]{{16}}(\.part)?)?")
        for path in self.folder.glob(f"{self.client}@*"):
            found = names.fullmatch(path.name)
            if found and int(found[1]) < before:
                path.unlink(missing_ok=True)

    def _path(self, t: int) -> Path:
        return self.folder / state_name(self.client, t)
