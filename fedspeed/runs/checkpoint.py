"""What makes a run survive: the server's vectors and the clients' states on disk, whole or not at all.

A checkpoint is a manifest `checkpoints/ROUND.json`. It names `server@ROUND` (the server's vectors, float64), how much
of the log of client states and of `rounds.jsonl` belongs to it, and their digests. These are written first and flushed
to the disk, the manifest last. So whatever kills a run, the newest manifest is complete. No pickle anywhere. Randomness
needs no state: it is a function of seed, round and client. A checkpoint costs what changed since the last one.
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
from ..client.trees import tree_bytes
from ..errors import UserError
from ..record import TIMES, Record, older
from ..server.states import ClientStates, DiskStates
from ..utils.files import SEAL, Hash, cut, digest, flush, prefix, read_text, seal_holds, sealed, write
from .diagnosis import UNTRAINED
from .directory import CLIENT_METRICS, CONFIG, GROWING, LOG, OWN, ROUNDS, STATE, UPLOADS, RunDir
from .state_log import Change, Entry, StateLog, read_entry, read_log
from .verify import counted

if TYPE_CHECKING:
    from ..server.simulation import Simulation


__all__ = ["CHECKPOINT_FORMAT", "Checkpoints", "Saved"]


KEEP = 2


"""Checkpoints that stay; the one before the last is what `verify` runs the last round from."""


SMALL = 50_000_000


"""Bytes up to which a checkpoint is written every round; larger ones at most every `PAUSE` seconds."""


PAUSE = 60.0


SHARE, PATIENCE = 0.05, 2.0


"""Rounds that waited longer than this share of the time, and than this many seconds, do not wait for a small checkpoint
that is still being written: the next one is written when it is done."""


CURE = {
    "config": f"put {CONFIG} back as it was",
    "data": "put the data back as they were",
    "split": f"put the data and the split in {CONFIG} back as they were",
    "frozen weights": "build the model with the frozen weights and buffers it had",
    "layout": "filters of a trimmed network were stored in another order: use the version that wrote it",
}


class Checkpoints:
    """The checkpoints of one run directory, written in the background, one in flight.

    Args:
        folder: the run directory.
        every: write a checkpoint every this many rounds; 0 decides by size and time, see `SMALL` and `PAUSE`.
        bound: digests of what the run is of (config, data, ...); they stand in every manifest.
    """

    def __init__(self, folder: Path, every: int = 0, bound: dict[str, str] | None = None) -> None:
        self.folder = folder
        self.every = every
        self.bound = bound or {}
        self.run = RunDir(folder)
        self.waited = 0.0  # seconds that rounds waited in here
        self._log, self._grown = StateLog(self.run), {name: Hash() for name in GROWING}
        self._here = folder.stat().st_ino if folder.exists() else None
        self._newest: int | None = None
        self._replaced: list[Path] = []  # what only the checkpoint before the newest needs
        self._new_names = True
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._last = self._begun = time.monotonic()
        self._earlier = 0.0  # of `waited`, before this process

    def offer(self, t: int, server: Any, states: ClientStates | DiskStates) -> None:
        """Write a checkpoint of round t if one is due. The vectors given are never changed in place, so the next round
        may run meanwhile."""
        with self._timed():
            size = tree_bytes(server) + states.unsaved_bytes
            busy = self._thread is not None and self._thread.is_alive()
            due = t % self.every == 0 if self.every else size <= SMALL or time.monotonic() - self._last >= PAUSE
            if due and not (busy and (size > SMALL or (not self.every and self._impatient()))):
                self.write(t, server, states)

    def _impatient(self) -> bool:
        return self.waited - self._earlier > max(PATIENCE, SHARE * (time.monotonic() - self._begun))

    def write(self, t: int, server: Any, states: ClientStates | DiskStates) -> None:
        """Write a checkpoint of round t now, in the background; nothing if it is the newest there is."""
        with self._timed():
            self.wait()
            if t == self._newest:
                return
            self._last = time.monotonic()
            files = {name: self.folder / name for name in GROWING}
            ends = {name: file.stat().st_size for name, file in files.items() if file.exists()}
            work = (t, server, states.take_unsaved(), ends, self.waited)
            self._thread = threading.Thread(target=self._write, args=work, daemon=True)
            self._thread.start()

    def wait(self) -> None:
        """Let the checkpoint in flight finish; what stopped it is raised here."""
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
        try:
            self._stay()
            run, path = self.run, self.run.server_path(t)
            write_state(path, server)
            vectors = Part(run.name(path), digest(path, flush=True))
            changes = [
                Change(i, g, state, "" if state is not None else digest(run.state_path(i, g), flush=True))
                for i, g, state in taken
            ]
            before = self._log.path
            self._stay()
            superseded = self._log.append(changes, t)
            if self._log.path != before or any(change.digest for change in changes):
                flush(run.states)
            for name, end in ends.items():
                self._new_names |= not self._grown[name].count
                self._grown[name].take(self.folder / name, end)
                flush(self.folder / name)
            if self._new_names:
                flush(self.folder)
            assert self._log.path is not None
            log = Part(run.name(self._log.path), self._log.hash.digest(), self._log.hash.count)
            rounds, *others = (Part(name, found.digest(), found.count) for name, found in self._grown.items())
            some = (part if part.length else None for part in others)
            manifest = Manifest(t, vectors, {}, log, rounds, self.bound, waited, *some)
            self._stay()
            try:
                write(run.manifest_path(t), manifest.text(), durable=True)
            except OSError as error:
                raise no_room(run.manifest_path(t), error) from None
            flush(run.checkpoints)  # the names are there before an older checkpoint goes
            self._stay()
            for path in self._replaced:
                path.unlink(missing_ok=True)
            self._replaced = superseded if self._newest is None else [*self._needs(self._newest), *superseded]
            self._newest, self._new_names = t, False
        except BaseException as error:  # reported by `wait`, on the run's own thread
            self._error = error

    def _stay(self) -> None:
        """Raise if another folder has the place of the run's by now, so that nothing is written into that."""
        if self._here is not None and (not self.folder.exists() or self.folder.stat().st_ino != self._here):
            raise UserError(f"{self.folder} was moved during the run; resume it where it is now")

    def _needs(self, t: int) -> list[Path]:
        """The files that only the checkpoint of round t needs; the manifest goes first."""
        return [self.run.manifest_path(t), self.run.server_path(t)]

    def manifests(self) -> list[Path]:
        """The manifests there are, newest first."""
        return self.run.manifests()

    def latest(self) -> Saved | None:
        """The newest checkpoint, every file checked; None if there is none. A damaged one is named in the error."""
        manifests = self.manifests()
        return self.read(manifests[0]) if manifests else None

    def read(self, path: Path) -> Saved:
        """A checkpoint whose files all have the digests its manifest says."""
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
        """The hash of a file, or of its first bytes, that is as a manifest says."""
        if part is None:
            return Hash()
        file = self.folder / part.name
        whole, link = part.length is None, file.is_symlink()  # nothing of a run may lead elsewhere
        found = Hash()
        if file.is_file() and not link:
            found = prefix(file, file.stat().st_size if part.length is None else part.length)
            if found.digest() == part.digest and part.length in (None, found.count):
                return found
        expected, seen = (f"{'' if whole else f'{n} bytes of '}digest {d}" for n, d in (
            (part.length, part.digest), (found.count, found.digest())))  # fmt: skip
        if link or not file.is_file():
            seen = "a link" if link else "no such file"
        raise UserError(f"checkpoint {manifest}: {part.name} is damaged (expected {expected}, found {seen}){offer}")

    def check(self, saved: Saved, bound: dict[str, str]) -> None:
        """Raise if a checkpoint is of another config, other data, ... than these; all later ones are bound to them.

        Environment variables that change bits are noted there, too, but bind nobody: see `other_variables`.
        """
        self.bound = bound
        for name, then in ({"layout": "of old"} | saved.manifest.bound).items():
            if name != "variables" and bound.get(name, then) != then:
                raise UserError(
                    f"checkpoint of round {saved.t} in {self.folder} is of another {name}: expected {name} {then}, "
                    f"found {bound[name]}; {CURE.get(name, 'put it back as it was')}, or start again with another --out"
                )

    def other_variables(self, saved: Saved) -> str:
        """How variables that change bits were when a checkpoint was written, and are now; "" if the same."""
        then, now = (bound.get("variables", "") for bound in (saved.manifest.bound, self.bound))
        return f"{then} then, {now} now" if then and then != now else ""

    def before(self, saved: Saved) -> Saved | None:
        """The checkpoint before one, checked as well; None if there is none."""
        older = [path for path in self.manifests() if int(path.stem) < saved.t]
        found = self.read(older[0]) if older else None
        if found is not None:
            self.check(found, self.bound)
        return found

    def drop(self, saved: Saved) -> None:
        """Stand before a checkpoint; what only it needs is removed when the run continues."""
        self.run.manifest_path(saved.t).unlink(missing_ok=True)

    def restore(self, saved: Saved, simulation: Simulation, records: list[Record]) -> None:
        """Put server and client states back, if they fit; nothing that there is is changed."""
        clients, rounds = simulation.data.clients, simulation.plan.rounds
        if saved.t > rounds or any(i >= clients for i in saved.entries):
            raise UserError(
                f"checkpoint of round {saved.t} in {self.folder} does not fit its {CONFIG} ({rounds} rounds, "
                f"{clients} clients); it was changed, put it back"
            )
        server = read_state(saved.server, simulation.server)
        for wrong in counted(saved, simulation, records):
            raise UserError(f"{wrong}; {self.folder} was changed, put it back")
        simulation.states.restore(saved, simulation.work.hooks.init_client(simulation.x0))
        simulation.restore(saved.t, server, records[saved.t - 1].virtual_seconds if saved.t else None)
        simulation.stopping.replay(records[: saved.t])

    def go_on(self, saved: Saved, states: ClientStates | DiskStates) -> None:
        """Stand at a checkpoint: remove what neither it nor the one before it names, and what follows it in the log and
        in the files that grow."""
        needed, replaced = set(self._named(saved.manifest, saved.entries)), list[Path]()
        for path in self.manifests()[1:KEEP]:
            with suppress(*ERRORS):
                manifest = Manifest.read(path)
                replaced = [p for p in self._named(manifest, manifest.entries(self.run)) if p not in needed]
        for path in self.manifests()[KEEP:]:
            path.unlink(missing_ok=True)
        keep = {*needed, *replaced}
        if isinstance(states, DiskStates):
            keep |= {states.path(i, g) for i, g in states.generations.items()}
        for path in [*self.run.checkpoints.glob("*@*"), *self.run.states.glob("*@*")]:
            if OWN.fullmatch(path.name) and path not in keep:
                path.unlink(missing_ok=True)
        log, *grown = saved.hashes
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
        self.waited = saved.manifest.waited
        self._earlier = self.waited

    def _named(self, manifest: Manifest, entries: dict[int, Any]) -> list[Path]:
        """The files a checkpoint needs; the manifest first."""
        log = [self.folder / manifest.log.name] if manifest.log else []
        files = [self.run.state_path(i, entry.generation) for i, entry in entries.items() if entry.digest]
        return [*self._needs(manifest.t), *log, *files]


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


def nearest(run: RunDir, t: int) -> Saved | None:
    """The newest checkpoint of no more than t rounds, its files checked; None where there is none."""

    checkpoints = Checkpoints(run.path)
    found = [path for path in checkpoints.manifests() if int(path.stem) <= t]
    return checkpoints.read(found[0]) if found else None


def stand(run: RunDir, saved: Saved, simulation: Simulation, records: list[Record]) -> None:
    """Put a simulation of a run where its checkpoint stands. States that have files are read where they are, and
    written into the simulation's own folder."""
    if isinstance(simulation.states, DiskStates):
        simulation.states.folder.mkdir(parents=True, exist_ok=True)
        for i, entry in saved.entries.items():
            if entry.digest:
                where = run.state_path(i, entry.generation)
                os.symlink(where.resolve(), simulation.states.path(i, entry.generation))
    simulation.states.restore(saved, simulation.work.hooks.init_client(simulation.x0))
    elapsed = records[saved.t - 1].virtual_seconds if 0 < saved.t <= len(records) else None
    simulation.restore(saved.t, read_state(saved.server, simulation.server), elapsed)


def unlike(again: Record, before: Record | None) -> list[str]:
    """How a round that was run again differs from its record."""
    if before is None:
        return [f"round {again.round} is missing in {ROUNDS}"]
    new = (again if "x_norm" in before.metrics else older(again)).to_dict()
    old = before.to_dict()
    if any(sign.startswith(UNTRAINED[1]) for sign in before.signs):  # of a version that judged weights by another rule
        for plain in (new, old):
            plain["signs"] = {
                sign: value for sign, value in plain.get("signs", {}).items() if not sign.startswith(UNTRAINED)
            }
    return [
        f"round {again.round}: {key} is {old.get(key)!r} in {ROUNDS}, run again it is {new.get(key)!r}"
        for key in new | old
        if key not in TIMES and old.get(key) != new.get(key) and (key != "signs" or key in old)  # older runs have none
    ]
