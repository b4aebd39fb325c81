"""Start-up: `fedspeed --version`, and `fedspeed run --data digits` to its first round done, all else at its default."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from .runner import ROOT
from .stats import median

PATIENCE = 120.0


def measure(times: int) -> dict[str, Any]:
    """Return seconds of every start and their median, as JSON takes them; the first of all is not counted."""
    found = {}
    for what, once in (("version", version), ("run", first_round)):
        once()
        seconds = [once() for _ in range(times)]
        found[what] = {"seconds": seconds, "median": median(seconds)}
    return found


def line(found: dict[str, Any]) -> str:
    """Return the medians in words."""
    return (
        f"start-up: `fedspeed --version` {found['version']['median']:.2f} s, "
        f"`fedspeed run --data digits` to its first round {found['run']['median']:.2f} s"
    )


def command() -> list[str]:
    """Return the installed command, or the package as a program where there is none."""
    installed = Path(sys.executable).with_name("fedspeed")
    return [str(installed)] if installed.exists() else [sys.executable, "-m", "fedspeed"]


def version() -> float:
    """Time `fedspeed --version` until it has ended."""
    begun = time.perf_counter()
    subprocess.run([*command(), "--version"], stdout=subprocess.DEVNULL, check=True, env=_environment())
    return time.perf_counter() - begun


def first_round() -> float:
    """Start a run, wait for the first line of its `rounds.jsonl`, stop it."""
    with tempfile.TemporaryDirectory(prefix="fedspeed-bench-") as folder:
        out = Path(folder) / "run"
        run = [*command(), "run", "--data", "digits", "--out", str(out), "--quiet"]
        begun = time.perf_counter()
        process = subprocess.Popen(run, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=_environment())
        try:
            while not _has_a_line(out / "rounds.jsonl"):
                if process.poll() or time.perf_counter() - begun > PATIENCE:
                    raise RuntimeError(f"fedspeed run: no round within {PATIENCE:.0f} s (code {process.poll()})")
                time.sleep(0.005)
            return time.perf_counter() - begun
        finally:
            process.kill()
            process.wait()


def _environment() -> dict[str, str]:
    """Return the environment in which the command imports the package of this checkout."""
    return {**os.environ, "PYTHONPATH": str(ROOT)}


def _has_a_line(path: Path) -> bool:
    return path.exists() and b"\n" in path.read_bytes()
