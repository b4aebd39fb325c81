"""Validation sets: who gives which rows, that nobody trains on them, what they score, and which round they choose."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from watching import Rounds

from fedspeed import Config, FedAvg, Record, UserError, build_model, load_data, run_config, simulate
from fedspeed.cli import main
from fedspeed.data import Federated, describe, load
from fedspeed.reproduce.recipes import run_key
from fedspeed.runs.config_file import same_run
from fedspeed.runs.directory import RunDir, line
from fedspeed.runs.launch import prepare, resume
from fedspeed.runs.summary import summarise
from fedspeed.runs.verify import verify


def digits(**more: Any) -> Federated:
    return load("digits", **{"split": "dirichlet-class:0.5", "clients": 12, **more})


def rows_of(data: Federated) -> list[list[int]]:
    return [data.rows(i).tolist() for i in range(data.clients)]


def test_without_one_nothing_changes() -> None:
    plain, none = load("digits", split="iid", clients=10), load("digits", split="iid", clients=10, validation="")
    assert none.validation is None
    assert none.split_fingerprint == plain.split_fingerprint == "0373ed948e9854a4"
    record = simulate(FedAvg(), build_model("linear", plain), plain, rounds=1, local_steps=1).step()
    assert (record.validation_loss, record.validation_accuracy) == (None, None)
    assert not [key for key in record.to_dict() if "validation" in key]


def test_a_fraction_of_every_client() -> None:
    whole, data = digits(), digits(validation=0.3)
    assert data.validation is not None
    held = set(data.validation.tolist())
    assert data.clients == whole.clients == 12
    for i, (before, after) in enumerate(zip(rows_of(whole), rows_of(data), strict=True)):
        assert after == [r for r in before if r not in held], "the same order, without the held rows"
        assert len(before) - len(after) == int(np.floor(0.3 * len(before) + 0.5)), i
    assert held == set(whole.indices.tolist()) - set(data.indices.tolist())
    assert digits(validation="0.3").split_fingerprint == data.split_fingerprint != whole.split_fingerprint
    assert digits().with_validation(0.3).split_fingerprint == data.split_fingerprint
    other = digits().with_validation(0.3, seed=1)
    assert set(np.asarray(other.validation).tolist()) != held
    assert data.fingerprint == whole.fingerprint
    x, y = data.validation_batch(3, 7)
    assert torch.equal(x, whole.x[data.validation[3:7]])
    assert torch.equal(y, whole.y[data.validation[3:7]])
    summary = describe(data)
    assert (summary.validation_samples, summary.unused, summary.samples) == (len(held), 0, 1437)


@pytest.mark.parametrize(("spec", "count"), [("clients:0.25", 3), ("clients:5", 5), ("clients:11", 11)])
def test_whole_clients(spec: str, count: int) -> None:
    whole, data = digits(), digits(validation=spec)
    assert data.validation is not None
    before, after = rows_of(whole), rows_of(data)
    assert len(after) == 12 - count
    assert [rows for rows in before if rows in after] == after, "those who train keep their order and their rows"
    held = [row for rows in before if rows not in after for row in rows]
    assert data.validation.tolist() == sorted(held)


def test_a_sample_that_is_held_is_trained_on_by_nobody_also_where_a_split_repeats_samples() -> None:
    for spec in (0.2, "clients:4"):
        data = load("digits", split="dirichlet-refill:0.1", clients=20, validation=spec)
        assert data.validation is not None
        assert not set(data.validation.tolist()) & set(data.indices.tolist())
        assert data.sizes.min() >= 1


def test_small_clients_keep_a_sample() -> None:
    x, y = np.arange(9.0)[:, None], np.zeros(9, int)
    data = Federated.from_arrays(x, y, [[0], [1, 2], range(3, 9)]).with_validation(0.9)
    assert data.sizes.tolist() == [1, 1, 1]
    with pytest.raises(UserError, match="too few samples each"):
        Federated.from_arrays(x, y, [[i] for i in range(9)]).with_validation(0.4)
    with pytest.raises(UserError, match="only once"):
        data.with_validation(0.1)
    with pytest.raises(UserError, match="there is no validation set"):
        Federated.from_arrays(x, y, [[0]]).validation_batch(0, 1)


BAD = ["1", "0", "-0.1", "nan", "inf", "some", "clients", "clients:", "clients:0", "clients:-1", "clients:1.5", ":0.1",
       "rows:0.1", "clients:0.1:2", "clients:" + "1" * 5000, True, 2]  # fmt: skip


@pytest.mark.parametrize("spec", BAD)
def test_a_bad_request_says_what_is_good(spec: Any) -> None:
    with pytest.raises(UserError, match=r"expected 0\.1 .*clients:0\.1 or clients:5 .* found"):
        digits(validation=spec)
    with pytest.raises(UserError, match=r"expected 0\.1 .*clients:0\.1 or clients:5 .* found"):
        Config(validation=spec)


def test_all_clients_cannot_be_held_out() -> None:
    for spec in ("clients:12", "clients:0.99", "clients:0.01"):
        with pytest.raises(UserError, match=r"expected 1 to 11 of 12 clients"):
            digits(validation=spec)


@pytest.mark.parametrize(
    "where", [{"engine": "loop", "backend": "serial"}, {"engine": "block"}, {"backend": "process", "workers": 2}]
)
def test_scores_are_those_of_the_rows_in_numpy(where: dict[str, Any], quick_workers: None) -> None:
    """More than one shard; in the rounds in which the test set is evaluated; on every back end."""
    data = digits(split="iid", validation=0.5)
    assert data.validation is not None
    assert len(data.validation) > 500
    model = build_model("linear", data).double()
    plan = {"rounds": 3, "eval_every": 2, "local_steps": 2, "active": 4, **({"engine": "loop"} | where)}
    with simulate(FedAvg(), model, data, **plan) as run:
        records = list(run)
        weight, bias = (p.detach().numpy() for p in run.model.parameters())
    assert (
        [r.validation_loss is None for r in records] == [r.test_loss is None for r in records] == [True, False, False]
    )
    x, y = data.x[data.validation].double().reshape(-1, 64).numpy(), data.y[data.validation].numpy()
    z = x @ weight.T + bias
    log_p = z - np.log(np.exp(z).sum(1, keepdims=True))
    assert records[-1].validation_loss == pytest.approx(-log_p[np.arange(len(y)), y].mean(), abs=1e-12)
    assert records[-1].validation_accuracy == (z.argmax(1) == y).mean()


def test_every_method_has_the_same_sets_and_pictures_are_not_augmented() -> None:
    r = np.random.default_rng(0)
    from fedspeed.data import federate, from_arrays

    samples = from_arrays(r.integers(0, 256, (60, 8, 8, 3), dtype=np.uint8), np.arange(60) % 2)
    data = federate(samples, split="iid", clients=4, validation=0.25, augment="paper")
    assert data.pipeline.random
    assert data.validation is not None
    plain = 2 * data.x[data.validation].float() / 255 - 1
    assert torch.allclose(data.validation_batch(0, 99)[0], plain, atol=1e-6)


def test_validation_works_without_a_test_set() -> None:
    x = np.random.default_rng(0).normal(size=(40, 3))
    data = Federated.from_arrays(x, (x[:, 0] > 0).astype(int), np.arange(40) // 10).with_validation("clients:1")
    record = simulate(FedAvg(), nn.Linear(3, 2).double(), data, rounds=1).step()
    assert record.test_loss is None
    assert record.validation_accuracy is not None


QUICK: dict[str, Any] = {
    "clients": 8, "rounds": 4, "local_steps": 2, "model": "linear", "method": "fedavg", "backend": "serial",
    "split": "iid",
}  # fmt: skip


def scored(t: int, test: float | None, validation: float | None, **more: Any) -> Record:
    loss: dict[str, Any] = {"test_loss": 1.0, "validation_loss": 1.0, **more}
    return Record(t, [0], 0.1, 1.0, test_accuracy=test, drift=0.0, update_norm=0.0, bytes_down=1, bytes_up=1,
                  grad_evals=1.0, dropped=[], stragglers=[], seconds=1.0, eval_seconds=1.0,
                  validation_accuracy=validation, **loss)  # fmt: skip


def test_the_best_round_is_chosen_on_validation_where_there_is_one() -> None:
    config = Config.from_dict({**QUICK, "validation": "0.1"})
    records = [scored(1, 0.9, 0.2), scored(2, 0.5, 0.8), scored(3, None, None), scored(4, 0.7, 0.8)]
    summary = summarise(config, prepare(config), records, "finished")
    found = {key: summary[key] for key in ("best_accuracy", "best_round", "chosen_on", "last_accuracy")}
    assert found == {"best_accuracy": 0.5, "best_round": 2, "chosen_on": "validation", "last_accuracy": 0.7}
    plain = Config.from_dict(QUICK)
    summary = summarise(plain, prepare(plain), records, "finished")
    found = {key: summary[key] for key in ("best_accuracy", "best_round", "chosen_on", "last_accuracy")}
    assert found == {"best_accuracy": 0.9, "best_round": 1, "chosen_on": "test", "last_accuracy": 0.7}
    losses = [scored(t, None, None, validation_loss=v) for t, v in ((1, 2.0), (2, 0.5), (3, float("nan")))]
    summary = summarise(config, prepare(config), losses, "finished")
    assert (summary["best_round"], summary["best_accuracy"]) == (2, None)
    assert summarise(config, prepare(config), [], "finished")["best_round"] is None


def test_a_run_directory_with_validation(tmp_path: Path) -> None:
    """Written, read, resumed to the same bits, verified; a number that was changed is found."""
    config = Config.from_dict({**QUICK, "validation": 0.25})
    assert config.validation == "0.25"
    summary = run_config(config, tmp_path / "a")
    records = RunDir(tmp_path / "a").records()
    best = max(records, key=lambda r: r.validation_accuracy or 0.0)
    assert (summary["best_round"], summary["best_accuracy"]) == (best.round, best.test_accuracy)
    assert verify(tmp_path / "a").broken == []

    class Stop(BaseException):
        pass

    def stop(record: Record) -> None:
        if record.round == 2:
            raise Stop

    with pytest.raises(Stop):
        run_config(config, tmp_path / "b", observers=[Rounds(stop)])
    again = resume(tmp_path / "b")
    assert {k: again[k] for k in ("best_round", "best_accuracy")} == {
        k: summary[k] for k in ("best_round", "best_accuracy")
    }
    for one, other in zip(records, RunDir(tmp_path / "b").records(), strict=True):
        assert replace(one, seconds=0, eval_seconds=0) == replace(other, seconds=0, eval_seconds=0)
    path = tmp_path / "b" / "rounds.jsonl"
    lines = [json.loads(text) for text in path.read_text().splitlines()]
    del lines[-1]["validation_loss"], lines[-1]["validation_accuracy"]
    path.write_text("".join(json.dumps(plain) + "\n" for plain in lines))
    broken = " ".join(verify(tmp_path / "b").broken)
    assert "validation_accuracy is None in rounds.jsonl" in broken


def test_a_loss_that_is_not_finite_keeps_its_accuracy(tmp_path: Path) -> None:
    record = scored(1, 0.5, 0.25, validation_loss=float("inf"))
    (tmp_path / "rounds.jsonl").write_text(line(record))
    (back,) = RunDir(tmp_path).records()
    assert (back.validation_loss, back.validation_accuracy) == (None, 0.25)
    assert json.loads(line(back))["validation_accuracy"] == 0.25


def test_clients_that_do_not_train_are_not_counted_in_a_config() -> None:
    config = Config.from_dict({**QUICK, "validation": "clients:3"})
    assert (config.clients, config.active) == (8, 5)
    with prepare(config) as simulation:
        assert (simulation.data.clients, simulation.plan.active) == (5, 5)
    with pytest.raises(UserError, match="got 6 active of 5"):
        Config.from_dict({**QUICK, "validation": "clients:3", "active": 6})
    full = Config.from_dict({**QUICK, "validation": "clients:3", "method": "fedpd"})  # wants every client every round
    assert full.active == 5


def test_the_keys_of_stored_results_are_as_they_were() -> None:
    config = Config.from_dict(QUICK)
    tables = config.to_dict()
    assert tables.pop("validation") == ""
    before: Any = SimpleNamespace(to_dict=lambda: dict(tables))  # a config of the time when there was no such key
    assert run_key(config, "digest") == run_key(before, "digest")
    assert run_key(Config.from_dict({**QUICK, "validation": "0.1"}), "digest") != run_key(before, "digest")


def test_checking_a_config_brings_no_torch() -> None:
    code = "import sys; from fedspeed import Config; Config(validation='clients:5'); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = "--method fedavg --model linear --rounds 2 --local-steps 1 --clients 8 --backend serial".split()  # noqa: SIM905
    assert main(["run", *options, "--validation", "0.2", "--out", str(tmp_path / "a")]) == 0
    assert "% (chosen on validation), mean" in capsys.readouterr().out.replace("\n", " ")
    assert main(["run", *options, "--out", str(tmp_path / "b")]) == 0
    assert "% (chosen on the test set), mean" in capsys.readouterr().out.replace("\n", " ")
    assert "validation" not in (tmp_path / "b" / "rounds.jsonl").read_text()
    (tmp_path / "c.toml").write_text("validation = 0.2\n")
    assert main(["run", str(tmp_path / "c.toml"), *options, "--out", str(tmp_path / "c"), "--quiet"]) == 0
    models = [(tmp_path / name / "model.safetensors").read_bytes() for name in "abc"]
    assert models[0] == models[2] != models[1]
    assert main(["run", *options, "--validation", "some", "--out", str(tmp_path / "d")]) == 2
    assert not (tmp_path / "d").exists()
    assert main(["run", *options, "--set", "data.validation=0.2", "--out", str(tmp_path / "d")]) == 2
    assert "set the config's own key" in capsys.readouterr().err
    folder = ["compare", "fedavg", "fedprox", *options[2:], "--seeds", "1", "--validation", "clients:2"]
    assert main([*folder, "--out", str(tmp_path / "e"), "--quiet"]) == 0
    found = [json.loads((tmp_path / "e" / f"{name}-s0" / "summary.json").read_text()) for name in ("fedavg", "fedprox")]
    assert [summary["chosen_on"] for summary in found] == ["validation"] * 2
    assert len({summary["split_fingerprint"] for summary in found}) == 1
    assert main(["data", "show", "digits", "--clients", "8", "--validation", "clients:2", "--no-figures"]) == 0
    shown = capsys.readouterr().out
    assert "over 6 clients" in shown
    assert "training samples, which no client trains on" in shown


def test_load_data_is_the_same_door() -> None:
    assert load_data("digits", clients=9, validation="clients:0.34").clients == 6


def test_the_number_of_active_clients_may_be_left_out(tmp_path: Path) -> None:
    """10, or all clients where there are fewer; an explicit number that is too large stays an error."""
    data = load("digits", split="iid", clients=4)
    net = build_model("linear", data)
    assert simulate(FedAvg(), net, data, rounds=1).plan.active == 4
    many = load("digits", split="iid", clients=40)
    assert simulate(FedAvg(), net, many, rounds=1).plan.active == 10
    with pytest.raises(UserError, match="got 10 active of 4"):
        simulate(FedAvg(), net, data, rounds=1, active=10)
    assert (Config(clients=4).active, Config(clients=40).active, Config().active, Config().clients) == (4, 10, 10, 100)
    with pytest.raises(UserError, match="got 10 active of 4"):
        Config(clients=4, active=10)
    run_config(Config.from_dict({**QUICK, "rounds": 1}), tmp_path / "run")
    assert Config.from_toml(tmp_path / "run" / "config.toml").active == 8


def test_a_natural_split_says_how_many_clients_there_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    x = np.random.default_rng(0).normal(size=(60, 3))
    np.savez(tmp_path / "mine.npz", x=x, y=(x[:, 0] > 0).astype(int), client=np.repeat(["a", "b", "c"], 20))
    own = ["arrays", "--data-dir", str(tmp_path / "mine.npz"), "--split", "natural"]
    assert main(["data", "show", *own, "--no-figures"]) == 0
    assert "natural over 3 clients" in capsys.readouterr().out
    command = ["run", "--data", *own, "--rounds", "1", "--out", str(tmp_path / "run"), "--quiet"]
    assert main(command) == 0
    stored = Config.from_toml(tmp_path / "run" / "config.toml")
    assert (stored.clients, stored.active) == (3, 3)
    assert main([*command, "--resume", "auto"]) == 0, "the same command goes on with the same run"
    given = Config.from_dict(
        {"data": "arrays", "data_dir": str(tmp_path / "mine.npz"), "split": "natural", "rounds": 1}
    )
    assert same_run(stored, given)
    assert not same_run(stored, replace(given, clients=4))
    assert main(["run", "--data", *own, "--clients", "4", "--rounds", "1", "--out", str(tmp_path / "no")]) == 2
    assert "the data come with 3 clients, found clients = 4" in capsys.readouterr().err
    both = ["--validation", "clients:1", "--rounds", "1", "--out", str(tmp_path / "held"), "--quiet"]
    assert main(["run", "--data", *own, *both]) == 0
    stored = Config.from_toml(tmp_path / "held" / "config.toml")
    assert (stored.clients, stored.active) == (3, 2)
    assert verify(tmp_path / "held").broken == []
