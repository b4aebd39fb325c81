"""MNIST and Fashion-MNIST: 60,000 + 10,000 grey pictures of 28 x 28, ten classes, in IDX files.

The contents of every IDX file (not its gzip, which differs between sources) must have the published MD5.

References: Y. LeCun, C. Cortes, C. Burges, "The MNIST database"; H. Xiao, K. Rasul, R. Vollgraf,
"Fashion-MNIST", 2017 (MIT licence).
"""

from __future__ import annotations

import gzip
import hashlib
import io
import math
import zlib
from functools import partial
from pathlib import Path

import numpy as np

from ..errors import UserError
from .archive import MOST, candidates, too_long
from .augment import Augmentation
from .fetch import Published, Remote, SystemFolder, Web
from .samples import Progress, Samples

FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
AXES = 4
IDX_MD5 = {
    "mnist": (
        "6bbc9ace898e44ae57da46a324031adb",
        "a25bea736e30d166cdddb491f175f624",
        "2646ac647ad5339dbf082846283269ea",
        "27ae3e4e09519cfbb04c329615203637",
    ),
    "fashion-mnist": (
        "f4a8712d7a061bf5bd6d2ca38dc4d50a",
        "9018921c3c673c538a1fc5bad174d6f9",
        "8181f5470baa50b63fa0f6fddb340f0a",
        "15d484375f8d13e6eb1aabb0c3f46965",
    ),
}


def read_idx(blob: bytes, where: str) -> np.ndarray:
    """Read an array of bytes in IDX format: 0, 0, 8, number of axes, big-endian sizes, data.

    Example:
        >>> read_idx(bytes([0, 0, 8, 1, 0, 0, 0, 2, 7, 9]), "example").tolist()
        [7, 9]
    """
    axes = blob[3] if len(blob) >= 4 else 0
    if blob[:3] != b"\0\0\x08" or len(blob) < 4 + 4 * axes:
        raise UserError(f"data: {where} is not an IDX file of bytes (it begins with {blob[:4].hex() or 'nothing'})")
    if axes > AXES:
        raise UserError(f"data: {where} has {axes} axes, expected at most {AXES}; it is damaged")
    shape = tuple(np.frombuffer(blob, ">u4", axes, 4).tolist())
    start = 4 + 4 * axes
    if len(blob) - start != math.prod(shape):
        raise UserError(
            f"data: {where} holds {len(blob) - start} bytes for shape {shape}, expected {math.prod(shape)}; it is "
            "truncated or damaged"
        )
    return np.frombuffer(blob, np.uint8, offset=start).reshape(shape)


def _read(name: str, path: Path, part: bool, progress: Progress) -> Samples:
    progress(f"{name}: reading", 0, 0)
    inside = ("raw", "MNIST/raw" if name == "mnist" else "FashionMNIST/raw")
    for tree in candidates(path, inside):
        if found := tree.collect(FILES) or tree.collect([f"{file}.gz" for file in FILES]):
            break
    else:
        raise UserError(f"data {name}: {path} holds no IDX files; expected {', '.join(FILES)} (or the same .gz)")
    arrays = []
    for (file, blob), md5 in zip(found.items(), IDX_MD5[name], strict=True):
        where = f"{tree.path}/{file}"
        if file.endswith(".gz"):
            try:
                with gzip.open(io.BytesIO(blob)) as unpacked:
                    blob = unpacked.read(MOST + 1)
            except (OSError, EOFError, zlib.error) as error:
                raise UserError(f"data {name}: {where} is truncated or damaged ({error})") from error
            if len(blob) > MOST:
                raise too_long(f"what {where} unpacks to", MOST)
        arrays.append(read_idx(blob, where))
        got = hashlib.md5(blob, usedforsecurity=False).hexdigest()
        if got != md5 and not part:
            raise UserError(
                f"data {name}: the contents of {where} have md5 {got}, expected {md5}; the file is altered. If that "
                "is intended, set part=true"
            )
    x, y, x_test, y_test = arrays
    if x.ndim != 3 or x_test.ndim != 3 or y.ndim != 1 or y_test.ndim != 1:
        raise UserError(f"data {name}: {tree.path}: expected pictures and labels, found shapes {x.shape}, {y.shape}")
    return Samples(name, x[:, None], y.astype(np.int64), x_test[:, None], y_test.astype(np.int64))


def _web(base: str, md5: tuple[str, ...]) -> Web:
    return Web(tuple(Remote(f"{base}{file}.gz", m) for file, m in zip(FILES, md5, strict=True)))


_MNIST_GZ = (
    "f68b3c2dcbeaaa9fbdd348bbdeb94873",
    "d53e105ee54ea40749a09fcbcd1e9432",
    "9fb629c4189551a2d022fa330f9573f3",
    "ec29112dd5afa0611ce80d1b7f02629c",
)
_FASHION_GZ = (
    "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
    "25c81989df183df01b3e8a0aad5dffbe",
    "bef4ecab320f06d8554ea6380940ec79",
    "bb300cfdad3c16e7a12a480ee83cd310",
)
MNIST = Published(
    "mnist",
    partial(_read, "mnist"),
    (
        _web("https://ossci-datasets.s3.amazonaws.com/mnist/", _MNIST_GZ),
        _web("https://storage.googleapis.com/cvdf-datasets/mnist/", _MNIST_GZ),
    ),
    classes=10,
    augmentation=Augmentation((0.1307,), (0.3081,)),
)
FASHION = Published(
    "fashion-mnist",
    partial(_read, "fashion-mnist"),
    (
        SystemFolder("/usr/share/datasets/fashion-mnist"),  # Debian's package dataset-fashion-mnist
        _web("https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/", _FASHION_GZ),
    ),
    classes=10,
    augmentation=Augmentation((0.2860,), (0.3530,)),
)


def mnist(part: bool = False, *, data_dir: str | Path | None = None, progress: Progress | None = None) -> Samples:
    """Load MNIST: handwritten digits.

    Args:
        part: accept a copy in the same layout that is not the complete published set.
        data_dir: a folder with the four IDX files, plain or gzipped.
    """
    return MNIST.obtain(data_dir, part, progress)


def fashion_mnist(
    part: bool = False, *, data_dir: str | Path | None = None, progress: Progress | None = None
) -> Samples:
    """Load Fashion-MNIST: pieces of clothing; arguments as `mnist`. Debian's package is `dataset-fashion-mnist`."""
    return FASHION.obtain(data_dir, part, progress)
