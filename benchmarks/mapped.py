"""Data larger than memory: seconds per round and memory, beside the same pictures in memory.

    python -m benchmarks.mapped [--gigabytes 2] [--part 1] [--folder DIR]

Random pictures (3 x 64 x 64 bytes, 10 classes) are written as shards to a folder, which is removed again. FedAvg, 10 of
100 clients, 20 local steps with batches of 50: a round reads 123 MB. The model is an MLP with 64 hidden units, whose
steps are short, so that the cost of reading shows. Every case is a command of its own, with a run directory, so all
data are read once at the start for their digest.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from . import machine, report
from .memory import Sampler
from .runner import ROOT
from .workloads import CORES, cache

RESULTS = Path(__file__).resolve().parent / "results"
SHAPE, CLASSES, CLIENTS = (3, 64, 64), 10, 100
PICTURE = 3 * 64 * 64
PLAN: dict[str, Any] = {"rounds": 11, "active": 10, "batch_size": 50, "local_steps": 20, "engine": "loop"}


def write(folder: Path, gigabytes: float, shard: float) -> None:
    """Write pictures of this size into a folder, a shard at a time."""
    import numpy as np

    stream, left = np.random.default_rng(0), int(gigabytes * 1e9 / PICTURE)
    total, number = left, 0
    while left:
        n = min(left, int(shard * 1e9 / PICTURE))
        rows = np.lib.format.open_memmap(folder / f"x-{number:03}.npy", "w+", np.uint8, (n, *SHAPE))
        for start in range(0, n, 1000):
            rows[start : start + 1000] = stream.integers(0, 256, (min(1000, n - start), *SHAPE), np.uint8)
        left, number = left - n, number + 1
    np.save(folder / "y.npy", stream.integers(0, CLASSES, total))


def run(folder: Path, mapped: bool) -> dict[str, Any]:
    """Run one case in this process and its workers; return its times."""
    import fedspeed
    from fedspeed.data import load

    begun = time.perf_counter()
    data = load("arrays", data_dir=folder, mapped=mapped, holdout=0.01, split="iid", clients=CLIENTS)
    model = fedspeed.build_model("mlp", data, hidden=[64])
    with tempfile.TemporaryDirectory(prefix="mapped-", dir=folder.parent) as out:
        placed = {"backend": "process", "workers": CORES, "out": Path(out) / "run"}
        with fedspeed.simulate("fedavg", model, data, **PLAN, **placed) as simulation:
            started = time.perf_counter() - begun
            each, used = [], []
            for record in simulation:
                each.append(record.seconds)
                used.append(machine.tree_seconds(os.getpid()))
    return {
        "pictures": len(data.y) + (0 if data.y_test is None else len(data.y_test)),
        "start_seconds": started,
        "first_round_seconds": each[0],
        "round_seconds": statistics.median(each[1:]),
        "processor_seconds": (used[-1] - used[0]) / (len(used) - 1),
    }


def measure(folder: Path, gigabytes: float, mapped: bool) -> dict[str, Any]:
    """Run one case in a process of its own, and return its times and the memory of all its processes."""
    command = [sys.executable, "-m", "benchmarks.mapped", "--case", str(folder), *["--mapped"] * mapped]
    meter = machine.Meter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    sampler = Sampler(process.pid)
    sampler.start()
    answer, _ = process.communicate()
    sampler.stop()
    if process.returncode:
        raise SystemExit(f"benchmarks.mapped: the case of {gigabytes:g} GB failed")
    found = json.loads(answer.splitlines()[-1])
    memory = {"peak_rss": sum(sampler.parts), "peak_pss": sampler.pss, "segments": sampler.segments}
    return {"gigabytes": gigabytes, "mapped": mapped, **found, **memory, "foreign_cores": meter.foreign()}


def cases(gigabytes: float, part: float, folder: Path) -> Iterator[dict[str, Any]]:
    """Write the pictures, and yield all of them on disk, then the first shard on disk and in memory."""
    import numpy as np

    whole, few = folder / "whole", folder / "part"
    for each in (whole, few):
        each.mkdir()
    begun = time.perf_counter()
    write(whole, gigabytes, part)
    say(f"{gigabytes:g} GB written in {time.perf_counter() - begun:.0f} s")
    first = np.load(whole / "x-000.npy", mmap_mode="r")
    os.link(whole / "x-000.npy", few / "x.npy")
    np.save(few / "y.npy", np.load(whole / "y.npy")[: len(first)])
    for size, place, mapped in ((gigabytes, whole, True), (part, few, True), (part, few, False)):
        found = measure(place, size, mapped)
        say(f"{size:g} GB {'on disk' if mapped else 'in memory'}: {found['round_seconds']:.2f} s per round")
        yield found


def say(text: str) -> None:
    """Print progress."""
    print(text, file=sys.stderr, flush=True)


def table(rows: list[dict[str, Any]]) -> str:
    """Return the cases as a Markdown table."""
    lines = [
        "| pictures | size, GB | inputs | start, s | s per round | of processors | peak RSS, GB | shared once, GB |",
        "|--:|--:|---|--:|--:|--:|--:|--:|",
    ]
    for row in rows:
        lines.append(
            f"| {row['pictures']:,} | {row['gigabytes']:g} | {'on disk' if row['mapped'] else 'in memory'} | "
            f"{row['start_seconds']:.0f} | {row['round_seconds']:.2f} | {row['processor_seconds']:.2f} | "
            f"{row['peak_rss'] / 1e9:.2f} | {row['peak_pss'] / 1e9:.2f} |"
        )
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mapped", description="Data larger than memory.")
    parser.add_argument("--gigabytes", type=float, default=2.0, metavar="G", help="size of all pictures, default 2")
    parser.add_argument("--part", type=float, default=1.0, metavar="G", help="size of the part in memory, default 1")
    parser.add_argument("--folder", type=Path, metavar="DIR", help="where they are written; default: the cache")
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="DIR", help="where the JSON file goes")
    parser.add_argument("--case", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--mapped", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.case:
        print(json.dumps(run(args.case, args.mapped)))
        return 0
    machine.require_linux()
    base = args.folder or cache()
    base.mkdir(parents=True, exist_ok=True)
    if not 0 < args.part <= args.gigabytes or shutil.disk_usage(base).free < 1.1e9 * args.gigabytes:
        parser.error(f"expected 0 < --part <= --gigabytes, and as much room in {base.name}/")
    with tempfile.TemporaryDirectory(prefix="pictures-", dir=base) as folder:
        rows = list(cases(args.gigabytes, args.part, Path(folder)))
    busiest = max(row["foreign_cores"] for row in rows)
    busy = [f"others used up to {busiest:.2f} cores"] if busiest > machine.BUSY else []
    command = f"python -m benchmarks.mapped --gigabytes {args.gigabytes:g} --part {args.part:g}"
    result = {"command": command, "environment": machine.environment(), "busy": busy, "cases": rows}
    text = "\n\n".join(
        [f"`{command}`", ", ".join(f"{key} {value}" for key, value in result["environment"].items())]
        + [f"**BUSY MACHINE**: {warning}" for warning in busy]
        + [table(rows)]
    )
    print(text)
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-mapped"
    print(f"\nwritten: {report.write(args.out, name, result, text).name} in {args.out.name}/")
    return 0


if __name__ == "__main__":
    sys.exit(main())
