"""The block engine agrees with the loop to rounding for every method, and repeats its own bits."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from federations import Softmax, package
from torch import nn

from fedspeed.backends.block import Block, mapped_gradient, resolve_engine, stacked_gradient
from fedspeed.data import load
from fedspeed.data.federated import Federated
from fedspeed.errors import Diverged, UserError
from fedspeed.methods import METHODS, FedADMM, FedAvg, FedInit, FedSpeed
from fedspeed.models import build_model
from fedspeed.plan import Plan
from fedspeed.server import simulate
from fedspeed.vec import FlatModel

EVERY = [*(cls() for cls in METHODS.values()), FedInit(FedSpeed()), FedSpeed(server="active", ascent_fraction=0.5),
         FedADMM(variant="active")]  # fmt: skip
PLAN = Plan(rounds=4, active=5, local_epochs=2, batch_size=4, weight_decay=0.01, seed=2)


@pytest.mark.parametrize("method", EVERY, ids=lambda m: m.name)
@pytest.mark.parametrize("problem", [Softmax(equal=10), Softmax()], ids=["equal sizes", "unequal sizes"])
def test_agrees_with_the_loop(method, problem):
    plan = Plan.from_fields({**PLAN.fields(), "active": 7 if method.name == "fedpd" else 5})
    loop = package(problem, method, plan)
    block = package(problem, method, plan, engine="block")
    assert isinstance(block.backend, Block)
    for a, b in zip(loop, block, strict=True):
        np.testing.assert_allclose(block.x.numpy(), loop.x.numpy(), atol=1e-11)
        for name in ("train_loss", "drift", "grad_evals", "update_norm", "test_loss"):
            np.testing.assert_allclose(getattr(b, name), getattr(a, name), atol=1e-10)
        assert (a.bytes_up, a.bytes_down, a.cohort) == (b.bytes_up, b.bytes_down, b.cohort)
    for i in loop.states:
        for x, y in zip(loop.states.get(i), block.states.get(i), strict=True):
            if isinstance(x, torch.Tensor):
                torch.testing.assert_close(x, y, atol=1e-11, rtol=0)


def test_repeats_its_own_bits_and_clips_as_the_loop():
    plan = Plan.from_fields({**PLAN.fields(), "clip": 0.3})
    runs = [package(Softmax(), FedSpeed(), plan, engine=e) for e in ("block", "block", "loop")]
    for _ in zip(*runs, strict=True):
        assert torch.equal(runs[0].x, runs[1].x)
        torch.testing.assert_close(runs[0].x, runs[2].x, atol=1e-11, rtol=0)


def test_any_module_and_random_augmentation():
    """A convolutional model, pictures that are flipped and cropped: the same draws as the loop."""
    from fedspeed.data.augment import Pipeline

    r = np.random.default_rng(0)
    x = r.integers(0, 255, (24, 1, 8, 8), dtype=np.uint8)
    data = Federated.from_arrays(
        x, r.integers(0, 3, 24), list(np.arange(24).reshape(4, 6)), pipeline=Pipeline(flip=0.5, padding=2), classes=3
    )
    model = build_model("cnn", data, widths=[2, 4]).double()
    runs = [simulate(FedAvg(), model, data, rounds=2, active=4, batch_size=4, engine=e) for e in ("loop", "block")]
    for _ in zip(*runs, strict=True):
        torch.testing.assert_close(runs[0].x, runs[1].x, atol=1e-12, rtol=0)


class OneBadClient(nn.Module):
    """NaN where the inputs are large."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)

    def forward(self, x):
        return self.inner(torch.where(x > 50, float("nan"), x))


def test_the_client_that_diverges_is_named():
    x = np.ones((12, 2), "f4")
    x[9] = 100
    data = Federated.from_arrays(x, np.zeros(12, int), list(np.arange(12).reshape(4, 3)), classes=2)
    messages = []
    for engine in ("loop", "block"):
        with pytest.raises(Diverged, match="client 3 diverged") as caught:
            simulate(FedAvg(), OneBadClient(), data, rounds=1, active=4, engine=engine).step()
        messages.append(str(caught.value))
    assert messages[0] == messages[1]


def test_chains_of_linear_layers_are_written_out_and_agree_with_torch_func():
    x = torch.randn(3, 4, 2, 3, dtype=torch.float64)
    chain = nn.Sequential(nn.Flatten(), nn.Linear(6, 5), nn.ReLU(), nn.Sequential(nn.Linear(5, 2, bias=False)))
    cases = {
        nn.functional.cross_entropy: torch.randint(0, 2, (3, 4)),
        nn.functional.mse_loss: torch.randn(3, 4, 2).double(),
    }
    for loss, y in cases.items():
        flat = FlatModel(chain.double())
        points = torch.randn(3, flat.d, dtype=torch.float64)
        for a, b in zip(
            stacked_gradient(flat, loss)(points, x, y), mapped_gradient(flat, loss)(points, x, y), strict=True
        ):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-13)
    tied = nn.Linear(6, 6)
    for other in (
        nn.Sequential(nn.Linear(6, 5), nn.Tanh()),
        nn.Sequential(tied, nn.ReLU(), tied),
        nn.Conv2d(1, 1, 1),
        nn.Sequential(nn.Linear(6, 1), nn.Flatten(0)),
    ):
        assert stacked_gradient(FlatModel(other), nn.functional.cross_entropy) is None
    assert stacked_gradient(FlatModel(chain), lambda out, y: out.sum()) is None


def test_auto_looks_at_model_and_data_only():
    digits = load("digits", split="iid", clients=20)
    uneven = load("digits", split="dirichlet-class:0.3", clients=20)
    mlp, cnn = build_model("mlp", digits), build_model("cnn", digits)
    assert resolve_engine("auto", mlp, digits, 10, active=10) == "block"
    assert resolve_engine("auto", cnn, digits, 10, active=10) == "loop"
    assert resolve_engine("auto", mlp, uneven, 10, active=10) == "loop"
    assert resolve_engine("auto", nn.Sequential(nn.Dropout(0.5), *mlp), digits, 10, active=10) == "loop"
    assert resolve_engine("auto", build_model("mlp", digits, hidden=[4000]), digits, 10, active=10) == "loop"
    assert resolve_engine("auto", mlp, digits, 10, active=2) == "loop"
    assert resolve_engine("loop", mlp, digits, 10, active=10) == "loop"


def test_a_block_does_not_run_in_workers():
    with pytest.raises(UserError, match="engine block"):
        package(Softmax(), FedAvg(), PLAN, engine="block", backend="process")
