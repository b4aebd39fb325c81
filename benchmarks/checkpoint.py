"""Waits of the round loop for checkpoints: a whole run into a run directory, `Checkpoints.maybe_write` timed.

A checkpoint of W1 (89 MB) is due every 60 seconds by default, so a run must last longer to have one; a checkpoint
after every round is the worst case.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

from .runner import ROOT
from .workloads import cache

ROUNDS, EVERY_ROUNDS, QUICK_ROUNDS = 20, 4, 2
CLIENTS, ACTIVE, MANY_ROUNDS, QUICK_MANY_ROUNDS = 100_000, 200, 500, 50


def measure(quick: bool, say: Callable[[str], None]) -> dict[str, Any]:
    """Measure W1 FedAvg with checkpoints as by default (not if `quick`) and after every round; return JSON values."""
    found = {} if quick else {"default": waits("W1", 0, ROUNDS)}
    found["every round"] = waits("W1", 1, QUICK_ROUNDS if quick else EVERY_ROUNDS)
    for name, each in found.items():
        say(f"checkpoints, {name}: the rounds waited {each['share']:.2%} of their time for {each['written']} of them")
    return found


def waits(workload: str, every: int, rounds: int) -> dict[str, Any]:
    """Return seconds per round, seconds waited, their share, and the number of checkpoints written."""
    said = _run("checkpointed", "--every", str(every), "--rounds", str(rounds), first=[workload])
    return {**said, "share": sum(said["waited"]) / sum(said["seconds"])}


def many(quick: bool, say: Callable[[str], None]) -> dict[str, Any]:
    """Measure SCAFFOLD over 100,000 clients, 200 active, with a checkpoint after every round."""
    found = crowd(CLIENTS, ACTIVE, QUICK_MANY_ROUNDS if quick else MANY_ROUNDS)
    say(f"many clients: {found['first']:.3f} s per round by the clock at first, {found['last']:.3f} s at last")
    return found


def crowd(clients: int, active: int, rounds: int) -> dict[str, Any]:
    """Return seconds per round, by the clock and by the records, in the first and the last tenth of a run, and
    the share of the waits for checkpoints."""
    said = _run("many", "--clients", str(clients), "--active", str(active), "--rounds", str(rounds))
    wall, seconds, tenth = said["wall"], said["seconds"], max(1, len(said["wall"]) // 10)
    return {
        **{
            "clients": clients,
            "active": active,
            "rounds": rounds,
            "touched": said["touched"],
            "waited": said["waited"],
        },
        **{"first": statistics.median(wall[:tenth]), "last": statistics.median(wall[-tenth:])},
        **{"first_reported": statistics.median(seconds[:tenth]), "last_reported": statistics.median(seconds[-tenth:])},
        "share": said["waited"] / sum(wall),
    }


def _run(name: str, *options: str, first: Sequence[str] = ()) -> dict[str, Any]:
    """Return a contender's answer about a run in a temporary folder."""
    cache().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="run-", dir=cache()) as folder:  # on a disk, which /tmp may not be
        command = [sys.executable, "-m", f"benchmarks.contenders.{name}", *first, folder, *options]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    if done.returncode:
        raise RuntimeError(f"{name}: {(done.stderr.strip().splitlines() or ['it said nothing'])[-1]}")
    said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return said
