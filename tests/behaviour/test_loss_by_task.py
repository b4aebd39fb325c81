"""Losses by name and from a file, in whole runs: against a NumPy loop, on every back end, stopped, scored and told."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from watching import Stop, stop_after

from fedspeed import Federated, simulate
from fedspeed.cli import main
from fedspeed.config.config import Config
from fedspeed.data import federate, from_arrays
from fedspeed.report.diff import differences
from fedspeed.runs.directory import RunDir
from fedspeed.runs.launch import resume, run_config

N, D, K, CLIENTS = 800, 5, 3, 4
RNG = np.random.default_rng(1)
X = RNG.normal(size=(N, D))
NUMBERS = X @ RNG.normal(size=(D, K)) + 3 * RNG.standard_t(2, size=(N, K))
LABELS = (X @ RNG.normal(size=(D, K)) + RNG.normal(size=(N, K)) > 1).astype("f8")
CLASSES = np.argmax(X @ RNG.normal(size=(D, K)), 1)

OWN = '''
import torch
from torch import nn


def pinball(outputs, targets, q=0.5):
    """The quantile loss."""
    return torch.maximum(q * (targets - outputs), (q - 1) * (targets - outputs)).mean()


class Pinball(nn.Module):
    def __init__(self, q=0.5):
        super().__init__()
        self.q = q

    def forward(self, outputs, targets):
        return pinball(outputs, targets, self.q)
'''


def softmax(o: np.ndarray) -> np.ndarray:
    e = np.exp(o - o.max(1, keepdims=True))
    return e / e.sum(1, keepdims=True)


def smoothed(y: np.ndarray, share: float) -> np.ndarray:
    return (1 - share) * np.eye(K)[y] + share / K


# A loss of outputs o and targets t, and its gradient by o: from the formulas, without torch.
FORMULAS: dict[str, tuple[Any, Any, np.ndarray]] = {
    "mse": (lambda o, t: np.mean((o - t) ** 2), lambda o, t: 2 * (o - t) / o.size, NUMBERS),
    "huber:delta=0.5": (
        lambda o, t: np.mean(np.where(abs(o - t) < 0.5, (o - t) ** 2 / 2, 0.5 * (abs(o - t) - 0.25))),
        lambda o, t: np.clip(o - t, -0.5, 0.5) / o.size,
        NUMBERS,
    ),
    "huber": (
        lambda o, t: np.mean(np.where(abs(o - t) < 1, (o - t) ** 2 / 2, abs(o - t) - 0.5)),
        lambda o, t: np.clip(o - t, -1, 1) / o.size,
        NUMBERS,
    ),
    "bce": (
        lambda o, t: np.mean(np.logaddexp(0, o) - t * o),
        lambda o, t: (1 / (1 + np.exp(-o)) - t) / o.size,
        LABELS,
    ),
    "cross-entropy": (
        lambda o, t: -np.mean(np.log(softmax(o))[np.arange(len(t)), t]),
        lambda o, t: (softmax(o) - np.eye(K)[t]) / len(t),
        CLASSES,
    ),
    "cross-entropy:smoothing=0.2": (
        lambda o, t: -np.mean((smoothed(t, 0.2) * np.log(softmax(o))).sum(1)),
        lambda o, t: (softmax(o) - smoothed(t, 0.2)) / len(t),
        CLASSES,
    ),
}


def shared(y: np.ndarray) -> Federated:
    """Four clients of 30 samples, and a test set of more than one slice."""
    rows = [range(30 * i, 30 * i + 30) for i in range(CLIENTS)]
    return Federated.from_arrays(X, y, rows, test=(X[120:], y[120:]))


def model() -> nn.Linear:
    torch.manual_seed(3)
    return nn.Linear(D, K).double()


PLAN: dict[str, Any] = {
    "rounds": 3, "active": CLIENTS, "lr": 0.2, "lr_decay": 1.0, "weight_decay": 0.0, "batch_size": 30, "local_steps": 4
}  # fmt: skip


def plain_loop(slope: Any, y: np.ndarray, rounds: int = 3) -> tuple[np.ndarray, np.ndarray]:
    """FedAvg of full-batch steps in NumPy."""
    W, b = (p.detach().numpy().copy() for p in model().parameters())
    for _ in range(rounds):
        ends = []
        for i in range(CLIENTS):
            x, t, w, c = X[30 * i : 30 * i + 30], y[30 * i : 30 * i + 30], W.copy(), b.copy()
            for _ in range(4):
                g = slope(x @ w.T + c, t)
                w, c = w - 0.2 * g.T @ x, c - 0.2 * g.sum(0)
            ends.append((w, c))
        W, b = (np.mean([end[part] for end in ends], 0) for part in (0, 1))
    return W, b


@pytest.mark.parametrize("engine", ["loop", "block"])
@pytest.mark.parametrize("name", FORMULAS)
def test_fedavg_is_the_loop_in_numpy(name: str, engine: str) -> None:
    value, slope, y = FORMULAS[name]
    with simulate("fedavg", model(), shared(y), **PLAN, loss=name, engine=engine) as run:
        records = list(run)
        W, b = (p.detach().numpy() for p in run.model.parameters())
    wanted = plain_loop(slope, y)
    np.testing.assert_allclose(W, wanted[0], rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(b, wanted[1], rtol=1e-9, atol=1e-12)
    assert records[-1].test_loss == pytest.approx(value(X[120:] @ W.T + b, y[120:]), rel=1e-9)


def test_labels_are_scored_one_by_one_and_numbers_by_the_loss() -> None:
    with simulate("fedavg", model(), shared(LABELS), **PLAN, loss="bce", client_metrics="every=1,own") as run:
        record = list(run)[-1]
        found = run.client_metrics
        W, b = (p.detach().numpy() for p in run.model.parameters())
        settings = run.settings
    assert found is not None
    outputs = X @ W.T + b
    right = (outputs > 0) == (LABELS == 1)
    assert record.test_accuracy == pytest.approx(right[120:].mean(), rel=1e-12)
    assert "accuracy per label" in settings
    assert "loss bce" in settings
    mine = [slice(30 * i, 30 * i + 30) for i in range(CLIENTS)]
    np.testing.assert_allclose(found.accuracy[0], [right[own].mean() for own in mine], rtol=1e-6)
    bce = FORMULAS["bce"][0]
    np.testing.assert_allclose(found.loss[0], [bce(outputs[own], LABELS[own]) for own in mine], rtol=1e-6)
    assert found.own_accuracy is not None
    assert np.isfinite(found.own_accuracy).all()
    numbers = list(simulate("fedavg", model(), shared(NUMBERS), **PLAN, loss="huber"))
    assert [r.test_accuracy for r in numbers] == [None] * 3


def test_one_label_is_ordinary_accuracy() -> None:
    """A single logit, as in logistic regression: the same as two classes."""
    y = LABELS[:, :1]
    run = simulate("fedavg", nn.Linear(D, 1).double(), shared(y), **PLAN, loss="bce")
    record = list(run)[-1]
    with torch.no_grad():
        said = run.model(torch.tensor(X[120:])).numpy() > 0
    assert record.test_accuracy == pytest.approx(np.mean(said == (y[120:] == 1)))


def test_sparse_labels_that_are_never_found_are_reported_as_chance() -> None:
    """Per label, an accuracy of 95% can be that of giving nobody any label: the share of zeros."""
    y = (np.random.default_rng(0).random((N, K)) < 0.05).astype("f8")
    plan = PLAN | {"rounds": 12, "lr": 0.5}
    records = list(simulate("fedavg", model(), shared(y), **plan, loss="bce"))
    assert records[-1].test_accuracy > 0.9
    assert records[-1].signs["accuracy of guessing"] == pytest.approx(1 - y[120:].mean(), abs=1e-3)


def test_a_rule_about_accuracy_takes_labels() -> None:
    plan = PLAN | {"rounds": 30, "stop_at": "accuracy=0.7"}
    with simulate("fedavg", model(), shared(LABELS), **plan, loss="bce") as run:
        records = list(run)
    assert records[-1].test_accuracy >= 0.7 > max(r.test_accuracy for r in records[:-1])


# --- from the command line, and from a file ---


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """Arrays of each task, and a file with losses."""
    for name, y in (("numbers", NUMBERS), ("labels", LABELS.astype(int)), ("classes", CLASSES)):
        np.savez(tmp_path / f"{name}.npz", x=X[:200], y=y[:200])
    (tmp_path / "own.py").write_text(OWN)
    return tmp_path


def tables(files: Path, name: str, loss: Any, **others: Any) -> dict[str, Any]:
    usual = {"rounds": 4, "clients": 8, "active": 4, "local_epochs": 1, "batch_size": 10, "split": "iid", "lr": 0.05}
    where = {"data": "arrays", "data_dir": str(files / f"{name}.npz"), "backend": "serial"}
    return {**usual, **where, "method": "scaffold", "loss": loss, **others}


CASES = [
    ("numbers", "huber:delta=0.5"),
    ("labels", "bce"),
    ("classes", "cross-entropy:smoothing=0.1"),
    ("numbers", "own.py:pinball"),
    ("numbers", {"name": "own.py:Pinball", "q": 0.2}),
]


def placed(files: Path, loss: Any) -> Any:
    if isinstance(loss, dict):
        return loss | {"name": f"{files}/{loss['name']}"}
    return f"{files}/{loss}" if ".py:" in loss else loss


@pytest.mark.parametrize(("name", "loss"), CASES, ids=str)
def test_stopped_and_resumed_elsewhere_is_the_straight_run(
    name: str, loss: Any, files: Path, quick_workers: None
) -> None:
    given = tables(files, name, placed(files, loss))
    whole, out = files / "whole", files / "out"
    run_config(Config.from_dict(given), whole)
    with pytest.raises(Stop):
        run_config(Config.from_dict(given), out, observers=[stop_after(2)])
    (files / "own.py").unlink()  # the run has its own copy
    resume(out, allow_code=True, placement={"backend": "process", "workers": 2})
    assert differences(whole, out) == []
    assert main(["verify", str(out), "--all", "--allow-code"]) == 0


def test_the_file_gives_the_bits_of_the_function(files: Path) -> None:
    from torch.nn.functional import l1_loss

    given = tables(files, "numbers", f"{files}/own.py:pinball")
    run_config(Config.from_dict(given), files / "run")
    samples = from_arrays(X[:200].astype("f4"), NUMBERS[:200].astype("f4"))
    plan = {key: given[key] for key in ("rounds", "active", "local_epochs", "batch_size", "lr", "backend")}
    run = simulate("scaffold", "mlp", federate(samples, split="iid", clients=8), **plan,
                   loss=lambda o, t: l1_loss(o, t) / 2)  # fmt: skip
    wanted = [r.test_loss for r in run]
    assert [r.test_loss for r in RunDir(files / "run").records(4)] == pytest.approx(wanted, rel=1e-4)


def test_code_of_a_run_is_executed_only_if_allowed(
    files: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_config(Config.from_dict(tables(files, "numbers", f"{files}/own.py:pinball")), files / "run")
    assert main(["verify", str(files / "run")]) == 0  # this user's own run
    capsys.readouterr()
    monkeypatch.setenv("FEDSPEED_STATE", str(files / "of another user"))
    assert main(["verify", str(files / "run")]) == 2
    assert "names loss" in (err := capsys.readouterr().err)
    assert "--allow-code" in err


@pytest.mark.slow
def test_killed_and_resumed_with_a_loss_of_a_file(files: Path) -> None:
    given = tables(files, "numbers", f"{files}/own.py:Pinball", rounds=600)
    run_config(Config.from_dict(given), files / "whole")
    (files / "c.toml").write_text(Config.from_dict(given).to_toml())
    command = [sys.executable, "-m", "fedspeed", "run", str(files / "c.toml"), "--quiet", "--out", str(files / "out")]
    process = subprocess.Popen(command)
    written = files / "out" / "rounds.jsonl"
    while process.poll() is None and not (written.exists() and written.read_text().count("\n") > 5):
        time.sleep(0.01)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    assert 5 < written.read_text().count("\n") < 600
    resume(files / "out", allow_code=True)
    assert differences(files / "whole", files / "out") == []


def test_a_report_says_what_the_accuracy_is_and_a_regression_is_compared_by_its_loss(
    files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_config(Config.from_dict(tables(files, "labels", "bce")), files / "labels")
    run_config(Config.from_dict(tables(files, "numbers", "huber")), files / "numbers")
    told = json.loads((files / "labels" / "summary.json").read_text())["settings"]
    assert (told["loss"], told["accuracy"]) == ("bce", "per label")
    capsys.readouterr()
    assert main(["report", str(files / "labels"), "--out", str(files / "page.html")]) == 0
    assert "accuracy per label" in (files / "page.html").read_text()
    for command in ("explain", "show", "inspect"):
        assert main([command, str(files / "numbers")]) == 0, command
        assert main([command, str(files / "labels")]) == 0, command
