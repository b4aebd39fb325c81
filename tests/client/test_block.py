"""The block engine agrees with the loop to rounding for every method, and repeats its own bits."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from federations import Softmax, package
from torch import nn

from fedspeed import simulate
from fedspeed.client import block_gradients
from fedspeed.client.block_gradients import mapped_gradient, stacked_gradient
from fedspeed.client.engines import resolve_engine
from fedspeed.client.flat_model import FlatModel
from fedspeed.config.plan import Plan
from fedspeed.data import load
from fedspeed.data.federated import Federated
from fedspeed.errors import Diverged
from fedspeed.methods import METHODS, FedADMM, FedAvg, FedExP, FedInit, FedSpeed, Scaffold
from fedspeed.models import build_model

EVERY = [*(cls() for cls in METHODS.values()), FedInit(FedSpeed()), FedExP(Scaffold()), FedADMM(variant="active"),
         FedSpeed(server="active", ascent_fraction=0.5)]  # fmt: skip
PLAN = Plan(rounds=4, active=5, local_epochs=2, batch_size=4, weight_decay=0.01, seed=2)


@pytest.mark.parametrize("method", EVERY, ids=lambda m: m.name)
@pytest.mark.parametrize("problem", [Softmax(equal=10), Softmax()], ids=["equal sizes", "unequal sizes"])
def test_agrees_with_the_loop(method, problem):
    plan = Plan.from_fields({**PLAN.fields(), "active": 7 if method.name == "fedpd" else 5})
    loop = package(problem, method, plan, engine="loop")
    block = package(problem, method, plan, engine="block")
    assert block.plan.engine == "block"
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


@pytest.mark.parametrize("channels", [1, 3])
def test_any_module_and_random_augmentation(channels):
    """A convolutional model, pictures that are flipped and cropped: the same draws as the loop."""
    from fedspeed.data.augment import Pipeline

    r = np.random.default_rng(0)
    x = r.integers(0, 255, (24, channels, 8, 8), dtype=np.uint8)
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


CHAINS = {
    "one layer": nn.Linear(6, 3),
    "no bias": nn.Sequential(nn.Linear(6, 3, bias=False)),
    "nested": nn.Sequential(nn.Flatten(), nn.Linear(6, 5), nn.ReLU(), nn.Sequential(nn.Linear(5, 3, bias=False))),
    "deep": nn.Sequential(nn.Linear(6, 5, bias=False), nn.ReLU(), nn.Linear(5, 4), nn.Linear(4, 4), nn.ReLU(),
                          nn.Linear(4, 3)),
    "ReLU at both ends": nn.Sequential(nn.ReLU(), nn.Flatten(), nn.Linear(6, 3), nn.Flatten(), nn.ReLU()),
}  # fmt: skip
CLASSES = torch.arange(12).reshape(3, 4) % 3
TARGETS = {
    "classes": (nn.functional.cross_entropy, CLASSES, True),
    "squares": (nn.functional.mse_loss, torch.randn(3, 4, 3, dtype=torch.float64), True),
    "probabilities": (nn.functional.cross_entropy, torch.rand(3, 4, 3, dtype=torch.float64), False),
}


def one_by_one(flat, loss, points, x, y):
    """The same through autograd, client by client."""
    g = torch.empty_like(points)
    losses = [flat.gradient(points[i], x[i], y[i], loss, g[i]) for i in range(len(points))]
    return g, torch.stack(losses)


@pytest.mark.parametrize("targets", TARGETS)
@pytest.mark.parametrize("chain", CHAINS)
def test_chains_of_linear_layers_are_written_out_and_agree_with_autograd(chain, targets, monkeypatch):
    used = []
    monkeypatch.setattr(block_gradients, "mapped_gradient", lambda *a: used.append(1) or mapped_gradient(*a))
    loss, y, written = TARGETS[targets]
    flat = FlatModel(copy.deepcopy(CHAINS[chain]).double())
    x = torch.randn(3, 4, 2, 3, dtype=torch.float64) if "Flatten" in str(flat.model) else torch.randn(3, 4, 6).double()
    points = torch.randn(3, flat.d, dtype=torch.float64)
    before = points.clone(), x.clone()
    found, again = (stacked_gradient(flat, loss)(points, x, y) for _ in range(2))
    assert used == ([] if written else [1, 1])
    for a, b, c in zip(found, again, one_by_one(flat, loss, points, x, y), strict=True):
        torch.testing.assert_close(a, c, rtol=1e-13, atol=1e-13)
        assert torch.equal(a, b)
        assert a.data_ptr() != b.data_ptr()  # a method may keep the first of two gradients
    assert torch.equal(points, before[0])
    assert torch.equal(x, before[1])


def test_what_only_a_batch_shows_is_left_to_torch_func():
    """Inputs with a further axis, outputs that the targets are broadcast to, autocast."""
    flat, points = FlatModel(nn.Linear(6, 1).double()), torch.randn(3, 7, dtype=torch.float64)
    x, y = torch.randn(3, 4, 2, 6).double(), torch.randn(3, 4, 2, 1).double()
    loss = nn.functional.mse_loss
    for a, b in zip(stacked_gradient(flat, loss)(points, x, y), one_by_one(flat, loss, points, x, y), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-13)
    flat = FlatModel(nn.Linear(6, 3))
    points, x = torch.randn(3, flat.d), torch.randn(3, 4, 6)
    with torch.autocast("cpu", torch.bfloat16):
        coarse = stacked_gradient(flat, nn.functional.cross_entropy)(points, x, CLASSES)
    fine = one_by_one(flat, nn.functional.cross_entropy, points, x, CLASSES)
    for a, b in zip(coarse, fine, strict=True):
        torch.testing.assert_close(a.float(), b, rtol=0.05, atol=0.05)
        assert not torch.equal(a, b)


def test_other_modules_and_losses_are_not_written_out():
    tied = nn.Linear(6, 6)
    for other in (
        nn.Sequential(nn.Linear(6, 5), nn.Tanh()),
        nn.Sequential(tied, nn.ReLU(), tied),
        nn.Conv2d(1, 1, 1),
        nn.Sequential(nn.Linear(6, 1), nn.Flatten(0)),
    ):
        assert stacked_gradient(FlatModel(other), nn.functional.cross_entropy) is None
    assert stacked_gradient(FlatModel(nn.Linear(6, 3)), lambda out, y: out.sum()) is None


def test_auto_looks_at_model_and_data_only():
    digits = load("digits", split="iid", clients=20)
    uneven = load("digits", split="dirichlet-class:0.3", clients=20)
    mlp, cnn = build_model("mlp", digits), build_model("cnn", digits)

    def engine(model, data, active=10, loss=nn.functional.cross_entropy, method=FedAvg(), asked="auto"):  # noqa: B008
        return resolve_engine(Plan(engine=asked, batch_size=10, active=active), method, model, loss, data)

    assert engine(mlp, digits) == "block"
    assert engine(cnn, digits) == "loop"
    assert engine(mlp, uneven) == "loop"
    assert engine(nn.Sequential(nn.Dropout(0.5), *mlp), digits) == "loop"
    assert engine(nn.Sequential(OneBadClient(), *mlp), digits) == "loop"  # its code may look at numbers
    assert engine(mlp, digits, loss=lambda out, y: nn.functional.cross_entropy(out, y)) == "loop"
    assert engine(build_model("mlp", digits, hidden=[4000]), digits) == "loop"
    assert engine(mlp, digits, active=2) == "loop"
    assert engine(mlp, digits, asked="loop") == "loop"
