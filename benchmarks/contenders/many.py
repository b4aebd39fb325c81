"""SCAFFOLD over very many clients into a run directory: the time of a round while more and more have a state.

python -m benchmarks.contenders.many FOLDER --clients N --active N --rounds N
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np

from fedspeed.config.config import Config
from fedspeed.record import Record
from fedspeed.runs.launch import run_config
from fedspeed.server.observers import Observer
from fedspeed.server.simulation import Simulation

FEATURES, CLASSES = 9, 3


def data(path: Path, clients: int) -> str:
    """Write a file with one sample per client."""
    r = np.random.default_rng(0)
    x, y = r.normal(size=(clients, FEATURES)).astype("f4"), r.integers(0, CLASSES, clients)
    np.savez(path, x=x, y=y, x_test=x[:1000], y_test=y[:1000])
    return str(path)


def main() -> None:
    """Run, and report the time of the rounds."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--clients", type=int, required=True)
    parser.add_argument("--active", type=int, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    args = parser.parse_args()
    config = Config.from_dict(
        {
            "method": "scaffold",
            "model": "linear",
            "data": "arrays",
            "data_dir": data(args.folder / "data.npz", args.clients),
            "split": "iid",
            "clients": args.clients,
            "active": args.active,
            "local_steps": 1,
            "rounds": args.rounds,
            "backend": "serial",
        }
    )
    ended, seconds = [], []

    class Times(Observer):
        def round(self, record: Record, run: Simulation) -> None:
            ended.append(time.perf_counter())
            seconds.append(record.seconds + record.eval_seconds)

    summary = run_config(config, args.folder / "run", observers=[Times()])
    wall = np.diff(ended).tolist()
    touched = len({i for text in (args.folder / "run" / "rounds.jsonl").open() for i in json.loads(text)["cohort"]})
    print(
        json.dumps({
            "touched": touched, "wall": wall, "seconds": seconds[1:], "waited": summary["checkpoint_seconds"],
        }),
        flush=True,
    )  # fmt: skip


if __name__ == "__main__":
    main()
