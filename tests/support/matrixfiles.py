"""Data and model of the matrix, as a user's file has them: unequal clients, a small network."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from fedspeed.data import from_arrays

SIZES = (6, 10, 10, 14, 16, 8)  # no batch of one sample at batch size 4, nor without a quarter of them
ILL, MARK = 4, 1e6  # the client that fails, if one is asked for, and what its inputs are
FEATURES, WIDTH, CLASSES = 4, 8, 3


def arrays():
    """Inputs, labels, the client of every row, and a test set: shifted inputs, skewed labels."""
    r = np.random.default_rng(5)
    owner = np.repeat(np.arange(len(SIZES)), SIZES)
    x = r.normal(size=(len(owner), FEATURES)) + 0.7 * r.normal(size=(len(SIZES), FEATURES))[owner]
    y = (owner + r.integers(0, 2, len(owner))) % CLASSES
    return x, y, owner, r.normal(size=(20, FEATURES)), r.integers(0, CLASSES, 20)


class Spoilt(nn.Module):
    """Not a number for rows that are marked: NaN in data would be refused when they are loaded."""

    def forward(self, x):
        return torch.where(x[:, :1] == MARK, torch.nan, x)


def load(ill=False):
    x, y, owner, x_test, y_test = arrays()
    if ill:
        x[owner == ILL] = MARK
    return from_arrays(x, y, x_test, y_test, clients=owner, classes=CLASSES, name="matrix")


def build(shape, outputs, norm=False, ill=False):
    """Numbers of its own, whatever the seed."""
    layers = [*([Spoilt()] if ill else []), nn.Linear(FEATURES, WIDTH), *([nn.BatchNorm1d(WIDTH)] if norm else [])]
    model = nn.Sequential(*layers, nn.Tanh(), nn.Linear(WIDTH, CLASSES)).double()
    r = np.random.default_rng(7)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.from_numpy(0.5 * r.normal(size=p.shape)))
    return model
