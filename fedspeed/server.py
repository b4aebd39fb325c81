"""The round loop: `simulate` is an iterable of round records."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import nn

from .backends import Place, open_backend
from .blame import made_nan, server_blamed
from .carried import of_method, whole
from .client import Work
from .clientmetrics import ClientMetrics
from .collecting import collect, sent, weight
from .contract import require_hooks
from .data.federated import Federated
from .data.required import federated
from .errors import UserError
from .given import described, fitting_plan, flat_model, given_method, given_model, given_plan, pick_device, require_loss
from .interrupts import together
from .jobs import turns
from .losses import fitting_loss, loss_name, require_outputs
from .metering import Meter
from .method import Method, Round
from .metrics import average, merged, norms, steps_of
from .observe import Observer, Observers
from .plan import Plan
from .presets import paper_decay
from .record import Record
from .scoring import score_round
from .settings import in_force, one_line
from .states import ClientStates, DiskStates, choose_states, settle
from .stopping import Stopping
from .stretches import Stretches
from .symptoms import Symptoms, server_diverged
from .uploads import Uploads
from .vec import Loss, accurate, all_finite, distance, one_thread, tree_bytes, tree_map

if TYPE_CHECKING:
    from .recording import Recording


def simulate(
    method: Method | type[Method] | str,
    model: nn.Module | Callable[[], nn.Module] | str,
    data: Federated,
    plan: Plan | None = None,
    *,
    loss: Loss | None = None,
    no_decay: Sequence[str] = (),
    out: Path | str | None = None,
    resume: bool = False,
    observers: Sequence[Observer | str] = (),
    **settings: Any,
) -> Simulation:
    """Train `model` over the clients of `data`; iterate to run the rounds.

    Args:
        method: for example `FedSpeed(lam=10, rho=0.1)`; a class or a name, `"fedspeed"`, takes its defaults.
        model: any module; a copy of it is trained, its parameters are x^0. A name of `MODELS`, or a class without
            arguments, is built from the seed.
        data: who owns what; `load_data` and `Federated.from_arrays` make it.
        plan: how to train; every keyword of `Plan` may also be given as `settings`.
        loss: `loss(model(x), y)`, the mean over a batch; by default cross-entropy for classes, the squared error for
            floating targets.
        no_decay: names, or ends of names, of parameters without weight decay.
        out: a run directory to write while you iterate; however that ends, the run can be resumed.
        resume: continue the run in `out`, if there is one, which must have these very arguments; it ends
            with the same bits as without a break. With more `rounds`, as if it had had them from the start.
        observers: called as it proceeds, `fedspeed.Observer`s or their names.

    Returns:
        A `Simulation`: an iterable of `Record`s with the current vector `.x`, `.model`, `.server` and `.states`.

    Example:
        >>> import fedspeed
        >>> data = fedspeed.load_data("digits", split="dirichlet:0.3", clients=50)
        >>> model = fedspeed.build_model("linear", data)
        >>> run = simulate(fedspeed.FedSpeed(), model, data, rounds=2, active=5, batch_size=10)
        >>> [record.round for record in run]
        [1, 2]
    """
    watching = Observers(observers)
    plan, data = given_plan(plan, settings), federated(data)
    require_loss(loss)
    module = given_model(model, data, plan.seed)
    make = partial(Simulation, given_method(method), module, data, plan, loss, no_decay, observers=watching)
    if out is None and not resume:
        return make()
    from .givenrun import recorded

    return recorded(out, resume, make, module)


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
        place: Place | None = None,
    ) -> None:
        plan = fitting_plan(plan, data, method)
        require_hooks(method)
        plan.require(method)
        method.check(plan.lr, plan.active if plan.cohort == "fixed" else 1, data.clients)
        device = pick_device(plan.device)
        fitting = fitting_loss(loss, data)
        flat = flat_model(model, data, plan, device, no_decay, method)
        self.method = method
        self.data = data
        self.t = 0
        self.client_metrics: ClientMetrics | None = None  # of the last round, if it was one to measure
        self.uploads: Uploads = {}  # of the last round
        self.x0 = flat.x
        self.recording: Recording | None = None  # what writes the rounds down, if anything does
        self.observers = Observers() if observers is None else observers
        work = Work(method, flat, fitting, data.to(device, flat.dtype), plan)
        if loss is None:
            require_outputs(work)
        stored = None if plan.state_dtype == "same" else getattr(torch, plan.state_dtype)
        self._first = work.hooks.init_client(self.x0)  # every client's: a method sees x^0 alone
        touched = min(data.clients, plan.active * plan.rounds)
        self.states = choose_states(plan.states, self._first, touched, folder, stored) if states is None else states
        self.server = work.hooks.init_server(self.x0.to(accurate(device), copy=True))
        if not all_finite(self.server) and all_finite((self.x0,)):
            raise made_nan(method, "init_server", "the server's first state")
        self.backend, self.placement, self.workers, self.work = open_backend(work, self.states, place)
        self.plan, self.symptoms = self.work.plan, Symptoms(self.work, self.x0)
        self.meter = Meter(work) if plan.network else None
        self.elapsed, self.stopping = 0.0, Stopping(self.plan)  # virtual seconds so far, and what ends the rounds
        self.stretches = Stretches(self)
        self._total = float(data.sizes.sum()) if plan.weighting == "samples" else float(data.clients)

    @property
    def x(self) -> torch.Tensor:
        """The server's model as one vector, in the model's dtype."""
        x: torch.Tensor = self.server.x
        return x.to(self.work.flat.dtype, copy=True)

    @property
    def model(self) -> nn.Module:
        """The module at the current vector, in evaluation mode; the simulation's own, copy it to keep it."""
        self.work.flat.load(whole(self.server).to(self.work.flat.dtype, copy=True))
        return self.work.flat.model.eval()

    @property
    def ended(self) -> str:
        """`finished`, or `stopped: ...` with what a rule of the plan says; "" while rounds are left."""
        return "finished" if self.t >= self.plan.rounds else self.stopping.status

    @property
    def told(self) -> dict[str, str]:
        """The settings that the data decide: what is done to pictures, and the loss."""
        return {"augment": self.data.pipeline.augmentation, "loss": loss_name(self.work.loss).partition(":")[2]}

    @property
    def settings(self) -> str:
        """What the run trains with, in a line."""
        decay = self.plan.lr_decay or paper_decay(self.method)
        return one_line(in_force(self.plan.fields() | {"lr_decay": decay, "clients": self.data.clients}, self.told))

    @property
    def out(self) -> Path | None:
        """The run's directory, if it has one."""
        return self.recording.out if self.recording else None

    def __repr__(self) -> str:
        return described(self)

    def _repr_html_(self) -> str:
        from .report.notebook import show_simulation

        return show_simulation(self)

    def __iter__(self) -> Iterator[Record]:
        return self._rounds() if self.recording is None else self.recording.rounds()

    def _rounds(self) -> Iterator[Record]:
        try:
            self.stopping.begin()
            while not self.ended:
                yield self.step()
        except BaseException as error:
            self.observers.over(self, error)
            raise
        self.observers.over(self, None)
        self.backend.close()

    def step(self) -> Record:
        """One round, written down if the run has a directory; see `advance`."""
        if self.recording is None:
            record = self.advance()
            self.observers.tell("round", record, self)
            return record
        for record in self:
            return record
        raise UserError(f"no rounds are left ({self.ended}); simulate(..., resume=True) takes more, or other rules")

    def advance(self) -> Record:
        """One round, in memory only. If it raises, server and client states are as before it; Ctrl-C leaves them as
        before or as after it, never between."""
        self.observers.started(self)
        try:
            server, record, measured, uploads = self.stretches.next()._round()
        except BaseException:
            self.states.discard()
            raise
        record = self.stopping.stamped(record)
        with together():
            self.states.commit()
            self.server, self.t, self.client_metrics = server, record.round, measured
            self.elapsed, self.uploads = record.virtual_seconds or 0.0, uploads
            self.stopping.see(record)
        return record

    def _round(self) -> tuple[Any, Record, ClientMetrics | None, Uploads]:
        """The server after the next round, its record, what was measured, what was sent; new states are staged."""
        started = time.perf_counter()
        t, plan = self.t, self.plan
        lr, active, lost, jobs = turns(self.work, t)
        work = self.work.at(t)
        down = self.down(work)
        bytes_down = len(active) * tree_bytes(down)
        mean, replies, bytes_up = collect(self, jobs, down, lost, len(active))
        del down  # vectors are large: none is kept longer than it is needed
        K, rate = steps_of(replies, partial(weight, self.plan), mean.weight)
        told = Round(t, mean.weight, self._total, K, lr, plan.seed, len(active), rate)
        with one_thread():  # the bits of a sum depend on the number of threads
            came = mean.result()
            result = work.hooks.received(came, told)
            settle(self.states, work.hooks, result, told)
            server = work.hooks.update(self.server, result, told)
            if not all_finite(server):
                blame = server_blamed(self.method, t, self.server, came, result)
                raise blame or server_diverged(self.method, server, t, lr)
            told_of = merged(self.method, work.hooks.metrics(server, result, told), replies)
            metrics = norms(self.method, of_method(server)) | told_of
            del mean, came, result
            update_norm = distance(server.x, self.server.x)
        trained = time.perf_counter()
        score, validation, measured = score_round(self.backend, self.work, whole(server), t + 1, replies)
        train_loss = average(replies, "train_loss")
        signs = self.symptoms.round(t + 1, server, train_loss, (score, validation))
        evaluated = time.perf_counter()
        record = Record(
            round=t + 1,
            cohort=active,
            lr=lr,
            train_loss=train_loss,
            test_loss=score and score.loss,
            test_accuracy=score and score.known_accuracy,
            drift=average(replies, "drift"),
            update_norm=update_norm,
            bytes_down=bytes_down,
            bytes_up=bytes_up,
            grad_evals=sum(reply.facts.grad_evals for reply in replies),
            dropped=sorted(lost),
            stragglers=sorted(reply.job.client for reply in replies if reply.job.K),
            seconds=time.perf_counter() - started - (evaluated - trained),
            eval_seconds=evaluated - trained,
            validation_loss=validation and validation.loss,
            validation_accuracy=validation and validation.known_accuracy,
            metrics=metrics,
            signs=signs,
        )
        if self.meter:
            record = self.meter.stamped(record, replies, self.elapsed)
        return server, record, measured, sent(replies)

    def client_state(self, client: int) -> Any:
        """A private copy of a client's state, made from x^0 at first touch."""
        kept = self.states.get(client)
        if kept is None:
            return tree_map(torch.clone, self._first)
        return tree_map(lambda a: a.to(self.work.flat.device), kept)

    def restore(self, t: int, server: Any, elapsed: float | None) -> None:
        """Continue from a checkpoint: t rounds are done, in virtual seconds if they are counted. Client states are put
        back in `states` itself."""
        self.t, self.server = t, tree_map(lambda a: a.to(self.work.flat.device), server)
        self.elapsed = elapsed or 0.0

    def close(self, error: BaseException | None = None) -> None:
        """Stop worker processes and remove temporary files, if there are any; a run directory gets its summary, with
        the error that stopped the run if there was one."""
        if self.recording is not None:
            self.recording.close(error)
        self.observers.over(self, error)
        self.stretches.close()
        self.backend.close()
        self.states.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        self.close(error)

    def down(self, work: Work) -> Any:
        """What the server sends, in the model's dtype."""
        return tree_map(lambda a: a.to(work.flat.dtype, copy=True), work.hooks.broadcast(self.server))
