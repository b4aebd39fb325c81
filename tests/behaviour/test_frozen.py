"""Parameters with requires_grad=False: not trained, sent, decayed or kept; saved, and a run is bound to them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from same_bits import leaves
from torch import nn
from torch.nn.functional import cross_entropy

from fedspeed import FedAvg, FedDyn, Federated, FedSpeed, UserError, simulate
from fedspeed.cli import main
from fedspeed.client.trees import one_thread
from fedspeed.runs.inspect import inspect_run
from fedspeed.runs.launch import resume
from fedspeed.runs.verify import verify

SMALL = {"rounds": 3, "active": 3, "local_steps": 2, "batch_size": 50, "lr": 0.3, "lr_decay": 1.0}


def net() -> nn.Module:
    """A frozen layer, of which only the bias is trained, under one that is trained."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    model[0].weight.requires_grad_(False)
    return model


@pytest.fixture(autouse=True)
def _one_thread():
    with one_thread():  # small sums: threads only wait for each other
        yield


@pytest.fixture(scope="module")
def data() -> Federated:
    r = np.random.default_rng(0)
    x, y = r.normal(size=(40, 4)), r.integers(0, 3, 40)
    return Federated.from_arrays(x, y, np.arange(40) % 5, test=(x, y))


@pytest.mark.parametrize("engine", ["loop", "block"])
def test_a_run_is_that_of_a_plain_loop_which_leaves_them_out(data, engine):
    run = simulate(FedAvg(), net(), data, engine=engine, weight_decay=0.1, backend="serial", **SMALL)
    records = list(run)
    server = net()
    for record in records:
        trained = []
        for i in record.cohort:
            client = net()
            client.load_state_dict(server.state_dict())
            own = [p for p in client.parameters() if p.requires_grad]
            optimizer = torch.optim.SGD(own, 0.3, weight_decay=0.1)
            rows = torch.from_numpy(data.rows(i))
            for _ in range(2):
                optimizer.zero_grad()
                cross_entropy(client(data.x[rows].double()), data.y[rows]).backward()
                optimizer.step()
            trained.append(client.state_dict())
        server.load_state_dict({k: sum(d[k] for d in trained) / len(trained) for k in trained[0]})
    for name, a in server.state_dict().items():
        torch.testing.assert_close(run.model.state_dict()[name], a, rtol=1e-10, atol=1e-12)
    assert torch.equal(run.model[0].weight, net()[0].weight)
    assert all(record.bytes_up == record.bytes_down == 3 * 8 * (6 + 18 + 3) for record in records)
    assert "Sequential with 27 parameters and 24 frozen ones" in repr(run)


def test_states_and_the_saved_model(data, tmp_path):
    out = tmp_path / "run"
    for _ in (run := simulate(FedDyn(), net(), data, out=out, **SMALL)):
        pass
    assert {a.numel() for i in run.states for a in leaves(run.states.get(i))} == {27}
    saved = load_file(out / "model.safetensors")
    assert saved.keys() == net().state_dict().keys()
    assert torch.equal(saved["0.weight"], net()[0].weight)
    other = net()
    other[0].weight.data += 1
    with pytest.raises(UserError, match=r"expected model\.digest"):
        simulate(FedDyn(), other, data, out=out, resume=True, **SMALL)


OWN = """
import numpy as np
import torch


def build(shape, outputs):
    layers = torch.nn.Linear(64, 5), torch.nn.Tanh(), torch.nn.Linear(5, outputs)
    model = torch.nn.Sequential(torch.nn.Flatten(), *layers)
    model[1].weight.data = torch.from_numpy(np.load("weights.npy"))
    model[1].requires_grad_(False)
    return model


def all_frozen(shape, outputs):
    return build(shape, outputs).requires_grad_(False)


def needs(shape, outputs):
    raise ImportError("No module named 'peft'", name="peft")
"""
RUN = ["--quiet", "--clients", "8", "--active", "3", "--local-epochs", "1", "--method", "fedspeed"]


def weights(seed: int) -> None:
    np.save("weights.npy", np.random.default_rng(seed).normal(size=(5, 64)).astype("f4"))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(OWN)
    weights(0)
    return tmp_path


def test_a_run_is_bound_to_their_values(folder):
    """The file is the same, what it loads is not."""
    run = ["run", "--model", "own.py:build", *RUN]
    assert main([*run, "--rounds", "4", "--out", "whole"]) == 0
    assert main([*run, "--rounds", "2", "--out", "part"]) == 0
    before = (folder / "part" / "rounds.jsonl").read_bytes()
    weights(1)
    with pytest.raises(
        UserError, match=r"is of another frozen weights: .*build the model with the frozen weights and buffers it had"
    ):
        resume(folder / "part", rounds=4, allow_code=True)
    assert (folder / "part" / "rounds.jsonl").read_bytes() == before
    weights(0)
    resume(folder / "part", rounds=4, allow_code=True)
    whole, part = (load_file(folder / name / "model.safetensors") for name in ("whole", "part"))
    assert all(torch.equal(whole[name], part[name]) for name in whole)
    assert verify(folder / "part", allow_code=True).broken == []


def test_inspection_looks_at_the_model_that_was_saved(folder):
    assert main(["run", "--model", "own.py:build", *RUN, "--rounds", "1", "--out", "run"]) == 0
    then = inspect_run(folder / "run", samples=50, iterations=2, allow_code=True)
    weights(1)
    assert inspect_run(folder / "run", samples=50, iterations=2, allow_code=True) == then


@pytest.mark.parametrize(
    ("build", "told"),
    [
        ("all_frozen", "expected trainable parameters, found none; set requires_grad=True on some"),
        ("needs", "pip install 'fedspeed[lora]'"),
    ],
)
def test_refused_in_one_line(folder, capsys, build, told):
    assert main(["run", "--model", f"own.py:{build}", *RUN, "--out", "run"]) == 2
    err = capsys.readouterr().err
    assert told in err
    assert err.count("\n") == 1
    assert not (folder / "run").exists()


@pytest.mark.slow
def test_worker_processes_have_them(data):
    runs = [simulate(FedSpeed(), net(), data, backend=name, workers=2, **SMALL) for name in ("serial", "process")]
    a, b = ([r.test_loss for r in run] for run in runs)
    assert a == b
    assert torch.equal(runs[0].x, runs[1].x)
    for run in runs:
        run.close()
