"""A test part per client: who gets which rows, beside a validation set, from the data's own ids, and bad input."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

from fedspeed import load_data
from fedspeed.cli import main
from fedspeed.config.config import Config
from fedspeed.data import describe, federate, from_arrays
from fedspeed.data.federated import Federated
from fedspeed.errors import UserError


def parts_of(data):
    """The test rows of every client."""
    rows, offsets, _ = data.client_test
    return [rows[a:b].tolist() for a, b in pairwise(offsets)]


def digits(**more):
    return load_data("digits", **{"split": "dirichlet-class:0.3", "clients": 25, **more})


@pytest.mark.parametrize("share", [0.2, 0.5, 0.01])
def test_training_and_test_rows_are_disjoint_and_together_everything(share):
    whole, data = digits(), digits(client_test=share)
    for i, tested in enumerate(parts_of(data)):
        n, own = len(whole.rows(i)), data.rows(i).tolist()
        assert len(tested) == min(math.floor(share * n + 0.5), n - 1)
        assert sorted(own + tested) == whole.rows(i).tolist()
    used = sorted([*data.indices.tolist(), *data.client_test.indices.tolist()])
    assert used == list(range(len(whole.x)))
    assert describe(data).unused == 0


def test_the_seed_decides_and_the_split_is_another():
    data, again, other = (digits(split="iid", client_test=0.2), digits(split="iid").with_client_test("0.2"),
                          digits(split="iid").with_client_test(0.2, seed=1))  # fmt: skip
    assert parts_of(data) == parts_of(again) != parts_of(other)
    prints = [each.split_fingerprint for each in (digits(split="iid"), data, again, other)]
    assert prints[1] == prints[2]
    assert len(set(prints)) == 3
    assert data.fingerprint == other.fingerprint


def test_a_part_has_the_clients_own_labels():
    """Each client of two classes: 10,000 draws of a tenth hold both as the client does, up to chance."""
    y = np.tile([0] * 90 + [1] * 10, 1000)
    data = Federated.from_arrays(np.zeros((len(y), 1)), y, np.arange(len(y)) // 100).with_client_test(0.1)
    drawn = y[data.client_test.indices]
    assert len(drawn) == 10_000
    assert abs(drawn.mean() - 0.1) < 5 * math.sqrt(0.1 * 0.9 / 10_000)
    assert np.std([y[rows].sum() for rows in parts_of(data)]) > 0.5  # drawn at random, not class by class


@pytest.mark.parametrize("validation", ["0.25", "clients:5"])
def test_beside_a_validation_set(validation):
    plain, data = digits(client_test=0.2), digits(client_test=0.2, validation=validation)
    train, tested, valid = (set(a.tolist()) for a in (data.indices, data.client_test.indices, data.validation))
    assert len(train) + len(tested) + len(valid) == len(train | tested | valid)
    assert train | tested | valid == set(range(len(data.x)))
    assert tested <= set(plain.client_test.indices.tolist())  # the same test rows, whatever is used for validation
    assert data.client_test.offsets.shape == data.offsets.shape
    if validation == "0.25":
        assert parts_of(data) == parts_of(plain)
    else:
        assert data.clients == 20
        kept = [pair for pair in zip(parts_of(plain), plain.sizes, strict=True) if pair[0] in parts_of(data)]
        assert [n for _, n in kept] == data.sizes.tolist()


@pytest.mark.parametrize("more", [{}, {"validation": "clients:3"}, {"validation": 0.2}])
def test_samples_with_several_owners_are_trained_on_by_none(more):
    data = load_data("digits", split="dirichlet-refill:0.1", clients=20, client_test=0.3, **more)
    assert len(data.indices) > len(np.unique(data.indices))  # the split repeats samples
    tested = set(data.client_test.indices.tolist())
    assert not tested & set(data.indices.tolist())
    assert not tested & set([] if data.validation is None else data.validation.tolist())


def test_small_clients_have_no_part():
    x, y = np.zeros((12, 1)), np.arange(12) % 2
    data = Federated.from_arrays(x, y, [[0], [1, 2], range(3, 12)]).with_client_test(0.2)
    assert [len(rows) for rows in parts_of(data)] == [0, 0, 2]
    assert data.sizes.tolist() == [1, 2, 7]
    with pytest.raises(UserError, match=r"client_test 0.2: expected a client with enough samples .* at most 1 each"):
        Federated.from_arrays(x, y, [[i] for i in range(12)]).with_client_test(0.2)


def test_batches():
    data = digits(client_test=0.2)
    rows = data.client_test.indices[3:7]
    x, y = data.scored_batch(3, 7)
    assert torch.equal(x, data.x[rows])
    assert torch.equal(y, data.y[rows])
    plain = digits()
    assert torch.equal(plain.scored_batch(3, 7)[1], plain.y[plain.indices[3:7]])


# --- the data's own parts ---

IDS, TEST_IDS = list("bbaaccc"), list("cbzb")  # client a has no test row, z does not train
X, X_TEST = np.arange(7.0)[:, None], 10 + np.arange(4.0)[:, None]


def natural(**more):
    return from_arrays(X, np.arange(7) % 2, X_TEST, np.arange(4) % 2, clients=IDS, test_clients=TEST_IDS, **more)


def test_ids_of_test_rows():
    data = federate(natural(), split="natural", client_test="own")
    assert [data.x[rows, 0].tolist() for rows in map(data.rows, range(3))] == [[2, 3], [0, 1], [4, 5, 6]]
    assert parts_of(data) == [[], [1, 3], [0]]
    x, y = data.scored_batch(0, 3)
    assert x[:, 0].tolist() == [11, 13, 10]
    assert y.tolist() == [1, 1, 0]
    assert federate(natural(), split="natural").client_test is None  # only if asked for
    assert len(data.x_test) == 4  # and the common test set is still all of it
    both = federate(natural(), split="natural", client_test="own", validation="clients:1")
    kept = [i for i in range(3) if i not in {"abc".index(IDS[row]) for row in both.validation}]
    assert parts_of(both) == [parts_of(data)[i] for i in kept]


def test_the_first_test_rows_keep_their_ids():
    assert natural().first(None, 2).owner_test.tolist() == [TEST_IDS[0], TEST_IDS[1]]


def test_rows_that_were_held_out_keep_their_ids():
    ids = np.repeat(np.arange(5), 20)
    samples = from_arrays(ids[:, None].astype("f4"), np.arange(100) % 2, clients=ids)
    data = federate(samples, split="natural", client_test="own")
    assert sum(map(len, parts_of(data))) == 20
    for i, rows in enumerate(parts_of(data)):
        assert (data.x_test[rows] == i).all()


def test_a_file_with_ids(tmp_path):
    np.savez(tmp_path / "d.npz", x=X, y=np.arange(7) % 2, x_test=X_TEST, y_test=np.arange(4) % 2, client=IDS,
             client_test=TEST_IDS)  # fmt: skip
    data = load_data("arrays", data_dir=tmp_path / "d.npz", split="natural", client_test="own")
    assert parts_of(data) == [[], [1, 3], [0]]


def test_lists_of_ones_own():
    y, held = np.arange(7) % 2, (X_TEST, np.arange(4) % 2)
    for clients, given in (([[0, 1], range(2, 7)], [[3], []]), (list("aabbbbb"), list("ccca"))):
        data = Federated.from_arrays(X, y, clients, held, client_test=given)
        assert parts_of(data) == [[3], []]
        assert data.with_client_test("own") is data
    for given, says in (([[0]], "2 clients, found 1 lists"), ([[], []], "no row"), ([[4], []], "0..3"),
                        (list("aaaa"), "found ids")):  # fmt: skip
        with pytest.raises(UserError, match=says):
            Federated.from_arrays(X, y, [[0, 1], range(2, 7)], held, client_test=given)
    with pytest.raises(UserError, match="expected a test set"):
        Federated.from_arrays(X, y, [[0, 1], range(2, 7)], client_test=[[0], [1]])


@pytest.mark.parametrize("split", ["iid", "natural"])
def test_own_without_any(split):
    with pytest.raises(UserError, match=r"client_test own: expected data with a test part .* take a share"):
        federate(from_arrays(X, np.arange(7) % 2, X_TEST, np.arange(4) % 2, clients=IDS), split=split, clients=None
                 if split == "natural" else 2, client_test="own")  # fmt: skip
    with pytest.raises(UserError, match="test set: expected one client id per row"):
        from_arrays(X, np.arange(7) % 2, X_TEST, np.arange(4) % 2, clients=IDS, test_clients=["a"])


def test_ids_of_two_kinds():
    samples = from_arrays(X, np.arange(7) % 2, X_TEST, np.arange(4) % 2, clients=IDS, test_clients=[1, 2, 3, 4])
    with pytest.raises(UserError, match="client ids: expected all numbers or all text, found both"):
        federate(samples, split="natural", client_test="own")
    numbers = from_arrays(
        X, np.arange(7) % 2, X_TEST, np.arange(4) % 2, clients=np.arange(7.0), test_clients=[0, 1, 9, 1]
    )
    assert parts_of(federate(numbers, split="natural", client_test="own"))[:3] == [[0], [1, 3], []]


def test_a_test_set_that_was_taken_away():
    data = replace(federate(natural(), split="natural", client_test="own"), x_test=None, y_test=None)
    with pytest.raises(UserError, match="expected the test set of its rows, found none"):
        data.scored_batch(0, 1)


def test_nothing_left_to_train_on():
    """Two clients that own the same two samples: each takes one off, perhaps not the same."""
    says = "client_test 0.5: clients would be left without a sample; take a smaller share, or another split"
    refused = 0
    for seed in range(20):
        data = Federated.from_arrays(np.zeros((2, 1)), [0, 1], [[0, 1], [0, 1]])
        try:
            data.with_client_test(0.5, seed)
        except UserError as error:
            refused += says in str(error)
    assert 0 < refused < 20


def test_only_once():
    data = federate(natural(), split="natural", client_test="own")
    for twice in (data, digits(client_test=0.2)):
        with pytest.raises(UserError, match="expected data without test parts, found one per client"):
            twice.with_client_test(0.2)


# --- settings ---

BAD = ("0", "1", "1.5", "-0.2", "nan", "inf", "some", "clients:0.2", "True")


@pytest.mark.parametrize("given", BAD)
def test_bad_shares_in_one_line(given, capsys, tmp_path):
    for build in (lambda: Config(client_test=given), lambda: digits(client_test=given)):
        with pytest.raises(UserError, match=r"^client_test: expected a share between 0 and 1") as caught:
            build()
        assert "\n" not in str(caught.value)
    assert main(["run", "--client-test", given, "--rounds", "1", "--out", str(tmp_path / "run")]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("given", [0, 1, 1.5, math.nan, True])
def test_bad_numbers(given):
    with pytest.raises(UserError, match="client_test: expected a share"):
        Config.from_dict({"client_test": given})


def test_the_config():
    config = Config.from_dict({"client_test": 0.2})
    assert config.client_test == "0.2"
    assert Config.from_dict(config.to_dict()) == config
    assert "client_test" not in Config().to_dict()
    with pytest.raises(UserError, match="client_test is the same in all rounds"):
        Config.from_dict({"rounds": 9, "until": {"3": {"client_test": "0.2"}}})


def test_the_command_line(capsys):
    show = ["data", "show", "digits", "--clients", "9", "--split", "iid", "--no-figures", "--client-test", "0.25"]
    assert main(show) == 0
    assert "client tests  360 samples, of 9 clients; 0 have no test part" in capsys.readouterr().out
    assert main([*show, "--set", "client_test=0.2"]) == 2
