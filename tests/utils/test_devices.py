"""CUDA without a GPU: on a device that only pretends, mixed devices fail and the numbers are the CPU's."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from pretended import MixedDevices, Places, pretended_cuda
from torch import nn

import fedspeed
from fedspeed import FedAvg, Federated, UserError, simulate
from fedspeed.cli import main
from fedspeed.client import local_loop
from fedspeed.config.config import Config
from fedspeed.data import augment, federated
from fedspeed.data.augment import Pipeline
from fedspeed.methods import METHODS, WRAPPERS
from fedspeed.record import Record
from fedspeed.runs.launch import resume, run_config
from fedspeed.server import simulation

PLAN = {"rounds": 2, "active": 3, "local_steps": 2, "batch_size": 5, "backend": "serial"}
TIMES = ("seconds", "eval_seconds")


def some(values: list[str], *fast: str) -> list[Any]:
    """All of them, those that are not named only among the slow tests."""
    return [value if value in fast else pytest.param(value, marks=pytest.mark.slow) for value in values]


@pytest.fixture
def cuda(monkeypatch) -> Iterator[Callable[[], Any]]:
    augment._constants.cache_clear()  # those of another device of that name
    yield functools.partial(pretended_cuda, monkeypatch)
    augment._constants.cache_clear()


@functools.cache
def rows() -> Federated:
    random = np.random.default_rng(0)
    x = random.normal(size=(60, 6)).astype("float32")
    owners = np.arange(60) % 6
    return Federated.from_arrays(x, (x[:, 0] > 0).astype(int), owners, test=(x[:20], (x[:20, 0] > 0).astype(int)))


@functools.cache
def pictures() -> Federated:
    """Bytes that are normalised, flipped and cropped on the device."""
    random = np.random.default_rng(0)
    x = random.integers(0, 256, size=(60, 3, 16, 16), dtype=np.uint8)
    data = Federated.from_arrays(x, np.arange(60) % 4, np.arange(60) % 6, test=(x[:20], np.arange(20) % 4))
    return replace(data, pipeline=Pipeline(mean=(0.5, 0.5, 0.5), std=(0.2, 0.2, 0.2), flip=0.5, padding=2, crop=0.5))


def small(dropout: bool = True) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), *[nn.Dropout(0.3)] * dropout, nn.Linear(8, 2))


def timeless(records: list[Record]) -> list[dict[str, Any]]:
    return [{k: v for k, v in r.to_dict().items() if k not in TIMES} for r in records]


def both(cuda, method: Any, model: Any, data: Federated, **more: Any) -> list[tuple[list[dict], torch.Tensor]]:
    """Rounds and model on the CPU, then on the pretended GPU."""
    found = []
    for device in ("cpu", "cuda"):
        with nullcontext() if device == "cpu" else cuda():
            run = simulate(method, model(), data, device=device, **{**PLAN, **more})
            assert run.work.flat.device.type == run.x.device.type == device
            found.append((timeless(list(run)), run.x.cpu()))
    return found


# --- the pretended device itself ---


def test_what_a_gpu_refuses_is_refused(cuda):
    with cuda() as places:
        here, there = torch.ones(3), torch.ones(3, device="cuda")
        assert (here.device.type, there.device.type, there.cpu().device.type) == ("cpu", "cuda", "cpu")
        assert (2 * there + torch.tensor(1.0)).device.type == "cuda"  # a number may come from anywhere
        assert places.is_there(there[1:].view(2, 1))
        with pytest.raises(MixedDevices, match="same device"):
            here + there
        with pytest.raises(MixedDevices):
            there.index_select(0, torch.tensor([0]))
        with pytest.raises(TypeError, match="numpy"):
            there.numpy()
        layer = nn.Linear(3, 1).to("cuda")
        with pytest.raises(MixedDevices):
            layer(here)
        layer(there).sum().backward()
        assert places.is_there(layer.weight.grad)


# --- the numbers ---


@pytest.mark.parametrize("engine", ["loop", "block"])
@pytest.mark.parametrize("name", some([*METHODS, *WRAPPERS], "scaffold", "fedspeed"))
def test_every_method_runs_on_the_device_with_the_same_bits(cuda, name, engine):
    method = name if name in METHODS else {"name": name, "base": "scaffold" if name == "fedexp" else "fedspeed"}
    model = functools.partial(small, dropout=engine == "loop")  # masks that vmap makes are beyond the pretence
    here, there = both(cuda, method, model, rows(), engine=engine, **({"active": 6} if name == "fedpd" else {}))
    assert there[0] == here[0]
    assert torch.equal(there[1], here[1])


@pytest.mark.parametrize(
    "more",
    [
        {"client_metrics": "every=1,own", "eval_every": 2},
        {"states": "disk", "state_dtype": "bfloat16"},
        {"clip": 0.1, "clip_mode": "released", "weighting": "samples"},
        {"network": "lte", "stragglers": 0.5, "dropout": 0.3},
        {"no_decay": ("bias",), "warmup": "lr=2,rho=2"},
    ],
    ids=lambda more: next(iter(more)),
)
def test_what_a_plan_may_ask_for_runs_on_the_device(cuda, more):
    here, there = both(cuda, "fedspeed", small, rows().with_validation(0.2), **more)
    assert there[0] == here[0]
    assert torch.equal(there[1], here[1])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cnn", "lenet", "resnet18_gn"])
def test_pictures_are_made_on_the_device(cuda, name):
    """Our fast layers are the CPU's, so these agree to rounding."""
    if name == "resnet18_gn":
        data, more = (
            replace(pictures(), pipeline=replace(pictures().pipeline, padding=1)),
            {"local_steps": 1, "rounds": 1},
        )
    else:
        data, more = pictures(), {}
    here, there = both(cuda, "fedspeed", lambda: fedspeed.build_model(name, data), data, batch_size=2, **more)
    assert [r["cohort"] for r in there[0]] == [r["cohort"] for r in here[0]]
    torch.testing.assert_close(there[1], here[1], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("states", some(["memory", "disk"], "disk"))
def test_a_run_on_the_device_resumes_and_verifies(cuda, states, tmp_path, capsys):
    config = {"rounds": 3, "clients": 8, "active": 3, "local_steps": 2, "batch_size": 10, "device": "cuda",
              "method": "scaffold", "states": states, "checkpoint_every": 1}  # fmt: skip
    with cuda():
        run_config(Config.from_dict(config), tmp_path / "whole")
        run_config(Config.from_dict({**config, "rounds": 2}), tmp_path / "run")
        resume(tmp_path / "run", rounds=3)
        assert main(["verify", str(tmp_path / "run"), "--all"]) == 0
        assert "a GPU that only pretends" in capsys.readouterr().out
        assert main(["diff", str(tmp_path / "run"), str(tmp_path / "whole")]) == 0


# --- mistakes that are planted ---


def _rows_stay(monkeypatch) -> None:
    monkeypatch.setattr(federated, "to_device", lambda a, _: torch.from_numpy(np.ascontiguousarray(a)))


def _flips_stay(monkeypatch) -> None:
    monkeypatch.setattr(augment, "to_device", lambda a, _: torch.from_numpy(a))


def _states_stay(monkeypatch) -> None:
    real = simulation.Simulation.client_state
    monkeypatch.setattr(
        simulation.Simulation, "client_state", lambda run, i: type(s := real(run, i))(*(a.cpu() for a in s))
    )


def _data_stay(monkeypatch) -> None:
    monkeypatch.setattr(Federated, "to", lambda data, *_: data)


def _decay_stays(monkeypatch) -> None:
    real = local_loop.Steps.__call__

    def step(self, x, direction, lr):
        self.work.flat.decay = torch.ones(len(x))
        real(self, x, direction, lr)

    monkeypatch.setattr(local_loop.Steps, "__call__", step)


@pytest.mark.parametrize("plant", [_rows_stay, _flips_stay, _states_stay, _data_stay, _decay_stays])
def test_a_mistake_is_found(cuda, monkeypatch, plant):
    data = pictures()

    def run() -> None:
        model = nn.Sequential(nn.Flatten(), nn.Linear(768, 4))
        list(simulate("fedspeed", model, data, device="cuda", engine="loop", **PLAN))

    with cuda():
        run()
        plant(monkeypatch)
        with pytest.raises((MixedDevices, UserError), match="same device"):
            run()


# --- copies and settings ---


def test_data_move_once_and_rounds_send_pinned_indices_only(cuda):
    data = rows()
    sizes = sorted(a.nbytes for a in (data.x, data.y, data.x_test, data.y_test))
    with cuda() as places:
        run = simulate("scaffold", small(), data, device="cuda", engine="loop", **{**PLAN, "rounds": 4})
        parameters = sum(p.nbytes for p in run.model.parameters())
        tried = 8 * PLAN["batch_size"]  # row numbers of the minibatch whose outputs' shape is looked at
        assert sum(places.up) <= sum(sizes) + parameters + tried + 8  # and the number that asks whether it is there
        for _ in run:
            pass
        vector = sum(p.nbytes for p in run.model.parameters())
        assert places.down == [vector] * (4 * 3 * 2)  # for digests of what was sent: rounds x clients x D and dc
        before = _now(places)
        run.advance()
        after = _now(places)
    assert after[0] - before[0] == 3 * 2 * 5 * 8  # row numbers: clients x steps x batch x int64
    assert after[1] == before[1]  # all of them from pinned memory


def _now(places: Places) -> tuple[int, int]:
    return sum(places.up), sum(places.pageable)


def test_settings_decide_bits_while_it_computes_and_are_the_callers_afterwards(cuda, monkeypatch):
    seen: list[tuple] = []

    def settings() -> tuple:
        own = torch.backends.cudnn
        return (torch.are_deterministic_algorithms_enabled(), torch.backends.cuda.matmul.allow_tf32, own.allow_tf32,
                own.deterministic, own.benchmark, torch.utils.deterministic.fill_uninitialized_memory)  # fmt: skip

    def loss(output, y):
        seen.append(settings())
        return nn.functional.cross_entropy(output, y)

    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    before = settings()
    list(simulate(FedAvg(), small(), rows(), loss=loss, device="cpu", **PLAN))
    assert set(seen) == {before}  # nothing is touched on the CPU
    for precision, tf32 in (("full", False), ("tf32", True)):
        seen.clear()
        with cuda():
            run = simulate(FedAvg(), small(), rows(), loss=loss, device="cuda", precision=precision, **PLAN)
            training = {(True, tf32, tf32, True, False, False)}
            list(run)
        assert set(seen) == training | {(True, False, False, True, False, False)}  # scores are never in TF32
        assert settings() == before
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"


def test_the_callers_generators_are_left_alone(cuda):
    with cuda():
        model = small()
        torch.manual_seed(3)
        state = torch.default_generator.get_state()
        run = simulate("fedavg", model, rows(), device="cuda", **PLAN)
        run.step()
        assert torch.equal(torch.default_generator.get_state(), state)
