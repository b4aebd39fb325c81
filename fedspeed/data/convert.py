"""Conversion of users' arrays: one set of rules and checks for every way to pass data.

Bytes (uint8) are pictures and stay bytes, in the order (n, channels, height, width). Other whole numbers become int64
(token ids for an embedding), booleans 0.0 and 1.0, floats keep their precision. Whole-number targets are classes 0, 1,
2, ... where there is one per row; floating targets are for regression. Values that cannot be trained on are refused.
"""

from __future__ import annotations

import numbers
import warnings
from collections.abc import Mapping, Sized
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from ..errors import UserError
from ..utils.params import require_whole
from ..utils.random import rng
from .on_disk import OnDisk, on_disk
from .splits import Rows, by_owner

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
    x_test, y_test = (None, None) if test is None else _pair(*_two(test, name), f"data {name}: test set: ")
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


def _two(test: Any, name: str) -> tuple[Any, Any]:
    if not isinstance(test, tuple | list) or len(test) != 2 or test[0] is None or test[1] is None:
        raise UserError(f"data {name}: a test set needs both inputs and targets: test=(x_test, y_test)")
    return test[0], test[1]


def _pair(x: Any, y: Any, where: str) -> tuple[np.ndarray | OnDisk, np.ndarray]:
    x, y = _inputs(x, where), _targets(y, where)
    if len(x) != len(y):
        raise UserError(f"{where}{len(x)} inputs but {len(y)} targets; expected one target per input")
    return x, y


def _family(a: np.ndarray | OnDisk) -> str:
    return "bytes" if a.dtype == np.uint8 else a.dtype.kind


def labelled(y: np.ndarray) -> bool:
    """Return whether targets are class labels: one whole number per row."""
    return y.dtype.kind in "ui" and y.ndim == 1


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
    if x.dtype.kind == "b":
        return x.astype(np.float32)
    return _numbers(x, f"{where}inputs") if isinstance(x, np.ndarray) else _numbers_on_disk(x, f"{where}inputs")


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
    y = _numbers(y, f"{where}targets")
    if y.dtype.kind == "i" and y.shape[1:] == (1,):
        raise UserError(f"{where}whole-number targets of shape {y.shape}: write y[:, 0] for classes, or use floats")
    if labelled(y) and y.size and y.min() < 0:
        row = int(np.argmin(y))
        raise UserError(f"{where}class labels must be 0, 1, 2, ..., found {y[row]} in row {row}")
    return y


def _numbers(a: np.ndarray, what: str) -> np.ndarray:
    """Return whole numbers as int64 and finite floats as they are; raise for others."""
    if a.dtype.kind != "f":
        if a.dtype == np.uint64 and a.size and a.max() > np.iinfo(np.int64).max:
            raise UserError(f"{what} must fit into 64 bits with a sign, found {a.max()}")
        return a.astype(np.int64, copy=False)
    a = a.astype(np.float64) if a.dtype.itemsize > 8 else a
    if a.size and not _finite(a):
        raise _not_finite(what, np.flatnonzero(~np.isfinite(a.reshape(len(a), -1)).all(1)))
    return a


def _numbers_on_disk(a: OnDisk, what: str) -> OnDisk:
    """Do the same for rows on disk, which are read once for it."""
    if a.dtype.kind != "f":
        for _, some in a.chunks() if a.dtype == np.uint64 else ():
            _numbers(some, what)
        return a.astype(np.int64)
    a = a.astype(np.float64) if a.dtype.itemsize > 8 else a
    bad: list[int] = []
    for start, some in () if a.checked else a.chunks():
        if some.size and not _finite(some):
            bad += (start + np.flatnonzero(~np.isfinite(some.reshape(len(some), -1)).all(1))).tolist()
    if bad:
        raise _not_finite(what, np.array(bad))
    return replace(a, checked=True)


def _finite(a: np.ndarray) -> bool:
    return bool(np.isfinite(a.min()) and np.isfinite(a.max()))  # min and max propagate NaN


def _not_finite(what: str, bad: np.ndarray) -> UserError:
    found = f"row {bad[0]} is not ({len(bad)} in all)"
    return UserError(f"{what} must be finite; {found}; leave such rows out or fill them in")


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


def client_rows(given: Any, n: int, name: str) -> Rows:
    """Return the rows of every client, from row numbers or a boolean mask per client, or from one id per row."""
    found = _lists_or_ids(given, n, name)
    return by_owner(found) if isinstance(found, np.ndarray) else found


def own_test_rows(given: Any, clients: Any, n: int, x_test: Sized | None, name: str) -> Rows:
    """Return every client's rows of the test set, in the forms of `client_rows`; clients are in the order of `clients`.

    Args:
        clients: the clients of the n training rows.
    """
    if x_test is None:
        raise UserError(f"data {name}: client_test: expected a test set to take the clients' parts from, found none")
    found, owned = _lists_or_ids(given, len(x_test), name), _lists_or_ids(clients, n, name)
    ids = np.unique(owned) if isinstance(owned, np.ndarray) else None
    if isinstance(found, np.ndarray) and ids is None:
        raise UserError(f"data {name}: client_test: expected a list of test rows per client, as clients, found ids")
    rows = by_owner(found, ids) if isinstance(found, np.ndarray) else found
    m = len(owned) if ids is None else len(ids)
    if len(rows) != m or not len(rows.indices):
        has = f"{len(rows)} lists" if len(rows) != m else "no row of any client"
        raise UserError(f"data {name}: client_test: expected test rows of {m} clients, found {has}")
    if rows.indices.min() < 0 or rows.indices.max() >= len(x_test):
        raise UserError(f"data {name}: client_test: expected rows 0..{len(x_test) - 1} of the test set, found others")
    return rows


def _lists_or_ids(given: Any, n: int, name: str) -> Rows | np.ndarray:
    """Return the rows of every client, or if one id per row was given, these ids."""
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
