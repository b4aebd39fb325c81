"""Whether `summary.json` and `model.safetensors` follow from the run's rounds."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open

from .files import read_bytes, read_json, read_text
from .hashing import SEAL, seal_holds
from .modelfile import model_tensors
from .recording import digests, summarise
from .rundir import CLIENT_METRICS, SUMMARY, RunDir
from .splitfile import split_text
from .stopping import Stopping
from .summary import REPORTED

if TYPE_CHECKING:
    from .client_metrics import ClientMetrics
    from .config import Config
    from .record import Record
    from .server import Simulation

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
    wanted = [t for t in range(1, rounds + 1) if (plan.earlier(t - 1) or plan).measures(t)]
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
