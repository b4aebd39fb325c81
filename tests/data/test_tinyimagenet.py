"""TinyImageNet's layout as zip and folder: decoded once, kept, decoded again when the copy changes."""

from __future__ import annotations

import io
from pathlib import Path

import layouts
import numpy as np
import pytest

from fedspeed.data import load, read, tinyimagenet
from fedspeed.errors import UserError


@pytest.fixture
def zipped(tmp_path: Path) -> Path:
    return layouts.zipped(layouts.tiny(), tmp_path / "tiny-imagenet-200.zip", "tiny-imagenet-200")


def test_zip_and_folder_give_the_same(zipped: Path, tmp_path: Path) -> None:
    from PIL import Image

    blobs = layouts.tiny()
    paths = [
        zipped,
        layouts.folder(blobs, tmp_path / "a" / "tiny-imagenet-200"),
        layouts.folder(blobs, tmp_path / "b" / "tiny-imagenet-200").parent,
    ]
    found = [read("tinyimagenet", data_dir=path, part=True) for path in paths]
    assert len({samples.digest() for samples in found}) == 1
    samples = found[0]
    assert (samples.x.shape, samples.classes) == ((12, 3, 64, 64), 3)
    assert samples.y.tolist() == [0] * 4 + [1] * 4 + [2] * 4, "classes are numbered by their sorted ids"
    assert samples.y_test is not None
    assert samples.y_test.tolist() == [0, 0, 2, 2, 1, 1], "validation pictures follow val_annotations.txt"
    assert samples.labels[0] == "goldfish"
    name = "train/n00000004/images/n00000004_1.JPEG"
    with Image.open(io.BytesIO(blobs[name])) as picture:
        assert np.array_equal(samples.x[5], np.asarray(picture).transpose(2, 0, 1))
    grey = samples.x[0]
    assert np.array_equal(grey[0], grey[2]), "grey pictures get three equal channels"


def test_decoded_once_until_the_copy_changes(zipped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, int, int]] = []

    def progress(what: str, done: int, total: int) -> None:
        seen.append((what, done, total))

    first = read("tinyimagenet", data_dir=zipped, part=True, progress=progress)
    assert seen[-1] == ("tinyimagenet: decoding", 18, 18)
    with monkeypatch.context() as patch:
        patch.setattr(tinyimagenet, "decode", lambda *a: pytest.fail("decoded again"))
        again = read("tinyimagenet", data_dir=zipped, part=True)
    assert again.digest() == first.digest()
    assert (again.classes, again.labels) == (first.classes, first.labels)
    layouts.zipped(layouts.tiny(train=3), zipped, "tiny-imagenet-200")
    assert len(read("tinyimagenet", data_dir=zipped, part=True).x) == 9


def test_a_part_must_be_asked_for(zipped: Path) -> None:
    with pytest.raises(UserError, match=r"holds 12 training and 6 validation pictures .* expected 100000 .*part=true"):
        read("tinyimagenet", data_dir=zipped)


def test_it_is_split_and_augmented(zipped: Path) -> None:
    data = load("tinyimagenet", data_dir=zipped, part=True, split="iid", clients=3)
    assert (data.shape, data.pipeline.padding, data.sizes.tolist()) == ((3, 64, 64), 8, [4, 4, 4])


def test_bad_pictures_and_lists_are_named(tmp_path: Path) -> None:
    def attempt(change: dict[str, bytes], drop: str = "") -> None:
        blobs = {name: blob for name, blob in {**layouts.tiny(), **change}.items() if name != drop}
        read("tinyimagenet", data_dir=layouts.zipped(blobs, tmp_path / "bad.zip", "t"), part=True)

    name = "train/n00000007/images/n00000007_2.JPEG"
    with pytest.raises(UserError, match=f"cannot decode the picture .*{name}"):
        attempt({name: b"not a picture"})
    with pytest.raises(UserError, match=f"cannot decode the picture .*{name}"):
        attempt({name: layouts.jpeg()[:300]})
    with pytest.raises(UserError, match=f"{name} is 32 x 32, expected 64 x 64"):
        attempt({name: layouts.jpeg(32)})
    with pytest.raises(UserError, match=r"has no wnids\.txt"):
        attempt({}, drop="wnids.txt")
    with pytest.raises(UserError, match=r"has no val/val_annotations\.txt"):
        attempt({}, drop="val/val_annotations.txt")
    with pytest.raises(UserError, match=r"names val_1\.JPEG .* not there"):
        attempt({}, drop="val/images/val_1.JPEG")
    cache = tmp_path / "cache"
    assert not [p for p in cache.rglob("*") if p.suffix == ".npy"], "nothing half-written"
