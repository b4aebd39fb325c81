"""Back ends: the places where clients' turns are computed.

Every back end runs the same chunks of jobs on the same engine and yields replies in job order, so all give the same
bits. To add one, declare an entry point in the group `fedspeed.backends` in your own package; nothing changes here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from ..errors import UserError, unknown
from ..utils.registry import BACKEND_GROUP, BACKENDS, backend_names, foreign, load

if TYPE_CHECKING:
    from collections.abc import Container

    import torch

    from ..client.evaluate import Score, Sums
    from ..client.work import Failed, Job, Reply, Work

_OURS = frozenset(BACKENDS)
REQUIRED = ("run", "evaluate", "close")


class Backend(Protocol):
    """A place where clients' turns are computed.

    Its class is called as `(work, workers, touched)`. A class from outside the package needs `run`, `evaluate` and
    `close`; `external.CheckedBackend` completes it.

    Args:
        work: the part of the work that all clients share; `packing.pack` makes it ready to be sent.
        workers: the number of clients that may run at a time.
        touched: clients that have a state by now; that of any other is `init_client`'s, and need not travel if it is
            all zeros. A back end may ignore it.
    """

    def run(self, jobs: Sequence[Job], down: Any, state: Callable[[int], Any]) -> Iterator[Reply | Failed]:
        """Yield one reply per job, in job order: the server sums them in this order, which fixes the bits.

        Args:
            jobs: cut into chunks by `engines.make_engine(work).chunks(jobs)`, each of which is run as a whole.
            down: the server's message.
            state: returns a private copy of a client's state, at every call.
        """

    def evaluate(self, x: torch.Tensor, validation: bool = False) -> Score:
        """Return loss and accuracy of a vector on the test set, or on the validation set, in `evaluate.slices`."""

    def evaluate_clients(self, x: torch.Tensor) -> list[Sums]:
        """Return sums of loss and right answers of a vector over `evaluate.client_slices`, in order.

        Optional in a class from outside the package: they are computed in this process.
        """

    def personalise(self, x: torch.Tensor, t: int, lr: float) -> list[Score]:
        """Return every client's score of a vector after local steps, `personalise.personalised`; optional as above."""

    def close(self) -> None:
        """Stop everything that was started; may be called twice."""


class Opened(NamedTuple):
    """A back end, its name, its number of workers, and the work with its engine decided."""

    backend: Backend
    name: str
    workers: int
    work: Work


class CustomBackend(NamedTuple):
    """A back end of the caller: its name, and a function that makes it, called as the class of a back end is."""

    name: str
    make: Callable[[Work, int, Container[int]], Backend]


def find_backend(name: str) -> Callable[[Work, int, Container[int]], Backend]:
    """Return the class of a name in `BACKENDS`, or of an entry point; raise unless it has the required methods."""
    place = BACKENDS.get(name) or foreign(BACKEND_GROUP).get(name)
    if place is None:
        raise unknown("back end", name, backend_names())
    found = load("back end", name, place, "install it, or use --backend serial")
    missing = [method for method in REQUIRED if not callable(getattr(found, method, None))]
    if missing or not isinstance(found, type):
        lacks = f"has no method {missing[0]}" if missing else "is not a class"
        raise UserError(f"back end {name}: {place} {lacks}; expected a class with {', '.join(REQUIRED)}")
    fit: Callable[[Work, int, Container[int]], Backend] = found
    return fit


def open_backend(work: Work, touched: Container[int] = (), place: CustomBackend | None = None) -> Opened:
    """Decide engine, layers, back end and workers of a run, and open the back end; `place` decides the last two.

    `auto` takes processes if they save more time than they need to start, and if everything can be sent to them without
    importing the user's script again; otherwise it takes this process.
    """
    from ..client.engines import resolve_engine
    from ..models.resnet import resolve_layers
    from ..utils.processes import cores
    from .external import CheckedBackend
    from .packing import can_be_sent

    plan = work.plan
    engine = resolve_engine(plan, work.method, work.flat.model, work.loss, work.data)
    plan = replace(plan, engine=engine, layers=resolve_layers(work.flat.model, plan.layers))
    work = replace(work, plan=plan)
    if place is not None:
        return Opened(place.make(work, plan.active, touched), place.name, plan.active, work)
    workers, name = min(plan.workers or cores(), plan.active), plan.backend
    if name == "auto":
        name = "process" if workers > 1 and worth_processes(work) and can_be_sent(work) else "serial"
    workers = 1 if name == "serial" else workers
    make = partial(find_backend(name), work, workers, touched)
    backend: Backend = make() if name in _OURS else CheckedBackend(name, make, work)
    return Opened(backend, name, getattr(backend, "size", workers), work)


def mixture(backend: Backend) -> dict[str, str]:
    """Return the entry of a run's environment for workers whose bits may differ from the driver's; {} if none do."""
    found = getattr(backend, "mixed", ())
    return {"mixed": "; ".join(found)} if found else {}


def worth_processes(work: Work) -> bool:
    """Return whether `auto` takes worker processes.

    It does on the cpu, for the loop engine (a cohort is seldom more than one block), in a run of more than about ten
    seconds, estimated as 0.3 ms per local step and 6 d operations per sample at 50 GFLOP/s.
    """
    plan = work.plan
    n = float(work.data.sizes.mean())
    d = work.flat.d
    samples = plan.local_steps * plan.batch_size or plan.local_epochs * n
    seconds = plan.rounds * plan.active * (3e-4 * samples / min(plan.batch_size, n) + 6 * d * samples / 5e10)
    return work.flat.device.type == "cpu" and plan.engine != "block" and seconds > 10
