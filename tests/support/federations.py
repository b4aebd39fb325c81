"""Small federations in float64, as the package sees them and as NumPy does."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import numpy as np
import oracle
import torch
from torch import nn

from fedspeed import simulate
from fedspeed.config.plan import Plan
from fedspeed.data.federated import Federated
from fedspeed.server.simulation import Simulation
from fedspeed.utils.files import key
from fedspeed.utils.random import batch_order, cohort


@dataclass(frozen=True)
class Softmax:
    """Multinomial logistic regression: clients of unequal size with shifted inputs and skewed labels."""

    clients: int = 7
    features: int = 4
    classes: int = 3
    seed: int = 0
    equal: int = 0  # size of every client; 0 for unequal sizes

    @property
    def sizes(self) -> list[int]:
        return [self.equal or 5 + 3 * i for i in range(self.clients)]

    def arrays(self) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
        x, y, rows = self.made()
        return x.copy(), y.copy(), rows

    @cache  # noqa: B019  (there are few of them, and every gradient needs this)
    def made(self) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
        r = np.random.default_rng(self.seed)
        owner = np.repeat(np.arange(self.clients), self.sizes)
        shift = r.normal(size=(self.clients, self.features))
        x = r.normal(size=(len(owner), self.features)) + shift[owner]
        y = (owner + r.integers(0, 2, len(owner))) % self.classes
        ends = np.cumsum(self.sizes)
        return x, y, np.split(np.arange(len(owner)), ends[:-1])

    def federated(self) -> Federated:
        x, y, rows = self.arrays()
        return Federated.from_arrays(x, y, rows, test=(x[:20], y[:20]), classes=self.classes)

    def model(self) -> nn.Module:
        model = nn.Linear(self.features, self.classes, bias=False).double()
        with torch.no_grad():
            model.weight.copy_(torch.from_numpy(np.random.default_rng(1).normal(size=model.weight.shape)))
        return model

    def gradient(self, rows: np.ndarray, w: np.ndarray) -> np.ndarray:
        """Mean cross-entropy gradient over some rows, in NumPy."""
        x, y, _ = self.made()
        x, y = x[rows], y[rows]
        z = x @ w.reshape(self.classes, self.features).T
        p = np.exp(z - z.max(1, keepdims=True))
        p /= p.sum(1, keepdims=True)
        p[np.arange(len(y)), y] -= 1
        return (p.T @ x / len(y)).ravel()

    def kl_gradient(self, rows: np.ndarray, w: np.ndarray, teacher: np.ndarray, tau: float) -> np.ndarray:
        """Gradient by w of the mean of KL(softmax(z_teacher / tau) || softmax(z_w / tau)) over some rows: for a linear
        model the sum over rows of (q - p) x' / tau, in NumPy."""
        x = self.arrays()[0][rows]
        p, q = (_softmax(x @ v.reshape(self.classes, self.features).T / tau) for v in (teacher, w))
        return ((q - p).T @ x / (tau * len(x))).ravel()


def _softmax(z: np.ndarray) -> np.ndarray:
    p = np.exp(z - z.max(1, keepdims=True))
    return p / p.sum(1, keepdims=True)


def package(problem, method, plan: Plan, **extra) -> Simulation:
    """The package's simulation of a problem."""
    return simulate(method, problem.model(), problem.federated(), plan, **extra)


def transcription(problem, name: str, hyper: dict, plan: Plan, decay: float, **extra) -> list[dict]:
    """The NumPy oracle on the same problem, cohorts and minibatches."""
    _, _, rows = problem.arrays()
    sizes = [len(r) for r in rows]
    steps = {i: plan.local_steps or plan.local_epochs * math.ceil(n / plan.batch_size) for i, n in enumerate(sizes)}
    batches: dict[tuple[int, int], list[np.ndarray]] = {}

    def drawn(i: int, t: int, k: int) -> np.ndarray:
        if (i, t) not in batches:
            batches[i, t] = batch_order(sizes[i], plan.batch_size, steps[i], key(plan.seed, "batches", t, i))
        return batches[i, t][k]

    def kl(i: int, t: int, k: int, x: np.ndarray, teacher: np.ndarray, tau: float) -> np.ndarray:
        return problem.kl_gradient(rows[i][drawn(i, t, k)], x, teacher, tau)

    def grad(i: int, t: int, k: int, x: np.ndarray, fraction: float = 1.0) -> np.ndarray:
        batch = drawn(i, t, k)
        used = len(batch) if fraction == 1.0 else max(1, round(fraction * len(batch)))
        return problem.gradient(rows[i][batch[:used]], x)

    x0 = problem.model()
    return oracle.run(
        name,
        hyper,
        grad=grad,
        x0=torch.cat([p.detach().reshape(-1) for p in x0.parameters()]).numpy(),
        m=len(rows),
        cohorts=[list(cohort(plan.seed, t, len(rows), plan.active, plan.cohort)) for t in range(plan.rounds)],
        lrs=extra.pop("lrs", None) or [plan.lr * decay**t for t in range(plan.rounds)],
        steps=[steps] * plan.rounds,
        wd=plan.weight_decay,
        weights=np.array(sizes, float) if plan.weighting == "samples" else None,
        kl=kl,
        **extra,
    )
