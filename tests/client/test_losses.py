"""The loss where nobody gives one: one rule for Python and the command line, and no targets without a meaning."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fedspeed import Federated, build_model, simulate
from fedspeed.cli import main
from fedspeed.data import federate, from_arrays
from fedspeed.errors import UserError
from fedspeed.runs.config_file import read_config
from fedspeed.runs.directory import RunDir
from fedspeed.runs.launch import prepare

RNG = np.random.default_rng(0)
X = RNG.normal(size=(80, 4)).astype("f4")
NUMBERS = (X @ np.array([1.0, -2.0, 0.5, 3.0])).astype("f4")
LABELS = np.arange(80) % 4
SEVERAL = (RNG.random((80, 3)) < 0.5).astype("f4")
PLAN: dict[str, Any] = {"rounds": 2, "active": 2, "lr": 0.01, "local_epochs": 1, "batch_size": 10}


def four(y: Any, **how: Any) -> Federated:
    return federate(from_arrays(X, y, **how), split="iid", clients=4)


def on_the_command_line(tmp: Path, y: Any, *options: str) -> int:
    np.savez(tmp / "mine.npz", x=X, y=y)
    words = "run --method fedavg --model linear --data arrays --split iid --clients 4 --active 2 --rounds 2 --lr 0.01"
    where = ["--local-epochs", "1", "--batch-size", "10", "--quiet", "--out", str(tmp / "run")]
    return main([*words.split(), "--data-dir", str(tmp / "mine.npz"), *where, *options])


def test_floating_targets_are_numbers_whose_squared_error_falls() -> None:
    data = four(NUMBERS)
    run = simulate("fedavg", "linear", data, **PLAN | {"rounds": 1, "active": 4})
    before = squared_error(build_model("linear", data), data)
    record = next(iter(run))
    assert record.test_loss == pytest.approx(squared_error(run.model, data), rel=1e-5)
    assert record.test_loss < before


def squared_error(model: nn.Module, data: Federated) -> float:
    weight, bias = (p.detach().numpy() for p in model.parameters())
    x, y = (np.asarray(a) for a in (data.x_test, data.y_test))
    return float(np.mean((x @ weight[0] + bias - y) ** 2))


@pytest.mark.parametrize(
    "y",
    [NUMBERS, NUMBERS[:, None], np.stack([NUMBERS, NUMBERS**2], 1), LABELS],
    ids=["numbers", "a column", "two columns", "classes"],
)
def test_the_command_line_and_python_make_the_same_run(y: np.ndarray, tmp_path: Path) -> None:
    assert on_the_command_line(tmp_path, y) == 0
    records = list(simulate("fedavg", "linear", four(y), **PLAN))
    stored = RunDir(tmp_path / "run").records(2)
    assert [(r.train_loss, r.test_loss) for r in records] == [(r.train_loss, r.test_loss) for r in stored]


UNCLEAR = {
    "float labels": (LABELS.astype("f4"), "targets are floats, and exactly the whole numbers 0 to 3; give classes=4"),
    "from 1": (LABELS + 1.0, "exactly the whole numbers 1 to 4"),
    "one-hot": (np.eye(4)[LABELS], r"targets of shape \(\d+, 4\) are one-hot, a single 1 per row; write y.argmax"),
    "one-hot, whole": (np.eye(4, dtype=int)[LABELS], "one-hot|whole-number targets of other shapes"),
    "several": (SEVERAL, r"\(\d+, 3\) are 0 and 1, several labels per row; give a loss="),
}


@pytest.mark.parametrize("kind", UNCLEAR)
def test_targets_of_no_clear_meaning_are_refused_in_one_line(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    y, message = UNCLEAR[kind]
    with pytest.raises(UserError, match=message) as told:
        simulate("fedavg", "linear", four(y), **PLAN)
    assert "\n" not in str(told.value)
    assert on_the_command_line(tmp_path, y) == 2
    assert re.search(message, capsys.readouterr().err)
    assert not (tmp_path / "run").exists()


def test_what_the_refusal_says_to_write_works(tmp_path: Path) -> None:
    assert four(LABELS.astype("f4"), classes=4).classes == 4
    assert on_the_command_line(tmp_path, LABELS.astype("f4"), "--set", "data.classes=4") == 0
    named = list(simulate("fedavg", "linear", four(LABELS), **PLAN))
    assert [r.train_loss for r in named] == [r.train_loss for r in RunDir(tmp_path / "run").records(2)]
    list(simulate("fedavg", "linear", four(LABELS.astype("f4")[:, None]), **PLAN))
    for y, loss in ((SEVERAL, nn.BCEWithLogitsLoss()), (np.eye(4)[LABELS], nn.functional.cross_entropy)):
        list(simulate("fedavg", nn.Linear(4, y.shape[1]), four(y.astype("f4")), **PLAN, loss=loss))
    with pytest.raises(UserError, match=r"expected whole numbers as targets with classes=4, found 0\.5 in row 0"):
        four(LABELS + 0.5, classes=4)


def test_honest_targets_are_not_refused() -> None:
    for y in (LABELS * 2.0, np.r_[LABELS[:-1], 7.0], LABELS - 1.0, np.zeros(80), np.abs(np.eye(4)[LABELS] - 0.1)):
        simulate("fedavg", "linear", four(y.astype("f4")), **PLAN)
    tokens = Federated.from_arrays(X, np.stack([LABELS] * 3, 1), np.arange(80) % 4)
    simulate("fedavg", nn.Sequential(nn.Linear(4, 12), nn.Unflatten(1, (4, 3))), tokens, **PLAN)


def test_outputs_that_are_not_shaped_like_the_numbers_are_refused() -> None:
    with pytest.raises(UserError, match=r"outputs of shape \(batch\).*found \(batch, 1\); write y\[:, None\]"):
        simulate("fedavg", nn.Linear(4, 1), four(NUMBERS), **PLAN)
    simulate("fedavg", nn.Linear(4, 1), four(NUMBERS[:, None]), **PLAN)
    with pytest.raises(UserError, match="expected class labels for cross-entropy, found a float32 per sample"):
        simulate("fedavg", nn.Linear(4, 4), four(NUMBERS), **PLAN, loss=nn.functional.cross_entropy)


def test_labels_from_1_are_told_of() -> None:
    with pytest.warns(UserWarning, match="no sample has class 0: labels are 1 to 4, so 5 classes are counted"):
        assert four(LABELS + 1).classes == 5
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert (four(LABELS + 1, classes=5).classes, four(LABELS).classes, four(LABELS + 2).classes) == (5, 4, 6)


def test_a_stored_run_on_float_labels_goes_on(tmp_path: Path) -> None:
    assert on_the_command_line(tmp_path, NUMBERS) == 0
    np.savez(tmp_path / "mine.npz", x=X, y=LABELS.astype("f4"))
    with prepare(read_config(tmp_path / "run")) as simulation:  # as resume, verify and replay do
        assert simulation.work.loss is torch.nn.functional.mse_loss
