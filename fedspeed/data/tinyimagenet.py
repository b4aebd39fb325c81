"""TinyImageNet: 200 classes, 100,000 + 10,000 colour pictures of 64 x 64, from the original zip or folder.

    tiny-imagenet-200/wnids.txt, words.txt
    tiny-imagenet-200/train/<wnid>/images/*.JPEG
    tiny-imagenet-200/val/images/*.JPEG, val/val_annotations.txt

The labelled validation pictures are the test set (the published test pictures have no labels). Classes are
numbered by their sorted ids. The arrays are kept in the cache, since decoding is slow.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ..errors import UserError
from .archive import FileTree, candidates
from .augment import Augmentation
from .fetch import Published, Remote, Web
from .images import decode
from .samples import Progress, Samples

SIDE = 64
FULL = (500, 50)
MOST = 2**24
"""The largest size of a picture or list in bytes."""
PICTURES = 4 * 110_000
"""The largest number of pictures: many names in an archive can share a few bytes."""


def _plan(tree: FileTree) -> tuple[list[str], list[tuple[str, int]], list[tuple[str, int]]]:
    """Return class ids, and (name, label) of every training and validation picture."""
    names = tree.names
    listed = next((n for n in names if n.endswith("wnids.txt")), None)
    notes = next((n for n in names if n.endswith("val/val_annotations.txt")), None)
    if listed is None or notes is None:
        raise UserError(
            f"data tinyimagenet: {tree.path} has no {'wnids.txt' if listed is None else 'val/val_annotations.txt'}; "
            "expected the original layout of tiny-imagenet-200.zip"
        )
    wnids = sorted(tree.text(listed).split())
    number = {wnid: i for i, wnid in enumerate(wnids)}
    root = listed.removesuffix("wnids.txt")
    train = []
    for name in names:
        parts = name.removeprefix(root).split("/")
        if len(parts) == 4 and parts[0] == "train" and parts[2] == "images" and parts[1] in number:
            train.append((name, number[parts[1]]))
    val, there = [], set(names)
    for line in filter(None, tree.text(notes).splitlines()):
        file, wnid = (line + "\t").split("\t")[:2]
        name = f"{root}val/images/{file}"
        if wnid not in number or name not in there:
            raise UserError(f"data tinyimagenet: {tree.path}: val_annotations.txt names {file} ({wnid}), not there")
        val.append((name, number[wnid]))
    return wnids, train, val


def _words(tree: FileTree, wnids: list[str]) -> tuple[str, ...]:
    listed = next((n for n in tree.names if n.endswith("words.txt")), None)
    lines = tree.text(listed).splitlines() if listed else []
    words = dict(line.split("\t", 1) for line in lines if "\t" in line)
    return tuple(words.get(wnid, wnid).split(",")[0] for wnid in wnids)


def _complete(tree: FileTree, classes: int, train: list[tuple[str, int]], val: list[tuple[str, int]]) -> None:
    counts = [np.bincount([label for _, label in part], minlength=classes) for part in (train, val)]
    if classes != 200 or any((count != full).any() for count, full in zip(counts, FULL, strict=True)):
        raise UserError(
            f"data tinyimagenet: {tree.path} holds {len(train)} training and {len(val)} validation pictures of "
            f"{classes} classes, expected 100000 and 10000 of 200; if a part is what you want, set part=true"
        )


def _read(path: Path, part: bool, progress: Progress) -> Samples:
    tree = next(candidates(path, ("tiny-imagenet-200", "tiny-imagenet-200.zip"), MOST))
    wnids, train, val = _plan(tree)
    if not part:
        _complete(tree, len(wnids), train, val)
    if not train:
        raise UserError(f"data tinyimagenet: {tree.path} has no training pictures (train/<wnid>/images/)")
    total = len(train) + len(val)
    if total > PICTURES:
        raise UserError(f"data tinyimagenet: {tree.path} names {total} pictures, expected at most {PICTURES}")
    pixels = np.empty((total, 3, SIDE, SIDE), np.uint8)
    where = {name: k for k, (name, _) in enumerate([*train, *val])}
    for done, (name, blob) in enumerate(tree.each(list(where)), 1):
        picture = decode(blob, f"{tree.path}: {name}")
        if picture.shape != (3, SIDE, SIDE):
            raise UserError(f"data tinyimagenet: {name} is {picture.shape[2]} x {picture.shape[1]}, expected 64 x 64")
        pixels[where[name]] = picture
        if done % 200 == 0 or done == total:
            progress("tinyimagenet: decoding", done, total)
    y, y_test = (np.array([label for _, label in p], np.int64) for p in (train, val))
    n = len(train)
    words = _words(tree, wnids)
    return Samples("tinyimagenet", pixels[:n], y, pixels[n:], y_test, classes=len(wnids), labels=words)


TINY = Published(
    "tinyimagenet",
    _read,
    (Web((Remote("https://cs231n.stanford.edu/tiny-imagenet-200.zip", "90528d7ca1a48142e341f4ef8d21d0de"),)),),
    classes=200,
    augmentation=Augmentation(
        (0.4802, 0.4481, 0.3975),
        (0.2770, 0.2691, 0.2821),
        padding=8,
        flip=True,
        released_mean=(0.5, 0.5, 0.5),
        released_std=(0.5, 0.5, 0.5),
    ),
    slow=True,
)


def tinyimagenet(
    part: bool = False, *, data_dir: str | Path | None = None, progress: Progress | None = None
) -> Samples:
    """Load TinyImageNet: 200 classes, 500 training and 50 test pictures each.

    Args:
        part: accept a copy in the same layout that is not the complete published set.
        data_dir: `tiny-imagenet-200.zip`, or a folder that holds it or its contents.
    """
    return TINY.obtain(data_dir, part, progress)
