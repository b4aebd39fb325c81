"""Batches of runs, for all commands that make several: finished runs are kept, stopped ones are continued, the rest are
started; one after another, or side by side in processes (`pool`).

    tasks = [RunTask.of(config, out / name, label) for ...]
    with one_command(out):
        failed = make_runs(unfinished(tasks), jobs=2)     # label -> reason; all other runs are done

A command that was killed continues when it is repeated, because its whole state is in the run directories. The bits
are those of single runs.
"""

from __future__ import annotations

import hashlib
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config.config import Config
from ..config.plan import PLACEMENT
from ..errors import Diverged, UserError
from ..report.run_files import RunFiles, score_of
from ..runs.config_file import as_stored, named_code, placement, read_config, same_run, trusted
from ..runs.diagnosis import WarnObserver
from ..runs.directory import RunDir, exclusive
from ..runs.summary import final_summary
from ..server.observers import Observer
from ..utils.files import flat
from . import pool

if TYPE_CHECKING:
    from ..record import Record
    from ..server.simulation import Simulation

LONGEST = 230
"""Longest folder name, in bytes, that is the label itself; a seed is appended to it."""
BLINK = 0.2
"""Seconds between two progress reports inside a round."""
SAMPLES = {"digits": 1_437, "tinyimagenet": 100_000}
"""Training samples of the data sets that do not have 50,000; used for estimates."""


@dataclass(frozen=True)
class RunTask:
    """A run to make or to continue; it holds tables, because a class from a user's file cannot be pickled.

    Args:
        label: the name in messages, different for every task.
        cost: approximate amount of work, relative to the other tasks.
        overwrite: replace the run that the folder holds.
        log: names of observers.
    """

    folder: Path
    label: str
    tables: dict[str, Any]
    cost: float = 1.0
    overwrite: bool = False
    log: tuple[str, ...] = ()

    @classmethod
    def of(cls, config: Config, folder: Path, label: str, overwrite: bool = False, log: Iterable[str] = ()) -> RunTask:
        """Return the task of a config."""
        return cls(folder, label, config.to_dict(), cost_of(config), overwrite, tuple(log))

    @property
    def key(self) -> str:
        """The folder, which identifies the task."""
        return str(self.folder)


def folder_name(label: str) -> str:
    """Return a label as the name of a folder; a long one is cut and ends in a digest.

    Example:
        >>> folder_name("fedspeed:rho=0.1,lam=10")
        'fedspeed_rho=0.1_lam=10'
    """
    name = "".join(c if c.isalnum() or c in "-._=" else "_" for c in label)
    digest = hashlib.blake2b(label.encode(), digest_size=4).hexdigest()
    return name if len(name.encode()) <= LONGEST else f"{name.encode()[:80].decode(errors='ignore')}-{digest}"


def cost_of(config: Config) -> float:
    """Return about how much work a run is, in minibatch passes: an ascent step doubles a step."""
    return pictures_of(config) / config.batch_size


def pictures_of(config: Config) -> float:
    """Return for about how many samples a run computes a gradient; a perturbed step takes two."""
    ascent = getattr(config.method, "ascent_fraction", 1.0) if getattr(config.method, "rho", 0.0) else 0.0
    given = config.data.options.get("train_size")
    whole = given if isinstance(given, int | float) else SAMPLES.get(config.data.name, 50_000)
    own = whole / (config.clients or 100)
    local = config.local_steps * config.batch_size if config.local_steps else config.local_epochs * own
    return float(config.rounds * (config.active or 10) * local * (1 + ascent))


@contextmanager
def one_command(out: Path) -> Iterator[None]:
    """Lock a folder of runs, so that no second command writes the same tables; remove it if it stays empty."""
    made = [folder for folder in (out, *out.parents) if not folder.exists()]
    try:
        with exclusive(out):
            yield
    finally:
        with suppress(OSError):  # the folder is not empty
            for folder in made:
                folder.rmdir()


def unfinished(tasks: Iterable[RunTask]) -> list[RunTask]:
    """Return the tasks that are not done; raise before any run is made if a folder holds a run of another config."""
    return [task for task in tasks if task.overwrite or not is_done(task.folder, Config.from_dict(task.tables))]


def is_done(folder: Path, config: Config) -> bool:
    """Return whether a folder holds this run, complete; raise if it holds a run of another config."""
    run = RunDir(folder)
    if not run.existing():
        return False
    if not run.config_file.exists():
        run.refuse_a_run(overwrite=False)
    tables = run.config()
    stored = read_config(folder, bool(named_code(tables))) if trusted(tables, config) else None
    if stored is None or not same_run(stored, replace(config, targets=stored.targets)):  # targets change no bit
        raise UserError(
            f"{folder} holds a run of another config ({_differing(tables, as_stored(config))}); choose another --out, "
            f"repeat the command that made it, or --overwrite it"
        )
    diverged = str(run.summary().get("status")).startswith("diverged")
    return diverged or final_summary(run, config) is not None


def _differing(stored: dict[str, Any], given: dict[str, Any]) -> str:
    """Return the keys that make it another run, at most three."""
    a, b = flat(stored), flat({"layers": stored.get("layers"), **given})  # left open, they are as stored
    keys = [key for key in {**a, **b} if a.get(key) != b.get(key) and key not in (*PLACEMENT, "engine", "targets")]
    if keys == ["augment"]:
        return "it differs in augment, which earlier versions set to paper for data of yours: add --augment paper"
    return f"it differs in {', '.join(keys[:3])}{', ...' * (len(keys) > 3)}" if keys else "it differs"


class Progress:
    """Progress callbacks; the base class does nothing."""

    def on_part(self, run: Any, part: float, note: str = "") -> None:
        """Report which fraction of a run is done."""

    def on_warning(self, run: Any, text: str) -> None:
        """Report a diagnosis of a run."""

    def on_done(self, run: Any, note: str = "", bad: bool = False) -> None:
        """Report that a run is done, or has diverged (`bad`)."""

    def on_failed(self, run: Any, why: str) -> None:
        """Report that a run failed; the others continue."""


def make_runs(
    tasks: Sequence[RunTask], jobs: int = 1, shown: Progress | None = None, traceback: bool = False
) -> dict[str, str]:
    """Make or continue runs, `jobs` at a time; return label -> reason for every run that failed.

    A run that diverges is done, and its summary says so. Input that no run can start with is raised at once. Ctrl-C is
    raised after all processes have ended; the same call then continues.

    Args:
        traceback: return the whole traceback of a failure instead of its last line.
    """
    shown = shown or Progress()
    failed: dict[str, str] = {}
    by_itself = jobs == 1 or len(tasks) == 1
    begun = False

    def report(task: RunTask, news: tuple[float, str] | str) -> None:
        nonlocal begun
        if isinstance(news, str):
            shown.on_warning(task, news)
            return
        begun = begun or news[0] > 0
        shown.on_part(task, *news)

    def done(task: RunTask, ended: str) -> None:
        nonlocal begun
        begun = True
        shown.on_done(task, ended or _result_line(task.folder), bad=bool(ended))

    def fail(task: RunTask, why: str) -> None:
        why = why if traceback else why.strip().splitlines()[-1]
        if not begun and not RunDir(task.folder).config_file.exists():
            raise UserError(why)
        failed[task.label] = why
        shown.on_failed(task, why)

    work = partial(_work, not by_itself)
    missing = {task.folder: RunDir(task.folder).missing_folders() for task in tasks}
    try:
        pool.run_tasks(tasks, work, jobs, on_report=report, on_done=done, on_failed=fail, here=by_itself)
    except UserError:  # Input that no run can start with; all processes have ended.
        _remove_begun(missing)
        raise
    return failed


def _remove_begun(missing: dict[Path, list[Path]]) -> None:
    """Remove folders that runs have made which were ended before their first round: they would refuse other settings.

    Args:
        missing: the folder of every run with those of it and its parents that did not exist before.
    """
    for folder in [folder for folder, made in missing.items() if made and folder.exists()]:
        rounds = RunDir(folder).rounds_file
        with suppress(UserError), exclusive(folder):  # One where another process has begun a run meanwhile stays.
            if not rounds.exists() or rounds.stat().st_size == 0:
                shutil.rmtree(folder, ignore_errors=True)
    for made in missing.values():
        with suppress(OSError):  # One that holds something stays.
            for parent in made[1:]:
                parent.rmdir()


def _result_line(folder: Path) -> str:
    """Return the result of a run as one line."""
    run = RunFiles.read(folder)
    summary, score = run.summary, ""
    if summary["last_accuracy"] is not None:
        score = f"accuracy {summary['last_accuracy']:.2%}, "
    elif held_out := run.curve("validation_accuracy"):  # a trial of `tune` reads no test set
        score = f"held-out accuracy {held_out[-1][1]:.2%}, "
    stopped = ", stopped" if str(summary["status"]).startswith("stopped: ") else ""
    return f"{score}{summary['rounds']} rounds, {summary['seconds']:.1f} s{stopped}"


def _work(beside_others: bool, task: RunTask, tell: pool.Report) -> str:
    """Make one run, report its progress and diagnoses, and return why it diverged, or ""."""
    config = Config.from_dict(task.tables)
    if beside_others and config.backend == "auto":
        config = replace(config, backend="serial")  # the back end changes no bit
    watch = ProgressObserver(config.rounds, tell)
    observers: list[Observer | str] = [watch, WarnObserver(tell), *task.log]
    return make_run(config, task.folder, observers, watch.on_progress, overwrite=task.overwrite)


def make_run(
    config: Config,
    folder: Path,
    observers: Iterable[Observer | str] = (),
    progress: Callable[[str, int, int], None] | None = None,
    *,
    overwrite: bool = False,
) -> str:
    """Make one run, or continue it from its last checkpoint; return why it diverged, or ""."""
    from ..runs.launch import resume, run_config

    calls: dict[str, Any] = {"observers": observers, "progress": progress}
    try:
        if RunDir(folder).config_file.exists() and not overwrite:
            code = bool(named_code(config.to_dict()))
            calls |= {name: getattr(config, name) for name in ("rounds", "data_dir", "max_time", "stop_at")}
            resume(folder, allow_code=code, placement=placement(config), **calls)
        else:
            run_config(config, folder, overwrite=overwrite, **calls)
    except Diverged as error:
        return str(error)
    return ""


class ProgressObserver(Observer):
    """Observer that reports a run as (fraction done, text)."""

    def __init__(self, rounds: int, tell: pool.Report) -> None:
        self.rounds, self.tell = rounds, tell
        self.rounds_done = 0
        self.score = ""
        self.said = time.monotonic()

    def started(self, run: Simulation, config: dict[str, Any]) -> None:
        self.rounds_done = run.t  # a resumed run does not start at round 0

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
        """Report a download or a decoding before round 1."""
        if time.monotonic() - self.said > BLINK:
            self._say(0, f"{what} {100 * done // total if total else 0}%")

    def _say(self, rounds: float, words: str) -> None:
        self.said = time.monotonic()
        self.tell((rounds / self.rounds, words))
