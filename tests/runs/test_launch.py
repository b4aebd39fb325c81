"""A run directory: its files, what they say, running one again, and what a run that fails leaves."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from watching import Rounds

from fedspeed import METHODS, Config, Diverged, FedAvg, FedSpeed, Record, Simulation, UserError, run_config
from fedspeed.config.config import Spec
from fedspeed.report.run_files import RunFiles
from fedspeed.runs import launch as launch
from fedspeed.runs.directory import CLIENT_METRICS, FILES, FOLDERS, FORK, SIGNATURE, RunDir
from fedspeed.runs.launch import prepare
from fedspeed.runs.summary import summarise

SMALL = {
    "backend": "serial",
    "rounds": 4,
    "clients": 10,
    "active": 3,
    "local_epochs": 1,
    "model": "linear",
    "split": "dirichlet:0.3",
}

FIELDS = ["round", "cohort", "lr", "train_loss", "test_loss", "test_accuracy", "drift", "update_norm", "bytes_down",
          "bytes_up", "grad_evals", "dropped", "stragglers", "seconds", "eval_seconds"]  # fmt: skip


def small(**changes) -> Config:
    return Config.from_dict({**SMALL, **changes})


def lines(out: Path, timeless: bool = False) -> list[dict]:
    rounds = [json.loads(line) for line in (out / "rounds.jsonl").read_text().splitlines()]
    return [{k: v for k, v in r.items() if not (timeless and k.endswith("seconds"))} for r in rounds]


def test_the_files_of_a_run(tmp_path):
    config, out = small(targets=[0.3, 0.99]), tmp_path / "run"
    seen: list[Record] = []
    summary = run_config(config, out, observers=[Rounds(seen.append)])
    assert sorted(path.name for path in out.iterdir()) == sorted({*FILES, *FOLDERS} - {CLIENT_METRICS, FORK, SIGNATURE})
    assert Config.from_toml(out / "config.toml") == replace(config, engine="loop")  # `auto` is resolved
    assert [r.to_dict() for r in seen] == lines(out)
    written = json.loads((out / "summary.json").read_text())
    assert written.pop("seal")  # the digest of the rest
    assert written == summary
    assert summary["status"] == "finished"


def test_the_rounds_have_the_promised_fields(tmp_path):
    run_config(small(eval_every=3), tmp_path)
    rounds = lines(tmp_path)
    assert all(list(r) == [*FIELDS, "metrics"] for r in rounds)  # the norms of FedSpeed's x and H
    assert [r["round"] for r in rounds] == [1, 2, 3, 4]
    assert [r["test_accuracy"] is not None for r in rounds] == [False, False, True, True]
    assert all(len(r["cohort"]) == 3 for r in rounds)


def test_the_model_file_is_the_server_s_model(tmp_path):
    config = small()
    run_config(config, tmp_path)
    simulation = prepare(config)
    for _ in simulation:
        pass
    tensors = load_file(tmp_path / "model.safetensors")
    assert list(tensors) == ["1.bias", "1.weight"]
    assert all(torch.equal(tensors[name], p) for name, p in simulation.model.named_parameters())
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert file.metadata()["fedspeed"].endswith("round 4")


@pytest.mark.parametrize("method", ["fedavg", "fedspeed"])
def test_running_the_written_config_again_gives_the_same_bits(tmp_path, method):
    first, second, other = (tmp_path / name for name in "abc")
    run_config(small(method=method), first)
    run_config(Config.from_toml(first / "config.toml"), second)
    assert (first / "model.safetensors").read_bytes() == (second / "model.safetensors").read_bytes()
    assert (first / "config.toml").read_bytes() == (second / "config.toml").read_bytes()
    assert lines(first, timeless=True) == lines(second, timeless=True)
    a, b = (RunDir(out).summary() for out in (first, second))
    assert {k: v for k, v in a.items() if not k.endswith("seconds")} == {
        k: v for k, v in b.items() if not k.endswith("seconds")
    }
    run_config(small(method=method, seed=1), other)
    assert (first / "model.safetensors").read_bytes() != (other / "model.safetensors").read_bytes()


def test_the_accuracy_is_that_of_the_saved_model(tmp_path):
    """Recomputed from the files with NumPy."""
    config = small()
    summary = run_config(config, tmp_path)
    data, saved = prepare(config).data, load_file(tmp_path / "model.safetensors")
    scores = data.x_test.flatten(1).numpy() @ saved["1.weight"].numpy().T + saved["1.bias"].numpy()
    assert summary["last_accuracy"] == np.mean(scores.argmax(1) == data.y_test.numpy())


def test_a_folder_that_holds_a_run_is_refused_unless_overwritten(tmp_path):
    run_config(small(), tmp_path)
    before = (tmp_path / "model.safetensors").read_bytes()
    with pytest.raises(UserError, match="already holds a run; choose another --out, or --overwrite it"):
        run_config(small(seed=1), tmp_path)
    assert (tmp_path / "model.safetensors").read_bytes() == before
    run_config(small(rounds=2, seed=1), tmp_path, overwrite=True)
    assert len(lines(tmp_path)) == 2
    assert (tmp_path / "model.safetensors").read_bytes() != before


def test_an_error_before_the_first_round_closes_the_simulation(tmp_path, monkeypatch):
    closed = []
    monkeypatch.setattr(Simulation, "close", lambda self, error=None: closed.append(error))
    monkeypatch.setattr(launch, "bound_to", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError) as stopped:
        run_config(small(), tmp_path)
    assert closed == [stopped.value]


@pytest.mark.parametrize("name", FILES)
def test_a_part_of_a_run_is_a_run(tmp_path, name):
    (tmp_path / name).write_text("mine")
    with pytest.raises(UserError, match="already holds a run"):
        run_config(small(), tmp_path)
    assert (tmp_path / name).read_text() == "mine"


def test_other_files_of_the_folder_stay(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    run_config(small(rounds=1), tmp_path)
    run_config(small(rounds=1), tmp_path, overwrite=True)
    assert (tmp_path / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("bad", [{"model": "lenet"}, {"data": "digit"}, {"clients": 5000}], ids=str)
def test_a_config_that_fails_to_start_neither_makes_nor_destroys_a_run(tmp_path, bad):
    fresh, old = tmp_path / "fresh", tmp_path / "old"
    with pytest.raises(UserError):
        run_config(small(**bad), fresh)
    assert not fresh.exists()
    run_config(small(rounds=1), old)
    before = {path: path.read_bytes() for path in old.rglob("*") if path.is_file()}
    with pytest.raises(UserError):
        run_config(small(**bad), old, overwrite=True)
    assert {path: path.read_bytes() for path in old.rglob("*") if path.is_file()} == before


def test_a_folder_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot make the output folder .*choose another --out"):
        run_config(small(), tmp_path / "file")
    with pytest.raises(UserError, match=r"cannot make the output folder .*choose another --out"):
        run_config(small(), tmp_path / "file" / "below")


@dataclass(frozen=True)
class Explodes(FedAvg):
    """FedAvg whose third round is NaN."""

    def upload(self, xK, down, client, run):
        up, kept = super().upload(xK, down, client, run)
        return (type(up)(up.D * math.nan) if run.t == 2 else up), kept


def replaced(config: Config, method: FedAvg) -> Config:
    object.__setattr__(config, "method", method)
    return config


def test_a_run_that_diverges_keeps_what_it_had(tmp_path, monkeypatch):
    monkeypatch.setitem(METHODS, "explodes", Explodes)
    config = replaced(small(), Explodes())
    with pytest.raises(Diverged, match="round 3"):
        run_config(config, tmp_path)
    assert [r["round"] for r in lines(tmp_path)] == [1, 2]
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["status"].startswith("diverged: Explodes.upload made NaN or Inf")
    assert summary["rounds"] == 2
    shorter = prepare(small(rounds=2, method="fedavg"))
    for _ in shorter:
        pass
    saved = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(saved[name], p) for name, p in shorter.model.named_parameters())


@pytest.mark.parametrize(
    ("error", "status"), [(KeyboardInterrupt(), "interrupted"), (MemoryError("full"), "failed: full")], ids=repr
)
def test_a_run_that_is_stopped_keeps_what_it_had(tmp_path, error, status, monkeypatch):
    advance = Simulation.advance

    def stop(self: Simulation) -> Record:
        if self.t == 2:
            raise error
        return advance(self)

    monkeypatch.setattr(Simulation, "advance", stop)
    with pytest.raises(type(error)):
        run_config(small(), tmp_path)
    assert [r["round"] for r in lines(tmp_path)] == [1, 2]
    assert json.loads((tmp_path / "summary.json").read_text())["status"] == status
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert file.metadata()["fedspeed"].endswith("round 2")


def record(t: int, accuracy: float | None, **fields) -> Record:
    plain = {
        "cohort": [0],
        "lr": 0.1,
        "train_loss": 1.0,
        "test_loss": None if accuracy is None else 2.0,
        "drift": 0.0,
        "update_norm": 0.0,
        "bytes_down": 10,
        "bytes_up": 1,
        "grad_evals": 2.0,
        "dropped": [],
        "stragglers": [],
        "seconds": 0.5,
        "eval_seconds": 0.25,
    }
    return Record(round=t, test_accuracy=accuracy, **plain | fields)


def test_the_summary_by_hand():
    config = small(targets=[0.6, 0.5, 0.123456789, 0.95])
    accuracies = [0.1, 0.6, None, 0.3, 0.8, 0.5, 0.7]
    records = [record(t, a) for t, a in enumerate(accuracies, 1)]
    summary = summarise(config, prepare(config), records, "finished")
    assert summary["rounds"] == 7
    assert summary["last_accuracy"] == 0.7
    assert summary["best_accuracy"] == 0.8
    assert summary["mean_last5_accuracy"] == pytest.approx((0.6 + 0.3 + 0.8 + 0.5 + 0.7) / 5)  # evaluated rounds only
    assert summary["targets"] == {
        "0.6": {"round": 2, "bytes": 22},  # reached exactly
        "0.5": {"round": 2, "bytes": 22},
        "0.123456789": {"round": 2, "bytes": 22},
        "0.95": None,
    }
    assert (summary["bytes_down"], summary["bytes_up"], summary["grad_evals"]) == (70, 7, 14)
    assert (summary["seconds"], summary["eval_seconds"]) == (3.5, 1.75)
    assert summary["seed"] == 0
    assert summary["parameters"] == 650
    assert {"fedspeed", "torch", "numpy", "python", "system", "cpu", "cores", "device"} <= summary["environment"].keys()
    assert len(summary["data_fingerprint"]) == len(summary["split_fingerprint"]) == 16


def test_a_summary_without_accuracies_has_the_losses():
    config = small()
    records = [record(1, None, test_loss=3.0), record(2, None, test_loss=2.0)]
    summary = summarise(config, prepare(config), records, "finished")
    assert (summary["last_accuracy"], summary["best_accuracy"], summary["mean_last5_accuracy"]) == (None, None, None)
    assert (summary["last_test_loss"], summary["last_train_loss"]) == (2.0, 1.0)


def test_losses_that_are_not_finite_are_null_in_json():
    strict = json.dumps(record(1, 0.5, test_loss=math.inf).to_dict(), allow_nan=False)
    assert json.loads(strict)["test_loss"] is None
    config = small()
    summary = summarise(config, prepare(config), [record(1, 0.5, test_loss=math.nan)], "finished")
    json.dumps(summary, allow_nan=False)


def test_a_regression_runs_from_a_config(tmp_path):
    """Real targets take the squared loss; a linear model gets close to the least-squares solution."""
    r = np.random.default_rng(0)
    x = r.normal(size=(200, 3)).astype("f4")
    y = x @ np.array([1.0, -2.0, 0.5], "f4")
    np.savez(tmp_path / "line.npz", x=x, y=y, x_test=x, y_test=y)
    config = Config(
        rounds=30, clients=5, active=5, method=FedAvg(), model=Spec("linear"), split="iid", data=Spec("arrays"),
        data_dir=str(tmp_path / "line.npz"), weight_decay=0.0,
    )  # fmt: skip
    summary = run_config(config, tmp_path / "run")
    assert summary["last_accuracy"] is None
    assert summary["last_test_loss"] < 1e-4
    weights = load_file(tmp_path / "run" / "model.safetensors")
    found = next(a for name, a in weights.items() if name.endswith("weight"))
    np.testing.assert_allclose(found.numpy().ravel(), [1.0, -2.0, 0.5], atol=1e-2)


@pytest.mark.parametrize("broken", ["rounds.jsonl", "summary.json"])
def test_a_folder_that_is_no_run_is_refused(tmp_path, broken):
    run_config(small(rounds=1), tmp_path)
    assert len(RunFiles.read(tmp_path).rounds) == 1
    (tmp_path / broken).write_text('{"half')
    with pytest.raises(UserError, match="is not a finished run directory"):
        RunFiles.read(tmp_path)


def test_a_fedspeed_run_with_everything_set(tmp_path):
    config = small(
        method={"name": "fedspeed", "rho": 0.05, "alpha": 0.5, "ascent_fraction": 0.5}, data="synthetic",
        split="natural", weighting="samples", cohort="bernoulli", clip=1.0, clip_mode="released", local_steps=3,
        decay_outside_mix=True, batch_size=8,
    )  # fmt: skip
    summary = run_config(config, tmp_path)
    assert isinstance(Config.from_toml(tmp_path / "config.toml").method, FedSpeed)
    steps = 3 * sum(len(r["cohort"]) for r in lines(tmp_path))
    assert summary["grad_evals"] == pytest.approx(1.5 * steps)


def test_the_engine_is_resolved_in_the_config_and_repeats_its_bits(tmp_path):
    run_config(small(active=6, split="iid"), tmp_path / "a")
    config = Config.from_toml(tmp_path / "a" / "config.toml")
    assert config.engine == "block"
    run_config(config, tmp_path / "b")
    assert lines(tmp_path / "a", timeless=True) == lines(tmp_path / "b", timeless=True)


def test_states_on_disk_are_in_the_run_directory_and_overwritten_with_it(tmp_path):
    run_config(small(states="disk"), tmp_path)
    before = set((tmp_path / "states").glob("[0-9]*@*"))
    assert before
    run_config(small(states="disk", seed=1, rounds=1), tmp_path, overwrite=True)
    assert len(list((tmp_path / "states").glob("[0-9]*@*"))) == 3
