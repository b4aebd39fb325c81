"""What a checkpoint's manifest says, format 2 and format 1, and where it says the clients' states are.

A run directory may come from somebody else: every name in a manifest is one that a run could have written there.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .files import read_text
from .hashing import SEAL, Hash, seal_holds, sealed
from .rundir import CLIENT_METRICS, LOG, ROUNDS, STATE, UPLOADS, RunDir
from .statelog import Entry, read_entry, read_log

CHECKPOINT_FORMAT = 2
ERRORS = (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError)
"""What reading a damaged file may raise."""
PARTS = ("server", "log", "rounds", "client_metrics", "uploads")
KEYS = {"format", "round", *PARTS[:3], "bound", "waited"}
YOUNGER = {*PARTS[3:], SEAL}
"""The keys of a manifest: those that all have, and those that may be missing, in an older one for example."""
BOUND = {"config", "data", "split"}
BOUND_YOUNGER = {"variables", "layout", "frozen weights"}
"""What a run is bound to: what stands in every manifest, and what only some have."""


@dataclass(frozen=True)
class Part:
    """A file that a checkpoint needs: its first bytes (None: all of it) have this digest."""

    name: str
    digest: str
    length: int | None = None


@dataclass(frozen=True)
class Manifest:
    """A manifest as it was read; nothing it names was looked at.

    Args:
        t: rounds done.
        files: where format 1 keeps the clients' states, each in a file.
        log: the log of client states; None in format 1.
        rounds: the lines of the rounds done; None in format 1.
        bound: digests of what the run is of: its config, its data, ...
        waited: seconds that rounds had waited for checkpoints.
        client_metrics: the scores of the rounds done, if any were measured.
        uploads: the digests of what clients sent in the rounds done; older runs have none.
    """

    t: int
    server: Part
    files: dict[int, Entry] = field(default_factory=dict)
    log: Part | None = None
    rounds: Part | None = None
    bound: dict[str, str] = field(default_factory=dict)
    waited: float = 0.0
    client_metrics: Part | None = None
    uploads: Part | None = None

    @property
    def grown(self) -> tuple[Part | None, ...]:
        """What belongs to it of each file that grows, in the order of `rundir.GROWING`."""
        return self.rounds, self.client_metrics, self.uploads

    @classmethod
    def read(cls, path: Path) -> Manifest:
        """Of a file `checkpoints/ROUND.json`; raises one of `ERRORS` if it is none."""
        if path.is_symlink():
            raise OSError("expected a file, found a link")
        text = read_text(path)
        plain = json.loads(text)
        t = plain["round"]
        if type(t) is not int or t < 1 or t != int(path.stem) or type(plain["format"]) is not int:
            raise ValueError(f"format {plain['format']!r}, round {t!r}")
        if plain["format"] == 1:
            _require_keys("a manifest", plain, {"format", "round", "files"})
            return cls(t, *_format_1(plain["files"], t))
        if plain["format"] != CHECKPOINT_FORMAT:
            raise ValueError(f"expected format 1 or {CHECKPOINT_FORMAT}, found {plain['format']}")
        _require_keys("a manifest", plain, KEYS, YOUNGER)
        if seal_holds(text) is False:
            raise ValueError("it was changed: its seal is of other text")
        server, log, rounds = (_part(plain[name]) for name in PARTS[:3])
        if server.name != _server(t) or not LOG.fullmatch(log.name) or rounds.name != ROUNDS:
            raise ValueError(f"unexpected files {server.name}, {log.name}, {rounds.name}")
        if server.length is not None or log.length is None or rounds.length is None:
            raise ValueError("expected the number of bytes of log and rounds")
        others = [_part(plain[key]) if key in plain else None for key in PARTS[3:]]
        for part, name in zip(others, (CLIENT_METRICS, UPLOADS), strict=True):
            if part is not None and (part.name != name or not part.length):
                raise ValueError(f"unexpected file {part.name}, or not the number of its bytes")
        bound, waited = plain["bound"], plain["waited"]
        if not isinstance(bound, dict) or not all(isinstance(value, str) for value in bound.values()):
            raise ValueError(f"bound to {bound!r}")
        _require_keys("`bound`", bound, BOUND, BOUND_YOUNGER)
        if type(waited) not in (int, float) or not 0 <= waited < 1e12:
            raise ValueError(f"waited {waited!r}")
        return cls(t, server, {}, log, rounds, bound, float(waited), *others)

    def text(self) -> str:
        """The manifest as it is written."""
        parts = {name: _plain(part) for name in PARTS if (part := getattr(self, name)) is not None}
        return sealed(
            {"format": CHECKPOINT_FORMAT, "round": self.t, **parts, "bound": self.bound, "waited": self.waited}
        )

    def entries(self, run: RunDir) -> dict[int, Entry]:
        """Where the clients' states are."""
        entries = self.files
        if self.log is not None:
            entries = read_log(run.path / self.log.name, self.log.length or 0)
        for client, entry in entries.items():
            if entry.generation >= self.t:
                raise ValueError(f"the state of client {client} is of round {entry.generation + 1}")
        return entries


@dataclass(frozen=True)
class Saved:
    """A checkpoint whose files were all found to have their digests.

    Args:
        entries: client -> where its state is.
        hashes: of the log and of the files that grow, up to the checkpoint, to continue from.
    """

    manifest: Manifest
    run: RunDir
    entries: dict[int, Entry]
    hashes: tuple[Hash, ...]

    @property
    def t(self) -> int:
        """Rounds done."""
        return self.manifest.t

    @property
    def server(self) -> Path:
        """The file of the server's vectors."""
        return self.run.path / self.manifest.server.name

    @property
    def log(self) -> Path | None:
        """The log of client states; format 1 has none."""
        return self.run.path / self.manifest.log.name if self.manifest.log else None

    @property
    def generations(self) -> dict[int, int]:
        """client -> the round its state is of."""
        return {client: entry.generation for client, entry in self.entries.items()}

    def state(self, client: int, like: Any) -> Any:
        """A client's state."""
        return read_entry(self.run, self.log, client, self.entries[client], like)


def _server(t: int) -> str:
    """The server's file as a manifest names it."""
    run = RunDir("")
    return run.name(run.server_path(t))


def _require_keys(what: str, plain: dict[str, Any], keys: set[str], younger: set[str] = frozenset()) -> None:  # type: ignore[assignment]
    """Raise for a key that is unknown or missing: one that was renamed would be read as one that is not there."""
    missing, unknown = sorted(keys - plain.keys()), sorted(plain.keys() - keys - younger)
    if missing or unknown:
        raise ValueError(f"keys of {what}: missing {missing}, unknown {unknown}")


def _part(plain: dict[str, Any]) -> Part:
    _require_keys("a file's entry", plain, {"file", "digest"}, {"bytes"})
    name = plain["file"]
    digest = plain["digest"]
    length = plain.get("bytes")
    if not (isinstance(name, str) and isinstance(digest, str)) or (length is not None and type(length) is not int):
        raise TypeError(f"expected file, digest and bytes, found {plain!r}")
    return Part(name, digest, length)


def _plain(part: Part) -> dict[str, Any]:
    length = {} if part.length is None else {"bytes": part.length}
    return {"file": part.name, **length, "digest": part.digest}


def _format_1(files: dict[str, str], t: int) -> tuple[Part, dict[int, Entry]]:
    """The server's file, and client -> where its state is; any other name is refused."""
    entries: dict[int, Entry] = {}
    server = Part(_server(t), files[_server(t)])
    for name, expected in files.items():
        match = STATE.fullmatch(name)
        if match and int(match[1]) not in entries and isinstance(expected, str) and expected:
            entries[int(match[1])] = Entry(int(match[2]), expected)
        elif name != server.name:
            raise ValueError(f"unexpected file {name!r}")
    return server, entries
