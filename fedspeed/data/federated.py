"""`Federated`: the data of all clients, as tensors in memory or on disk, and the rows that each client owns."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch

from ..config.spec import Validation, parse_client_test, parse_validation
from ..errors import UserError
from ..utils.devices import to_device
from ..utils.notebook import card
from ..utils.pages import read_once
from ..utils.random import rng
from .augment import Pipeline
from .on_disk import OnDisk, TensorOnDisk
from .samples import Samples, convert, hold_out, own_test_rows, rows_or_ids, shown
from .splits import Rows, by_owner


class ClientRows(NamedTuple):
    """Rows by client: client i has `indices[offsets[i]:offsets[i + 1]]`, perhaps none.

    Args:
        held: whether they are rows of the test set, not of `x` and `y`.
    """

    indices: np.ndarray
    offsets: np.ndarray
    held: bool = False


@dataclass(frozen=True, eq=False, repr=False)
class Federated:
    """The data of a federation: two tensors, the rows of each client, a test set, perhaps parts that are set aside.

    Pictures stay `uint8` (NCHW) in memory and become floats a batch at a time; other inputs are used as they are.
    Inputs on disk (`TensorOnDisk`) are read a batch at a time, with the bits of the same inputs in memory.
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
        client_test: the rows that each client is scored on and no client trains on; None without such parts.

    Example:
        >>> x, y = np.zeros((4, 2), "f4"), np.array([0, 1, 0, 1])
        >>> data = Federated.from_arrays(x, y, clients=[[0, 1], [2, 3]])
        >>> data.clients, data.sizes.tolist()
        (2, [2, 2])
    """

    x: torch.Tensor | TensorOnDisk
    y: torch.Tensor
    indices: np.ndarray
    offsets: np.ndarray
    x_test: torch.Tensor | TensorOnDisk | None = None
    y_test: torch.Tensor | None = None
    name: str = "arrays"
    classes: int | None = None
    split: str = "given"
    pipeline: Pipeline = field(default_factory=Pipeline)
    class_names: tuple[str, ...] = ()
    validation: np.ndarray | None = None
    client_test: ClientRows | None = None

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
        client_test: Any = None,
    ) -> Federated:
        """Build from arrays and a split of your own; conversion and checks are those of `fedspeed.data.from_arrays`.

        Args:
            x, y: inputs and targets, as there; nothing is augmented unless `pipeline` says so.
            clients: a list with the row numbers (or a boolean mask) of every client, or one client id per row.
            test: the test set `(x_test, y_test)`.
            holdout: without a test set, this fraction of every class is set aside as one and leaves the clients'
                rows; by default none, and then nothing is evaluated.
            classes: their number; by default the largest label and one.
            client_test: the part of the test set that belongs to each client, in one of the forms of `clients`; a
                client may have none. `with_client_test` takes a part off the clients' own rows instead.
        """
        found = convert(x, y, test, name, classes, known=len(class_names))
        n, tests = len(found.x), 0 if found.x_test is None else len(found.x_test)
        if client_test is not None and not tests:
            raise UserError(
                f"data {name}: client_test: expected a test set to take the clients' parts from, found none"
            )
        owners = rows_or_ids(clients, n, name)
        own = None if client_test is None else own_test_rows(client_test, owners, tests, name)
        owned = owners if isinstance(owners, Rows) else by_owner(owners)
        indices, offsets = owned.indices, owned.offsets
        if len(indices) and (indices.min() < 0 or indices.max() >= n):
            raise UserError(
                f"data {name}: client indices must lie in 0..{n - 1}, found {indices.min()}..{indices.max()}"
            )
        after = ""
        if found.x_test is None and holdout:
            held, after = np.zeros(n, bool), f" after holdout = {holdout}"
            held[hold_out(found.y, holdout, name)[1]] = True
            found = found._replace(x_test=found.x[held], y_test=found.y[held])
            left = ~held[indices]
            indices, offsets = indices[left], _kept(offsets, left)
        if not len(indices) or not np.diff(offsets).all():
            none = np.flatnonzero(np.diff(offsets) == 0)[:5].tolist()
            raise UserError(f"data {name}: every client needs at least one sample; clients {none} have none{after}")
        x, y, x_test, y_test = (_tensor(a) for a in found[:4])
        tested = None if own is None else ClientRows(own.indices, own.offsets, held=True)
        return cls(
            x, y, indices, offsets, x_test, y_test, name, found.classes, split, pipeline or Pipeline(), class_names,
            None, tested,
        )  # fmt: skip

    def _facts(self) -> dict[str, str]:
        """Return what the data are, in words."""
        low, middle, high = np.percentile(self.sizes, [0, 50, 100], method="nearest").tolist()
        sizes = f"{low:,} each" if low == high else f"{low:,} to {high:,} each, median {middle:,}"
        other = "regression" if self.y.is_floating_point() else "no classes"
        tested = self.client_test
        facts = {
            "clients": f"{self.clients:,} clients",
            "samples": f"{len(self.indices):,} samples ({sizes})",
            "inputs": shown(self.x),
            "augmentation": f"augmentation {self.pipeline.augmentation}" if self.is_pictures else "",
            "targets": other if self.classes is None else f"{self.classes} classes",
            "split": f"split {self.split}",
            "test": "no test set" if self.y_test is None else f"{len(self.y_test):,} for testing",
            "validation": "" if self.validation is None else f"{len(self.validation):,} for validation",
            "client_test": "" if tested is None else f"{len(tested.indices):,} for tests of each client",
        }
        return {name: text for name, text in facts.items() if text}

    def __repr__(self) -> str:
        return f"<Federated {self.name}: {', '.join(self._facts().values())}>"

    def _repr_html_(self) -> str:
        return card(f"Federated {self.name}", self._facts(), [])

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

    def rows_at(self, clients: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Return the rows at these positions, (clients, batch), among those that each client owns.

        Example:
            >>> data = Federated.from_arrays(np.zeros((4, 2)), np.zeros(4, int), clients=[[3, 1], [0, 2]])
            >>> data.rows_at(np.array([1, 0]), np.array([[0, 1], [1, 0]])).tolist()
            [[0, 2], [1, 3]]
        """
        return np.asarray(self.indices[self.offsets[clients][:, None] + positions])

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of one input, without the batch axis."""
        return tuple(self.x.shape[1:])

    def batch(self, rows: np.ndarray, stream: np.random.Generator | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return inputs and targets of some rows, augmented when a random stream is given."""
        x, y = _rows(self.x, self.y, rows)
        return self.pipeline(x, stream), y

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

    @property
    def scored(self) -> ClientRows:
        """Return the rows that each client is scored on: its test part, or without one the rows it trains on."""
        return ClientRows(self.indices, self.offsets) if self.client_test is None else self.client_test

    def scored_batch(self, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return inputs and targets at positions `start..stop-1` of `scored`, never augmented."""
        rows, _, held = self.scored
        if not held:
            return self.batch(rows[start:stop])
        if self.x_test is None or self.y_test is None:
            raise UserError(
                f"data {self.name}: client_test: expected the test set of its rows, found none; give it too"
            )
        x, y = _rows(self.x_test, self.y_test, rows[start:stop])
        return self.pipeline(x, None), y

    def with_client_test(self, spec: str | float, seed: int = 0) -> Federated:
        """Return the same data with a test part per client, which no client trains on; the same rows for every method.

        Rows are drawn at random, not class by class: a test part has the client's own mix of labels, up to chance. A
        client with too few rows keeps all of them and has no test part.

        Args:
            spec: `0.2`, that fraction of every client's rows, rounded, halves up; `"own"` asserts that the data came
                with such a part.
            seed: decides which rows.

        Example:
            >>> data = Federated.from_arrays(np.zeros((21, 2)), np.arange(21) % 2, np.arange(21) // 10)
            >>> tested = data.with_client_test(0.2)
            >>> tested.sizes.tolist(), np.diff(tested.client_test.offsets).tolist()
            ([8, 8, 1], [2, 2, 0])
        """
        share = parse_client_test(spec)
        if share is None:
            if self.client_test is None:
                raise UserError(
                    f"data {self.name}: client_test own: expected data with a test part per client (client ids of "
                    f"training and test rows, and split natural), found none; take a share, client_test 0.2"
                )
            return self
        if self.client_test is not None:
            raise UserError(
                f"data {self.name}: client_test {spec}: expected data without test parts, found one per client; "
                f"write own, or leave it out"
            )
        taken = self._drawn(share, seed, "client test")
        if not taken.any():
            raise UserError(
                f"data {self.name}: client_test {spec}: expected a client with enough samples to take one off, found "
                f"at most {self.sizes.max()} each; take a larger share, or fewer clients"
            )
        everyone, fix = np.ones(self.clients, bool), "take a smaller share, or another split"
        left, _ = self._without(taken, everyone, f"client_test {spec}", fix)
        return replace(left, client_test=ClientRows(self.indices[taken], _kept(self.offsets, taken)))

    def _drawn(self, share: Validation, seed: int, purpose: str) -> np.ndarray:
        """Return which of `indices` are in a share of every client's rows, drawn at random."""
        taken = np.zeros(len(self.indices), bool)
        for i in range(self.clients):
            drawn = rng(seed, purpose, i).permutation(self.sizes[i])[: share.count(int(self.sizes[i]))]
            taken[self.offsets[i] + drawn] = True
        return taken

    def _without(self, taken: np.ndarray, trains: np.ndarray, what: str, fix: str) -> tuple[Federated, np.ndarray]:
        """Return the data without the rows of some `indices`, and a mark on these rows.

        Args:
            trains: which clients stay; all rows of the others are taken.
            what, fix: the setting that takes them and what else to set, for messages.
        """
        mark = np.zeros(len(self.x), bool)
        mark[self.indices[taken]] = True
        left = ~mark[self.indices]  # where a split repeats samples, no other client trains on a taken one either
        offsets = _kept(self.offsets, left, trains)
        if not mark.any() or not np.diff(offsets).all():
            why = "have too few samples each to take any off" if not mark.any() else "would be left without a sample"
            raise UserError(f"data {self.name}: {what}: clients {why}; {fix}")
        return replace(self, indices=self.indices[left], offsets=offsets), mark

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
        trains = np.ones(m, bool)
        if chosen.of_clients:
            trains[rng(seed, "validation").choice(m, chosen.count(m), replace=False)] = False
            taken = np.repeat(~trains, self.sizes)
        else:
            taken = self._drawn(chosen, seed, "validation")
        left, mark = self._without(taken, trains, f"validation {spec}", "take clients:0.1, or another split")
        if self.client_test is not None and chosen.of_clients:
            rows, offsets, held = self.client_test
            stays = np.repeat(trains, np.diff(offsets))
            if not held:  # all rows of these clients are for validation, and for nothing else
                mark[rows[~stays]] = True
                stays &= ~mark[rows]
            left = replace(left, client_test=ClientRows(rows[stays], _kept(offsets, stays, trains), held))
        return replace(left, validation=np.flatnonzero(mark))

    def floats(self) -> Federated:
        """Return the same data with whole-number inputs as float32, for models that compute with them (bytes stay)."""
        if self.x.is_floating_point() or self.x.dtype == torch.uint8:
            return self
        return replace(self, x=self.x.float(), x_test=None if self.x_test is None else self.x_test.float())

    def to(self, device: torch.device | str, dtype: torch.dtype) -> Federated:
        """Return the same data on a device; floating tensors (and batches of pictures) in `dtype`."""

        def move(a: Any) -> Any:
            return None if a is None else a.to(device, dtype if a.is_floating_point() else None)

        moved = {name: move(getattr(self, name)) for name in ("x", "y", "x_test", "y_test")}
        return replace(self, **moved, pipeline=replace(self.pipeline, dtype=dtype))

    @cached_property
    def fingerprint(self) -> str:
        """Return a digest of inputs, targets and test set as bytes; files hold it, so it must not change."""
        digest = hashlib.blake2b(digest_size=8)
        for a in (self.x, self.y, self.x_test, self.y_test):
            if a is not None:
                digest.update(f"{a.dtype}{tuple(a.shape)}".encode())
                for part in a.chunks() if isinstance(a, TensorOnDisk) else (a,):
                    for piece in read_once(part.detach().cpu().contiguous().numpy()):
                        digest.update(piece)
        return digest.hexdigest()

    @cached_property
    def split_fingerprint(self) -> str:
        """Return a digest of the rows of each client and of parts set aside; equal splits have equal digests."""
        digest = hashlib.blake2b(self.offsets.astype("<i8").tobytes(), digest_size=8)
        for start in range(0, len(self.indices), 2**20):  # in chunks: a copy of all might not fit into memory
            digest.update(self.indices[start : start + 2**20].astype("<i8").tobytes())
        if self.validation is not None:
            digest.update(b"validation" + self.validation.astype("<i8").tobytes())
        if self.client_test is not None:
            rows, offsets, held = self.client_test
            digest.update((b"held out" if held else b"client") + b" test" + offsets.astype("<i8").tobytes())
            digest.update(rows.astype("<i8").tobytes())
        return digest.hexdigest()


def _kept(offsets: np.ndarray, mark: np.ndarray, clients: np.ndarray | None = None) -> np.ndarray:
    """Return the offsets of the marked rows, for some clients or all; the others have no marked row."""
    found: np.ndarray = np.concatenate([[0], np.cumsum(mark)])[offsets]
    return found if clients is None else found[np.append(True, clients)]


def _rows(x: torch.Tensor | TensorOnDisk, y: torch.Tensor, rows: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """Return some rows of inputs and targets, in memory; the indices are sent to the device once."""
    index = to_device(rows, x.device)
    return x[rows] if isinstance(x, TensorOnDisk) else x.index_select(0, index), y.index_select(0, index)


def _tensor(a: np.ndarray | OnDisk | None) -> Any:
    """Return a tensor with the same memory; a copy of a read-only array, which torch does not support."""
    if a is None or isinstance(a, OnDisk):
        return None if a is None else TensorOnDisk(a)
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
    found = f"a {type(data).__name__}"
    fix = "make one with Federated.from_arrays(x, y, clients), see docs/guides/data.md for more ways"
    pairs = not hasattr(data, "dtype") and hasattr(data, "__getitem__") and hasattr(data, "__len__")
    if isinstance(data, str):
        found = f"the name {data!r}"
        fix = f"load it first: data = fedspeed.load_data({data!r}, split='dirichlet:0.6', clients=100)"
    elif isinstance(data, type):
        found = f"the class {data.__name__}"
        fix = "fedspeed.load_data or Federated.from_arrays(x, y, clients) make an instance (docs/guides/data.md)"
    elif isinstance(data, Samples):
        found = "Samples, which are not split yet"
        fix = "split them: fedspeed.data.federate(samples, split='iid', clients=10)"
    elif hasattr(data, "dataset"):  # a DataLoader
        made = "fedspeed.data.federate(fedspeed.data.from_torch(loader.dataset), split='iid', clients=10)"
        fix = f"batches are drawn here: {made}"
    elif pairs and not isinstance(data, tuple | list | dict):  # a torch Dataset
        fix = "split it: fedspeed.data.federate(fedspeed.data.from_torch(dataset), split='iid', clients=10)"
    raise UserError(f"data: expected a Federated, found {found}; {fix}")
