"""The round loop: a `Simulation` is an iterable of round records. `round.py` computes each round."""

from __future__ import annotations

import dataclasses
import inspect
import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Protocol, Self

import torch
from torch import nn

from ..backends import CustomBackend, open_backend
from ..client.batch_norm import full_vector
from ..client.failures import made_nan
from ..client.flat_model import Loss, flat_model
from ..client.hooks import require_hooks
from ..client.losses import bce, fitting_loss, has_accuracy, loss_name, require_outputs
from ..client.trees import all_finite, sum_dtype, tree_map
from ..client.work import Work
from ..config.config import Config
from ..config.plan import Plan
from ..config.presets import paper_decay
from ..config.spec import in_force, one_line
from ..config.stopping import Stopping, require_scores
from ..data.federated import Federated
from ..errors import UserError
from ..methods.base import Method
from ..record import Record
from ..utils.devices import pick_device
from ..utils.notebook import card
from ..utils.processes import delay_signals
from .client_metrics import ClientMetrics
from .cohort import Cohort
from .health import HealthMonitor
from .observers import Observers
from .round import RoundResult, compute_round
from .segments import Segments
from .simulated_time import Meter
from .states import ClientStates, DiskStates, StateReader, choose_states


class Recorder(Protocol):
    """A recorder writes the rounds of a run as they are computed; see `runs/recorder.py`."""

    out: Path
    config: Config
    records: list[Record]

    def session(self, run: Simulation) -> AbstractContextManager[Callable[[RoundResult], None] | None]:
        """Lock the directory while rounds are computed, and write how they ended.

        Returns:
            A function that writes a round, to be called before observers see the round; None if the run is over.
        """

    def failed(self, error: BaseException) -> None:
        """Write the error that ended the rounds: a `for` loop drops its iterator before the error is known."""


class Simulation:
    """A run in progress; `for record in simulation` does the rounds that are left."""

    def __init__(
        self,
        method: Method,
        model: nn.Module,
        data: Federated,
        plan: Plan,
        loss: Loss | None = None,
        no_decay: Sequence[str] = (),
        folder: Path | None = None,
        observers: Observers | None = None,
        states: ClientStates | DiskStates | None = None,
        place: CustomBackend | None = None,
        new: bool = False,
    ) -> None:
        fitting = fitting_loss(loss, data)
        plan = fitting_plan(plan, data, method, has_accuracy(data, fitting))
        require_hooks(method)
        plan.require(method)
        plan.require_clients(method, data.clients)
        self.cohort = Cohort(plan, data.sizes)
        device = pick_device(plan.device)
        flat = flat_model(model, data, plan, device, no_decay, method)
        self.method = method
        self.data = data
        self.t = 0
        self.client_metrics: ClientMetrics | None = None  # of the last round, if it was measured
        self.x0 = flat.x
        self.recorder: Recorder | None = None  # writes the rounds to a run directory, if there is one
        self._records: list[Record] = []  # of a run without a directory
        self.cause: BaseException | None = None  # why the rounds were ended from outside
        self._going: Callable[[], Generator[Record, None, None] | None] = lambda: None
        self.observers = Observers() if observers is None else observers
        work = Work(method, flat, fitting, data.to(device, flat.dtype), plan)
        if new:  # A run that is continued was tried when it began; a server of devices has no sample.
            require_outputs(work, loss is not None)
        stored = None if plan.state_dtype == "same" else getattr(torch, plan.state_dtype)
        self._first = work.hooks.init_client(self.x0)  # the first state of every client: it depends on x^0 alone
        touched = min(data.clients, plan.active * plan.rounds)
        self.states = choose_states(plan.states, self._first, touched, folder, stored) if states is None else states
        self.server = work.hooks.init_server(self.x0.to(sum_dtype(device), copy=True))
        if not all_finite(self.server) and all_finite((self.x0,)):
            raise made_nan(method, "init_server", "the server's first state")
        self.backend, self.placement, self.workers, self.work = open_backend(work, self.states, place)
        self.plan, self.health = self.work.plan, HealthMonitor(self.work, self.x0)
        self.meter = Meter(work) if plan.network else None
        self.elapsed, self.stopping = 0.0, Stopping(self.plan)  # virtual seconds so far; the stopping rules
        self.segments = Segments(self) if getattr(plan, "until", ()) else None  # the first rounds of a fork
        self.total_weight = float(data.sizes.sum()) if plan.weighting == "samples" else float(data.clients)

    @property
    def x(self) -> torch.Tensor:
        """The server's model as one vector, in the model's dtype."""
        x: torch.Tensor = self.server.x
        return x.to(self.work.flat.dtype, copy=True)

    @property
    def model(self) -> nn.Module:
        """The module at the current vector, in evaluation mode; the simulation's own, copy it to keep it."""
        self.work.flat.load(full_vector(self.server).to(self.work.flat.dtype, copy=True))
        return self.work.flat.model.eval()

    @property
    def ended(self) -> str:
        """`finished`, or `stopped: ...` with the reason of a stopping rule; "" while rounds are left."""
        return "finished" if self.t >= self.plan.rounds else self.stopping.status

    @property
    def data_settings(self) -> dict[str, str]:
        """The settings that the data decide: the augmentation of pictures, the loss, and what an accuracy is of."""
        labels = {"accuracy": "per label"} if self.work.loss is bce else {}
        return {
            "augment": self.data.pipeline.augmentation,
            "loss": loss_name(self.work.loss).partition(":")[2],
            **labels,
        }

    @property
    def settings(self) -> str:
        """The settings in force, in one line."""
        decay = self.plan.lr_decay or paper_decay(self.method)
        return one_line(
            in_force(self.plan.fields() | {"lr_decay": decay, "clients": self.data.clients}, self.data_settings)
        )

    @property
    def out(self) -> Path | None:
        """The run's directory, if it has one."""
        return self.recorder.out if self.recorder else None

    def __repr__(self) -> str:
        flat, data, plan = self.work.flat, self.data, self.plan
        return (
            f"<Simulation: {self.method}, {type(flat.model).__name__} with "
            f"{flat.size}, {data.name} {data.split} over {data.clients} clients, round {self.t} of "
            f"{plan.rounds}{f' ({self.stopping.status})' if self.stopping.status else ''}, engine {plan.engine}, "
            f"back end {self.placement}>"
        )

    @property
    def records(self) -> list[Record]:
        """The rounds so far; with a directory also those before it was resumed."""
        return self.recorder.records if self.recorder else self._records

    def _repr_html_(self) -> str:
        about = repr(self).strip("<>")
        facts = {"settings": self.settings} | ({"directory": self.out} if self.out else {})
        last = self.records[-1].to_dict() if self.records else {}
        facts |= {key: last[key] for key in ("test_accuracy", "test_loss", "train_loss") if last.get(key) is not None}
        return card(about, facts, self.records)

    def __iter__(self) -> Iterator[Record]:
        """Return an iterator over the rounds that are left; the one in use, if its rounds are in progress.

        If the caller leaves it early, by `break` for example, the run is `interrupted`; with a directory it can be
        resumed.
        """
        going = self._going()
        if going is None or inspect.getgeneratorstate(going) == inspect.GEN_CLOSED:
            going = self._rounds()
            self._going = weakref.ref(going)
        return going

    def _rounds(self) -> Generator[Record, None, None]:
        """Run the rounds: the one loop, with a run directory and without."""
        self.cause = None
        with self.recorder.session(self) if self.recorder else self._unrecorded() as write:
            if write is None:  # The run is over.
                return
            self.stopping.begin()
            self.observers.started(self)
            while not self.ended:
                result = self.advance()
                write(result)  # Observers may only see rounds that are in the files of the run.
                self.observers.tell("round", result.record, self)
                yield result.record
        self.backend.close()

    @contextmanager
    def _unrecorded(self) -> Iterator[Callable[[RoundResult], None]]:
        """Replace a recorder: write nothing, and report to the observers how the rounds end."""
        try:
            yield lambda _: None
        except BaseException as error:
            self.observers.over(self, error if self.cause is None else self.cause)
            raise
        self.observers.over(self, None)

    def step(self) -> Record:
        """Run one round, and record it if the run has a directory; see `advance`."""
        if self.recorder is None:
            record = self.advance().record
            self.observers.tell("round", record, self)
            return record
        for record in self:
            return record
        raise UserError(f"no rounds are left ({self.ended}); simulate(..., resume=True) takes more, or other rules")

    def advance(self) -> RoundResult:
        """Run one round, in memory only.

        If it raises, server and client states are as before it. Ctrl-C leaves them as before or as after it, never
        between.
        """
        self.observers.started(self)
        try:
            result = compute_round(self.next_runner())
        except BaseException:
            self.states.discard()
            raise
        with delay_signals():  # Client states and server must be of the same round, whenever a signal arrives.
            self.states.commit()
            self.server, self.t = result.server, result.record.round
            self.elapsed, self.client_metrics = result.record.virtual_seconds or 0.0, result.client_metrics
            self.stopping.update(result.record)
            if self.cohort.history is not None:
                self.cohort.history.add(result.record)
            if self.recorder is None:
                self._records.append(result.record)
        return result

    def next_runner(self) -> Simulation:
        """Return the simulation that computes the next round: itself, or in a segment of a fork its sibling."""
        return self if self.segments is None else self.segments.next()

    def client_state(self, client: int) -> Any:
        """Return a private copy of a client's state; before its first turn it is made from x^0."""
        kept = self.states.get(client)
        if kept is None:
            return tree_map(torch.clone, self._first)
        return tree_map(lambda a: a.to(self.work.flat.device), kept)

    @property
    def state_reader(self) -> StateReader:
        """The function that back ends call for the state of a client: `client_state`, or a block's states at once."""
        return StateReader(self.client_state, self.states, self._first)

    def restore(self, t: int, server: Any, elapsed: float | None) -> None:
        """Take over the server after t rounds, of a checkpoint or a segment, and their virtual seconds if simulated.

        Client states are restored by `states` itself, what a user's sampler may know by `cohort.history`.
        """
        self.t, self.server = t, tree_map(lambda a: a.to(self.work.flat.device), server)
        self.elapsed = elapsed or 0.0

    def end_rounds(self, error: BaseException | None = None) -> None:
        """End the rounds in progress, if any; `error` is the error that stopped them."""
        going = self._going()
        if going is not None:
            self.cause = error
            going.close()
        elif error is not None and self.recorder is not None:
            self.recorder.failed(error)

    def close(self, error: BaseException | None = None) -> None:
        """Stop worker processes and remove temporary files; a run directory gets its summary, which names the error."""
        self.end_rounds(error)
        self.observers.over(self, error)
        if self.segments is not None:
            self.segments.close()
        self.backend.close()
        self.states.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        self.close(error)


def fitting_plan(plan: Plan, data: Federated, method: Method, accuracy: bool) -> Plan:
    """Return the plan with its cohort's size; raise for data or a method that do not fit it, or a score (`accuracy`)
    that models do not have."""
    plan.require_schedules(method, paper_decay(method))
    plan = dataclasses.replace(plan, active=plan.cohort_size(data.clients))
    if data.sizes.min() < 1:
        raise UserError(f"data: every client needs at least one sample; client {int(data.sizes.argmin())} has none")
    test, validation = (rows is not None and len(rows) > 0 for rows in (data.y_test, data.validation))
    require_scores(plan, test, validation, accuracy)
    if plan.personal_steps and data.client_test is None:
        raise UserError(
            "client_metrics: personalised expects a test part per client, found none: a model that was tuned on a "
            "client's data is not scored on the same data; add one, --client-test 0.2 (load_data(..., client_test=0.2))"
        )
    return plan
