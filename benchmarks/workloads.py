"""The workloads: sizes and arrays, the same for every contender.

Imports neither torch nor fedspeed: the peers' environments read this file too. The arrays are `.npy` files in the
cache, made once by `benchmarks.arrays` and memory-mapped by every contender.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

CORES = 2
"""Every contender has this many cores: as threads of one process, or as processes of one thread."""


@dataclass(frozen=True)
class Workload:
    """One federation: `clients` clients of `samples` samples, `active` of them per round.

    Args:
        data: name of the arrays.
        model: name of the model.
        turn: rounds in one turn of a contender; the turn counts as its median.
    """

    name: str
    data: str
    model: str
    clients: int
    samples: int
    active: int
    batch: int
    epochs: int
    lr: float
    turn: int = 1

    @property
    def folder(self) -> Path:
        """The folder of the arrays."""
        return cache() / "data" / self.data


class Part(NamedTuple):
    """The part of a workload's round that is timed: clients per round and epochs; 0 for the workload's own."""

    active: int = 0
    epochs: int = 0

    def options(self) -> list[str]:
        """Return the options that say so to a contender; see `add_workload`."""
        return [text for name, n in self._asdict().items() if n for text in (f"--{name}", str(n))]


class Arrays(NamedTuple):
    """Inputs (clients, samples, ...) as float32, labels as int64, and test samples without the client axis."""

    x: np.ndarray
    y: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray


_ALL = Part()
_W1 = Workload("W1", "cifar10-100", "resnet18_gn", 100, 500, 4, 50, 1, 0.02)
_W2 = Workload("W2", "cifar10-100", "cnn", 100, 500, 10, 50, 1, 0.05)
_W3 = Workload("W3", "vectors-1000", "mlp", 1000, 20, 100, 10, 2, 0.1, turn=10)
_W4 = Workload("W4", "cifar10-500", "resnet18_gn", 500, 100, 10, 20, 2, 0.02)
_W5 = Workload("W5", "cifar10-100", "resnet18_gn", 100, 500, 10, 50, 5, 0.02)
_SMOKE = Workload("smoke", "vectors-10", "mlp", 10, 20, 4, 10, 2, 0.1, turn=2)
WORKLOADS = {w.name: w for w in (_W1, _W2, _W3, _W4, _W5, _SMOKE)}
ABOUT = {
    "W1": "ResNet-18-GN, CIFAR-10, 100 clients x 500, 4 active, batch 50, 1 epoch",
    "W2": "CNN conv5x5(32)-pool-conv5x5(64)-pool-128-10, CIFAR-10, 100 x 500, 10 active, batch 50, 1 epoch",
    "W3": "MLP 64-64-10, 1000 x 20, 100 active, batch 10, 2 epochs",
    "W4": "ResNet-18-GN, CIFAR-10, 500 clients x 100, 10 active, batch 20, 2 epochs: the paper's 2% setting",
    "W5": "ResNet-18-GN, CIFAR-10, 100 clients x 500, 10 active, batch 50, 5 epochs: the paper's 10% setting",
    "smoke": "MLP 64-64-10, 10 x 20, 4 active, batch 10, 2 epochs: shows that the harness works, no more",
}


def find(name: str, part: Part = _ALL) -> Workload:
    """Return a workload by name, or the part of it that is timed."""
    return replace(WORKLOADS[name], **{field: n for field, n in part._asdict().items() if n})


def add_workload(parser: argparse.ArgumentParser) -> None:
    """Add a contender's first argument, and the options of the part that is timed."""
    parser.add_argument("workload")
    parser.add_argument("--active", type=int, default=0, help="clients per round; 0: the workload's own")
    parser.add_argument("--epochs", type=int, default=0, help="epochs of a client; 0: the workload's own")


def asked(args: argparse.Namespace) -> Workload:
    """Return the workload that the options of `add_workload` ask for."""
    return find(args.workload, Part(args.active, args.epochs))


def load(workload: Workload) -> Arrays:
    """Return the arrays, mapped copy-on-write: every process sees the same pages."""
    return Arrays(*(np.load(workload.folder / f"{name}.npy", mmap_mode="c") for name in Arrays._fields))


def cache() -> Path:
    """Return the folder of arrays and of the peers' environments: `$XDG_CACHE_HOME/fedspeed-bench`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fedspeed-bench"
