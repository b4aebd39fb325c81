"""`Federated`: the data of all clients as tensors in memory, and the rows that each client owns."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch

from ..config.validation_set import parse_validation
from ..errors import UserError
from ..utils.devices import to_device
from ..utils.random import rng
from .augment import Pipeline
from .convert import client_rows, convert, hold_out
from .samples import Samples, shown


@dataclass(frozen=True, eq=False, repr=False)
class Federated:
    """The data of a federation: two tensors, the rows of each client, a test set and perhaps a validation set.

    Pictures stay `uint8` (NCHW) in memory and become floats a batch at a time; other inputs are used as they are.
    Client i owns rows `indices[offsets[i]:offsets[i + 1]]`, so a million clients cost two arrays.

    Args:
        x, y: the training inputs and targets, row by row.
        indices, offsets: the split, as above.
        x_test, y_test: the held-out set, or None.
        name: what the data set calls itself.
        classes: number of classes, or None for regression.
        pipeline: how a batch of rows becomes model input (normalisation, augmentation).
        class_names: names of the classes, if they have any.
        validation: row numbers of x and y set aside to choose rounds and settings with; None without.

    Example:
        >>> x, y = np.zeros((4, 2), "f4"), np.array([0, 1, 0, 1])
        >>> data = Federated.from_arrays(x, y, clients=[[0, 1], [2, 3]])
        >>> data.clients, data.sizes.tolist()
        (2, [2, 2])
    """

    x: torch.Tensor
    y: torch.Tensor
    indices: np.ndarray
    offsets: np.ndarray
    x_test: torch.Tensor | None = None
    y_test: torch.Tensor | None = None
    name: str = "arrays"
    classes: int | None = None
    split: str = "given"
    pipeline: Pipeline = field(default_factory=Pipeline)
    class_names: tuple[str, ...] = ()
    validation: np.ndarray | None = None

    @classmethod
    def from_arrays(
        cls,
        x: Any,
        y: Any,
        clients: Sequence[Any] | np.ndarray | torch.Tensor,
        test: tuple[Any, Any] | None = None,
        *,
        holdout: float = 0.0,
        name: str = "arrays",
        split: str = "given",
        pipeline: Pipeline | None = None,
        classes: int | None = None,
        class_names: tuple[str, ...] = (),
    ) -> Federated:
        """Build from arrays and a split of your own; conversion and checks are those of `fedspeed.data.from_arrays`.

        Args:
            x, y: inputs and targets, as there; nothing is augmented unless `pipeline` says so.
            clients: a list with the row numbers (or a boolean mask) of every client, or one client id per row.
            test: the test set `(x_test, y_test)`.
            holdout: without a test set, this fraction of every class is set aside as one and leaves the clients'
                rows; by default none, and then nothing is evaluated.
            classes: their number; by default the largest label and one.
        """
        found = convert(x, y, test, name, classes, known=len(class_names))
        owned, n = client_rows(clients, len(found.x), name), len(found.x)
        sizes, indices = owned.sizes, owned.indices
        if len(indices) and (indices.min() < 0 or indices.max() >= n):
            raise UserError(
                f"data {name}: client indices must lie in 0..{n - 1}, found {indices.min()}..{indices.max()}"
            )
        after = ""
        if found.x_test is None and holdout:
            held, after = np.zeros(n, bool), f" after holdout = {holdout}"
            held[hold_out(found.y, holdout, name)[1]] = True
            found = found._replace(x_test=found.x[held], y_test=found.y[held])
            owner, left = np.repeat(np.arange(len(sizes)), sizes), ~held[indices]
            sizes, indices = np.bincount(owner[left], minlength=len(sizes)), indices[left]
        if not len(indices) or not sizes.all():
            none = np.flatnonzero(sizes == 0)[:5].tolist()
            raise UserError(f"data {name}: every client needs at least one sample; clients {none} have none{after}")
        offsets = np.concatenate([[0], np.cumsum(sizes)])
        x_test, y_test = (None if a is None else _tensor(a) for a in (found.x_test, found.y_test))
        return cls(
            _tensor(found.x), _tensor(found.y), indices, offsets, x_test, y_test, name, found.classes, split,
            pipeline or Pipeline(), class_names,
        )  # fmt: skip

    def __repr__(self) -> str:
        low, middle, high = np.percentile(self.sizes, [0, 50, 100], method="nearest").tolist()
        sizes = f"{low:,} each" if low == high else f"{low:,} to {high:,} each, median {middle:,}"
        other = "regression" if self.y.is_floating_point() else "no classes"
        kind = other if self.classes is None else f"{self.classes} classes"
        test = "no test set" if self.y_test is None else f"{len(self.y_test):,} for testing"
        valid = "" if self.validation is None else f", {len(self.validation):,} for validation"
        pictures = f"augmentation {self.pipeline.augmentation}, " if self.is_pictures else ""
        return (
            f"<Federated {self.name}: {self.clients:,} clients, {len(self.indices):,} samples ({sizes}), "
            f"{shown(self.x)}, {pictures}{kind}, split {self.split}, {test}{valid}>"
        )

    @property
    def is_pictures(self) -> bool:
        """Return whether inputs are pictures, or are augmented as such."""
        return self.pipeline.random or (self.x.dtype == torch.uint8 and self.x.ndim == 4)

    @property
    def clients(self) -> int:
        """Return the number of clients."""
        return len(self.offsets) - 1

    @cached_property
    def sizes(self) -> np.ndarray:
        """Return the number of samples of every client."""
        return np.diff(self.offsets)

    def rows(self, i: int) -> np.ndarray:
        """Return the row numbers that client i owns."""
        return self.indices[self.offsets[i] : self.offsets[i + 1]]

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of one input, without the batch axis."""
        return tuple(self.x.shape[1:])

    def batch(self, rows: np.ndarray, stream: np.random.Generator | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return inputs and targets of some rows, augmented when a random stream is given."""
        index = to_device(rows, self.x.device)
        return self.pipeline(self.x.index_select(0, index), stream), self.y.index_select(0, index)

    def test_batch(self, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return test inputs and targets `start..stop-1`, never augmented."""
        if self.x_test is None or self.y_test is None:
            raise UserError(f"data {self.name}: there is no test set; give one, or do not evaluate")
        return self.pipeline(self.x_test[start:stop], None), self.y_test[start:stop]

    def validation_batch(self, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return inputs and targets `start..stop-1` of the validation set, never augmented."""
        if self.validation is None:
            raise UserError(f"data {self.name}: there is no validation set; take one off with with_validation(0.1)")
        return self.batch(self.validation[start:stop])

    def with_validation(self, spec: str | float, seed: int = 0) -> Federated:
        """Return the same data with a validation set taken off; the same rows for every method.

        Args:
            spec: `0.1`, that fraction of every client's rows (one always stays); `"clients:0.1"` or `"clients:5"`, all
                rows of this many clients, which then do not train.
            seed: decides which rows or clients.

        Example:
            >>> data = Federated.from_arrays(np.zeros((20, 2)), np.arange(20) % 2, np.arange(20) // 10)
            >>> data.with_validation(0.2).sizes.tolist(), data.with_validation("clients:1").sizes.tolist()
            ([8, 8], [10])
        """
        chosen, m = parse_validation(spec), self.clients
        if self.validation is not None:
            raise UserError(f"data {self.name}: there is a validation set already; take one off only once")
        owner = np.repeat(np.arange(m), self.sizes)
        taken = np.zeros(len(self.indices), bool)
        trains = np.ones(m, bool)
        if chosen.of_clients:
            trains[rng(seed, "validation").choice(m, chosen.count(m), replace=False)] = False
            taken = ~trains[owner]
        for i in () if chosen.of_clients else range(m):
            drawn = rng(seed, "validation", i).permutation(self.sizes[i])[: chosen.count(int(self.sizes[i]))]
            taken[self.offsets[i] + drawn] = True
        mark = np.zeros(len(self.x), bool)
        mark[self.indices[taken]] = True
        left = ~mark[self.indices]  # where a split repeats samples, no other client trains on a taken one either
        sizes = np.bincount(owner[left], minlength=m)[trains]
        if not mark.any() or not sizes.all():
            what = "have too few samples each to take any off" if not mark.any() else "would be left without a sample"
            raise UserError(f"data {self.name}: validation {spec}: clients {what}; take clients:0.1, or another split")
        return replace(
            self,
            indices=self.indices[left],
            offsets=np.concatenate([[0], np.cumsum(sizes)]),
            validation=np.flatnonzero(mark),
        )

    def floats(self) -> Federated:
        """Return the same data with whole-number inputs as float32, for models that compute with them (bytes stay)."""
        if self.x.is_floating_point() or self.x.dtype == torch.uint8:
            return self
        return replace(self, x=self.x.float(), x_test=None if self.x_test is None else self.x_test.float())

    def to(self, device: torch.device | str, dtype: torch.dtype) -> Federated:
        """Return the same data on a device; floating tensors (and batches of pictures) in `dtype`."""

        def move(a: torch.Tensor) -> torch.Tensor:
            return a.to(device, dtype if a.is_floating_point() else None)

        return replace(
            self,
            x=move(self.x),
            y=move(self.y),
            x_test=None if self.x_test is None else move(self.x_test),
            y_test=None if self.y_test is None else move(self.y_test),
            pipeline=replace(self.pipeline, dtype=dtype),
        )

    @cached_property
    def fingerprint(self) -> str:
        """Return a digest of inputs, targets and test set as bytes; files hold it, so it must not change."""
        digest = hashlib.blake2b(digest_size=8)
        for a in (self.x, self.y, self.x_test, self.y_test):
            if a is not None:
                digest.update(f"{a.dtype}{tuple(a.shape)}".encode())
                digest.update(a.detach().cpu().contiguous().numpy().data)
        return digest.hexdigest()

    @cached_property
    def split_fingerprint(self) -> str:
        """Return a digest of the rows of each client and of the validation set; equal splits have equal digests."""
        digest = hashlib.blake2b(self.offsets.astype("<i8").tobytes(), digest_size=8)
        for start in range(0, len(self.indices), 2**20):  # in chunks: a copy of all might not fit into memory
            digest.update(self.indices[start : start + 2**20].astype("<i8").tobytes())
        if self.validation is not None:
            digest.update(b"validation" + self.validation.astype("<i8").tobytes())
        return digest.hexdigest()


def _tensor(a: np.ndarray) -> torch.Tensor:
    """Return a tensor with the same memory; a copy of a read-only array, which torch does not support."""
    return torch.from_numpy(a if a.flags.writeable else a.copy())


def federated(data: Any) -> Federated:
    """Return the data if they are a `Federated`; raise an error that says how to make one of anything else.

    Example:
        >>> federated("digits")
        Traceback (most recent call last):
        ...
        fedspeed.errors.UserError: data: expected a Federated, found the name 'digits'; load it first:
        data = fedspeed.load_data('digits', split='dirichlet:0.6', clients=100)
    """
    if isinstance(data, Federated):
        return data
    found, fix = _advice(data)
    raise UserError(f"data: expected a Federated, found {found}; {fix}")


def _advice(data: Any) -> tuple[str, str]:
    """Return what was found instead of a `Federated`, and how to make one of it."""
    kind = type(data).__name__
    if isinstance(data, str):
        return f"the name {data!r}", (
            f"load it first: data = fedspeed.load_data({data!r}, split='dirichlet:0.6', clients=100)"
        )
    if isinstance(data, type):
        return f"the class {data.__name__}", (
            "fedspeed.load_data or Federated.from_arrays(x, y, clients) make an instance (docs/guides/data.md)"
        )
    if isinstance(data, Samples):
        return (
            "Samples, which are not split yet",
            "split them: fedspeed.data.federate(samples, split='iid', clients=10)",
        )
    if hasattr(data, "dataset"):  # a DataLoader
        return f"a {kind}", (
            "batches are drawn here: fedspeed.data.federate(fedspeed.data.from_torch(loader.dataset), split='iid', "
            "clients=10)"
        )
    pairs = not hasattr(data, "dtype") and hasattr(data, "__getitem__") and hasattr(data, "__len__")
    if pairs and not isinstance(data, tuple | list | dict):  # a torch Dataset
        fix = "split it: fedspeed.data.federate(fedspeed.data.from_torch(dataset), split='iid', clients=10)"
        return f"a {kind}", fix
    return f"a {kind}", "make one with Federated.from_arrays(x, y, clients), see docs/guides/data.md for more ways"
