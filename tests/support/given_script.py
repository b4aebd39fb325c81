"""A user's script: a module, a loss and regression data of its own, and the README's example, into a run directory.

`python given_script.py KIND OUT BACKEND KILL [resume]`: with KILL > 0 the process ends at once in the middle of that
round, as kill -9 would end it.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import numpy as np
import torch
from torch import nn
from watching import Clients

import fedspeed


class Net(nn.Module):
    """Two layers whose classes the package does not know."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One number a row."""
        return self.last(torch.tanh(self.first(x))).flatten()


def huber(found: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """A loss of one's own."""
    return nn.functional.smooth_l1_loss(found, wanted, beta=0.5)


def numbers() -> fedspeed.Federated:
    """Regression data for six clients."""
    stream = np.random.default_rng(3)
    x = stream.normal(size=(120, 3)).astype("f4")
    y = (x @ np.array([1.0, -2.0, 0.5]) + stream.normal(size=120) / 10).astype("f4")
    return fedspeed.Federated.from_arrays(x, y, np.arange(120) % 6, holdout=0.2)


def own(out: str, **settings: object) -> fedspeed.Simulation:
    """Own module, own loss, regression."""
    plan = {"rounds": 5, "active": 3, "batch_size": 8, "local_epochs": 1, "lr": 0.05, **settings}
    return fedspeed.simulate(fedspeed.Scaffold(), Net, numbers(), loss=huber, out=out, **plan)


def readme(out: str, **settings: object) -> fedspeed.Simulation:
    """The README's example, its call given a directory."""
    text = (Path(__file__).parents[2] / "README.md").read_text()
    lines = re.search(r"```python\n(.*?)```", text, re.DOTALL).group(1).replace("rounds=60", "rounds=5").splitlines()
    until = next(i for i, line in enumerate(lines) if line.strip().startswith("run = "))
    before = [line.strip() for line in lines[:until] if not line.startswith("for ")]  # the loop is over methods
    call = lines[until].strip().removesuffix(")") + ", out=out, **settings)"
    names: dict[str, object] = {"out": out, "settings": settings, "method": fedspeed.FedSpeed(lam=10, rho=0.1)}
    exec("\n".join([*before, call]), names)
    return names["run"]


def main(kind: str, out: str, backend: str, kill: int, resume: bool) -> None:
    """Iterate, or be killed."""
    run = {"own": own, "readme": readme}[kind](out, backend=backend, workers=2, resume=resume)
    run.observers.all.append(Clients(lambda d, _: os._exit(9) if kill and run.t + 1 == kill and d == 2 else None))
    for record in run:
        assert record.round == run.t


if __name__ == "__main__":
    main(*sys.argv[1:4], int(sys.argv[4]), "resume" in sys.argv[5:])
