"""`Samples`: a data set before it is split over clients, as every loader returns it; and the rules for users' arrays.

There is one set of rules and checks for every way to pass data. Bytes (uint8) are pictures and stay bytes, in the order
(n, channels, height, width). Other whole numbers become int64 (token ids for an embedding), booleans 0.0 and 1.0,
floats keep their precision. Whole-number targets are classes 0, 1, 2, ... where there is one per row; floating targets
are for regression. Values that cannot be trained on are refused.
"""

from __future__ import annotations

import hashlib
import numbers
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from ..errors import UserError
from ..utils.checked_fields import require_whole
from ..utils.pages import read_once
from ..utils.random import rng
from .augment import Augmentation
from .on_disk import OnDisk, TensorOnDisk, on_disk
from .splits import Rows, by_owner, labelled

MOST_CLASSES = 1000
"""More classes than this, and than samples, are an error unless their number is given."""


class Converted(NamedTuple):
    """Inputs and targets that were checked; `classes` is None for regression."""

    x: np.ndarray | OnDisk
    y: np.ndarray
    x_test: np.ndarray | OnDisk | None
    y_test: np.ndarray | None
    classes: int | None


def convert(
    x: Any, y: Any, test: tuple[Any, Any] | None, name: str, classes: int | None = None, known: int = 0
) -> Converted:
    """Convert a training and a test set by the rules above; a test set of no rows counts as none.

    Args:
        classes: their number; None counts them (at least `known`), and refuses an unlikely number.
    """
    x, y = _pair(x, y, f"data {name}: ")
    if not len(x):
        raise UserError(f"data {name}: expected at least one sample, found none")
    x_test = y_test = None
    if test is not None:
        if not isinstance(test, tuple | list) or len(test) != 2 or test[0] is None or test[1] is None:
            raise UserError(f"data {name}: a test set needs both inputs and targets: test=(x_test, y_test)")
        x_test, y_test = _pair(*test, f"data {name}: test set: ")
    if x_test is None or not len(x_test):
        x_test = y_test = None
    for what, a, b in (("inputs", x, x_test), ("targets", y, y_test)):
        if b is not None and (a.shape[1:] != b.shape[1:] or _family(a) != _family(b)):
            raise UserError(
                f"data {name}: expected {what} of one kind, found {a.dtype} of shape {a.shape[1:]} for training and "
                f"{b.dtype} of shape {b.shape[1:]} for testing; convert one of them"
            )
    if classes is not None:
        require_whole(f"data {name}: classes", classes, 1)
    if classes is not None and y.dtype.kind == "f" and y.ndim == 1:
        y, y_test = _labels(y, name, classes), None if y_test is None else _labels(y_test, name, classes)
    if labelled(y):
        high = max(int(a.max()) for a in (y, y_test) if a is not None)
        if classes is None:
            classes = max(known, high + 1)
            if classes > max(known, MOST_CLASSES, len(y)):
                raise UserError(
                    f"data {name}: expected class labels 0, 1, 2, ..., found {high} with {len(y)} samples; number your "
                    f"classes from 0, or set classes={classes} (--set data.classes={classes}) if there are that many"
                )
            if not known and min(int(a.min()) for a in (y, y_test) if a is not None) == 1:
                warnings.warn(
                    f"data {name}: no sample has class 0: labels are 1 to {high}, so {classes} classes are counted; "
                    f"write y - 1, or classes={classes} (--set data.classes={classes}) if that is meant",
                    stacklevel=4,
                )
        for part, a in (("training", y), ("test", y_test)):
            check_labels(name, part, a, classes)
    return Converted(x, y, x_test, y_test, classes)


def _pair(x: Any, y: Any, where: str) -> tuple[np.ndarray | OnDisk, np.ndarray]:
    x, y = _inputs(x, where), _targets(y, where)
    if len(x) != len(y):
        raise UserError(f"{where}{len(x)} inputs but {len(y)} targets; expected one target per input")
    return x, y


def _family(a: np.ndarray | OnDisk) -> str:
    return "bytes" if a.dtype == np.uint8 else a.dtype.kind


def _labels(y: np.ndarray, name: str, classes: int) -> np.ndarray:
    """Convert floats that the user calls classes to whole numbers."""
    bad = np.flatnonzero(y != np.floor(y))
    if len(bad):
        raise UserError(
            f"data {name}: expected whole numbers as targets with classes={classes}, found {y[bad[0]]:g} in row "
            f"{bad[0]} ({len(bad)} in all); leave classes out for regression"
        )
    return y.astype(np.int64)


def check_labels(name: str, part: str, y: np.ndarray | None, classes: int | None) -> None:
    """Raise for a label that is not one of the classes, with its row."""
    if y is None or classes is None:
        return
    bad = np.flatnonzero((y < 0) | (y >= classes))
    if len(bad):
        raise UserError(
            f"data {name}: labels must lie in 0..{classes - 1}, found {y[bad[0]]} in row {bad[0]} of the {part} set "
            f"({len(bad)} in all)"
        )


def array(given: Any, what: str) -> np.ndarray:
    """Return an array, a tensor or a list as a contiguous array in native byte order; the same memory if possible."""
    try:
        if hasattr(given, "detach"):  # a tensor, without importing torch
            given = given.detach().cpu()
            given = (given.float() if str(given.dtype) == "torch.bfloat16" else given).numpy()
        a = np.asarray(given)
    except (TypeError, ValueError, RuntimeError) as error:
        reason = (str(error).splitlines() or [""])[0]
        raise UserError(f"{what} cannot be read as an array ({reason}); expected rows of one shape") from None
    a = a if a.dtype.isnative else a.astype(a.dtype.newbyteorder("="))
    return a if a.flags.c_contiguous else a.copy(order="C")


def _inputs(given: Any, where: str) -> np.ndarray | OnDisk:
    found = on_disk(given)
    x = array(given, f"{where}inputs") if found is None else found
    if x.dtype.kind not in "uifb" or x.ndim < 1:
        raise UserError(f"{where}expected numeric inputs, one row per sample, found {x.dtype} of shape {x.shape}")
    if x.dtype == np.uint8:
        return _pictures(x)
    return x.astype(np.float32) if x.dtype.kind == "b" else _numbers(x, f"{where}inputs")


def _pictures(x: np.ndarray | OnDisk) -> np.ndarray | OnDisk:
    """Return bytes in the order (n, channels, height, width) where they are pictures."""
    last = x.ndim == 4 and x.shape[-1] in (1, 3) and x.shape[1] not in (1, 3)
    if isinstance(x, OnDisk):
        return replace(x, layout="last" if last else "grey") if last or x.ndim == 3 else x
    if last:
        return np.ascontiguousarray(x.transpose(0, 3, 1, 2))
    return x[:, None] if x.ndim == 3 else x


def _targets(given: Any, where: str) -> np.ndarray:
    y = array(given, f"{where}targets")
    if y.dtype.kind not in "uifb" or y.ndim < 1:
        raise UserError(
            f"{where}expected numbers as targets, one row per sample, found {y.dtype} of shape {y.shape}; number your "
            "classes from 0"
        )
    y = np.asarray(_numbers(y, f"{where}targets"))
    if y.dtype.kind == "i" and y.shape[1:] == (1,):
        raise UserError(f"{where}whole-number targets of shape {y.shape}: write y[:, 0] for classes, or use floats")
    if labelled(y) and y.size and y.min() < 0:
        row = int(np.argmin(y))
        raise UserError(f"{where}class labels must be 0, 1, 2, ..., found {y[row]} in row {row}")
    return y


def _numbers(a: np.ndarray | OnDisk, what: str) -> np.ndarray | OnDisk:
    """Return whole numbers as int64 and finite floats as they are; raise for others. Rows on disk are read once."""
    if a.dtype.kind != "f":
        for _, some in chunks(a) if a.dtype == np.uint64 else ():
            if some.size and some.max() > np.iinfo(np.int64).max:
                raise UserError(f"{what} must fit into 64 bits with a sign, found {some.max()}")
        return a if a.dtype == np.int64 else a.astype(np.int64)
    a = a.astype(np.float64) if a.dtype.itemsize > 8 else a
    bad: list[int] = []
    for start, some in () if isinstance(a, OnDisk) and a.checked else chunks(a):
        if some.size and not (np.isfinite(some.min()) and np.isfinite(some.max())):  # min and max propagate NaN
            bad += (start + np.flatnonzero(~np.isfinite(some.reshape(len(some), -1)).all(1))).tolist()
    if bad:
        found = f"row {bad[0]} is not ({len(bad)} in all)"
        raise UserError(f"{what} must be finite; {found}; leave such rows out or fill them in")
    return replace(a, checked=True) if isinstance(a, OnDisk) else a


def chunks(a: np.ndarray | OnDisk) -> Iterator[tuple[int, np.ndarray]]:
    """Yield all rows with the number of the first: an array at once, rows on disk some megabytes at a time."""
    return a.chunks() if isinstance(a, OnDisk) else iter([(0, a)])


def hold_out(y: np.ndarray, fraction: float, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return rows to train on and rows to test on: the same fraction of every class, always the same rows."""
    if not 0 < fraction < 1:
        raise UserError(f"data {name}: holdout must lie between 0 and 1, found {fraction}")
    order = rng(0, "holdout").permutation(len(y))
    if labelled(y):
        order = order[np.argsort(y[order], kind="stable")]
    mark = np.floor((np.arange(len(y)) + 1) * fraction) > np.floor(np.arange(len(y)) * fraction)
    if mark.all() or not mark.any():
        raise UserError(f"data {name}: {len(y)} samples cannot be divided with holdout = {fraction}")
    return np.sort(order[~mark]), np.sort(order[mark])


def owner_ids(given: Any, n: int, name: str) -> np.ndarray:
    """Return one client id per row: numbers or text, from an array, a tensor or a list."""
    ids = array(given, f"data {name}: client ids")
    if ids.shape != (n,):
        raise UserError(f"data {name}: expected one client id per row ({n}), found shape {ids.shape}")
    if ids.dtype == object and all(isinstance(a, str) for a in ids):
        ids = ids.astype(str)
    if ids.dtype.kind not in "iufUS" or (ids.dtype.kind == "f" and not np.isfinite(ids).all()):
        raise UserError(
            f"data {name}: client ids must be all numbers or all text, none missing, found {ids.dtype}"
            + ("; give a list of masks, one per client" if ids.dtype.kind == "b" else "")
        )
    return ids


def own_test_rows(given: Any, clients: Rows | np.ndarray, n: int, name: str) -> Rows:
    """Return every client's rows of a test set of n, which are given as `clients` may be, and in the order of these.

    Args:
        clients: the rows of every client, or one client id per row.
    """
    rows = rows_or_ids(given, n, name)
    ids = None if isinstance(clients, Rows) else np.unique(clients)
    if not isinstance(rows, Rows):
        if ids is None:
            raise UserError(f"data {name}: client_test: expected a list of test rows per client, as clients, found ids")
        rows = by_owner(rows, ids)
    m = len(clients) if ids is None else len(ids)
    if len(rows) != m or not len(rows.indices):
        has = f"{len(rows)} lists" if len(rows) != m else "no row of any client"
        raise UserError(f"data {name}: client_test: expected test rows of {m} clients, found {has}")
    if rows.indices.min() < 0 or rows.indices.max() >= n:
        raise UserError(f"data {name}: client_test: expected rows 0..{n - 1} of the test set, found others")
    return rows


def rows_or_ids(given: Any, n: int, name: str) -> Rows | np.ndarray:
    """Return the rows of every client, from row numbers or a boolean mask per client; of one id per row, these ids."""
    wanted = f"data {name}: clients must be a list of row numbers (or of boolean masks), or one id per row"
    if isinstance(given, Rows):
        return given
    if isinstance(given, str | bytes | Mapping):
        raise UserError(f"{wanted}; found {type(given).__name__}")
    if hasattr(given, "ndim") and (given.ndim != 1 or str(given.dtype) != "object"):
        given = array(given, f"data {name}: clients")
        if given.ndim == 1:
            return owner_ids(given, n, name)
    try:
        each = list(given)
    except TypeError:
        raise UserError(f"{wanted}; found {type(given).__name__}") from None
    if each and (isinstance(each[0], str | bytes | numbers.Number | None) or getattr(each[0], "ndim", 1) == 0):
        return owner_ids(each, n, name)
    return Rows.of(_rows(rows, i, n, name) for i, rows in enumerate(each))


def _rows(given: Any, client: int, n: int, name: str) -> np.ndarray:
    """Return row numbers of one client, from row numbers or a mask."""
    rows = array(given, f"data {name}: client {client}: row numbers")
    if rows.dtype.kind == "b" and rows.shape == (n,):
        return np.flatnonzero(rows)
    if rows.ndim != 1 or (rows.dtype.kind not in "iu" and rows.size):
        raise UserError(
            f"data {name}: client {client}: expected whole row numbers or a mask of {n} booleans, found "
            f"{rows.dtype} of shape {rows.shape}"
        )
    return rows.astype(np.int64, copy=False)


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
        for row, ids, x in (("row", self.owner, self.x), ("test row", self.owner_test, self.x_test)):
            if ids is not None and (x is None or len(ids) != len(x)):
                rows = 0 if x is None else len(x)
                raise UserError(f"data {self.name}: expected one client id per {row} ({rows}), found {len(ids)}")
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
                for _, some in chunks(a):
                    for piece in read_once(some):
                        total.update(piece)
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
        return np.asarray(blocks.mean((3, 5), dtype=np.float64).astype(x.dtype))
    total = np.zeros((n, channels, height // factor, width // factor), np.uint32)
    for i in range(factor):  # pixel by pixel of the blocks: several times faster than a sum over two axes, same bits
        for j in range(factor):
            total += x[:, :, i::factor, j::factor]
    return np.asarray(((total + factor * factor // 2) // (factor * factor)).astype(np.uint8))
