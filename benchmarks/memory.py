"""Memory of a FedSpeed run in which every client has a state: the whole process tree, sampled."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from . import machine
from .runner import ROOT
from .workloads import cache

PARAMETERS = {"resnet18_gn": 4_234_826, "cnn": 145_834}
BATCH = {"resnet18_gn": 50, "cnn": 5}  # 10,000 clients of CIFAR-10 have five pictures each
FULL, SCALED = 500, 40
FEW, MANY, QUICK_MANY = 100, 10_000, 500
TURNS = 2_000
"""Client turns of the run with few clients: enough for memory to settle."""


@dataclass(frozen=True)
class Peak:
    """The largest sums over the tree: RSS counts shared pages once per process, PSS once in total. `segments` is the
    size of the files in memory, mapped or not: RSS and this together are an upper bound."""

    model: str
    clients: int
    touched: int = 0
    rss: int = 0
    pss: int = 0
    segments: int = 0
    parts: tuple[int, ...] = ()  # RSS of every process at the peak of RSS, largest first
    seconds: float = 0.0
    failure: str = ""


class Sampler(threading.Thread):
    """Sampler of a process tree until it is stopped: RSS every 100 ms, the rest (slower to read) every second."""

    def __init__(self, root: int) -> None:
        super().__init__(daemon=True)
        self.root, self.pss, self.segments, self.parts = root, 0, 0, list[int]()
        self._over = threading.Event()

    def run(self) -> None:
        """Sample."""
        turn = 0
        while not self._over.wait(0.1):
            self.parts = max(self.parts, machine.tree_memory(self.root), key=sum)
            if turn % 10 == 0:
                self.pss = max(self.pss, sum(machine.tree_memory(self.root, proportional=True)))
                self.segments = max(self.segments, machine.tree_segments(self.root))
            turn += 1

    def stop(self) -> None:
        """End the samples."""
        self._over.set()
        self.join()


def measure(full: bool, quick: bool, say: Callable[[str], None]) -> dict[str, Any]:
    """Return all the memory figures, as JSON takes them."""
    many = QUICK_MANY if quick else MANY
    runs = [("resnet18_gn", FULL if full else SCALED), ("cnn", FEW), ("cnn", many)]
    peaks = []
    for model, clients in runs:
        peak = touch_all(model, clients, max(clients, min(many, TURNS) if model == "cnn" else 0))
        peaks.append(peak)
        say(peak.failure or f"{model}, {clients} clients touched: {peak.rss / 1e9:.2f} GB RSS ({peak.seconds:.0f} s)")
    few, lot = peaks[1:]
    growth = lot.rss / few.rss - 1 if few.rss and lot.rss else None
    return {"peaks": [asdict(peak) for peak in peaks], "growth": growth, "full": full}


def touch_all(model: str, clients: int, turns: int) -> Peak:
    """Run until every client has a state; states go to a folder in the cache, which is removed again."""
    base = cache()
    base.mkdir(parents=True, exist_ok=True)
    needed = int(1.1 * 4 * PARAMETERS[model] * clients) + 2**30
    free = shutil.disk_usage(base).free
    if free < needed:
        return Peak(model, clients, failure=f"{needed / 1e9:.0f} GB of disk needed, {free / 1e9:.0f} GB free")
    sizes = [str(clients), "--turns", str(turns), "--batch", str(BATCH[model])]
    command = [sys.executable, "-m", "benchmarks.contenders.touch", model, *sizes]
    with tempfile.TemporaryDirectory(prefix="states-", dir=base) as folder, tempfile.TemporaryFile("w+") as errors:
        begun = time.monotonic()
        environment = {**os.environ, "TMPDIR": folder, "PYTHONPATH": str(ROOT)}
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, cwd=ROOT, env=environment, start_new_session=True
        )
        sampler = Sampler(process.pid)
        sampler.start()
        try:
            answer, _ = process.communicate()
        finally:
            sampler.stop()
            with contextlib.suppress(OSError):
                process.kill()
        seconds = time.monotonic() - begun
        if process.returncode:
            errors.seek(0)
            lines = errors.read().strip().splitlines()
            return Peak(model, clients, failure=f"failed: {lines[-1][:200] if lines else process.returncode}")
    touched = int(json.loads(answer)["touched"])
    failure = "" if touched == clients else f"only {touched} of {clients} clients have a state"
    parts = tuple(sorted(sampler.parts, reverse=True))
    return Peak(model, clients, touched, sum(parts), sampler.pss, sampler.segments, parts, seconds, failure)
