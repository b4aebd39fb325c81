"""Your own data: arrays, `.npz`/`.npy` files, a torch `Dataset`, a Hugging Face dataset; with your client ids if any.

Each function returns `Samples`; `fedspeed.data.federate(samples, split=..., clients=...)` splits them. A folder of
pictures is in `images.py`. By name, in a config or on the command line: `arrays`, `images`, `huggingface`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import UserError
from ..sampling import rng
from .augment import Recipe
from .samples import Progress, Samples, silent


def own_recipe(shape: Sequence[int]) -> Recipe:
    """For pictures of unknown kind: 0.5 / 0.5 a channel, flip, and a crop padded by 1/8 of the side.

    That is the paper's padding: 4 at 32 x 32, 8 at 64 x 64. Use `augment="none"` where a mirrored picture means
    something else. Anything but pictures (three axes) is used as it is.
    """
    if len(shape) != 3:
        return Recipe()
    half = (0.5,) * shape[0]
    return Recipe(half, half, padding=shape[1] // 8, flip=True)


def from_arrays(
    x: Any,
    y: Any,
    x_test: Any = None,
    y_test: Any = None,
    *,
    owner: Any = None,
    holdout: float = 0.2,
    name: str = "arrays",
    labels: tuple[str, ...] = (),
) -> Samples:
    """Samples from arrays; bytes are pictures, floats are used as they are, whole-number targets are classes.

    Args:
        x, y: training inputs and targets. Pictures may be (n, h, w), (n, h, w, channels) or (n, channels, h, w).
        x_test, y_test: the test set; without one, a fraction `holdout` of every class is set aside (always the same).
        owner: the client id of every row (numbers or text), for `split="natural"`.

    Example:
        >>> data = from_arrays(np.zeros((10, 28, 28), "uint8"), np.arange(10) % 2, owner=list("aabbccddee"))
        >>> data.x.shape, data.x_test.shape, data.classes
        ((8, 1, 28, 28), (2, 1, 28, 28), 2)
    """
    x, y = _inputs(x, name), _targets(y, name)
    ids = None if owner is None else np.asarray(owner)
    if ids is not None and ids.shape != (len(x),):
        raise UserError(f"data {name}: expected one client id a row ({len(x)}), found shape {ids.shape}")
    if (x_test is None) != (y_test is None):
        raise UserError(f"data {name}: a test set needs both x_test and y_test")
    if len(x) != len(y):
        raise UserError(f"data {name}: {len(x)} inputs but {len(y)} targets")
    if x_test is not None:
        x_test, y_test = _inputs(x_test, name), _targets(y_test, name)
    elif holdout:
        train, test = _hold_out(y, holdout, name)
        x, y, x_test, y_test = x[train], y[train], x[test], y[test]
        ids = None if ids is None else ids[train]
    classes = None
    if y.dtype == np.int64 and y.ndim == 1:
        classes = max(len(labels), 1 + int(max(a.max() for a in (y, y_test) if a is not None and len(a))))
    return Samples(
        name, x, y, x_test, y_test, classes, ids, own_recipe(x.shape[1:] if x.dtype == np.uint8 else ()), labels
    )


def _inputs(given: Any, name: str) -> np.ndarray:
    x: np.ndarray = np.asarray(given)
    if x.dtype.kind not in "uifb" or x.ndim < 1:
        raise UserError(f"data {name}: expected numeric inputs, one row a sample, found {x.dtype} of shape {x.shape}")
    if x.dtype == np.uint8 and x.ndim == 3:
        return x[:, None]
    if x.dtype == np.uint8 and x.ndim == 4 and x.shape[-1] in (1, 3) and x.shape[1] not in (1, 3):
        return np.ascontiguousarray(x.transpose(0, 3, 1, 2))
    if x.dtype == np.uint8:
        return x
    x = x.astype(np.float32)
    bad = np.flatnonzero(~np.isfinite(x.reshape(len(x), -1)).all(1))
    if len(bad):
        raise UserError(f"data {name}: inputs must be finite; row {bad[0]} is not ({len(bad)} such rows)")
    return x


def _targets(given: Any, name: str) -> np.ndarray:
    y: np.ndarray = np.asarray(given)
    if y.dtype.kind not in "uifb":
        raise UserError(f"data {name}: expected numbers as targets, found {y.dtype}; number your classes from 0")
    if y.dtype.kind == "f":
        return y.astype(np.float32)
    if y.size and y.min() < 0:
        row = int(np.argmin(y))
        raise UserError(f"data {name}: class labels must be 0, 1, 2, ..., found {y.flat[row]} in row {row}")
    return y.astype(np.int64)


def _hold_out(y: np.ndarray, fraction: float, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Rows to train on and rows to test on: the same fraction of every class, always the same rows."""
    if not 0 < fraction < 1:
        raise UserError(f"data {name}: holdout must lie between 0 and 1, found {fraction}")
    order = rng(0, "holdout").permutation(len(y))
    if y.dtype == np.int64 and y.ndim == 1:
        order = order[np.argsort(y[order], kind="stable")]
    mark = np.floor((np.arange(len(y)) + 1) * fraction) > np.floor(np.arange(len(y)) * fraction)
    if mark.all() or not mark.any():
        raise UserError(f"data {name}: {len(y)} samples cannot be divided with holdout = {fraction}")
    return np.sort(order[~mark]), np.sort(order[mark])


def arrays(holdout: float = 0.2, *, data_dir: str | Path | None = None) -> Samples:
    """A `.npz` file, or a folder of `.npy` files: x, y and, if you like, x_test, y_test, client.

    Args:
        holdout: the fraction of every class set aside as test set where the file has none.
        data_dir: the file or the folder.
    """
    if data_dir is None:
        raise UserError("data arrays: say where they are with data_dir (--data-dir FILE.npz)")
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
    owner = found.pop("client", None)
    return from_arrays(**found, owner=owner, holdout=holdout, name=path.stem)


def from_torch(
    dataset: Any,
    test: Any = None,
    *,
    owner: Any = None,
    holdout: float = 0.2,
    name: str = "torch",
    progress: Progress | None = None,
) -> Samples:
    """Samples from a torch `Dataset` of (input, target) pairs, read once from front to back.

    Leave random augmentation out of it (this library draws its own, a batch at a time) and return bytes where you
    can: PIL pictures and `uint8` tensors stay bytes. Arguments as in `from_arrays`.
    """
    parts = [_stack(part, name, progress or silent) for part in (dataset, test) if part is not None]
    x_test, y_test = parts[1] if len(parts) == 2 else (None, None)
    return from_arrays(*parts[0], x_test, y_test, owner=owner, holdout=holdout, name=name)


def _stack(pairs: Any, name: str, progress: Progress) -> tuple[np.ndarray, np.ndarray]:
    xs, ys, total = [], [], len(pairs)
    for i in range(total):
        x, y = pairs[i]
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
    """Samples from a Hugging Face `DatasetDict` (its `train` and `test` or `validation`) or `Dataset`.

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
    parts = [_stack(_Pairs(part, image, label), name, progress or silent) for part in (train, test) if part is not None]
    x_test, y_test = parts[1] if len(parts) == 2 else (None, None)
    owner = np.asarray(train[client]) if client else None
    labels: Iterable[str] = getattr(train.features[label], "names", None) or ()
    return from_arrays(*parts[0], x_test, y_test, owner=owner, holdout=holdout, name=name, labels=tuple(labels))


def _column(given: str, kind: str, option: str, kinds: dict[str, str], name: str) -> str:
    found = [given] if given in kinds else [c for c, k in kinds.items() if k == kind and not given]
    if len(found) != 1:
        raise UserError(
            f"data {name}: {f'no column {given!r}' if given else f'{len(found)} columns of type {kind}'}; say "
            f"{option}=COLUMN, one of {', '.join(kinds)}"
        )
    return found[0]


class _Pairs:
    """(picture, label) of a Hugging Face dataset, as a torch `Dataset` would give them."""

    def __init__(self, part: Any, image: str, label: str) -> None:
        self.part, self.image, self.label = part, image, label

    def __len__(self) -> int:
        return len(self.part)

    def __getitem__(self, i: int) -> tuple[Any, Any]:
        row = self.part[i]
        return row[self.image], row[self.label]


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
    """A Hugging Face dataset by its name on the hub (`path`), or saved on disk (`data_dir`); extra `fedspeed[hf]`.

    Args:
        path, config: as in `datasets.load_dataset`.
        image, label, client, holdout: as in `from_hugging_face`.
    """
    try:
        import datasets
    except ImportError as error:
        raise UserError("data huggingface: needs the package `datasets`; pip install 'fedspeed[hf]'") from error
    if bool(path) == (data_dir is not None):
        raise UserError("data huggingface: say either path (a name on the hub) or data_dir (saved on disk)")
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
