"""Whether a run directory is what its run made: digests, running sums, and rounds run again, bit for bit."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .config import Config
from .errors import Diverged, UserError
from .run import environment, prepare, summarise
from .runconfig import read_config
from .rundir import finished, read_records, read_summary

if TYPE_CHECKING:
    from .checkpoint import Checkpoints, Saved
    from .method import Method
    from .server import Record, Simulation

TIMES = ("seconds", "eval_seconds")
"""Fields of a record that no re-run can repeat."""


@dataclass
class Verification:
    """What was found.

    Args:
        held: what was checked and holds, one line each.
        broken: what does not, one line each.
        checked_on: back end, versions and hardware the rounds were run again on.
        differs: what of it is not the run's own, name -> (the run's, here); None if the run did not say.
    """

    held: list[str] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    checked_on: dict[str, Any] = field(default_factory=dict)
    differs: dict[str, tuple[Any, Any]] | None = None

    def note(self, what: str, wrong: list[str]) -> None:
        """Count a check: it holds if nothing is wrong."""
        self.broken += wrong
        if not wrong:
            self.held.append(what)


def verify(
    run: Path,
    *,
    every_round: bool = False,
    backend: str = "",
    allow_code: bool = False,
    progress: Callable[[str, int, int], None] | None = None,
) -> Verification:
    """Check a run directory, which is only read.

    Args:
        run: the run directory, finished or not.
        every_round: run all rounds again from round 0, not only those after the last checkpoint but one.
        backend: run them on this back end; the config's own if "".
        allow_code: also if the directory's config names Python files, which are then executed.
    """
    from .checkpoint import Checkpoints

    config = read_config(run, allow_code)
    records = read_records(run)
    checkpoints = Checkpoints(run)
    if not checkpoints.manifests() and not (every_round and records):
        raise UserError(f"{run} holds no checkpoint yet: nothing to verify; `fedspeed resume {run}` goes on with it")
    found = Verification()
    done = finished(run)
    if done is not None and done["rounds"] < config.rounds:
        found.held.append(
            f"finished with {done['rounds']} rounds, {config.rounds} are asked for: `fedspeed resume {run}`"
        )
        config = replace(config, rounds=done["rounds"])
    saved = _digests(checkpoints, found)
    with tempfile.TemporaryDirectory(prefix="fedspeed-verify-") as scratch:
        placed = replace(config, backend=backend or config.backend)
        with prepare(placed, progress, Path(scratch, "states")) as simulation:
            found.checked_on = {
                "back end": type(simulation.backend).__name__.lower(),
                "engine": simulation.plan.engine,
                **environment(simulation.work.flat.device.type),
            }
            made_on = read_summary(run).get("environment")
            if isinstance(made_on, dict):
                here = found.checked_on
                found.differs = {k: (v, here[k]) for k, v in made_on.items() if k in here and v != here[k]}
            try:
                for one in saved:
                    _sums(run, one, simulation, records, found)
                _results(run, config, simulation, records, saved, found)
                if every_round:
                    _again(run, simulation, None, saved, records, found)
                elif saved:
                    _again(run, simulation, saved[1] if len(saved) > 1 else None, saved[:1], records, found)
            except UserError as error:  # a file with the right digest that does not fit the config
                found.broken.append(str(error))
    return found


def _digests(checkpoints: Checkpoints, found: Verification) -> list[Saved]:
    """The checkpoints whose files all have their digests, newest first."""
    good = []
    for path in checkpoints.manifests():
        try:
            good.append(checkpoints.read(path))
            found.held.append(f"digests of the checkpoint of round {path.stem}: {len(good[-1].generations) + 1} files")
        except UserError as error:
            found.broken.append(str(error))
    return good


def _sums(run: Path, saved: Saved, simulation: Simulation, records: list[Record], found: Verification) -> None:
    """What the server keeps as a mean over all clients, against the mean of what the clients keep."""
    import torch

    from .states import read_state

    kept = running_sum(simulation.method)
    if kept is None:
        return
    mean_of, is_at = kept
    sizes, method, x0 = simulation.data.sizes, simulation.method, simulation.x0.cpu()
    weights = sizes / sizes.sum() if simulation.plan.weighting == "samples" else 0 * sizes + 1 / len(sizes)
    start = method.init_client(x0)
    at_first = getattr(getattr(start, "base", start), mean_of).double()
    value = getattr(read_state(saved.server, simulation.server), is_at)
    mean, largest, turns = torch.zeros_like(at_first), float(value.abs().max()), 0.0
    for i in range(len(sizes)):
        state = at_first
        if i in saved.generations:
            kept_state = read_state(run / "states" / f"{i}@{saved.generations[i]}", start)
            state = getattr(getattr(kept_state, "base", kept_state), mean_of).double()
        mean += float(weights[i]) * state
        largest = max(largest, float(state.abs().max()))
        turns += float(weights[i]) * sum(i in record.cohort for record in records[: saved.t])
    stored = x0.dtype if simulation.plan.state_dtype == "same" else getattr(torch, simulation.plan.state_dtype)
    limit = 16 * torch.finfo(stored).eps * largest * (1 + turns)  # each turn of a client rounds its state once
    off = float((mean - value.double()).abs().max())
    said = f"round {saved.t}: the server's {is_at} is the mean of all clients' {mean_of}"
    wrong = f"{said}: off by {off:.3g}, rounding explains {limit:.3g}; a state or the server's vector was changed"
    found.note(f"{said} (off by {off:.1g}, rounding)", [] if off <= limit else [wrong])


def running_sum(method: Method) -> tuple[str, str] | None:
    """(field of the client, field of the server that is its mean over all clients), or None if there is none.

    Example:
        >>> from fedspeed.methods import METHODS
        >>> running_sum(METHODS["scaffold"]()), running_sum(METHODS["fedavg"]())
        (('c', 'c'), None)
    """
    from .methods import FedADMM, FedDyn, FedGamma, FedInit, FedSMOO, FedSpeed, Scaffold

    base = method.base if isinstance(method, FedInit) else method
    if isinstance(base, FedADMM):
        return ("xh", "x") if base.variant == "wang" else None
    if isinstance(base, FedSpeed):
        return ("h", "H") if base.correction and base.server == "all" else None
    if isinstance(base, Scaffold | FedGamma):
        return ("c", "c")
    return ("h", "H") if isinstance(base, FedDyn | FedSMOO) else None


def _results(
    run: Path, config: Config, simulation: Simulation, records: list[Record], saved: list[Saved], found: Verification
) -> None:
    """The summary against the rounds, the model against the last checkpoint."""
    from .inspection import load_vector
    from .states import read_state

    summary = read_summary(run)
    if not summary:
        if (run / "summary.json").exists():
            found.broken.append("summary.json cannot be read")
        return
    told = summarise(config, simulation, records, summary.get("status", ""))
    wrong = [
        f"summary.json: {key} is {summary[key]!r}, the rounds and the data say {told[key]!r}"
        for key in told
        if key != "environment" and key in summary and summary[key] != told[key]
    ]
    found.note("summary.json follows from config, data and rounds", wrong)
    if summary["status"] == "finished":
        short = [f"rounds.jsonl holds {len(records)} rounds, config.toml says {config.rounds}"]
        found.note("all rounds are there", [] if len(records) == config.rounds else short)
    if saved and saved[0].t == summary["rounds"] and (run / "model.safetensors").is_file():
        x = read_state(saved[0].server, simulation.server).x.to(simulation.x0.dtype)
        try:
            same = bool((load_vector(simulation.work.flat, run / "model.safetensors").cpu() == x).all())
            wrong = [] if same else [f"model.safetensors is not the model of the checkpoint of round {saved[0].t}"]
        except UserError as error:
            wrong = [str(error)]
        found.note("model.safetensors is the last checkpoint's model", wrong)


def _again(
    run: Path,
    simulation: Simulation,
    start: Saved | None,
    ends: list[Saved],
    records: list[Record],
    found: Verification,
) -> None:
    """Run rounds again from a checkpoint (None: from round 0) and compare records, and vectors where there are some."""
    from .states import read_state

    if start is not None:
        _link_states(run, start, simulation)
        like = simulation.method.init_client(simulation.x0)
        simulation.states.restore(run / "states", like, start.generations)
        simulation.restore(start.t, read_state(start.server, simulation.server))
    first, goals = simulation.t, {one.t: one for one in ends if one.t > simulation.t}
    last = max(goals, default=min(len(records), simulation.plan.rounds))
    wrong: list[str] = []
    try:
        while simulation.t < last:
            record = simulation.step()
            before = records[record.round - 1] if record.round <= len(records) else None
            wrong += _unlike(record, before)
            if record.round in goals:
                wrong += list(_other_bits(run, simulation, goals[record.round]))
    except (UserError, Diverged) as error:
        wrong.append(f"round {simulation.t + 1} cannot be run again: {error}")
    rounds = f"round {last}" if last == first + 1 else f"rounds {first + 1} to {last}"
    found.note(f"{rounds} run again: the same bits", wrong)


def _link_states(run: Path, saved: Saved, simulation: Simulation) -> None:
    """States kept on disk are read where they are, and written into the scratch folder."""
    from .states import DiskStates

    if isinstance(simulation.states, DiskStates):
        simulation.states.folder.mkdir(parents=True, exist_ok=True)
        for i, t in saved.generations.items():
            os.symlink((run / "states" / f"{i}@{t}").resolve(), simulation.states.path(i, t))


def _unlike(again: Record, before: Record | None) -> list[str]:
    """How a round that was run again differs from its record."""
    if before is None:
        return [f"round {again.round} is missing in rounds.jsonl"]
    new, old = again.to_dict(), before.to_dict()
    return [
        f"round {again.round}: {key} is {old.get(key)!r} in rounds.jsonl, run again it is {new.get(key)!r}"
        for key in new | old
        if key not in TIMES and old.get(key) != new.get(key)
    ]


def _other_bits(run: Path, simulation: Simulation, saved: Saved) -> Iterator[str]:
    """What of a checkpoint differs from where a simulation stands."""
    from .states import read_state
    from .vec import tree_leaves

    server = read_state(saved.server, simulation.server)
    for name, new, old in zip(server._fields, simulation.server, server, strict=True):
        pairs = zip(*(tree_leaves((a,)) for a in (new, old)), strict=True)
        if not all(a.cpu().equal(b) for a, b in pairs):
            yield f"round {saved.t}: the server's {name} in the checkpoint differs from the round run again"
    like = simulation.method.init_client(simulation.x0)
    if simulation.states.generations != saved.generations:
        yield f"round {saved.t}: other clients' states changed than in the round run again"
        return
    for i, t in saved.generations.items():
        old = read_state(run / "states" / f"{i}@{t}", like)
        pairs = zip(tree_leaves(simulation.client_state(i)), tree_leaves(old), strict=True)
        if not all(a.cpu().equal(b) for a, b in pairs):
            yield f"round {saved.t}: the state of client {i} in the checkpoint differs from the round run again"
