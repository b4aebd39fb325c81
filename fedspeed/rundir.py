"""The files of a run directory: what each is called, how it is written whole or not at all, how it is read back.

A run directory may come from somebody else, so everything in it is checked when read, and nothing in it is executed: a
config that names a Python file is refused unless the user allows it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .config import Config, read_toml
from .errors import UserError

if TYPE_CHECKING:
    from .server import Record

PLACEMENT = ("device", "backend", "workers", "states", "checkpoint_every")
"""Settings that say where and how, and change no bit of the result (on one kind of device)."""

FILES = ("config.toml", "rounds.jsonl", "summary.json", "model.safetensors")
FOLDERS = ("states", "checkpoints")

LATER: dict[str, list[int]] = {"dropped": [], "stragglers": []}
"""Fields of a record that the first version of format 1 did not write."""

REPORTED = ("last_accuracy", "best_accuracy", "mean_last5_accuracy", "rounds", "bytes_down", "bytes_up", "grad_evals",
            "seconds", "eval_seconds", "data_fingerprint", "split_fingerprint")  # fmt: skip
"""What a summary must hold to stand for a finished run."""


def read_config(out: Path, allow_code: bool = False) -> Config:
    """The config of a run directory.

    Args:
        allow_code: also if it names Python files, which are then executed.
    """
    if not (out / "config.toml").is_file():
        raise UserError(f"{out} holds no run: expected a config.toml; start one with `fedspeed run --out {out}`")
    for folder in FOLDERS:
        if (out / folder).is_symlink():
            raise UserError(f"{out / folder} is a link: expected a folder; a run directory may not lead elsewhere")
    tables = read_toml(out / "config.toml")
    code = named_code(tables)
    if code and not allow_code:
        raise UserError(
            f"{out / 'config.toml'} names {sorted(code)[0]}, whose code would be executed; a run directory is only "
            f"data unless you trust it: add --allow-code if you do"
        )
    return Config.from_dict(tables)


def named_code(tables: dict[str, Any]) -> set[str]:
    """What a config would execute that is neither in the package nor installed: methods from files, remote data sets.

    Example:
        >>> named_code({"method": {"name": "fedinit", "base": "own.py:Mine"}})
        {'method own.py:Mine'}
    """
    found: set[str] = set()
    method = tables.get("method")
    while method is not None:
        table = method if isinstance(method, dict) else {"name": method}
        name = table.get("name")
        if isinstance(name, str) and name.rpartition(":")[0].endswith(".py"):
            found.add(f"method {name}")
        method = table.get("base")
    data = tables.get("data")
    if (data.get("name") if isinstance(data, dict) else data) == "huggingface" and not tables.get("data_dir"):
        found.add("data huggingface")
    return found


def same_run(stored: Config, given: Config) -> bool:
    """Whether two configs are one run: the same but for where it is computed, and an engine still to be resolved."""
    given = replace(given, engine=stored.engine if given.engine == "auto" else given.engine)
    given = replace(given, **{name: getattr(stored, name) for name in PLACEMENT})
    return given.to_dict() == stored.to_dict()  # a method from a file is another class each time the file is read


def finished(out: Path) -> dict[str, Any] | None:
    """The summary of a finished run, None for one that can go on."""
    summary = read_summary(out)
    return summary if summary.get("status") == "finished" and all(key in summary for key in REPORTED) else None


def read_summary(out: Path) -> dict[str, Any]:
    """What `summary.json` holds; nothing if there is none that can be read."""
    try:
        summary = json.loads((out / "summary.json").read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    numbers = (int, float, type(None))
    whole = isinstance(summary, dict) and all(
        isinstance(summary.get(key), str if key.endswith("fingerprint") else numbers) for key in REPORTED
    )
    return summary if whole else {}


def line(record: Record) -> str:
    """A record as a line of `rounds.jsonl`."""
    return json.dumps(record.to_dict()) + "\n"


def read_records(out: Path, rounds: int | None = None) -> list[Record]:
    """The first rounds of `rounds.jsonl`, all if None; later lines, and one that was cut off, are not read."""
    path, records = out / "rounds.jsonl", list[Any]()
    try:
        lines = path.read_text("utf-8").splitlines() if path.exists() or rounds else []
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({error}); {_again(out)}") from None
    for text in lines[:rounds]:
        try:
            record = _record({**LATER, **json.loads(text)})
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


def _record(plain: dict[str, Any]) -> Record:
    """A record whose fields have the types they should."""
    from .server import Record

    value: Any
    for field in dataclasses.fields(Record):
        kind, value = str(field.type), plain.get(field.name)
        may_miss = "None" in kind or field.name in ("train_loss", "drift", "update_norm")
        if kind.startswith("list"):
            good = isinstance(value, list) and all(type(a) is int for a in value)
        elif kind.startswith("int"):
            good = type(value) is int
        else:
            good = (value is None and may_miss) or (type(value) in (int, float) and -1e300 < value < 1e300)
        if not good:
            raise TypeError(f"{field.name} is {value!r}")
    return Record(**plain)


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
        for name in FILES:
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


def write(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    part = path.with_name(path.name + ".part")
    try:
        part.unlink(missing_ok=True)  # it may be a link
        part.write_text(text, encoding="utf-8")
        os.replace(part, path)
    except OSError:
        part.unlink(missing_ok=True)
        raise
