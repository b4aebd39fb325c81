"""Memory that processes share, and trees of tensors in it."""

from __future__ import annotations

import mmap
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..errors import UserError
from ..vec import tree_leaves, tree_map

ALIGN = 64
"""Kernels take other paths, and give other bits, at unaligned addresses."""


class Place(NamedTuple):
    """Where a tensor lies in a segment."""

    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]


class Segment:
    """A mapped file that other processes map too. Its name is removed as soon as everybody has it, so that nothing can
    be left behind; where /dev/shm is too small, an ordinary temporary file serves."""

    def __init__(self, path: Path, size: int, create: bool) -> None:
        self.path, self.size = path, size
        with path.open("w+b" if create else "r+b") as file:
            if create:
                os.truncate(file.fileno(), size)
            self.map = mmap.mmap(file.fileno(), size)

    @classmethod
    def create(cls, size: int) -> Segment:
        """A new segment of at least `size` bytes."""
        size = max(size, mmap.PAGESIZE)
        for folder in (Path("/dev/shm"), Path(tempfile.gettempdir())):
            if folder.is_dir() and os.access(folder, os.W_OK) and shutil.disk_usage(folder).free > size + 2**26:
                handle, name = tempfile.mkstemp(prefix="fedspeed-", dir=folder)
                os.close(handle)
                return cls(Path(name), size, create=True)
        raise UserError(f"back end process: no room for {size / 1e6:.0f} MB of shared memory; use --backend serial")

    def tensor(self, place: Place) -> torch.Tensor:
        """The tensor at a place, sharing memory."""
        flat = torch.frombuffer(self.map, dtype=place.dtype, count=_count(place), offset=place.offset)
        return flat.view(place.shape)

    def unlink(self) -> None:
        """Remove the name; the memory lives on until the last process lets go."""
        self.path.unlink(missing_ok=True)


def lay_out(tensors: list[torch.Tensor], start: int = 0) -> tuple[list[Place], int]:
    """Places one after the other, aligned, and where they end."""
    places = []
    for a in tensors:
        start = -(-start // ALIGN) * ALIGN
        places.append(Place(start, a.dtype, tuple(a.shape)))
        start += a.numel() * a.element_size()
    return places, -(-start // ALIGN) * ALIGN


def at(segment: Segment, prototype: Any, places: list[Place]) -> Any:
    """A tree like the prototype whose tensors are the segment's."""
    remaining = iter(places)
    return tree_map(lambda _: segment.tensor(next(remaining)), prototype)


def copy_into(target: Any, source: Any) -> None:
    """Copy a tree's tensors into another of the same shape."""
    for a, b in zip(tree_leaves(target), tree_leaves(source), strict=True):
        a.copy_(b)


def _count(place: Place) -> int:
    count = 1
    for side in place.shape:
        count *= side
    return count
