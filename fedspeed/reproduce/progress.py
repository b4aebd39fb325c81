"""The progress of runs that take hours, kept beside the results until they are finished."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..record import first_at
from ..report.tables import markdown
from ..runs.directory import RunDir
from ..utils.files import read_text, write
from . import Reproduction
from .recipes import trained
from .runs import Run
from .table import Result

FILE, PAGE = "progress.jsonl", "progress.md"


def write_progress(work: Reproduction) -> Path | None:
    """Write progress.jsonl with the rounds so far of unfinished runs, and progress.md; return the page, or None.

    The line of a run on another machine is kept until it is finished. Without a run in progress, both are removed.
    """
    out = work.store.out
    runs, targets = _all(work)
    if not runs:  # the data are not on this machine: keep what another machine wrote
        return None
    with work.store.alone():
        before = _read(out / FILE)
        lines = {}
        for key, run in runs.items():
            if work.store.get(key) is None:
                both = [line for line in (before.get(key), _so_far(run, work.store.work / key)) if line]
                if both:
                    lines[key] = max(both, key=lambda line: int(line["rounds"]))
        if not lines:
            for name in (FILE, PAGE):
                (out / name).unlink(missing_ok=True)
            return None
        write(out / FILE, "".join(json.dumps(line) + "\n" for line in lines.values()))
        write(out / PAGE, _page(work, runs, lines, targets))
    return out / PAGE


def _all(work: Reproduction) -> tuple[dict[str, Run], list[float]]:
    """Return every run of the preset by key, and every target accuracy."""
    runs: dict[str, Run] = {}
    targets: set[float] = set()
    for recipe in trained(work.preset):
        for run in work.runs(recipe):
            runs.setdefault(run.key, run)
        targets |= set(recipe.preset(work.preset).targets or recipe.targets)
    return runs, sorted(targets)


def _so_far(run: Run, place: Path) -> dict[str, Any] | None:
    rounds = list(RunDir(place).lines())
    if not rounds:
        return None
    return {
        "key": run.key,
        "label": run.label,
        "rounds": rounds[-1]["round"],
        "of": run.config.rounds,
        "seconds": round(sum(r["seconds"] for r in rounds)),
        "curve": [[r["round"], r["test_accuracy"]] for r in rounds if r["test_accuracy"] is not None],
    }


def _read(path: Path) -> dict[str, dict[str, Any]]:
    with suppress(FileNotFoundError):
        try:
            return {line["key"]: line for line in map(json.loads, read_text(path).splitlines())}
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"{path}: expected lines about runs, found others ({error!r}); restore or delete it"
            ) from None
    return {}


def _page(work: Reproduction, runs: dict[str, Run], lines: dict[str, dict[str, Any]], targets: list[float]) -> str:
    header = ("run", "state", "rounds", "accuracy %", "best %", *(f"round of {100 * a:g}%" for a in targets), "hours")
    rows = [(run.label, *_row(run, work.store.get(key), lines.get(key), targets)) for key, run in runs.items()]
    text = (
        f"# Progress of the runs of preset `{work.preset}`\n\n"
        "Runs `in progress` are not finished: their numbers are those of the last round that was scored, and no "
        "verdict is drawn from them. A target that is reached stays reached; `-` is not reached so far.\n\n"
    )
    return text + markdown(header, rows)


def _row(run: Run, done: Result | None, line: dict[str, Any] | None, targets: list[float]) -> tuple[str, ...]:
    if done is not None:
        rounds = done["rounds"]
        curve = list(zip(rounds["round"], rounds["test_accuracy"], strict=True))
        state, count, seconds = done["status"], done["summary"]["rounds"], done["summary"]["seconds"]
    elif line is not None:
        state, count, curve, seconds = "in progress", line["rounds"], line["curve"], line["seconds"]
    else:
        return ("not begun", f"0 of {run.config.rounds}", *["-"] * (len(targets) + 3))
    scores = [100 * accuracy for _, accuracy in curve if accuracy is not None]
    shown = [f"{scores[-1]:.2f}", f"{max(scores):.2f}"] if scores else ["-", "-"]
    reached = [first_at((accuracy for _, accuracy in curve), target) for target in targets]
    shown += ["-" if at is None else str(curve[at][0]) for at in reached]
    return (state, f"{count} of {run.config.rounds}", *shown, f"{seconds / 3600:.1f}")
