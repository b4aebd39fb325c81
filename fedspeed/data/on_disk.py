"""Data larger than memory: rows stay in their files, and the process that needs a batch reads it.

Files are read by position, not mapped: a mapped page counts as memory of every process that has touched it, and a
mapped file that is cut short ends the process (SIGBUS) instead of raising an error.
"""

from __future__ import annotations

import math
import mmap
import os
import pickle
import weakref
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from ..errors import UserError

CHUNK = 2**24
"""Bytes that are read at a time where all rows are needed, for a digest for example."""
ALIGN = 64
"""Bytes to which a batch is aligned, as torch aligns its own: at other addresses kernels may give other bits."""
OPEN = 128
"""Most files that a process keeps open."""


class Stamp(NamedTuple):
    """Size of a file, and the time of its last change."""

    size: int
    changed: int


class Part(NamedTuple):
    """A file with rows one after the other: where they begin, and how many they are."""

    path: str
    offset: int
    rows: int
    stamp: Stamp


class Files:
    """Rows in files, as one array. A file must keep its size and its time (of the last change) while it is in use.

    A deleted file is read as long as it is open; a new process cannot open it.
    """

    def __init__(self, parts: Sequence[Part], shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self.parts, self.dtype = tuple(parts), dtype
        self.ends = np.cumsum([part.rows for part in parts])
        self.shape = (int(self.ends[-1]), *shape)
        self._begin()

    def _begin(self) -> None:
        self._handles: dict[int, int] = {}
        weakref.finalize(self, _close, self._handles)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_handles"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state
        self._begin()
        for i in range(min(OPEN, len(self.parts))):  # at once: a worker that cannot read them must not begin
            self._open(i)

    def _open(self, i: int) -> int:
        """Return the handle of a file, which must be the one that the run began with."""
        if i not in self._handles:
            try:
                handle = os.open(self.parts[i].path, os.O_RDONLY)
            except OSError as error:
                raise _gone(self.parts[i].path, error.strerror) from None
            while len(self._handles) >= OPEN:
                os.close(self._handles.pop(next(iter(self._handles))))
            self._handles[i] = handle
            self._check(i)
        return self._handles[i]

    def _check(self, i: int) -> None:
        """Raise if a file is not what it was when the data were loaded."""
        part, now = self.parts[i], _stamp(os.fstat(self._handles[i]))
        if now != part.stamp:
            os.close(self._handles.pop(i))
            raise _changed(part.path, part.stamp, now)

    def read(self, rows: np.ndarray) -> np.ndarray:
        """Return some rows; neighbours in a file are read together."""
        out = np.empty((len(rows), *self.shape[1:]), self.dtype)
        width = math.prod(self.shape[1:]) * self.dtype.itemsize
        if not out.size:
            return out
        if rows.min() < 0 or rows.max() >= self.shape[0]:
            raise IndexError(f"expected rows 0..{self.shape[0] - 1}, found {rows.min()}..{rows.max()}")
        raw = out.reshape(-1).view(np.uint8).data
        owner = np.searchsorted(self.ends, rows, side="right")
        cuts = (np.flatnonzero((np.diff(rows) != 1) | (np.diff(owner) != 0)) + 1).tolist()
        for a, b in zip([0, *cuts], [*cuts, len(rows)], strict=True):
            i = int(owner[a])
            first = int(rows[a]) - (int(self.ends[i]) - self.parts[i].rows)
            self._fill(i, raw[a * width : b * width], self.parts[i].offset + first * width)
        for i in set(owner.tolist()):  # after the reads: a change between them and this line is found too
            if i in self._handles:
                self._check(i)
        return out

    def _fill(self, i: int, left: memoryview, place: int) -> None:
        """Read bytes of a file to the end of a buffer."""
        handle = self._open(i)
        while len(left):
            try:
                count = os.preadv(handle, [left], place)
            except OSError as error:
                raise UserError(f"data: cannot read {self.parts[i].path} ({error.strerror}); see to its disk") from None
            if not count:
                self._check(i)
                raise UserError(f"data: {self.parts[i].path} ends early; put the whole file back")
            left, place = left[count:], place + count


class ArrowColumn:
    """A column of a Hugging Face dataset, whose Arrow files that package maps; pictures are decoded as they are read.

    Args:
        dataset: on disk, not in memory.
        column: of pictures, arrays, or lists of one length.
    """

    def __init__(self, dataset: Any, column: str) -> None:
        self.column, self.pictures = column, type(dataset.features[column]).__name__ == "Image"
        self.dataset = dataset.select_columns([column]).with_format(None if self.pictures else "arrow")
        self.files = {file["filename"]: _stamp(os.stat(file["filename"])) for file in dataset.cache_files}
        if not self.files:
            raise UserError(
                "data: mapped: expected a dataset on disk, found one in memory; write it with save_to_disk and read it "
                "with datasets.load_from_disk"
            )
        first = self.read(np.arange(1))
        self.shape, self.dtype = (len(dataset), *first.shape[1:]), first.dtype

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "dataset": pickle.dumps(self.dataset)}  # the names of its files, not their contents

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state
        for path in self.files:
            if not os.path.exists(path):
                raise _gone(path, "No such file or directory")
        self._check()
        self.dataset = pickle.loads(state["dataset"])

    def _check(self) -> None:
        """Raise if a file was changed: to read a map of one that was cut short ends the process."""
        for path, stamp in self.files.items():
            with suppress(FileNotFoundError):  # a map lives longer than the name of its file
                if _stamp(os.stat(path)) != stamp:
                    raise _changed(path, stamp, _stamp(os.stat(path)))

    def read(self, rows: np.ndarray) -> np.ndarray:
        """Return some rows."""
        self._check()
        if not len(rows):
            return np.empty((0, *self.shape[1:]), self.dtype)
        found = self.dataset[rows.tolist()]
        try:
            if self.pictures:
                return np.stack([np.asarray(picture) for picture in found[self.column]])
            return np.concatenate([_numbers(part) for part in found.column(self.column).chunks])
        except ValueError:
            raise UserError(
                f"data: column {self.column}: expected rows of one shape, found others among rows {rows.min()}.."
                f"{rows.max()}; resize or fill them"
            ) from None


def _numbers(part: Any) -> np.ndarray:
    """Return a piece of an Arrow column of arrays, lists or numbers as one array; raise ValueError for gaps."""
    from pyarrow.compute import list_value_length

    shape, part = [len(part)], getattr(part, "storage", part)
    while hasattr(part.type, "value_type"):
        length, *others = np.unique(list_value_length(part).to_numpy(zero_copy_only=False)).tolist()
        if others or part.null_count:
            raise ValueError
        shape, part = [*shape, length], part.flatten()
    if part.null_count:
        raise ValueError
    return np.asarray(part.to_numpy(zero_copy_only=False)).reshape(shape)


def _stamp(about: os.stat_result) -> Stamp:
    return Stamp(about.st_size, about.st_mtime_ns)


def _gone(path: str, reason: str | None) -> UserError:
    return UserError(
        f"data: cannot open {path} ({reason}); every worker reads the rows itself, so the file must stay at this place "
        f"during a run, with --backend ray on every node"
    )


def _changed(path: str, before: Stamp, now: Stamp) -> UserError:
    size = (
        f"{now.size:,} bytes, before {before.size:,}" if now.size != before.size else "another time of its last change"
    )
    return UserError(
        f"data: expected {path} as it was when the data were loaded, found it changed ({size}); put it back with "
        f"its time (cp -p) and resume the run"
    )


def _close(handles: dict[int, int]) -> None:
    while handles:
        os.close(handles.popitem()[1])


Source = Files | ArrowColumn
"""Rows of one shape in a file, or in several; it can be pickled, and the copy reads the files itself."""


@dataclass(frozen=True, eq=False, repr=False)
class OnDisk:
    """An array whose rows stay on disk: `x[rows]` chooses rows without reading them, `read` and `chunks` read.

    Args:
        source: the files, or the column of a table.
        casts: types to which rows are converted one after the other as they are read.
        layout: how pictures become (channels, height, width): "" as they are, "grey" from (height, width), "last" from
            (height, width, channels).
        rows: numbers of the chosen rows; None for all.
        checked: whether all values are known to be finite.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     np.save(f"{folder}/x.npy", np.arange(6.0).reshape(3, 2))
        ...     x = OnDisk.files([f"{folder}/x.npy"])[1:]
        ...     x.shape, x.read(np.array([1, 0])).tolist()
        ((2, 2), [[4.0, 5.0], [2.0, 3.0]])
    """

    source: Source
    casts: tuple[np.dtype[Any], ...] = ()
    layout: str = ""
    rows: np.ndarray | None = None
    checked: bool = False

    @classmethod
    def files(cls, paths: Sequence[str | Path]) -> OnDisk:
        """Make one array of the rows of `.npy` files, in this order; nothing is read but their headers."""
        found = [(str(path), header(Path(path))) for path in paths]
        if not found:
            raise UserError("data: expected at least one .npy file, found none")
        (first, like), parts = found[0], []
        for path, a in found:
            if a.ndim < 1 or not a.flags.c_contiguous:
                raise UserError(f"data: {path}: expected rows one after the other (C order); save a copy of the array")
            if (a.dtype, a.shape[1:]) != (like.dtype, like.shape[1:]):
                raise UserError(
                    f"data: {path}: expected rows as in {first} ({like.dtype} of shape {like.shape[1:]}), found "
                    f"{a.dtype} of shape {a.shape[1:]}; shards of an array have one type and one shape"
                )
            parts.append(_part(a))
        return cls(Files(parts, like.shape[1:], like.dtype))

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape as an array in memory would have it."""
        n, *rest = self.source.shape
        n = n if self.rows is None else len(self.rows)
        if self.layout == "grey":
            return (n, 1, *rest)
        return (n, rest[-1], *rest[:-1]) if self.layout == "last" else (n, *rest)

    @property
    def ndim(self) -> int:
        """Return the number of axes."""
        return len(self.shape)

    @property
    def dtype(self) -> np.dtype[Any]:
        """Return the type of rows as `read` returns them."""
        return self.casts[-1] if self.casts else self.source.dtype.newbyteorder("=")

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, chosen: Any) -> OnDisk:
        if isinstance(chosen, slice) and chosen == slice(None):
            return self
        numbers = np.arange(len(self)) if self.rows is None else self.rows
        return replace(self, rows=numbers[chosen])

    def astype(self, dtype: Any) -> OnDisk:
        """Return the same rows, converted when they are read."""
        return self if self.dtype == dtype else replace(self, casts=(*self.casts, np.dtype(dtype)))

    def read(self, rows: np.ndarray) -> np.ndarray:
        """Return some rows, by their numbers among the chosen ones."""
        a = self.source.read(rows if self.rows is None else self.rows[rows])
        a = a if a.dtype.isnative else a.astype(a.dtype.newbyteorder("="))
        with np.errstate(over="ignore"):  # a value that does not fit becomes Inf, which is refused
            for dtype in self.casts:
                a = a.astype(dtype)
        if self.layout:
            a = a[:, None] if self.layout == "grey" else np.ascontiguousarray(a.transpose(0, 3, 1, 2))
        return a

    def chunks(self) -> Iterator[tuple[int, np.ndarray]]:
        """Yield all rows, some megabytes at a time, each with the number of its first row."""
        step = max(1, CHUNK // max(1, math.prod(self.shape[1:]) * self.dtype.itemsize))
        for start in range(0, len(self), step):
            yield start, self.read(np.arange(start, min(start + step, len(self))))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        whole = self.read(np.arange(len(self)))
        return whole if dtype is None else whole.astype(dtype, copy=False)


class TensorOnDisk:
    """Rows on disk in the place of a tensor: `x[rows]` reads them and returns a tensor.

    Args:
        casts: types to which they are converted one after the other.
    """

    def __init__(self, array: OnDisk, device: torch.device | str = "cpu", casts: tuple[torch.dtype, ...] = ()) -> None:
        self.array, self.device, self.casts = array, torch.device(device), casts
        self.shape, self.ndim = torch.Size(array.shape), array.ndim
        self.dtype = casts[-1] if casts else torch.from_numpy(np.empty(0, array.dtype)).dtype

    def __len__(self) -> int:
        return len(self.array)

    def __getitem__(self, rows: Any) -> torch.Tensor:
        if isinstance(rows, slice):
            rows = np.arange(*rows.indices(len(self)))
        elif isinstance(rows, torch.Tensor):
            rows = rows.cpu().numpy()
        return self._tensor(self.array.read(np.asarray(rows)))

    def _tensor(self, read: np.ndarray) -> torch.Tensor:
        a = torch.from_numpy(read)
        for dtype in self.casts:
            a = a.to(dtype)
        return (a if a.data_ptr() % ALIGN == 0 else a.clone()).to(self.device)

    def chunks(self) -> Iterator[torch.Tensor]:
        """Yield all rows in order, some megabytes at a time."""
        for _, read in self.array.chunks():
            yield self._tensor(read)

    def is_floating_point(self) -> bool:
        """Return whether the values are floats."""
        return self.dtype.is_floating_point

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> TensorOnDisk:
        """Return the same rows, which become tensors on this device and of this type."""
        return TensorOnDisk(self.array, device, self.casts if dtype in (None, self.dtype) else (*self.casts, dtype))

    def float(self) -> TensorOnDisk:
        """Return the same rows as float32."""
        return self.to(self.device, torch.float32)

    def min(self) -> torch.Tensor:
        """Return the smallest value."""
        return torch.stack([a.min() for a in self.chunks()]).min()

    def max(self) -> torch.Tensor:
        """Return the largest value."""
        return torch.stack([a.max() for a in self.chunks()]).max()


def on_disk(given: Any) -> OnDisk | None:
    """Return what a user passed as rows on disk, if they are that: an `OnDisk`, or an array that NumPy maps.

    A map is in memory if it is private (`mmap_mode="c"`), or if its rows do not lie one after the other.
    """
    if isinstance(given, OnDisk):
        return given
    mapped = isinstance(given, np.memmap) and getattr(given, "_mmap", None) is not None and given.filename is not None
    if not mapped or given.mode == "c" or given.ndim < 1 or not given.flags.c_contiguous or given.dtype.hasobject:
        return None
    return OnDisk(Files([_part(given)], given.shape[1:], given.dtype))


def header(path: Path) -> np.memmap[Any, Any]:
    """Return a `.npy` file as NumPy maps it; arrays of Python objects are pickles, which are not read."""
    try:
        a = np.load(path, mmap_mode="r", allow_pickle=False)
    except FileNotFoundError:
        raise UserError(f"data: found nothing at {path}") from None
    except Exception as error:  # numpy raises many kinds for a damaged or a pickled file
        raise UserError(f"data: cannot read {path} as a plain array ({error}); save numbers with np.save") from error
    if not isinstance(a, np.memmap):
        raise UserError(f"data: {path}: expected a .npy file, found another kind; save the array with np.save")
    return a


def _part(a: np.memmap[Any, Any]) -> Part:
    """Return the place of a mapped array in its file; a slice of a map begins later than the map says."""
    if a.mode != "r":
        a.flush()  # what the program wrote is in the file, and its time does not change later
    whole = np.frombuffer(a._mmap, np.uint8)  # type: ignore[attr-defined]
    begin = a.offset - a.offset % mmap.ALLOCATIONGRANULARITY
    place, path = begin + a.ctypes.data - whole.ctypes.data, os.path.abspath(str(a.filename))
    try:
        return Part(path, place, len(a), _stamp(os.stat(path)))
    except OSError as error:
        raise _gone(path, error.strerror) from None
