"""The sequences u and z of the paper, from a FedSpeed run that keeps its gradients."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from federations import Softmax, package

from fedspeed.config.plan import Plan
from fedspeed.methods import FedSpeed
from fedspeed.methods.base import Local

PLAN = Plan(rounds=5, active=3, local_epochs=2, batch_size=4, lr=0.1, lr_decay=0.9, weight_decay=0.0, seed=1)
FULL = Plan.from_fields({**PLAN.fields(), "active": 7, "lr_decay": 1.0})
EQUAL = Softmax(equal=12)


@dataclass(frozen=True)
class Recorded(FedSpeed):
    """FedSpeed that keeps every quasi-gradient of the client at work, then what the client uploaded."""

    steps: list = field(default_factory=list, compare=False)
    log: list = field(default_factory=list, compare=False)

    def quasi_gradient(self, x, grad):
        g = super().quasi_gradient(x, grad)
        self.steps.append(g.numpy().copy())
        return g

    def upload(self, xK, down, client, run: Local):
        up, kept = super().upload(xK, down, client, run)
        self.log.append(
            (np.array(self.steps), client.h.numpy(), kept.h.numpy(), (xK - down.x).numpy(), run, xK.numpy())
        )
        self.steps.clear()
        return up, kept


def weights(run: Local, lam: float) -> tuple[np.ndarray, float]:
    """gamma_k and gamma of the paper."""
    s = run.lr / lam
    gamma_k = s * (1 - s) ** (run.K - 1 - np.arange(run.K))
    return gamma_k, 1 - (1 - s) ** run.K


def sequences(plan: Plan, problem: Softmax):
    """x^t, u^t, z^t, mean g_hat^t, mean G^t and gamma of a FedSpeed run."""
    method = Recorded(lam=0.5)
    run = package(problem, method, plan)
    x = [run.x.numpy()]
    x += [run.x.numpy() for _ in run]
    S, rounds = plan.active, range(plan.rounds)
    logs = [method.log[t * S : (t + 1) * S] for t in rounds]
    gamma = weights(logs[0][0][4], method.lam)[1]
    u = [x[0]] + [np.mean([entry[5] for entry in logs[t]], 0) for t in rounds]
    ghat = [np.mean([-entry[2] / method.lam for entry in logs[t]], 0) for t in rounds]
    G = [np.mean([weights(e[4], method.lam)[0] @ e[0] for e in logs[t]], 0) / gamma for t in rounds]
    z = [x[0]] + [u[t + 1] + (1 - gamma) / gamma * (u[t + 1] - u[t]) for t in rounds]
    return method.lam, x, u, z, ghat, G, gamma
