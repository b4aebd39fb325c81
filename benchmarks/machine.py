"""The machine and its load: time and memory of a tree of processes, and the time of all other processes.

Reads /proc, so Linux only; nothing to install.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
import time
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

PROC = Path("/proc")
BUSY = 0.1
"""Cores in use by others from which the machine counts as busy."""


class Process(NamedTuple):
    """A line of /proc/PID/stat; seconds include those of children that have ended."""

    pid: int
    parent: int
    seconds: float


def processes() -> dict[int, Process]:
    """Return all processes."""
    found = {}
    for entry in PROC.iterdir():
        if not entry.name.isdigit():
            continue
        try:
            text = (entry / "stat").read_text()
        except OSError:  # it has just ended
            continue
        fields = text.rpartition(")")[2].split()
        ticks = sum(int(field) for field in fields[11:15])
        found[int(entry.name)] = Process(int(entry.name), int(fields[1]), ticks / os.sysconf("SC_CLK_TCK"))
    return found


def tree(root: int, among: dict[int, Process] | None = None) -> list[Process]:
    """Return a process and all that descend from it."""
    among = processes() if among is None else among
    children: dict[int, list[Process]] = {}
    for process in among.values():
        children.setdefault(process.parent, []).append(process)
    found, waiting = [], [among[root]] if root in among else []
    while waiting:
        process = waiting.pop()
        found.append(process)
        waiting += children.get(process.pid, [])
    return found


def tree_seconds(root: int) -> float:
    """Return the processor time that a tree has used."""
    return sum(process.seconds for process in tree(root))


def tree_memory(root: int, proportional: bool = False) -> list[int]:
    """Return the bytes resident per process of a tree: RSS, or PSS (a page shared by n processes counts 1/n)."""
    found = []
    for process in tree(root):
        try:
            if proportional:
                lines = (PROC / str(process.pid) / "smaps_rollup").read_text().splitlines()
                found.append(1024 * next(int(line.split()[1]) for line in lines if line.startswith("Pss:")))
            else:
                pages = int((PROC / str(process.pid) / "statm").read_text().split()[1])
                found.append(pages * os.sysconf("SC_PAGE_SIZE"))
        except (OSError, StopIteration):  # it has just ended
            continue
    return found


def tree_segments(root: int) -> int:
    """Return the bytes of a tree's open memory files (memfd); unmapped ones are in neither RSS nor PSS."""
    found: dict[int, int] = {}
    for process in tree(root):
        try:
            for entry in (PROC / str(process.pid) / "fd").iterdir():
                if os.readlink(entry).startswith("/memfd:"):
                    status = entry.stat()
                    found[status.st_ino] = 512 * status.st_blocks
        except OSError:  # it has just ended, or closed the file
            continue
    return sum(found.values())


def tree_peak(root: int) -> int:
    """Return the largest RSS that each process of a tree has had, summed: no less than the tree's peak."""
    total = 0
    for process in tree(root):
        try:
            lines = (PROC / str(process.pid) / "status").read_text().splitlines()
            total += 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))
        except (OSError, StopIteration):  # it has just ended
            continue
    return total


class Meter:
    """Meter of the cores that other processes have kept busy: busy time of our cores minus our tree's."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Start the meter again."""
        self._started, self._busy, self._own = time.perf_counter(), _busy_seconds(), tree_seconds(os.getpid())

    def foreign(self) -> float:
        """Return the number of cores used by others, on average; 0 where the clock of /proc (10 ms) cannot tell."""
        elapsed = time.perf_counter() - self._started
        others = (_busy_seconds() - self._busy) - (tree_seconds(os.getpid()) - self._own)
        return max(0.0, others / elapsed) if elapsed >= 0.2 else 0.0


def _busy_seconds() -> float:
    """Return the time in which our cores did something, or were taken by another virtual machine."""
    wanted = {f"cpu{core}" for core in os.sched_getaffinity(0)}
    ticks = 0
    for line in (PROC / "stat").read_text().splitlines():
        name, *fields = line.split()
        if name in wanted:
            user, nice, system, _idle, _wait, irq, softirq, steal = (int(field) for field in fields[:8])
            ticks += user + nice + system + irq + softirq + steal
    return ticks / os.sysconf("SC_CLK_TCK")


def pin(cores: int) -> list[int]:
    """Keep this process and its children on so many physical cores, so that every contender has the same."""
    allowed = sorted(os.sched_getaffinity(0))
    physical: dict[str, int] = {}
    for core in allowed:
        topology = Path(f"/sys/devices/system/cpu/cpu{core}/topology")
        try:
            name = f"{(topology / 'physical_package_id').read_text()}/{(topology / 'core_id').read_text()}"
        except OSError:
            name = str(core)
        physical.setdefault(name, core)
    chosen = (list(physical.values()) + [core for core in allowed if core not in physical.values()])[:cores]
    os.sched_setaffinity(0, chosen)
    return chosen


def adopt_orphans() -> None:
    """Make processes whose parent ends children of this one, so that the tree stays complete."""
    PR_SET_CHILD_SUBREAPER = 36
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def available_memory() -> int:
    """Return the bytes that are available without swapping."""
    lines = (PROC / "meminfo").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))


def environment(packages: Iterable[str] = ("fedspeed", "torch", "numpy")) -> dict[str, object]:
    """Return the facts about the machine that a reader of the numbers needs."""
    models = [line for line in (PROC / "cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return {
        "cpu": models[0].partition(":")[2].strip() if models else platform.machine(),
        "cores": os.cpu_count(),
        "cores_used": len(os.sched_getaffinity(0)),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        **{name: version(name) for name in packages},
        "date": time.strftime("%Y-%m-%d"),
    }


def require_linux() -> None:
    """Leave with a message where /proc cannot be read."""
    if not sys.platform.startswith("linux"):
        raise SystemExit(f"benchmarks: need Linux (they read /proc), found {sys.platform}")
