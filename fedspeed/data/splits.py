"""Splits of samples over clients by name, each a pure function of (labels, clients, seed); and their statistics.

    iid                  equal shares, class-balanced as exactly as the numbers allow
    iid-random           equal shares of a random permutation, as the released code deals CIFAR-10
    dirichlet:A          a class prior Dir(A) per client, equal sizes, every sample used once
    dirichlet-refill:A   the released code's: an empty class is refilled; samples repeat, others stay unused
    dirichlet-class:A    every class shared out by Dir(A) over the clients; unequal sizes (flwr-datasets)
    pathological:C       C classes per client
    shards:S             labels sorted, cut into S shards per client
    lognormal-size:S     sizes minus 1 proportional to exp(S z), z ~ N(0, 1); labels at random
    natural              the client ids that came with the data

All but `dirichlet-refill` give every sample to exactly one client; no client is ever empty. Rows come out
ascending, so equal ownership means equal arrays.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import UserError, unknown
from ..utils.random import rng

if TYPE_CHECKING:
    from .federated import Federated


class Rows(Sequence[np.ndarray]):
    """The row numbers of every client in two arrays, which keeps a million clients small.

    Example:
        >>> rows = Rows.of([np.array([2, 3]), np.array([0])])
        >>> [own.tolist() for own in rows], rows.sizes.tolist()
        ([[2, 3], [0]], [2, 1])
    """

    def __init__(self, indices: np.ndarray, sizes: np.ndarray) -> None:
        self.indices, self.sizes = indices, sizes
        self.offsets = np.concatenate([[0], np.cumsum(sizes)])

    @classmethod
    def of(cls, lists: Iterable[np.ndarray]) -> Rows:
        """Make it from an array per client."""
        each = list(lists)
        return cls(np.concatenate([np.empty(0, np.int64), *each]), np.array([len(a) for a in each], dtype=np.int64))

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, i: Any) -> Any:
        if isinstance(i, slice):
            return [self[j] for j in range(*i.indices(len(self)))]
        end = self.offsets[1:][i]
        return self.indices[end - self.sizes[i] : end]


def labelled(y: np.ndarray) -> bool:
    """Return whether targets are class labels: one whole number per row."""
    return y.dtype.kind in "ui" and y.ndim == 1


def equal_sizes(n: int, clients: int, stream: np.random.Generator) -> np.ndarray:
    """Return `clients` sizes that add up to n and differ by at most one; the larger ones are drawn."""
    sizes = np.full(clients, n // clients)
    sizes[stream.permutation(clients)[: n % clients]] += 1
    return sizes


def _pools(labels: np.ndarray, stream: np.random.Generator) -> list[np.ndarray]:
    """Return the rows of every class that occurs, each in a random order."""
    order = stream.permutation(len(labels))
    order = order[np.argsort(labels[order], kind="stable")]
    return np.split(order, np.flatnonzero(np.diff(labels[order])) + 1)


def _gather(owner: np.ndarray, rows: np.ndarray, clients: int) -> Rows:
    """Return the rows of every client, ascending, from parallel arrays (owner, row)."""
    order = np.lexsort((rows, owner))
    return Rows(rows[order], np.bincount(owner, minlength=clients))


def _largest_remainder(shares: np.ndarray, total: int) -> np.ndarray:
    """Return whole numbers proportional to `shares` along the last axis, with exactly the sum `total`."""
    exact = shares * total
    whole = np.floor(exact * (1 - 1e-12)).astype(np.int64)  # never more than `total`, whatever the rounding
    short = total - whole.sum(-1, keepdims=True)
    rank = np.argsort(np.argsort(whole - exact, axis=-1, kind="stable"), axis=-1, kind="stable")
    return np.asarray(whole + (rank < short))


def iid(labels: np.ndarray, clients: int, seed: int) -> Rows:
    """Deal the classes out like cards: sizes, and the counts of every class, differ by at most one.

    Example:
        >>> labels = np.array([0, 0, 1, 1])
        >>> [labels[rows].tolist() for rows in iid(labels, 2, seed=0)]
        [[0, 1], [0, 1]]
    """
    stream = rng(seed, "split")
    rows = np.concatenate(_pools(labels if labelled(labels) else np.zeros(len(labels), np.int64), stream))
    return _gather(stream.permutation(clients)[np.arange(len(rows)) % clients], rows, clients)


def iid_random(labels: np.ndarray, clients: int, seed: int) -> Rows:
    """Cut a random permutation of all samples into equal shares: class counts differ from client to client.

    Reference: the code released with Sun et al., "FedSpeed", ICLR 2023, for CIFAR-10.

    Example:
        >>> sorted(len(rows) for rows in iid_random(np.zeros(7), 2, seed=0))
        [3, 4]
    """
    stream = rng(seed, "split")
    order = stream.permutation(len(labels))
    return _gather(np.repeat(np.arange(clients), equal_sizes(len(labels), clients, stream)), order, clients)


def _priors(alpha: float, clients: int, classes: int, stream: np.random.Generator) -> np.ndarray:
    """Draw Dir(alpha) once per client; where that leaves the float range, return its limit (uniform)."""
    priors = stream.dirichlet(np.full(classes, alpha), clients)
    return np.where(np.isfinite(priors).all(1, keepdims=True), priors, 1 / classes)


def dirichlet(labels: np.ndarray, clients: int, seed: int, alpha: float, refill: bool = False) -> Rows:
    """Draw the classes of client i from p_i ~ Dir(alpha, ..., alpha); equal sizes, every sample used once.

    Slots are filled in random order: the slot's client draws a class from its prior, and gets a row of it. A class that
    is used up leaves every prior, which is renormalised over the others; a client whose prior has no mass left takes
    from the class with most samples left. The order of the draws fixes the split of a seed.

    Args:
        refill: refill a class that is used up instead: samples repeat, others stay unused.

    References: Acar et al., "Federated learning based on dynamic regularization", ICLR 2021, and its code; for
    `refill`, the code released with Sun et al., "FedSpeed", ICLR 2023.
    """
    stream = rng(seed, "split")
    pools = _pools(labels, stream)
    full = np.array([len(pool) for pool in pools])
    sizes = equal_sizes(len(labels), clients, stream)
    priors = _priors(alpha, clients, len(pools), stream)
    slots = stream.permutation(np.repeat(np.arange(clients), sizes))
    left, emptied = full.tolist(), 0
    bounds: list[list[float]] = np.cumsum(priors, axis=1).tolist()
    seen = [0] * clients  # how many classes were already empty when bounds[i] was computed
    taken = np.empty(len(labels), np.int64)
    for k, (i, u) in enumerate(zip(slots.tolist(), stream.random(len(labels)).tolist(), strict=True)):
        if seen[i] != emptied and not refill:  # the prior, renormalised over the classes that are left
            bounds[i], seen[i] = np.cumsum(priors[i] * (np.array(left) > 0)).tolist(), emptied
        c = bisect_right(bounds[i], u * bounds[i][-1])
        while refill and c < len(left) and not left[c]:  # the released code fills it, and draws again
            left[c] = int(full[c])
            c = bisect_right(bounds[i], stream.random() * bounds[i][-1])
        if c == len(left) or not left[c]:  # the prior has no mass left: the class with most rows left
            c = int(np.argmax(left))
        left[c] -= 1
        emptied += not left[c]
        taken[k] = pools[c][left[c]]
    return _gather(slots, taken, clients)


def dirichlet_class(labels: np.ndarray, clients: int, seed: int, alpha: float) -> Rows:
    """Divide every class c over the clients by q_c ~ Dir(alpha, ..., alpha); sizes differ.

    Drawn again (up to 1,000 times) until every client has at least `min(10, n / (4 clients))` samples, at least 1.

    Reference: Yurochkin et al., "Bayesian nonparametric federated learning of neural networks", ICML 2019;
    the `DirichletPartitioner` of flwr-datasets.
    """
    stream = rng(seed, "split")
    pools = _pools(labels, stream)
    least = min(10, max(1, len(labels) // (4 * clients)))
    for _ in range(1000):
        shares = _priors(alpha, len(pools), clients, stream)
        counts = np.stack([_largest_remainder(q, len(pool)) for q, pool in zip(shares, pools, strict=True)])
        if counts.sum(0).min() >= least:
            owner = [np.repeat(np.arange(clients), row) for row in counts]
            return _gather(np.concatenate(owner), np.concatenate(pools), clients)
    raise UserError(
        f"split dirichlet-class:{alpha:g}: no draw of 1000 gave each of {clients} clients {least} or more of "
        f"{len(labels)} samples; use a larger alpha, fewer clients, or dirichlet:{alpha:g} (equal sizes)"
    )


def pathological(labels: np.ndarray, clients: int, seed: int, classes: int) -> Rows:
    """Give every client exactly `classes` classes; clients that hold a class share it equally.

    Every class is held by as many clients as any other (or one more), so sizes are equal when classes are.
    """
    stream = rng(seed, "split")
    pools = _pools(labels, stream)
    name = f"split pathological:{classes}"
    if classes > len(pools):
        raise UserError(f"{name}: expected at most {len(pools)} classes per client, the number in the data")
    if clients * classes < len(pools):
        raise UserError(
            f"{name}: {clients} clients hold at most {clients * classes} of the {len(pools)} classes and the rest "
            f"would be unused; use pathological:{-(-len(pools) // clients)} or more, or more clients"
        )
    quota = equal_sizes(clients * classes, len(pools), stream)
    holders: list[list[int]] = [[] for _ in pools]
    for i in stream.permutation(clients).tolist():  # the classes with most places left, ties at random
        for c in np.lexsort((stream.random(len(pools)), -quota))[:classes].tolist():
            quota[c] -= 1
            holders[c].append(i)
    for c, pool in enumerate(pools):
        if len(pool) < len(holders[c]):
            raise UserError(
                f"{name}: class {labels[pool[0]]} has {len(pool)} samples for {len(holders[c])} clients; use fewer "
                "clients or fewer classes per client"
            )
    owner = np.concatenate([np.resize(held, len(pool)) for held, pool in zip(holders, pools, strict=True)])
    return _gather(owner, np.concatenate(pools), clients)


def shards(labels: np.ndarray, clients: int, seed: int, per_client: int) -> Rows:
    """Sort by label, cut into `clients * per_client` shards (sizes differ by at most one), deal them at random.

    Reference: McMahan et al., "Communication-efficient learning of deep networks", AISTATS 2017 (shards:2).
    """
    stream = rng(seed, "split")
    pieces = clients * per_client
    if pieces > len(labels):
        raise UserError(
            f"split shards:{per_client}: {clients} clients need {pieces} shards, but there are {len(labels)} samples; "
            "use fewer shards or fewer clients"
        )
    rows = np.concatenate(_pools(labels, stream))
    owner = np.repeat(stream.permutation(pieces) % clients, equal_sizes(len(rows), pieces, stream))
    return _gather(owner, rows, clients)


def lognormal_size(labels: np.ndarray, clients: int, seed: int, sigma: float) -> Rows:
    """Skew sizes: n_i - 1 proportional to exp(sigma z_i), z_i ~ N(0, 1); samples are drawn uniformly."""
    if sigma > 1e6:
        raise UserError(f"split lognormal-size: expected a standard deviation up to 1e6, found {sigma:g}")
    stream = rng(seed, "split")
    z = sigma * stream.standard_normal(clients)
    weights = np.exp(z - z.max())
    sizes = 1 + _largest_remainder(weights / weights.sum(), len(labels) - clients)
    return _gather(np.repeat(np.arange(clients), sizes), stream.permutation(len(labels)), clients)


def natural(labels: np.ndarray, clients: int, seed: int, owner: np.ndarray | None) -> Rows:
    """Make one client per id, numbered by the sorted ids; `clients` must be their number, or 0."""
    if owner is None:
        raise UserError("split natural: these data have no client ids; use another split, or give one id per row")
    rows = by_owner(owner)
    if clients not in (0, len(rows)):
        raise UserError(
            f"split natural: the data come with {len(rows)} clients, found clients = {clients}; set {len(rows)}, or "
            "leave the number out"
        )
    return rows


def by_owner(owner: np.ndarray, ids: np.ndarray | None = None) -> Rows:
    """Return the rows of every id, in the order of the sorted ids.

    Args:
        ids: the ids to return rows of, sorted; rows of others are left out. By default all.

    Example:
        >>> [rows.tolist() for rows in by_owner(np.array(["b", "a", "b"]))]
        [[1], [0, 2]]
        >>> [rows.tolist() for rows in by_owner(np.array(["b", "a", "b"]), np.array(["b", "c"]))]
        [[0, 2], []]
    """
    found, number = np.unique(owner, return_inverse=True)
    ids = found if ids is None else ids
    if len({a.dtype.kind in "US" for a in (ids, found)}) > 1:
        raise UserError("client ids: expected all numbers or all text, found both, in training and test rows")
    place = np.minimum(np.searchsorted(ids, found), len(ids) - 1)
    kept = np.flatnonzero((ids[place] == found)[number])
    return _gather(place[number[kept]], kept, len(ids))


SPLITS: dict[str, Callable[..., Rows]] = {
    "iid": iid,
    "iid-random": iid_random,
    "dirichlet": dirichlet,
    "dirichlet-refill": partial(dirichlet, refill=True),
    "dirichlet-class": dirichlet_class,
    "pathological": pathological,
    "shards": shards,
    "lognormal-size": lognormal_size,
    "natural": natural,
}
PARAMETERS: dict[str, tuple[type[int | float], str]] = {
    "dirichlet": (float, "the Dirichlet concentration, 0.6 in the paper"),
    "dirichlet-refill": (float, "the Dirichlet concentration, 0.6 in the paper"),
    "dirichlet-class": (float, "the Dirichlet concentration, for example 0.5"),
    "pathological": (int, "the number of classes per client, for example 2"),
    "shards": (int, "the number of shards per client, for example 2"),
    "lognormal-size": (float, "the standard deviation of the log size, for example 1"),
}
"""The type and the meaning of a split's parameter; the others have none."""


@dataclass(frozen=True)
class Split:
    """A named split with its parameter; `str(split)` is its name in a config.

    Example:
        >>> split = parse_split("dirichlet:0.6")
        >>> sorted(len(rows) for rows in split(np.arange(30) % 3, clients=4, seed=0))
        [7, 7, 8, 8]
    """

    name: str
    parameter: float | int | None = None

    def __str__(self) -> str:
        return self.name if self.parameter is None else f"{self.name}:{self.parameter!r}".removesuffix(".0")

    def __call__(self, labels: np.ndarray, clients: int, seed: int, owner: np.ndarray | None = None) -> Rows:
        """Return the row numbers of every client; `owner` is the natural client id of every row, or None."""
        if self.name == "natural":
            return natural(labels, clients, seed, owner)
        if clients < 1:
            raise UserError(f"split {self}: expected at least 1 client, found {clients}")
        if clients > len(labels):
            raise UserError(
                f"split {self}: {clients} clients but only {len(labels)} samples; every client needs at least one"
            )
        if self.name not in ("iid", "iid-random", "lognormal-size") and not labelled(labels):
            found = labels.dtype if labels.ndim == 1 else f"{labels.dtype} of shape {labels.shape}"
            raise UserError(
                f"split {self}: needs class labels (one whole number per row), found {found}; write y.astype(int) "
                f"(y.argmax(1) if one-hot) for classes, else use {'iid' if owner is None else 'natural, or iid'}"
            )
        extra = () if self.parameter is None else (self.parameter,)
        return SPLITS[self.name](labels, clients, seed, *extra)


def parse_split(text: str) -> Split:
    """Return `Split("dirichlet", 0.6)` for `"dirichlet:0.6"`; raise for a text that is not a split."""
    name, colon, rest = text.strip().partition(":")
    if name not in SPLITS:
        raise unknown("split", name, SPLITS)
    if name not in PARAMETERS:
        if colon:
            raise UserError(f"split {name}: takes no parameter, found {rest!r}; write {name}")
        return Split(name)
    number, meaning = PARAMETERS[name]
    try:
        value = number(rest)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        kind = "a whole number >= 1" if number is int else "a number > 0"
        raise UserError(f"split {name}: expected {name}:P with P {kind} ({meaning}), found {text!r}")
    return Split(name, value)


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
    return np.asarray((2 * held < counts.sum(1, keepdims=True)).sum(1) + 1)


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
