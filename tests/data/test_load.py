"""`load`, its options, the small data sets, and `Federated`."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch

from fedspeed.data import DATASETS, Federated, Samples, describe, federate, load
from fedspeed.errors import UserError
from fedspeed.utils.random import rng


def test_listing_names_does_not_import_torch() -> None:
    code = (
        "import sys, fedspeed.data as d; import fedspeed.cli.data; list(d.DATASETS); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert {"cifar10", "cifar100", "tinyimagenet", "mnist", "fashion-mnist", "digits", "synthetic"} <= set(DATASETS)


def test_digits() -> None:
    data = load("digits", split="iid", clients=10)
    assert data.shape == (1, 8, 8)
    assert (len(data.x), data.classes) == (1437, 10)
    assert data.x_test is not None
    assert len(data.x_test) == 360
    assert (float(data.x.min()), float(data.x.max())) == (0.0, 1.0)
    assert data.x.dtype == torch.float32
    x, y = data.batch(data.rows(0)[:5], rng(0, "b"))
    assert torch.equal(x, data.x[data.rows(0)[:5]])
    assert y.dtype == torch.int64
    assert torch.equal(data.test_batch(3, 5)[0], data.x_test[3:5])


def test_digits_are_those_of_scikit_learn() -> None:
    source = pytest.importorskip("sklearn.datasets").load_digits()
    data = load("digits", split="iid", clients=1)
    assert data.x_test is not None
    assert np.array_equal(16 * torch.cat([data.x, data.x_test])[:, 0].numpy(), source.images)
    assert np.array_equal(data.y.numpy(), source.target[:1437])


def test_synthetic_is_a_function_of_seed_and_client() -> None:
    few = load("synthetic", alpha=1, beta=1, split="natural", clients=3)
    many = load("synthetic", alpha=1, beta=1, split="natural", clients=6)
    assert (few.clients, few.shape, few.classes) == (3, (60,), 10)
    for i in range(3):
        assert torch.equal(few.x[few.rows(i)], many.x[many.rows(i)])
    other = load("synthetic", alpha=1, beta=1, split="natural", clients=3, seed=1)
    assert other.fingerprint != few.fingerprint
    assert min(few.sizes) >= 45


def test_synthetic_follows_its_definition() -> None:
    """Variance j^-1.2 of feature j within a client; client means spread by sqrt(1 + beta^2) around 0."""
    data = load("synthetic", alpha=0, beta=2, size=400, split="natural", clients=60)
    assert set(data.sizes.tolist()) == {400}
    x = data.x.view(60, 400, 60).double()
    within = x.var(1).mean(0)
    assert torch.allclose(within, torch.arange(1, 61).double() ** -1.2, rtol=0.1)
    centres = x.mean(1)
    assert float(centres.mean(1).std()) == pytest.approx(np.sqrt(4 + 1 / 60), rel=0.25)
    labels = data.y.view(60, 400)
    assert len(labels.unique()) == 10


def test_train_size_takes_the_first_of_every_class() -> None:
    data = load("digits", split="iid", clients=10, train_size=100, test_size=20)
    whole = load("digits", split="iid", clients=10)
    assert torch.bincount(data.y).tolist() == [10] * 10
    first = [i for c in range(10) for i in np.flatnonzero(whole.y.numpy() == c)[:10]]
    assert torch.equal(data.x, whole.x[np.sort(first)])
    assert data.y_test is not None
    assert torch.bincount(data.y_test).tolist() == [2] * 10


def test_shrink_averages_blocks() -> None:
    x = np.arange(2 * 3 * 8 * 8, dtype=np.uint8).reshape(2, 3, 8, 8)
    small = Samples("s", x, np.zeros(2, np.int64)).shrink(4).x
    assert small.dtype == np.uint8
    assert small.shape == (2, 3, 2, 2)
    assert small[0, 0, 0, 0] == round(x[0, 0, :4, :4].astype(float).mean())
    assert load("digits", split="iid", clients=3, shrink=2).shape == (1, 4, 4)


def test_a_split_has_a_fingerprint() -> None:
    a, b, c = (load("digits", split="dirichlet:0.6", clients=10, seed=s) for s in (0, 0, 1))
    assert a.split_fingerprint == b.split_fingerprint != c.split_fingerprint
    assert a.fingerprint == c.fingerprint
    assert a.split == "dirichlet:0.6"


def test_describe_counts() -> None:
    x, y = np.zeros((6, 2), np.float32), np.array([0, 0, 1, 1, 2, 2])
    s = describe(Federated.from_arrays(x, y, [[0, 1, 2], [2, 3]]))
    assert s.counts.tolist() == [[2, 1, 0], [0, 2, 0]]
    assert (s.half.tolist(), s.repeats, s.unused, s.samples) == ([1, 1], 1, 2, 6)
    regression = describe(Federated.from_arrays(x, y.astype(np.float32), [[0, 1, 2], [3, 4, 5]]))
    assert regression.counts.tolist() == [[3], [3]]


def test_to_moves_and_casts_floats_only() -> None:
    data = load("digits", split="iid", clients=3).to("cpu", torch.float64)
    assert (data.x.dtype, data.y.dtype, data.pipeline.dtype) == (torch.float64, torch.int64, torch.float64)


BAD: list[tuple[dict[str, Any], str]] = [
    ({"name": "digit"}, "did you mean 'digits'"),
    ({"name": "digits", "alpha": 1.0}, "takes no options, found 'alpha'"),
    ({"name": "synthetic", "alhpa": 1.0}, "did you mean 'alpha'"),
    ({"name": "synthetic", "alpha": "much"}, "alpha must be a number, found 'much'"),
    ({"name": "synthetic", "alpha": -1.0}, "alpha must be a number >= 0"),
    ({"name": "synthetic", "alpha": float("nan")}, "alpha must be a number >= 0"),
    ({"name": "synthetic", "size": True}, "size must be a whole number, found True"),
    ({"name": "digits", "data_dir": "here"}, "takes no data_dir"),
    ({"name": "digits", "split": "natural"}, "no client ids"),
    ({"name": "digits", "clients": 2000}, "2000 clients but only 1437 samples"),
    ({"name": "digits", "clients": 0}, "expected at least 1 client, found 0"),
    ({"name": "digits", "augment": "lots"}, "unknown augmentation 'lots'"),
    ({"name": "digits", "train_size": 0}, "train_size must be a whole number in 1..1437"),
    ({"name": "digits", "test_size": 361}, "test_size must be a whole number in 1..360"),
    ({"name": "digits", "train_size": "all"}, "found 'all'"),
    ({"name": "digits", "shrink": 3}, "shrink must divide"),
    ({"name": "digits", "shrink": "much"}, "shrink must be a whole number"),
    ({"name": "synthetic", "shrink": 2}, "shrink must divide"),
    ({"name": "cifar10", "data_dir": "nowhere"}, "found nothing at nowhere"),
    ({"name": "images"}, "give the folder of pictures"),
    ({"name": "arrays"}, "give their file"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD)
def test_bad_requests_say_what_to_do(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        load(**arguments)


def test_labels_out_of_range_are_named() -> None:
    x = np.zeros((3, 2), np.float32)
    with pytest.raises(UserError, match=r"labels must lie in 0\.\.1, found 5 in row 2 of the training set"):
        Samples("mine", x, np.array([0, 1, 5]), classes=2)
    with pytest.raises(UserError, match=r"class labels must be 0, 1, 2, \.\.\., found -1 in row 2"):
        Federated.from_arrays(x, np.array([0, 1, -1]), [[0, 1, 2]], classes=2)
    with pytest.raises(UserError, match="3 training inputs but 2 training targets"):
        Samples("mine", x, np.array([0, 1]))
    with pytest.raises(UserError, match="one client id per row"):
        Samples("mine", x, np.array([0, 1, 1]), owner=np.array([0]))
    with pytest.raises(UserError, match="at least one sample"):
        Samples("mine", x[:0], np.array([]))
    with pytest.raises(UserError, match=r"clients \[1\] have none"):
        Federated.from_arrays(x, np.array([0, 1, 1]), [[0], []])
    with pytest.raises(UserError, match="no test set"):
        Federated.from_arrays(x, np.array([0, 1, 1]), [[0]]).test_batch(0, 1)


def test_natural_ids_decide_the_number_of_clients() -> None:
    samples = Samples("mine", np.zeros((4, 2), np.float32), np.array([0, 1, 0, 1]), owner=np.array([7, 7, 3, 9]))
    for left_out in ({}, {"clients": None}, {"clients": 3}):
        data = federate(samples, split="natural", **left_out)
        assert [data.rows(i).tolist() for i in range(3)] == [[2], [0, 1], [3]]


def test_where_nobody_says_there_are_100_clients() -> None:
    assert load("digits").clients == load("digits", clients=None).clients == 100
    assert load("synthetic", size=2, split="natural").clients == 100
