"""`Federated`: resident tensors and an index list a client."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import torch

from ..errors import UserError
from .augment import Pipeline


@dataclass(frozen=True, eq=False)
class Federated:
    """All the data of a federation: two tensors, who owns which rows, and a test set.

    Pictures stay `uint8` (NCHW) in memory and become floats a batch at a time; floating inputs are used as
    they are. Client i owns rows `indices[offsets[i]:offsets[i + 1]]`, so a million clients cost two arrays.

    Args:
        x, y: the training inputs and targets, row by row.
        indices, offsets: the split, as above.
        x_test, y_test: the held-out set, or None.
        name: what the data set calls itself.
        classes: number of classes, or None for regression.
        pipeline: how a batch of rows becomes model input (normalisation, augmentation).
        class_names: of the classes, if they have any.

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

    @classmethod
    def from_arrays(
        cls,
        x: np.ndarray | torch.Tensor,
        y: np.ndarray | torch.Tensor,
        clients: Sequence[Sequence[int] | np.ndarray] | np.ndarray,
        test: tuple[np.ndarray | torch.Tensor, np.ndarray | torch.Tensor] | None = None,
        *,
        name: str = "arrays",
        split: str = "given",
        pipeline: Pipeline | None = None,
        classes: int | None = None,
        class_names: tuple[str, ...] = (),
    ) -> Federated:
        """Build from arrays; `clients` is a list of index lists, or one owner id a row."""
        x, y = _tensor(x), _targets(y)
        if len(x) != len(y):
            raise UserError(f"data: expected as many targets as inputs, found {len(x)} inputs and {len(y)} targets")
        if isinstance(clients, np.ndarray) and clients.ndim == 1 and clients.dtype != object:
            _, owner = np.unique(clients, return_inverse=True)
            if len(owner) != len(x):
                raise UserError(f"data: expected one client id a row ({len(x)}), found {len(owner)}")
            clients = np.split(np.argsort(owner, kind="stable"), np.cumsum(np.bincount(owner))[:-1])
        lists = [np.asarray(rows, dtype=np.int64) for rows in clients]
        empty = [i for i, rows in enumerate(lists) if not len(rows)]
        if not lists or empty:
            raise UserError(f"data: every client needs at least one sample; clients {empty[:5]} have none")
        indices, offsets = np.concatenate(lists), np.cumsum([0] + [len(rows) for rows in lists])
        if indices.min() < 0 or indices.max() >= len(x):
            raise UserError(f"data: client indices must lie in 0..{len(x) - 1}, found {indices.min()}..{indices.max()}")
        x_test, y_test = (_tensor(test[0]), _targets(test[1])) if test else (None, None)
        if not y.is_floating_point() and y.ndim == 1:
            parts = [y] if y_test is None or not len(y_test) else [y, y_test]
            low, high = min(int(a.min()) for a in parts), max(int(a.max()) for a in parts)
            classes = high + 1 if classes is None else classes
            if low < 0 or high >= classes:
                raise UserError(f"data {name}: labels must lie in 0..{classes - 1}, found {low}..{high}")
        return cls(x, y, indices, offsets, x_test, y_test, name, classes, split, pipeline or Pipeline(), class_names)

    @property
    def clients(self) -> int:
        """Number of clients."""
        return len(self.offsets) - 1

    @cached_property
    def sizes(self) -> np.ndarray:
        """Samples of every client."""
        return np.diff(self.offsets)

    def rows(self, i: int) -> np.ndarray:
        """Row numbers that client i owns."""
        return self.indices[self.offsets[i] : self.offsets[i + 1]]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one input, without the batch axis."""
        return tuple(self.x.shape[1:])

    def batch(self, rows: np.ndarray, stream: np.random.Generator | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets of some rows, augmented when a random stream is given."""
        index = torch.from_numpy(np.ascontiguousarray(rows)).to(self.x.device)
        return self.pipeline(self.x.index_select(0, index), stream), self.y.index_select(0, index)

    def test_batch(self, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Test inputs and targets `start..stop-1`, never augmented."""
        if self.x_test is None or self.y_test is None:
            raise UserError(f"data {self.name}: there is no test set; give one, or do not evaluate")
        return self.pipeline(self.x_test[start:stop], None), self.y_test[start:stop]

    def to(self, device: torch.device | str, dtype: torch.dtype) -> Federated:
        """The same data on a device; floating tensors (and batches of pictures) in `dtype`."""

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

    def share(self) -> Federated:
        """The same data in memory that worker processes map instead of copying."""
        for a in (self.x, self.y, self.x_test, self.y_test):
            if a is not None:
                a.share_memory_()  # type: ignore[no-untyped-call]
        return self

    @cached_property
    def fingerprint(self) -> str:
        """Digest of inputs, targets and test set as bytes."""
        digest = hashlib.blake2b(digest_size=8)
        for a in (self.x, self.y, self.x_test, self.y_test):
            if a is not None:
                digest.update(f"{a.dtype}{tuple(a.shape)}".encode())
                digest.update(a.detach().cpu().contiguous().numpy().data)
        return digest.hexdigest()

    @cached_property
    def split_fingerprint(self) -> str:
        """Digest of who owns which row: two splits are the same if and only if this is."""
        digest = hashlib.blake2b(self.offsets.astype("<i8").tobytes(), digest_size=8)
        digest.update(self.indices.astype("<i8").tobytes())
        return digest.hexdigest()


def _tensor(a: np.ndarray | torch.Tensor) -> torch.Tensor:
    """The same memory as a tensor; a copy of arrays that may not be written to, which torch does not have."""
    return torch.as_tensor(a.copy() if isinstance(a, np.ndarray) and not a.flags.writeable else a)


def _targets(y: np.ndarray | torch.Tensor) -> torch.Tensor:
    """Class labels as int64, which the losses want; anything else as it is."""
    y = _tensor(y)
    return y if y.is_floating_point() else y.long()
