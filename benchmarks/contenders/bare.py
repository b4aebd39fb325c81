"""The bare PyTorch loop: SGD over the active clients' data and nothing else, a lower bound for any simulator.

No copy of the server's model, no averaging, no states: whatever a federated method adds comes on top. One process
with two threads, or two processes with one thread that share the clients of a round out between them.

python -m benchmarks.contenders.bare WORKLOAD [--processes 2] [--layers ours] [--gradients 2] [--active N] [--epochs N]
"""

from __future__ import annotations

import argparse
from multiprocessing import get_context
from multiprocessing.connection import Connection

import numpy as np
import torch
from torch import nn

from .. import stock
from ..protocol import serve
from ..workloads import CORES, Workload, add_workload, asked, load


class Loop:
    """A share of the clients of every round.

    Args:
        share: this process and how many there are.
        layers: `stock`, or `ours` for the layers of `fedspeed.models`.
        gradients: gradients a step; the step uses the last.
    """

    def __init__(self, workload: Workload, share: tuple[int, int], layers: str, gradients: int) -> None:
        torch.set_num_threads(CORES // share[1])
        self.workload, self.share, self.gradients = workload, share, gradients
        self.arrays = load(workload)
        self.x, self.y = torch.from_numpy(self.arrays.x), torch.from_numpy(self.arrays.y)
        self.model = stock.build(workload.model) if layers == "stock" else _with_our_layers(workload)
        self.optimiser = torch.optim.SGD(self.model.parameters(), lr=workload.lr)
        self.t = 0

    def round(self) -> None:
        """Train on this process's clients of the next round."""
        w, (rank, ranks) = self.workload, self.share
        cohort = np.random.default_rng(self.t).choice(w.clients, w.active, replace=False)
        self.t += 1
        for client in cohort[rank::ranks]:
            x, y = self.x[client], self.y[client]
            for _ in range(w.epochs):
                for rows in torch.randperm(w.samples).split(w.batch):
                    self.step(x[rows], y[rows])

    def step(self, x: torch.Tensor, y: torch.Tensor) -> None:
        """Take one step of SGD."""
        for _ in range(self.gradients):
            self.optimiser.zero_grad()
            nn.functional.cross_entropy(self.model(x), y).backward()
        self.optimiser.step()

    def check(self) -> float:
        """Return accuracy of this process's model."""
        return stock.accuracy(self.model, self.arrays)


def _with_our_layers(workload: Workload) -> nn.Module:
    """Return the model as fedspeed builds it."""
    from fedspeed import build_model

    from .. import arrays
    from .ours import MODELS

    name, options = MODELS[workload.model]
    return build_model(name, arrays.federated(workload), **options)


def _follow(pipe: Connection, *settings: object) -> None:
    """A process beside the first: a round for every message, until the other end closes."""
    loop = Loop(*settings)  # type: ignore[arg-type]
    pipe.send("ready")
    try:
        while True:
            pipe.recv()
            loop.round()
            pipe.send("done")
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass


def main() -> None:
    """Serve rounds; this process is also the first of the workers."""
    parser = argparse.ArgumentParser()
    add_workload(parser)
    parser.add_argument("--processes", type=int, default=1, choices=(1, CORES))
    parser.add_argument("--layers", choices=("stock", "ours"), default="stock")
    parser.add_argument("--gradients", type=int, default=1)
    args = parser.parse_args()
    workload = asked(args)
    pipes = []
    for rank in range(1, args.processes):
        here, there = get_context("spawn").Pipe()
        settings = (workload, (rank, args.processes), args.layers, args.gradients)
        get_context("spawn").Process(target=_follow, args=(there, *settings), daemon=True).start()
        there.close()
        pipes.append(here)
    loop = Loop(workload, (0, args.processes), args.layers, args.gradients)
    for pipe in pipes:
        pipe.recv()

    def one_round() -> None:
        for pipe in pipes:
            pipe.send("round")
        loop.round()
        for pipe in pipes:
            pipe.recv()

    serve(one_round, loop.check, parameters=stock.count(loop.model), layers=args.layers)


if __name__ == "__main__":
    main()
