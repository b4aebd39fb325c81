"""Health checks: runs that learn are quiet, whatever the model; weights that no gradient reaches are named."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from fedspeed import Federated, Record, build_model, load_data, simulate
from fedspeed.runs.diagnosis import diagnose
from fedspeed.runs.verify import round_mismatches


def two_blobs() -> Federated:
    r = np.random.default_rng(0)
    y = np.arange(120) % 2
    x = (r.normal(size=(120, 4)) + 2 * y[:, None]).astype("f4")
    return Federated.from_arrays(x[:80], y[:80], np.repeat(np.arange(4), 20), test=(x[80:], y[80:]), classes=2)


class Lora(nn.Module):
    """A frozen layer, and the product of A and of B, which starts at zero."""

    def __init__(self, before: int, after: int, rank: int = 2) -> None:
        super().__init__()
        self.base = nn.Linear(before, after).requires_grad_(False)
        self.A = nn.Parameter(torch.randn(rank, before) / before**0.5)
        self.B = nn.Parameter(torch.zeros(after, rank))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + x @ self.A.T @ self.B.T


class Residual(nn.Module):
    """A block that starts as its shortcut."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner, self.scale = nn.Linear(width, width), nn.Parameter(torch.zeros(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.scale * torch.tanh(self.inner(x))


class Wired(nn.Module):
    """Two layers, and one more that is used as `how` says."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.first, self.last = how, nn.Linear(4, 8), nn.Linear(8, 2)
        self.extra, self.dead = nn.Linear(4, 8), nn.Parameter(torch.tensor(2.0))
        if how == "killed":
            nn.init.constant_(self.extra.bias, -1e3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.first(x))
        if self.how == "killed":
            y = y + torch.relu(self.extra(x))
        elif self.how == "detached":
            y = y + torch.relu(self.extra(x)).detach()
        elif self.how == "without a graph":
            with torch.no_grad():
                more = self.extra(x)
            y = y + more
        return self.last(y)


def made(build, method="fedavg", data=None, **options):
    torch.manual_seed(0)
    options = {"rounds": 8, "active": 2, "batch_size": 10, "backend": "serial", **options}
    run = simulate(method, build(), two_blobs() if data is None else data, **options)
    return run, list(run)


def found(records: list[Record]) -> list[str]:
    return [one.title for one in diagnose(records)]


def is_multiple(now: torch.Tensor, first: torch.Tensor) -> bool:
    """Whether all numbers were scaled alike, to rounding."""
    return bool(torch.allclose(now, first * (now.norm() / first.norm()), rtol=1e-6, atol=0))


@pytest.mark.parametrize("lr", [1e-3, 1e-2, 0.1])
@pytest.mark.parametrize("method", ["fedavg", "fedcm", "scaffold"])
def test_lora_learns_and_is_quiet(method, lr):
    """B starts at zero, so A hardly moves at first; it has a gradient all the same."""

    def build():
        return nn.Sequential(Lora(4, 16), nn.Tanh(), nn.Linear(16, 2))

    run, records = made(build, method, lr=lr)
    torch.manual_seed(0)
    assert not torch.equal(run.model[0].A, build()[0].A)
    assert records[-1].test_loss < records[0].test_loss
    assert found(records) == []


@pytest.mark.parametrize("method", ["fedavg", "fedcm", "fedspeed"])
def test_a_block_that_starts_as_its_shortcut_is_quiet(method):
    _, records = made(lambda: nn.Sequential(nn.Linear(4, 8), Residual(8), nn.Linear(8, 2)), method, lr=3e-3)
    assert records[-1].test_loss < records[0].test_loss
    assert found(records) == []


@pytest.mark.parametrize("how", ["killed", "detached", "without a graph"])
def test_weights_that_the_loss_needs_and_no_gradient_reaches_are_named(how):
    run, records = made(lambda: Wired(how))
    torch.manual_seed(0)
    assert is_multiple(run.model.extra.weight, Wired(how).extra.weight)
    assert found(records) == ["untrained weights: extra.weight"]


def test_weights_that_nothing_uses_have_no_gradient_by_design():
    """Only weight decay scales them; a number named `dead` in place of taps that were cut away is one, too."""
    run, records = made(lambda: Wired("unused"), weight_decay=0.1)
    torch.manual_seed(0)
    assert is_multiple(run.model.extra.weight, Wired("unused").extra.weight)
    assert 0 < run.model.dead < 2
    assert all(record.signs == {} for record in records)


def test_a_federation_without_a_test_set_is_looked_at_with_training_samples():
    data = replace(two_blobs(), x_test=None, y_test=None)
    assert found(made(lambda: Wired("killed"), data=data)[1]) == ["untrained weights: extra.weight"]
    assert found(made(lambda: Wired("unused"), data=data)[1]) == []


def test_looking_for_a_gradient_changes_no_bit(monkeypatch):
    from fedspeed.server.health import HealthMonitor

    looked, _ = made(lambda: Wired("detached"))
    monkeypatch.setattr(HealthMonitor, "round", lambda *_: {})
    not_looked, _ = made(lambda: Wired("detached"))
    assert torch.equal(looked.x, not_looked.x)


def test_records_of_the_older_rule_are_those_of_the_same_round():
    """Older versions called weights untrained without asking for a gradient: `still NAME`."""
    record = made(lambda: Wired("killed"))[1][3]
    assert list(record.signs) == ["untrained extra.weight"]
    old = replace(record, signs={"still extra.weight": 0.0, "still first.weight": 1e-5})
    assert round_mismatches(record, old) == []
    assert round_mismatches(replace(record, signs={}), old) == []
    assert len(round_mismatches(record, replace(old, signs={**old.signs, "norm server.x": 1e3}))) == 1
    assert len(round_mismatches(record, replace(old, signs={"untrained other": 0.0}))) == 1
    assert found([replace(record, signs={"still a": 0.0})]) == ["untrained weights: a"]


# --- fifty runs that learn ---


def lora(data: Federated) -> nn.Module:
    """Adapters in a network that was trained a little, as one from elsewhere."""
    network = nn.Sequential(nn.Flatten(), Lora(64, 64), nn.ReLU(), Lora(64, 32), nn.ReLU(), nn.Linear(32, 10))
    x, y = data.batch(np.arange(len(data.y)))
    base = [p for n, p in network.named_parameters() if not n.endswith((".A", ".B"))]
    for p in base:
        p.requires_grad_(True)
    steps = torch.optim.SGD(base, 0.5)
    for _ in range(60):
        steps.zero_grad()
        nn.functional.cross_entropy(network(x), y).backward()
        steps.step()
    for p in base[:-2]:
        p.requires_grad_(False)
    nn.init.normal_(network[-1].weight, std=0.1)
    return network


def normed(data: Federated) -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 10))


def dropped(data: Federated) -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 32), nn.LayerNorm(32), nn.GELU(), nn.Dropout(0.2), nn.Linear(32, 10)
    )


def built(name: str, **options):
    return lambda data: build_model(name, data, **options)


def letters() -> Federated:
    text = np.arange(1300) % 8
    x, y = np.stack([text[i : i + 10] for i in range(1200)]), text[10:1210]
    owner = np.repeat(np.arange(20), 50)
    return Federated.from_arrays(x[:1000], y[:1000], owner, test=(x[1000:], y[1000:]), classes=8)


def pictures() -> Federated:
    r = np.random.default_rng(0)
    y = np.arange(400) % 10
    means = r.normal(size=(10, 3, 8, 8)).repeat(4, 2).repeat(4, 3)
    x = (0.7 * means[y] + r.normal(size=(400, 3, 32, 32))).astype("f4")
    return Federated.from_arrays(x[:300], y[:300], np.repeat(np.arange(6), 50), test=(x[300:], y[300:]), classes=10)


FAMILIES = ["fedavg", "fedspeed", "scaffold", "fedcm", "feddyn", "fedadam", "fedsam"]
SHORT = {"rounds": 8, "local_epochs": 2}
HEALTHY = [
    *[(f"linear {m}", m, built("linear"), {}) for m in FAMILIES],
    *[(f"mlp {m}", m, built("mlp"), {}) for m in FAMILIES],
    *[(f"mlp he {m}", m, built("mlp", init="he"), {}) for m in FAMILIES[:4]],
    *[(f"lora {lr} {m}", m, lora, {"lr": lr}) for lr in (0.01, 0.1) for m in FAMILIES[:6]],
    *[(f"bn {how} {m}", m, normed, {**SHORT, "batch_norm": how})
      for how in ("group", "local", "average") for m in FAMILIES[:3]],
    *[(f"cnn {m}", m, built("cnn"), {}) for m in ("fedavg", "fedspeed", "scaffold", "feddyn")],
    *[(f"dropout {m}", m, dropped, {}) for m in FAMILIES[:3]],
    ("slow", "fedavg", built("mlp"), {"lr": 0.01}),
    ("decayed", "fedavg", built("mlp"), {"weight_decay": 0.1}),
    ("clipped", "fedavg", built("mlp"), {"clip": 1.0}),
]  # fmt: skip
LETTERS = [(f"charlstm {m}", m, built("charlstm"), {"lr": 1.0, "rounds": 8}) for m in FAMILIES[:2]]
PICTURES = [
    *[(f"resnet zero {m}", m, built("resnet18_gn", init="zero-residual", trim=True), {"rounds": 5, "local_epochs": 1})
      for m in ("fedavg", "fedcm")],
    ("lenet", "fedavg", built("lenet"), {"rounds": 5, "local_epochs": 2}),
]  # fmt: skip


def quiet_and_learns(case, data: Federated) -> None:
    name, method, build, options = case
    options = {"rounds": 16, "active": 5, "local_epochs": 2, **options}
    _, records = made(lambda: build(data), method, data, **options)
    assert records[-1].test_loss < 0.98 * records[0].test_loss, name
    assert (name, found(records)) == (name, [])


@pytest.fixture(scope="module")
def digits() -> Federated:
    return load_data("digits", split="dirichlet:0.3", clients=20)


@pytest.mark.slow
@pytest.mark.parametrize("case", HEALTHY, ids=lambda case: case[0])
def test_runs_that_learn_are_quiet(case, digits):
    quiet_and_learns(case, digits)


@pytest.mark.slow
@pytest.mark.parametrize("case", LETTERS, ids=lambda case: case[0])
def test_runs_on_letters_are_quiet(case):
    quiet_and_learns(case, letters())


@pytest.mark.slow
@pytest.mark.parametrize("case", PICTURES, ids=lambda case: case[0])
def test_runs_on_pictures_are_quiet(case):
    quiet_and_learns(case, pictures())


def test_there_are_fifty_of_them():
    assert len(HEALTHY) + len(LETTERS) + len(PICTURES) >= 50
