"""Statistics of a split."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .federated import Federated


@dataclass(frozen=True, eq=False)
class Summary:
    """Statistics of a split: sizes, classes per client, unused and repeated samples.

    Args:
        counts: samples of every class (columns) at every client (rows); one column for regression.
        sizes: samples of every client.
        half: how many of its largest classes hold half of a client's data, client by client.
        samples: the number of training samples; `unused` of them belong to no client, nor to a part set aside.
        repeats: how many entries of clients' lists repeat a sample that has an owner already.
        client_tests: the number of test samples of every client; None without test parts.
        augmentation: the random changes of pictures, in words.
    """

    name: str
    split: str
    fingerprint: str
    split_fingerprint: str
    counts: np.ndarray
    sizes: np.ndarray
    half: np.ndarray
    samples: int
    test_samples: int
    unused: int
    repeats: int
    validation_samples: int = 0
    client_tests: np.ndarray | None = None
    augmentation: str = "none"

    @property
    def clients(self) -> int:
        """Return the number of clients."""
        return len(self.sizes)

    @property
    def classes(self) -> int:
        """Return the number of classes."""
        return int(self.counts.shape[1])


def class_counts(data: Federated) -> np.ndarray:
    """Count the samples of every class at every client: an array of shape (clients, classes)."""
    owner = np.repeat(np.arange(data.clients), data.sizes)
    classes = data.classes or 1
    label = data.y.cpu().numpy()[data.indices] if data.classes else np.zeros(len(owner), np.int64)
    return np.bincount(owner * classes + label, minlength=data.clients * classes).reshape(data.clients, classes)


def half_mass(counts: np.ndarray) -> np.ndarray:
    """Return, per client, the least number of classes that together hold at least half of its samples.

    Example:
        >>> half_mass(np.array([[5, 5, 0], [3, 3, 3], [0, 0, 7]])).tolist()
        [1, 2, 1]
    """
    held = np.cumsum(-np.sort(-counts, axis=1), axis=1)
    needed: np.ndarray = (2 * held < counts.sum(1, keepdims=True)).sum(1) + 1
    return needed


def describe(data: Federated) -> Summary:
    """Measure a split.

    Example:
        >>> from fedspeed.data import load
        >>> summary = describe(load("digits", split="iid", clients=10))
        >>> summary.unused, summary.repeats, summary.sizes.tolist()[:3]
        (0, 0, [144, 144, 144])
    """
    counts = class_counts(data)
    used = len(np.unique(data.indices))
    held = 0 if data.validation is None else len(data.validation)
    tests = data.client_test
    aside = held + (0 if tests is None or tests.held else len(np.unique(tests.indices)))
    return Summary(
        name=data.name,
        split=data.split,
        fingerprint=data.fingerprint,
        split_fingerprint=data.split_fingerprint,
        counts=counts,
        sizes=data.sizes,
        half=half_mass(counts),
        samples=len(data.x),
        test_samples=0 if data.x_test is None else len(data.x_test),
        unused=len(data.x) - used - aside,
        repeats=len(data.indices) - used,
        validation_samples=held,
        client_tests=None if tests is None else np.diff(tests.offsets),
        augmentation=data.pipeline.augmentation,
    )
