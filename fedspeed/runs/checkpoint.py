"""Checkpoints: write and restore the server's vectors and the client states of a run atomically.

A checkpoint is a manifest `checkpoints/ROUND.json`. It names `server@ROUND` (the server's vectors, float64), how much
of the log of client states and of the files that grow belongs to it, and their digests. These are written first and
flushed to the disk, the manifest last. So whatever kills a run, the newest manifest is complete. Nothing is pickled.
Randomness needs no state: it is a function of seed, round and client. A checkpoint costs as much as changed since the
last one.

`Checkpoints` writes, reads and continues; `Manifest` is the format, `Saved` a checkpoint whose files were checked.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..client.tree_bytes import no_room, read_state, write_state
from ..client.trees import has_leaves, tree_bytes
from ..errors import UserError
from ..record import Record
from ..server.states import ClientStates, DiskStates
from ..utils.files import SEAL, Hash, cut, digest, flush, prefix, read_text, seal_holds, sealed, write
from .directory import CLIENT_METRICS, CONFIG, GROWING, LOG, OWN, ROUNDS, STATE, UPLOADS, RunDir
from .state_log import Change, Entry, StateLog, read_entry, read_log

if TYPE_CHECKING:
    from ..server.simulation import Simulation

CHECKPOINT_FORMAT = 2
KEEP = 2
"""Checkpoints that stay; from the one before the last, `verify` runs the last round again."""
SMALL = 50_000_000
"""Bytes up to which a checkpoint is written every round; larger ones at most every `PAUSE` seconds."""
PAUSE = 60.0
SHARE, PATIENCE = 0.05, 2.0
"""Rounds may wait for checkpoints for `SHARE` of the run's time, or for `PATIENCE` seconds if that is more. After that,
a small checkpoint that is due while another is being written is skipped; a later round writes the next."""
FIX = {
    "config": f"put {CONFIG} back as it was",
    "data": "put the data back as they were",
    "split": f"put the data and the split in {CONFIG} back as they were",
    "frozen weights": "build the model with the frozen weights and buffers it had",
    "kernels": "the compiled kernels compute otherwise since: use the version of the package that wrote it",
    "layout": "filters of a trimmed network were stored in another order: use the version that wrote it",
}
PARTS = ("server", "log", "rounds", "client_metrics", "uploads")
KEYS = {"format", "round", *PARTS[:3], "bound", "waited"}
YOUNGER = {*PARTS[3:], SEAL}
"""The keys of a manifest of format 2: those that all have, and those that were added later."""
BOUND = {"config", "data", "split"}
BOUND_YOUNGER = {"variables", "layout", "kernels", "frozen weights"}
"""The names that a run is bound to: those of every manifest, and those that only some have."""
ERRORS = (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError)
"""The errors that reading a damaged file may raise."""


@dataclass(eq=False)
class Checkpoints:
    """The checkpoints of one run directory, written in the background, at most one at a time."""

    folder: Path  # the run directory
    every: int = 0  # write one every this many rounds; 0 decides by size and time, see `SMALL` and `PAUSE`
    bound: dict[str, str] = field(default_factory=dict)  # digests of config, data, ... that every manifest holds
    keep: int = 0  # write one every this many rounds that is never removed; 0 for none

    def __post_init__(self) -> None:
        self.run = RunDir(self.folder)
        self.manifests = self.run.manifests
        self.waited = 0.0  # seconds that rounds waited in here
        self._log, self._grown = StateLog(self.run), {name: Hash() for name in GROWING}
        self._here = self.folder.stat().st_ino if self.folder.exists() else None
        self._newest: int | None = None
        self._replaced: list[Path] = []  # files that only the checkpoint before the newest needs
        self._kept: set[Path] = set()  # files of checkpoints that are never removed
        self._kept_before = 0  # `keep` of the config with which the run began
        self._new_names = True  # the folder has names that were not flushed yet
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._last = self._begun = time.monotonic()
        self._earlier = 0.0  # the part of `waited` before this process

    # --- write ---

    def maybe_write(self, t: int, server: Any, states: ClientStates | DiskStates) -> None:
        """Write a checkpoint of round t if one is due.

        Server vectors and client states are never changed in place, so the next round may run meanwhile.
        """
        with self._timed():
            size = tree_bytes(server) + states.unsaved_bytes
            busy = self._thread is not None and self._thread.is_alive()
            due = t % self.every == 0 if self.every else size <= SMALL or time.monotonic() - self._last >= PAUSE
            waited = self.waited - self._earlier
            impatient = waited > max(PATIENCE, SHARE * (time.monotonic() - self._begun))
            if self._keeps(t) or (due and not (busy and (size > SMALL or (not self.every and impatient)))):
                self.write(t, server, states)

    def _keeps(self, t: int) -> bool:
        """Return whether the checkpoint of round t is never removed."""
        return any(every and t % every == 0 for every in (self.keep, self._kept_before))

    def write(self, t: int, server: Any, states: ClientStates | DiskStates) -> None:
        """Write a checkpoint of round t now, in the background; do nothing if it is the newest there is."""
        with self._timed():
            self.wait()
            if t == self._newest:
                return
            self._last = time.monotonic()
            files = {name: self.folder / name for name in GROWING}
            # Sizes are taken here: the next round may append while the thread writes.
            ends = {name: file.stat().st_size for name, file in files.items() if file.exists()}
            work = (t, server, states.take_unsaved(), ends, self.waited)
            self._thread = threading.Thread(target=self._write, args=work, daemon=True)
            self._thread.start()

    def wait(self) -> None:
        """Wait until the checkpoint in progress is written; raise the error that stopped it."""
        with self._timed():
            if self._thread is not None:
                self._thread.join()
                self._thread = None
            if self._error is not None:
                error, self._error = self._error, None
                raise error

    @contextmanager
    def _timed(self) -> Iterator[None]:
        begun, before = time.perf_counter(), self.waited
        try:
            yield
        finally:
            self.waited = before + time.perf_counter() - begun

    def _write(self, t: int, server: Any, taken: list[Any], ends: dict[str, int], waited: float) -> None:
        """Write the files of a checkpoint, then its manifest, then remove the files of the one before the last.

        Each file is on the disk before the next step: a manifest that exists names only complete files.
        """
        try:
            self._check_same_folder()
            path = self.run.server_path(t)
            write_state(path, server)
            vectors = Part(self.run.name(path), digest(path, flush=True))
            superseded = self._write_states(t, taken)
            self._flush_grown(ends)
            self._write_manifest(t, vectors, waited)
            self._check_same_folder()
            for path in self._replaced:
                if path not in self._kept:
                    path.unlink(missing_ok=True)
            if self._keeps(t):  # Its log and states stay, too, when later checkpoints supersede them.
                self._kept.update(self._files(self.run.manifest_path(t)))
            self._replaced = superseded if self._newest is None else [*self._needs(self._newest), *superseded]
            self._newest, self._new_names = t, False
        except BaseException as error:  # `wait` raises it, on the thread of the run.
            self._error = error

    def _write_states(self, t: int, taken: list[Any]) -> list[Path]:
        """Append the changed client states to the log, on the disk; return the files that are superseded."""
        run, before = self.run, self._log.path
        changes = [
            # A state with a file of its own is flushed here, before the log names it.
            Change(i, g, state, "" if state is not None else digest(run.state_path(i, g), flush=True))
            for i, g, state in taken
        ]
        self._check_same_folder()
        superseded = self._log.append(changes, t)
        if self._log.path != before or any(change.digest for change in changes):
            flush(run.states)  # New names must be on the disk before the manifest that needs them.
        return superseded

    def _flush_grown(self, ends: dict[str, int]) -> None:
        """Flush the files that grow to the disk, and hash them up to this checkpoint."""
        for name, end in ends.items():
            self._new_names |= not self._grown[name].count
            self._grown[name].take(self.folder / name, end)
            flush(self.folder / name)
        if self._new_names:
            flush(self.folder)  # Names of files that began since the last checkpoint.

    def _write_manifest(self, t: int, vectors: Part, waited: float) -> None:
        """Write the manifest, last: everything that it names is on the disk already."""
        assert self._log.path is not None
        log = Part(self.run.name(self._log.path), self._log.hash.digest(), self._log.hash.count)
        rounds, *others = (Part(name, found.digest(), found.count) for name, found in self._grown.items())
        some = (part if part.length else None for part in others)
        manifest = Manifest(t, vectors, {}, log, rounds, self.bound, waited, *some)
        self._check_same_folder()
        path = self.run.manifest_path(t)
        try:
            write(path, manifest.text(), durable=True)
        except OSError as error:
            raise no_room(path, error) from None
        flush(self.run.checkpoints)  # The manifest's name is on the disk before an older checkpoint is removed.

    def _check_same_folder(self) -> None:
        """Raise if another folder has taken the place of the run's, so that nothing is written into that one."""
        if self._here is not None and (not self.folder.exists() or self.folder.stat().st_ino != self._here):
            raise UserError(f"{self.folder} was moved during the run; resume it where it is now")

    def _needs(self, t: int) -> list[Path]:
        """Return the files that only the checkpoint of round t needs.

        The manifest is removed first, so that a kill in between leaves no manifest with missing files.
        """
        return [self.run.manifest_path(t), self.run.server_path(t)]

    # --- read ---

    def latest(self) -> Saved | None:
        """Return the newest checkpoint, every file checked; None if there is none. The error names a damaged file."""
        manifests = self.manifests()
        return self.read(manifests[0]) if manifests else None

    def read(self, path: Path) -> Saved:
        """Return a checkpoint whose files all have the digests of its manifest; raise otherwise."""
        older = [p.stem for p in self.manifests() if int(p.stem) < int(path.stem)]
        offer = f"; the one of round {older[0]} is older: delete {path.name} to resume from it" if older else ""
        try:
            manifest = Manifest.read(path)
            self._hashed(path, manifest.server, offer)
            hashes = tuple(self._hashed(path, part, offer) for part in (manifest.log, *manifest.grown))
            entries = manifest.entries(self.run)
        except UserError:
            raise
        except ERRORS as error:
            raise UserError(f"checkpoint {path} is damaged ({type(error).__name__}: {error}){offer}") from None
        for client, entry in entries.items():
            if entry.digest:
                file = self.run.state_path(client, entry.generation)
                self._hashed(path, Part(self.run.name(file), entry.digest), offer)
        return Saved(manifest, self.run, entries, hashes)

    def _hashed(self, manifest: Path, part: Part | None, offer: str) -> Hash:
        """Return the hash of a file, or of its first bytes; raise unless it is the one in the manifest."""
        if part is None:
            return Hash()
        file, whole = self.folder / part.name, part.length is None
        link = file.is_symlink()  # It may lead outside of the run.
        seen = "a link" if link else "no such file"
        if file.is_file() and not link:
            found = prefix(file, file.stat().st_size if part.length is None else part.length)
            if found.digest() == part.digest and part.length in (None, found.count):
                return found
            seen = f"{'' if whole else f'{found.count} bytes of '}digest {found.digest()}"
        expected = f"{'' if whole else f'{part.length} bytes of '}digest {part.digest}"
        raise UserError(f"checkpoint {manifest}: {part.name} is damaged (expected {expected}, found {seen}){offer}")

    def check(self, saved: Saved, bound: dict[str, str]) -> None:
        """Raise if a checkpoint is of another config, other data, ... than these; bind all later ones to these.

        Environment variables that may change bits are in a manifest, too, but a difference there is no error.
        """
        self.bound = bound
        for name, then in ({"layout": "of old"} | saved.manifest.bound).items():
            if name != "variables" and bound.get(name, then) != then:
                raise UserError(
                    f"checkpoint of round {saved.t} in {self.folder} is of another {name}: expected {name} {then}, "
                    f"found {bound[name]}; {FIX.get(name, 'put it back as it was')}, or start again with another --out"
                )

    # --- continue ---

    def restore(self, saved: Saved, simulation: Simulation, records: list[Record]) -> None:
        """Restore server and client states; validate everything before changing anything."""
        clients, rounds = simulation.data.clients, simulation.plan.rounds
        if saved.t > rounds or any(i >= clients for i in saved.entries):
            raise UserError(
                f"checkpoint of round {saved.t} in {self.folder} does not fit its {CONFIG} ({rounds} rounds, "
                f"{clients} clients); it was changed, put it back"
            )
        server = read_state(saved.server, simulation.server)
        for wrong in stale_states(saved, simulation, records):
            raise UserError(f"{wrong}; {self.folder} was changed, put it back")
        _restore(saved, simulation, server, records)
        simulation.stopping.restart_from(records[: saved.t])

    def rewind_to(self, saved: Saved, states: ClientStates | DiskStates) -> None:
        """Continue writing from a checkpoint: remove the files that neither it nor the one before it needs, and cut
        the log and the files that grow to their length at the checkpoint."""
        stored = self.run.config().get("keep_every")
        self._kept_before = stored if type(stored) is int and stored > 0 else 0
        needed, replaced = set(self._named(saved.manifest, saved.entries)), list[Path]()
        for path in self.manifests()[1:KEEP]:
            replaced = [p for p in self._files(path) if p not in needed]
        for path in self.manifests()[KEEP:]:
            if not self._keeps(int(path.stem)):
                path.unlink(missing_ok=True)
        self._kept = {file for path in self.manifests() if self._keeps(int(path.stem)) for file in self._files(path)}
        keep = {*needed, *replaced, *self._kept}
        if isinstance(states, DiskStates):
            keep |= {states.path(i, g) for i, g in states.generations.items()}
        for path in [*self.run.checkpoints.glob("*@*"), *self.run.states.glob("*@*")]:
            if OWN.fullmatch(path.name) and path not in keep:
                path.unlink(missing_ok=True)
        log, *grown = saved.hashes  # They continue from the checkpoint.
        self._grown = dict(zip(GROWING, grown, strict=True))
        self._log = StateLog(self.run, saved.log, log, dict(saved.entries))
        if saved.log is not None:
            cut(saved.log, log.count)
        for name, part in zip(GROWING, saved.manifest.grown, strict=True):
            if part is not None:
                cut(self.folder / name, self._grown[name].count)
            elif name != ROUNDS:
                (self.folder / name).unlink(missing_ok=True)
        self._newest = saved.t
        self._replaced = replaced
        self._earlier = self.waited = saved.manifest.waited

    def _files(self, path: Path) -> list[Path]:
        """Return the files that the checkpoint of a manifest needs; none if it cannot be read."""
        with suppress(*ERRORS):
            manifest = Manifest.read(path)
            return self._named(manifest, manifest.entries(self.run))
        return []

    def _named(self, manifest: Manifest, entries: dict[int, Any]) -> list[Path]:
        """Return the files that a checkpoint needs; the manifest first."""
        log = [self.folder / manifest.log.name] if manifest.log else []
        files = [self.run.state_path(i, entry.generation) for i, entry in entries.items() if entry.digest]
        return [*self._needs(manifest.t), *log, *files]


def nearest(run: RunDir, t: int) -> Saved | None:
    """Return the newest checkpoint of at most t rounds, its files checked; None if there is none."""
    found = [path for path in run.manifests() if int(path.stem) <= t]
    return Checkpoints(run.path).read(found[0]) if found else None


def server_of(run: RunDir, t: int) -> Path:
    """Return the file of the server's vectors after t rounds, checked; client states are not read."""
    path = run.manifest_path(t)
    try:
        part = Manifest.read(path).server
        Checkpoints(run.path)._hashed(path, part, "")
    except UserError:
        raise
    except ERRORS as error:
        raise UserError(f"checkpoint {path} is damaged ({type(error).__name__}: {error}); name another round") from None
    return run.path / part.name


def load_into(run: RunDir, saved: Saved, simulation: Simulation, records: list[Record]) -> None:
    """Restore a checkpoint into a simulation that has a folder of its own; the run directory is only read.

    States that have files are linked into the simulation's folder, and so read from the run's.
    """
    if isinstance(simulation.states, DiskStates):
        simulation.states.folder.mkdir(parents=True, exist_ok=True)
        for i, entry in saved.entries.items():
            if entry.digest:
                where = run.state_path(i, entry.generation)
                os.symlink(where.resolve(), simulation.states.path(i, entry.generation))
    _restore(saved, simulation, read_state(saved.server, simulation.server), records)


def _restore(saved: Saved, simulation: Simulation, server: Any, records: list[Record]) -> None:
    simulation.states.restore(saved, simulation.work.hooks.init_client(simulation.x0))
    elapsed = records[saved.t - 1].virtual_seconds if 0 < saved.t <= len(records) else None
    simulation.restore(saved.t, server, elapsed)
    if simulation.cohort.history is not None:
        simulation.cohort.history.restart(records[: saved.t])


def stale_states(saved: Saved, simulation: Simulation, records: list[Record]) -> Iterator[str]:
    """Yield a line per client whose state is older or newer than the last turn of it that was counted."""
    turns: dict[int, int] = {}
    if has_leaves(simulation.work.hooks.init_client(simulation.x0)):
        turns = {i: r.round - 1 for r in records[: saved.t] for i in r.cohort if i not in r.dropped}
    kept = saved.generations
    for client in sorted(turns.keys() | kept.keys()) if turns != kept else ():
        then, now = (f"of round {found[client] + 1}" if client in found else "none" for found in (turns, kept))
        if then != now:
            yield f"round {saved.t}: by {ROUNDS} the state of client {client} is {then}, in the checkpoint {now}"


@dataclass(frozen=True)
class Saved:
    """A checkpoint whose files were all found to have their digests."""

    manifest: Manifest
    run: RunDir
    entries: dict[int, Entry]  # client -> where its state is
    hashes: tuple[Hash, ...]  # of the log and of the files that grow, up to the checkpoint; writing continues them

    @property
    def t(self) -> int:
        """The number of rounds done."""
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
        """Client -> the round its state is of."""
        return {client: entry.generation for client, entry in self.entries.items()}

    def state(self, client: int, like: Any) -> Any:
        """Return a client's state."""
        return read_entry(self.run, self.log, client, self.entries[client], like)


@dataclass(frozen=True)
class Part:
    """A file that a checkpoint needs: its first bytes (None: all of it) have this digest."""

    name: str
    digest: str
    length: int | None = None


@dataclass(frozen=True)
class Manifest:
    """A manifest as it was read; the files that it names were not looked at."""

    t: int  # rounds done
    server: Part
    files: dict[int, Entry] = field(default_factory=dict)  # in format 1, the file of each client's state
    log: Part | None = None  # the log of client states; None in format 1
    rounds: Part | None = None  # the lines of the rounds done; None in format 1
    bound: dict[str, str] = field(default_factory=dict)  # digests of the run's config, its data, ...
    waited: float = 0.0  # seconds that rounds had waited for checkpoints
    client_metrics: Part | None = None  # the scores of the rounds done, if any were measured
    uploads: Part | None = None  # the digests of the clients' uploads in the rounds done; older runs have none

    @property
    def grown(self) -> tuple[Part | None, ...]:
        """The part of each file that grows, in the order of `GROWING`."""
        return self.rounds, self.client_metrics, self.uploads

    @classmethod
    def read(cls, path: Path) -> Manifest:
        """Read a file `checkpoints/ROUND.json`; raise one of `ERRORS` if it is not a manifest."""
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
        """Return the text of the file."""
        parts = {name: _plain(part) for name in PARTS if (part := getattr(self, name)) is not None}
        head = {"format": CHECKPOINT_FORMAT, "round": self.t}
        return sealed({**head, **parts, "bound": self.bound, "waited": self.waited})

    def entries(self, run: RunDir) -> dict[int, Entry]:
        """Return where each client's state is."""
        entries = self.files
        if self.log is not None:
            entries = read_log(run.path / self.log.name, self.log.length or 0)
        for client, entry in entries.items():
            if entry.generation >= self.t:
                raise ValueError(f"the state of client {client} is of round {entry.generation + 1}")
        return entries


def _server(t: int) -> str:
    """Return the name of the server's file in a manifest."""
    run = RunDir("")
    return run.name(run.server_path(t))


def _require_keys(what: str, plain: dict[str, Any], keys: set[str], younger: set[str] = frozenset()) -> None:  # type: ignore[assignment]
    """Raise for a key that is unknown or missing: a renamed key would otherwise be read as a missing one."""
    missing, unknown = sorted(keys - plain.keys()), sorted(plain.keys() - keys - younger)
    if missing or unknown:
        raise ValueError(f"keys of {what}: missing {missing}, unknown {unknown}")


def _part(plain: dict[str, Any]) -> Part:
    _require_keys("a file's entry", plain, {"file", "digest"}, {"bytes"})
    name, digest, length = plain["file"], plain["digest"], plain.get("bytes")
    if not (isinstance(name, str) and isinstance(digest, str)) or (length is not None and type(length) is not int):
        raise TypeError(f"expected file, digest and bytes, found {plain!r}")
    return Part(name, digest, length)


def _plain(part: Part) -> dict[str, Any]:
    length = {} if part.length is None else {"bytes": part.length}
    return {"file": part.name, **length, "digest": part.digest}


def _format_1(files: dict[str, str], t: int) -> tuple[Part, dict[int, Entry]]:
    """Return the server's file, and client -> where its state is; raise for any other name."""
    entries: dict[int, Entry] = {}
    server = Part(_server(t), files[_server(t)])
    for name, expected in files.items():
        match = STATE.fullmatch(name)
        if match and int(match[1]) not in entries and isinstance(expected, str) and expected:
            entries[int(match[1])] = Entry(int(match[2]), expected)
        elif name != server.name:
            raise ValueError(f"unexpected file {name!r}")
    return server, entries
