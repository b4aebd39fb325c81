"""Where local work runs. Every back end computes the same chunks with the same engine and gives replies in job order:
the same bits.

A back end of your own needs no change here: let your package declare an entry point in the group `fedspeed.backends`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

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
    """Where clients run. A class is called with `(work, workers, touched)`.

    Args of the class:
        work: what all clients have in common; `packing.pack` sends it elsewhere.
        workers: how many may work at a time.
        touched: clients that have a state by now; that of any other is `init_client`'s, and need not travel if it is
            all zeros. No back end has to look at it.
    """

    def run(self, jobs: Sequence[Job], down: Any, state: Callable[[int], Any]) -> Iterator[Reply | Failed]:
        """One reply per job, in job order.

        Args:
            jobs: cut into chunks by `engines.make_engine(work).chunks(jobs)`, each of which is run as a whole.
            down: what the server sends.
            state: gives a private copy of a client's state, at every call.
        """

    def evaluate(self, x: torch.Tensor, validation: bool = False) -> Score:
        """Loss and accuracy of a vector on the test set, or on the validation set, in `evaluate.slices`."""

    def close(self) -> None:
        """Stop what was started; may be called twice."""


class FullBackend(Backend, Protocol):
    """A back end as a run has it: one from outside the package is completed by `held.Held`."""

    def evaluate_clients(self, x: torch.Tensor) -> list[Sums]:
        """Sums of loss and right answers of a vector over `clientscores.client_slices`, in order."""


class Opened(NamedTuple):
    """A back end, its name, how many workers it was given, and the work with its engine decided."""

    backend: FullBackend
    name: str
    workers: int
    work: Work


class CustomBackend(NamedTuple):
    """A back end of the caller's own: its name, and what makes it, called as the class of one is."""

    name: str
    make: Callable[[Work, int, Container[int]], FullBackend]


def find_backend(name: str) -> Callable[[Work, int, Container[int]], Backend]:
    """The class of a name in `BACKENDS`, or of an entry point."""
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
    """Decide where a run goes: which engine, which back end, how many workers; `place` decides the last two itself.

    `auto` takes processes where they save more time than they need to start, and everything can be sent to them without
    importing the user's script once more; else this process.
    """
    from ..client.engines import resolve_engine
    from ..utils.environment import cores
    from .external import CheckedBackend
    from .packing import can_be_sent

    plan = work.plan
    plan = replace(plan, engine=resolve_engine(plan, work.method, work.flat.model, work.loss, work.data))
    work = replace(work, plan=plan)
    if place is not None:
        return Opened(place.make(work, plan.active, touched), place.name, plan.active, work)
    workers, name = min(plan.workers or cores(), plan.active), plan.backend
    if name == "auto":
        name = "process" if workers > 1 and worth_processes(work) and can_be_sent(work) else "serial"
    workers = 1 if name == "serial" else workers
    make = partial(find_backend(name), work, workers, touched)
    whole = cast("FullBackend", make()) if name in _OURS else CheckedBackend(name, make, work)
    return Opened(whole, name, getattr(whole, "size", workers), work)


def mixture(backend: Backend) -> dict[str, str]:
    """Workers whose bits may differ from the driver's, as a run's environment tells it; nothing without any."""
    found = getattr(backend, "mixed", ())
    return {"mixed": "; ".join(found)} if found else {}


def worth_processes(work: Work) -> bool:
    """Whether `auto` takes worker processes: on the cpu, client by client (a cohort is seldom more than one block), in
    a run of more than about ten seconds (0.3 ms for a local step, and 6 d operations per sample at 50 GFLOP/s)."""
    plan = work.plan
    n = float(work.data.sizes.mean())
    d = work.flat.d
    samples = plan.local_steps * plan.batch_size or plan.local_epochs * n
    seconds = plan.rounds * plan.active * (3e-4 * samples / min(plan.batch_size, n) + 6 * d * samples / 5e10)
    return work.flat.device.type == "cpu" and plan.engine != "block" and seconds > 10
