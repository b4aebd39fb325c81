"""Memory of a run with worker processes: data are mapped by the workers, and nobody keeps a copy."""

from __future__ import annotations

import subprocess
import sys
from multiprocessing import parent_process
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import fedspeed
from fedspeed.backends import common
from fedspeed.backends.process import Processes

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
SAMPLES, FEATURES = 2000, 4096  # 8 MB of bytes
MB = 2**20


class Bytes(nn.Module):
    """A layer on pictures as bytes, after which 9 million parameters wait."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.out = nn.Linear(FEATURES, 1024), nn.Linear(1024, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.layer(x.float() / 255).relu())


class WithoutSympy(nn.Linear):
    """A layer that fails in a worker process if sympy was imported there: a quarter of a second and 30 MB."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert parent_process() is None or "sympy" not in sys.modules
        return super().forward(x)


def areas(process: int | str, name: str) -> list[tuple[str, dict[str, int]]]:
    """The mapped areas of a process whose file has a name: the file's inode, and what the system counts, in bytes."""
    found: list[tuple[str, dict[str, int]]] = []
    mine = False
    for line in Path(f"/proc/{process}/smaps").read_text().splitlines():
        first, *rest = line.split()
        if "-" in first and not first.endswith(":"):
            mine = name in line
            if mine:
                found.append((rest[3], {}))
        elif mine and rest[-1:] == ["kB"]:
            found[-1][1][first[:-1]] = 1024 * int(rest[0])
    return found


@pytest.fixture
def mapped(tmp_path):
    """A federation whose inputs are mapped from a file, as data sets are."""
    r = np.random.default_rng(0)
    np.save(tmp_path / "x.npy", r.integers(0, 256, (SAMPLES, FEATURES), dtype=np.uint8))
    x = np.load(tmp_path / "x.npy", mmap_mode="c")
    y = r.integers(0, 3, SAMPLES)
    owner = np.repeat(np.arange(10), SAMPLES // 10)
    return fedspeed.Federated.from_arrays(x, y, owner, test=(x[:100], y[:100]), classes=3)


def rounds(data, backend):
    how = {"rounds": 2, "active": 4, "batch_size": 10, "local_steps": 2, "lr": 0.05, "engine": "loop"}
    torch.manual_seed(0)
    return fedspeed.simulate("fedspeed", Bytes(), data, backend=backend, workers=2, **how)


def test_workers_map_the_data_and_neither_they_nor_the_driver_keep_a_copy(mapped):
    with rounds(mapped, "process") as run:
        assert isinstance(run.backend, Processes)
        run.step()  # after the last round they are gone
        workers = [worker.process.pid for worker in run.backend.workers]
        segments = [{inode for inode, _ in areas(pid, "memfd:fedspeed")} for pid in workers]
        assert segments[0] == segments[1]
        assert len(segments[0]) == 2  # the data, and the vectors
        for pid in workers:
            held = [about for _, about in areas(pid, "memfd:fedspeed")]
            assert sum(about["Anonymous"] for about in held) == 0
            data = min(held, key=lambda about: about["Size"])  # the vectors are longer
            assert data["Size"] >= SAMPLES * FEATURES
            assert data["Rss"] == 0  # it was read, and unmapped
            assert areas(pid, "x.npy") == []
    [(_, driver)] = areas("self", "x.npy")
    assert driver["Size"] >= SAMPLES * FEATURES
    assert driver["Rss"] <= MB


def test_neither_the_driver_nor_a_worker_imports_what_it_does_not_use(tmp_path):
    data = fedspeed.Federated.from_arrays(np.ones((8, 2), np.float32), np.arange(8) % 2, np.arange(8) // 2)
    how = {"rounds": 1, "active": 4, "batch_size": 1, "backend": "process", "workers": 2}
    assert len(list(fedspeed.simulate("fedspeed", WithoutSympy(2, 2), data, **how))) == 1
    words = ["run", "--rounds", "1", "--backend", "process", "--quiet", "--out", str(tmp_path / "run")]
    code = f"import sys\nfrom fedspeed.cli import main\nsys.exit(main({words!r}) or 'sympy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_first_vector_is_not_sent_with_the_model_and_the_bits_are_those_of_serial(mapped):
    with rounds(mapped, "process") as run:
        d = run.work.flat.d
        assert len(run.backend._payload) < d  # a number has four bytes
        assert all(p.untyped_storage().nbytes() >= 4 * d for p in run.work.flat.parameters)  # the driver has its own
        records = [record.test_loss for record in run]
        x = run.x.clone()
    with rounds(mapped, "serial") as alone:
        assert [record.test_loss for record in alone] == records
        assert torch.equal(alone.x, x)


@pytest.mark.parametrize(
    ("most", "expected"),
    [(2**30, {-3: 2**30, -1: 2**30}), (2**25, {-3: 2**25, -1: 2**30}), (0, {})],
    ids=["glibc 2.35", "older", "refused"],
)
def test_freed_memory_is_kept_as_far_as_glibc_allows(monkeypatch, most, expected):
    """A limit that is refused must not leave the other one alone: it would fix the first at 128 kB."""
    done: dict[int, int] = {}

    def mallopt(option: int, value: int) -> int:
        if option == -3 and value > most:
            return 0
        done[option] = value
        return 1

    monkeypatch.setattr(common.ctypes, "CDLL", lambda name: SimpleNamespace(mallopt=mallopt))
    common.keep_memory()
    assert done == expected
