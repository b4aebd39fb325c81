"""Who owns which sample: every split has a name and is a pure function of (labels, clients, seed).

    iid                  equal shares, class-balanced as exactly as the numbers allow
    iid-random           equal shares of a random permutation, as the released code deals CIFAR-10
    dirichlet:A          a class prior Dir(A) per client, equal sizes, every sample used once
    dirichlet-refill:A   the released code's: an empty class is refilled; samples repeat, others stay unused
    dirichlet-class:A    every class shared out by Dir(A) over the clients; unequal sizes (flwr-datasets)
    pathological:C       C classes per client
    shards:S             labels sorted, cut into S shards per client
    lognormal-size:S     sizes proportional to exp(S z), z ~ N(0, 1); labels at random
    natural              the client ids that came with the data

All but `dirichlet-refill` give every sample to exactly one client; no client is ever empty.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ..errors import UserError, unknown
from .splits import (
    Rows,
    dirichlet,
    dirichlet_class,
    dirichlet_refill,
    iid,
    iid_random,
    lognormal_size,
    natural,
    pathological,
    shards,
)

SPLITS: dict[str, Callable[..., Rows]] = {
    "iid": iid,
    "iid-random": iid_random,
    "dirichlet": dirichlet,
    "dirichlet-refill": dirichlet_refill,
    "dirichlet-class": dirichlet_class,
    "pathological": pathological,
    "shards": shards,
    "lognormal-size": lognormal_size,
    "natural": natural,
}
WHOLE = {
    "pathological": "the number of classes per client, for example 2",
    "shards": "the number of shards per client, for example 2",
}
REAL = {
    "dirichlet": "the Dirichlet concentration, 0.6 in the paper",
    "dirichlet-refill": "the Dirichlet concentration, 0.6 in the paper",
    "dirichlet-class": "the Dirichlet concentration, for example 0.5",
    "lognormal-size": "the standard deviation of the log size, for example 1",
}


@dataclass(frozen=True)
class Split:
    """A named split with its parameter; `str(split)` is what a config says.

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
        """The row numbers of every client; `owner` holds the natural client id of every row, if there are any."""
        if self.name == "natural":
            return natural(labels, clients, seed, owner)
        if clients < 1:
            raise UserError(f"split {self}: expected at least 1 client, found {clients}")
        if clients > len(labels):
            raise UserError(
                f"split {self}: {clients} clients but only {len(labels)} samples; every client needs at least one"
            )
        labelled = np.issubdtype(labels.dtype, np.integer) and labels.ndim == 1
        if self.name not in ("iid", "iid-random", "lognormal-size") and not labelled:
            found = labels.dtype if labels.ndim == 1 else f"{labels.dtype} of shape {labels.shape}"
            raise UserError(
                f"split {self}: needs class labels (one whole number per row), found {found}; use "
                f"{'iid' if owner is None else 'natural, or iid'}"
            )
        extra = () if self.parameter is None else (self.parameter,)
        return SPLITS[self.name](labels, clients, seed, *extra)


def parse_split(text: str) -> Split:
    """`"dirichlet:0.6"` -> `Split("dirichlet", 0.6)`; says what is wrong with anything else."""
    name, colon, rest = text.strip().partition(":")
    if name not in SPLITS:
        raise unknown("split", name, SPLITS)
    meaning = WHOLE.get(name) or REAL.get(name)
    if meaning is None:
        if colon:
            raise UserError(f"split {name}: takes no parameter, found {rest!r}; write {name}")
        return Split(name)
    kind = "a whole number >= 1" if name in WHOLE else "a number > 0"
    try:
        value: float | int = int(rest) if name in WHOLE else float(rest)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise UserError(f"split {name}: expected {name}:P with P {kind} ({meaning}), found {text!r}")
    return Split(name, value)
