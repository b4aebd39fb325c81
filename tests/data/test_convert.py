"""One meaning for arrays: both functions named `from_arrays` convert alike, and refuse the same things by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fedspeed import FedAvg, build_model, simulate
from fedspeed.cli import main
from fedspeed.config.config import Config, Spec
from fedspeed.data import Federated, Samples, federate, from_arrays, from_torch, load
from fedspeed.errors import UserError
from fedspeed.runs.launch import prepare

N = 12
X = np.random.default_rng(0).normal(size=(N, 3))
Y = np.arange(N) % 3
ROWS = [range(6), range(6, N)]


def at(where: tuple[int, ...], value: float, a: np.ndarray = X) -> np.ndarray:
    """A copy with one number changed."""
    changed = a.copy()
    changed[where] = value
    return changed


def both(x: Any, y: Any, **more: Any) -> tuple[Federated, Samples]:
    return Federated.from_arrays(x, y, ROWS, **more), from_arrays(x, y, holdout=0, **more)


@pytest.mark.parametrize(
    ("x", "expected"),
    [
        (X, X),
        (X.astype(np.float32), X.astype(np.float32)),
        (X.astype(">f8"), X),
        (X[::-1], X[::-1].copy()),
        (X.T.copy().T, X),
        (X.tolist(), X),
        (torch.from_numpy(X).requires_grad_(), X),
        (torch.full((N, 2), 0.5, dtype=torch.bfloat16), np.full((N, 2), 0.5, np.float32)),
        (X > 0, (X > 0).astype(np.float32)),
        ((9 * X).astype(np.int16), (9 * X).astype(np.int16).astype(np.int64)),
        (np.arange(N, dtype=">u4"), np.arange(N)),
        (torch.arange(2 * N, dtype=torch.int32).view(N, 2), np.arange(2 * N).reshape(N, 2)),
        (np.full((N, 5), 7, np.uint8), np.full((N, 5), 7, np.uint8)),
        (np.full((N, 4, 5), 7, np.uint8), np.full((N, 1, 4, 5), 7, np.uint8)),
        (
            np.arange(N * 4 * 5 * 3, dtype=np.uint8).reshape(N, 4, 5, 3),
            np.arange(N * 4 * 5 * 3, dtype=np.uint8).reshape(N, 4, 5, 3).transpose(0, 3, 1, 2),
        ),
    ],
)
def test_inputs_become_what_is_documented(x: Any, expected: np.ndarray) -> None:
    for data in both(x, Y):
        found = np.asarray(data.x)
        assert found.dtype == expected.dtype
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    ("y", "expected", "classes"),
    [
        (Y.astype(">i4"), Y, 3),
        (Y[::-1], Y[::-1].copy(), 3),
        (Y.tolist(), Y, 3),
        (Y > 0, (Y > 0).astype(np.int64), 2),
        (X[:, 0], X[:, 0], None),
        (np.stack([Y, Y], 1), np.stack([Y, Y], 1), None),
    ],
)
def test_targets_become_what_is_documented(y: Any, expected: np.ndarray, classes: int | None) -> None:
    for data in both(X, y):
        assert data.classes == classes
        assert np.asarray(data.y).dtype == expected.dtype
        np.testing.assert_array_equal(np.asarray(data.y), expected)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"x": at((4, 1), np.nan)}, r"inputs must be finite; row 4 is not \(1 in all\)"),
    ({"x": at((4, 1), -np.inf)}, "inputs must be finite; row 4"),
    ({"y": at((5,), np.inf, X[:, 0])}, "targets must be finite; row 5"),
    ({"x": X[:0], "y": Y[:0]}, "expected at least one sample"),
    ({"x": X[:5]}, "5 inputs but 12 targets"),
    ({"x": 3}, r"expected numeric inputs, one row per sample, found int64 of shape \(\)"),
    ({"x": X.astype(str)}, "expected numeric inputs"),
    ({"x": X.astype(complex)}, "expected numeric inputs"),
    ({"x": [[1.0], [2.0, 3.0]]}, "inputs cannot be read as an array"),
    ({"x": np.full((N, 1), 2**63, np.uint64)}, "must fit into 64 bits with a sign, found 9223372036854775808"),
    ({"y": np.array(list("abc") * 4)}, "number your classes from 0"),
    ({"y": Y[:, None]}, r"write y\[:, 0\] for classes"),
    ({"y": Y - 1}, "class labels must be 0, 1, 2, ..., found -1 in row 0"),
    ({"y": at((7,), 10**7, Y)}, r"found 10000000 with 12 samples; .* set classes=10000001"),
    ({"classes": 2}, r"labels must lie in 0\.\.1, found 2 in row 2 of the training set \(4 in all\)"),
    ({"classes": 2.5}, "classes must be a whole number >= 1, found 2.5"),
    ({"test": (X, Y[:5])}, "test set: 12 inputs but 5 targets"),
    ({"test": (X[:, :2], Y)}, "expected inputs of one kind"),
    ({"test": ((9 * X).astype(int), Y)}, "found float64 .* for training and int64 .* for testing"),
    ({"test": (X, X[:, 0])}, "expected targets of one kind"),
    ({"test": (at((2, 2), np.nan), Y)}, "test set: inputs must be finite; row 2"),
    ({"test": (X, Y + 1), "classes": 3}, "found 3 in row 2 of the test set"),
    ({"test": (X, None)}, "both inputs and targets"),
    ({"test": 0.2}, "both inputs and targets"),
]


@pytest.mark.parametrize(("changed", "message"), REFUSED)
def test_both_refuse_the_same_with_the_same_words(changed: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"x": X, "y": Y, **changed}
    with pytest.raises(UserError, match=message):
        Federated.from_arrays(clients=ROWS, **given)
    with pytest.raises(UserError, match=message):
        from_arrays(**given)


def test_many_classes_are_fine_where_they_are_meant() -> None:
    large = at((7,), 10**7, Y)
    assert [data.classes for data in both(X, large, classes=10**7 + 1)] == [10**7 + 1] * 2
    words = np.arange(2000)  # as many classes as samples
    assert from_arrays(np.zeros((2000, 1)), words, holdout=0).classes == 2000
    assert [data.classes for data in both(X, at((7,), 999, Y))] == [1000] * 2


IDS = ["b", "a", "a", "c"] * 3
BY_ID = [[1, 2, 5, 6, 9, 10], [0, 4, 8], [3, 7, 11]]
MASKS = [np.isin(np.arange(N), rows) for rows in BY_ID]


@pytest.mark.parametrize(
    "clients",
    [
        IDS,
        np.array(IDS),
        np.array(IDS, dtype=object),
        np.array([ord(c) for c in IDS], dtype=">i4"),
        np.array([float(ord(c)) for c in IDS]),
        torch.tensor([ord(c) for c in IDS]),
        [ord(c) for c in IDS],
        list(torch.tensor([ord(c) for c in IDS])),
        BY_ID,
        [np.array(rows, np.int32) for rows in BY_ID],
        [torch.tensor(rows) for rows in BY_ID],
        (np.array(rows) for rows in BY_ID),
        MASKS,
        np.array(MASKS),
        [mask.tolist() for mask in MASKS],
        torch.tensor(np.array(MASKS)),
    ],
)
def test_clients_in_every_form_are_the_same_split(clients: Any) -> None:
    data = Federated.from_arrays(X, Y, clients)
    assert [data.rows(i).tolist() for i in range(data.clients)] == BY_ID


@pytest.mark.parametrize(
    ("clients", "message"),
    [
        ([[0.5, 1.7], [2, 3]], "client 0: expected whole row numbers or a mask of 12 booleans, found float64"),
        ([[0, 1], [2.0, 3.0]], "client 1: expected whole row numbers"),
        ([[0, 1], MASKS[0][:5]], r"client 1: expected whole row numbers or a mask .* found bool of shape \(5,\)"),
        (MASKS[0], "client ids must be all numbers or all text, none missing, found bool; give a list of masks"),
        ([True] * N, "give a list of masks"),
        ([["a"], ["b"]], "client 0: expected whole row numbers"),
        ([[[0, 1]], [[2, 3]]], r"of shape \(1, 2\)"),
        ([{0, 1}, {2}], "client 0: expected whole row numbers"),
        ([[0, 1], [N]], r"client indices must lie in 0\.\.11, found 0\.\.12"),
        ([[-1], [2]], r"client indices must lie in 0\.\.11, found -1\.\.2"),
        ([0, 1, 2], r"expected one client id per row \(12\), found shape \(3,\)"),
        (np.array(["a", None] * 6, dtype=object), "none missing"),
        (np.array([0.0, np.nan] * 6), "none missing"),
        ({"a": [0]}, "found dict"),
        ("ab", "found str"),
        (3, "found int"),
        (None, "found NoneType"),
        ([], "every client needs at least one sample"),
        ([[0, 1], []], r"clients \[1\] have none"),
    ],
)
def test_bad_clients_are_named(clients: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        Federated.from_arrays(X, Y, clients)


def test_client_ids_have_one_name_and_the_old_one_still_works() -> None:
    for named in ({"clients": IDS}, {"owner": IDS}, {"clients": torch.tensor([ord(c) for c in IDS])}):
        data = federate(from_arrays(X, Y, holdout=0, **named), split="natural")
        assert [data.rows(i).tolist() for i in range(data.clients)] == BY_ID
    with pytest.raises(UserError, match="leave owner out"):
        from_arrays(X, Y, clients=IDS, owner=IDS)
    with pytest.raises(UserError, match="one client id per row"):
        from_arrays(X, Y, clients=BY_ID[0])


def test_the_holdout_is_the_same_rows_in_both() -> None:
    x, y = np.arange(100.0)[:, None], np.repeat(np.arange(5), 20)
    samples = from_arrays(x, y, holdout=0.2)
    given = [np.arange(0, 100, 2), np.arange(1, 100, 2)]
    data = Federated.from_arrays(x, y, given, holdout=0.2)
    assert data.x_test is not None
    held = data.x_test.numpy()
    np.testing.assert_array_equal(held, samples.x_test)
    assert np.bincount(y[held.astype(int).ravel()]).tolist() == [4] * 5
    for i, rows in enumerate(given):  # the numbers are still the user's
        assert data.rows(i).tolist() == [r for r in rows if r not in held]
    assert Federated.from_arrays(x, y, given).x_test is None, "none by default: the lists are the user's"
    with pytest.raises(UserError, match=r"have none after holdout = 0\.5"):
        Federated.from_arrays(x, y, [[i] for i in range(100)], holdout=0.5)
    for wrong in ([[0, 1], [100]], [[-1], [3]]):
        with pytest.raises(UserError, match=r"client indices must lie in 0\.\.99"):
            Federated.from_arrays(x, y, wrong, holdout=0.2)
    with pytest.raises(UserError, match="between 0 and 1"):
        Federated.from_arrays(x, y, given, holdout=1.5)


def test_a_test_set_in_either_form() -> None:
    for samples in (from_arrays(X, Y, X[:2], Y[:2]), from_arrays(X, Y, test=(X[:2], Y[:2]))):
        np.testing.assert_array_equal(samples.x_test, X[:2])
        assert len(samples.x) == N
    assert from_arrays(X, Y, X[:0], Y[:0], holdout=0).x_test is None
    with pytest.raises(UserError, match="expected one test set"):
        from_arrays(X, Y, X, Y, test=(X, Y))


def tokens(folder: Path, how: str) -> Federated:
    x = np.random.default_rng(0).integers(0, 50, (300, 6)).astype(np.int32)
    y = x[:, 0] % 2
    if how == "file":
        np.savez(folder / "tokens.npz", x=x, y=y)
        return load("arrays", data_dir=folder / "tokens.npz", split="dirichlet:0.5", clients=6)
    pairs = torch.utils.data.TensorDataset(torch.from_numpy(x), torch.from_numpy(y))
    samples = from_torch(pairs) if how == "torch" else from_arrays(x, y)
    return federate(samples, split="dirichlet:0.5", clients=6)


@pytest.mark.parametrize("how", ["arrays", "torch", "file"])
def test_token_ids_reach_an_embedding_whatever_the_way_in(how: str, tmp_path: Path) -> None:
    data = tokens(tmp_path, how)
    assert data.x.dtype == torch.int64
    net = nn.Sequential(nn.Embedding(50, 4), nn.Flatten(), nn.Linear(24, 2))
    records = list(simulate(FedAvg(), net, data, rounds=2, batch_size=10))
    assert records[-1].test_accuracy is not None
    assert records[-1].train_loss < records[0].train_loss


def test_named_models_take_whole_numbers_as_floats_when_told(tmp_path: Path) -> None:
    data = tokens(tmp_path, "file")
    with pytest.raises(UserError, match=r"model mlp: .* found torch\.int64; use data\.floats\(\)"):
        build_model("mlp", data)
    floats = data.floats()
    assert floats.x.dtype == torch.float32
    assert floats.x_test is not None
    assert torch.equal(floats.x, data.x.float())
    list(simulate(FedAvg(), build_model("linear", floats), floats, rounds=1))
    out = tmp_path / "run"
    options = ["--data-dir", str(tmp_path / "tokens.npz"), "--clients", "6", "--rounds", "1", "--out", str(out)]
    assert main(["run", "--data", "arrays", *options, "--quiet"]) == 0  # whole features and a named model: numbers
    assert floats.fingerprint in (out / "summary.json").read_text()


def test_whole_number_targets_without_a_loss_are_refused_in_a_file(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=X, y=np.stack([Y, Y], 1))
    given = Config(data=Spec("arrays"), data_dir=str(tmp_path / "a.npz"), split="iid", clients=2, active=2)
    with pytest.raises(UserError, match=r"label per row, or floats .* found whole numbers of shape .*name a loss"):
        prepare(given, new=True)
    with pytest.raises(UserError, match=r"needs class labels \(one whole number per row\), found int64 of shape"):
        federate(from_arrays(X, np.stack([Y, Y], 1), holdout=0), split="dirichlet:1", clients=2)
    assert federate(from_arrays(X, np.stack([Y, Y], 1), holdout=0), split="iid", clients=2).sizes.tolist() == [6, 6]
    np.savez(tmp_path / "b.npz", x=X, y=at((7,), 5000, Y))
    with pytest.raises(UserError, match=r"--set data\.classes=5001"):
        load("arrays", data_dir=tmp_path / "b.npz", split="iid", clients=2)
    assert load("arrays", data_dir=tmp_path / "b.npz", split="iid", clients=2, classes=5001).classes == 5001


def test_data_are_shown_in_one_line() -> None:
    data = Federated.from_arrays(X.astype("f4"), Y, [range(4), range(4, N)], test=(X.astype("f4"), Y), name="mine")
    assert repr(data) == (
        "<Federated mine: 2 clients, 12 samples (4 to 8 each, median 4), inputs 3 float32, 3 classes, split given, "
        "12 for testing>"
    )
    assert "for validation>" in repr(data.with_validation(0.3))
    regression = repr(Federated.from_arrays(X, X[:, 0], ROWS))
    assert "regression" in regression
    assert "no test set" in regression
    pictures = from_arrays(np.zeros((10, 8, 9), np.uint8), np.arange(10) % 2, clients=list("aabbccddee"))
    assert repr(pictures) == (
        "<Samples arrays: 8 samples, 2 for testing, inputs 1 x 8 x 9 uint8, 2 classes, "
        f"{len(np.unique(np.asarray(pictures.owner)))} client ids>"
    )
