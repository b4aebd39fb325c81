"""The files of a run directory: what each is called, how it is written whole or not at all, how it is read back.

A run directory may come from somebody else, so everything in it is checked when read, and nothing in it is executed.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .errors import UserError
from .files import read_text
from .record import Record

FILES = ("config.toml", "rounds.jsonl", "summary.json", "model.safetensors")
FOLDERS = ("states", "checkpoints")
OWN = re.compile(r"((server|log|\d+)@\d+|\d+\.json)(\.part)?")
"""What a run writes into these folders; nothing else in them is removed."""
CODE = "code"
"""The folder of copies of the files that method, model and data come from: `mine-1a2b3c4d.py` with the digest of
`mine.py`."""

REPORTED = ("last_accuracy", "best_accuracy", "mean_last5_accuracy", "rounds", "bytes_down", "bytes_up", "grad_evals",
            "seconds", "eval_seconds", "data_fingerprint", "split_fingerprint")  # fmt: skip
"""What a summary must hold to stand for a finished run."""


def finished(out: Path, rounds: int = 0) -> dict[str, Any] | None:
    """The summary of a finished run, None for one that can go on, which one with fewer than `rounds` rounds can."""
    summary = read_summary(out)
    done = summary.get("status") == "finished" and all(key in summary for key in REPORTED)
    return summary if done and summary["rounds"] >= rounds else None


def read_summary(out: Path) -> dict[str, Any]:
    """What `summary.json` holds; nothing if there is none that can be read."""
    try:
        summary = json.loads(read_text(out / "summary.json"))
    except (OSError, ValueError, RecursionError):
        return {}
    whole = isinstance(summary, dict) and all(key in summary and _fits(key, summary[key]) for key in REPORTED)
    scores = [summary[key] is None for key in REPORTED if key.endswith("accuracy")] if whole else []
    return summary if whole and len(set(scores)) == 1 else {}


def _fits(key: str, value: Any) -> bool:
    """Whether a summary's value is of its kind: text, a share or nothing, or a finite number >= 0."""
    if key.endswith("fingerprint"):
        return isinstance(value, str)
    if value is None or type(value) not in (int, float):
        return value is None and key.endswith("accuracy")
    return bool(0 <= value <= (1 if key.endswith("accuracy") else 1e300))


def line(record: Record) -> str:
    """A record as a line of `rounds.jsonl`."""
    return json.dumps(record.to_dict()) + "\n"


def read_records(out: Path, rounds: int | None = None) -> list[Record]:
    """The first rounds of `rounds.jsonl`, all if None; later lines, and one that was cut off, are not read."""
    path = out / "rounds.jsonl"
    records: list[Record] = []
    try:
        lines = read_text(path).splitlines() if path.exists() or rounds else []
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({error}); {_again(out)}") from None
    for text in lines[:rounds]:
        try:
            record = Record.from_dict(json.loads(text))
        except (ValueError, TypeError, RecursionError):
            break
        if record.round != len(records) + 1:
            break
        records.append(record)
    if rounds is not None and len(records) < rounds:
        raise UserError(
            f"{path} was changed: expected rounds 1 to {rounds} of the checkpoint, found {len(records)}; {_again(out)}"
        )
    return records


def _again(out: Path) -> str:
    return f"put it back, or start again: `fedspeed run {out / 'config.toml'} --out {out} --overwrite`"


def refuse_a_run(out: Path, overwrite: bool) -> None:
    """Raise if a directory already holds a run, or a part of one, that may not be overwritten."""
    if not overwrite and any((out / name).exists() for name in FILES):
        raise UserError(f"{out} already holds a run; choose another --out, or --overwrite it")


@contextmanager
def alone(out: Path) -> Iterator[None]:
    """Make the folder, and keep other processes from running in it until the end (where locks exist)."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot make the output folder {out}: {error.strerror}; choose another --out") from None
    try:
        import fcntl

        held = os.open(out, os.O_RDONLY)
    except (ImportError, OSError):
        yield
        return
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(held)
        raise UserError(
            f"{out} is in use: another process is running there; wait for it or stop it, or choose another --out"
        ) from None
    except OSError:  # a file system without locks
        pass
    try:
        yield
    finally:
        os.close(held)


@contextmanager
def beside(out: Path) -> Iterator[bool]:
    """Whether a run goes on in a folder; if none does, none can begin until the end (where locks exist)."""
    try:
        import fcntl

        held = os.open(out, os.O_RDONLY)
    except (ImportError, OSError):
        yield False
        return
    try:
        going_on = False
        try:
            fcntl.flock(held, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            going_on = True
        except OSError:  # a file system without locks
            pass
        yield going_on
    finally:
        os.close(held)


def claim(out: Path) -> None:
    """Make the run directory, without the files of an earlier run."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name in (*FOLDERS, CODE):
            if (out / name).is_symlink():
                raise UserError(f"{out / name} is a link: expected a folder, or nothing; a run may not lead elsewhere")
        for path in [path for name in FOLDERS for path in (out / name).glob("*")]:
            if not OWN.fullmatch(path.name):
                raise UserError(f"{path} is not of a run, and would be lost; choose another --out")
        for name in (*FILES, "rounds.csv"):  # the last is an observer's, of an earlier run
            (out / name).unlink(missing_ok=True)
        clear(out)
    except OSError as error:
        raise UserError(f"cannot make the output folder {out}: {error.strerror}; choose another --out") from None


def clear(out: Path) -> None:
    """Drop states and checkpoints: what a run killed before its first manifest left is of no use."""
    for name in FOLDERS:
        shutil.rmtree(out / name, ignore_errors=True)


def sweep(out: Path) -> None:
    """Remove what a killed run had half written."""
    for part in [*(out / f"{name}.part" for name in FILES), *(out / "checkpoints").glob("*.part")]:
        part.unlink(missing_ok=True)
