"""`Config`: to TOML and back without a loss, and an error one can act on for everything else."""

from __future__ import annotations

import dataclasses
import re
import string
import tomllib
import warnings
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedspeed import METHODS, Config, FedAvg, FedSpeed, Plan, UserError
from fedspeed.config.config import Spec
from fedspeed.runs.launch import prepare, run_config
from fedspeed.utils.files import read_toml

positive = st.floats(1e-300, 1e300)
share = st.floats(0, 1)
text = st.text(st.characters(exclude_categories=("Cs",)), max_size=12)
word = st.text(string.ascii_letters + string.digits + "-_. \"'\n=[]#", min_size=1, max_size=12)
scalar = st.one_of(st.integers(-(2**63), 2**63 - 1), st.floats(allow_nan=False), st.booleans(), text)
value = st.recursive(
    scalar, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(word, inner, max_size=3), max_leaves=6
)
options = st.dictionaries(word.filter(lambda key: key != "name"), value, max_size=3)


@st.composite
def methods(draw: st.DrawFn) -> FedAvg | FedSpeed:
    if draw(st.booleans()):
        return FedAvg(eta_g=draw(positive))
    prox = draw(st.booleans())
    return FedSpeed(
        lam=draw(st.floats(1e3, 1e300)),
        rho=draw(st.floats(0, 1e300)),
        alpha=draw(share),
        normalise=draw(st.booleans()),
        correction=prox and draw(st.booleans()),
        prox=prox,
        server=draw(st.sampled_from(["all", "active"])),
        ascent_fraction=draw(st.floats(1e-300, 1)),
    )


@st.composite
def configs(draw: st.DrawFn) -> Config:
    clients = draw(st.integers(1, 10**8))
    return Config(
        rounds=draw(st.integers(1, 10**7)),
        active=draw(st.integers(1, clients)),
        cohort=draw(st.sampled_from(["fixed", "bernoulli"])),
        local_epochs=draw(st.integers(1, 10**6)),
        local_steps=draw(st.integers(0, 10**6)),
        batch_size=draw(st.integers(1, 10**6)),
        lr=draw(st.floats(1e-300, 1e3)),
        lr_decay=draw(share),
        warmup=draw(st.sampled_from(["", "lr=1"])),
        weight_decay=draw(st.floats(0, 1e300)),
        clip=draw(st.floats(0, 1e300)),
        clip_mode=draw(st.sampled_from(["gradient", "released"])),
        decay_outside_mix=draw(st.booleans()),
        weighting=draw(st.sampled_from(["uniform", "samples"])),
        eval_every=draw(st.integers(1, 1000)),
        seed=draw(st.integers(0, 10**18)),
        device=draw(text),
        method=draw(methods()),
        model=Spec(draw(word), draw(options)),
        data=Spec(draw(word), draw(options)),
        split=draw(text),
        clients=clients,
        augment=draw(text),
        data_dir=draw(text),
        targets=tuple(draw(st.lists(st.floats(0, 1, exclude_min=True, exclude_max=True), max_size=3))),
    )


@settings(deadline=None)
@given(configs())
def test_toml_and_back_is_the_same_config(config):
    assert Config.from_dict(tomllib.loads(config.to_toml())) == config


def test_the_file_is_complete():
    """Every field of plan, config and method is written, defaults too; but none that is younger than stored configs."""
    written = tomllib.loads(Config().to_toml())
    every = {"format"} | {f.name for f in dataclasses.fields(Config)}
    younger = {"client_metrics": "every=2", "warmup": "lr=2", "network": "lte", "devices": "phones", "test_set": False,
               "stop_at": "loss=0.1", "patience": 3, "min_delta": 0.1, "max_time": "2h", "loss": "mse"}  # fmt: skip
    younger["until"] = {"30": {"lr": 0.5}}
    younger |= {"batch_norm": "group", "follow_lr": "rho", "local_optimizer": "adam", "lr_schedule": "cosine"}
    younger |= {"ray_address": "auto", "ray_cpus": 2.0, "ray_gpus": 0.5, "allow_mixed": True, "keep_every": 5}
    younger |= {"client_test": "0.2", "layers": "plain"}
    assert written.keys() == every - younger.keys()
    assert tomllib.loads(Config(**younger).to_toml()).keys() == every
    assert written["method"].keys() == {"name"} | {f.name for f in dataclasses.fields(FedSpeed)}


def test_through_a_file(tmp_path):
    config = Config(rounds=3, method=FedAvg(eta_g=0.5), model=Spec("mlp", {"hidden": [3]}), targets=(0.5,))
    path = tmp_path / "run.toml"
    for mark in (b"", b"\xef\xbb\xbf"):  # some editors put a mark before UTF-8
        path.write_bytes(mark + config.to_toml().encode())
        assert Config.from_toml(path) == config


def test_short_forms():
    config = Config.from_dict(
        {"method": "fedavg", "model": "cnn", "data": {"name": "synthetic", "alpha": 0.5}, "lr": 1}
    )
    assert config.method == FedAvg()
    assert config.model == Spec("cnn")
    assert config.data == Spec("synthetic", {"alpha": 0.5})
    assert isinstance(config.lr, float)


@pytest.mark.parametrize("name", sorted(METHODS))
def test_every_method_goes_to_toml_and_back(name):
    config = Config(method=METHODS[name](), active=100)
    assert Config.from_dict(tomllib.loads(config.to_toml())) == config


BAD = [
    ({"method": "fedsped"}, "unknown method 'fedsped'; did you mean 'fedspeed'?"),
    ({"method": {"name": "fedspeed", "roh": 0.1}}, "unknown field of FedSpeed 'roh'; did you mean 'rho'?"),
    ({"method": {"rho": 0.1}}, "method must be a name or a table with a name"),
    ({"method": 3}, "method must be a name or a table with a name, .* got 3"),
    ({"model": ["mlp"]}, "model must be a name or a table with a name"),
    ({"data": {"name": 5}}, "data must be a name or a table with a name"),
    ({"round": 3}, "unknown config key 'round'; did you mean 'rounds'?"),
    ({"learning-rate": 3}, "unknown config key 'learning-rate'; .*Known: active, .*lr,"),
    ({"rounds": "3"}, "rounds must be a whole number, got '3'; it is the number of communication rounds"),
    ({"rounds": 3.0}, "rounds must be a whole number, got 3.0"),
    ({"rounds": True}, "rounds must be a whole number, got True"),
    ({"rounds": 0}, r"rounds must be in \[1, 1e7\], got 0"),
    ({"rounds": 10**400}, r"rounds must be in \[1, 1e7\], got 1000"),
    ({"lr": 10**400}, "lr must be a number, got 1000"),
    ({"lr": True}, "lr must be a number, got True"),
    ({"lr": [0.1]}, r"lr must be a number, got \[0.1\]"),
    ({"lr": -0.1}, r"lr must be in \(0, inf\), got -0.1; it is the local learning rate"),
    ({"lr": 0}, r"lr must be in \(0, inf\), got 0.0"),
    ({"lr": float("nan")}, r"lr must be in \(0, inf\), got nan"),
    ({"lr": float("inf")}, r"lr must be in \(0, inf\), got inf"),
    ({"lr_decay": 1.1}, r"lr_decay must be in \[0, 1\], got 1.1"),
    ({"weight_decay": -1}, r"weight_decay must be in \[0, inf\), got -1.0"),
    ({"decay_outside_mix": 1}, "decay_outside_mix must be true or false, got 1"),
    ({"split": 0.6}, "split must be text, got 0.6"),
    ({"cohort": "poisson"}, "unknown cohort 'poisson'"),
    ({"active": 101}, "active must be at most the number of clients, got 101 active of 100"),
    ({"seed": -1}, r"seed must be in \[0, 1e18\], got -1"),
    ({"seed": 2**64}, r"seed must be in \[0, 1e18\], got 18446744073709551616"),
    ({"targets": 0.8}, "targets must be a list of accuracies, got 0.8"),
    ({"targets": ["high"]}, "targets must be numbers, got 'high'"),
    ({"targets": [85]}, r"targets must be accuracies in \(0, 1\), got 85.0; 0.85 is 85%"),
    ({"format": 99}, "expected format 1, found 99"),
    ({"method": {"name": "fedspeed", "lam": 0}}, r"lam must be in \(0, inf\), got 0.0; it is the paper's lambda"),
    ({"method": {"name": "fedspeed", "lam": -1.0}}, r"lam must be in \(0, inf\), got -1.0"),
    ({"method": {"name": "fedspeed", "rho": float("nan")}}, r"rho must be in \[0, inf\), got nan"),
    ({"method": {"name": "fedspeed", "alpha": 1.5}}, r"alpha must be in \[0, 1\], got 1.5"),
    ({"method": {"name": "fedspeed", "server": "some"}}, "server must be one of all, active, got 'some'"),
    ({"method": {"name": "fedspeed", "prox": False}}, "correction=true needs prox=true, got prox=false"),
    ({"method": {"name": "fedspeed", "lam": 0.05}}, "lr must be < 2"),
    ({"method": {"name": "fedspeed", "lam": 0.04}}, "lr must be < 2"),
]


@pytest.mark.parametrize(("given_", "message"), BAD, ids=str)
def test_bad_input_says_what_was_expected_and_found(given_, message):
    with pytest.raises(UserError, match=message) as error:
        Config.from_dict(given_)
    assert "\n" not in str(error.value)


def test_lr_above_lam_warns_once(tmp_path):
    """Of a config and the run that is made of it."""
    small = {"rounds": 1, "clients": 5, "active": 2, "local_steps": 1, "model": "linear"}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run_config(Config.from_dict({**small, "method": {"name": "fedspeed", "lam": 0.09}}), tmp_path)
    assert [re.match("FedSpeed: lr 0.1 > .*0.09", str(w.message)) is not None for w in caught] == [True]


@pytest.mark.parametrize(("key", "wrong"), [("method", "fedavg"), ("model", "mlp"), ("data", {"name": "digits"})])
def test_in_python_method_model_and_data_are_values(key, wrong):
    with pytest.raises(UserError, match=rf"Config: {key} must be a \w+, got .*from_dict takes names"):
        Config(**{key: wrong})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty; expected keys such as rounds"),
        (b"# rounds = 3\n", "is empty"),
        (b"rounds = \n", "is not valid TOML"),
        (b"rounds = 3\nrounds = 4\n", "is not valid TOML"),
        (b"\xff\xfe\x00", "is not valid TOML"),
        (b"seed = 1" + b"0" * 5000, "is not valid TOML"),
    ],
)
def test_a_file_that_is_no_config(tmp_path, content, message):
    path = tmp_path / "bad.toml"
    path.write_bytes(content)
    with pytest.raises(UserError, match=message):
        read_toml(path)


def test_a_file_that_cannot_be_read(tmp_path):
    for path in (tmp_path, tmp_path / "none.toml"):
        with pytest.raises(UserError, match=r"cannot read .*expected a TOML file"):
            read_toml(path)


@pytest.mark.parametrize(
    ("given_", "message"),
    [
        ({"model": "mpl"}, "unknown model 'mpl'; did you mean 'mlp'"),
        ({"data": "digit"}, "unknown data set 'digit'; did you mean 'digits'"),
        ({"split": "dirichlt:0.3"}, "unknown split 'dirichlt'; did you mean 'dirichlet'"),
        ({"augment": "papr"}, "unknown augmentation 'papr'; did you mean 'paper'"),
        ({"clients": 2000}, "2000 clients but only 1437 samples"),
        ({"model": {"name": "mlp", "hidden": 3}}, "hidden must be a list"),
        ({"model": {"name": "mlp", "seed": 3}}, "model.seed is not an option of the model"),
        ({"model": {"name": "mlp", "data": 3}}, "model.data is not an option of the model"),
        ({"data": {"name": "digits", "clients": 3}}, "data.clients is not an option of the data"),
        ({"data": {"name": "digits", "progress": 3}}, "data.progress is not an option of the data"),
        ({"data": {"name": "synthetic"}, "model": "cnn"}, r"found inputs of shape \(60,\); use linear or mlp"),
        ({"model": "lenet"}, "expected pictures of at least 16x16, found 8x8"),
        ({"device": "cuda:99"}, "device 'cuda:99' cannot be used here"),
    ],
    ids=str,
)
def test_a_config_that_does_not_fit_together(given_, message):
    with pytest.raises(UserError, match=message):
        prepare(Config.from_dict({"clients": 10, "active": 2, **given_}))


def test_a_plan_is_a_value():
    assert Plan(rounds=3) == Plan(rounds=3) != Plan(rounds=4)
    with pytest.raises(dataclasses.FrozenInstanceError):
        Plan().rounds = 3
    assert Plan(lr=0.2, lr_decay=0.5).rate(3, own_decay=0.9) == pytest.approx(0.2 * 0.5**3)
    assert Plan(lr=0.2).rate(3, own_decay=0.9) == pytest.approx(0.2 * 0.998**3)
    assert Plan(lr=0.2, lr_decay=0.0).rate(3, own_decay=0.9) == pytest.approx(0.2 * 0.9**3)


@pytest.mark.parametrize(
    ("field", "limit"),
    [("rounds", 10**7), ("clients", 10**8), ("active", 10**8), ("local_steps", 10**7), ("workers", 10**5)],
)
def test_numbers_that_no_run_can_have_are_refused_with_the_limit(field, limit):
    """10^18 rounds were taken, and took all memory or time."""
    assert getattr(Config.from_dict({"clients": 10**8, field: limit}), field) == limit
    for value in (limit + 1, 10**18):
        with pytest.raises(
            UserError, match=rf"{field} must be in \[[01], 1e{len(str(limit)) - 1}\], got {value}; it is"
        ):
            Config.from_dict({"clients": 10**8, field: value})


@pytest.mark.parametrize(
    ("loss", "kept"),
    [
        ("", ""),
        ("MSE", "mse"),
        (" huber : delta = 1.0 ", "huber"),
        ("cross_entropy:smoothing=.1", "cross-entropy:smoothing=0.1"),
        ({"name": "bce"}, "bce"),
    ],
    ids=str,
)
def test_a_loss_has_one_spelling(loss: Any, kept: str) -> None:
    config = Config.from_dict({"loss": loss})
    assert (config.loss, config.to_dict().get("loss", "")) == (kept, kept)
    assert Config.from_dict(config.to_dict()) == config


@pytest.mark.parametrize("loss", [3, ["mse"], {"delta": 1}, {"name": "huber", "delta": 0.5}, len], ids=str)
def test_a_loss_that_is_none_is_refused(loss: Any) -> None:
    with pytest.raises(UserError, match="loss"):
        Config(loss=loss)
