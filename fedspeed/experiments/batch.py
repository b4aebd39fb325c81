"""Many configs -> run directories, for all commands that make several runs: what is done is kept, what was stopped is
continued, the rest is started; one after another, or side by side in processes (`pool`).

    tasks = [RunTask.of(config, out / name, label) for ...]
    with one_command(out):
        failed = make_runs(unfinished(tasks), jobs=2)     # why, by label; the others are done

A command that is killed at any instant and repeated goes on where it was: all that is known is in the run directories.
The bits are those of single runs.
"""

from __future__ import annotations

import hashlib
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
from ..utils.tables import flat
from . import pool

if TYPE_CHECKING:
    from ..record import Record
    from ..server.simulation import Simulation

LONGEST = 230
"""Bytes of a label that are a folder's name as they are; a seed is added to it."""
BLINK = 0.2
"""Seconds between two words about what goes on inside a round."""


SAMPLES = {"digits": 1_437, "tinyimagenet": 100_000}
"""Training samples of data sets that do not have 50,000, for estimates."""


@dataclass(frozen=True)
class RunTask:
    """A run to make or to continue; its config as tables, for a class from a user's file cannot be sent.

    Args:
        label: what to call it, another for every task.
        cost: about how much work it is beside the others.
        overwrite: replace what the folder holds.
        log: names of observers.
    """

    folder: Path
    label: str
    tables: dict[str, Any]
    cost: float = 1.0
    overwrite: bool = False
    log: tuple[str, ...] = ()

    @classmethod
    def of(
        cls, config: Config, folder: Path, label: str, *, overwrite: bool = False, log: Iterable[str] = ()
    ) -> RunTask:
        """The task of a config."""
        return cls(folder, label, config.to_dict(), cost_of(config), overwrite, tuple(log))

    @property
    def key(self) -> str:
        """Its folder."""
        return str(self.folder)


def folder_name(label: str) -> str:
    """What a run is called, as a folder's name; a long one ends in a digest.

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
    """Keep other commands out of a folder of runs until the end, and leave no empty folder behind.

    Two of them would take turns at the same runs and write the same tables.
    """
    made = [folder for folder in (out, *out.parents) if not folder.exists()]
    try:
        with exclusive(out):
            yield
    finally:
        with suppress(OSError):  # there is something in it
            for folder in made:
                folder.rmdir()


def unfinished(tasks: Iterable[RunTask]) -> list[RunTask]:
    """Those with something left to do; a folder that holds another run is refused before anything is made."""
    return [task for task in tasks if task.overwrite or not is_done(task.folder, Config.from_dict(task.tables))]


def is_done(folder: Path, config: Config) -> bool:
    """Whether a folder holds this run, with nothing left to do; another run there is refused."""
    run = RunDir(folder)
    if not run.existing():
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
    return diverged or final_summary(run, config) is not None


def _differing(stored: dict[str, Any], given: dict[str, Any]) -> str:
    """The keys that make it another run, at most three."""
    a, b = flat(stored), flat(given)
    keys = [key for key in {**a, **b} if a.get(key) != b.get(key) and key not in (*PLACEMENT, "engine", "targets")]
    if keys == ["augment"]:
        return "it differs in augment, which earlier versions set to paper for data of yours: add --augment paper"
    return f"it differs in {', '.join(keys[:3])}{', ...' * (len(keys) > 3)}" if keys else "it differs"


class Progress:
    """What is told while runs are made; this one tells nobody."""

    def on_part(self, run: Any, part: float, note: str = "") -> None:
        """So much of a run is done."""

    def on_ill(self, run: Any, text: str) -> None:
        """Something ails a run."""

    def on_done(self, run: Any, note: str = "", bad: bool = False) -> None:
        """A run is done, or has diverged (`bad`)."""

    def on_failed(self, run: Any, why: str) -> None:
        """A run failed; the others go on."""


def make_runs(
    tasks: Sequence[RunTask], jobs: int = 1, shown: Progress | None = None, traceback: bool = False
) -> dict[str, str]:
    """Make or continue runs, `jobs` at a time; why it failed, by the label, for every run that did.

    A run that diverges is done, and says so in its summary. An input that no run can start with is raised at once.
    Ctrl-C is raised when all processes are gone; the same call then continues.

    Args:
        traceback: give the whole traceback of a failure, not its last line.
    """
    shown = shown or Progress()
    failed: dict[str, str] = {}
    by_itself = jobs == 1 or len(tasks) == 1
    begun = False

    def told(task: RunTask, what: tuple[float, str] | str) -> None:
        nonlocal begun
        if isinstance(what, str):
            shown.on_ill(task, what)
            return
        begun = begun or what[0] > 0
        shown.on_part(task, *what)

    def done(task: RunTask, ended: str) -> None:
        nonlocal begun
        begun = True
        shown.on_done(task, ended or _came_to(task.folder), bad=bool(ended))

    def fail(task: RunTask, why: str) -> None:
        why = why if traceback else why.strip().splitlines()[-1]
        if not begun and not RunDir(task.folder).config_file.exists():
            raise UserError(why)
        failed[task.label] = why
        shown.on_failed(task, why)

    work = partial(_work, not by_itself)
    pool.run_tasks(tasks, work, jobs, on_told=told, on_done=done, on_failed=fail, here=by_itself)
    return failed


def _came_to(folder: Path) -> str:
    """A run in a line."""
    summary = RunFiles.read(folder).summary
    accuracy = summary["last_accuracy"]
    score = f"accuracy {accuracy:.2%}, " if accuracy is not None else ""
    stopped = ", stopped" if str(summary["status"]).startswith("stopped: ") else ""
    return f"{score}{summary['rounds']} rounds, {summary['seconds']:.1f} s{stopped}"


def _work(beside_others: bool, task: RunTask, tell: pool.Tell) -> str:
    """One run; how it ended if not well. Tells what part is done and how it goes, and what ails it."""
    config = Config.from_dict(task.tables)
    if beside_others and config.backend == "auto":
        config = replace(config, backend="serial")  # the same bits
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
    """One run, new or from where it was stopped; how it ended if it diverged, else ""."""
    from ..runs.launch import resume, run_config

    calls: dict[str, Any] = {"observers": observers, "progress": progress}
    try:
        if RunDir(folder).config_file.exists() and not overwrite:
            code = bool(named_code(config.to_dict()))
            calls |= {"rounds": config.rounds, "data_dir": config.data_dir, "max_time": config.max_time}
            resume(folder, allow_code=code, placement=placement(config), **calls)
        else:
            run_config(config, folder, overwrite=overwrite, **calls)
    except Diverged as error:
        return str(error)
    return ""


class ProgressObserver(Observer):
    """Turns what a run says into (part done, words)."""

    def __init__(self, rounds: int, tell: pool.Tell) -> None:
        self.rounds, self.tell = rounds, tell
        self.rounds_done = 0
        self.score = ""
        self.said = time.monotonic()

    def started(self, run: Simulation, config: dict[str, Any]) -> None:
        self.rounds_done = run.t  # it may go on where it was stopped

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
        """Something slow before round 1."""
        if time.monotonic() - self.said > BLINK:
            self._say(0, f"{what} {100 * done // total if total else 0}%")

    def _say(self, rounds: float, words: str) -> None:
        self.said = time.monotonic()
        self.tell((rounds / self.rounds, words))
