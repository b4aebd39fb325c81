"""A million clients: seconds per round and peak memory. `python -m benchmarks.scale`: three minutes on an idle machine.

Every case is a process of its own: N known clients with two samples each (8 features, 3 classes), a linear model of 27
parameters, S of them active, one local step. So what is measured is what clients cost beside their training.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from . import machine, report
from .runner import ROOT
from .workloads import cache

RESULTS = Path(__file__).resolve().parent / "results"
SAMPLES, FEATURES, CLASSES = 2, 8, 3


@dataclass(frozen=True)
class Case:
    """One case: N known clients, S active, the place of states, and whether there is a run directory."""

    method: str
    known: int
    active: int
    rounds: int
    states: str = "memory"
    recorded: bool = False


CASES = [
    Case("fedavg", 10_000, 100, 20),
    Case("fedavg", 1_000_000, 100, 20),
    Case("scaffold", 1_000_000, 100, 20),
    Case("fedspeed", 1_000_000, 100, 20),
    Case("scaffold", 1_000_000, 100, 20, recorded=True),
    Case("scaffold", 1_000_000, 100, 20, states="disk"),
    Case("fedavg", 1_000_000, 10_000, 5),
    Case("scaffold", 1_000_000, 10_000, 5),
    Case("fedspeed", 1_000_000, 10_000, 5),
    Case("scaffold", 1_000_000, 10_000, 5, recorded=True),
    Case("scaffold", 1_000_000, 10_000, 3, states="disk"),
]


def run(case: Case, folder: Path | None) -> dict[str, Any]:
    """Run one case in this process; return its time and memory."""
    import numpy as np

    import fedspeed

    begun = time.perf_counter()
    imported = peak()
    r = np.random.default_rng(0)
    x = r.standard_normal((case.known * SAMPLES, FEATURES), dtype=np.float32)
    y = (x[:, 0] > 0).astype(np.int64) + (x[:, 1] > 0)
    made = time.perf_counter()
    owner = np.repeat(np.arange(case.known), SAMPLES)
    data = fedspeed.Federated.from_arrays(x, y, owner, test=(x[:1000], y[:1000]), classes=CLASSES)
    plan = {"rounds": case.rounds, "active": case.active, "batch_size": SAMPLES, "local_epochs": 1}
    given = {"states": case.states, "backend": "serial", "eval_every": case.rounds}
    out = None if folder is None else folder / "run"
    simulation = fedspeed.simulate(case.method, fedspeed.build_model("linear", data), data, out=out, **plan, **given)
    wall = [time.perf_counter()]
    started = wall[0] - made
    with simulation:
        for _ in simulation:
            wall.append(time.perf_counter())
    return {
        "arrays_seconds": made - begun,
        "start_seconds": started,
        "round_seconds": statistics.median(b - a for a, b in pairwise(wall[1:])),
        "end_seconds": time.perf_counter() - wall[-1],
        "touched": len(simulation.states),
        "peak_rss": peak(),
        "imported_rss": imported,
        "parameters": simulation.work.flat.d,
    }


def peak() -> int:
    """Return the largest RSS of this process so far."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def measure(cases: list[Case]) -> Iterator[dict[str, Any]]:
    """Yield every case, run in a separate process, with the number of cores that others used."""
    for case in cases:
        meter = machine.Meter()
        with tempfile.TemporaryDirectory(prefix="scale-", dir=cache()) as folder:
            command = [sys.executable, "-m", "benchmarks.scale", "--case", json.dumps(asdict(case)), "--folder", folder]
            done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
        if done.returncode:
            raise SystemExit(f"benchmarks.scale: {case} failed: {done.stderr.strip().splitlines()[-1:]}")
        found = {**asdict(case), **json.loads(done.stdout.splitlines()[-1]), "foreign_cores": meter.foreign()}
        print(f"{case.method}, {case.active:,} of {case.known:,}: {found['round_seconds']:.3f} s", file=sys.stderr)
        yield found


def table(rows: list[dict[str, Any]]) -> str:
    """Return the cases as a Markdown table."""
    lines = [
        "| method | known | active | states | run directory | start, s | s per round | with a state | peak RSS, MB |",
        "|---|--:|--:|---|---|--:|--:|--:|--:|",
    ]
    for row in rows:
        recorded = "yes" if row["recorded"] else ""
        lines.append(
            f"| {row['method']} | {row['known']:,} | {row['active']:,} | {row['states'] if row['touched'] else '-'} | "
            f"{recorded} | {row['start_seconds']:.1f} | {row['round_seconds']:.3f} | {row['touched']:,} | "
            f"{row['peak_rss'] / 1e6:.0f} |"
        )
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale", description="A million clients.")
    parser.add_argument("--known", type=int, default=0, metavar="N", help="another number of known clients")
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="DIR", help="where the JSON file goes")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.case:
        case = Case(**json.loads(args.case))
        print(json.dumps(run(case, args.folder if case.recorded else None)))
        return 0
    machine.require_linux()
    if args.known < 0:
        parser.error("--known must be at least 1")
    chosen = [Case(**{**asdict(case), "known": args.known, "active": min(case.active, args.known)}) for case in CASES]
    cache().mkdir(parents=True, exist_ok=True)
    rows = list(measure(chosen if args.known else CASES))
    busiest = max(row["foreign_cores"] for row in rows)
    busy = [f"others used up to {busiest:.2f} cores"] if busiest > machine.BUSY else []
    command = " ".join(["python -m benchmarks.scale", *(sys.argv[1:] if argv is None else argv)])
    result = {"command": command, "environment": machine.environment(), "busy": busy, "cases": rows}
    text = "\n\n".join(
        [f"`{command}`", ", ".join(f"{key} {value}" for key, value in result["environment"].items())]
        + [f"**BUSY MACHINE**: {warning}" for warning in busy]
        + [table(rows)]
    )
    print(text)
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-scale"
    print(f"\nwritten: {report.write(args.out, name, result, text).name} in {args.out.name}/")
    return 0


if __name__ == "__main__":
    sys.exit(main())
