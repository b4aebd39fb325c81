"""Losses by default and by name: one rule for Python and the command line, and no targets without a meaning."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fedspeed import FedAvg, Federated, build_model, simulate
from fedspeed.cli import main
from fedspeed.client.losses import kind_of, named_loss
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
    "one-hot, whole": (np.eye(4, dtype=int)[LABELS], "are one-hot, a single 1 per row; write y.argmax"),
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
    with pytest.raises(UserError, match="loss cross-entropy: expected class labels, found float32 of shape"):
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


# --- by name ---

OUTPUTS = RNG.normal(size=(80, 3)) * 3
WIDE = RNG.normal(size=(80, 4)) * 3
REAL = RNG.normal(size=(80, 3)) * 3


def log_odds(o: np.ndarray) -> np.ndarray:
    return o - np.log(np.exp(o).sum(1, keepdims=True))


def by_formula(name: str, y: np.ndarray) -> Any:
    """The loss of a batch, without torch."""
    apart = np.abs(OUTPUTS - y) if y.ndim == 2 else np.zeros(0)
    return {
        "cross-entropy": lambda: -log_odds(WIDE)[np.arange(80), y].mean(),
        "cross-entropy:smoothing=0.3": lambda: (
            -0.7 * log_odds(WIDE)[np.arange(80), y].mean() - 0.3 * log_odds(WIDE).mean()
        ),
        "mse": lambda: (apart**2).mean(),
        "huber": lambda: np.where(apart < 1, apart**2 / 2, apart - 0.5).mean(),
        "huber:delta=2.5": lambda: np.where(apart < 2.5, apart**2 / 2, 2.5 * (apart - 1.25)).mean(),
        "bce": lambda: -(y * np.log(1 / (1 + np.exp(-OUTPUTS))) + (1 - y) * np.log(1 / (1 + np.exp(OUTPUTS)))).mean(),
    }[name]()


BY_TORCH = {
    "cross-entropy": (nn.CrossEntropyLoss(), WIDE, LABELS),
    "cross-entropy:smoothing=0.3": (nn.CrossEntropyLoss(label_smoothing=0.3), WIDE, LABELS),
    "mse": (nn.MSELoss(), OUTPUTS, REAL),
    "huber": (nn.HuberLoss(), OUTPUTS, REAL),
    "huber:delta=2.5": (nn.HuberLoss(delta=2.5), OUTPUTS, REAL),
    "bce": (nn.BCEWithLogitsLoss(), OUTPUTS, SEVERAL.astype("f8")),
}


@pytest.mark.parametrize("name", BY_TORCH)
def test_a_named_loss_is_the_formula_and_torch(name: str) -> None:
    theirs, outputs, y = BY_TORCH[name]
    given = torch.tensor(outputs, requires_grad=True)
    found, wanted = (loss(given, torch.tensor(y)) for loss in (named_loss(name), theirs))
    assert found.item() == pytest.approx(by_formula(name, y), rel=1e-12)
    assert torch.equal(found, wanted)
    slopes = [torch.autograd.grad(value, given, retain_graph=True)[0] for value in (found, wanted)]
    assert torch.equal(*slopes)
    assert kind_of(named_loss(name)) == kind_of(theirs) == name.partition(":")[0]


def test_whole_numbers_and_floats_are_the_same_labels() -> None:
    runs = [simulate("fedavg", "linear", four(SEVERAL.astype(kind)), **PLAN, loss="bce") for kind in ("f4", "i8")]
    first, second = ([(r.train_loss, r.test_loss, r.test_accuracy) for r in run] for run in runs)
    assert first == second


@pytest.mark.parametrize(
    ("y", "name"), [(NUMBERS[:, None], "mse"), (LABELS, "cross-entropy")], ids=["numbers", "classes"]
)
def test_the_default_by_its_name_has_the_same_bits(y: np.ndarray, name: str) -> None:
    runs = [simulate("fedavg", "linear", four(y), **PLAN | {"active": 4}, loss=loss) for loss in (None, name)]
    assert runs[0].plan.engine == runs[1].plan.engine == "block"
    assert all(torch.equal(run.x, runs[0].x) for run in runs if list(run))


@pytest.mark.parametrize("name", ["huber", "cross-entropy:smoothing=0.1", "bce"])
def test_any_other_loss_takes_the_loop(name: str) -> None:
    y = {"huber": NUMBERS, "bce": SEVERAL}.get(name, LABELS)
    assert simulate("fedavg", "linear", four(y), **PLAN | {"active": 4}, loss=name).plan.engine == "loop"


def branching(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return outputs.mean() if outputs.sum() > 0 else -outputs.mean()


def test_the_block_says_that_it_cannot_take_a_loss_that_branches() -> None:
    run = simulate("fedavg", "linear", four(NUMBERS), **PLAN, loss=branching, engine="block")
    with pytest.raises(UserError, match="data-dependent control flow") as told:
        next(iter(run))
    assert "\n" not in str(told.value)
    list(simulate("fedavg", "linear", four(NUMBERS), **PLAN, loss=branching))


class Listed:
    """A loss that cannot be hashed."""

    __hash__ = None  # type: ignore[assignment]

    def __call__(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return (outputs - targets).abs().mean()


def test_a_loss_may_be_any_object_that_is_called() -> None:
    assert len(list(simulate("fedavg", "linear", four(NUMBERS[:, None]), **PLAN | {"active": 4}, loss=Listed()))) == 2


MISFITS: dict[str, tuple[Any, Any, str]] = {
    "entropy of numbers": (
        NUMBERS,
        "cross-entropy",
        "loss cross-entropy: expected class labels, found float32 of shap",
    ),
    "entropy of columns": (REAL.astype("f4"), "cross-entropy:smoothing=0.1", "expected class labels, found float32"),
    "bce of classes": (
        LABELS,
        "bce",
        r"loss bce: expected a 0 or 1 per label, found int64 of shape .*class numbers; take",
    ),
    "bce of numbers": (NUMBERS[:, None], "bce", r"loss bce: .*found targets from -[\d.]+ to [\d.]+; take mse or huber"),
    "mse of classes": (LABELS, "mse", "loss mse: expected floating targets, found int64 of shape .*take cross-entropy"),
    "huber of classes": (LABELS, "huber:delta=2", "loss huber: expected floating targets, found int64"),
    "mse of labels": (SEVERAL.astype(int), "mse", r'loss mse: expected floating.*write y.astype\("float32"\)'),
    "mse, an object": (LABELS, nn.MSELoss(), "loss mse: expected floating targets"),
    "a vector": (NUMBERS, lambda o, t: (o - t) ** 2, r"loss .*: expected one number as a tensor.*found shape \(8,\)"),
    "a vector of torch": (NUMBERS, nn.MSELoss(reduction="none"), r"expected one number.*shape \(8,\); add .mean\(\)"),
    "a float": (NUMBERS, lambda o, t: 0.5, "expected one number as a tensor, .*found a float; compute it by torch"),
    "not finite": (
        NUMBERS,
        lambda o, t: (o - t).mean().log() * 0 / 0 * torch.nan,
        "expected a finite number.*found nan",
    ),
    "one argument": (
        NUMBERS,
        lambda o: o.mean(),
        r"expected a function of two arguments, loss\(model\(x\), y\), found",
    ),
    "three arguments": (
        NUMBERS,
        lambda a, b, c: a.mean(),
        r"expected a function of two arguments, .*found \(a, b, c\)",
    ),
    "it raises": (
        NUMBERS,
        lambda o, t: o.nonsense,
        r"expected loss\(model\(x\), y\) of outputs of shape \(batch\) and flo",
    ),
    "unknown": (NUMBERS, "hubber", "unknown loss 'hubber'; did you mean 'huber'"),
    "its parameter": (NUMBERS, "huber:detla=1", "loss huber: expected delta=NUMBER once, got 'huber:detla=1'"),
    "twice": (NUMBERS, "huber:delta=1,delta=2", "loss huber: expected delta=NUMBER once"),
    "no parameters": (NUMBERS, "mse:delta=1", "loss mse: expected no parameters, got 'mse:delta=1'"),
    "negative": (NUMBERS, "huber:delta=-1", r"loss huber: delta must be in \(0, inf\), got -1.0; it is"),
    "not a number": (NUMBERS, "huber:delta=nan", r"loss huber: delta must be in \(0, inf\), got nan"),
    "text": (NUMBERS, "huber:delta=x", "loss huber: delta must be a number"),
    "nothing": (NUMBERS, "huber:delta", "loss huber: delta must be a number, got ''"),
    "all smooth": (LABELS, "cross-entropy:smoothing=1", r"loss cross-entropy: smoothing must be in \[0, 1\), got 1.0"),
    "no file": (NUMBERS, "none.py:f", "there is no file .*none.py; expected path/to/file.py:loss"),
    "no name": (NUMBERS, "none.py", "loss none.py: expected path/to/file.py:loss; which function of none.py is it"),
}


@pytest.mark.parametrize("kind", MISFITS)
def test_a_loss_that_does_not_fit_is_refused_in_one_line(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    y, loss, message = MISFITS[kind]
    with pytest.raises(UserError, match=message) as told:
        simulate("fedavg", "linear", four(y), **PLAN, loss=loss)
    assert "\n" not in str(told.value)
    if isinstance(loss, str):
        assert on_the_command_line(tmp_path, y, "--loss", loss) == 2
        err = capsys.readouterr().err
        assert re.search(message, err)
        assert err.count("\n") == 1
        assert not (tmp_path / "run").exists()


def test_outputs_must_fit_the_loss() -> None:
    for name, y in (("mse", NUMBERS), ("huber", NUMBERS), ("bce", (NUMBERS > 0).astype("f4"))):
        with pytest.raises(UserError, match=r"outputs of shape \(batch\).*found \(batch, 1\); write y\[:, None\]"):
            simulate("fedavg", nn.Linear(4, 1), four(y), **PLAN, loss=name)
    with pytest.raises(UserError, match="model: expected 4 outputs, one per class, found 3"):
        simulate("fedavg", nn.Linear(4, 3), four(LABELS), **PLAN, loss="cross-entropy")


def test_a_sum_is_warned_of() -> None:
    with pytest.warns(UserWarning, match="loss mse: expected the mean over a batch, found a sum"):
        simulate("fedavg", "linear", four(NUMBERS), **PLAN, loss=nn.MSELoss(reduction="sum"))


def test_a_model_does_not_notice_that_the_loss_is_tried() -> None:
    class Counting(nn.Linear):
        calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return super().forward(x)

    assert simulate("fedavg", Counting(4, 3), four(SEVERAL), **PLAN, loss="bce").work.flat.model.calls == 0


def test_a_rule_about_accuracy_needs_classes_or_labels() -> None:
    simulate("fedavg", "linear", four(SEVERAL), **PLAN, loss="bce", stop_at="accuracy=0.9")
    with pytest.raises(UserError, match="accuracy expects data with classes, found numbers to predict"):
        simulate("fedavg", "linear", four(NUMBERS), **PLAN, loss="huber", stop_at="accuracy=0.9")


def test_a_teacher_of_classes_is_refused_for_labels() -> None:
    with pytest.raises(UserError, match=r"grad\(x, teacher=...\) compares class probabilities"):
        next(iter(simulate("fedgmt", "linear", four(SEVERAL), **PLAN, loss="bce")))


class Answers(nn.Module):
    """A linear model of two inputs whose outputs are changed by a function."""

    def __init__(self, outputs: int, change) -> None:
        super().__init__()
        self.layer, self.change = nn.Linear(2, outputs), change

    def forward(self, x):
        return self.change(self.layer(x))


@pytest.mark.parametrize(
    ("outputs", "change", "why"),
    [
        (2, lambda y: y, "expected 3 outputs, one per class, found 2; widen its last layer"),
        (1, lambda y: y[:, 0], r"expected outputs of shape \(batch, 3\), one per class, found \(batch\)"),
        (3, lambda y: (y, y), "expected outputs as one tensor, found a tuple; return the scores alone"),
    ],
)
@pytest.mark.parametrize("engine", ["loop", "block"])
def test_outputs_that_do_not_fit_the_classes_are_refused_before_round_1(outputs, change, why, engine):
    """With the default loss, too: torch's own error would come from the middle of a client's first step."""
    with pytest.raises(UserError, match=why):
        simulate(FedAvg(), Answers(outputs, change), three(), rounds=1, active=2, batch_size=3, engine=engine)


def three(**options) -> Federated:
    return Federated.from_arrays(np.eye(6, 2, dtype="float32"), np.arange(6) % 3, [[0, 1, 2], [3, 4, 5]], **options)


def test_classes_that_never_occur_need_no_output():
    """A file may name all classes of which only some were kept."""
    for data in (three(classes=10), three(class_names=tuple("abcdefgh"))):
        run = simulate(FedAvg(), nn.Linear(2, 3), data, rounds=1, active=2, batch_size=3)
        assert run.step().round == 1
    with pytest.raises(UserError, match="expected 3 outputs, one per class, found 2"):
        simulate(FedAvg(), nn.Linear(2, 2), three(classes=10), rounds=1)


class Features(nn.Linear):
    """Returns its inputs, too, where it is not trained."""

    def forward(self, x):
        return super().forward(x) if self.training else (super().forward(x), x)


def test_outputs_of_evaluation_are_asked_only_of_models_that_are_scored():
    plan = {"rounds": 1, "active": 2, "batch_size": 3}
    assert simulate(FedAvg(), Features(2, 3), three(), **plan).step().round == 1
    test = np.eye(3, 2, dtype="float32"), np.arange(3)
    with pytest.raises(UserError, match="expected outputs as one tensor, found a tuple"):
        simulate(FedAvg(), Features(2, 3), three(test=test), **plan)


def test_a_run_that_is_continued_is_not_tried_again(tmp_path, monkeypatch):
    """One that an earlier version began goes on, or shows what it has."""
    plan = {"active": 2, "batch_size": 3, "out": tmp_path / "run", "resume": True}
    model = nn.Linear(2, 3)
    list(simulate(FedAvg(), model, three(), rounds=1, **plan))
    monkeypatch.setattr("fedspeed.server.simulation.require_outputs", lambda *_: pytest.fail("tried"))
    assert [r.round for r in simulate(FedAvg(), model, three(), rounds=2, **plan)][-1] == 2
