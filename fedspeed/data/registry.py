"""Data sets by name: where the loader is, and what the set is, without importing either."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from .samples import Samples


class Card(NamedTuple):
    """A data set for people.

    Args:
        loader: `module:function` in this package.
        size: training and test samples.
        shape: of one input.
        classes: how many.
        source: where it comes from.
        licence: under which it is published, where its authors say.
        here: nothing has to be fetched.
    """

    loader: str
    size: str
    shape: str
    classes: str
    source: str
    licence: str = ""
    here: bool = False


CARDS = {
    "cifar10": Card(
        "cifar:cifar10", "50,000 + 10,000", "3 x 32 x 32", "10", "the paper's; home, npm mirror, or your copy"
    ),
    "cifar100": Card("cifar:cifar100", "50,000 + 10,000", "3 x 32 x 32", "100", "the paper's; home, or your copy"),
    "tinyimagenet": Card(
        "tinyimagenet:tinyimagenet", "100,000 + 10,000", "3 x 64 x 64", "200", "the paper's; home, or your copy"
    ),
    "mnist": Card("mnist:mnist", "60,000 + 10,000", "1 x 28 x 28", "10", "mirrors, or your copy"),
    "fashion-mnist": Card(
        "mnist:fashion_mnist", "60,000 + 10,000", "1 x 28 x 28", "10", "Debian package, home, or your copy", "MIT"
    ),
    "shakespeare": Card(
        "shakespeare:shakespeare",
        "148,317 + 9,141",
        "80",
        "80",
        "next character, a client per role; PyPI, or your copy; model charlstm",
        "public domain",
    ),
    "digits": Card(
        "digits:digits", "1,437 + 360", "1 x 8 x 8", "10", "comes with this package", "CC BY 4.0", here=True
    ),
    "synthetic": Card(
        "synthetic:synthetic", "generated", "60", "10", "FedProx generator: options alpha, beta, size", here=True
    ),
    "quadratic": Card(
        "problems:quadratic", "generated", "d x d", "-", "known constants and optimum; model vector", here=True
    ),
    "logistic": Card(
        "problems:logistic", "generated", "2 x d", "2", "known constants and optimum; model vector", here=True
    ),
    "images": Card("images:images", "yours", "yours", "yours", "--data-dir: pictures, one folder per class"),
    "arrays": Card("user_data:arrays", "yours", "yours", "yours", "--data-dir: .npz or .npy files"),
    "huggingface": Card(
        "user_data:huggingface", "yours", "yours", "yours", "path=NAME or --data-dir; needs fedspeed[hf]"
    ),
}
"""A data set of this package is one entry here and its loader."""


class Datasets(Mapping[str, Callable[..., "Samples"]]):
    """Loaders by name; a loader's module is imported when it is asked for, not before."""

    def __getitem__(self, name: str) -> Callable[..., Samples]:
        module, _, function = CARDS[name].loader.partition(":")
        loader: Callable[..., Samples] = getattr(import_module(f".{module}", __package__), function)
        return loader

    def __iter__(self) -> Iterator[str]:
        return iter(CARDS)

    def __len__(self) -> int:
        return len(CARDS)


DATASETS = Datasets()
