"""Those who watch a run: progress on a terminal, logs, files of one's own. What they do changes no bit of it.

    class Loud(Observer):
        def round(self, record, run):
            print(record.round, record.test_accuracy)

    run_config(config, "runs/a", observers=[Loud(), "csv"])         fedspeed run --log csv

A package can offer its observers by name, as entry points of the group `fedspeed.observers`. Nothing here needs torch.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from copy import deepcopy
from typing import TYPE_CHECKING, Any

from ..errors import Diverged, Terminated, UserError, one_line, unknown
from ..record import Record
from ..utils.registry import foreign, load

if TYPE_CHECKING:
    from .simulation import Simulation

OBSERVERS = {
    "csv": "fedspeed.report.export:Csv",
    "tensorboard": "fedspeed.report.trackers:TensorBoard",
    "wandb": "fedspeed.report.trackers:Wandb",
    "mlflow": "fedspeed.report.trackers:MLflow",
}
"""Name -> "module:Class", which is called without arguments; imported when a run asks for it."""
GROUP = "fedspeed.observers"


class Observer:
    """Called as a run proceeds; every method does nothing, override what you need.

    One that raises is reported in one line and dropped, and the run goes on; KeyboardInterrupt and SystemExit stop it.
    `run.out` is the run's directory, None if it has none; `run.x` and `run.model` are where the server stands.
    """

    def started(self, run: Simulation, config: dict[str, Any]) -> None:
        """Rounds begin, at `run.t`; again if a run that was stopped continues."""

    def client(self, done: int, total: int) -> None:
        """`done` of a round's `total` clients have answered."""

    def round(self, record: Record, run: Simulation) -> None:
        """A round is done, and written down if the run has a directory."""

    def ended(self, status: str, summary: dict[str, Any]) -> None:
        """Rounds end: `finished`, `interrupted`, `terminated`, or with the reason `stopped: ...` (by a rule of the
        plan), `diverged: ...` and `failed: ...`; of a run without a directory the summary holds no more than status and
        rounds."""


class Observers:
    """The observers of a run as one.

    Args:
        given: observers, or names of some; anything else is refused.
    """

    def __init__(self, given: Iterable[Observer | str] = ()) -> None:
        if isinstance(given, str) or not isinstance(given, Iterable):
            raise UserError(f"observers: expected a list of observers or names, found {given!r}")
        self.all = [_made(each) for each in given]
        self._telling = False
        self._going = False

    def tell(self, hook: str, *about: Any) -> None:
        """Call a hook of everybody, with values of their own; whoever raises is not called again."""
        for each in self.all[:]:
            self._telling = True
            try:
                getattr(each, hook)(*(deepcopy(a) if isinstance(a, Record | dict) else a for a in about))
            except (Exception, GeneratorExit) as error:  # what stops a program passes
                self.all = [other for other in self.all if other is not each]
                told = f"observer {type(each).__name__}.{hook} failed ({one_line(error)})"
                warnings.warn(f"{told}; it is dropped, the run goes on", stacklevel=2)
            finally:
                self._telling = False

    def started(self, run: Simulation) -> None:
        """Rounds begin, unless they have begun already."""
        if self._telling:
            raise UserError("an observer is told of rounds, and runs none")
        if not self._going:
            self._going = True
            config = {**run.plan.fields(), "method": run.method.to_dict()}
            self.tell("started", run, run.recorder.config.to_dict() if run.recorder else config)

    def ended(self, status: str, summary: dict[str, Any]) -> None:
        """Rounds end, if they had begun."""
        if self._going:
            self._going = False
            self.tell("ended", status, summary)

    def over(self, run: Simulation, error: BaseException | None) -> None:
        """Rounds of a run without a directory end, if they had begun; an error is what stopped them."""
        given_up = error is None or isinstance(error, GeneratorExit)
        status = (run.ended if given_up else "") or status_of(error)
        self.ended(status, {"status": status, "rounds": run.t})


def _made(given: Any) -> Observer:
    what, found = "observers", given
    if isinstance(given, str):
        what, make = f"observer {given}", find_observer(given)
        try:
            found = make()
        except UserError as error:
            raise UserError(f"{what}: {error}") from error
        except (Exception, SystemExit) as error:
            raise UserError(f"{what}: cannot be made ({one_line(error)}); leave it out") from error
    if isinstance(found, Observer):
        return found
    hint = f"; did you mean {found.__name__}()?" if isinstance(found, type) else "; make it a subclass"
    raise UserError(f"{what}: expected a fedspeed.Observer, found {found!r}{hint}")


def find_observer(name: str) -> Any:
    """The class of a name in `OBSERVERS`, or of an entry point."""
    place = OBSERVERS.get(name) or foreign(GROUP).get(name)
    if place is None:
        raise unknown("observer", name, [*OBSERVERS, *foreign(GROUP)])
    return load("observer", name, place)


def status_of(error: BaseException | None) -> str:
    """The status of a run that an error stopped; None if it was given up.

    Example:
        >>> status_of(KeyboardInterrupt()), status_of(ValueError("no")), status_of(None)
        ('interrupted', 'failed: no', 'interrupted')
    """
    if isinstance(error, Diverged):
        return f"diverged: {error}"
    if isinstance(error, Exception):
        return f"failed: {error}"
    return "terminated" if isinstance(error, Terminated) else "interrupted"
