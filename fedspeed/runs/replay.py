"""Replay of one client's turn in one round, step by step: from the nearest checkpoint, in a temporary folder."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import nn

from ..client.block_check import row as row_of
from ..client.engines import make_engine
from ..client.hooks import Hooks
from ..client.trees import one_thread, sum_dtype
from ..client.upload_digest import upload_digests
from ..client.work import Failed, Job, Reply, Work
from ..data.federated import Federated
from ..errors import UserError
from ..methods.base import Grad, Local
from ..record import Record
from ..server.round import broadcast, plan_round
from ..server.segments import sibling
from ..server.simulation import Simulation
from ..utils.devices import deterministic, preserve_rng
from ..utils.files import key, scratch
from ..utils.random import batch_order
from .binary_files import read_uploads, upload_mismatches
from .checkpoint import Checkpoints, load_into, nearest
from .config_file import bound_to, read_config
from .directory import RunDir, is_running
from .launch import prepare
from .verify import round_mismatches


@dataclass(frozen=True)
class Step:
    """One local step."""

    samples: list[int]  # the indices of the minibatch's samples in the training data
    loss: float | None  # at the step's first gradient; None for a step without a gradient
    gradients: list[float]  # the norm of each gradient of the step
    direction: float  # the norm of the step's direction, without weight decay


@dataclass
class Trace:
    """Losses, norms, model, upload and state of one client, as its hooks were called."""

    row: int | None  # the client's row in a block of `rows` clients; None outside of a block
    rows: int
    steps: list[tuple[float | None, list[float], float]] = field(default_factory=list)
    x: torch.Tensor | None = None
    up: Any = None
    client: Any = None

    def own(self, a: torch.Tensor) -> torch.Tensor | None:
        """Return the client's part of an argument of a hook; None if the call is for other clients."""
        if self.row is None:
            return a if a.ndim == 1 else None
        return a[self.row] if a.ndim == 2 and len(a) == self.rows else None


class Traced(Hooks):
    """Hooks that write into a trace and change nothing."""

    trace: Trace

    @classmethod
    def around(cls, hooks: Hooks, trace: Trace) -> Self:
        """Return the same hooks, traced; they may be of a subclass, as those for running statistics are."""
        both: type[Self] = type(cls.__name__, (cls, type(hooks)), {})
        traced = object.__new__(both)
        traced.__dict__.update(hooks.__dict__)
        traced.trace = trace
        return traced

    def direction(self, x: torch.Tensor, grad: Grad, down: Any, client: Any) -> torch.Tensor:
        """Call `Hooks.direction`, and keep losses and norms."""
        trace, norms = self.trace, list[float]()
        if trace.own(x) is None:
            return super().direction(x, grad, down, client)

        def asked(x: torch.Tensor, fraction: float = 1.0, **teacher: Any) -> torch.Tensor:
            g = grad(x, fraction, **teacher)
            norms.append(_norm(trace.own(g)))
            return g

        direction = super().direction(x, asked, down, client)
        oracle: Any = getattr(grad, "grad", grad)  # A checked block wraps its oracle.
        loss = float(oracle.losses[-1] if trace.row is None else oracle.losses[-1][trace.row]) if norms else None
        trace.steps.append((loss, norms, _norm(trace.own(direction))))
        return direction

    def upload(self, xK: torch.Tensor, down: Any, client: Any, run: Local) -> tuple[Any, Any]:
        """Call `Hooks.upload`, and keep its results."""
        trace = self.trace
        own = trace.own(xK)
        if own is None:
            return super().upload(xK, down, client, run)
        trace.x = own.clone()
        up, kept = super().upload(xK, down, client, run)
        trace.up, trace.client = (row_of(tree, trace.row or 0) for tree in (up, kept))
        return up, kept


def _norm(a: torch.Tensor | None) -> float:
    return 0.0 if a is None else float(torch.linalg.vector_norm(a, dtype=sum_dtype(a)))


@dataclass
class Replay:
    """A turn that was run again."""

    run: str
    round: int  # 1 is the first
    client: int
    began: int  # the rounds done where the computation began: at a checkpoint, or 0
    lr: float  # the local rate
    engine: str  # the arithmetic, `loop` or `block`
    beside: list[int]  # the clients that shared its block
    labels: list[int] | None  # the client's number of samples per class; None without classes
    steps: list[Step]
    x: torch.Tensor | None  # the client's model at the end of its turn, a vector; None if it failed
    upload: Any
    state: Any  # the client's new state
    digest: str | None  # of the upload
    recorded: str | None  # the digest that the run recorded; None if there is none
    error: str = ""  # of a client that failed; "" otherwise
    # Differences in the rounds that were run again before; none if well.
    unlike: list[str] = field(default_factory=list)
    module: nn.Module | None = None

    @property
    def matches(self) -> bool | None:
        """Whether the upload is the one that the run counted, bit for bit; None if the run recorded none."""
        return None if self.recorded is None or self.error else self.digest == self.recorded

    @property
    def model(self) -> nn.Module:
        """The client's model at the end of its turn, in evaluation mode."""
        if self.module is None:
            raise UserError(f"client {self.client} has no model of round {self.round}: {self.error}")
        return self.module

    def to_dict(self) -> dict[str, Any]:
        """Return everything but the tensors, as JSON takes it."""
        tensors = ("x", "upload", "state", "module")
        plain = {name: value for name, value in vars(self).items() if name not in (*tensors, "steps")}
        return {**plain, "matches": self.matches, "steps": [asdict(step) for step in self.steps]}


def replay(
    run: Path | str | Simulation,
    round: int,
    client: int,
    *,
    backend: str = "",
    allow_code: bool = False,
    progress: Callable[[str, int, int], None] | None = None,
) -> Replay:
    """Run one client's turn again, exactly. The run directory is only read.

    Rounds since the nearest checkpoint before it (or since round 0) are run again first. The last possible round is the
    one after the recorded ones: where a run diverged, for example.

    Args:
        run: a run directory; for a run of objects, the simulation with this directory as `out`.
        round: 1 is the first.
        client: one of the cohort of the round.
        backend: the back end for the rounds before; the config's own if "". The turn itself runs in this process.
        allow_code: also if the directory's config names Python files, which are then executed.
        progress: called with (what, done, total).

    Example:
        >>> replay("runs/a", round=1, client=0)  # doctest: +IGNORE_EXCEPTION_DETAIL
        Traceback (most recent call last):
        fedspeed.errors.UserError: runs/a holds no run
    """
    with ExitStack() as stack:
        again, files, records = _again(stack, run, round, backend, allow_code, progress)
        if round <= len(records) and client not in records[round - 1].cohort:
            raise _absent(round, records[round - 1].cohort, client)
        sent = read_uploads(files)
        different: list[str] = []
        began = again.t
        while again.t < round - 1:
            if progress:
                progress("rounds run again", again.t - began, round - 1 - began)
            done = again.advance()
            t = done.record.round
            different += round_mismatches(done.record, records[t - 1])
            different += upload_mismatches(sent.get(t, {}), done.uploads, t)
        by = again.next_runner()
        chunk = _chunk(by, client)
        trace, reply = _turn(by, chunk, client)
        job, noted = reply.job, sent.get(round, {}).get(client)
        error = str(reply.error) if isinstance(reply, Failed) else ""
        x, up, state = (None, None, None) if error else (trace.x, trace.up, trace.client)
        return Replay(
            run=str(files.path), round=round, client=client, began=began, lr=job.lr, engine=by.plan.engine,
            beside=[other.client for other in chunk if other.client != client], labels=_labels(by.work.data, client),
            steps=_steps(by.work, job, trace), x=x, upload=up, state=state,
            digest=None if error else f"{upload_digests(up)[0]:016x}",
            recorded=None if noted is None else f"{noted:016x}",
            error=error, unlike=different, module=None if x is None else _module(by.work, x),
        )  # fmt: skip


def _again(
    stack: ExitStack,
    run: Path | str | Simulation,
    round: int,
    backend: str,
    allow_code: bool,
    progress: Callable[[str, int, int], None] | None,
) -> tuple[Simulation, RunDir, list[Record]]:
    """Return a simulation at the nearest checkpoint before a round, the run's directory and its records."""
    given = run if isinstance(run, Simulation) else None
    where = given.out if given is not None else Path(str(run))
    if where is None:
        raise UserError("replay: expected a run with a directory, found a simulation without out=; give it one")
    files = RunDir(where)
    plan = given.plan if given is not None else read_config(where, allow_code)
    records = files.records()
    last = min(len(records) + 1, plan.rounds)
    if type(round) is not int or not 1 <= round <= last:
        raise UserError(f"round: expected one of {where}, 1 to {last}, found {round!r}")
    if stack.enter_context(is_running(where)):
        raise UserError(f"{where} is in progress; replay a turn when it has ended or was stopped")
    saved = nearest(files, round - 1)
    few = saved is not None and saved.t == round - 1
    plan = replace(plan, backend=backend or ("serial" if few else plan.backend))
    states = RunDir(stack.enter_context(scratch("fedspeed-replay-"))).states
    if given is not None:
        again = stack.enter_context(sibling(given, given.method, plan, folder=states))
    else:
        again = stack.enter_context(prepare(plan, progress, states))  # type: ignore[arg-type]
    if saved is not None:
        Checkpoints(where).check(saved, bound_to(where, again))
        load_into(files, saved, again, records)
    return again, files, records


def _chunk(by: Simulation, client: int) -> list[Job]:
    """Return the jobs that the engine computes together with a client's in the next round."""
    turn = plan_round(by.work, by.t, by.cohort)
    for chunk in make_engine(by.work).chunks(turn.jobs):
        if any(job.client == client for job in chunk):
            return chunk
    if client in turn.lost:
        raise UserError(f"client {client} was lost in round {by.t + 1} (dropout): it had no turn that was counted")
    raise _absent(by.t + 1, turn.active, client)


def _absent(round: int, cohort: Sequence[int], client: int) -> UserError:
    active = ", ".join(str(i) for i in cohort[:10]) + (", ..." if len(cohort) > 10 else "")
    return UserError(f"client: expected one that was active in round {round} ({active}), found {client!r}")


def _turn(by: Simulation, chunk: list[Job], client: int) -> tuple[Trace, Reply | Failed]:
    """Run a turn by the run's own engine, with the other clients of its block; return its trace and the reply."""
    at = [job.client for job in chunk].index(client)
    trace = Trace(at if by.plan.engine == "block" else None, len(chunk))
    work = replace(by.work)
    work.__dict__["hooks"] = Traced.around(by.work.hooks, trace)
    engine, down = make_engine(work), broadcast(by, by.work.at(by.t))
    device = work.flat.device
    with one_thread(), preserve_rng(device), deterministic(device):
        reply = engine.run(chunk, down, by.client_state)[at]
    if trace.up is None and len(chunk) > 1:  # The block failed, and was run client by client.
        return _turn(by, [chunk[at]], client)
    return trace, reply


def _labels(data: Federated, client: int) -> list[int] | None:
    if data.classes is None or data.y.is_floating_point() or data.y.ndim != 1:
        return None
    own = data.y.cpu().numpy()[data.rows(client)]
    return [int(n) for n in np.bincount(own, minlength=data.classes)]


def _steps(work: Work, job: Job, trace: Trace) -> list[Step]:
    """Return the traced steps, each with its minibatch."""
    rows = work.data.rows(job.client)
    drawn = key(work.plan.seed, "batches", job.t, job.client)
    order = batch_order(len(rows), work.plan.batch_size, job.K or work.local_steps(len(rows)), drawn)
    return [Step(rows[at].tolist(), *seen) for at, seen in zip(order, trace.steps, strict=False)]


def _module(work: Work, x: torch.Tensor) -> nn.Module:
    work.flat.load(x)
    try:
        return copy.deepcopy(work.flat.model).eval()
    finally:
        work.flat.load(work.flat.x)
