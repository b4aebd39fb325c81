"""The health of a run, read from its files, for `fedspeed explain`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..config.damping import warning_of
from ..record import Record
from ..runs.diagnosis import Advice, Finding, advise, diagnose
from ..runs.directory import read_split
from .run_files import Contents, read_contents

SHOWN = 6
"""The number of rounds of a finding that are shown."""


@dataclass(frozen=True)
class Health:
    """The diagnosis of a run directory.

    Args:
        state: the status and the rounds, in words.
        found: the findings; the last may be that the run diverged.
        notes: files that could not be read, and warnings about the config.
    """

    path: Path
    config: dict[str, Any]
    records: list[Record]
    state: str
    found: list[Finding]
    notes: list[str]

    def advice(self, one: Finding) -> list[Advice]:
        """Return what to try for a finding; nothing if the cause is the user's data or hook."""
        return [] if "the learning rate is not to blame" in one.seen else advise(one.name, self.config)


def examine(path: Path) -> Health:
    """Read a run directory, finished or not; nothing in it is executed."""
    run = read_contents(path)
    files, records, summary = run.files, run.records, run.summary or {}
    notes = []
    if run.unread > run.cut:
        notes.append(f"{files.rounds_file}: the line after round {len(records)} is not a round; reading stopped there")
    if run.summary == {}:
        notes.append(f"{files.summary_file} cannot be read")
    expected = summary.get("rounds")
    if type(expected) is int and expected > len(records) and not run.running:  # a running run has an older summary
        notes.append(f"{files.rounds_file} is damaged: expected {expected} rounds, found {len(records)}")
    split = read_split(files.split_file)
    if split and (text := warning_of(run.config, split.sizes)):
        notes.append(text)
    status = str(summary.get("status") or "")
    found = diagnose(records)
    if status.startswith("diverged"):
        found.append(Finding("diverged", len(records) + 1, status.removeprefix("diverged: ")))
    return Health(path, run.config, records, _state(run, status), found, notes)


def _state(run: Contents, status: str) -> str:
    """Return the state of a run in words: from its summary, else from whether a process is running it."""
    of = f"{len(run.records)} of {run.config.get('rounds', '?')} rounds"
    if status:
        word, _, why = status.partition(": ")
        return f"{status.split(':')[0]}, {of}" + (f" ({why})" if word in ("failed", "stopped") else "")
    if run.running:
        return f"running, {of} so far"
    return f"interrupted without a summary, {of}: `fedspeed resume {run.files.path}`"


def series(one: Finding) -> str:
    """Return up to about `SHOWN` measured values of a finding with their rounds, the first and the last included."""
    values = one.values
    step = max(1, -(-len(values) // SHOWN))
    some = [*values[::step], *([values[-1]] if (len(values) - 1) % step else [])] if values else []
    return ", ".join(f"{t}: {'not finite' if value is None else f'{value:.4g}'}" for t, value in some)
