"""Observers: callbacks that follow a run (progress, logs, trackers) and cannot change its results.

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

from ..config.spec import with_texts
from ..errors import Diverged, Terminated, UserError, one_line, unknown
from ..record import Record
from ..utils.registry import foreign, load

if TYPE_CHECKING:
    from .simulation import Simulation

OBSERVERS = {
    "csv": "fedspeed.report.export:Csv",
    "tensorboard": "fedspeed.report.export:TensorBoard",
    "wandb": "fedspeed.report.export:Wandb",
    "mlflow": "fedspeed.report.export:MLflow",
}
"""Name -> "module:Class", which is called without arguments; imported when a run asks for it."""
GROUP = "fedspeed.observers"


class Observer:
    """Base class of observers: a run calls its methods, which do nothing; override those you need.

    An observer that raises is reported in one line and dropped, and the run continues; KeyboardInterrupt and SystemExit
    stop the run. `run.out` is the run's directory, None if it has none; `run.x` and `run.model` are the server's model.
    """

    def started(self, run: Simulation, config: dict[str, Any]) -> None:
        """Handle the begin of rounds, at `run.t`; it is called again if a stopped run continues.

        Args:
            config: the settings of the run as plain tables.
        """

    def client(self, done: int, total: int) -> None:
        """Handle a client's reply: `done` of the round's `total` clients have replied."""

    def round(self, record: Record, run: Simulation) -> None:
        """Handle the end of a round, which is in the run directory already if there is one."""

    def ended(self, status: str, summary: dict[str, Any]) -> None:
        """Handle the end of rounds.

        Args:
            status: `finished`, `interrupted`, `terminated`, or with a reason `stopped: ...` (by a rule of the plan),
                `diverged: ...` or `failed: ...`.
            summary: the summary of the run; without a directory only `status` and `rounds`.
        """


class Observers:
    """The observers of a run as one, given by themselves or by name; anything else is refused."""

    def __init__(self, given: Iterable[Observer | str] = ()) -> None:
        if isinstance(given, str) or not isinstance(given, Iterable):
            raise UserError(f"observers: expected a list of observers or names, found {given!r}")
        self.all = [_made(each) for each in given]
        self._telling = False
        self._going = False

    def tell(self, hook: str, *about: Any) -> None:
        """Call a hook of every observer, with copies of the values; drop an observer that raises."""
        for each in self.all[:]:
            self._telling = True
            try:
                getattr(each, hook)(*(deepcopy(a) if isinstance(a, Record | dict) else a for a in about))
            except (Exception, GeneratorExit) as error:  # KeyboardInterrupt and SystemExit pass.
                self.all = [other for other in self.all if other is not each]
                what = f"observer {type(each).__name__}.{hook} failed ({one_line(error)})"
                warnings.warn(f"{what}; it is dropped, the run continues", stacklevel=2)
            finally:
                self._telling = False

    def started(self, run: Simulation) -> None:
        """Report that rounds begin, unless they have begun already."""
        if self._telling:
            raise UserError("an observer must not run rounds")
        if not self._going:
            self._going = True
            config = {**with_texts(run.plan.fields()), "method": run.method.to_dict()}
            self.tell("started", run, run.recorder.config.to_dict() if run.recorder else config)

    def ended(self, status: str, summary: dict[str, Any]) -> None:
        """Report that rounds end, if they had begun."""
        if self._going:
            self._going = False
            self.tell("ended", status, summary)

    def over(self, run: Simulation, error: BaseException | None) -> None:
        """Report that rounds of a run without a directory end, if they had begun; `error` stopped them, if any."""
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
    """Return the class of a name in `OBSERVERS`, or of an entry point."""
    place = OBSERVERS.get(name) or foreign(GROUP).get(name)
    if place is None:
        raise unknown("observer", name, [*OBSERVERS, *foreign(GROUP)])
    return load("observer", name, place)


def status_of(error: BaseException | None) -> str:
    """Return the status of a run that an error stopped; None stands for a caller that stopped iterating.

    Example:
        >>> status_of(KeyboardInterrupt()), status_of(ValueError("no")), status_of(None)
        ('interrupted', 'failed: no', 'interrupted')
    """
    if isinstance(error, Diverged):
        return f"diverged: {error}"
    if isinstance(error, Exception):
        return f"failed: {error}"
    return "terminated" if isinstance(error, Terminated) else "interrupted"
