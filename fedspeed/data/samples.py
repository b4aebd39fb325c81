"""`Samples`: a data set before it is split over clients, as every loader returns it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ..errors import UserError
from ..utils.params import require_whole
from .augment import Augmentation
from .convert import check_labels, labelled
from .on_disk import OnDisk, TensorOnDisk

Progress = Callable[[str, int, int], None]
"""`progress(what, done, total)`, called repeatedly during long work (total 0: not known)."""


def silent(what: str, done: int, total: int) -> None:
    """Show no progress."""


@dataclass(frozen=True, eq=False, repr=False)
class Samples:
    """A data set as arrays: pictures as `uint8` (n, channels, height, width), or int64 or floats of any shape.

    Args:
        name: what the data set calls itself.
        x, y: training inputs and targets; inputs may be on disk (`OnDisk`).
        x_test, y_test: the held-out set, or None.
        classes: number of classes, or None for regression.
        owner: the natural client id of every training row, or None.
        augmentation: the normalisation and augmentation of these pictures.
        labels: names of the classes, if they have any.
        owner_test: the natural client id of every test row, or None.
    """

    name: str
    x: np.ndarray | OnDisk
    y: np.ndarray
    x_test: np.ndarray | OnDisk | None = None
    y_test: np.ndarray | None = None
    classes: int | None = None
    owner: np.ndarray | None = None
    augmentation: Augmentation = field(default_factory=Augmentation)
    labels: tuple[str, ...] = ()
    owner_test: np.ndarray | None = None

    def __post_init__(self) -> None:
        if not len(self.x):
            raise UserError(f"data {self.name}: expected at least one sample, found none")
        if self.owner is not None and len(self.owner) != len(self.x):
            raise UserError(
                f"data {self.name}: expected one client id per row ({len(self.x)}), found {len(self.owner)}"
            )
        if self.owner_test is not None and (self.x_test is None or len(self.owner_test) != len(self.x_test)):
            rows = 0 if self.x_test is None else len(self.x_test)
            raise UserError(
                f"data {self.name}: expected one client id per test row ({rows}), found {len(self.owner_test)}"
            )
        for part, x, y in (("training", self.x, self.y), ("test", self.x_test, self.y_test)):
            if (x is None) != (y is None):
                raise UserError(f"data {self.name}: the {part} set needs both inputs and targets")
            if x is None or y is None:
                continue
            if len(x) != len(y):
                raise UserError(f"data {self.name}: {len(x)} {part} inputs but {len(y)} {part} targets")
            if x.shape[1:] != self.x.shape[1:]:
                raise UserError(f"data {self.name}: {part} inputs of shape {x.shape[1:]}, others {self.x.shape[1:]}")
            check_labels(self.name, part, y, self.classes)

    def __repr__(self) -> str:
        other = "regression" if self.y.dtype.kind == "f" else "no classes"
        kind = other if self.classes is None else f"{self.classes} classes"
        test = "no test set" if self.x_test is None else f"{len(self.x_test):,} for testing"
        ids = "no client ids" if self.owner is None else f"{len(np.unique(self.owner)):,} client ids"
        return f"<Samples {self.name}: {len(self.x):,} samples, {test}, {shown(self.x)}, {kind}, {ids}>"

    def digest(self) -> str:
        """Return the SHA-256 of the decoded data: shapes, types and bytes of inputs and targets, training and test."""
        total = hashlib.sha256()
        for a in (self.x, self.y, self.x_test, self.y_test):
            if a is not None:
                total.update(f"{a.dtype.str}{a.shape}".encode())
                for part in [a] if isinstance(a, np.ndarray) else (some for _, some in a.chunks()):
                    total.update(np.ascontiguousarray(part).data)
        return total.hexdigest()

    def first(self, train: int | None, test: int | None) -> Samples:
        """Return the first `train` and `test` samples, class-balanced as exactly as possible, in the original order."""
        keep = _first(self.name, "train_size", self.y, train)
        part = replace(self, x=self.x[keep], y=self.y[keep], owner=None if self.owner is None else self.owner[keep])
        if test is None:
            return part
        if self.x_test is None or self.y_test is None:
            raise UserError(f"data {self.name}: test_size = {test}, but there is no test set")
        keep = _first(self.name, "test_size", self.y_test, test)
        ids = None if self.owner_test is None else self.owner_test[keep]
        return replace(part, x_test=self.x_test[keep], y_test=self.y_test[keep], owner_test=ids)

    def shrink(self, factor: int) -> Samples:
        """Return pictures averaged over blocks of `factor` x `factor` pixels (bytes rounded to the nearest)."""
        require_whole(f"data {self.name}: shrink", factor, 1)
        if factor == 1:
            return self
        height, width = self.x.shape[2:] if self.x.ndim == 4 else (0, 0)
        if not height or height % factor or width % factor:
            raise UserError(
                f"data {self.name}: shrink must divide the picture's sides, found {factor} and inputs of shape "
                f"{self.x.shape[1:]}"
            )
        return replace(
            self,
            x=_average(self.x, factor),
            x_test=None if self.x_test is None else _average(self.x_test, factor),
            augmentation=replace(self.augmentation, padding=-(-self.augmentation.padding // factor)),
        )


def shown(x: Any) -> str:
    """Return shape and type of the inputs of an array or a tensor, for people.

    Example:
        >>> shown(np.zeros((5, 3, 32, 32), "uint8"))
        'inputs 3 x 32 x 32 uint8'
    """
    where = " on disk" if isinstance(x, OnDisk | TensorOnDisk) else ""
    return f"inputs {' x '.join(map(str, x.shape[1:])) or 'scalar'} {str(x.dtype).removeprefix('torch.')}{where}"


def _first(name: str, option: str, y: np.ndarray, size: int | None) -> np.ndarray | slice:
    if size is None or size == len(y):
        return slice(None)
    if not isinstance(size, int) or isinstance(size, bool) or not 0 < size <= len(y):
        raise UserError(f"data {name}: {option} must be a whole number in 1..{len(y)}, found {size!r}")
    if not labelled(y):
        return slice(size)
    order = np.argsort(y, kind="stable")
    starts = np.flatnonzero(np.r_[True, np.diff(y[order]) != 0])
    place = np.arange(len(y)) - np.repeat(starts, np.diff(np.r_[starts, len(y)]))  # 0, 1, 2, ... within its class
    return np.sort(order[np.lexsort((order, place))[:size]])


def _average(x: np.ndarray | OnDisk, factor: int) -> np.ndarray:
    if isinstance(x, OnDisk):  # smaller pictures are kept in memory
        return np.concatenate([_average(some, factor) for _, some in x.chunks()])
    n, channels, height, width = x.shape
    if x.dtype != np.uint8:
        blocks = x.reshape(n, channels, height // factor, factor, width // factor, factor)
        mean: np.ndarray = blocks.mean((3, 5), dtype=np.float64).astype(x.dtype)
        return mean
    total = np.zeros((n, channels, height // factor, width // factor), np.uint32)
    for i in range(factor):  # pixel by pixel of the blocks: several times faster than a sum over two axes, same bits
        for j in range(factor):
            total += x[:, :, i::factor, j::factor]
    rounded: np.ndarray = ((total + factor * factor // 2) // (factor * factor)).astype(np.uint8)
    return rounded
