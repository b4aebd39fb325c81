"""Your own data: arrays, `.npz`/`.npy` files, a torch `Dataset`, a Hugging Face dataset; with your client ids if any.

Each function returns `Samples`; `fedspeed.data.federate(samples, split=..., clients=...)` splits them. A folder of
pictures is in `images.py`. By name, in a config or on the command line: `arrays`, `images`, `huggingface`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import UserError
from .augment import Augmentation
from .convert import convert, hold_out, owner_ids
from .samples import Progress, Samples, silent


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
    if found.x_test is None and holdout:
        train, held = hold_out(found.y, holdout, name)
        found = found._replace(x=found.x[train], y=found.y[train], x_test=found.x[held], y_test=found.y[held])
        ids = None if ids is None else ids[train]
    augmentation = own_augmentation(found.x.shape[1:] if found.x.dtype == np.uint8 else ())
    return Samples(name, *found, ids, augmentation, labels)


def arrays(holdout: float = 0.2, classes: int = 0, *, data_dir: str | Path | None = None) -> Samples:
    """Read a `.npz` file, or a folder of `.npy` files: x, y and optionally x_test, y_test, client; floats as float32.

    Args:
        holdout: the fraction of every class set aside as test set where the file has none.
        classes: their number; 0 takes the largest label plus one.
        data_dir: the file or the folder.
    """
    if data_dir is None:
        raise UserError("data arrays: give their file with data_dir (--data-dir FILE.npz)")
    path = Path(data_dir).expanduser()
    names = ("x", "y", "x_test", "y_test", "client")
    try:
        if path.is_dir():
            found = {n: np.load(path / f"{n}.npy", allow_pickle=False) for n in names if (path / f"{n}.npy").exists()}
        else:
            with open(path, "rb") as file:
                stored = np.load(file, allow_pickle=False)
                if isinstance(stored, np.ndarray):
                    raise UserError(f"data arrays: {path} is a single array; put x.npy and y.npy into a folder")
                found = {n: stored[n] for n in names if n in stored}
    except FileNotFoundError:
        raise UserError(f"data arrays: found nothing at {path}") from None
    except UserError:
        raise
    except Exception as error:  # numpy raises many kinds for a damaged or a pickled file
        raise UserError(f"data arrays: cannot read {path} as plain arrays ({error})") from error
    missing = [n for n in ("x", "y") if n not in found]
    if missing:
        raise UserError(f"data arrays: {path} has no array {missing[0]!r}; expected x, y [x_test, y_test, client]")
    ids = found.pop("client", None)
    with np.errstate(over="ignore"):  # a value that does not fit becomes Inf, which is refused
        found = {n: a.astype(np.float32) if a.dtype.kind == "f" else a for n, a in found.items()}
    samples = from_arrays(**found, clients=ids, holdout=holdout, classes=classes or None, name=path.stem)
    if samples.classes is None and samples.y.dtype.kind != "f":
        raise UserError(
            f"data arrays: expected y with one class label per row, or floats for regression, found {samples.y.dtype} "
            f"of shape {found['y'].shape}; whole-number targets of other shapes need a loss of your own, from Python"
        )
    return samples


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
    name: str = "huggingface",
    progress: Progress | None = None,
) -> Samples:
    """Return samples from a Hugging Face `DatasetDict` (its `train` and `test` or `validation`) or `Dataset`.

    Args:
        image, label: columns; by default the only column of pictures and the only one of class labels.
        client: the column with the client id of every row, for `split="natural"`.
    """
    train = dataset["train"] if isinstance(dataset, dict) and "train" in dataset else dataset
    if isinstance(train, dict):
        raise UserError(f"data {name}: expected a part 'train', found {', '.join(dataset)}")
    test = next(
        (dataset[k] for k in ("test", "validation", "valid") if isinstance(dataset, dict) and k in dataset), None
    )
    kinds = {column: type(feature).__name__ for column, feature in train.features.items()}
    image = _column(image, "Image", "image", kinds, name)
    label = _column(label, "ClassLabel", "label", kinds, name)
    if client and client not in kinds:
        raise UserError(f"data {name}: no column {client!r}; there are {', '.join(kinds)}")
    parts = [
        _stack(part, name, progress or silent, lambda row: (row[image], row[label]))
        for part in (train, test)
        if part is not None
    ]
    held = parts[1] if len(parts) == 2 else None
    ids = np.asarray(train[client]) if client else None
    labels: Iterable[str] = getattr(train.features[label], "names", None) or ()
    return from_arrays(*parts[0], test=held, clients=ids, holdout=holdout, name=name, labels=tuple(labels))


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
    *,
    data_dir: str | Path | None = None,
    progress: Progress | None = None,
) -> Samples:
    """Load a Hugging Face dataset by its name on the hub (`path`), or saved on disk (`data_dir`); extra `fedspeed[hf]`.

    Args:
        path, config: as in `datasets.load_dataset`.
        image, label, client, holdout: as in `from_hugging_face`.
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
        found, image=image, label=label, client=client, holdout=holdout, name=name, progress=progress
    )
