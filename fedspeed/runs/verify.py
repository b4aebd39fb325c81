"""Verification of a run directory: digests, running means, and rounds run again, compared bit for bit.

`verify` is the whole check. The functions named `..._mismatches` each compare one file, or one round that was run
again, and return a line per difference.
"""

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
from safetensors.torch import load_file

from ..client.batch_norm import method_part
from ..client.tree_bytes import read_state
from ..client.trees import tree_leaves
from ..config.stopping import Stopping
from ..errors import Diverged, UserError
from ..record import TIMES, Record, older
from ..utils.files import SEAL, read_bytes, read_json, read_text, scratch, seal_holds
from ..utils.processes import environment
from .binary_files import model_tensors, read_uploads, upload_mismatches
from .checkpoint import Checkpoints, Saved, load_into, stale_states
from .config_file import bound_to, read_config
from .diagnosis import UNTRAINED
from .directory import CLIENT_METRICS, CONFIG, MODEL, REPORTED, ROUNDS, SPLIT, SUMMARY, RunDir, is_running, split_text
from .fork import read_parent
from .launch import prepare
from .signature import damage
from .summary import digests, summarise

if TYPE_CHECKING:
    from ..config.config import Config
    from ..server.client_metrics import ClientMetrics
    from ..server.simulation import Simulation

TRIES = 100
"""How often to look for a checkpoint that a run does not replace in the meantime."""
UNFINISHED = ("interrupted", "terminated", "diverged: ", "failed: ")
"""The beginnings of the status of a run that neither finished nor was stopped by a rule."""


@dataclass
class Verification:
    """The result of `verify`, whose rounds were run again on the back end, versions and hardware of `checked_on`."""

    held: list[str] = field(default_factory=list)  # checks that hold, one line each
    broken: list[str] = field(default_factory=list)  # differences that were found, one line each
    checked_on: dict[str, Any] = field(default_factory=dict)
    differs: dict[str, tuple[Any, Any]] | None = None  # of these, name -> (the run's, here); None if the run has none

    def note(self, what: str, wrong: list[str]) -> None:
        """Add a check: it holds if nothing is wrong."""
        self.broken += wrong
        if not wrong:
            self.held.append(what)


def verify(
    run: Path | str,
    *,
    every_round: bool = False,
    backend: str = "",
    allow_code: bool = False,
    progress: Callable[[str, int, int], None] | None = None,
) -> Verification:
    """Check a run directory without writing to it. Of a run in progress only the rounds that are done are checked.

    Args:
        run: the run directory, finished or not.
        every_round: run all rounds again from round 0, not only those after the last checkpoint but one.
        backend: run them on this back end; the config's own if "".
        allow_code: also if the directory's config names Python files, which are then executed.
    """
    run = Path(run)
    config = read_config(run, allow_code)
    found, files = Verification(), RunDir(run)
    done = files.finished()
    if done is not None and done["rounds"] < config.rounds:
        asked = f"finished with {done['rounds']} rounds, {config.rounds} are asked for: `fedspeed resume {run}`"
        found.held.append(asked)
        config = replace(config, rounds=done["rounds"])
    with is_running(run) as in_progress, scratch("fedspeed-verify-") as folder:
        if not files.manifests() and not (every_round and files.records()):
            hint = "it is in progress, try again later" if in_progress else f"`fedspeed resume {run}` continues it"
            raise UserError(f"{run} holds no checkpoint yet: nothing to verify; {hint}")
        placed = replace(config, backend=backend or config.backend)
        with prepare(placed, progress, RunDir(folder).states) as simulation:
            _Verifier(files, config, simulation, in_progress, found).check(every_round)
    return found


@dataclass
class _Verifier:
    """One verification: the run, a simulation to run its rounds again, and the result so far."""

    files: RunDir
    config: Config
    simulation: Simulation
    in_progress: bool
    found: Verification
    records: list[Record] = field(default_factory=list)
    measured: ClientMetrics | None = None

    def check(self, every_round: bool) -> None:
        """Check every file, then run rounds again."""
        found, simulation = self.found, self.simulation
        found.checked_on = {
            "back end": simulation.placement,
            "engine": simulation.plan.engine,
            **environment(simulation.work.flat.device),
        }
        self.checkpoints = Checkpoints(self.files.path)
        saved = list(self._complete_checkpoints())
        self.records = self.files.records()  # after the checkpoints, which are of no later rounds
        if self.in_progress:
            upto = len(self.records) if every_round else max((one.t for one in saved), default=0)
            found.held.append(f"the run is in progress; checked up to round {upto}")
        origin = read_parent(self.files)
        if origin is not None and len(self.records) >= origin.at:
            found.note(f"the first {origin.at} rounds are those of {origin.folder}", origin.mismatches(self.records))
        for one in saved:
            self._check_checkpoint(one)
        found.broken += damage(self.files)
        self._check_split()
        self._check_measured()
        model_of = 0 if self.in_progress else self._check_results(saved)
        if every_round:
            self._run_again(None, [] if self.in_progress else saved, model_of)
        elif saved and not self.in_progress:
            self._run_again(saved[1] if len(saved) > 1 else None, saved[:1], model_of)

    def _complete_checkpoints(self) -> Iterator[Saved]:
        """Yield the checkpoints whose files all have their digests, newest first; of a run in progress the newest."""
        newest = (self.files.manifests()[0] for _ in range(TRIES))
        for path in newest if self.in_progress else self.files.manifests():
            try:
                one = self.checkpoints.read(path)
            except UserError as error:
                if self.in_progress and not path.exists():  # The run replaced it: a manifest goes before its files.
                    continue
                self.found.broken.append(str(error))
            else:
                files = sum(bool(entry.digest) for entry in one.entries.values()) + (3 if one.log else 1)
                files += sum(part is not None for part in one.manifest.grown[1:])
                states = f"{files} files, {len(one.entries)} states"
                self.found.held.append(f"digests of the checkpoint of round {path.stem}: {states}")
                yield one
            if self.in_progress:
                return

    def _check_checkpoint(self, saved: Saved) -> None:
        """Compare a checkpoint with config and data, with the rounds, and its server with its clients."""
        try:
            self.checkpoints.check(saved, bound_to(self.files.path, self.simulation))
            self.found.broken += islice(stale_states(saved, self.simulation, self.records), 3)
            said = check_running_mean(saved, self.simulation, self.records)
            if said:
                self.found.note(*said)
        except UserError as error:  # a file with the right digest that does not fit the config
            if not self.in_progress or self.files.manifest_path(saved.t).exists():
                self.found.broken.append(str(error))

    def _check_split(self) -> None:
        """Compare `split.json` with the data, in every byte."""
        path = self.files.split_file
        if not path.exists():
            self.found.held.append(f"{SPLIT} is not there, so it is not bound; a report of this run draws no split")
            return
        try:
            same = read_bytes(path) == split_text(self.simulation.data).encode()  # reports draw it
            wrong = [] if same else [f"{path.name} is not that of the data and the split; delete it, or put it back"]
        except OSError as error:
            wrong = [f"{path.name} cannot be read ({error})"]
        self.found.note(f"{SPLIT} is that of the data and the split", wrong)

    def _check_measured(self) -> None:
        """Read the scores on clients' data, and check that the rounds to measure have some."""
        try:
            self.measured = self.files.client_metrics()
        except UserError as error:
            self.found.broken.append(str(error))
            return
        if self.measured is not None or self.simulation.plan.client_metrics:
            wrong = measured_round_mismatches(self.measured, self.simulation, len(self.records))
            self.found.note(f"{CLIENT_METRICS} has the rounds to measure", wrong)

    def _check_results(self, saved: list[Saved]) -> int:
        """Compare the summary with the rounds, and the model with the last checkpoint; return the round of a model that
        no checkpoint could be compared with, 0 if there is none."""
        files, found, records = self.files, self.found, self.records
        summary = files.raw_summary()
        if summary is None:
            return 0
        made_on = summary.get("environment")
        if isinstance(made_on, dict):
            here = found.checked_on
            found.differs = {k: (v, here[k]) for k, v in made_on.items() if k in here and v != here[k]}
        upto = summarised_rounds(summary, records)
        complete = any(one.log for one in saved[:1])
        wrong = summary_mismatches(files.path, summary, self.config, self.simulation, upto, complete)
        found.note(f"{SUMMARY} follows from config, data and rounds", wrong + note_mismatches(files, summary))
        if summary.get("status") == "finished":
            short = [f"{ROUNDS} holds {len(records)} rounds, {CONFIG} says {self.config.rounds}"]
            found.note("all rounds are present", [] if len(records) == self.config.rounds else short)
        if not files.model_file.is_file():
            found.broken.append(f"{MODEL} is missing, but {SUMMARY} says the run has ended")
            return 0
        if saved and saved[0].t == summary.get("rounds"):
            found.note(f"{MODEL} is the last checkpoint's model", self._last_model_mismatches(saved[0]))
            return 0
        return len(upto)

    def _last_model_mismatches(self, saved: Saved) -> list[str]:
        run = self.simulation
        before = run.t, run.server, run.elapsed
        try:
            run.restore(saved.t, read_state(saved.server, run.server), None)
            return model_mismatches(self.files.model_file, run, f"the model of the checkpoint of round {saved.t}")
        except UserError as error:
            return [str(error)]
        finally:
            run.restore(*before)

    def _run_again(self, start: Saved | None, ends: list[Saved], model_of: int) -> None:
        """Run rounds again from a checkpoint (None: from round 0), and compare records, uploads, the vectors of some
        checkpoints, and the model after a round (0: none)."""
        run, wrong, rounds = self.simulation, list[str](), ""
        sent = read_uploads(self.files)
        try:
            if start is not None:
                load_into(self.files, start, run, self.records)
            first, goals = run.t, {one.t: one for one in ends if one.t > run.t}
            last = max(*goals, min(len(self.records), run.plan.rounds), first)
            while run.t < last:
                result = run.advance()
                t = result.record.round
                wrong += round_mismatches(result.record, self.records[t - 1] if t <= len(self.records) else None)
                wrong += measured_mismatches(self.measured, result.client_metrics, t)
                wrong += upload_mismatches(sent.get(t, {}), result.uploads, t)
                if t in goals:
                    wrong += state_mismatches(run, goals[t])
                if t == model_of:
                    wrong += model_mismatches(self.files.model_file, run, f"the model of round {t} run again")
            rounds = f"round {last}" if last == first + 1 else f"rounds {first + 1} to {last}"
        except (UserError, Diverged) as error:
            wrong.append(f"round {run.t + 1} cannot be run again: {error}")
        self.found.note(f"{rounds} run again: the same bits", wrong)


# --- rounds that were run again ---


def round_mismatches(again: Record, before: Record | None) -> list[str]:
    """Return how a round that was run again differs from its record."""
    if before is None:
        return [f"round {again.round} is missing in {ROUNDS}"]
    new = (again if "x_norm" in before.metrics else older(again)).to_dict()
    old = before.to_dict()
    if any(sign.startswith(UNTRAINED[1]) for sign in before.signs):  # of a version that judged weights by another rule
        for plain in (new, old):
            plain["signs"] = {k: v for k, v in plain.get("signs", {}).items() if not k.startswith(UNTRAINED)}
    later = {"signs", "client_train"} - set(old)  # older versions did not write these
    return [
        f"round {again.round}: {key} is {old.get(key)!r} in {ROUNDS}, run again it is {new.get(key)!r}"
        for key in new | old
        if key not in TIMES and old.get(key) != new.get(key) and key not in later
    ]


def measured_mismatches(measured: ClientMetrics | None, again: ClientMetrics | None, t: int) -> list[str]:
    """Return how the client scores of a round that was run again differ, in any bit, from those in the file."""
    before = None if measured is None else measured.some(measured.rounds == t)
    if before is None or not len(before.rounds) or again is None:
        return []  # `measured_round_mismatches` says whether that is right.
    same = before.header() == again.header() and before.blocks() == again.blocks()
    return [] if same else [f"round {t}: the scores in {CLIENT_METRICS} differ from those of the round run again"]


def state_mismatches(simulation: Simulation, saved: Saved) -> Iterator[str]:
    """Yield how the vectors of a checkpoint differ, in any bit, from those of a simulation."""
    server = read_state(saved.server, simulation.server)
    for name, new, old in zip(server._fields, simulation.server, server, strict=True):
        if not _same_bits((new,), (old,)):
            yield f"round {saved.t}: the server's {name} in the checkpoint differs from the round run again"
    like = simulation.work.hooks.init_client(simulation.x0)
    if simulation.states.generations != saved.generations:
        yield f"round {saved.t}: other clients' states changed than in the round run again"
        return
    for i in saved.entries:
        if not _same_bits(simulation.client_state(i), saved.state(i, like)):
            yield f"round {saved.t}: the state of client {i} in the checkpoint differs from the round run again"


def _same_bits(new: Any, old: Any) -> bool:
    return all(a.cpu().equal(b) for a, b in zip(tree_leaves(new), tree_leaves(old), strict=True))


def check_running_mean(saved: Saved, simulation: Simulation, records: list[Record]) -> tuple[str, list[str]] | None:
    """Compare the server's running mean with the clients' states: a line on it, and mismatches; None without one."""
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


# --- files ---


def summarised_rounds(summary: dict[str, Any], records: list[Record]) -> list[Record]:
    """Return the rounds of a summary: all, but a run that was broken off may have recorded one more."""
    rounds, broken_off = summary.get("rounds"), str(summary.get("status")).startswith(UNFINISHED)
    return records[:rounds] if broken_off and type(rounds) is int and rounds >= 0 else records


def summary_mismatches(
    run: Path, summary: dict[str, Any], config: Config, simulation: Simulation, records: list[Record], complete: bool
) -> list[str]:
    """Return how a summary differs from the one that follows from config, data and rounds."""
    if not summary:
        return [f"{SUMMARY} cannot be read"]
    status = summary.get("status", "")
    expected = summarise(config, simulation, records, status)
    expected["digests"] = digests(run, records)
    if not complete:  # Runs of format 1 had fewer keys.
        expected = {key: value for key, value in expected.items() if key in summary or key in REPORTED}
    wrong = []
    stopping = Stopping(config)
    stopping.restart_from(records)
    if not isinstance(status, str) or not (status in ("finished", stopping.status) or status.startswith(UNFINISHED)):
        known = stopping.status or "finished, interrupted, terminated, diverged or failed"
        wrong.append(f"{SUMMARY}: status is {status!r}, expected {known}")
    for key, value in expected.items():
        if key in ("metrics", "settings") and key not in summary:  # added after the format
            continue
        if key not in summary:
            wrong.append(f"{SUMMARY}: {key} is missing, the rounds and the data say {value!r}")
        elif key != "environment" and summary[key] != value:
            wrong.append(f"{SUMMARY}: {key} is {summary[key]!r}, the rounds and the data say {value!r}")
    return wrong


def note_mismatches(run: RunDir, summary: dict[str, Any]) -> list[str]:
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
    wanted = f"{(summary.get('environment') or {}).get('fedspeed')}, round {summary.get('rounds')}"
    if not run.model_file.is_file():  # Opening a pipe would block.
        return []
    try:
        with safe_open(run.model_file, "pt") as file:
            found = (file.metadata() or {}).get("fedspeed")
    except (OSError, SafetensorError):  # `model_mismatches` finds a file of another kind.
        return []
    return [] if found == wanted else [f"{MODEL}: expected the note {wanted!r}, found {found!r}"]


def measured_round_mismatches(measured: ClientMetrics | None, simulation: Simulation, rounds: int) -> list[str]:
    """Return how the measured rounds are not those that the plan asks for."""
    plan = simulation.plan
    wanted = [t for t in range(1, rounds + 1) if (plan.config_at(t - 1) or plan).scores_clients(t)]
    found = [] if measured is None else [t for t in measured.rounds.tolist() if t <= rounds]
    if found == wanted:
        return []
    t = min(set(wanted) ^ set(found))
    what = "missing" if t in wanted else "there, and the config does not ask for it"
    return [f"{CLIENT_METRICS}: round {t} is {what}"]


def model_mismatches(path: Path, simulation: Simulation, what: str) -> list[str]:
    """Return how a saved model differs, in names, shapes, dtypes or bits, from that of a simulation."""
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
