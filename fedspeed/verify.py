"""Whether a run directory is what its run made: digests, running sums, and rounds run again, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .environment import environment
from .errors import Diverged, UserError
from .parent import read_parent
from .run import prepare
from .runconfig import bound_to, read_config
from .rundir import CLIENT_METRICS, CONFIG, MODEL, ROUNDS, SPLIT, SUMMARY, RunDir, beside

if TYPE_CHECKING:
    from .checkpoint import Checkpoints
    from .client_metrics import ClientMetrics
    from .config import Config
    from .manifest import Saved
    from .record import Record
    from .server import Simulation

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
    from .checkpoint import Checkpoints
    from .locks import scratch

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
    from .sums import counted, sums

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
    from .results import unlike_rounds

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
    from .results import unlike_split

    if files.split_file.exists():
        found.note(f"{SPLIT} is that of the data and the split", unlike_split(files.split_file, simulation))
    else:
        found.held.append(f"{SPLIT} is not there, so it is not bound; a report of this run draws no split")


def _results(
    run: Path, config: Config, simulation: Simulation, records: list[Record], saved: list[Saved], found: Verification
) -> int:
    """Summary against rounds, model against checkpoint; of which round a model still to be compared is, or 0."""
    from .results import rounds_told, unlike_model, unlike_notes, unlike_summary
    from .tree_bytes import read_state

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
    from .rerun import stand, unlike
    from .results import unlike_measured, unlike_model
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
    from .tree_bytes import read_state
    from .vec import tree_leaves

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
