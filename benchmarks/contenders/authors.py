"""The authors' client loop, written from its description: what a reader of the paper would run otherwise.

python -m benchmarks.contenders.authors WORKLOAD METHOD [--active N] [--epochs N]

One process with all threads. A client has the stock network, `torch.optim.SGD` with weight decay, the gradient's norm
clipped at 10, and a `DataLoader` whose data set changes pictures one by one: flipped with probability 1/2, shifted by
up to 4 pixels with probability 1/2, zeros coming in. Pictures are normalised beforehand. FedSpeed takes a step towards
larger loss, computes a second gradient there, with the correction as a linear term of the loss on all parameters in
one vector, returns, and steps; the prox term is more weight decay. Their server scores all training and test data
after every round; that is left out here, as it is for every contender.
"""

from __future__ import annotations

import argparse

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_, parameters_to_vector, vector_to_parameters
from torch.utils.data import DataLoader, Dataset

from .. import stock
from ..protocol import serve
from ..workloads import CORES, Workload, add_workload, asked, load

PADDING = 4
CLIP, DECAY, PROX, RHO = 10.0, 1e-3, 0.1, 0.1


class Pictures(Dataset[tuple[torch.Tensor, int]]):
    """A client's pictures, changed at random each time one is read."""

    def __init__(self, x: np.ndarray, y: np.ndarray, stream: np.random.Generator) -> None:
        self.x, self.y, self.stream = x, y, stream

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        picture = self.x[i]
        if self.stream.random() < 0.5:
            picture = picture[:, :, ::-1]
        if self.stream.random() < 0.5:
            channels, height, width = picture.shape
            wide = np.zeros((channels, height + 2 * PADDING, width + 2 * PADDING), picture.dtype)
            wide[:, PADDING:-PADDING, PADDING:-PADDING] = picture
            top, left = self.stream.integers(0, 2 * PADDING + 1, 2)
            picture = wide[:, top : top + height, left : left + width]
        return torch.from_numpy(np.ascontiguousarray(picture)), int(self.y[i])


def plain_step(net: nn.Module, optimiser: torch.optim.SGD, x: torch.Tensor, y: torch.Tensor) -> None:
    """Take a step of FedAvg."""
    optimiser.zero_grad()
    cross_entropy(net(x), y).backward()
    clip_grad_norm_(net.parameters(), CLIP)
    optimiser.step()


def perturbed_step(
    net: nn.Module, optimiser: torch.optim.SGD, x: torch.Tensor, y: torch.Tensor, linear: torch.Tensor
) -> None:
    """Take a step of FedSpeed: the gradient at the perturbed point plus PROX `linear`, clipped, then SGD."""
    optimiser.zero_grad()
    cross_entropy(net(x), y).backward()
    moved = []
    with torch.no_grad():
        norm = torch.stack([p.grad.norm() for p in net.parameters()]).norm()  # type: ignore[union-attr]
        for p in net.parameters():
            moved.append(p.grad * (RHO / (norm + 1e-7)))  # type: ignore[operator]
            p.add_(moved[-1])
    optimiser.zero_grad()
    loss = cross_entropy(net(x), y) + PROX * torch.sum(parameters_to_vector(net.parameters()) * linear)
    loss.backward()
    with torch.no_grad():
        for p, move in zip(net.parameters(), moved, strict=True):
            p.sub_(move)
    clip_grad_norm_(net.parameters(), CLIP)
    optimiser.step()


class Loop:
    """Server and clients in one process."""

    def __init__(self, workload: Workload, method: str) -> None:
        self.workload, self.perturbed = workload, method == "fedspeed"
        self.arrays = load(workload)
        self.net = stock.build(workload.model)
        self.x = parameters_to_vector(self.net.parameters()).detach().clone()
        self.duals: dict[int, torch.Tensor] = {}
        self.sum = torch.zeros_like(self.x)  # of the duals of all clients
        self.t = 0

    def round(self) -> None:
        """Train the next round's clients one after another, then average."""
        w = self.workload
        cohort = np.random.default_rng(self.t).choice(w.clients, w.active, replace=False)
        self.t += 1
        moved = torch.stack([self.client(int(i)) for i in cohort])
        self.x += moved.mean(0)
        if self.perturbed:
            self.sum += moved.sum(0)
            self.x += self.sum / w.clients

    def client(self, i: int) -> torch.Tensor:
        """Train client i from the server's model; return its movement."""
        w, net = self.workload, self.net
        vector_to_parameters(self.x.clone(), net.parameters())
        pictures = Pictures(self.arrays.x[i], self.arrays.y[i], np.random.default_rng((self.t, i)))
        loader = DataLoader(pictures, batch_size=w.batch, shuffle=True)
        decay = DECAY + PROX * self.perturbed
        optimiser = torch.optim.SGD(net.parameters(), lr=w.lr, weight_decay=decay)
        dual = self.duals.get(i, torch.zeros_like(self.x)) if self.perturbed else None
        net.train()
        for _ in range(w.epochs):
            for x, y in loader:
                if dual is None:
                    plain_step(net, optimiser, x, y)
                else:
                    perturbed_step(net, optimiser, x, y, dual - self.x)
        moved = parameters_to_vector(net.parameters()).detach() - self.x
        if dual is not None:
            self.duals[i] = dual + moved
        return moved

    def check(self) -> float:
        """Return accuracy of the server's model."""
        vector_to_parameters(self.x.clone(), self.net.parameters())
        return stock.accuracy(self.net, self.arrays)


def main() -> None:
    """Serve rounds."""
    parser = argparse.ArgumentParser()
    add_workload(parser)
    parser.add_argument("method", choices=("fedavg", "fedspeed"))
    args = parser.parse_args()
    torch.set_num_threads(CORES)
    loop = Loop(asked(args), args.method)
    serve(loop.round, loop.check, parameters=stock.count(loop.net))


if __name__ == "__main__":
    main()
