"""Real data: CIFAR-10 and Shakespeare through the user's cache, TinyImageNet, Debian's Fashion-MNIST."""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
from pathlib import Path

import layouts
import numpy as np
import pytest
import torch

from fedspeed.cli import main
from fedspeed.data import Federated, Samples, describe, load, read, shakespeare
from fedspeed.data.shakespeare import VOCABULARY
from fedspeed.errors import UserError

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def cifar10() -> Federated:
    try:
        return load("cifar10", split="dirichlet:0.6", clients=100)
    except UserError as error:
        pytest.skip(f"CIFAR-10 cannot be had here: {error}")


@pytest.fixture(scope="module")
def tiny() -> str:
    path = Path(os.environ.get("FEDSPEED_TINYIMAGENET") or ROOT.parent / "shared" / "data" / "tiny-imagenet-mini.zip")
    if not path.exists():
        pytest.skip("set FEDSPEED_TINYIMAGENET to tiny-imagenet-200.zip, or to a part of it")
    return str(path)


def test_cifar10_is_the_published_one(cifar10: Federated) -> None:
    assert cifar10.x_test is not None
    assert cifar10.y_test is not None
    assert (len(cifar10.x), len(cifar10.x_test), cifar10.shape) == (50_000, 10_000, (3, 32, 32))
    assert torch.bincount(cifar10.y).tolist() == [5000] * 10
    assert torch.bincount(cifar10.y_test).tolist() == [1000] * 10
    assert cifar10.y[:10].tolist() == [6, 9, 9, 4, 1, 1, 2, 7, 8, 3]
    pixels = cifar10.x.numpy().astype(np.float32) / 255
    assert pixels.mean((0, 2, 3), dtype=np.float64) == pytest.approx([0.49140, 0.48216, 0.44653], abs=1e-5)
    assert pixels.std((0, 2, 3), dtype=np.float64) == pytest.approx([0.24703, 0.24349, 0.26159], abs=1e-5)
    assert cifar10.x.dtype == torch.uint8


def test_cifar10_in_the_published_layouts_is_the_same(cifar10: Federated, tmp_path: Path) -> None:
    """The real records, written as the home page describes its files, pass the check of the published ones."""
    whole = read("cifar10")
    assert whole.x_test is not None
    x, y = np.concatenate([whole.x, whole.x_test]), np.concatenate([whole.y, np.asarray(whole.y_test)])
    for name, write in (("bin", layouts.binary), ("py", layouts.python)):
        for k, file in enumerate(layouts.TEN):
            part = slice(10_000 * k, 10_000 * (k + 1))
            made = [(label,) for label in y[part].tolist()], [picture.tobytes() for picture in x[part]]
            layouts.folder(write({file: made}), tmp_path / name)
        assert read("cifar10", data_dir=tmp_path / name).digest() == whole.digest()
    blob = bytearray((tmp_path / "bin" / "data_batch_4.bin").read_bytes())
    blob[12_345] ^= 1
    (tmp_path / "bin" / "data_batch_4.bin").write_bytes(bytes(blob))
    with pytest.raises(UserError, match="records of data_batch_4 are not the published ones"):
        read("cifar10", data_dir=tmp_path / "bin")


def test_cifar10_split_as_in_figure_3(cifar10: Federated) -> None:
    found = describe(cifar10)
    assert (found.unused, found.repeats, set(found.sizes.tolist())) == (0, 0, {500})
    assert found.half.mean() == pytest.approx(2.2, abs=0.3)
    refilled = describe(load("cifar10", split="dirichlet-refill:0.6", clients=100))
    assert 0.03 < refilled.unused / 50_000 < 0.065
    balanced = describe(load("cifar10", split="iid", clients=500))
    assert set(balanced.counts.ravel().tolist()) == {10}


def test_a_batch_costs_under_3_percent_of_a_step(cifar10: Federated) -> None:
    spec = importlib.util.spec_from_file_location("bench", ROOT / "benchmarks" / "data_pipeline.py")
    assert spec is not None
    assert spec.loader is not None
    bench = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(bench)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        assert bench.pipeline_cost(cifar10, batches=60)["share"] < 0.03
    finally:
        torch.set_num_threads(threads)


def test_tinyimagenet_pictures(tiny: str) -> None:
    samples = read("tinyimagenet", data_dir=tiny, part=True)
    assert samples.x_test is not None
    assert (samples.classes, samples.x.shape[1:], samples.x.dtype) == (200, (3, 64, 64), np.uint8)
    per_class = np.bincount(samples.y)
    assert len(set(per_class.tolist())) == 1
    assert len(per_class) == 200
    assert len(np.bincount(np.asarray(samples.y_test))) == 200
    first = samples.x[: 40 * 200] / np.float32(255)
    assert first.mean((0, 2, 3)) == pytest.approx(samples.augmentation.mean, abs=0.02)
    assert first.std((0, 2, 3)) == pytest.approx(samples.augmentation.std, abs=0.02)


def test_tinyimagenet_trains_a_few_rounds(tiny: str, tmp_path: Path) -> None:
    out = tmp_path / "run"
    options = shlex.split(
        "--method fedavg --model cnn --split iid --clients 10 --active 5 --rounds 4 --local-epochs 1 --batch-size 20 "
        "--lr 0.1 --eval-every 4 --set data.part=true --set data.shrink=2 --set data.train_size=4000 "
        "--set data.test_size=400 --quiet"
    )
    assert main(["run", "--data", "tinyimagenet", "--data-dir", tiny, "--out", str(out), *options]) == 0
    rounds = [json.loads(line) for line in (out / "rounds.jsonl").read_text().splitlines()]
    assert rounds[-1]["train_loss"] < rounds[0]["train_loss"]


def test_fashion_mnist_of_debian() -> None:
    if not Path("/usr/share/datasets/fashion-mnist").is_dir():
        pytest.skip("the Debian package dataset-fashion-mnist is not installed")
    samples = read("fashion-mnist")
    assert (samples.x.shape, np.bincount(samples.y).tolist()) == ((60_000, 1, 28, 28), [6000] * 10)


def fetched(name: str) -> Samples:
    try:
        return read(name)
    except UserError as error:
        pytest.skip(f"{name} cannot be had here: {error}")


def test_shakespeare_is_the_published_one(tmp_path: Path) -> None:
    samples = fetched("shakespeare")
    assert samples.x_test is not None
    assert samples.owner is not None
    assert (samples.x.shape, samples.x_test.shape, len(np.unique(samples.owner))) == ((148_317, 80), (9_141, 80), 439)
    whole = shakespeare.PUBLISHED.obtain()
    roles = ["".join(VOCABULARY[c] for c in whole.x[whole.y == whole.labels.index(role)].tolist())
             for role in ("hamlet: Ham", "macbeth: LADY MACBETH", "midsummer_nights_dream: PUCK")]  # fmt: skip
    for role, line in zip(
        roles,
        (
            "To be, or not to be,--that is the question:--",
            "Out, damned spot! out, I say!",
            "what fools these mortals be!",
        ),
        strict=True,
    ):
        assert line in role
    assert np.bincount(samples.y_test)[1] / len(samples.y_test) == pytest.approx(0.186, abs=1e-3), "share of the blank"
    options = shlex.split(
        "--split natural --active 5 --rounds 6 --local-epochs 1 --batch-size 10 --lr 4 --eval-every 6 --weight-decay 0 "
        "--set data.least=20000 --set data.stride=100 --model charlstm --set model.hidden=32 --quiet"
    )
    assert main(["run", "--data", "shakespeare", "--out", str(tmp_path / "run"), *options]) == 0
    rounds = [json.loads(line) for line in (tmp_path / "run" / "rounds.jsonl").read_text().splitlines()]
    assert rounds[-1]["train_loss"] < rounds[0]["train_loss"] - 0.2
