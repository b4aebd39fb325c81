"""The one door to a run directory: what its files are called, how they are written and read back.

A run directory may come from somebody else, so everything in it is checked when read, and nothing in it is executed.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import tomli_w

from ..errors import UserError
from ..record import Record
from ..utils.files import SEAL, read_bytes, read_json, read_text, read_toml, refuse_depth, sealed, tensors_digest, write
from ..utils.locks import locked
from ..utils.notebook import card

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


"""What is appended to as rounds end; a checkpoint says how much of each belongs to it."""


SPLIT = "split.json"


FORK = "fork.json"


FILES = (CONFIG, ROUNDS, SUMMARY, MODEL, CLIENT_METRICS, UPLOADS, SPLIT, FORK)


INSPECTION = "inspect.json"


SHOWN = ("status", "rounds", "last_accuracy", "best_accuracy", "mean_last5_accuracy", "last_test_loss",
         "last_train_loss", "bytes_down", "bytes_up", "grad_evals", "seconds")  # fmt: skip


"""What a notebook shows of a summary."""


FOLDERS = ("states", "checkpoints")


CODE = "code"


"""The folder of copies of the files of method, model and data: `mine-1a2b3c4d.py` with the digest of `mine.py`."""


NUMBER = "(?:0|[1-9][0-9]{0,17})"


STATE = re.compile(f"states/({NUMBER})@({NUMBER})")


"""The name of a state file: a client, and the round its state is of."""


LOG = re.compile(f"states/log@{NUMBER}")


"""The name of a log of client states: the round whose checkpoint began it."""


OWN = re.compile(rf"((server|log|{NUMBER})@{NUMBER}|{NUMBER}\.json)(\.part)?")


"""What a run writes into its folders; nothing else in them is read or removed."""


def line(record: Record) -> str:
    """A record as a line of `rounds.jsonl`."""
    return json.dumps(record.to_dict()) + "\n"


class RunDir:
    """A run directory, or where one is to be: names, and what the files say. Nothing is read before it is asked for.

    Example:
        >>> run = RunDir("runs/a")
        >>> run.name(run.state_path(3, 7)), run.config_file.exists(), run.told(), run.records()
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
        self.inspection_file = self.path / INSPECTION
        self.states, self.checkpoints = (self.path / name for name in FOLDERS)
        self.code = self.path / CODE

    def _repr_html_(self) -> str:
        told, records = self.told() or {}, self.records()
        facts = {key: told[key] for key in SHOWN if key in told} or {"rounds so far": len(records)}
        return card(str(self.path), facts, records)

    def name(self, path: Path) -> str:
        """A file's name from within the directory."""
        return path.relative_to(self.path).as_posix()

    def state_path(self, client: int, t: int) -> Path:
        """The file of a client's state as of round t, if it has one."""
        from ..client.tree_bytes import state_name  # which needs torch

        return self.states / state_name(client, t)

    def log_path(self, t: int) -> Path:
        """The log of client states that the checkpoint of round t began."""
        return self.states / f"log@{t}"

    def server_path(self, t: int) -> Path:
        """The file of the server's vectors after t rounds."""
        return self.checkpoints / f"server@{t}"

    def manifest_path(self, t: int) -> Path:
        """The manifest of the checkpoint after t rounds."""
        return self.checkpoints / f"{t}.json"

    def manifests(self) -> list[Path]:
        """The manifests there are, newest first."""
        found = [path for path in self.checkpoints.glob("*.json") if re.fullmatch(NUMBER, path.stem)]
        return sorted(found, key=lambda path: -int(path.stem))

    def holds(self) -> list[str]:
        """Which files of a run there are."""
        return [name for name in FILES if (self.path / name).exists()]

    def config(self) -> dict[str, Any]:
        """The tables of `config.toml` as they stand there; `runconfig.read_config` checks them."""
        if not self.config_file.is_file():
            next_step = (
                f"it holds several: name one of them, or `fedspeed compare {self.path}` for their table"
                if runs_in(self.path)
                else f"start one with `fedspeed run --out {self.path}`"
            )
            raise UserError(f"{self.path} holds no run: expected a {CONFIG}; {next_step}")
        return read_toml(self.config_file)

    def write_config(self, tables: dict[str, Any], name: str = CONFIG) -> None:
        """Write `config.toml`, or another name, on the disk when this returns."""
        write(self.path / name, tomli_w.dumps(tables), durable=True)

    def lines(self, whole: bool = False) -> Iterator[dict[str, Any]]:
        """The rounds as they stand in `rounds.jsonl`, up to a line that was cut off.

        Args:
            whole: raise for such a line, and for a file that is missing.
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
        """The first rounds, all if None; later lines, and one that was cut off, are not read."""
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
        """Scores on every client's data in the rounds that were measured; None if none were."""
        from ..server.client_metrics import parse

        try:
            content = read_bytes(self.client_metrics_file) if self.client_metrics_file.exists() else b""
            return parse(content) if b"\n" in content else None  # else its first line is being written
        except (OSError, ValueError) as error:
            raise UserError(f"{self.client_metrics_file} cannot be read ({error}); {self._again()}") from None

    def add_client_metrics(self, measured: ClientMetrics) -> None:
        """Append a round's scores; the first begin the file."""
        with self.client_metrics_file.open("ab") as file:
            file.write((b"" if file.tell() else measured.header()) + measured.blocks())

    def _again(self) -> str:
        again = f"`fedspeed run {self.config_file} --out {self.path} --overwrite`"
        return f"put it back, or start again: {again}"

    def told(self) -> dict[str, Any] | None:
        """What `summary.json` says, whatever it is; None if there is none yet, nothing if it cannot be read."""
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
        """What `summary.json` says if it has all that it must, each of its kind; else nothing."""
        summary = self.told() or {}
        return summary if is_complete(summary) else {}

    def finished(self, rounds: int = 0) -> dict[str, Any] | None:
        """The summary of a finished run, None for one that can continue, as one with fewer than `rounds` rounds can."""
        summary = self.summary()
        return summary if summary.get("status") == "finished" and summary["rounds"] >= rounds else None

    def write_summary(self, summary: dict[str, Any]) -> None:
        """Write `summary.json`."""
        write(self.summary_file, sealed(summary, indent=1) + "\n")

    def drop_results(self) -> None:
        """Remove model and summary, which tell of an end that was none."""
        self.summary_file.unlink(missing_ok=True)
        self.model_file.unlink(missing_ok=True)

    def model_digest(self) -> str | None:
        """Of the model's tensors; None without one."""
        return tensors_digest(self.model_file) if self.model_file.is_file() else None

    def refuse_a_run(self, overwrite: bool) -> None:
        """Raise if the directory already holds a run, or a part of one, that may not be overwritten."""
        if not overwrite and self.holds():
            raise UserError(f"{self.path} already holds a run; choose another --out, or --overwrite it")

    def refuse_links(self) -> None:
        """Raise if a folder of the run is a link."""
        for folder in (self.states, self.checkpoints, self.code, self.path / "tensorboard"):
            if folder.is_symlink():
                raise UserError(f"{folder} is a link: expected a folder, or nothing; a run may not lead elsewhere")

    def claim(self) -> None:
        """Make the run directory, without the files of an earlier run."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self.refuse_links()
            for path in [*self.states.glob("*"), *self.checkpoints.glob("*")]:
                if not OWN.fullmatch(path.name):
                    raise UserError(f"{path} does not belong to a run, and would be lost; choose another --out")
            names = (*FILES, INSPECTION, "rounds.csv")  # the last is an observer's, of an earlier run
            logged = self.path.glob("tensorboard/events.out.tfevents.*.fedspeed")
            for path in [*(self.path / name for name in names), *logged]:
                path.unlink(missing_ok=True)
            self.clear()
        except OSError as error:
            raise UserError(
                f"cannot make the output folder {self.path}: {error.strerror}; choose another --out"
            ) from None

    def clear(self) -> None:
        """Drop states, checkpoints and what was measured: of no use if a run was killed before its first manifest."""
        for file in (self.client_metrics_file, self.uploads_file):
            file.unlink(missing_ok=True)
        for folder in (self.states, self.checkpoints):
            shutil.rmtree(folder, ignore_errors=True)

    def sweep(self) -> None:
        """Remove what a killed run had half written."""
        for part in [*(self.path / f"{name}.part" for name in FILES), *self.checkpoints.glob("*.part")]:
            part.unlink(missing_ok=True)


def runs_in(folder: Path) -> list[Path]:
    """A run directory itself, or those in a folder."""
    if RunDir(folder).config_file.is_file():
        return [folder]
    return [path.parent for path in folder.glob(f"*/{CONFIG}")] if folder.is_dir() else []


@contextmanager
def exclusive(out: Path) -> Iterator[None]:
    """Make the folder, and keep other processes from running in it until the end (where locks exist)."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot make the output folder {out}: {error.strerror}; choose another --out") from None
    with locked(out, tries=5) as free:  # who only looks, `fedspeed watch` for example, holds it for a moment
        if not free:
            raise UserError(
                f"{out} is in use: another process is running there; wait for it or stop it, or choose another --out"
            )
        yield


@contextmanager
def beside(out: Path) -> Iterator[bool]:
    """Whether a run is in progress in a folder; if none is, none can begin inside the `with` (where locks exist)."""
    with locked(out, shared=True) as free:
        yield not free


CELLS = 1_000_000


"""Counts beyond which only the sizes are written down."""


class Split(NamedTuple):
    """A split in numbers.

    Args:
        fingerprint: what a summary calls `split_fingerprint`.
        sizes: samples of every client.
        counts: for every client its samples of every class; none without classes, or where there are too many.
        classes: their names, if they have any.
    """

    fingerprint: str
    data: str
    split: str
    sizes: list[int]
    counts: list[list[int]]
    classes: list[str]


def write_split(path: Path, data: Federated) -> None:
    """Write it down, unless it is there."""
    if not path.exists():
        write(path, split_text(data))


def split_text(data: Federated) -> str:
    """Return the file's text; it follows from the data alone."""
    from ..data.summary import class_counts

    few = data.classes and data.classes * data.clients <= CELLS
    counts = class_counts(data).tolist() if few else []
    found = Split(data.split_fingerprint, data.name, data.split, data.sizes.tolist(), counts, list(data.class_names))
    return json.dumps(found._asdict()) + "\n"


def read_split(path: Path) -> Split | None:
    """What it says, None where there is none or something in it is not of its kind."""
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


REPORTED = ("last_accuracy", "best_accuracy", "mean_last5_accuracy", "rounds", "bytes_down", "bytes_up", "grad_evals",
            "seconds", "eval_seconds", "data_fingerprint", "split_fingerprint")  # fmt: skip


def is_complete(summary: dict[str, Any]) -> bool:
    """Whether it has all that it must, each of its kind, and all of the accuracies or none."""
    whole = all(key in summary and _fits(key, summary[key]) for key in REPORTED)
    return whole and len({summary[key] is None for key in REPORTED if key.endswith("accuracy")}) == 1


def _fits(key: str, value: Any) -> bool:
    """Whether a summary's value is of its kind: text, a share or nothing, or a finite number >= 0."""
    if key.endswith("fingerprint"):
        return isinstance(value, str)
    if value is None or type(value) not in (int, float):
        return value is None and key.endswith("accuracy")
    return bool(0 <= value <= (1 if key.endswith("accuracy") else 1e300))
