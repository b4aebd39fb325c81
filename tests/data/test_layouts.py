"""The published layouts, from files the tests write byte by byte: right ones give one result, wrong ones are named."""

from __future__ import annotations

import hashlib
import os
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import layouts
import numpy as np
import pytest

from fedspeed.data import cifar as cifar_module
from fedspeed.data import load, read
from fedspeed.data.cifar import read_pickle
from fedspeed.data.mnist import FILES, read_idx
from fedspeed.data.samples import silent
from fedspeed.errors import UserError

KINDS = {
    "cifar10": (layouts.TEN, 10, cifar_module.CIFAR_10, "cifar-10-batches-bin"),
    "cifar100": (layouts.HUNDRED, 100, cifar_module.CIFAR_100, "cifar-100-binary"),
}


def sources(name: str, tmp_path: Path) -> list[Path]:
    """The same records in every layout and container."""
    files, classes, _, inside = KINDS[name]
    made = layouts.records(files, classes=classes)
    found = [
        layouts.folder(layouts.binary(made), tmp_path / "bin"),
        layouts.folder(layouts.binary(made), tmp_path / "parent" / inside).parent,
        layouts.tar(layouts.binary(made), tmp_path / "bin.tar.gz"),
        layouts.zipped(layouts.binary(made), tmp_path / "bin.zip"),
        layouts.folder(layouts.python(made), tmp_path / "py"),
        layouts.folder(layouts.python(made, text_keys=True), tmp_path / "py3"),
        layouts.tar(layouts.python(made), tmp_path / "py.tar.gz"),
    ]
    if name == "cifar10":
        found.append(layouts.tar(layouts.png(made), tmp_path / "package.tgz", "package"))
    return found


@pytest.mark.parametrize("name", KINDS)
def test_every_layout_ends_in_the_same_verified_arrays(name: str, tmp_path: Path) -> None:
    files, classes, kind, _ = KINDS[name]
    made = layouts.records(files, classes=classes)
    md5 = tuple(hashlib.md5(blob).hexdigest() for blob in layouts.binary(made).values())
    known = replace(kind, binary_md5=md5, python_md5=())
    digests = set()
    for path in sources(name, tmp_path):
        samples = cifar_module._read(known, path, False, silent)
        digests.add(samples.digest())
    assert len(digests) == 1
    pixels = np.frombuffer(b"".join(p for f in files[:-1] for p in made[f][1]), np.uint8)
    assert np.array_equal(samples.x, pixels.reshape(-1, 3, 32, 32))
    assert samples.y.tolist() == [label[-1] for f in files[:-1] for label in made[f][0]]
    assert samples.y_test is not None
    assert samples.y_test.tolist() == [label[-1] for label in made[files[-1]][0]]


@pytest.mark.parametrize("name", KINDS)
def test_by_name_with_part(name: str, tmp_path: Path) -> None:
    for path in sources(name, tmp_path):
        data = load(name, data_dir=path, part=True, split="iid", clients=2)
        assert data.shape == (3, 32, 32)
        assert data.classes == KINDS[name][1]
        assert data.pipeline.padding == 4
    assert not (tmp_path / "cache" / name).exists()


@pytest.mark.parametrize("name", KINDS)
def test_records_that_are_not_the_published_ones_are_refused(name: str, tmp_path: Path) -> None:
    for path in sources(name, tmp_path):
        with pytest.raises(UserError, match=r"are not the published ones \(md5 \w+, expected \w+\)"):
            read(name, data_dir=path)


def test_cifar100_pickles_may_be_known_by_their_own_checksum(tmp_path: Path) -> None:
    made = layouts.records(layouts.HUNDRED, classes=100)
    blobs = layouts.python(made)
    known = replace(cifar_module.CIFAR_100, python_md5=tuple(hashlib.md5(b).hexdigest() for b in blobs.values()))
    assert len(cifar_module._read(known, layouts.folder(blobs, tmp_path / "py"), False, silent).x) == 6


def test_truncated_and_damaged_files_are_named(tmp_path: Path) -> None:
    made = layouts.records(layouts.TEN)
    blobs = layouts.binary(made)
    blobs["data_batch_3.bin"] = blobs["data_batch_3.bin"][:-5]
    with pytest.raises(UserError, match=r"data_batch_3\.bin has 18433 bytes, expected a multiple of 3073"):
        read("cifar10", data_dir=layouts.folder(blobs, tmp_path / "short"), part=True)
    archive = layouts.tar(layouts.binary(made), tmp_path / "cut.tar.gz")
    archive.write_bytes(archive.read_bytes()[:-4000])
    with pytest.raises(UserError, match=r"cut\.tar\.gz is truncated or damaged"):
        read("cifar10", data_dir=archive, part=True)
    zipped = layouts.zipped(layouts.binary(made), tmp_path / "cut.zip")
    zipped.write_bytes(zipped.read_bytes()[:-100])
    with pytest.raises(UserError, match=r"cut\.zip is truncated or damaged"):
        read("cifar10", data_dir=zipped, part=True)
    damaged = layouts.zipped(layouts.binary(made), tmp_path / "bits.zip")
    blob = bytearray(damaged.read_bytes())
    blob[200] ^= 255
    damaged.write_bytes(bytes(blob))
    with pytest.raises(UserError, match=r"bits\.zip is truncated or damaged .*CRC"):
        read("cifar10", data_dir=damaged, part=True)
    with pytest.raises(UserError, match=r"holds no published layout; expected the files data_batch_1\.bin"):
        read("cifar10", data_dir=layouts.folder({"readme.txt": b"hello"}, tmp_path / "other"))
    pngs = layouts.png(made)
    pngs["data_batch_2.png"] = pngs["data_batch_2.png"][:500]
    with pytest.raises(UserError, match=r"data_batch_2\.png is not a readable picture"):
        read("cifar10", data_dir=layouts.folder(pngs, tmp_path / "png"), part=True)
    pngs["test_lables.json"] = b"[1, 2"
    with pytest.raises(UserError, match="the labels are not JSON"):
        read("cifar10", data_dir=layouts.folder(pngs, tmp_path / "json"), part=True)


def test_labels_out_of_range_are_refused(tmp_path: Path) -> None:
    made = layouts.records(layouts.TEN)
    made["data_batch_1"][0][2] = (11,)
    with pytest.raises(UserError, match=r"labels must lie in 0\.\.9, found 11 in row 2"):
        read("cifar10", data_dir=layouts.folder(layouts.binary(made), tmp_path / "bin"), part=True)


class Evil:
    """Its pickle runs a command when read by `pickle.load`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


def test_pickles_are_read_without_executing_anything(tmp_path: Path) -> None:
    mark = tmp_path / "executed"
    blobs = layouts.python(layouts.records(layouts.TEN))
    blobs["data_batch_1"] = pickle.dumps({b"data": Evil(mark), b"labels": [0]})
    with pytest.raises(UserError, match=r"asks for (posix|nt)\.system\); it was not executed"):
        read("cifar10", data_dir=layouts.folder(blobs, tmp_path / "py"), part=True)
    assert not mark.exists()


@pytest.mark.parametrize(
    ("blob", "message"),
    [
        (b"", "not a pickle of plain arrays"),
        (b"garbage", "not a pickle of plain arrays"),
        (pickle.dumps([1, 2]), "expected a pickled dictionary, found list"),
        (pickle.dumps({"a": np.float64}), "asks for numpy.float64"),
        (pickle.dumps({b"a": np.arange(3)})[:-20], "not a pickle of plain arrays"),
    ],
)
def test_other_pickles_are_refused(blob: bytes, message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_pickle(blob, "batch")


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4])
def test_arrays_survive_the_restricted_reader(protocol: int) -> None:
    array = np.arange(12, dtype=np.uint8).reshape(3, 4)
    assert np.array_equal(read_pickle(pickle.dumps({b"data": array}, protocol), "x")[b"data"], array)


def test_pickles_with_wrong_entries(tmp_path: Path) -> None:
    good = layouts.python(layouts.records(layouts.TEN))
    pixels = np.zeros((2, 3072), np.uint8)
    for entry, message in [
        ({b"labels": [1]}, "has no entry 'data'"),
        ({b"data": pixels}, "has no entry 'labels'"),
        ({b"data": pixels, b"labels": [1]}, "found 2 pictures and 1 labels"),
        ({b"data": pixels.astype(float), b"labels": [1, 2]}, r"it asks for dtype\('f8'\)"),
        ({b"data": pixels, b"labels": [1, 300]}, r"whole numbers in 0\.\.255"),
    ]:
        good["data_batch_1"] = pickle.dumps(entry, 2)
        with pytest.raises(UserError, match=message):
            read("cifar10", data_dir=layouts.folder(good, tmp_path / "py"), part=True)


def idx_files(n: int = 5, zip_it: bool = False) -> dict[str, bytes]:
    stream = np.random.default_rng(0)
    x, y = stream.integers(0, 256, (n, 28, 28), dtype=np.uint8), (np.arange(n) % 10).astype(np.uint8)
    suffix = ".gz" if zip_it else ""
    return {f + suffix: layouts.idx(a, zip_it) for f, a in zip(FILES, (x, y, x[:2], y[:2]), strict=True)}


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist"])
def test_idx_files_plain_gzipped_and_zipped(name: str, tmp_path: Path) -> None:
    paths = [
        layouts.folder(idx_files(), tmp_path / "plain"),
        layouts.folder(idx_files(zip_it=True), tmp_path / "gz"),
        layouts.zipped(idx_files(zip_it=True), tmp_path / "all.zip"),
    ]
    found = {read(name, data_dir=path, part=True).digest() for path in paths}
    assert len(found) == 1
    assert load(name, data_dir=paths[0], part=True, split="iid", clients=2).shape == (1, 28, 28)
    with pytest.raises(UserError, match=r"train-images-idx3-ubyte have md5 \w+, expected \w+"):
        read(name, data_dir=paths[0])


def test_bad_idx_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="file is not an IDX file of bytes"):
        read_idx(b"\0\0\x0d\x01\0\0\0\1\0\0\0\0", "file")
    with pytest.raises(UserError, match="begins with nothing"):
        read_idx(b"", "file")
    with pytest.raises(UserError, match=r"holds 3 bytes for shape \(2, 2\), expected 4"):
        read_idx(layouts.idx(np.zeros((2, 2), np.uint8))[:-1], "file")
    cut = idx_files(zip_it=True)
    cut["t10k-images-idx3-ubyte.gz"] = cut["t10k-images-idx3-ubyte.gz"][:-30]
    with pytest.raises(UserError, match=r"t10k-images-idx3-ubyte\.gz is truncated or damaged"):
        read("mnist", data_dir=layouts.folder(cut, tmp_path / "cut"), part=True)
    with pytest.raises(UserError, match="holds no IDX files; expected train-images-idx3-ubyte"):
        read("mnist", data_dir=layouts.folder({"a": b""}, tmp_path / "none"))
