"""The data of a federation: sets by name, splits by name, or your own. Importing this does not import torch."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import UserError, unknown

if TYPE_CHECKING:
    from .federated import Federated
    from .samples import Progress, Samples

_LAZY = {
    "Federated": "federated",
    "Samples": "samples",
    "describe": "summary",
    "from_arrays": "own",
    "from_hugging_face": "own",
    "from_torch": "own",
}
__all__ = ["DATASETS", "federate", "load", "read", *_LAZY]


class _Registry(Mapping[str, Callable[..., "Samples"]]):
    """Loaders by name; a loader's module is imported when it is asked for, not before."""

    def __init__(self, places: dict[str, str]) -> None:
        self._places = places

    def __getitem__(self, name: str) -> Callable[..., Samples]:
        module, _, function = self._places[name].partition(":")
        loader: Callable[..., Samples] = getattr(import_module(f".{module}", __name__), function)
        return loader

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


DATASETS: Mapping[str, Callable[..., Samples]] = _Registry(
    {
        "cifar10": "cifar:cifar10",
        "cifar100": "cifar:cifar100",
        "tinyimagenet": "tinyimagenet:tinyimagenet",
        "mnist": "mnist:mnist",
        "fashion-mnist": "mnist:fashion_mnist",
        "digits": "digits:digits",
        "synthetic": "synthetic:synthetic",
        "quadratic": "problems:quadratic",
        "logistic": "problems:logistic",
        "images": "images:images",
        "arrays": "own:arrays",
        "huggingface": "own:huggingface",
    }
)
CLIENTS = 100
"""How many clients there are where neither the user nor the data say."""
GIVEN = ("clients", "seed", "data_dir", "progress")  # what `load` passes on to a loader that asks for it


def options(name: str) -> dict[str, inspect.Parameter]:
    """The options of a data set: its loader's typed keyword arguments."""
    if name not in DATASETS:
        raise unknown("data set", name, DATASETS)
    parameters = inspect.signature(DATASETS[name]).parameters
    return {key: value for key, value in parameters.items() if key not in GIVEN}


def load(
    name: str,
    *,
    split: str = "dirichlet:0.6",
    clients: int | None = None,
    seed: int = 0,
    augment: str = "paper",
    data_dir: str | Path | None = None,
    train_size: int | None = None,
    test_size: int | None = None,
    shrink: int = 1,
    held_out: int = 0,
    validation: str | float = "",
    progress: Progress | None = None,
    **given: Any,
) -> Federated:
    """A data set by name, split over clients.

    Args:
        name: one of `DATASETS`.
        split: one of `partition.SPLITS` with its parameter, `dirichlet:0.6` say.
        clients: how many; left out, 100, or with `split="natural"` as many as the data have ids.
        seed: fixes the split (and generated data); the same seed gives the same split on every machine.
        augment: `paper`, `released`, `flip` or `none`.
        data_dir: a copy you already have; otherwise the cache, the public home, or a mirror.
        train_size, test_size: use only the first so many samples, class-balanced.
        shrink: average pictures over blocks of so many pixels a side.
        held_out: split over so many clients more, which do not train: their data take the place of the test set.
        validation: what nobody trains on, to choose rounds and settings with: 0.1 of every client's samples,
            `"clients:0.1"` or `"clients:5"` of the clients; none by default.
        progress: called as `progress(what, done, total)` during downloads and decoding.
        given: the data set's own options, `alpha` and `beta` of `synthetic` say.

    Example:
        >>> data = load("digits", split="iid", clients=10)
        >>> data.clients, data.shape, int(data.sizes.sum())
        (10, (1, 8, 8), 1437)
    """
    context = {"clients": CLIENTS if clients is None else clients, "seed": seed}
    samples = read(name, data_dir=data_dir, progress=progress, context=context, **given)
    samples = samples.first(train_size, test_size).shrink(shrink)
    return federate(
        samples, split=split, clients=clients, seed=seed, augment=augment, held_out=held_out, validation=validation
    )


def read(
    name: str,
    *,
    data_dir: str | Path | None = None,
    progress: Progress | None = None,
    context: Mapping[str, Any] | None = None,
    **given: Any,
) -> Samples:
    """A data set by name, not yet split: fetched if need be, decoded, verified; arguments as in `load`."""
    known = options(name)
    loader = DATASETS[name]
    _check(name, loader, known, given)
    wanted = inspect.signature(loader).parameters
    if data_dir is not None and "data_dir" not in wanted:
        raise UserError(f"data {name}: takes no data_dir, found {str(data_dir)!r}; leave it out")
    passed = {**(context or {}), "data_dir": data_dir, "progress": progress}
    return loader(**given, **{key: value for key, value in passed.items() if key in wanted and value is not None})


def federate(
    samples: Samples,
    *,
    split: str = "dirichlet:0.6",
    clients: int | None = None,
    seed: int = 0,
    augment: str = "paper",
    held_out: int = 0,
    validation: str | float = "",
) -> Federated:
    """Split samples over clients; arguments as in `load`."""
    from .federated import Federated
    from .partition import parse_split

    chosen = parse_split(split)
    if clients is None:
        clients = 0 if chosen.name == "natural" else CLIENTS
    if not isinstance(held_out, int) or isinstance(held_out, bool) or held_out < 0 or (held_out and not clients):
        raise UserError(f"data {samples.name}: held_out must be a whole number >= 0 beside clients, found {held_out!r}")
    rows = chosen(samples.y, clients + held_out, seed, samples.owner)
    test = None if samples.x_test is None or samples.y_test is None else (samples.x_test, samples.y_test)
    if held_out:
        scored = np.sort(np.concatenate(rows[clients:]))
        rows, test = rows[:clients], (samples.x[scored], samples.y[scored])
    data = Federated.from_arrays(
        samples.x,
        samples.y,
        rows,
        test,
        name=samples.name,
        split=str(chosen),
        pipeline=samples.recipe.pipeline(augment),
        classes=samples.classes,
        class_names=samples.labels,
    )
    return data.with_validation(validation, seed) if validation != "" else data


def _check(
    name: str, loader: Callable[..., Samples], known: dict[str, inspect.Parameter], given: dict[str, Any]
) -> None:
    hints = typing.get_type_hints(loader)
    for key, value in given.items():
        if key not in known:
            raise (
                unknown(f"option of data {name}", key, known)
                if known
                else UserError(f"data {name}: takes no options, found {key!r}")
            )
        kinds = typing.get_args(hints[key]) or (hints[key],)
        fits = isinstance(value, kinds) or (float in kinds and isinstance(value, int))
        if not fits or (isinstance(value, bool) and bool not in kinds):
            expected = " or ".join(getattr(kind, "__name__", str(kind)) for kind in kinds)
            raise UserError(f"data {name}: {key} must be {expected}, found {value!r}")
    missing = [k for k, p in known.items() if p.default is p.empty and k not in given]
    if missing:
        raise UserError(f"data {name}: needs the option {missing[0]}")


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(f".{_LAZY[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
