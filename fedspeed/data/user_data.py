"""Your own data: arrays, `.npz`/`.npy` files, a torch `Dataset`, a Hugging Face dataset; with your client ids if any.

Each function returns `Samples`; `fedspeed.data.federate(samples, split=..., clients=...)` splits them. A folder of
pictures is in `images.py`. By name, in a config or on the command line: `arrays`, `images`, `huggingface`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import UserError
from .augment import Augmentation
from .on_disk import ArrowColumn, OnDisk, header
from .samples import Progress, Samples, convert, hold_out, owner_ids, silent

NAMES = ("x", "y", "x_test", "y_test", "client", "client_test")
"""Arrays in a `.npz` file or a folder of `.npy` files."""
LARGE = 2**28
"""Bytes from which inputs in `.npy` files stay on disk; smaller ones are read once, which makes batches faster."""


def own_augmentation(shape: Sequence[int]) -> Augmentation:
    """Return 0.5 / 0.5 per channel for pictures of unknown kind; if asked for, flip and crop padded by 1/8 of the side.

    That is the paper's padding: 4 at 32 x 32, 8 at 64 x 64. A mirrored digit or letter has another meaning, so nothing
    is augmented unless the user sets `augment="paper"`. Anything but pictures (three axes) is used as it is.
    """
    if len(shape) != 3:
        return Augmentation(usual="none")
    half = (0.5,) * shape[0]
    return Augmentation(half, half, padding=shape[1] // 8, flip=True, usual="none")


def from_arrays(
    x: Any,
    y: Any,
    x_test: Any = None,
    y_test: Any = None,
    *,
    clients: Any = None,
    test: tuple[Any, Any] | None = None,
    holdout: float = 0.2,
    classes: int | None = None,
    name: str = "arrays",
    labels: tuple[str, ...] = (),
    owner: Any = None,
    test_clients: Any = None,
) -> Samples:
    """Return samples from arrays, to be split by name; `Federated.from_arrays` takes a split of your own.

    Bytes are pictures, other whole numbers stay whole (token ids), floats are used as they are; whole-number targets
    are classes, floating ones regression. NaN, Inf and other values that cannot be trained on are refused.

    Args:
        x, y: training inputs and targets. Pictures may be (n, h, w), (n, h, w, channels) or (n, channels, h, w).
        x_test, y_test: the test set, also as `test=(x_test, y_test)`.
        clients: the client id of every row (numbers or text), for `split="natural"`; `owner` is its old name.
        holdout: without a test set, this fraction of every class is set aside as one, always the same rows; 0: none.
        classes: their number; by default the largest label plus one.
        labels: names of the classes.
        test_clients: the client id of every row of the test set, for `client_test="own"`; rows that `holdout` sets
            aside keep theirs.

    Example:
        >>> data = from_arrays(np.zeros((10, 28, 28), "uint8"), np.arange(10) % 2, clients=list("aabbccddee"))
        >>> data.x.shape, data.x_test.shape, data.classes
        ((8, 1, 28, 28), (2, 1, 28, 28), 2)
    """
    if x_test is not None or y_test is not None:
        if test is not None:
            raise UserError(f"data {name}: expected one test set, found test= beside x_test and y_test; leave one out")
        test = (x_test, y_test)
    if owner is not None and clients is not None:
        raise UserError(f"data {name}: clients= and its old name owner=: expected one of them; leave owner out")
    found = convert(x, y, test, name, classes, known=len(labels))
    ids = owner if clients is None else clients
    ids = None if ids is None else owner_ids(ids, len(found.x), name)
    tests = 0 if found.x_test is None else len(found.x_test)
    tested = None if test_clients is None else owner_ids(test_clients, tests, f"{name}: test set")
    if found.x_test is None and holdout:
        train, held = hold_out(found.y, holdout, name)
        found = found._replace(x=found.x[train], y=found.y[train], x_test=found.x[held], y_test=found.y[held])
        ids, tested = (None, None) if ids is None else (ids[train], ids[held])
    augmentation = own_augmentation(found.x.shape[1:] if found.x.dtype == np.uint8 else ())
    return Samples(name, *found, ids, augmentation, labels, tested)


def arrays(
    holdout: float = 0.2, classes: int = 0, mapped: bool | None = None, *, data_dir: str | Path | None = None
) -> Samples:
    """Read a `.npz` file, or a folder of `.npy` files: x, y, and any of x_test, y_test, client and client_test.

    The last two are the client ids of training and of test rows. Floats are read as float32.

    Large inputs in `.npy` files stay on disk, and may be larger than memory. An array may be cut into shards,
    `x-000.npy`, `x-001.npy` and so on.

    Args:
        holdout: the fraction of every class set aside as test set where the file has none.
        classes: their number; 0 takes the largest label plus one.
        mapped: leave the inputs in a folder on disk; by default if they are larger than `LARGE`.
        data_dir: the file or the folder.
    """
    if data_dir is None:
        raise UserError("data arrays: give their file with data_dir (--data-dir FILE.npz)")
    path = Path(data_dir).expanduser()
    try:
        if path.is_dir():
            found = _folder(path, mapped)
        else:
            with open(path, "rb") as file:
                stored = np.load(file, allow_pickle=False)
                if isinstance(stored, np.ndarray):
                    raise UserError(f"data arrays: {path} is a single array; put x.npy and y.npy into a folder")
                found = {n: stored[n] for n in NAMES if n in stored}
    except FileNotFoundError:
        raise UserError(f"data arrays: found nothing at {path}") from None
    except UserError:
        raise
    except Exception as error:  # numpy raises many kinds for a damaged or a pickled file
        why = f"{path} as plain arrays, .npz or a folder of .npy files without pickled objects"
        raise UserError(f"data arrays: cannot read {why} ({type(error).__name__}); write it with np.savez") from error
    missing = [n for n in ("x", "y") if n not in found]
    if missing:
        raise UserError(
            f"data arrays: {path} has no array {missing[0]!r}; expected x, y [x_test, y_test, client, client_test]"
        )
    ids, tested = found.pop("client", None), found.pop("client_test", None)
    with np.errstate(over="ignore"):  # a value that does not fit becomes Inf, which is refused
        found = {n: a.astype(np.float32) if a.dtype.kind == "f" else a for n, a in found.items()}
    return from_arrays(
        **found, clients=ids, test_clients=tested, holdout=holdout, classes=classes or None, name=path.stem
    )


def _folder(path: Path, mapped: bool | None) -> dict[str, Any]:
    """Return the arrays of a folder: large inputs on disk, anything else (and inputs in Fortran order) in memory."""
    found: dict[str, Any] = {}
    lengths: dict[str, list[int]] = {}
    for name in NAMES:
        files = _shards(path, name)
        headers = [header(file) for file in files]
        lengths[name] = [len(a) for a in headers] if len(files) > 1 else []
        stays = sum(a.nbytes for a in headers) > LARGE if mapped is None else mapped
        if files:
            each = OnDisk.files(files) if len(files) > 1 or headers[0].flags.c_contiguous else headers[0]
            found[name] = each if stays and name.startswith("x") else np.array(each)
    for x, other in (("x", "y"), ("x", "client"), ("x_test", "y_test")):
        if lengths[x] and lengths[other] and lengths[x] != lengths[other]:
            raise UserError(
                f"data arrays: {path}: expected shards of {other} with as many rows as those of {x} {lengths[x]}, "
                f"found {lengths[other]}; write both in one order"
            )
    return found


def _shards(path: Path, name: str) -> list[Path]:
    """Return the file of an array, or its shards in the order of their numbers."""
    named = [(re.fullmatch(rf"{name}-(\d+)", file.stem), file) for file in path.glob(f"{name}-*.npy")]
    shards = sorted((int(match[1]), file) for match, file in named if match)
    numbers, whole = [i for i, _ in shards], path / f"{name}.npy"
    if shards and whole.exists():
        raise UserError(f"data arrays: expected {whole} or shards of it, found both; take one of them away")
    if numbers not in ([*range(len(numbers))], [*range(1, len(numbers) + 1)]):
        raise UserError(
            f"data arrays: expected the shards {name}-000.npy, {name}-001.npy, ... of {path} without a gap, found "
            f"numbers {', '.join(map(str, numbers))}; number them from 0, or put the missing ones back"
        )
    return [file for _, file in shards] or [whole] * whole.exists()


def from_torch(
    dataset: Any,
    test: Any = None,
    *,
    clients: Any = None,
    holdout: float = 0.2,
    classes: int | None = None,
    name: str = "torch",
    progress: Progress | None = None,
    owner: Any = None,
) -> Samples:
    """Return samples from a torch `Dataset` of (input, target) pairs, read once from front to back.

    Leave random augmentation out of it (this library draws its own, one batch at a time) and return bytes where you
    can: PIL pictures and `uint8` tensors stay bytes. Arguments as in `from_arrays`.
    """
    parts = [_stack(part, name, progress or silent, tuple) for part in (dataset, test) if part is not None]
    held = parts[1] if len(parts) == 2 else None
    return from_arrays(*parts[0], test=held, clients=clients, holdout=holdout, classes=classes, name=name, owner=owner)


def _stack(rows: Any, name: str, progress: Progress, pair: Callable[[Any], Any]) -> tuple[np.ndarray, np.ndarray]:
    """Return the inputs and targets of a dataset; `pair` takes both from a row."""
    xs: list[np.ndarray] = []
    ys: list[np.ndarray] = []
    total = len(rows)
    for i in range(total):
        x, y = pair(rows[i])
        xs.append(np.asarray(x))
        ys.append(np.asarray(y))
        if xs[-1].shape != xs[0].shape:
            raise UserError(f"data {name}: sample {i} has shape {xs[-1].shape}, sample 0 {xs[0].shape}; resize them")
        if i % 1000 == 0 or i == total - 1:
            progress(f"{name}: reading", i + 1, total)
    if not xs:
        raise UserError(f"data {name}: the dataset is empty")
    return np.stack(xs), np.stack(ys)


def from_hugging_face(
    dataset: Any,
    *,
    image: str = "",
    label: str = "",
    client: str = "",
    holdout: float = 0.2,
    mapped: bool = False,
    name: str = "huggingface",
    progress: Progress | None = None,
) -> Samples:
    """Return samples from a Hugging Face `DatasetDict` (its `train` and `test` or `validation`) or `Dataset`.

    Args:
        image, label: columns; by default the only column of pictures and the only one of class labels.
        client: the column with the client id of every row, for `split="natural"`; where the test part has it too, for
            `client_test="own"`.
        mapped: leave the inputs in the dataset's Arrow files, for data larger than memory; pictures are then decoded in
            every batch.
    """
    parts = dataset if isinstance(dataset, dict) else {"train": dataset}
    train = parts.get("train", dataset)
    if isinstance(train, dict):
        raise UserError(f"data {name}: expected a part 'train', found {', '.join(dataset)}")
    test = next((parts[key] for key in ("test", "validation", "valid") if key in parts), None)
    kinds = {column: type(feature).__name__ for column, feature in train.features.items()}
    image = _column(image, "Image", "image", kinds, name)
    label = _column(label, "ClassLabel", "label", kinds, name)
    if client and client not in kinds:
        raise UserError(f"data {name}: no column {client!r}; there are {', '.join(kinds)}")
    feature = train.features[image]
    dtype = feature.dtype if hasattr(feature, "shape") else None  # else its lists of bytes would become int64

    def arrays_of(part: Any) -> tuple[Any, np.ndarray]:
        if mapped:
            return _arrow(part, image, label, name, progress or silent)
        return _stack(part, name, progress or silent, lambda row: (np.asarray(row[image], dtype), row[label]))

    x, y = arrays_of(train)
    held = None if test is None else arrays_of(test)
    ids, tested = (
        np.asarray(part[client]) if client and part is not None and client in part.features else None
        for part in (train, test)
    )
    labels: Iterable[str] = getattr(train.features[label], "names", None) or ()
    return from_arrays(
        x, y, test=held, clients=ids, test_clients=tested, holdout=holdout, name=name, labels=tuple(labels)
    )


def _arrow(rows: Any, image: str, label: str, name: str, progress: Progress) -> tuple[OnDisk, np.ndarray]:
    """Return the inputs of a dataset on disk, and its targets; rows whose shape is not declared are read once."""
    if not len(rows):
        raise UserError(f"data {name}: the dataset is empty")
    x = OnDisk(ArrowColumn(rows, image))
    if not hasattr(rows.features[image], "shape"):
        for start, some in x.chunks():
            progress(f"{name}: reading", start + len(some), len(x))
        x = x.astype(np.asarray(rows[0][image]).dtype)
    return x, np.asarray(rows.select_columns([label])[:][label])


def _column(given: str, kind: str, option: str, kinds: dict[str, str], name: str) -> str:
    found = [given] if given in kinds else [c for c, k in kinds.items() if k == kind and not given]
    if len(found) != 1:
        raise UserError(
            f"data {name}: {f'no column {given!r}' if given else f'{len(found)} columns of type {kind}'}; set "
            f"{option}=COLUMN, one of {', '.join(kinds)}"
        )
    return found[0]


def huggingface(
    path: str = "",
    config: str = "",
    image: str = "",
    label: str = "",
    client: str = "",
    holdout: float = 0.2,
    mapped: bool = False,
    *,
    data_dir: str | Path | None = None,
    progress: Progress | None = None,
) -> Samples:
    """Load a Hugging Face dataset by its name on the hub (`path`), or saved on disk (`data_dir`); extra `fedspeed[hf]`.

    Args:
        path, config: as in `datasets.load_dataset`.
        image, label, client, holdout, mapped: as in `from_hugging_face`.
    """
    try:
        import datasets
    except ImportError as error:
        raise UserError("data huggingface: needs the package `datasets`; pip install 'fedspeed[hf]'") from error
    if bool(path) == (data_dir is not None):
        raise UserError("data huggingface: give either path (a name on the hub) or data_dir (saved on disk)")
    try:
        found = datasets.load_from_disk(str(data_dir)) if data_dir else datasets.load_dataset(path, config or None)
    except Exception as error:  # the package raises dozens of kinds
        raise UserError(
            f"data huggingface: cannot load {path or data_dir} ({type(error).__name__}: {error})"
        ) from error
    name = path or Path(str(data_dir)).name
    return from_hugging_face(
        found, image=image, label=label, client=client, holdout=holdout, mapped=mapped, name=name, progress=progress
    )
