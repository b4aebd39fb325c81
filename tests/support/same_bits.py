"""A small run whose records, model and states are compared bit by bit."""

from __future__ import annotations

import json

import torch

from fedspeed import simulate
from fedspeed.data import load
from fedspeed.models import build_model

SETTINGS = {"rounds": 3, "active": 5, "local_epochs": 1, "batch_size": 10, "eval_every": 2, "engine": "loop"}


def digits(clients: int = 12):
    data = load("digits", split="dirichlet-class:0.5", clients=clients)  # unequal sizes: jobs finish out of order
    return data, build_model("mlp", data, hidden=[8])


def outcome(method, **settings):
    data, model = digits()
    everyone = {"active": data.clients} if method.name == "fedpd" else {}
    with simulate(method, model, data, **{**SETTINGS, **everyone, **settings}) as run:
        records = [{**r.to_dict(), "seconds": 0, "eval_seconds": 0} for r in run]
        states = {i: run.states.get(i) for i in run.states}
    return records, run.x, states


def assert_same_bits(a, b):
    assert a[0] == b[0]
    assert torch.equal(a[1], b[1])
    assert a[2].keys() == b[2].keys()
    for i in a[2]:
        assert all(torch.equal(x, y) for x, y in zip(leaves(a[2][i]), leaves(b[2][i]), strict=True))


def leaves(tree):
    return [leaf for a in tree for leaf in (leaves(a) if isinstance(a, tuple) else [a])]


def files_of(out):
    """The rounds of a run directory without their times, the digests of its summary, and its config as text."""
    rounds = [json.loads(line) for line in (out / "rounds.jsonl").read_text().splitlines()]
    timeless = [{k: v for k, v in r.items() if not k.endswith("seconds")} for r in rounds]
    return timeless, json.loads((out / "summary.json").read_text())["digests"], (out / "config.toml").read_text()
