"""FedSpeed until every client has a state on disk, for the memory benchmark.

python -m benchmarks.contenders.touch MODEL CLIENTS --turns N --batch B

Clients take turns instead of being drawn, so that all of them are touched in as few rounds as possible. One local
step each: memory depends on the model and the batch, not on the number of steps.
"""

from __future__ import annotations

import argparse
import json

import numpy as np

import fedspeed
from fedspeed import simulate
from fedspeed.server import cohort as cohorts

from ..workloads import CORES

ACTIVE = 10
AGAIN = 1
"""Rounds after the last client's first turn, in which states are read back."""


def in_turn(seed: int, t: int, clients: int, active: int, scheme: str = "fixed") -> np.ndarray:
    """Return the cohort of round t: the next `active` clients."""
    return np.sort(np.arange(t * active, (t + 1) * active) % clients)


def main() -> None:
    """Train, and report how many clients have a state."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("clients", type=int)
    parser.add_argument("--turns", type=int, required=True, help="client turns in all, at least one per client")
    parser.add_argument("--batch", type=int, required=True)
    args = parser.parse_args()
    cohorts.cohort = in_turn
    data = fedspeed.load_data("cifar10", split="iid", clients=args.clients, augment="none")
    rounds = -(-args.turns // ACTIVE) + AGAIN
    run = simulate(
        fedspeed.FedSpeed(),
        fedspeed.build_model(args.model, data, **({"trim": True} if args.model == "resnet18_gn" else {})),
        data,
        rounds=rounds,
        eval_every=rounds,
        active=ACTIVE,
        local_steps=1,
        batch_size=args.batch,
        lr=0.01,
        device="cpu",
        engine="loop",
        backend="process",
        workers=CORES,
        states="disk",
    )
    with run:
        for _ in range(rounds - 1):  # the last one would evaluate
            run.step()
        print(json.dumps({"touched": len(run.states)}), flush=True)


if __name__ == "__main__":
    main()
