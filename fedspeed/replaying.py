"""One client's turn in one round, once more: from the nearest checkpoint, in a folder of its own."""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from .checkpoint import Checkpoints
from .client import Failed, Job, Reply, Work
from .data.federated import Federated
from .devices import exact, own_randomness
from .engines import make_engine
from .errors import UserError
from .jobs import turns
from .locks import scratch
from .record import Record
from .rerun import nearest, stand, unlike
from .run import prepare
from .runconfig import bound_to, read_config
from .rundir import RunDir, beside
from .sampling import batch_order, key
from .server import Simulation
from .stretches import alike
from .trace import Step, Trace, Traced
from .uploads import read_uploads, shown, unlike_uploads, upload_digests
from .vec import one_thread

__all__ = ["Replay", "replay"]


@dataclass
class Replay:
    """A turn that was run again.

    Args:
        run, round, client: which; round 1 is the first.
        began: how many rounds were done where the computation began: at a checkpoint, or 0.
        lr: the local rate.
        engine: the arithmetic, `loop` or `block`; `beside` are the clients that shared its block.
        labels: how many samples of every class the client has; None without classes.
        steps: what happened in each.
        x: the client's model at the end of its turn, a vector; None if it failed.
        upload, state: what it sent and what it keeps.
        digest, recorded: of the upload, and the one that the run noted; None if there is none.
        error: why it failed; "" if it did not.
        unlike: what differs from the run in the rounds that were run again on the way; it should be nothing.
        seconds: where the turn's time went.
        operations: the operators that took longest, `(name, seconds, calls)`, if a profile was asked for.
    """

    run: str
    round: int
    client: int
    began: int
    lr: float
    engine: str
    beside: list[int]
    labels: list[int] | None
    steps: list[Step]
    x: torch.Tensor | None
    upload: Any
    state: Any
    digest: str | None
    recorded: str | None
    error: str = ""
    unlike: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    operations: list[tuple[str, float, int]] = field(default_factory=list)
    module: nn.Module | None = None

    @property
    def matches(self) -> bool | None:
        """Whether the upload is the one that the run counted, bit for bit; None where nothing was noted."""
        return None if self.recorded is None or self.error else self.digest == self.recorded

    @property
    def model(self) -> nn.Module:
        """The client's model at the end of its turn, in evaluation mode."""
        if self.module is None:
            raise UserError(f"client {self.client} has no model of round {self.round}: {self.error}")
        return self.module

    def to_dict(self) -> dict[str, Any]:
        """All but the tensors, as JSON takes it."""
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
    debug: bool = False,
    profile: bool = False,
    progress: Callable[[str, int, int], None] | None = None,
) -> Replay:
    """Run one client's turn again, exactly. The run directory is only read.

    Rounds since the nearest checkpoint before it (or since round 0) are run again first. The last round to ask for is
    the one after those the run has: where it diverged, for example.

    Args:
        run: a run directory, or, where it is of objects given to `simulate`, a simulation that has it as `out`.
        round: 1 is the first.
        client: one of its cohort.
        backend: where those rounds are run; the config's own if "". The turn itself is run in this process.
        allow_code: also if the directory's config names Python files, which are then executed.
        debug: stop in Python's debugger before the first local step.
        profile: run the turn once more to see where its time goes.
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
            done = again.step()
            different += unlike(done, records[done.round - 1])
            different += unlike_uploads(sent.get(done.round), again.uploads.items(), done.round)
        by = again.stretches.next()
        chunk = _chunk(by, client)
        trace, reply, took = _turn(by, chunk, client, debug)
        found = _told(by, chunk, client, trace, reply, took)
        found.run, found.began, found.unlike = str(files.path), began, different
        noted = sent.get(round, {}).get(client)
        found.recorded = None if noted is None else shown(noted)
        if profile and not found.error:
            found.seconds, found.operations = _profiled(by, chunk, client)
        return found


def _again(
    stack: ExitStack,
    run: Path | str | Simulation,
    round: int,
    backend: str,
    allow_code: bool,
    progress: Callable[[str, int, int], None] | None,
) -> tuple[Simulation, RunDir, list[Record]]:
    """A simulation at the nearest checkpoint before a round, the run's directory and its rounds."""
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
    if stack.enter_context(beside(where)):
        raise UserError(f"{where} is in progress; replay a turn when it has ended or was stopped")
    saved = nearest(files, round - 1)
    few = saved is not None and saved.t == round - 1
    plan = replace(plan, backend=backend or ("serial" if few else plan.backend))
    states = RunDir(stack.enter_context(scratch("fedspeed-replay-"))).states
    if given is not None:
        again = stack.enter_context(alike(given, given.method, plan, folder=states))
    else:
        again = stack.enter_context(prepare(plan, progress, states))  # type: ignore[arg-type]
    if saved is not None:
        Checkpoints(where).check(saved, bound_to(where, again))
        stand(files, saved, again, records)
    return again, files, records


def _chunk(by: Simulation, client: int) -> list[Job]:
    """The jobs that are computed together with a client's in the next round."""
    turn = turns(by.work, by.t)
    for chunk in make_engine(by.work).chunks(turn.jobs):
        if any(job.client == client for job in chunk):
            return chunk
    if client in turn.lost:
        raise UserError(f"client {client} was lost in round {by.t + 1} (dropout): it had no turn that was counted")
    raise _absent(by.t + 1, turn.active, client)


def _absent(round: int, cohort: Sequence[int], client: int) -> UserError:
    active = ", ".join(str(i) for i in cohort[:10]) + (", ..." if len(cohort) > 10 else "")
    return UserError(f"client: expected one that was active in round {round} ({active}), found {client!r}")


def _turn(by: Simulation, chunk: list[Job], client: int, debug: bool) -> tuple[Trace, Reply | Failed, float]:
    """A turn by the run's own engine, with the other clients of its block; what was seen, the reply, and seconds."""
    at = [job.client for job in chunk].index(client)
    trace = Trace(at if by.plan.engine == "block" else None, len(chunk), debug)
    work = replace(by.work)
    work.__dict__["hooks"] = Traced.around(by.work.hooks, trace)
    engine, down = make_engine(work), by.down(by.work.at(by.t))
    device = work.flat.device
    with one_thread(), own_randomness(device), exact(device):
        begun = time.perf_counter()
        reply = engine.run(chunk, down, by.client_state)[at]
        took = time.perf_counter() - begun
    if trace.up is None and not trace.left and len(chunk) > 1:  # the block failed, and was run client by client
        return _turn(by, [chunk[at]], client, False)
    return trace, reply, took


def _told(by: Simulation, chunk: list[Job], client: int, trace: Trace, reply: Reply | Failed, took: float) -> Replay:
    """What came of a turn."""
    job, data = reply.job, by.work.data
    error = str(reply.error) if isinstance(reply, Failed) else ""
    error = "the debugger was left" if trace.left else error
    done = not error
    digest = shown(upload_digests(trace.up)[0]) if done else None
    return Replay(
        run="", round=job.t + 1, client=client, began=0, lr=job.lr, engine=by.plan.engine,
        beside=[other.client for other in chunk if other.client != client], labels=_labels(data, client),
        steps=_steps(by.work, job, trace), x=trace.x if done else None, upload=trace.up if done else None,
        state=trace.client if done else None, digest=digest, recorded=None, error=error,
        seconds=_parts(trace, took), module=_module(by.work, trace.x) if done and trace.x is not None else None,
    )  # fmt: skip


def _labels(data: Federated, client: int) -> list[int] | None:
    if data.classes is None or data.y.is_floating_point() or data.y.ndim != 1:
        return None
    own = data.y.cpu().numpy()[data.rows(client)]
    return [int(n) for n in np.bincount(own, minlength=data.classes)]


def _steps(work: Work, job: Job, trace: Trace) -> list[Step]:
    """The steps that were seen, each with its minibatch."""
    rows = work.data.rows(job.client)
    drawn = key(work.plan.seed, "batches", job.t, job.client)
    order = batch_order(len(rows), work.plan.batch_size, job.K or work.local_steps(len(rows)), drawn)
    return [Step(rows[at].tolist(), *seen) for at, seen in zip(order, trace.steps, strict=False)]


def _parts(trace: Trace, took: float) -> dict[str, float]:
    return {**trace.seconds, "batches and steps": max(0.0, took - sum(trace.seconds.values())), "all": took}


def _module(work: Work, x: torch.Tensor) -> nn.Module:
    work.flat.load(x)
    try:
        return copy.deepcopy(work.flat.model).eval()
    finally:
        work.flat.load(work.flat.x)


def _profiled(by: Simulation, chunk: list[Job], client: int) -> tuple[dict[str, float], list[tuple[str, float, int]]]:
    """Where a turn's time goes: its parts, and the operators that take longest, each from a run of its own."""
    trace, _, took = _turn(by, chunk, client, False)
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or it writes lines of its own to stderr
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        _turn(by, chunk, client, False)
    found = sorted(seen.key_averages(), key=lambda one: -one.self_cpu_time_total)
    return _parts(trace, took), [(one.key, one.self_cpu_time_total / 1e6, one.count) for one in found[:12]]
