"""The cost of data: gathering and augmenting a batch against a training step, and making a split.

    python benchmarks/data_pipeline.py [--batches 200] [--json]

Real CIFAR-10 (fetched into the cache at first use), batches of 50, one thread, and the small CNN of the federated
literature: conv 5x5 (32), pool, conv 5x5 (64), pool, 128 hidden units, 10 outputs. Claim: under 3% of a step.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
from torch import nn

from fedspeed.data import Federated, load
from fedspeed.data.splits import parse_split
from fedspeed.utils.random import rng

BATCH = 50


def small_cnn() -> nn.Module:
    """conv5x5(32)-pool-conv5x5(64)-pool-128-10."""
    return nn.Sequential(
        nn.Conv2d(3, 32, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 8 * 8, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


def median_ms(run: Callable[[], object], times: int) -> float:
    """Return median milliseconds of a call, after three to warm up."""
    for _ in range(3):
        run()
    found = []
    for _ in range(times):
        start = time.perf_counter()
        run()
        found.append(time.perf_counter() - start)
    return 1000 * statistics.median(found)


def pipeline_cost(data: Federated, batches: int = 200) -> dict[str, float]:
    """Return milliseconds of a batch (gather, augment, normalise) and of a training step on it, and their ratio."""
    model = small_cnn()
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    stream = rng(0, "benchmark")
    order = itertools.cycle(np.split(stream.permutation(data.indices), len(data.indices) // BATCH))

    def batch() -> tuple[torch.Tensor, torch.Tensor]:
        return data.batch(next(order), stream)

    x, y = batch()

    def step() -> None:
        optimiser.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimiser.step()

    cost, work = median_ms(batch, 5 * batches), median_ms(step, max(5, batches // 10))
    return {"batch_ms": cost, "step_ms": work, "share": cost / (cost + work)}


def split_cost(labels: np.ndarray) -> dict[str, float]:
    """Return milliseconds to make a split of 50,000 samples."""
    names = ("iid", "dirichlet:0.6", "dirichlet-refill:0.6", "dirichlet-class:0.6", "pathological:2", "shards:2")
    return {
        f"{s} x {n}": median_ms(lambda s=s, n=n: parse_split(s)(labels, n, 0), 3) for s in names for n in (100, 500)
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=200)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    start = time.perf_counter()
    data = load("cifar10", split="dirichlet:0.6", clients=100)
    loading = time.perf_counter() - start
    found = {
        "load_s": loading,
        **{augment: pipeline_cost(load("cifar10", augment=augment), args.batches) for augment in ("paper", "released")},
        "split_ms": split_cost(data.y.numpy()),
        "torch": torch.__version__,
        "machine": platform.machine(),
    }
    if args.json:
        print(json.dumps(found, indent=2))
        return
    print(f"torch {found['torch']}, {found['machine']}, one thread; CIFAR-10 verified and split in {loading:.2f} s")
    for augment in ("paper", "released"):
        cost = found[augment]
        print(
            f"{augment:>9}: batch of {BATCH} {cost['batch_ms']:.2f} ms, training step {cost['step_ms']:.1f} ms, "
            f"share {cost['share']:.2%}"
        )
    for name, cost in found["split_ms"].items():
        print(f"{name:>27} clients: {cost:7.1f} ms")


if __name__ == "__main__":
    main()
