"""All there is of some runs: finished ones, and the others as far as they came."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..methods import METHODS, WRAPPERS
from ..record import Record, is_number
from ..rundir import ROUNDS, RunDir, beside
from .runs import Row, RunFiles, folders_of_runs, gather

RUNNING, INTERRUPTED, DAMAGED = "running", "interrupted", "damaged"


def collect(given: Sequence[Path], unfinished: bool = False) -> tuple[list[Row], list[str]]:
    """The runs of some folders as rows, and why others are left out; of one folder the methods in their usual order.

    Args:
        unfinished: also runs that go on, were interrupted or are damaged, as far as they came.
    """
    folders = [folder for path in given for folder in folders_of_runs(path)]
    rows, left_out = rows_of(folders, read_any if unfinished else RunFiles.read, unfinished, len(given) == 1)
    if not rows:
        raise UserError(f"{given[0]}: expected finished runs, found none; {left_out[0]}")
    return rows, left_out


def rows_of(
    folders: Sequence[Path], read: Callable[[Path], RunFiles], unfinished: bool, in_order: bool
) -> tuple[list[Row], list[str]]:
    """Run directories as rows, and why others are left out.

    Args:
        read: a run directory; one for which it raises UserError is left out.
        in_order: methods in their usual order, not in that of the folders.
    """
    usual = {name: cls.from_fields({}).to_dict() for name, cls in (METHODS | WRAPPERS).items()}
    rows, left_out = gather(folders, usual, read, unfinished)
    if in_order:
        rank = {name: i for i, name in enumerate(usual)}
        rows = sorted(rows, key=lambda row: rank.get(str(row.runs[0].config["method"]["name"]), len(rank)))
    return rows, left_out


def finished(rows: Sequence[Row]) -> list[Row]:
    """The rows with those of their runs that are done, also where none is."""
    return [Row(row.label, [run for run in row.runs if run.done]) for row in rows]


def read_any(path: Path) -> RunFiles:
    """A run directory, whatever became of the run: `status` of its summary says what."""
    files = RunDir(path)
    config = files.config()
    seed, method = config.get("seed", 0), config.get("method")
    named = isinstance(method, dict) and isinstance(method.get("name"), str)
    if not named or type(seed) is not int:
        raise UserError(f"{files.config_file} is not the config of a run: it lacks a method or a seed")
    rounds, broken = _rounds(files)
    run = RunFiles(path, rounds, files.told() or {}, config)
    try:
        run.check()
    except (KeyError, TypeError, AttributeError):
        broken = broken or ("its summary cannot be read" if files.told() is not None else "")
    else:
        told = run.summary["rounds"]
        broken = broken or ("" if told == len(rounds) else f"{told} rounds in its summary, {len(rounds)} in {ROUNDS}")
        if not broken:
            return run
    with beside(path) as busy:
        status = RUNNING if busy else f"{DAMAGED}: {broken}" if broken else f"{INTERRUPTED} after {len(rounds)} rounds"
    return RunFiles(path, rounds, _so_far(rounds, seed, status), config)


def _rounds(files: RunDir) -> tuple[list[dict[str, Any]], str]:
    """The rounds up to the first line that is none, and what is wrong with that."""
    rounds: list[dict[str, Any]] = []
    try:
        for plain in files.lines(whole=files.rounds_file.exists()):
            found = Record.from_dict(plain)
            if found.round != len(rounds) + 1:
                raise TypeError(f"round is {found.round}")
            rounds.append(plain)
    except (UserError, TypeError) as error:
        return rounds, f"line {len(rounds) + 1} of {files.rounds_file.name} is not a round ({_last(error)})"
    return rounds, ""


def _last(error: Exception) -> str:
    return str(error).rpartition("(")[2].removesuffix(")")


def _so_far(rounds: list[dict[str, Any]], seed: int, status: str) -> dict[str, Any]:
    """What a summary would say of these rounds, as far as tables ask."""
    accuracies = [r["test_accuracy"] for r in rounds if is_number(r.get("test_accuracy"))]
    losses = [r["test_loss"] for r in rounds if is_number(r.get("test_loss"))]
    added = ("bytes_down", "bytes_up", "grad_evals", "seconds", "eval_seconds")
    return {
        "status": status,
        "seed": seed,
        "rounds": len(rounds),
        "last_accuracy": accuracies[-1] if accuracies else None,
        "best_accuracy": max(accuracies, default=None),
        "mean_last5_accuracy": statistics.fmean(accuracies[-5:]) if accuracies else None,
        "last_test_loss": losses[-1] if losses else None,
        "last_train_loss": rounds[-1]["train_loss"] if rounds else None,
        **{key: sum(r[key] for r in rounds) for key in added},
    }
