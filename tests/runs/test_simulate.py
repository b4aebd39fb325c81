"""`simulate` takes names and classes for what they stand for, refuses the rest in one line, and shows itself."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fedspeed
from fedspeed import Config, FedInit, FedProx, FedSpeed, Plan, UserError, build_model, load_data, run_config, simulate
from fedspeed.data import from_arrays
from fedspeed.data.samples import Samples
from fedspeed.errors import nearest
from fedspeed.runs.launch import resume

QUICK = {"rounds": 1, "active": 2, "local_steps": 1}


@pytest.fixture(scope="module")
def data():
    return load_data("digits", split="iid", clients=4)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 10)

    def forward(self, x):
        return self.linear(x.flatten(1))


class Sized(Net):
    def __init__(self, hidden) -> None:
        super().__init__()


def last(data, method, model="linear", **settings):
    run = simulate(method, model, data, **QUICK, **settings)
    run.step()
    return run.x


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("fedprox", FedProx()),
        (FedProx, FedProx()),
        (fedspeed.METHODS["fedprox"], FedProx()),
        ({"name": "fedprox", "mu": 0.5}, FedProx(mu=0.5)),
        (FedInit, FedInit()),
    ],
    ids=str,
)
def test_a_method_by_name_class_or_table(data, given, meant):
    run = simulate(given, "linear", data, **QUICK)
    assert run.method == meant
    assert torch.equal(last(data, given), last(data, meant))


def test_a_model_by_name_builder_class_or_function(data):
    """Built from the run's seed: nothing depends on torch's generator, which is not moved either."""
    assert torch.equal(
        last(data, "fedavg", "mlp", seed=3), last(data, "fedavg", build_model("mlp", data, seed=3), seed=3)
    )
    assert torch.equal(last(data, "fedavg", fedspeed.MODELS["mlp"]), last(data, "fedavg", "mlp"))
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = simulate("fedavg", Net, data, **QUICK).x
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    assert torch.equal(simulate("fedavg", lambda: Net(), data, **QUICK).x, first)
    assert not torch.equal(simulate("fedavg", Net, data, seed=1, **QUICK).x, first)


X, Y = np.zeros((6, 2), "f4"), np.array([0, 1] * 3)
PAIRS = TensorDataset(torch.zeros(6, 2), torch.zeros(6).long())
BAD = [
    ({"method": "fedprocks"}, "unknown method 'fedprocks'; did you mean 'fedprox'"),
    ({"method": "SCAFOLD"}, "did you mean 'scaffold'"),
    ({"method": nn.Linear(1, 1)}, r"method: expected a method such as FedSpeed\(rho=0.1\).*found a Linear"),
    ({"method": Net}, "method: expected a method.*found the class Net"),
    ({"method": None}, "method: expected a method.*found None"),
    ({"model": "mpl"}, "unknown model 'mpl'; did you mean 'mlp'"),
    ({"model": Sized}, r"model: expected a model, found the class Sized, which needs arguments; give Sized\(...\)"),
    ({"model": lambda: 3}, r"model: expected an nn.Module, found 3 that <lambda>\(\) returned"),
    ({"model": FedSpeed()}, "model: expected an nn.Module, or one of the names linear.*found a FedSpeed"),
    ({"model": nn.Linear(2, 2).state_dict()}, "model: expected an nn.Module.*found a OrderedDict"),
    (
        {"data": (X, Y)},
        r"data: expected a Federated, found a tuple; make one with Federated.from_arrays\(x, y, clients\)",
    ),
    ({"data": X}, "found a ndarray; make one with Federated.from_arrays"),
    ({"data": "digits"}, r"found the name 'digits'; load it first: data = fedspeed.load_data\('digits'"),
    ({"data": fedspeed.Federated}, "found the class Federated; .*make an instance"),
    ({"data": from_arrays(X, Y)}, r"found Samples.*fedspeed.data.federate\(samples"),
    ({"data": DataLoader(PAIRS)}, r"found a DataLoader; .*from_torch\(loader.dataset\)"),
    ({"data": PAIRS}, r"found a TensorDataset; .*from_torch\(dataset\)"),
    ({"data": None}, "found a NoneType"),
    ({"plan": 60}, "plan: expected a Plan, found 60; give settings by name"),
    ({"plan": {"rounds": 3}}, "plan: expected a Plan, found a dict"),
    ({"loss": "hubber"}, "unknown loss 'hubber'; did you mean 'huber'"),
    ({"loss": 0.5}, r"loss: expected a function loss\(model\(x\), y\) or a name of cross-entropy, .*found 0.5"),
    ({"loss": nn.CrossEntropyLoss}, "found the class CrossEntropyLoss; give an instance"),
    ({"learning_rate": 0.1}, "unknown keyword of simulate 'learning_rate'; did you mean 'lr'"),
    ({"epochs": 1}, "did you mean 'local_epochs'"),
    ({"K": 5}, "did you mean 'local_steps'"),
    ({"momentum": 0.9}, "did you mean 'local_optimizer'"),
    ({"targets": [80]}, "0.85 is 85%"),
    ({"los": 5}, "did you mean 'loss'"),
    ({"xyzzy": 5}, "unknown keyword of simulate 'xyzzy'; Known: active, allow_mixed, backend"),
]


@pytest.mark.parametrize(("change", "message"), BAD, ids=[message[:50] for _, message in BAD])
def test_what_cannot_be_is_refused_in_one_line(data, change, message):
    given = {"method": FedSpeed(), "model": "linear", "data": data, **QUICK} | change
    with pytest.raises(UserError, match=message) as refused:
        simulate(**given)
    assert "\n" not in str(refused.value)
    assert "Plan'" not in str(refused.value)


def test_what_the_messages_advise_works():
    """The calls that the errors above name."""
    made = from_arrays(X, Y)
    assert isinstance(made, Samples)
    for samples in (made, fedspeed.data.from_torch(DataLoader(PAIRS).dataset)):
        shared = fedspeed.data.federate(samples, split="iid", clients=2)
        assert simulate("fedavg", "linear", shared, **QUICK).step().round == 1


@pytest.mark.parametrize("data_given", ["digits", (X, Y)], ids=["name", "tuple"])
def test_build_model_says_the_same(data_given):
    with pytest.raises(UserError, match="data: expected a Federated"):
        build_model("mlp", data_given)


def test_build_model_takes_names(data):
    with pytest.raises(UserError, match="build_model: expected a name, one of linear"):
        build_model(Net, data)


def test_a_folder_may_be_text(tmp_path):
    config = Config.from_dict({"rounds": 1, "clients": 4, "active": 2, "local_steps": 1, "model": "linear"})
    out = str(tmp_path / "x")
    assert run_config(config, out)["rounds"] == 1
    assert resume(out)["rounds"] == 1


@pytest.mark.parametrize(
    ("found", "known", "meant"),
    [
        ("learning_rate", ["lr", "lr_decay", "rounds"], "lr"),
        ("num_clients", ["clip", "clients"], "clients"),
        ("participation", ["active", "precision"], "active"),
        ("participation", ["precision"], "precision"),
        ("rounds", ["rounds"], None),
        ("FedAvg", ["fedavg"], "fedavg"),
        ("qqq", ["lr"], None),
    ],
)
def test_the_nearest_name(found, known, meant):
    assert nearest(found, known) == meant


def test_a_simulation_shows_itself(data):
    run = simulate(FedSpeed(rho=0.05), "mlp", data, rounds=3, active=2, local_steps=1, engine="block")
    assert repr(run) == (
        "<Simulation: FedSpeed(lam=10.0, rho=0.05, alpha=1.0, normalise=True, correction=True, prox=True, "
        "server='all', ascent_fraction=1.0), Sequential with 4,810 parameters, digits iid over 4 clients, "
        "round 0 of 3, engine block, back end serial>"
    )
    run.step()
    assert "round 1 of 3" in repr(run)
    other = simulate(FedInit(FedProx(mu=0.5)), Net, data, Plan(engine="loop", backend="process", workers=1, **QUICK))
    with other:
        assert "FedProx(mu=0.5, eta_g=1.0), beta=" in repr(other)
        assert ", Net with 650 parameters" in repr(other)
        assert "engine loop, back end process>" in repr(other)
