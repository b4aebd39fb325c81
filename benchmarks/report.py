"""The table, the goals, and the JSON file."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from . import machine
from .goals import Goal, compare
from .stats import median
from .timing import Outcome, Timed
from .workloads import ABOUT, WORKLOADS


def table(outcomes: list[Outcome]) -> str:
    """Return one Markdown table: seconds per round, and their ratio to ours."""
    lines = [
        "| workload | contender | s / round | times the time of | ratio | 95% interval | n | peak RSS, GB |",
        "|---|---|--:|---|--:|---|--:|--:|",
    ]
    for outcome in outcomes:
        lines += [_line(outcome, row) for row in outcome.rows]
    return "\n".join(lines)


def _line(outcome: Outcome, row: Timed) -> str:
    name = f"| {outcome.contest.workload} | {row.entry.name} |"
    if not row.seconds:
        return f"{name} {row.failure or 'not measured'} | | | | | |"
    name += f" {median(row.seconds):.3g} |"
    tail = f"{len(row.seconds)} | {row.memory / 1e9:.1f} |"
    found = compare(outcome, row.entry.name, row.entry.against)
    if not found:
        return f"{name} | | | {tail}"
    return f"{name} {row.entry.against} | {found.value:.2f} | {found.interval()} | {tail}"


def about(outcomes: list[Outcome]) -> str:
    """Return the workloads of this run, in words."""
    lines: dict[str, None] = {}
    for outcome in outcomes:
        text = f"- {outcome.contest.workload}: {ABOUT[outcome.contest.workload]}"
        whole = WORKLOADS[outcome.contest.workload]
        if (outcome.active, outcome.epochs) != (whole.active, whole.epochs):
            text += f"; TIMED IN PART: {outcome.active} active, {outcome.epochs} epoch{'s' * (outcome.epochs > 1)}"
        lines[text] = None
    return "\n".join(lines)


def goal_table(found: list[Goal]) -> str:
    """Return the goals as a Markdown table; a question mark where the interval holds both answers."""
    words = {True: "yes", False: "NO", None: ""}
    lines = ["| goal | wanted | found | met |", "|---|---|---|---|"]
    return "\n".join(
        lines + [f"| {g.about} | {g.wanted} | {g.found} | {words[g.met]}{' ?' if g.close else ''} |" for g in found]
    )


def memory_table(memory: dict[str, Any]) -> str:
    """Return peaks over the process tree."""
    lines = ["| FedSpeed, all clients touched | RSS, GB | PSS, GB | files in memory, GB | s |", "|---|--:|--:|--:|--:|"]
    for peak in memory["peaks"]:
        name = f"| {peak['model']}, {peak['clients']:,} clients |"
        sizes = (
            " | ".join(f"{peak[key] / 1e9:.2f}" for key in ("rss", "pss", "segments")) + f" | {peak['seconds']:.0f} |"
        )
        lines.append(f"{name} {peak['failure']} | | | |" if peak["failure"] else f"{name} {sizes}")
    return "\n".join(lines)


def busy(before: float, outcomes: list[Outcome]) -> list[str]:
    """Return warnings about a machine that was not ours alone; empty if it was quiet."""
    found = []
    if before > machine.BUSY:
        found.append(f"others used {before:.2f} cores before the start")
    for outcome in outcomes:
        disturbed = [foreign for foreign in outcome.foreign if foreign > machine.BUSY]
        if disturbed:
            found.append(
                f"{outcome.contest.name}: others used more than {machine.BUSY:g} cores in {len(disturbed)} of "
                f"{len(outcome.foreign)} repetitions, {max(disturbed):.2f} at most"
            )
        if outcome.idle > machine.BUSY:
            found.append(f"{outcome.contest.name}: waiting contenders used {outcome.idle:.2f} cores")
    return found


def to_dict(outcome: Outcome) -> dict[str, Any]:
    """Return a contest as JSON takes it."""
    rows = []
    for row in outcome.rows:
        found = compare(outcome, row.entry.name, row.entry.against)
        relation = {"against": row.entry.against, **found._asdict()} if found else None
        rows.append({**row.to_dict(), "ratio": relation})
    return {
        "contest": outcome.contest.name,
        "workload": outcome.contest.workload,
        "active": outcome.active,
        "epochs": outcome.epochs,
        "contenders": rows,
        "cores_used_by_others": outcome.foreign,
        "cores_used_while_waiting": outcome.idle,
        "notes": outcome.notes,
    }


def write(folder: Path, name: str, result: dict[str, Any], text: str) -> Path:
    """Write results as JSON, and as Markdown beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(json.dumps(result, indent=1, default=asdict) + "\n")
    path.with_suffix(".md").write_text(text + "\n")
    return path
