"""Many runs as one piece of work: what is done is kept, what was stopped is continued, the rest is started."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import pool
from ..config import Config
from ..errors import Diverged, UserError
from ..illness import Doctor
from ..observe import Observer
from ..report.difference import flat
from ..report.runs import RunFiles
from ..runconfig import PLACEMENT, as_stored, named_code, read_config, same_run, trusted
from ..rundir import RunDir
from ..stopping import over
from .progress import BLINK, Runs, score_of

if TYPE_CHECKING:
    from rich.console import Console

    from ..record import Record
    from ..server import Simulation


@dataclass(frozen=True)
class RunTask:
    """A run to make or to continue; its config as tables, for a class from a user's file cannot be sent."""

    folder: Path
    label: str
    tables: dict[str, Any]
    overwrite: bool = False
    log: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """Its folder."""
        return str(self.folder)

    @property
    def cost(self) -> float:
        """About how much work it is beside the others: rounds, and an ascent step doubles a step."""
        method = self.tables["method"]
        ascent = method.get("ascent_fraction", 1.0) if method.get("rho") else 0.0
        return float(self.tables["rounds"]) * (1 + ascent)


def is_done(folder: Path, config: Config) -> bool:
    """Whether a folder holds this run, with nothing left to do; another run there is refused."""
    run = RunDir(folder)
    if not run.holds():
        return False
    if not run.config_file.exists():
        run.refuse_a_run(overwrite=False)
    tables, given = run.config(), as_stored(config)
    stored = read_config(folder, bool(named_code(tables))) if trusted(tables, config) else None
    if stored is None or not same_run(stored, replace(config, targets=stored.targets)):  # which change no bit
        raise UserError(
            f"{folder} holds a run of another config ({_differing(tables, given)}); choose another --out, repeat the "
            f"command that made it, or --overwrite it"
        )
    diverged = str(run.summary().get("status")).startswith("diverged")
    return diverged or over(run, config) is not None


def _differing(stored: dict[str, Any], given: dict[str, Any]) -> str:
    """The keys that make it another run, at most three."""
    a, b = flat(stored), flat(given)
    keys = [key for key in {**a, **b} if a.get(key) != b.get(key) and key not in (*PLACEMENT, "engine", "targets")]
    return f"it differs in {', '.join(keys[:3])}{', ...' * (len(keys) > 3)}" if keys else "it differs"


def make_runs(tasks: list[RunTask], jobs: int, console: Console, show: bool, traceback: bool) -> dict[str, str]:
    """Run what is to be run and say how it goes; why it failed, by the label, for every run that did.

    An input that no run can start with is raised at once.
    """
    failed: dict[str, str] = {}
    alone = jobs == 1 or len(tasks) == 1
    begun = False

    def told(task: RunTask, what: tuple[float, str] | str) -> None:
        nonlocal begun
        if isinstance(what, str):
            runs.on_ill(task, what)
            return
        begun = begun or what[0] > 0
        runs.on_part(task, *what)

    def done(task: RunTask, ended: str) -> None:
        nonlocal begun
        begun = True
        runs.on_done(task, ended or _came_to(task.folder), bad=bool(ended))

    def fail(task: RunTask, why: str) -> None:
        if not begun and not RunDir(task.folder).config_file.exists():
            raise UserError(why if traceback else why.strip().splitlines()[-1])
        failed[task.label] = why if traceback else why.strip().splitlines()[-1]
        sys.stderr.write(f"fedspeed: {task.label}: {failed[task.label]}\n")

    work = partial(_work, not alone)
    with Runs(console, "compare", tasks, show) as runs:
        pool.run_tasks(tasks, work, jobs, on_told=told, on_done=done, on_failed=fail, here=alone)
    return failed


def _came_to(folder: Path) -> str:
    """A run in a line."""
    summary = RunFiles.read(folder).summary
    accuracy = summary["last_accuracy"]
    score = f"accuracy {accuracy:.2%}, " if accuracy is not None else ""
    stopped = ", stopped" if str(summary["status"]).startswith("stopped: ") else ""
    return f"{score}{summary['rounds']} rounds, {summary['seconds']:.1f} s{stopped}"


def _work(beside_others: bool, task: RunTask, tell: pool.Tell) -> str:
    """One run, new or from where it was stopped; how it ended if not well. Tells what part is done and how it goes,
    and what ails it."""
    from ..run import resume, run_config

    config = Config.from_dict(task.tables)
    if beside_others and config.backend == "auto":
        config = replace(config, backend="serial")  # the same bits
    watch = _Watch(config.rounds, tell)
    calls: dict[str, Any] = {"observers": [watch, Doctor(tell), *task.log], "progress": watch.on_progress}
    try:
        if RunDir(task.folder).config_file.exists() and not task.overwrite:
            resume(
                task.folder,
                allow_code=bool(named_code(task.tables)),
                rounds=config.rounds,
                data_dir=config.data_dir,
                max_time=config.max_time,
                **calls,
            )
        else:
            run_config(config, task.folder, overwrite=task.overwrite, **calls)
    except Diverged as error:
        return str(error)
    return ""


class _Watch(Observer):
    """Turns what a run says into (part done, words)."""

    def __init__(self, rounds: int, tell: pool.Tell) -> None:
        self.rounds, self.tell = rounds, tell
        self.rounds_done = 0
        self.score = ""
        self.said = time.monotonic()

    def round(self, record: Record, run: Simulation) -> None:
        self.rounds_done = record.round
        if record.test_loss is not None:
            self.score = ", " + score_of(record).split("  ")[0]
        self._say(record.round, f"round {record.round}/{self.rounds}{self.score}")

    def client(self, done: int, total: int) -> None:
        if time.monotonic() - self.said > BLINK:
            now = f"round {self.rounds_done + 1}/{self.rounds}, client {done}/{total}{self.score}"
            self._say(self.rounds_done + done / total, now)

    def on_progress(self, what: str, done: int, total: int) -> None:
        if time.monotonic() - self.said > BLINK:
            self._say(0, f"{what} {100 * done // total if total else 0}%")

    def _say(self, rounds: float, words: str) -> None:
        self.said = time.monotonic()
        self.tell((rounds / self.rounds, words))
