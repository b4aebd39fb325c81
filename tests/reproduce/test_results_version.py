"""What this version of the results computes. If it fails, arithmetic changed: bump RESULTS_VERSION, then write anew.

`python tests/reproduce/test_results_version.py` writes the fixture.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from fedspeed.data import load
from fedspeed.methods import METHODS
from fedspeed.models import build_model
from fedspeed.plan import Plan
from fedspeed.reproduce.recipes import RESULTS_VERSION
from fedspeed.server import Simulation

FIXTURE = Path(__file__).parents[1] / "fixtures" / "results-version.json"


def computed(name: str, engine: str) -> list[float]:
    """A few rounds in float64: loss, accuracy, and two numbers of the final vector."""
    model_name, options = ("cnn", {"widths": (3, 5, 8)}) if engine == "loop" else ("mlp", {"hidden": (8,)})
    data = load("digits", split="dirichlet:0.6", clients=10, augment="flip", train_size=300, test_size=100)
    model = build_model(model_name, data, seed=1, **options).double()
    active = 10 if name in ("fedpd", "fedadmm") else 4
    plan = Plan(
        rounds=3,
        active=active,
        local_epochs=2,
        batch_size=10,
        lr=0.05,
        lr_decay=0.0,
        engine=engine,
        backend="serial",
        seed=1,
    )
    with Simulation(METHODS[name](), model, data, plan, torch.nn.functional.cross_entropy) as simulation:
        last = list(simulation)[-1]
        x = simulation.server.x.double()
    return [
        last.train_loss,
        last.test_loss,
        last.drift,
        float(x.norm()),
        float(x @ torch.linspace(-1, 1, len(x)).double()),
    ]


@pytest.mark.parametrize("engine", ["loop", "block"])
@pytest.mark.parametrize("name", METHODS)
def test_the_version_computes_what_it_did(name, engine):
    stored = json.loads(FIXTURE.read_text())
    assert stored["version"] == RESULTS_VERSION, "new numbers: python tests/reproduce/test_results_version.py"
    assert computed(name, engine) == pytest.approx(stored["values"][f"{name} {engine}"], rel=1e-7), (
        "the arithmetic changed: stored results would be wrong; bump RESULTS_VERSION and write the fixture anew"
    )


if __name__ == "__main__":
    values = {f"{name} {engine}": computed(name, engine) for name in METHODS for engine in ("loop", "block")}
    FIXTURE.write_text(json.dumps({"version": RESULTS_VERSION, "values": values}, indent=1) + "\n")
