"""What this version of the results computes. If it fails, arithmetic changed: bump RESULTS_VERSION, then write anew.

`python tests/reproduce/test_results_version.py` writes the fixture. What torch makes in float32, the model at the start
and the weights of a sum, is stored, since its last bits depend on the processor's instructions. Without that file, the
command writes it, too.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from fedspeed.config.plan import Plan
from fedspeed.data import load
from fedspeed.data.federated import Federated
from fedspeed.methods import METHODS
from fedspeed.models import build_model
from fedspeed.reproduce.recipes import RESULTS_VERSION
from fedspeed.server.simulation import Simulation

FIXTURE = Path(__file__).parents[1] / "fixtures" / "results-version.json"
START = FIXTURE.with_name("results-version-start.npz")


def drawn(engine: str) -> tuple[Federated, torch.nn.Module]:
    """Return the data and the model of an engine's runs, as it is drawn here."""
    model_name, options = ("cnn", {"widths": (3, 5, 8)}) if engine == "loop" else ("mlp", {"hidden": (8,)})
    data = load("digits", split="dirichlet:0.6", clients=10, augment="flip", train_size=300, test_size=100)
    return data, build_model(model_name, data, seed=1, **options)


def computed(name: str, engine: str) -> list[float]:
    """A few rounds in float64: loss, accuracy, and two numbers of the final vector."""
    data, model = drawn(engine)
    vector_to_parameters(torch.from_numpy(np.load(START)[engine]), model.parameters())
    model.double()
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
        float(x @ torch.from_numpy(np.load(START)[f"{engine} weights"]).double()),
    ]


@pytest.mark.parametrize("engine", ["loop", "block"])
@pytest.mark.parametrize("name", METHODS)
def test_the_version_computes_what_it_did(name, engine):
    stored = json.loads(FIXTURE.read_text())
    assert stored["version"] == RESULTS_VERSION, "new numbers: python tests/reproduce/test_results_version.py"
    assert computed(name, engine) == pytest.approx(stored["values"][f"{name} {engine}"], rel=1e-7), (
        "the arithmetic changed: stored results would be wrong; bump RESULTS_VERSION and write the fixture anew"
    )


@pytest.mark.parametrize("engine", ["loop", "block"])
def test_the_start_is_the_stored_one_but_for_rounding(engine):
    x = parameters_to_vector(drawn(engine)[1].parameters()).detach()
    torch.testing.assert_close(x, torch.from_numpy(np.load(START)[engine]), rtol=1e-4, atol=1e-6)


if __name__ == "__main__":
    if not START.exists():
        starts = {name: parameters_to_vector(drawn(name)[1].parameters()).detach() for name in ("loop", "block")}
        weights = {f"{name} weights": torch.linspace(-1, 1, len(x)) for name, x in starts.items()}
        np.savez(START, **{name: x.numpy() for name, x in (starts | weights).items()})
    values = {f"{name} {engine}": computed(name, engine) for name in METHODS for engine in ("loop", "block")}
    FIXTURE.write_text(json.dumps({"version": RESULTS_VERSION, "values": values}, indent=1) + "\n")
