"""The log of client states: each checkpoint appends a record per state that changed since the last one.

A record is a line of JSON and, unless the state has a file of its own, its numbers as bytes:

    {"client": 3, "round": 7, "leaves": [["h", [650], "float32", "float32"]]}   then 2,600 bytes
    {"client": 3, "round": 7, "digest": "..."}                                  of the file states/3@7

The last record of a client is valid. When most of a log is superseded, a new log begins with the valid records.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ..client.tree_bytes import decode, encode, foreign, no_room, read_state, size
from ..utils.files import Hash
from .directory import RunDir

GROWTH, SLACK = 2, 4_000_000
"""A log larger than this many times its valid records, plus some bytes, is rewritten."""
LINE = 2**20
"""The largest number of bytes of a record's line."""


class Entry(NamedTuple):
    """The place of a client's state: its own file if there is a digest, else the log, at `start`."""

    generation: int
    digest: str = ""
    start: int = -1  # of the record in the log; -1 without a record
    length: int = 0


class Change(NamedTuple):
    """A state to append; None if it has its own file, of this digest."""

    client: int
    generation: int
    state: Any
    digest: str = ""


@dataclass(eq=False)
class StateLog:
    """A log to append to, and its valid records."""

    run: RunDir
    path: Path | None = None  # the log to continue; None begins one with the first records
    hash: Hash = field(default_factory=Hash)  # of its bytes
    live: dict[int, Entry] = field(default_factory=dict)  # client -> the place of its state

    def __post_init__(self) -> None:
        self._holds = sum(entry.length for entry in self.live.values())
        self._file_number = 0  # the inode of the log, once it was opened

    def append(self, changes: list[Change], t: int) -> list[Path]:
        """Append the changes of the checkpoint of round t, and return the files that they supersede.

        The records are on the disk when this returns: the manifest that counts them is written afterwards.
        """
        before = self.path
        replaced = [(change.client, self.live[change.client]) for change in changes if change.client in self.live]
        gone = [self.run.state_path(client, entry.generation) for client, entry in replaced if entry.digest]
        try:
            if before is None or self.hash.count > GROWTH * self._holds + SLACK:
                self._begin(t, {change.client for change in changes})
            assert self.path is not None
            with self.path.open("ab") as file:
                number = os.fstat(file.fileno()).st_ino
                if number != (self._file_number or number):
                    raise OSError(2, "another file has taken its place")
                self._file_number = number
                for change in changes:
                    self._add(file, change)
                file.flush()
                os.fsync(file.fileno())  # before the manifest, which promises these bytes
        except OSError as error:
            raise no_room(self.path or self.run.states, error) from None
        return gone if before in (None, self.path) else [*gone, before]

    def _begin(self, t: int, without: set[int]) -> None:
        """Begin a new log with the valid records, without those of some clients.

        The old log stays until the next manifest is on the disk: the newest one still names it.
        """
        old, live = self.path, self.live
        self.run.states.mkdir(exist_ok=True)
        self.path = self.run.log_path(t)
        self.hash = Hash()
        self.live = {}
        self._holds = 0
        self.path.unlink(missing_ok=True)  # The name may be a link, or a log that a killed process began.
        with self.path.open("xb") as file, (old or Path(os.devnull)).open("rb") as source:
            self._file_number = os.fstat(file.fileno()).st_ino
            for client in sorted(live.keys() - without):
                entry = live[client]
                if entry.start < 0:
                    self._add(file, Change(client, entry.generation, None, entry.digest))
                    continue
                source.seek(entry.start)
                self._put(file, client, entry.generation, entry.digest, [source.read(entry.length)])

    def _add(self, file: Any, change: Change) -> None:
        header, numbers = ([], []) if change.digest else encode(change.state)
        about = {"digest": change.digest} if change.digest else {"leaves": header}
        line = json.dumps({"client": change.client, "round": change.generation, **about}).encode() + b"\n"
        self._put(file, change.client, change.generation, change.digest, [line, *numbers])

    def _put(self, file: Any, client: int, generation: int, digest: str, pieces: Iterable[Any]) -> None:
        start = self.hash.count
        for piece in pieces:
            file.write(piece)
            self.hash.update(piece)
        length = self.hash.count - start
        self._holds += length - (self.live[client].length if client in self.live else 0)
        self.live[client] = Entry(generation, digest, start, length)


def read_log(path: Path, length: int) -> dict[int, Entry]:
    """Return the place of each client's state, by the first bytes of a log; raise for anything but records."""
    live: dict[int, Entry] = {}
    with path.open("rb") as file:
        start = 0
        while start < length:
            line = file.readline(LINE)
            about = json.loads(line)
            client, generation, digest = about["client"], about["round"], about.get("digest", "")
            if any(type(n) is not int or n < 0 for n in (client, generation)) or not isinstance(digest, str):
                raise ValueError(f"record of client {client!r}, round {generation!r}")
            numbers = 0 if digest else size(about["leaves"])
            live[client] = Entry(generation, digest, start, len(line) + numbers)
            start = file.seek(numbers, os.SEEK_CUR)
        if start != length:
            raise ValueError(f"expected the end of a record at byte {length}, found it at {start}")
    return live


def read_entry(run: RunDir, log: Path | None, client: int, entry: Entry, like: Any) -> Any:
    """Read a client's state from its own file or from the log."""
    if entry.digest or log is None:
        return read_state(run.state_path(client, entry.generation), like)
    try:
        with log.open("rb") as file:
            file.seek(entry.start)
            return decode(file, json.loads(file.readline(LINE))["leaves"], like)
    except (OSError, ValueError, TypeError, KeyError, RecursionError, RuntimeError) as error:
        raise foreign(log, error) from None
