"""Whether a run directory is what its run made: digests, running sums, and rounds run again, bit for bit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open

from ..client.batch_norm import method_part
from ..client.tree_bytes import read_state
from ..client.trees import has_leaves
from ..config.stopping import Stopping
from ..errors import Diverged, UserError
from ..utils.environment import environment
from ..utils.files import SEAL, read_bytes, read_json, read_text, seal_holds
from .config_file import bound_to, read_config
from .directory import CLIENT_METRICS, CONFIG, MODEL, REPORTED, ROUNDS, SPLIT, SUMMARY, RunDir, beside, split_text
from .fork_origin import read_parent
from .launch import prepare
from .model_file import model_tensors
from .summary import digests, summarise

if TYPE_CHECKING:
    from ..config.config import Config
    from ..record import Record
    from ..server.client_metrics import ClientMetrics
    from ..server.simulation import Simulation
    from .checkpoint import Checkpoints, Saved


TRIES = 100


"""How often to look for a checkpoint that a run does not replace in the meantime."""


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
    """Check a run directory without writing to it. Of a run in progress only what no longer changes is checked.

    Args:
        run: the run directory, finished or not.
        every_round: run all rounds again from round 0, not only those after the last checkpoint but one.
        backend: run them on this back end; the config's own if "".
        allow_code: also if the directory's config names Python files, which are then executed.
    """
    from ..utils.locks import scratch
    from .checkpoint import Checkpoints

    config = read_config(run, allow_code)
    found, checkpoints = Verification(), Checkpoints(run)
    files = RunDir(run)
    done = files.finished()
    if done is not None and done["rounds"] < config.rounds:
        asked = f"finished with {done['rounds']} rounds, {config.rounds} are asked for: `fedspeed resume {run}`"
        found.held.append(asked)
        config = replace(config, rounds=done["rounds"])
    with beside(run) as going_on, scratch("fedspeed-verify-") as folder:
        if not checkpoints.manifests() and not (every_round and files.records()):
            cure = "it is in progress, wait a little" if going_on else f"`fedspeed resume {run}` continues it"
            raise UserError(f"{run} holds no checkpoint yet: nothing to verify; {cure}")
        placed = replace(config, backend=backend or config.backend)
        with prepare(placed, progress, RunDir(folder).states) as simulation:
            found.checked_on = {
                "back end": simulation.placement,
                "engine": simulation.plan.engine,
                **environment(simulation.work.flat.device),
            }
            saved = list(_digests(checkpoints, going_on, found))
            records = files.records()  # after the checkpoints, which are of no later rounds
            if going_on:
                upto = len(records) if every_round else max((one.t for one in saved), default=0)
                found.held.append(f"the run is in progress; checked up to round {upto}")
            parent = read_parent(files)
            if parent is not None and len(records) >= parent.at:
                shared = f"the first {parent.at} rounds are those of {parent.folder}"
                found.note(shared, parent.unlike(records))
            for one in saved:
                _checkpoint(checkpoints, one, simulation, records, going_on, found)
            _split(files, simulation, found)
            measured = _measured(files, simulation, len(records), found)
            model_of = 0 if going_on else _results(run, config, simulation, records, saved, found)
            if every_round:
                _again(run, simulation, None, [] if going_on else saved, records, model_of, found, measured)
            elif saved and not going_on:
                start = saved[1] if len(saved) > 1 else None
                _again(run, simulation, start, saved[:1], records, model_of, found, measured)
    return found


def _digests(checkpoints: Checkpoints, going_on: bool, found: Verification) -> Iterator[Saved]:
    """The checkpoints whose files all have their digests, newest first; of a run in progress, only the newest."""
    for path in [] if going_on else checkpoints.manifests():
        try:
            yield _digest(checkpoints, path, found)
        except UserError as error:
            found.broken.append(str(error))
    for _ in range(TRIES if going_on else 0):
        path = checkpoints.manifests()[0]
        try:
            yield _digest(checkpoints, path, found)
        except UserError as error:
            if not path.exists():  # replaced meanwhile: a manifest goes before its files
                continue
            found.broken.append(str(error))
        return


def _digest(checkpoints: Checkpoints, path: Path, found: Verification) -> Saved:
    one = checkpoints.read(path)
    files = sum(bool(entry.digest) for entry in one.entries.values()) + (3 if one.log else 1)
    files += sum(part is not None for part in one.manifest.grown[1:])
    found.held.append(f"digests of the checkpoint of round {path.stem}: {files} files, {len(one.entries)} states")
    return one


def _checkpoint(
    checkpoints: Checkpoints,
    saved: Saved,
    simulation: Simulation,
    records: list[Record],
    going_on: bool,
    found: Verification,
) -> None:
    """A checkpoint against what the run is of, against its rounds, and the server against the clients."""

    try:
        checkpoints.check(saved, bound_to(checkpoints.folder, simulation))
        found.broken += islice(counted(saved, simulation, records), 3)
        said = sums(saved, simulation, records)
        if said:
            found.note(*said)
    except UserError as error:  # a file with the right digest that does not fit the config
        if not going_on or checkpoints.run.manifest_path(saved.t).exists():
            found.broken.append(str(error))


def _measured(files: RunDir, simulation: Simulation, rounds: int, found: Verification) -> ClientMetrics | None:
    """The scores on clients' data, of the rounds that should have some."""

    try:
        measured = files.client_metrics()
    except UserError as error:
        found.broken.append(str(error))
        return None
    if measured is not None or simulation.plan.client_metrics:
        found.note(f"{CLIENT_METRICS} has the rounds to measure", unlike_rounds(measured, simulation, rounds))
    return measured


def _split(files: RunDir, simulation: Simulation, found: Verification) -> None:
    """Compare `split.json` with the data."""

    if files.split_file.exists():
        found.note(f"{SPLIT} is that of the data and the split", unlike_split(files.split_file, simulation))
    else:
        found.held.append(f"{SPLIT} is not there, so it is not bound; a report of this run draws no split")


def _results(
    run: Path, config: Config, simulation: Simulation, records: list[Record], saved: list[Saved], found: Verification
) -> int:
    """Summary against rounds, model against checkpoint; of which round a model still to be compared is, or 0."""
    from ..client.tree_bytes import read_state

    files = RunDir(run)
    summary, path = files.told(), files.model_file
    if summary is None:
        return 0
    made_on = summary.get("environment")
    if isinstance(made_on, dict):
        here = found.checked_on
        found.differs = {k: (v, here[k]) for k, v in made_on.items() if k in here and v != here[k]}
    upto = rounds_told(summary, records)
    complete = any(one.log for one in saved[:1])
    wrong = unlike_summary(run, summary, config, simulation, upto, complete)
    found.note(f"{SUMMARY} follows from config, data and rounds", wrong + unlike_notes(files, summary))
    if summary.get("status") == "finished":
        short = [f"{ROUNDS} holds {len(records)} rounds, {CONFIG} says {config.rounds}"]
        found.note("all rounds are present", [] if len(records) == config.rounds else short)
    if not path.is_file():
        found.broken.append(f"{MODEL} is missing, but {SUMMARY} says the run has ended")
        return 0
    if saved and saved[0].t == summary.get("rounds"):
        before = simulation.t, simulation.server, simulation.elapsed
        try:
            simulation.restore(saved[0].t, read_state(saved[0].server, simulation.server), None)
            wrong = unlike_model(path, simulation, f"the model of the checkpoint of round {saved[0].t}")
        except UserError as error:
            wrong = [str(error)]
        simulation.restore(*before)
        found.note(f"{MODEL} is the last checkpoint's model", wrong)
        return 0
    return len(upto)


def _again(
    run: Path,
    simulation: Simulation,
    start: Saved | None,
    ends: list[Saved],
    records: list[Record],
    model_of: int,
    found: Verification,
    measured: ClientMetrics | None,
) -> None:
    """Run rounds again from a checkpoint (None: from round 0) and compare records, and vectors where there are some."""
    from .checkpoint import stand, unlike
    from .uploads import read_uploads, unlike_uploads

    wrong: list[str] = []
    sent = read_uploads(RunDir(run))
    try:
        if start is not None:
            stand(RunDir(run), start, simulation, records)
        first, goals = simulation.t, {one.t: one for one in ends if one.t > simulation.t}
        last = max(*goals, min(len(records), simulation.plan.rounds), first)
        while simulation.t < last:
            result = simulation.advance()
            record = result.record
            before = records[record.round - 1] if record.round <= len(records) else None
            wrong += unlike(record, before)
            wrong += unlike_measured(measured, result.client_metrics, record.round)
            wrong += unlike_uploads(sent.get(record.round), result.uploads.items(), record.round)
            if record.round in goals:
                wrong += list(_other_bits(simulation, goals[record.round]))
            if record.round == model_of:
                wrong += unlike_model(RunDir(run).model_file, simulation, f"the model of round {model_of} run again")
    except (UserError, Diverged) as error:
        wrong.append(f"round {simulation.t + 1} cannot be run again: {error}")
    else:
        rounds = f"round {last}" if last == first + 1 else f"rounds {first + 1} to {last}"
        what = f"{rounds} run again: the same bits"
    found.note(what if not wrong else "", wrong)


def _other_bits(simulation: Simulation, saved: Saved) -> Iterator[str]:
    """What of a checkpoint differs from where a simulation stands."""
    from ..client.tree_bytes import read_state
    from ..client.trees import tree_leaves

    server = read_state(saved.server, simulation.server)
    for name, new, old in zip(server._fields, simulation.server, server, strict=True):
        pairs = zip(*(tree_leaves((a,)) for a in (new, old)), strict=True)
        if not all(a.cpu().equal(b) for a, b in pairs):
            yield f"round {saved.t}: the server's {name} in the checkpoint differs from the round run again"
    like = simulation.work.hooks.init_client(simulation.x0)
    if simulation.states.generations != saved.generations:
        yield f"round {saved.t}: other clients' states changed than in the round run again"
        return
    for i in saved.entries:
        old = saved.state(i, like)
        pairs = zip(tree_leaves(simulation.client_state(i)), tree_leaves(old), strict=True)
        if not all(a.cpu().equal(b) for a, b in pairs):
            yield f"round {saved.t}: the state of client {i} in the checkpoint differs from the round run again"


UNFINISHED = ("interrupted", "terminated", "diverged: ", "failed: ")


"""How the status of a run begins that is neither finished nor stopped by a rule."""


def rounds_told(summary: dict[str, Any], records: list[Record]) -> list[Record]:
    """The rounds a summary is of: all, but a run that was broken off may have written down one more."""
    rounds, broken_off = summary.get("rounds"), str(summary.get("status")).startswith(UNFINISHED)
    return records[:rounds] if broken_off and type(rounds) is int and rounds >= 0 else records


def unlike_summary(
    run: Path, summary: dict[str, Any], config: Config, simulation: Simulation, records: list[Record], complete: bool
) -> list[str]:
    """How a summary differs from what config, data and rounds come to.

    Args:
        complete: it must have every key; runs of format 1 had fewer.
    """
    if not summary:
        return [f"{SUMMARY} cannot be read"]
    status = summary.get("status", "")
    told = summarise(config, simulation, records, status)
    told["digests"] = digests(run, records)
    if not complete:
        told = {key: value for key, value in told.items() if key in summary or key in REPORTED}
    wrong = []
    stopping = Stopping(config)
    stopping.replay(records)
    if not isinstance(status, str) or not (status in ("finished", stopping.status) or status.startswith(UNFINISHED)):
        known = stopping.status or "finished, interrupted, terminated, diverged or failed"
        wrong.append(f"{SUMMARY}: status is {status!r}, expected {known}")
    for key, value in told.items():
        if key in ("metrics", "settings") and key not in summary:  # younger than the format
            continue
        if key not in summary:
            wrong.append(f"{SUMMARY}: {key} is missing, the rounds and the data say {value!r}")
        elif key != "environment" and summary[key] != value:
            wrong.append(f"{SUMMARY}: {key} is {summary[key]!r}, the rounds and the data say {value!r}")
    return wrong


def unlike_notes(run: RunDir, summary: dict[str, Any]) -> list[str]:
    """Return how a summary's seal is broken, which covers times and versions, and how the model's note differs.

    Runs of older versions have no seal: their manifests have none either.
    """
    if not summary:
        return []
    holds = seal_holds(read_text(run.summary_file).removesuffix("\n"), indent=1)
    if holds is None:
        newest = run.manifests()[:1]
        return [f"{SUMMARY}: {SEAL} is missing" for path in newest if SEAL in read_json(path)]
    if not holds:
        return [f"{SUMMARY} was changed: its {SEAL} is of other text"]
    made_with = (summary.get("environment") or {}).get("fedspeed")
    return _unlike_note(run.model_file, f"{made_with}, round {summary.get('rounds')}")


def _unlike_note(path: Path, wanted: str) -> list[str]:
    """Return how the version and the round noted in a model's file are not these; a file of another kind is found by
    `unlike_model`."""
    if not path.is_file():  # a pipe would not answer
        return []
    try:
        with safe_open(path, "pt") as file:
            found = (file.metadata() or {}).get("fedspeed")
    except (OSError, SafetensorError):
        return []
    return [] if found == wanted else [f"{path.name}: expected the note {wanted!r}, found {found!r}"]


def unlike_split(path: Path, simulation: Simulation) -> list[str]:
    """Return how `split.json`, which reports draw, is not that of the data, in any byte."""
    try:
        same = read_bytes(path) == split_text(simulation.data).encode()
    except OSError as error:
        return [f"{path.name} cannot be read ({error})"]
    return [] if same else [f"{path.name} is not that of the data and the split; delete it, or put it back"]


def unlike_rounds(measured: ClientMetrics | None, simulation: Simulation, rounds: int) -> list[str]:
    """How the rounds that were measured are not those that the plan asks for."""
    plan = simulation.plan
    wanted = [t for t in range(1, rounds + 1) if (plan.config_at(t - 1) or plan).scores_clients(t)]
    found = [] if measured is None else [t for t in measured.rounds.tolist() if t <= rounds]
    if found == wanted:
        return []
    t = min(set(wanted) ^ set(found))
    return [
        f"{CLIENT_METRICS}: round {t} is {'missing' if t in wanted else 'there, and the config does not ask for it'}"
    ]


def unlike_measured(measured: ClientMetrics | None, again: ClientMetrics | None, t: int) -> list[str]:
    """How the scores of a round that was run again differ, in any bit, from those that were written down."""
    before = None if measured is None else measured.some(measured.rounds == t)
    if before is None or not len(before.rounds) or again is None:
        return []  # `unlike_rounds` says whether that is right
    same = before.header() == again.header() and before.blocks() == again.blocks()
    return [] if same else [f"round {t}: the scores in {CLIENT_METRICS} differ from those of the round run again"]


def unlike_model(path: Path, simulation: Simulation, what: str) -> list[str]:
    """How a saved model differs, in names, shapes, dtypes or bits, from where a simulation stands."""
    from safetensors.torch import load_file

    try:
        found = load_file(path)
    except (OSError, SafetensorError) as error:
        return [f"{path.name} cannot be read ({error})"]
    wanted = model_tensors(simulation)
    extra = sorted(found.keys() - wanted.keys())
    wrong = [f"{path.name} holds {name}, which the model does not have" for name in extra]
    for name, a in wanted.items():
        if name not in found:
            wrong.append(f"{path.name}: {name} is missing")
        elif (about := _about(found[name])) != _about(a):
            wrong.append(f"{path.name}: {name} is {about}, expected {_about(a)}")
    if not wrong and not all(torch.equal(found[name], a) for name, a in wanted.items()):
        wrong = [f"{path.name} is not {what}"]
    return wrong


def _about(a: torch.Tensor) -> str:
    return f"{str(a.dtype).removeprefix('torch.')} of shape {tuple(a.shape)}"


def sums(saved: Saved, simulation: Simulation, records: list[Record]) -> tuple[str, list[str]] | None:
    """What was compared at a checkpoint, and how it is wrong; None for a method without such a mean."""
    if simulation.method.running_mean is None:
        return None
    mean_of, is_at = simulation.method.running_mean
    client_part, server_part = attrgetter(mean_of), attrgetter(is_at)
    sizes = simulation.data.sizes
    x0 = simulation.x0.cpu()
    weights = sizes / sizes.sum() if simulation.plan.weighting == "samples" else 0 * sizes + 1 / len(sizes)
    start = simulation.work.hooks.init_client(x0)
    at_first = client_part(method_part(start)).double()
    value = server_part(method_part(read_state(saved.server, simulation.server)))
    mean = torch.zeros_like(at_first)
    largest = float(value.abs().max())
    turns = 0.0
    often = Counter(i for record in records[: saved.t] for i in record.cohort)
    for i in range(len(sizes)):
        state = at_first
        if i in saved.entries:
            state = client_part(method_part(saved.state(i, start))).double()
        mean += float(weights[i]) * state
        largest = max(largest, float(state.abs().max()))
        turns += float(weights[i]) * often[i]
    stored = x0.dtype if simulation.plan.state_dtype == "same" else getattr(torch, simulation.plan.state_dtype)
    limit = 16 * torch.finfo(stored).eps * largest * (1 + turns)  # each turn of a client rounds its state once
    off = float((mean - value.double()).abs().max())
    said = f"round {saved.t}: the server's {is_at} is the mean of all clients' {mean_of}"
    wrong = f"{said}: off by {off:.3g}, rounding explains {limit:.3g}; a state or the server's vector was changed"
    return f"{said} (off by {off:.1g}, rounding)", [] if off <= limit else [wrong]


def counted(saved: Saved, simulation: Simulation, records: list[Record]) -> Iterator[str]:
    """Whose state is not of the last round in which its reply was counted."""
    turns: dict[int, int] = {}
    if has_leaves(simulation.work.hooks.init_client(simulation.x0)):
        turns = {i: r.round - 1 for r in records[: saved.t] for i in r.cohort if i not in r.dropped}
    kept = saved.generations
    for client in sorted(turns.keys() | kept.keys()) if turns != kept else ():
        then, now = (f"of round {found[client] + 1}" if client in found else "none" for found in (turns, kept))
        if then != now:
            yield f"round {saved.t}: by {ROUNDS} the state of client {client} is {then}, in the checkpoint {now}"
