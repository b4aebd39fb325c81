"""The theory's problems as `simulate` sees them, in float64."""

from __future__ import annotations

import numpy as np
import torch
from torch.nn.functional import cross_entropy, mse_loss

from fedspeed import simulate
from fedspeed.data import federate
from fedspeed.data.problems import samples
from fedspeed.models import build_model
from fedspeed.server.simulation import Simulation
from fedspeed.theory.setting import Setting


def simulation(problem, method, setting: Setting, x0: np.ndarray, **extra) -> Simulation:
    """All clients, full batches, constant rate, no weight decay: what the theorem assumes."""
    data = federate(samples(problem), split="natural", clients=problem.m)
    model = build_model("vector", data).double()
    with torch.no_grad():
        model.x.copy_(torch.from_numpy(np.asarray(x0)))
    plan = {
        "rounds": setting.T,
        "active": problem.m,
        "local_steps": setting.K,
        "batch_size": problem.n,
        "lr": setting.eta,
        "lr_decay": 1.0,
        "weight_decay": 0.0,
        "eval_every": 10**6,
        "device": "cpu",
    }
    return simulate(method, model, data, loss=mse_loss if data.classes is None else cross_entropy, **{**plan, **extra})
