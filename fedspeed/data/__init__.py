"""Data of a federation: sets and splits by name, or your own. Importing this package does not import torch.

A data set of this package is a loader in a module of its own and an entry of `CARDS` below.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..config.spec import OWN_TEST
from ..errors import UserError, unknown
from ..utils.checked_fields import KINDS, require_whole
from ..utils.registry import call, file_of, load_code, require_part

if TYPE_CHECKING:
    from .federated import Federated
    from .samples import Progress, Samples

_LAZY = {
    "Federated": "federated",
    "OnDisk": "on_disk",
    "Samples": "samples",
    "describe": "splits",
    "from_arrays": "user_data",
    "from_hugging_face": "user_data",
    "from_torch": "user_data",
}
__all__ = ["DATASETS", "federate", "load", "read", *_LAZY]

CLIENTS = 100
"""The number of clients where neither the user nor the data set it."""
GIVEN = ("clients", "seed", "data_dir", "progress")  # arguments of `load` that a loader may ask for


class Card(NamedTuple):
    """The description of a data set in `fedspeed data list`.

    Args:
        module: the one in this package that has its loader, a function of the data set's name.
        size: training and test samples.
        shape: of one input.
        licence: that of its authors, where they state one.
        here: whether it needs no download.
    """

    module: str
    size: str
    shape: str
    classes: str
    source: str
    licence: str = ""
    here: bool = False


CARDS = {
    "cifar10": Card("cifar", "50,000 + 10,000", "3 x 32 x 32", "10", "the paper's; home, npm mirror, or your copy"),
    "cifar100": Card("cifar", "50,000 + 10,000", "3 x 32 x 32", "100", "the paper's; home, or your copy"),
    "tinyimagenet": Card("tinyimagenet", "100,000 + 10,000", "3 x 64 x 64", "200", "the paper's; home, or your copy"),
    "mnist": Card("mnist", "60,000 + 10,000", "1 x 28 x 28", "10", "mirrors, or your copy"),
    "fashion-mnist": Card("mnist", "60,000 + 10,000", "1 x 28 x 28", "10", "Debian package, home, or your copy", "MIT"),
    "shakespeare": Card(
        "shakespeare",
        "148,317 + 9,141",
        "80",
        "80",
        "next character, a client per role; PyPI, or your copy; model charlstm",
        "public domain",
    ),
    "digits": Card("small", "1,437 + 360", "1 x 8 x 8", "10", "comes with this package", "CC BY 4.0", here=True),
    "synthetic": Card("small", "generated", "60", "10", "FedProx generator: options alpha, beta, size", here=True),
    "quadratic": Card("problems", "generated", "d x d", "-", "known constants and optimum; model vector", here=True),
    "logistic": Card("problems", "generated", "2 x d", "2", "known constants and optimum; model vector", here=True),
    "images": Card("images", "yours", "yours", "yours", "--data-dir: pictures, one folder per class"),
    "arrays": Card("user_data", "yours", "yours", "yours", "--data-dir: .npz or .npy files, also larger than memory"),
    "huggingface": Card("user_data", "yours", "yours", "yours", "path=NAME or --data-dir; needs fedspeed[hf]"),
}
"""The data sets of this package; a new one is an entry here and a loader."""


class Datasets(Mapping[str, Callable[..., "Samples"]]):
    """Loaders by name; a loader's module is imported when it is looked up."""

    def __getitem__(self, name: str) -> Callable[..., Samples]:
        module = import_module(f".{CARDS[name].module}", __package__)
        loader: Callable[..., Samples] = getattr(module, name.replace("-", "_"))
        return loader

    def __iter__(self) -> Iterator[str]:
        return iter(CARDS)

    def __len__(self) -> int:
        return len(CARDS)


DATASETS = Datasets()


def options(name: str) -> dict[str, inspect.Parameter]:
    """Return the options of a data set: its loader's typed keyword arguments."""
    parameters = inspect.signature(find_loader(name)).parameters
    return {key: value for key, value in parameters.items() if key not in GIVEN}


def find_loader(name: str, code: str = "") -> Callable[..., Samples | Federated]:
    """Return the function of a name in `DATASETS`, or of `path/to/file.py:load`, which is executed.

    Args:
        code: the digest the file must have, "" for any.
    """
    if name in DATASETS:
        return DATASETS[name]
    if not file_of(name):
        require_part("data", name)
        raise unknown("data set", name, DATASETS)
    loader: Callable[..., Samples | Federated] = load_code("data", name, code)
    if not callable(loader):
        raise UserError(f"data {name}: expected a function load(seed=..., **options), found {loader!r}")
    return loader


def load(
    name: str,
    *,
    split: str = "dirichlet:0.6",
    clients: int | None = None,
    seed: int = 0,
    augment: str = "",
    data_dir: str | Path | None = None,
    train_size: int | None = None,
    test_size: int | None = None,
    shrink: int = 1,
    held_out: int = 0,
    validation: str | float = "",
    client_test: str | float = "",
    progress: Progress | None = None,
    code: str = "",
    **given: Any,
) -> Federated:
    """Return a data set by name, split over clients.

    Args:
        name: one of `DATASETS`; or `path/to/file.py:load` with a function `load(seed, **options)` that returns
            `Samples`, which are split, or a `Federated`, which is taken as it is.
        split: one of `splits.SPLITS` with its parameter, for example `dirichlet:0.6`.
        clients: how many; left out, 100, or with `split="natural"` as many as the data have ids.
        seed: fixes the split (and generated data); the same seed gives the same split on every machine.
        augment: `paper`, `released`, `flip` or `none`; by default `paper`, and `none` for data of your own.
        data_dir: a copy you already have; otherwise the cache, the public home, or a mirror.
        train_size, test_size: use only the first this many samples, class-balanced.
        shrink: average pictures over square blocks with this many pixels per side.
        held_out: add this many clients that do not train: their data replace the test set.
        validation: the part set aside to choose rounds and settings with: 0.1 of every client's samples,
            `"clients:0.1"` or `"clients:5"` of the clients; none by default.
        client_test: the test part per client, on which scores per client are measured: 0.2 of every client's samples,
            which no client trains on, or `"own"`, the part of the test set that is the client's (`split="natural"`).
        progress: called as `progress(what, done, total)` during downloads and decoding.
        code: the digest that a file must have to be executed, "" for any.
        given: the data set's own options, for example `alpha` and `beta` of `synthetic`.

    Example:
        >>> data = load("digits", split="iid", clients=10)
        >>> data.clients, data.shape, int(data.sizes.sum())
        (10, (1, 8, 8), 1437)
    """
    from .federated import Federated

    passed = {"clients": CLIENTS if clients is None else clients, "seed": seed}
    samples = _read(name, find_loader(name, code), {**passed, "data_dir": data_dir, "progress": progress}, given)
    if isinstance(samples, Federated):
        if train_size or test_size or shrink > 1 or held_out:
            raise UserError(
                f"data {name}: train_size, test_size, shrink and held_out are for Samples, found a Federated"
            )
        if clients not in (None, samples.clients):
            raise UserError(f"data {name}: expected {clients} clients, found {samples.clients}; leave --clients out")
        return _with_parts(samples, client_test, validation, seed)
    samples = samples.first(train_size, test_size).shrink(shrink)
    return federate(
        samples,
        split=split,
        clients=clients,
        seed=seed,
        augment=augment,
        held_out=held_out,
        validation=validation,
        client_test=client_test,
    )


def _with_parts(data: Federated, client_test: str | float, validation: str | float, seed: int) -> Federated:
    """Return data with the parts that are set aside, tests first: they do not depend on `validation`."""
    data = data.with_client_test(client_test, seed) if client_test != "" else data
    return data.with_validation(validation, seed) if validation != "" else data


def read(
    name: str,
    *,
    data_dir: str | Path | None = None,
    progress: Progress | None = None,
    context: Mapping[str, Any] | None = None,
    **given: Any,
) -> Samples:
    """Return a data set by name, not yet split: downloaded if needed, decoded, verified; arguments as in `load`."""
    from .federated import Federated

    made = _read(name, find_loader(name), {**(context or {}), "data_dir": data_dir, "progress": progress}, given)
    if isinstance(made, Federated):
        raise UserError(f"data {name}: expected Samples, found a Federated, which is split already")
    return made


def _read(
    name: str, loader: Callable[..., Samples | Federated], passed: dict[str, Any], given: dict[str, Any]
) -> Samples | Federated:
    """Call a loader with its options and with those arguments of `load` that it asks for."""
    wanted = inspect.signature(loader).parameters
    _check(name, loader, given)
    if passed["data_dir"] is not None and "data_dir" not in wanted:
        raise UserError(f"data {name}: takes no data_dir, found {str(passed['data_dir'])!r}; leave it out")
    passed = {key: value for key, value in passed.items() if key in wanted and value is not None}
    if not file_of(name):
        return loader(**given, **passed)
    from .federated import Federated
    from .samples import Samples

    made = call("data", name, loader, given | passed)
    if not isinstance(made, Samples | Federated):
        raise UserError(
            f"data {name}: expected Samples or a Federated, found a {type(made).__name__}; return one, "
            f"fedspeed.data.from_arrays and Federated.from_arrays make them (docs/guides/data.md)"
        )
    return made


def federate(
    samples: Samples,
    *,
    split: str = "dirichlet:0.6",
    clients: int | None = None,
    seed: int = 0,
    augment: str = "",
    held_out: int = 0,
    validation: str | float = "",
    client_test: str | float = "",
) -> Federated:
    """Split samples over clients; arguments as in `load`."""
    import numpy as np  # late: checking a config imports this module, and needs no numpy

    from .federated import Federated
    from .splits import by_owner, parse_split

    chosen = parse_split(split)
    if clients is None:
        clients = 0 if chosen.name == "natural" else CLIENTS
    require_whole(f"data {samples.name}: held_out", held_out, 0)
    if held_out and not clients:
        raise UserError(
            f"data {samples.name}: held_out = {held_out} expects a number of clients, found none; set clients"
        )
    rows = chosen(samples.y, clients + held_out, seed, samples.owner)
    own = None
    if str(client_test).strip() == OWN_TEST and chosen.name == "natural" and not held_out:
        ids, tested = samples.owner, samples.owner_test
        own = None if ids is None or tested is None else by_owner(tested, np.unique(ids))
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
        pipeline=samples.augmentation.pipeline(augment),
        classes=samples.classes,
        class_names=samples.labels,
        client_test=own,
    )
    return _with_parts(data, client_test, validation, seed)


def _check(name: str, loader: Callable[..., Any], given: dict[str, Any]) -> None:
    """Raise for options that a loader does not have, of another type than its annotations, or missing."""
    try:
        hints = typing.get_type_hints(loader)
    except Exception:  # names that only a type checker knows
        hints = {}
    parameters = {key: p for key, p in inspect.signature(loader).parameters.items() if key not in GIVEN}
    anything = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    known = {key: p for key, p in parameters.items() if p.kind is not p.VAR_KEYWORD}
    for key, value in given.items():
        if key not in known:
            if anything:
                continue
            none = UserError(f"data {name}: takes no options, found {key!r}")
            raise unknown(f"option of data {name}", key, known) if known else none
        kinds = typing.get_args(hints.get(key)) or (hints.get(key),)
        if not all(isinstance(kind, type) for kind in kinds):  # a user's file: no annotation, or not a class
            continue
        fits = isinstance(value, kinds) or (float in kinds and isinstance(value, int))
        if not fits or (isinstance(value, bool) and bool not in kinds):
            expected = " or ".join(KINDS.get(kind, kind.__name__) for kind in kinds)
            raise UserError(f"data {name}: {key} must be {expected}, found {value!r}")
    missing = [key for key, p in known.items() if p.default is p.empty and key not in given]
    if missing:
        raise UserError(f"data {name}: needs the option {missing[0]}")


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(f".{_LAZY[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
