"""Trees of tensors as one array of bytes, for back ends whose messages are arrays: put together here, opened there."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from ..vec import tree_map
from .shared import ALIGN, Place, lay_out


def seal(tensors: Sequence[torch.Tensor]) -> np.ndarray:
    """The bytes of some tensors, one after the other, each at a place of `lay_out`."""
    places, size = lay_out(list(tensors))
    raw = torch.empty(max(size, ALIGN), dtype=torch.uint8)
    for place, a in zip(places, tensors, strict=True):
        _at(raw, place).copy_(a.detach())
    whole: np.ndarray = raw.numpy()
    return whole


class Parcel:
    """Tensors in an array of bytes, which may be memory that others read too: they must not be written to.

    Args:
        raw: what `seal` made. Its address is looked at: one that is not aligned would give other bits, and is copied.
    """

    def __init__(self, raw: np.ndarray) -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The given NumPy array is not writable")
            whole = torch.from_numpy(raw)
        self.raw = whole if whole.data_ptr() % ALIGN == 0 else whole.clone()

    def tensors(self, like: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Views, of the shapes and dtypes of the tensors that were sealed."""
        return [_at(self.raw, place) for place in lay_out(list(like))[0]]


def tree_of(like: Any, leaves: Iterable[torch.Tensor]) -> Any:
    """A tree like another, of these tensors."""
    remaining = iter(leaves)
    return tree_map(lambda _: next(remaining), like)


def _at(raw: torch.Tensor, place: Place) -> torch.Tensor:
    if not place.size:
        return torch.empty(place.shape, dtype=place.dtype)
    return raw[place.offset : place.offset + place.size].view(place.dtype).view(place.shape)
