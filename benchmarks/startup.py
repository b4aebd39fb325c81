"""Start-up: from the command `fedspeed run` to its first round done, on digits, everything at its default."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

from .stats import median

PATIENCE = 120.0


def measure(times: int) -> dict[str, object]:
    """Return seconds of every start and their median, as JSON takes them."""
    seconds = [first_round() for _ in range(times)]
    return {"seconds": seconds, "median": median(seconds)}


def first_round() -> float:
    """Start a run, wait for the first line of its `rounds.jsonl`, stop it."""
    with tempfile.TemporaryDirectory(prefix="fedspeed-bench-") as folder:
        out = Path(folder) / "run"
        command = [sys.executable, "-c", "from fedspeed.cli import main; main()", "run", "--out", str(out), "--quiet"]
        begun = time.perf_counter()
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            while not _has_a_line(out / "rounds.jsonl"):
                if process.poll() or time.perf_counter() - begun > PATIENCE:
                    raise RuntimeError(f"fedspeed run: no round within {PATIENCE:.0f} s (code {process.poll()})")
                time.sleep(0.005)
            return time.perf_counter() - begun
        finally:
            process.kill()
            process.wait()


def _has_a_line(path: Path) -> bool:
    return path.exists() and b"\n" in path.read_bytes()
