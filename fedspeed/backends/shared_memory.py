"""Shared memory between processes, and trees of tensors in it.

A process maps the memory that it computes with. Memory that it only passes on is read and written like a file, or
unmapped after use: mapped pages count as memory of every process that has touched them.
"""

from __future__ import annotations

import math
import mmap
import os
import shutil
import tempfile
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..client.trees import tree_leaves
from ..errors import UserError

ALIGN = 64
"""Bytes to which every tensor is aligned: kernels sum in another order, and give other bits, at unaligned addresses."""
PASSED_ON = hasattr(os, "memfd_create")
"""Whether reading and writing a segment like a file agrees with its mapped pages, as on Linux."""


class Slot(NamedTuple):
    """The place of a tensor in a segment."""

    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """The number of bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    def view(self, raw: torch.Tensor) -> torch.Tensor:
        """Return the tensor in this slot of an array of bytes, sharing memory."""
        if not self.size:
            return torch.empty(self.shape, dtype=self.dtype)
        return raw[self.offset : self.offset + self.size].view(self.dtype).view(self.shape)


class Segment:
    """A piece of memory that other processes map too.

    On Linux it has no name that could be left behind; elsewhere it is a temporary file, which `unlink` removes.
    """

    def __init__(self, handle: int, path: Path, size: int) -> None:
        self.handle = handle
        self.path = path
        self.size = size

    @cached_property
    def map(self) -> mmap.mmap:
        """The mapped memory."""
        return mmap.mmap(self.handle, self.size)

    @classmethod
    def create(cls, size: int) -> Segment:
        """Create a segment of at least `size` bytes."""
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

    def tensor(self, place: Slot) -> torch.Tensor:
        """Return the tensor in a slot, sharing memory; a user's hook that copies it deeply copies no other."""
        count = math.prod(place.shape)
        if not count:
            return torch.empty(place.shape, dtype=place.dtype)
        return torch.frombuffer(self.map, dtype=place.dtype, count=count, offset=place.offset).view(place.shape)

    def write(self, place: Slot, a: torch.Tensor) -> None:
        """Copy a tensor to a slot."""
        if not PASSED_ON:
            self.tensor(place).copy_(a)
            return
        left = _bytes(a.detach().to(place.dtype).expand(place.shape).contiguous())
        while len(left):
            left = left[os.pwrite(self.handle, left, place.offset + place.size - len(left)) :]

    def read(self, place: Slot) -> torch.Tensor:
        """Return a copy of the tensor in a slot."""
        if not PASSED_ON:
            return self.tensor(place).clone()
        a = torch.empty(place.shape, dtype=place.dtype)
        left = _bytes(a)
        while len(left):
            left = left[os.preadv(self.handle, [left], place.offset + place.size - len(left)) :]
        return a

    def leave(self, places: list[Slot]) -> None:
        """Unmap the pages of these slots; their contents stay."""
        if PASSED_ON and places and "map" in self.__dict__:
            start = places[0].offset // mmap.PAGESIZE * mmap.PAGESIZE
            self.map.madvise(mmap.MADV_DONTNEED, start, places[-1].offset + places[-1].size - start)

    def unlink(self) -> None:
        """Close the segment and remove its name; the memory is freed when the last process unmaps it."""
        self.__dict__.pop("map", None)  # closed with the last tensor in it
        os.close(self.handle)
        if not self.path.is_relative_to("/proc"):
            self.path.unlink(missing_ok=True)


def lay_out(tensors: list[torch.Tensor], start: int = 0) -> tuple[list[Slot], int]:
    """Return aligned slots for tensors, one after the other, and the offset behind the last."""
    places = []
    for a in tensors:
        start = -(-start // ALIGN) * ALIGN
        places.append(Slot(start, a.dtype, tuple(a.shape)))
        start += a.numel() * a.element_size()
    return places, -(-start // ALIGN) * ALIGN


def put(segment: Segment, places: list[Slot], tree: Any) -> None:
    """Copy a tree's tensors to their slots."""
    for place, a in zip(places, tree_leaves(tree), strict=True):
        segment.write(place, a)


def _bytes(a: torch.Tensor) -> memoryview:
    whole: memoryview = a.view(-1).view(torch.uint8).numpy().data
    return whole
