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
import re
import threading
import time
from contextlib import suppress
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
NUMBER = re.compile("0|[1-9][0-9]{0,17}")
STATE = re.compile(f"({NUMBER.pattern})@({NUMBER.pattern})")
"""The name of a state file; nothing else in `states` is read or removed."""


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
            for place in ("rounds.jsonl", "states", *(() if self._digests else (".",))):  # what the manifest relies on
                flush(self.folder / place)
            manifest = {"format": FORMAT, "round": t, "files": digests}
            write_durably(self.folder / "checkpoints" / f"{t}.json", json.dumps(manifest))
            flush(self.folder / "checkpoints")  # the names are there before an older checkpoint goes
            self._digests = digests
            self._prune()
        except BaseException as error:  # told in `wait`, on the run's own thread
            self._error = error

    def manifests(self) -> list[Path]:
        """The manifests there are, newest first."""
        found = [p for p in (self.folder / "checkpoints").glob("*.json") if NUMBER.fullmatch(p.stem)]
        return sorted(found, key=lambda p: -int(p.stem))

    def _prune(self) -> None:
        """Drop checkpoints beyond the last ones, and files that no kept one names."""
        kept = self.manifests()[:KEEP]
        needed, newest = self._named(kept), int(kept[0].stem)
        for path in self.manifests()[KEEP:]:
            path.unlink(missing_ok=True)
        for path in (self.folder / "checkpoints").glob("server@*"):
            if f"checkpoints/{path.name}" not in needed:
                path.unlink(missing_ok=True)
        for path in self.states.glob("*@*"):
            match = STATE.fullmatch(path.name.removesuffix(".part"))
            if match and f"states/{path.name}" not in needed and int(match[2]) < newest:
                path.unlink(missing_ok=True)

    def _named(self, manifests: list[Path]) -> set[str]:
        """The files that some manifests name; one that cannot be read names none."""
        named: set[str] = set()
        for path in manifests:
            with suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
                named |= set(json.loads(path.read_text("utf-8"))["files"])
        return named

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
            if manifest["format"] != FORMAT or type(t) is not int or t != int(path.stem):
                raise ValueError(f"format {manifest['format']!r}, round {t!r}")
            generations = _generations(files, t)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise UserError(f"checkpoint {path} is damaged ({type(error).__name__}: {error}){offer}") from None
        for name, expected in files.items():
            found = digest(self.folder / name) if (self.folder / name).is_file() else "no such file"
            if found != expected:
                raise UserError(
                    f"checkpoint {path}: {name} is damaged (expected digest {expected}, found {found}){offer}"
                )
        self._digests = dict(files)
        return Saved(t, self.folder / "checkpoints" / f"server@{t}", generations)

    def restore(self, saved: Saved, simulation: Any) -> None:
        """Put server and client states back; what later rounds had written is removed."""
        plan, clients = simulation.plan, simulation.data.clients
        if saved.t > plan.rounds or any(i >= clients for i in saved.generations):
            raise UserError(
                f"checkpoint of round {saved.t} in {self.folder} does not fit its config.toml ({plan.rounds} rounds, "
                f"{clients} clients); it was changed, put it back"
            )
        like = simulation.method.init_client(simulation.x0)
        simulation.restore(saved.t, read_state(saved.server, simulation.server))
        simulation.states.restore(self.states, like, saved.generations)
        needed = self._named(self.manifests())
        for path in self.states.glob("*@*"):
            if STATE.fullmatch(path.name.removesuffix(".part")) and f"states/{path.name}" not in needed:
                path.unlink(missing_ok=True)


def _generations(files: dict[str, str], t: int) -> dict[int, int]:
    """client -> generation from the names of a manifest; any other name is refused, so no path can lead elsewhere."""
    generations = {}
    for name in files:
        folder, _, rest = name.partition("/")
        match = STATE.fullmatch(rest) if folder == "states" else None
        if match and int(match[2]) < t and int(match[1]) not in generations:
            generations[int(match[1])] = int(match[2])
        elif name != f"checkpoints/server@{t}":
            raise ValueError(f"unexpected file {name!r}")
    if len(files) == len(generations):
        raise ValueError(f"expected a file checkpoints/server@{t}, found none")
    return generations


def digest(path: Path, flush: bool = False) -> str:
    """blake2b of a file's bytes; `flush` has them on the disk first."""
    with path.open("rb") as file:
        if flush:
            os.fsync(file.fileno())
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def flush(path: Path) -> None:
    """Have a file's bytes, or a folder's names, on the disk; where there is none, or it cannot be flushed, nothing."""
    with suppress(FileNotFoundError, PermissionError):  # Windows does not open folders
        number = os.open(path, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)


def write_durably(path: Path, text: str) -> None:
    """Write a small file whole or not at all, and have it on the disk before it has its name."""
    part = path.with_name(path.name + ".part")
    try:
        part.unlink(missing_ok=True)  # it may be a link
        with part.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise UserError(
            f"cannot write {path} ({error.strerror}); what was written before is kept. Free some space, then "
            f"`fedspeed resume` the run"
        ) from None
