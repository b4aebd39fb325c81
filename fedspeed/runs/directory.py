"""The run directory: the names of its files, and how config tables, rounds, scores, summary and split are kept there.

A run directory may come from another user, so everything in it is checked when read, and nothing in it is executed.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import tomli_w

from ..errors import UserError
from ..record import Record, is_number
from ..utils.files import (
    LARGEST,
    SEAL,
    locked,
    read_bytes,
    read_json,
    read_text,
    read_toml,
    refuse_depth,
    sealed,
    tensors_digest,
    write,
)
from ..utils.notebook import card
from ..utils.own_code import Code, read_copy

if TYPE_CHECKING:
    from ..data.federated import Federated
    from ..server.client_metrics import ClientMetrics

CONFIG = "config.toml"
ROUNDS = "rounds.jsonl"
SUMMARY = "summary.json"
MODEL = "model.safetensors"
CLIENT_METRICS = "client_metrics.bin"
UPLOADS = "uploads.bin"
GROWING = (ROUNDS, CLIENT_METRICS, UPLOADS)
"""The files that grow during a run; a checkpoint says how much of each belongs to it."""
SPLIT = "split.json"
FORK = "fork.json"
SIGNATURE = "signature.json"
FILES = (CONFIG, ROUNDS, SUMMARY, MODEL, CLIENT_METRICS, UPLOADS, SPLIT, FORK, SIGNATURE)
INSPECTION = "inspect.json"
NOISE = "noise.json"
FOLDERS = ("states", "checkpoints")
CODE = "code"
"""The folder of copies of the files of method, model and data: `mine-1a2b3c4d.py` with the digest of `mine.py`, or
`mine-1a2b3c4d/mine.py` and what it imports, with the digest of them all."""
NUMBER = "(?:0|[1-9][0-9]{0,17})"
STATE = re.compile(f"states/({NUMBER})@({NUMBER})")
"""The name of a state file: a client, and the round its state is of."""
LOG = re.compile(f"states/log@{NUMBER}")
"""The name of a log of client states: the round whose checkpoint began it."""
OWN = re.compile(rf"((server|log|{NUMBER})@{NUMBER}|{NUMBER}\.json)(\.part)?")
"""The names that a run writes into its folders; nothing else in them is read or removed."""
SHOWN = ("status", "rounds", "last_accuracy", "best_accuracy", "mean_last5_accuracy", "last_test_loss",
         "last_train_loss", "bytes_down", "bytes_up", "grad_evals", "seconds")  # fmt: skip
"""The keys of a summary that a notebook shows."""
REPORTED = ("last_accuracy", "best_accuracy", "mean_last5_accuracy", "rounds", "bytes_down", "bytes_up", "grad_evals",
            "seconds", "eval_seconds", "data_fingerprint", "split_fingerprint")  # fmt: skip
"""The keys that every complete summary has."""
CELLS = 1_000_000
"""The number of counts (clients times classes) beyond which `split.json` has only sizes."""


def line(record: Record) -> str:
    """Return the line of a record in `rounds.jsonl`."""
    return json.dumps(record.to_dict()) + "\n"


class RunDir:
    """A run directory, which need not exist yet: the paths of its files, and their content, read on demand.

    Example:
        >>> run = RunDir("runs/a")
        >>> run.name(run.state_path(3, 7)), run.config_file.exists(), run.raw_summary(), run.records()
        ('states/3@7', False, None, [])
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.config_file = self.path / CONFIG
        self.rounds_file = self.path / ROUNDS
        self.summary_file = self.path / SUMMARY
        self.model_file = self.path / MODEL
        self.client_metrics_file = self.path / CLIENT_METRICS
        self.uploads_file = self.path / UPLOADS
        self.split_file = self.path / SPLIT
        self.fork_file = self.path / FORK
        self.signature_file = self.path / SIGNATURE
        self.inspection_file = self.path / INSPECTION
        self.noise_file = self.path / NOISE
        self.states, self.checkpoints = (self.path / name for name in FOLDERS)
        self.code = self.path / CODE

    def __repr__(self) -> str:
        summary = self.raw_summary() or {}
        begun = "not finished" if self.config_file.exists() else "no run yet"
        parts = [next(iter(str(summary.get("status", begun)).splitlines()), "")]
        parts += [f"{summary['rounds']} rounds"] if "rounds" in summary else []
        accuracy = summary.get("last_accuracy")
        parts += [f"accuracy {accuracy:.2%}"] if is_number(accuracy) else []
        return f"<RunDir {self.path}: {', '.join(parts)}>"

    def _repr_html_(self) -> str:
        summary, records = self.raw_summary() or {}, self.records()
        facts = {key: summary[key] for key in SHOWN if key in summary} or {"rounds so far": len(records)}
        return card(str(self.path), facts, records)

    def name(self, path: Path) -> str:
        """Return the name of a file relative to the directory."""
        return path.relative_to(self.path).as_posix()

    def state_path(self, client: int, t: int) -> Path:
        """Return the path of a client's state as of round t, if it has a file of its own."""
        from ..client.tree_bytes import state_name  # late: it imports torch

        return self.states / state_name(client, t)

    def log_path(self, t: int) -> Path:
        """Return the path of the log of client states that the checkpoint of round t began."""
        return self.states / f"log@{t}"

    def server_path(self, t: int) -> Path:
        """Return the path of the server's vectors after t rounds."""
        return self.checkpoints / f"server@{t}"

    def manifest_path(self, t: int) -> Path:
        """Return the path of the manifest of the checkpoint after t rounds."""
        return self.checkpoints / f"{t}.json"

    def manifests(self) -> list[Path]:
        """Return the manifests that exist, newest first."""
        found = [path for path in self.checkpoints.glob("*.json") if re.fullmatch(NUMBER, path.stem)]
        return sorted(found, key=lambda path: -int(path.stem))

    def existing(self) -> list[str]:
        """Return the names of the files of a run that exist."""
        return [name for name in FILES if (self.path / name).exists()]

    def config(self) -> dict[str, Any]:
        """Return the tables of `config.toml` unchecked; `config_file.read_config` checks them."""
        if not self.config_file.is_file():
            next_step = (
                f"it holds several: name one of them, or `fedspeed compare {self.path}` for their table"
                if runs_in(self.path)
                else f"start one with `fedspeed run --out {self.path}`"
            )
            raise UserError(f"{self.path} holds no run: expected a {CONFIG}; {next_step}")
        return read_toml(self.config_file)

    def write_tables(self, tables: dict[str, Any], name: str = CONFIG) -> None:
        """Write tables to `config.toml`, or another name; they are on the disk when this returns."""
        text = tomli_w.dumps(tables)
        if (size := len(text.encode())) > LARGEST:  # It could not be read back.
            raise UserError(
                f"{name}: expected at most {LARGEST:,} bytes, found {size:,}; shorten its longest setting, lr_schedule?"
            )
        write(self.path / name, text, durable=True)

    def lines(self, whole: bool = False) -> Iterator[dict[str, Any]]:
        """Yield the rounds in `rounds.jsonl` as plain values, up to a line that was cut off.

        Args:
            whole: raise for a line that was cut off, and for a missing file.
        """
        if not whole and not self.rounds_file.exists():
            return
        try:
            for text in read_bytes(self.rounds_file).splitlines():
                yield dict(json.loads(text.decode("utf-8-sig")))
        except OSError as error:
            raise UserError(f"{self.rounds_file} cannot be read ({error}); {self._again()}") from None
        except (ValueError, TypeError, RecursionError) as error:
            if whole:
                raise UserError(f"{self.rounds_file} holds a line that is not a round ({error})") from None

    def records(self, rounds: int | None = None) -> list[Record]:
        """Return the first rounds, all if None; stop at a line that is not the next round.

        Raises:
            UserError: if there are fewer than asked for.
        """
        records: list[Record] = []
        for plain in islice(self.lines(), rounds):
            try:
                record = Record.from_dict(plain)
            except TypeError:
                break
            if record.round != len(records) + 1:
                break
            records.append(record)
        if rounds is not None and len(records) < rounds:
            raise UserError(
                f"{self.rounds_file} was changed: expected rounds 1 to {rounds} of the checkpoint, found "
                f"{len(records)}; {self._again()}"
            )
        return records

    def write_records(self, records: Iterable[Record]) -> None:
        """Rewrite `rounds.jsonl`."""
        write(self.rounds_file, "".join(line(record) for record in records))

    def client_metrics(self) -> ClientMetrics | None:
        """Return the scores on every client's data in the rounds that were measured; None if none were."""
        try:
            content = read_bytes(self.client_metrics_file) if self.client_metrics_file.exists() else b""
            if b"\n" not in content:  # The run is still writing the first line.
                return None
            from ..server.client_metrics import parse  # It imports numpy, which a report may not need otherwise.

            return parse(content)
        except (OSError, ValueError) as error:
            raise UserError(f"{self.client_metrics_file} cannot be read ({error}); {self._again()}") from None

    def add_client_metrics(self, measured: ClientMetrics) -> None:
        """Append a round's scores; the first ones begin the file with its header."""
        with self.client_metrics_file.open("ab") as file:
            file.write((b"" if file.tell() else measured.header()) + measured.blocks())

    def _again(self) -> str:
        again = f"`fedspeed run {self.config_file} --out {self.path} --overwrite`"
        return f"put it back, or start again: {again}"

    def raw_summary(self) -> dict[str, Any] | None:
        """Return `summary.json` unchecked; None if it does not exist yet, an empty dict if it cannot be read."""
        if not self.summary_file.exists():
            return None
        try:
            summary = dict(json.loads(read_text(self.summary_file)))
            refuse_depth(summary)
        except (OSError, ValueError, TypeError, RecursionError):
            return {}
        summary.pop(SEAL, None)
        return summary

    def summary(self) -> dict[str, Any]:
        """Return `summary.json` if it is complete, else an empty dict."""
        summary = self.raw_summary() or {}
        return summary if is_complete(summary) else {}

    def finished(self, rounds: int = 0) -> dict[str, Any] | None:
        """Return the summary of a finished run with at least `rounds` rounds; None for a run that can continue."""
        summary = self.summary()
        return summary if summary.get("status") == "finished" and summary["rounds"] >= rounds else None

    def write_summary(self, summary: dict[str, Any]) -> None:
        """Write `summary.json`."""
        write(self.summary_file, sealed(summary, indent=1) + "\n")

    def remove_results(self) -> None:
        """Delete model and summary: they describe an end that no longer holds."""
        self.summary_file.unlink(missing_ok=True)
        self.model_file.unlink(missing_ok=True)

    def model_digest(self) -> str | None:
        """Return the digest of the model's tensors; None without a model."""
        return tensors_digest(self.model_file) if self.model_file.is_file() else None

    def refuse_a_run(self, overwrite: bool) -> None:
        """Raise if the directory already holds a run, or a part of one, that may not be overwritten."""
        if not overwrite and self.existing():
            raise UserError(f"{self.path} already holds a run; choose another --out, or --overwrite it")

    def refuse_links(self) -> None:
        """Raise if a folder of the run is a link."""
        for folder in (self.states, self.checkpoints, self.code, self.path / "tensorboard"):
            if folder.is_symlink():
                raise UserError(f"{folder} is a link: expected a folder, or nothing; a run may not lead elsewhere")

    def create(self) -> None:
        """Create the run directory, and remove the files of an earlier run."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self.refuse_links()
            for path in [*self.states.glob("*"), *self.checkpoints.glob("*")]:
                if not OWN.fullmatch(path.name):
                    raise UserError(f"{path} does not belong to a run, and would be lost; choose another --out")
            names = (*FILES, INSPECTION, NOISE, "rounds.csv")  # An observer of an earlier run wrote the last one.
            logged = self.path.glob("tensorboard/events.out.tfevents.*.fedspeed")
            for path in [*(self.path / name for name in names), *logged]:
                path.unlink(missing_ok=True)
            self.clear()
            self._remove_code()
        except OSError as error:
            raise UserError(
                f"cannot make the output folder {self.path}: {error.strerror}; choose another --out"
            ) from None

    def clear(self) -> None:
        """Remove states, checkpoints and measurements: without a manifest they cannot be used."""
        for file in (self.client_metrics_file, self.uploads_file):
            file.unlink(missing_ok=True)
        for folder in (self.states, self.checkpoints):
            shutil.rmtree(folder, ignore_errors=True)

    def _remove_code(self) -> None:
        """Remove the copies of code that `config_file.write_config` made: files and folders named by their digest."""
        for copy in self.code.glob("*-????????*") if not self.code.is_symlink() else ():
            if copy.is_file() and copy.stem.endswith(f"-{Code(read_bytes(copy)).digest[:8]}"):
                copy.unlink(missing_ok=True)
        for folder in self.code.glob("*-????????") if not self.code.is_symlink() else ():
            first = folder / f"{folder.name[:-9]}.py"
            code = read_copy(first) if not folder.is_symlink() and first.is_file() else None
            for name in (first.name, *(name for name, _ in code.beside)) if code else ():
                (folder / name).unlink(missing_ok=True)
            with suppress(OSError):  # One that is not a copy, or holds a file of the user's, stays.
                for inner in sorted([folder, *folder.rglob("*")] if code else [], reverse=True):
                    inner.rmdir()
        with suppress(OSError):  # It does not exist, or holds a file of the user's.
            self.code.rmdir()

    def missing_folders(self) -> list[Path]:
        """Return the directory and its parents that do not exist yet, innermost first; see `withdraw`."""
        return [folder for folder in (self.path, *self.path.parents) if not folder.exists()]

    def withdraw(self, made: list[Path]) -> None:
        """Remove a run that could not begin, and the folders that were made for it."""
        self.config_file.unlink(missing_ok=True)
        self.signature_file.unlink(missing_ok=True)
        self._remove_code()
        with suppress(OSError):  # Another process has put a file there meanwhile.
            for folder in made:
                folder.rmdir()

    def remove_partial(self) -> None:
        """Remove the partial files that a killed run left."""
        for part in [*(self.path / f"{name}.part" for name in FILES), *self.checkpoints.glob("*.part")]:
            part.unlink(missing_ok=True)


def runs_in(folder: Path) -> list[Path]:
    """Return a run directory itself, or the run directories in a folder."""
    if RunDir(folder).config_file.is_file():
        return [folder]
    return [path.parent for path in folder.glob(f"*/{CONFIG}")] if folder.is_dir() else []


@contextmanager
def exclusive(out: Path) -> Iterator[None]:
    """Create the folder, and lock it against runs of other processes inside the `with` (where locks exist)."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot make the output folder {out}: {error.strerror}; choose another --out") from None
    with locked(out, tries=5) as free:  # A reader, `fedspeed watch` for example, holds it for a moment.
        if not free:
            raise UserError(
                f"{out} is in use: another process is running there; wait for it or stop it, or choose another --out"
            )
        yield


@contextmanager
def is_running(out: Path) -> Iterator[bool]:
    """Yield whether a run is in progress in a folder; if not, none can begin inside the `with` (where locks exist)."""
    with locked(out, shared=True) as free:
        yield not free


class Split(NamedTuple):
    """A split in numbers."""

    fingerprint: str  # `split_fingerprint` of the summary
    data: str
    split: str
    sizes: list[int]  # samples per client
    counts: list[list[int]]  # samples per client and class; empty without classes, or for more than `CELLS` counts
    classes: list[str]  # their names, if they have any


def split_text(data: Federated) -> str:
    """Return the text of `split.json`; it follows from the data alone."""
    from ..data.splits import class_counts

    few = data.classes and data.classes * data.clients <= CELLS
    counts = class_counts(data).tolist() if few else []
    found = Split(data.split_fingerprint, data.name, data.split, data.sizes.tolist(), counts, list(data.class_names))
    return json.dumps(found._asdict()) + "\n"


def read_split(path: Path) -> Split | None:
    """Return the content of `split.json`; None if it does not exist or any value has the wrong type."""
    plain: dict[str, Any] = {"classes": [], "counts": [], **read_json(path)}
    if set(plain) != set(Split._fields):
        return None
    found = Split(**plain)
    texts = [found.fingerprint, found.data, found.split]
    lists = isinstance(found.counts, list) and isinstance(found.classes, list)
    if not lists or not _whole(found.sizes) or not all(isinstance(text, str) for text in [*texts, *found.classes]):
        return None
    as_many = len(found.counts) in (0, len(found.sizes)) and all(map(_whole, found.counts))
    return found if as_many and len(set(map(len, found.counts))) < 2 else None


def _whole(values: Any) -> bool:
    return isinstance(values, list) and bool(values) and all(type(a) is int and 0 <= a < 2**53 for a in values)


def is_complete(summary: dict[str, Any]) -> bool:
    """Return whether a summary has every key of `REPORTED` with a valid value, and all accuracies or none."""
    whole = all(key in summary and _fits(key, summary[key]) for key in REPORTED)
    return whole and len({summary[key] is None for key in REPORTED if key.endswith("accuracy")}) == 1


def _fits(key: str, value: Any) -> bool:
    """Return whether a value of a summary is valid: text, a share or None, or a finite number >= 0."""
    if key.endswith("fingerprint"):
        return isinstance(value, str)
    if value is None or type(value) not in (int, float):
        return value is None and key.endswith("accuracy")
    return bool(0 <= value <= (1 if key.endswith("accuracy") else 1e300))
