"""The user's own data: every documented example runs, and what is wrong is named."""

from __future__ import annotations

import importlib.util
import re
import shlex
from pathlib import Path
from typing import Any

import layouts
import numpy as np
import pytest
import torch

from fedspeed.cli import main
from fedspeed.data import federate, from_arrays, from_hugging_face, from_torch, load, read
from fedspeed.errors import UserError

DOCS = Path(__file__).parents[2] / "docs" / "guides" / "data.md"
HAS_HF = importlib.util.find_spec("datasets") is not None


def test_every_example_of_the_documentation_runs(own_folder: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)
    assert len(blocks) >= 7
    names: dict[str, Any] = {"print": lambda *_: None}
    for block in blocks:
        if HAS_HF or "needs: datasets" not in block:
            exec(compile(block, "docs/guides/data.md", "exec"), names)
    assert names["data"].clients == (2 if HAS_HF else 5)
    commands = [text for text in re.findall(r"`(fedspeed run [^`]+)`", DOCS.read_text()) if "huggingface" not in text]
    assert len(commands) >= 4
    for number, text in enumerate(commands):  # mine.npz and pets are there now
        words = [*shlex.split(text)[1:], "--rounds", "1", "--local-epochs", "1", "--out", f"run{number}", "--quiet"]
        assert main(words) == 0, text


def colour(path: Path, size: tuple[int, int], shade: int, mode: str = "RGB") -> None:
    from PIL import Image

    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, shade if mode == "L" else (shade, 0, 0)).save(path)


@pytest.fixture
def pets(tmp_path: Path) -> Path:
    for c, kind in enumerate(("cat", "dog")):
        for i in range(5):
            colour(tmp_path / "pets" / kind / f"{i}.png", (16, 16), 100 * c + i)
    return tmp_path / "pets"


def test_pictures_in_class_folders(pets: Path) -> None:
    samples = read("images", data_dir=pets)
    assert (samples.classes, samples.labels, samples.name) == (2, ("cat", "dog"), "pets")
    assert (len(samples.x), samples.x.shape[1:], samples.x.dtype) == (8, (3, 16, 16), np.uint8)
    assert samples.x_test is not None
    shades = np.concatenate([samples.x, samples.x_test])[:, 0, 0, 0]
    labels = np.concatenate([samples.y, np.asarray(samples.y_test)])
    assert sorted(shades.tolist()) == [0, 1, 2, 3, 4, 100, 101, 102, 103, 104]
    assert np.array_equal(labels, shades // 100)
    again = read("images", data_dir=pets)
    assert again.digest() == samples.digest(), "the held-out pictures are always the same"


def test_pictures_with_a_test_set_grey_and_resized(tmp_path: Path) -> None:
    for part, n in (("train", 3), ("val", 2)):
        for kind in ("a", "b"):
            for i in range(n):
                colour(tmp_path / part / kind / f"{i}.jpg", (20 + i, 30), 50, "L")
    samples = read("images", data_dir=tmp_path, size=16, grey=True)
    assert samples.x_test is not None
    assert (samples.x.shape, samples.x_test.shape) == ((6, 1, 16, 16), (4, 1, 16, 16))
    data = federate(samples, split="iid", clients=2)
    assert (data.pipeline.mean, data.pipeline.random) == ((0.5,), False)
    assert federate(samples, split="iid", clients=2, augment="paper").pipeline.padding == 2


def test_pictures_with_client_ids(pets: Path) -> None:
    lines = [f"{kind}/{i}.png,{'ann' if i < 3 else 'bob'}" for kind in ("cat", "dog") for i in range(5)]
    (pets / "clients.csv").write_text("\n".join(lines))
    data = load("images", data_dir=pets, split="natural", clients=2)
    assert set((data.x[data.rows(0), 0, 0, 0] % 100).tolist()) <= {0, 1, 2}
    (pets / "clients.csv").write_text("\n".join(lines[1:]))
    with pytest.raises(UserError, match=r"names no client for cat/0\.png"):
        read("images", data_dir=pets)


def test_bad_picture_folders_are_named(pets: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="found none at"):
        read("images", data_dir=tmp_path / "none")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="has no class folders"):
        read("images", data_dir=tmp_path / "empty")
    (pets / "emu").mkdir()
    with pytest.raises(UserError, match="emu holds no pictures"):
        read("images", data_dir=pets)
    (pets / "emu" / "bad.jpeg").write_bytes(layouts.jpeg()[:200])
    with pytest.raises(UserError, match=r"cannot decode the picture .*bad\.jpeg .*; replace or remove it"):
        read("images", data_dir=pets, size=16)
    colour(pets / "emu" / "bad.jpeg", (17, 16), 3)
    with pytest.raises(UserError, match=r"bad\.jpeg is 17 x 16, .* is 16 x 16; set size=N"):
        read("images", data_dir=pets)


def test_arrays_in_files(tmp_path: Path) -> None:
    x, y = np.arange(40, dtype=np.float64).reshape(20, 2), np.arange(20) % 4
    np.savez(tmp_path / "mine.npz", x=x, y=y, x_test=x[:3], y_test=y[:3], client=np.arange(20) // 5)
    data = load("arrays", data_dir=tmp_path / "mine.npz", split="natural", clients=4)
    assert (data.x.dtype, data.classes, data.clients, data.name) == (torch.float32, 4, 4, "mine")
    folder = tmp_path / "folder"
    folder.mkdir()
    np.save(folder / "x.npy", x)
    np.save(folder / "y.npy", y)
    assert len(load("arrays", data_dir=folder, split="iid", clients=2, holdout=0.25).x) == 15


def test_bad_array_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="found nothing at"):
        read("arrays", data_dir=tmp_path / "none.npz")
    np.savez(tmp_path / "half.npz", x=np.zeros(3))
    with pytest.raises(UserError, match=r"half\.npz has no array 'y'"):
        read("arrays", data_dir=tmp_path / "half.npz")
    np.save(tmp_path / "one.npy", np.zeros(3))
    with pytest.raises(UserError, match="is a single array"):
        read("arrays", data_dir=tmp_path / "one.npy")
    np.savez(tmp_path / "objects.npz", x=np.array([{}, {}]), y=np.zeros(2))
    with pytest.raises(UserError, match=r"cannot read .*objects\.npz as plain arrays"):
        read("arrays", data_dir=tmp_path / "objects.npz")
    (tmp_path / "cut.npz").write_bytes((tmp_path / "half.npz").read_bytes()[:-30])
    with pytest.raises(UserError, match=r"cannot read .*cut\.npz"):
        read("arrays", data_dir=tmp_path / "cut.npz")


def test_picture_arrays_in_any_order_of_axes() -> None:
    y = np.arange(10) % 2
    for shape in ((10, 8, 8), (10, 8, 8, 1), (10, 1, 8, 8)):
        assert from_arrays(np.zeros(shape, np.uint8), y).x.shape[1:] == (1, 8, 8)
    x = np.random.default_rng(0).integers(0, 256, (10, 8, 9, 3), dtype=np.uint8)
    assert np.array_equal(from_arrays(x, y, x, y).x, x.transpose(0, 3, 1, 2))


def test_holding_out_keeps_the_classes() -> None:
    y = np.repeat(np.arange(5), 20)
    samples = from_arrays(np.arange(100.0)[:, None], y, holdout=0.1)
    assert samples.y_test is not None
    assert np.bincount(samples.y_test).tolist() == [2] * 5
    assert samples.x_test is not None
    both = np.concatenate([samples.x, samples.x_test]).ravel()
    assert sorted(both.tolist()) == list(range(100))
    assert from_arrays(np.zeros((4, 1)), np.zeros(4), holdout=0).x_test is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"x": np.zeros((3, 2)), "y": np.array([0, 1])}, "3 inputs but 2 targets"),
        ({"x": np.zeros((3, 2)), "y": np.array([0, -1, 1])}, "found -1 in row 1"),
        ({"x": np.zeros((3, 2)), "y": np.array(["a", "b", "c"])}, "number your classes from 0"),
        ({"x": np.array([[1.0], [np.nan], [2.0]]), "y": np.arange(3)}, "row 1 is not"),
        ({"x": np.array([None, None]), "y": np.arange(2)}, "expected numeric inputs"),
        ({"x": np.zeros((3, 2)), "y": np.arange(3), "owner": [1, 2]}, "one client id per row"),
        ({"x": np.zeros((3, 2)), "y": np.arange(3), "x_test": np.zeros((1, 2))}, "both inputs and targets"),
        ({"x": np.zeros((3, 2)), "y": np.arange(3), "holdout": 1.5}, "between 0 and 1"),
        ({"x": np.zeros((1, 2)), "y": np.arange(1)}, "cannot be divided"),
    ],
)
def test_bad_arrays_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        from_arrays(**arguments)


class Pairs(torch.utils.data.Dataset[Any]):
    """PIL pictures with labels, as torchvision's data sets give them."""

    def __init__(self, sides: list[int]) -> None:
        self.sides = sides

    def __len__(self) -> int:
        return len(self.sides)

    def __getitem__(self, i: int) -> tuple[Any, int]:
        from PIL import Image

        return Image.new("RGB", (self.sides[i],) * 2, (i, 0, 0)), i % 2


def test_a_torch_dataset_of_pictures() -> None:
    samples = from_torch(Pairs([8] * 10), Pairs([8] * 4), owner=np.arange(10) // 2)
    assert (samples.x.dtype, samples.x.shape, samples.classes) == (np.uint8, (10, 3, 8, 8), 2)
    assert samples.x[:, 0, 0, 0].tolist() == list(range(10))
    assert federate(samples, split="natural", clients=5).clients == 5
    with pytest.raises(UserError, match=r"sample 1 has shape \(9, 9, 3\)"):
        from_torch(Pairs([8, 9]))
    with pytest.raises(UserError, match="the dataset is empty"):
        from_torch(Pairs([]))


@pytest.mark.skipif(HAS_HF, reason="the package is installed")
def test_without_the_package_the_extra_is_named() -> None:
    with pytest.raises(UserError, match=r"pip install 'fedspeed\[hf\]'"):
        read("huggingface", path="ylecun/mnist")


@pytest.mark.skipif(not HAS_HF, reason="needs the extra hf (package datasets)")
@pytest.mark.filterwarnings("ignore")
def test_a_hugging_face_dataset(pets: Path, tmp_path: Path) -> None:
    import datasets

    features = datasets.Features(
        {
            "picture": datasets.Image(),
            "kind": datasets.ClassLabel(names=["cat", "dog"]),
            "who": datasets.Value("string"),
        }
    )
    files = sorted(str(p) for p in pets.rglob("*.png"))
    rows = {"picture": files, "kind": [int("dog" in f) for f in files], "who": ["a", "b"] * 5}
    whole = datasets.Dataset.from_dict(rows, features=features)
    hub = datasets.DatasetDict(train=whole, test=whole)
    samples = from_hugging_face(hub, client="who")
    assert (samples.x.shape, samples.labels, samples.classes) == ((10, 3, 16, 16), ("cat", "dog"), 2)
    assert samples.x[:, 0, 0, 0].tolist() == [0, 1, 2, 3, 4, 100, 101, 102, 103, 104]
    assert federate(samples, split="natural", clients=2).sizes.tolist() == [5, 5]
    hub.save_to_disk(str(tmp_path / "saved"))
    assert read("huggingface", data_dir=tmp_path / "saved", client="who").digest() == samples.digest()
    with pytest.raises(UserError, match="no column 'whom'; there are picture, kind, who"):
        from_hugging_face(hub, client="whom")
    with pytest.raises(UserError, match="no column 'pic'; set image=COLUMN"):
        from_hugging_face(hub, image="pic")
    with pytest.raises(UserError, match="give either path"):
        read("huggingface")
    with pytest.raises(UserError, match="cannot load"):
        read("huggingface", data_dir=tmp_path / "missing")
