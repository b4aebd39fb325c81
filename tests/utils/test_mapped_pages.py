"""Pages of mapped files leave memory once they were read; what was written to them stays."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from fedspeed.utils import pages

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux releases pages")
SIZE = 2**25


def resident(path: Path) -> int:
    """Bytes of a file in this process's memory, as the system counts them."""
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split()[0]:
            inside = line.endswith(str(path))
        elif inside and line.startswith("Rss:"):
            total += 1024 * int(line.split()[1])
    return total


@pytest.fixture
def mapped(tmp_path):
    """A file of random bytes, mapped as data sets are, and what it holds."""
    content = np.random.default_rng(0).integers(0, 256, SIZE, dtype=np.uint8)
    np.save(tmp_path / "a.npy", content)
    return np.load(tmp_path / "a.npy", mmap_mode="c"), content, tmp_path / "a.npy"


def test_pages_that_were_only_read_leave_memory_and_can_be_read_again(mapped):
    a, content, file = mapped
    assert (a == content).all()
    assert resident(file) >= SIZE
    pages.release(a)
    assert resident(file) <= 2 * 4096  # the first page has the header too, the last one an end
    assert (a == content).all()


def test_what_was_written_is_never_lost(mapped):
    a, content, _ = mapped
    assert (a == content).all()
    a[SIZE // 2] = content[SIZE // 2] ^ 255
    pages.release(a)
    assert a[SIZE // 2] == content[SIZE // 2] ^ 255
    assert np.flatnonzero(a != content).tolist() == [SIZE // 2]


def test_memory_that_is_no_file_stays_as_it_is():
    a = np.random.default_rng(1).integers(0, 256, SIZE, dtype=np.uint8)
    before = a.copy()
    pages.release(a)
    pages.release(a[:100])
    assert (a == before).all()


def test_pieces_are_the_whole_and_do_not_stay(mapped, monkeypatch):
    a, content, file = mapped
    monkeypatch.setattr(pages, "PIECE", SIZE // 8)
    most, found = 0, b""
    for piece in pages.read_once(a):
        found += bytes(piece)
        most = max(most, resident(file))
    assert found == content.tobytes()
    assert most <= SIZE // 4  # the system maps a few pages around those that are read
    for other in (np.float64(3.5), np.empty((0, 3)), np.arange(12.0).reshape(3, 4).T):
        assert b"".join(pages.read_once(np.asarray(other))) == np.ascontiguousarray(other).tobytes()
