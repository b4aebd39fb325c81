"""What is known of a run's health, from its files: for `fedspeed explain`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..damping import warning_of
from ..files import read_bytes
from ..illness import Advice, Finding, advise, diagnose
from ..record import Record
from ..rundir import RunDir, beside
from ..splitfile import read_split

SHOWN = 6
"""How many rounds of a sign are shown."""


@dataclass(frozen=True)
class Health:
    """What a run directory says about how the run fares.

    Args:
        state: how it stands, in words.
        found: what is wrong with it; the last may be that it diverged.
        notes: what could not be read, and what can be said of the config alone.
    """

    path: Path
    config: dict[str, Any]
    records: list[Record]
    state: str
    found: list[Finding]
    notes: list[str]

    def advice(self, one: Finding) -> list[Advice]:
        """Return what to try. Where data, or a hook of the user's, are the cause, nothing of the config helps."""
        return [] if "the learning rate is not to blame" in one.seen else advise(one.name, self.config)


def examine(path: Path) -> Health:
    """Read a run directory, finished or not; nothing in it is executed."""
    run = RunDir(path)
    config = run.config()
    records = run.records()
    notes = []
    lines = sum(1 for _ in run.lines())
    size = read_bytes(run.rounds_file).count(b"\n") if run.rounds_file.is_file() else 0
    if max(lines, size) > len(records):
        notes.append(
            f"{run.rounds_file}: the line after round {len(records)} is no round; it and later ones are not read"
        )
    summary = run.told()
    if summary == {}:
        notes.append(f"{run.summary_file} cannot be read")
    told = (summary or {}).get("rounds")
    with beside(path) as going_on:  # a run that goes on may still have the summary of its last stop
        if type(told) is int and told > len(records) and not going_on:
            notes.append(f"{run.rounds_file} is damaged: expected {told} rounds, found {len(records)}")
    split = read_split(run.split_file)
    if split and (text := warning_of(config, split.sizes)):
        notes.append(text)
    status = str((summary or {}).get("status") or "")
    found = diagnose(records)
    if status.startswith("diverged"):
        found.append(Finding("diverged", len(records) + 1, status.removeprefix("diverged: ")))
    return Health(path, config, records, _state(path, status, len(records), config), found, notes)


def _state(path: Path, status: str, rounds: int, config: dict[str, Any]) -> str:
    of = f"{rounds} of {config.get('rounds', '?')} rounds"
    if status:
        return f"{status.split(':')[0]}, {of}" + (
            f" ({status.partition(': ')[2]})" if status.startswith(("failed", "stopped")) else ""
        )
    with beside(path) as going_on:
        return f"running, {of} so far" if going_on else f"interrupted without a summary, {of}: `fedspeed resume {path}`"


def series(one: Finding) -> str:
    """What was measured in some of the rounds with the sign, the first and the last among them."""
    values = one.values
    step = max(1, -(-len(values) // SHOWN))
    some = [*values[::step], *([values[-1]] if (len(values) - 1) % step else [])] if values else []
    return ", ".join(f"{t}: {'beyond numbers' if value is None else f'{value:.4g}'}" for t, value in some)
