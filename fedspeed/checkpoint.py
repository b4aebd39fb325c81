"""What makes a run survive: the server's vectors and the clients' states on disk, whole or not at all.

A checkpoint is a manifest `checkpoints/ROUND.json` with the digest of every file it names: `server@ROUND` (the
server's vectors, float64) and the state files `states/client@generation`. Files are written first, flushed to the
disk, and renamed; the manifest last. So whatever kills a run, the newest manifest is complete. No pickle anywhere.
Randomness needs no state: it is a function of seed, round and client.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

from .errors import UserError
from .states import ClientStates, DiskStates, read_state, write_state
from .vec import tree_bytes

FORMAT = 1
KEEP = 2
"""Checkpoints that stay; the one before the last is what `verify` runs the last round from."""
SMALL = 50_000_000
"""Bytes up to which a checkpoint is written every round; larger ones at most every `PAUSE` seconds."""
PAUSE = 60.0


class Saved(NamedTuple):
    """A checkpoint as its manifest tells it."""

    t: int  # rounds done
    server: Path
    generations: dict[int, int]


class Checkpoints:
    """The checkpoints of one run directory, written in the background, one in flight.

    Args:
        folder: the run directory.
        every: write every so many rounds; 0 decides by size and time, see `SMALL` and `PAUSE`.
    """

    def __init__(self, folder: Path, every: int = 0) -> None:
        self.folder, self.every = folder, every
        self.states = folder / "states"
        self._digests: dict[str, str] = {}
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._last = time.monotonic()

    def offer(self, t: int, server: Any, states: ClientStates | DiskStates) -> None:
        """Write a checkpoint of round t if one is due. The vectors given are never changed in place, so the next round
        may run meanwhile."""
        new = states.unwritten(self.states)
        size = tree_bytes(server) + sum(tree_bytes(state) for state in new.values())
        busy = self._thread is not None and self._thread.is_alive()
        due = t % self.every == 0 if self.every else size <= SMALL or time.monotonic() - self._last >= PAUSE
        if due and not (busy and size > SMALL):
            self.write(t, server, states)

    def write(self, t: int, server: Any, states: ClientStates | DiskStates) -> None:
        """Write a checkpoint of round t now, in the background."""
        self.wait()
        self._last = time.monotonic()
        new, generations = states.unwritten(self.states), dict(states.generations)
        self._thread = threading.Thread(target=self._write, args=(t, server, new, generations), daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Let the checkpoint in flight finish; what stopped it is raised here."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _write(self, t: int, server: Any, new: dict[Path, Any], generations: dict[int, int]) -> None:
        try:
            path = self.folder / "checkpoints" / f"server@{t}"
            write_state(path, server)
            for file, state in new.items():
                write_state(file, state)
            names = [f"checkpoints/server@{t}", *(f"states/{i}@{g}" for i, g in sorted(generations.items()))]
            digests = {name: self._digests.get(name) or digest(self.folder / name, flush=True) for name in names}
            manifest = {"format": FORMAT, "round": t, "files": digests}
            write_durably(self.folder / "checkpoints" / f"{t}.json", json.dumps(manifest))
            self._digests = digests
            self._prune()
        except BaseException as error:  # told in `wait`, on the run's own thread
            self._error = error

    def manifests(self) -> list[Path]:
        """The manifests there are, newest first."""
        found = [p for p in (self.folder / "checkpoints").glob("*.json") if p.stem.isdigit()]
        return sorted(found, key=lambda p: -int(p.stem))

    def _prune(self) -> None:
        """Drop checkpoints beyond the last ones, and files that no kept one names."""
        kept = self.manifests()[:KEEP]
        needed = {name for path in kept for name in json.loads(path.read_text("utf-8"))["files"]}
        newest = int(kept[0].stem)
        for path in self.manifests()[KEEP:]:
            path.unlink(missing_ok=True)
        for path in (self.folder / "checkpoints").glob("server@*"):
            if f"checkpoints/{path.name}" not in needed:
                path.unlink(missing_ok=True)
        for path in self.states.glob("*@*"):
            stem = path.name.removesuffix(".part").rpartition("@")[2]
            if f"states/{path.name}" not in needed and stem.isdigit() and int(stem) < newest:
                path.unlink(missing_ok=True)

    def latest(self) -> Saved | None:
        """The newest checkpoint, every file checked; None if there is none. A damaged one is named in the error."""
        manifests = self.manifests()
        return self.read(manifests[0]) if manifests else None

    def read(self, path: Path) -> Saved:
        """A checkpoint whose files all have the digests its manifest says."""
        older = [p.stem for p in self.manifests() if int(p.stem) < int(path.stem)]
        offer = f"; the one of round {older[0]} is older: delete {path.name} to resume from it" if older else ""
        try:
            manifest = json.loads(path.read_text("utf-8"))
            t, files = manifest["round"], manifest["files"]
            if manifest["format"] != FORMAT or not isinstance(t, int) or t != int(path.stem):
                raise ValueError(f"format {manifest['format']!r}, round {t!r}")
            generations = _generations(files)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"checkpoint {path} is damaged ({type(error).__name__}: {error}){offer}") from None
        for name, expected in files.items():
            found = digest(self.folder / name) if (self.folder / name).is_file() else "no such file"
            if found != expected:
                raise UserError(
                    f"checkpoint {path}: {name} is damaged (expected digest {expected}, found {found}){offer}"
                )
        self._digests = dict(files)
        return Saved(t, self.folder / "checkpoints" / f"server@{t}", generations)

    def restore(self, saved: Saved, server_like: Any, client_like: Any, states: ClientStates | DiskStates) -> Any:
        """Put client states back and return the server's state; what later rounds had written is removed."""
        known = {f"{i}@{t}" for i, t in saved.generations.items()}
        for path in self.states.glob("*@*"):
            if path.name not in known:
                path.unlink(missing_ok=True)
        states.restore(self.states, client_like, saved.generations)
        return read_state(saved.server, server_like)


def _generations(files: dict[str, str]) -> dict[int, int]:
    """client -> generation from the names of a manifest; any other name is refused, so no path can lead elsewhere."""
    generations = {}
    for name in files:
        folder, _, rest = name.partition("/")
        client, at, generation = rest.partition("@")
        if folder == "states" and at and client.isdigit() and generation.isdigit():
            generations[int(client)] = int(generation)
        elif not (folder == "checkpoints" and client == "server" and generation.isdigit()):
            raise ValueError(f"unexpected file {name!r}")
    return generations


def digest(path: Path, flush: bool = False) -> str:
    """blake2b of a file's bytes; `flush` has them on the disk first."""
    with path.open("rb") as file:
        if flush:
            os.fsync(file.fileno())
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def write_durably(path: Path, text: str) -> None:
    """Write a small file whole or not at all, and have it on the disk before it has its name."""
    part = path.with_name(path.name + ".part")
    try:
        with part.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise UserError(f"cannot write {path} ({error.strerror}); what was written before is kept") from None
