"""Recorder of a run: writes rounds and checkpoints while the run lasts, model and summary at its end, however it ends.

It is the only writer of them, for runs of a config and for runs of objects given to `simulate`.
"""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from ..config.config import Config
from ..config.spec import GIVEN
from ..errors import UserError
from ..server.observers import status_of
from ..utils.files import write
from ..utils.processes import delay_signals
from .directory import RunDir, line, split_text
from .fork import Origin, read_parent
from .summary import digests, final_summary, summarise

if TYPE_CHECKING:
    from ..record import Record
    from ..server.round import RoundResult
    from ..server.simulation import Simulation
    from .checkpoint import Checkpoints


@contextmanager
def disk_errors(out: Path, config: Config) -> Iterator[None]:
    """Turn an OSError, of a full disk for example, into a UserError that says how to continue."""
    try:
        yield
    except OSError as error:
        fix = "Get permission to write" if isinstance(error, PermissionError) else "Free some space"
        raise UserError(
            f"cannot write to {out} ({error.strerror or error}); what was written before is kept. {fix}, "
            f"then {_again(out, config)}"
        ) from None


def _again(out: Path, config: Config) -> str:
    return "call simulate(..., resume=True)" if config.model.name == GIVEN else f"`fedspeed resume {out}`"


@dataclass(eq=False, repr=False)
class RunRecorder:
    """The recorder of one run into one directory."""

    out: Path
    config: Config
    simulation: Simulation
    records: list[Record]  # of the rounds before; new ones are added
    checkpoints: Checkpoints
    hold: Callable[[], AbstractContextManager[None]] = nullcontext  # locks the directory, unless the caller has

    def __post_init__(self) -> None:
        self.files = RunDir(self.out)
        self.summary: dict[str, Any] = {}
        self._here = self.out.stat().st_ino
        self._left = self._traces()
        self._apart = False  # client states are of a round that was not recorded
        self._given_up = False  # the caller stopped iterating, and the cause is not known
        run = self.simulation
        self._written = (run.t, run.server, run.elapsed)  # state after the last recorded round
        self._parent: Origin | None = None

    @contextmanager
    def session(self, run: Simulation) -> Iterator[Callable[[RoundResult], None] | None]:
        """Lock the directory while rounds are computed, and write how they ended; see `Recorder`."""
        self._check_in_place()  # before `hold`, which would create a missing folder
        with self.hold():
            self._check_unchanged()
            done = final_summary(self.files, self.config)
            self.summary = done or {}
            if done is not None:
                yield None
                return
            status = "running"
            self._written, self._given_up = (run.t, run.server, run.elapsed), False
            _OPEN.add(run)
            try:
                with disk_errors(self.out, self.config):
                    self.files.remove_results()  # First: a kill from here on must leave no summary of fewer rounds.
                    if not self.files.split_file.exists():
                        write(self.files.split_file, split_text(run.data))
                    self._parent = read_parent(self.files)
                    run.stopping.after = self._parent.at if self._parent else 0
                    with self.files.rounds_file.open("a", encoding="utf-8") as lines:
                        yield partial(self._write, lines)
                        self._last_checkpoint()
                status = run.ended
            except GeneratorExit:
                status = self._left_alone()
                raise
            except BaseException as error:
                status = status_of(error)
                raise
            finally:
                self._end(status)
        _OPEN.discard(run)

    def _write(self, lines: TextIO, result: RoundResult) -> None:
        """Write a round, and a checkpoint if one is due.

        The files are only flushed to the operating system here; the checkpoint that counts the round flushes them to
        the disk. The line in `rounds.jsonl` comes last: a round without its line did not happen, and `resume` cuts the
        other files back to the checkpoint.
        """
        from .binary_files import add_uploads

        run, record = self.simulation, result.record
        self._check_in_place()
        with delay_signals():  # A signal is handled before all of these writes, or after.
            if result.client_metrics is not None:
                self.files.add_client_metrics(result.client_metrics)
            add_uploads(self.files, record.round, result.uploads)
            lines.write(line(record))
            lines.flush()
            self.records.append(record.copy())  # a copy: the caller has the record, too
            self._written = (run.t, run.server, run.elapsed)
        if self._parent is not None and run.t == self._parent.at:
            self._parent.require(self.records)
        self.checkpoints.maybe_write(run.t, run.server, run.states)

    def _left_alone(self) -> str:
        """Return the status after the caller stopped iterating, by `break` for example; after the last round it is
        `finished`."""
        cause = self.simulation.cause
        self._given_up = cause is None
        if self._given_up and self.simulation.ended:
            with suppress(Exception):
                self._last_checkpoint()
                self._given_up = False
                return self.simulation.ended
        return status_of(cause)

    def _end(self, status: str) -> None:
        """Write model and summary of the last recorded round, and set the simulation back to it."""
        run = self.simulation
        with suppress(Exception):  # It was raised already, or is not what stopped the run.
            self.checkpoints.wait()
        self._apart = run.t != self._written[0]
        with disk_errors(self.out, self.config) if status == run.ended else suppress(Exception):
            run.restore(*self._written)  # The model must be of the last recorded round.
            if self._is_in_place():
                self._conclude(status)
        with suppress(OSError):
            self._left = self._traces()
        run.observers.ended(status, self.summary)

    def failed(self, error: BaseException) -> None:
        """Write the error that ended the rounds: a `for` loop drops its iterator before the error is known."""
        if self._given_up and self._is_in_place():
            with suppress(Exception), self.hold():
                self._check_unchanged()
                self._conclude(status_of(error))

    def _last_checkpoint(self) -> None:
        self.checkpoints.write(self.simulation.t, self.simulation.server, self.simulation.states)
        self.checkpoints.wait()
        self._check_in_place()

    def _conclude(self, status: str) -> None:
        """Write the model, then the summary, whose digests include the model's."""
        from .binary_files import save_model

        save_model(self.simulation, self.files.model_file)
        self.summary = summarise(self.config, self.simulation, self.records, status) | {
            "checkpoint_seconds": self.checkpoints.waited,
            "digests": digests(self.out, self.records),
            "engine": self.simulation.plan.engine,
            "backend": self.simulation.placement,
            "workers": self.simulation.workers,
        }
        self.files.write_summary(self.summary)

    def _is_in_place(self) -> bool:
        """Return whether `out` is still the directory (same inode) in which the run started."""
        return self.out.exists() and self.out.stat().st_ino == self._here

    def _check_in_place(self) -> None:
        if not self._is_in_place():
            how = _again(self.out, self.config).replace(f" {self.out}", "")
            raise UserError(f"{self.out} was moved during the run; {how} where it is now")

    def _check_unchanged(self) -> None:
        """Raise if another process has continued the run, or started another one in the directory."""
        if self._apart or self._traces() != self._left:
            raise UserError(
                f"{self.out} is not where this simulation left it: expected the same rounds, found others; call "
                f"simulate(..., resume=True) again to stand where the directory stands"
            )

    def _traces(self) -> tuple[Any, ...]:
        """Return inodes, sizes and times that change if another process writes to the directory."""
        found: list[Any] = []
        for path in (self.out, self.files.config_file, self.files.rounds_file):
            about = path.stat() if path.exists() else None
            grown = () if about is None or path == self.out else (about.st_size, about.st_mtime_ns)
            found.append(about and (about.st_ino, *grown))
        return tuple(found)


_OPEN: weakref.WeakSet[Simulation] = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    """End the rounds of every open run when the script ends, so that their summaries say so."""
    for run in list(_OPEN):
        with suppress(Exception):
            run.end_rounds()
