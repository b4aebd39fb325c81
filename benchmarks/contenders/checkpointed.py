"""A run of FedAvg into a run directory, and how long its rounds waited for checkpoints.

python -m benchmarks.contenders.checkpointed WORKLOAD FOLDER --every N --rounds N
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from fedspeed.config.config import Config
from fedspeed.record import Record
from fedspeed.runs.checkpoint import Checkpoints
from fedspeed.runs.launch import run_config
from fedspeed.server.observers import Observer
from fedspeed.server.simulation import Simulation

from ..workloads import CORES, Workload, find
from .ours import MODELS


def config(workload: Workload, every: int, rounds: int) -> Config:
    """Return the workload as `fedspeed run` would take it."""
    name, options = MODELS[workload.model]
    pictures = workload.data.startswith("cifar10")
    return Config.from_dict(
        {
            "method": "fedavg",
            "model": {"name": name, **options},
            "data": "cifar10" if pictures else "digits",
            "split": "iid",
            "augment": "none",
            "clients": workload.clients,
            "active": workload.active,
            "batch_size": workload.batch,
            "local_epochs": workload.epochs,
            "lr": workload.lr,
            "rounds": rounds,
            "eval_every": rounds,
            "checkpoint_every": every,
            "backend": "process" if pictures else "auto",
            "workers": CORES,
            "device": "cpu",
        }
    )


def main() -> None:
    """Run, and report the time of the rounds and of their waits."""
    parser = argparse.ArgumentParser()
    parser.add_argument("workload")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--every", type=int, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    args = parser.parse_args()
    waited: list[float] = []
    written: list[int] = []
    seconds: list[float] = []
    offer, write = Checkpoints.maybe_write, Checkpoints.write

    def timed(self: Checkpoints, t: int, server: Any, states: Any) -> None:
        begun = time.perf_counter()
        offer(self, t, server, states)
        waited.append(time.perf_counter() - begun)

    def counted(self: Checkpoints, t: int, server: Any, states: Any) -> None:
        if len(waited) < args.rounds:  # the last one, after the rounds, is not waited for in any of them
            written.append(t)
        write(self, t, server, states)

    class Times(Observer):
        def round(self, record: Record, run: Simulation) -> None:
            seconds.append(record.seconds)

    Checkpoints.maybe_write, Checkpoints.write = timed, counted  # type: ignore[method-assign]
    run_config(
        config(find(args.workload), args.every, args.rounds),
        args.folder / "run",
        observers=[Times()],
    )
    print(json.dumps({"every": args.every, "seconds": seconds, "waited": waited, "written": len(written)}), flush=True)


if __name__ == "__main__":
    main()
