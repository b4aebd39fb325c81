"""How long the round loop waits for checkpoints: a whole run into a run directory, `Checkpoints.offer` timed.

A checkpoint of W1 (89 MB) is due every 60 seconds by default, so a run must last longer to say anything; with one
after every round, which nobody asked for, is the worst case.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any

from .runner import ROOT
from .workloads import cache

ROUNDS, EVERY_ROUNDS, QUICK_ROUNDS = 20, 4, 2


def measure(quick: bool, say: Callable[[str], None]) -> dict[str, Any]:
    """W1 FedAvg with checkpoints as they are by default (not if `quick`), and after every round; as JSON takes it."""
    found = {} if quick else {"default": waits("W1", 0, ROUNDS)}
    found["every round"] = waits("W1", 1, QUICK_ROUNDS if quick else EVERY_ROUNDS)
    for name, each in found.items():
        say(f"checkpoints, {name}: the rounds waited {each['share']:.2%} of their time for {each['written']} of them")
    return found


def waits(workload: str, every: int, rounds: int) -> dict[str, Any]:
    """Seconds of every round, seconds it then waited, the share of these, and how many checkpoints were written."""
    cache().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="run-", dir=cache()) as folder:  # on a disk, which /tmp may not be
        command = [sys.executable, "-m", "benchmarks.contenders.checkpointed", workload, folder]
        command += ["--every", str(every), "--rounds", str(rounds)]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    if done.returncode:
        raise RuntimeError(f"checkpoint: {(done.stderr.strip().splitlines() or ['it said nothing'])[-1]}")
    said = json.loads(done.stdout.splitlines()[-1])
    return {**said, "share": sum(said["waited"]) / sum(said["seconds"])}
