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
    """A piece of memory that other processes map too. On Linux it has no name that could be left behind; elsewhere it
    is a temporary file whose name is removed as soon as everybody has it."""

    def __init__(self, handle: int, path: Path, size: int) -> None:
        self.handle, self.path, self.size = handle, path, size
        self.map = mmap.mmap(handle, size)

    @classmethod
    def create(cls, size: int) -> Segment:
        """A new segment of at least `size` bytes."""
        size = max(size, mmap.PAGESIZE)
        if hasattr(os, "memfd_create"):
            handle = os.memfd_create("fedspeed")
            path = Path(f"/proc/{os.getpid()}/fd/{handle}")
        else:
            if shutil.disk_usage(tempfile.gettempdir()).free < size + 2**26:
                raise UserError(
                    f"back end process: no room for {size / 1e6:.0f} MB of shared files; use --backend serial"
                )
            handle, name = tempfile.mkstemp(prefix="fedspeed-")
            path = Path(name)
        os.truncate(handle, size)
        return cls(handle, path, size)

    @classmethod
    def attach(cls, path: Path, size: int) -> Segment:
        """The segment that another process made."""
        handle = os.open(path, os.O_RDWR)
        return cls(handle, path, size)

    def tensor(self, place: Place) -> torch.Tensor:
        """The tensor at a place, sharing memory."""
        flat = torch.frombuffer(self.map, dtype=place.dtype, count=_count(place), offset=place.offset)
        return flat.view(place.shape)

    def unlink(self) -> None:
        """Nobody else will map it; the memory lives on until the last process lets go."""
        os.close(self.handle)
        if not self.path.is_relative_to("/proc"):
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
