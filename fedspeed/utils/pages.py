"""Pages of mapped files: a process that has read a large file once need not keep it in its memory.

Data sets are mapped (`np.load(..., mmap_mode="c")`). Every page that was read counts as memory of the process until it
is unmapped, though the system keeps the file anyway. What was written to stays: such a page is a copy of the process's
own. Nothing here does anything but on Linux.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from collections.abc import Iterator
from contextlib import suppress

import numpy as np

PIECE = 2**25
"""Bytes between two releases: what is in memory at a time."""
HELD, OF_A_FILE = np.uint64(3 << 62), np.uint64(1 << 61)
"""Bits of an entry of /proc/self/pagemap: the page is in memory or in swap; it is that of the file, not a copy."""


def read_once(whole: np.ndarray) -> Iterator[memoryview]:
    """Yield the bytes of an array in pieces, in order, and release each after it was used.

    Example:
        >>> b"".join(read_once(np.arange(3, dtype=np.uint8)))
        b'\\x00\\x01\\x02'
    """
    flat = np.ascontiguousarray(whole).reshape(-1).view(np.uint8)
    for start in range(0, len(flat), PIECE):
        piece = flat[start : start + PIECE]
        yield piece.data
        release(piece)


def release(array: np.ndarray) -> None:
    """Unmap the pages of a contiguous array that lie in a file and are as they are there; they are read again if used.

    Nothing is unmapped if one of the pages was written to, nor if the array is not mapped from a file.
    """
    if sys.platform != "linux":
        return
    page = mmap.PAGESIZE
    begin = -(-array.ctypes.data // page)
    count = (array.ctypes.data + array.nbytes) // page - begin  # pages that belong to the array alone
    if count > 0:
        with suppress(OSError):  # a system without this file
            if _as_in_files(begin, count):
                address, size = ctypes.c_void_p(begin * page), ctypes.c_size_t(count * page)
                ctypes.CDLL(None).madvise(address, size, mmap.MADV_DONTNEED)


def _as_in_files(begin: int, count: int) -> bool:
    """Return whether all pages that are held, at least one, are those of files."""
    handle = os.open("/proc/self/pagemap", os.O_RDONLY)
    try:
        entries = np.frombuffer(os.pread(handle, 8 * count, 8 * begin), np.uint64)
    finally:
        os.close(handle)
    held = entries[(entries & HELD) != 0]
    return len(entries) == count and len(held) > 0 and bool((held & OF_A_FILE).all())
