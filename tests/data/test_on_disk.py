"""Data larger than memory: rows on disk give the bits of the same rows in memory, and take no memory."""

from __future__ import annotations

import gc
import importlib.util
import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from watching import Rounds, Stop, stop_after

from fedspeed import simulate
from fedspeed.cli import main
from fedspeed.config.config import Config
from fedspeed.data import Federated, federate, from_arrays, from_hugging_face, load, read
from fedspeed.data import on_disk as module
from fedspeed.data.on_disk import OnDisk, TensorOnDisk, on_disk
from fedspeed.errors import UserError
from fedspeed.methods import FedSpeed
from fedspeed.models import build_model
from fedspeed.runs.launch import resume, run_config
from fedspeed.utils.random import rng

N = 2603  # two slices of the test set's scores
HAS_HF = importlib.util.find_spec("datasets") is not None
SETTINGS: dict[str, Any] = {"rounds": 2, "active": 3, "batch_size": 16, "local_epochs": 1, "engine": "loop"}
needs_hf = pytest.param("arrow", marks=pytest.mark.skipif(not HAS_HF, reason="needs the extra hf (package datasets)"))


def inputs(kind: str) -> np.ndarray:
    stream = np.random.default_rng(0)
    return {
        "pictures": lambda: stream.integers(0, 256, (N, 8, 8, 3), dtype=np.uint8),
        "grey": lambda: stream.integers(0, 256, (N, 8, 8), dtype=np.uint8),
        "floats": lambda: stream.normal(size=(N, 7)).astype(np.float32),  # 28 bytes a row: no row is aligned
        "doubles": lambda: stream.normal(size=(N, 7)),
        "halves": lambda: stream.normal(size=(N, 7)).astype(np.float16),
        "big-endian": lambda: stream.normal(size=(N, 7)).astype(">f4"),
        "tokens": lambda: stream.integers(0, 50, (N, 7), dtype=np.uint16),
        "booleans": lambda: stream.random((N, 7)) < 0.5,
    }[kind]()


LABELS = np.random.default_rng(1).integers(0, 4, N)


def shards(folder: Path, x: np.ndarray, name: str = "x", ends: tuple[int, ...] = (100, 650)) -> Path:
    """Write an array as shards 0, 1, 2, ... of unequal lengths."""
    folder.mkdir(exist_ok=True)
    for i, part in enumerate(np.split(x, ends)):
        np.save(folder / f"{name}-{i}.npy", part)
    return folder


def mapped(folder: Path, x: np.ndarray) -> np.memmap:
    np.save(folder / "x.npy", x)
    return np.load(folder / "x.npy", mmap_mode="r")


def pair(kind: str, source: str, folder: Path) -> tuple[Federated, Federated]:
    """The same data in memory and on disk."""
    x = inputs(kind)
    about = {"split": "dirichlet-class:0.5", "clients": 6, "validation": 0.1}
    if source == "map":
        made = [from_arrays(x, LABELS), from_arrays(mapped(folder, x), LABELS)]
    elif source == "shards":
        np.savez(folder / "x.npz", x=x, y=LABELS)
        np.save(shards(folder / "x", x) / "y.npy", LABELS)
        made = [read("arrays", data_dir=folder / "x.npz"), read("arrays", data_dir=folder / "x", mapped=True)]
    else:
        made = [from_hugging_face(arrow(folder, x), image="x", mapped=on) for on in (False, True)]
    there, here = (federate(samples, augment="paper", **about) for samples in made)
    assert isinstance(there.x, torch.Tensor)
    assert isinstance(here.x, TensorOnDisk)
    assert isinstance(here.x_test, TensorOnDisk)
    return there, here


def arrow(folder: Path, x: np.ndarray) -> Any:
    import datasets

    datasets.disable_progress_bars()
    column = datasets.List(datasets.Value(str(x.dtype))) if x.ndim == 2 else datasets.Array3D(x.shape[1:], str(x.dtype))
    features = datasets.Features({"x": column, "y": datasets.ClassLabel(num_classes=4)})
    made = datasets.Dataset.from_dict({"x": list(x), "y": LABELS}, features=features)
    made.save_to_disk(str(folder / "saved"), num_shards=3)
    return datasets.load_from_disk(str(folder / "saved"))


KINDS = ["pictures", "grey", "floats", "doubles", "halves", "big-endian", "tokens", "booleans"]
PAIRS = [(kind, source) for source in ("map", "shards") for kind in KINDS]


@pytest.mark.parametrize(("kind", "source"), [*PAIRS, *((kind, "arrow") for kind in ("pictures", "floats", "tokens"))])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_every_batch_is_that_of_the_same_data_in_memory(kind: str, source: str, tmp_path: Path) -> None:
    if source == "arrow":
        pytest.importorskip("datasets")
    there, here = pair(kind, source, tmp_path)
    assert here.fingerprint == there.fingerprint
    assert here.split_fingerprint == there.split_fingerprint
    assert (here.shape, here.x.dtype, here.x.ndim) == (there.shape, there.x.dtype, there.x.ndim)
    here = pickle.loads(pickle.dumps(here))  # as a worker gets it
    for dtype in (torch.float32, torch.float64):
        a, b = (data.floats().to("cpu", dtype) for data in (there, here))
        batches = [(d.batch(d.rows(2)[::-1].copy(), rng(0, "augment")), d.test_batch(3, 200)) for d in (a, b)]
        batches = [[*one, d.validation_batch(1, 40)] for one, d in zip(batches, (a, b), strict=True)]
        for (x, y), (x_disk, y_disk) in zip(*batches, strict=True):
            assert x.dtype == x_disk.dtype
            assert torch.equal(x, x_disk)
            assert torch.equal(y, y_disk)
            assert x_disk.data_ptr() % 64 == 0


def outcome(data: Federated, **settings: Any) -> tuple:
    data = data.floats()
    options = {**SETTINGS, "client_metrics": "every=1,own", **settings}
    with simulate(FedSpeed(), build_model("mlp", data, hidden=[9]), data, **options) as run:
        records = [{**r.to_dict(), "seconds": 0, "eval_seconds": 0} for r in run]
        scores = run.client_metrics
    return records, run.x.tolist(), repr([np.asarray(a).tolist() for a in scores])  # NaN is not NaN


@pytest.mark.parametrize("source", ["map", "shards", needs_hf])
@pytest.mark.parametrize("kind", ["pictures", "floats"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_run_has_the_bits_of_memory_on_serial_and_process(kind, source, tmp_path, quick_workers) -> None:
    there, here = pair(kind, source, tmp_path)
    truth = outcome(there)
    assert outcome(here) == truth
    assert outcome(here, backend="process", workers=2) == truth
    assert outcome(here, engine="block")[0] == outcome(there, engine="block")[0]


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
@pytest.mark.parametrize("source", ["map", "shards", needs_hf])
@pytest.mark.filterwarnings("ignore")
def test_a_run_has_the_bits_of_memory_on_ray_and_spawned_processes(source, tmp_path) -> None:
    pytest.importorskip("ray")
    there, here = pair("pictures", source, tmp_path)
    truth = outcome(there)
    for backend in ("process", "ray"):
        assert outcome(here, backend=backend, workers=2) == truth


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
@pytest.mark.filterwarnings("ignore")
def test_ray_says_which_file_a_node_does_not_have(tmp_path) -> None:
    pytest.importorskip("ray")
    _, here = pair("pictures", "map", tmp_path)
    here.x[:1]  # open, so that the driver can still read it
    (tmp_path / "x.npy").unlink()
    with pytest.raises(UserError, match=r"no worker can be used: .*cannot open .*x\.npy .*on every node"):
        outcome(here, backend="ray", workers=2)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Inputs as shards in a folder, and the same in a file beside it."""
    x = inputs("pictures")
    np.savez(tmp_path / "data.npz", x=x, y=LABELS)
    return shards(shards(tmp_path / "data", x), LABELS, "y")


def config(place: Path, backend: str = "serial", **options: Any) -> Config:
    about = {"method": "fedspeed", "model": "mlp", "clients": 6, "backend": backend, **SETTINGS, "rounds": 4}
    return Config.from_dict({**about, "data": {"name": "arrays", **options}, "data_dir": str(place)})


def digests(out: Path) -> dict[str, str]:
    return json.loads((out / "summary.json").read_text())["digests"]


def test_a_run_that_is_stopped_resumes_with_the_bits_of_memory(folder: Path, tmp_path: Path, quick_workers) -> None:
    run_config(config(folder.with_suffix(".npz")), tmp_path / "memory")
    with pytest.raises(Stop):
        run_config(config(folder, mapped=True), tmp_path / "out", observers=[stop_after(2)])
    assert main(["resume", str(tmp_path / "out"), "--backend", "process", "--workers", "2", "--quiet"]) == 0
    assert digests(tmp_path / "out") == digests(tmp_path / "memory")


def test_data_that_were_changed_meanwhile_are_found_by_their_digest(folder: Path, tmp_path: Path) -> None:
    """Neither size nor time says so."""
    with pytest.raises(Stop):
        run_config(config(folder, mapped=True), tmp_path / "out", observers=[stop_after(2)])
    file = folder / "x-2.npy"
    about = file.stat()
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(raw)
    os.utime(file, ns=(about.st_atime_ns, about.st_mtime_ns))
    with pytest.raises(UserError, match="data"):
        resume(tmp_path / "out")


def cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def grow(file: Path) -> None:
    with file.open("ab") as opened:
        opened.write(b"more")


@pytest.mark.parametrize(
    ("harm", "says"),
    [
        (cut, r"expected .*x-1\.npy as it was when the data were loaded, found it changed \(\d"),
        (grow, r"expected .*x-1\.npy as it was when the data were loaded, found it changed \(\d"),
        (os.utime, r"x-1\.npy .* found it changed \(another time of its last change\); put it back with its time"),
    ],
)
@pytest.mark.parametrize("backend", ["serial", "process"])
def test_a_file_that_is_changed_under_a_run_stops_it_in_one_line(
    harm, says, backend, folder, tmp_path, quick_workers
) -> None:
    os.utime(folder / "x-1.npy", (1e9, 1e9))
    kept = shutil.copy2(folder / "x-1.npy", tmp_path / "kept.npy")
    out = tmp_path / "out"

    def change(record) -> None:
        if record.round == 2:
            harm(folder / "x-1.npy")

    with pytest.raises(UserError, match=says) as caught:
        run_config(config(folder, backend, mapped=True), out, observers=[Rounds(change)])
    assert "\n" not in str(caught.value)
    shutil.copy2(kept, folder / "x-1.npy")
    resume(out)
    run_config(config(folder.with_suffix(".npz")), tmp_path / "memory")
    assert digests(out) == digests(tmp_path / "memory")


@pytest.mark.parametrize("backend", ["serial", "process"])
def test_files_that_are_deleted_under_a_run_are_read_to_its_end(backend, folder, tmp_path, quick_workers) -> None:
    """They are open; a process that starts later cannot open them, and says so."""
    out = tmp_path / "out"
    run_config(
        config(folder, backend, mapped=True), out, observers=[Rounds(lambda _: [*map(remove, folder.glob("x*"))])]
    )
    run_config(config(folder.with_suffix(".npz")), tmp_path / "memory")
    assert digests(out) == digests(tmp_path / "memory")
    with pytest.raises(UserError, match="has no array 'x'"):
        run_config(config(folder, mapped=True), tmp_path / "again")


def remove(file: Path) -> None:
    file.unlink(missing_ok=True)


def test_a_worker_that_starts_later_says_which_file_is_gone(tmp_path: Path) -> None:
    rows = mapped(tmp_path, inputs("floats"))
    os.utime(
        tmp_path / "x.npy", (1e9, 1e9)
    )  # where clocks of files are coarse, the second file has this time otherwise
    packed = pickle.dumps(on_disk(rows))
    (tmp_path / "x.npy").rename(tmp_path / "moved.npy")
    with pytest.raises(
        UserError, match=r"data: cannot open .*x\.npy \(No such file or directory\); every worker reads"
    ):
        pickle.loads(packed)
    np.save(tmp_path / "x.npy", inputs("floats"))  # another file with the same name: it may have other contents
    with pytest.raises(UserError, match=r"expected .*x\.npy as it was when the data were loaded"):
        pickle.loads(packed)


def test_a_map_of_a_file_that_is_gone_already_is_refused(tmp_path: Path) -> None:
    x = mapped(tmp_path, inputs("floats"))
    (tmp_path / "x.npy").unlink()
    with pytest.raises(UserError, match=r"data: cannot open .*x\.npy \(No such file or directory\)"):
        from_arrays(x, LABELS)


def test_a_disk_that_fails_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, here = pair("floats", "map", tmp_path)

    def broken(*_: Any) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", broken)
    with pytest.raises(UserError, match=r"^data: cannot read .*x\.npy \(Input/output error\); see to its disk$"):
        outcome(here)


def test_token_ids_on_disk_are_checked(tmp_path: Path) -> None:
    _, here = pair("tokens", "shards", tmp_path)
    assert build_model("charlstm", here, tokens=50) is not None
    with pytest.raises(UserError, match=r"expected token ids 0\.\.40, found 0\.\.49"):
        build_model("charlstm", here, tokens=41)


@pytest.mark.skipif(not HAS_HF, reason="needs the extra hf (package datasets)")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_arrow_files_that_are_cut_or_gone(tmp_path: Path) -> None:
    data = from_hugging_face(arrow(tmp_path, inputs("floats")), image="x", mapped=True, holdout=0)
    file = min((tmp_path / "saved").glob("*.arrow"))
    whole, packed = np.asarray(data.x), pickle.dumps(data.x)
    kept = shutil.copy2(file, tmp_path / "kept")
    file.unlink()
    assert np.array_equal(np.asarray(data.x), whole)  # the map is there still
    with pytest.raises(UserError, match=r"data: cannot open .*\.arrow"):
        pickle.loads(packed)
    shutil.copy2(kept, file)
    assert np.array_equal(np.asarray(pickle.loads(packed)), whole)
    cut(file)
    with pytest.raises(UserError, match=r"expected .*\.arrow as it was when the data were loaded, found it changed"):
        np.asarray(data.x)


@pytest.mark.skipif(not HAS_HF, reason="needs the extra hf (package datasets)")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_hugging_face_pictures_and_bad_columns(tmp_path: Path) -> None:
    import datasets
    from PIL import Image

    datasets.disable_progress_bars()
    shapes = [(8, 6)] * 9
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(num_classes=3)})

    def saved(name: str, sizes: list[tuple[int, int]]) -> Any:
        shades = [Image.new("RGB", size, (9 * i, 99, i)) for i, size in enumerate(sizes)]
        made = datasets.Dataset.from_dict({"image": shades, "label": [0, 1, 2] * 3}, features=features)
        if name:
            made.save_to_disk(str(tmp_path / name))
        return datasets.load_from_disk(str(tmp_path / name)) if name else made

    hub = saved("pictures", shapes)
    calls: list[tuple] = []
    here = from_hugging_face(hub, mapped=True, holdout=0, progress=lambda *about: calls.append(about))
    there = from_hugging_face(hub, holdout=0)
    assert here.digest() == there.digest()
    assert (here.x.shape, here.labels, calls[-1][1:]) == ((9, 3, 6, 8), there.labels, (9, 9))
    assert np.array_equal(np.asarray(here.x)[:, 0, 0, 0], 9 * np.arange(9))
    chosen = from_hugging_face(hub.select([4, 2]), mapped=True, holdout=0)  # a choice of rows, in another order
    assert np.array_equal(np.asarray(chosen.x)[:, 2, 0, 0], [4, 2])
    with pytest.raises(UserError, match=r"column image: expected rows of one shape, found others among rows 0\.\.8"):
        from_hugging_face(saved("mixed", [*shapes[:8], (5, 5)]), mapped=True)
    with pytest.raises(UserError, match=r"mapped: expected a dataset on disk, found one in memory; write it with save"):
        from_hugging_face(saved("", shapes), mapped=True)


@pytest.mark.skipif(not HAS_HF, reason="needs the extra hf (package datasets)")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("rows", "shape"),
    [
        ([[1.5, 2.0], [3.0, 4.0], [0.1, 6.0]], (3, 2)),
        ([[[1], [2]], [[3], [4]], [[5], [6]]], (3, 2, 1)),
        ([1.0, 2.0, 3.0], (3,)),
        ([[True, False]] * 3, (3, 2)),
        ([[1, 2], [3], [4, 5, 6]], None),  # six numbers in three rows
        ([[1.0, 2.0], [3.0, None], [5.0, 6.0]], None),
        ([[1.0, 2.0], None, [5.0, 6.0]], None),
        (["a", "b", "c"], None),
    ],
)
def test_columns_of_lists(rows: list, shape: tuple | None, tmp_path: Path) -> None:
    import datasets

    datasets.disable_progress_bars()
    datasets.Dataset.from_dict({"x": rows, "y": [0, 1, 1]}).save_to_disk(str(tmp_path / "saved"))
    hub = datasets.load_from_disk(str(tmp_path / "saved"))
    if shape is None:
        with pytest.raises(UserError, match=r"rows of one shape|numeric inputs"):
            from_hugging_face(hub, image="x", label="y", mapped=True, holdout=0)
        return
    here, there = (from_hugging_face(hub, image="x", label="y", mapped=on, holdout=0) for on in (True, False))
    assert here.x.shape == shape
    assert np.array_equal(np.asarray(here.x), np.array(rows))
    assert here.digest() == there.digest()


MEMORY = """
import sys
import numpy as np
from fedspeed import simulate
from fedspeed.data import federate, from_arrays
from fedspeed.models import build_model

def peak(kind="VmHWM"):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(kind)) / 1024

def run(path):
    x = np.load(path, mmap_mode="r")
    data = federate(from_arrays(x, np.arange(len(x)) % 4), split="iid", clients=20, validation=0.1)
    model, plan = build_model("mlp", data, hidden=[4]), {"rounds": 2, "active": 20, "local_steps": 3, "engine": "loop"}
    with simulate("fedavg", model, data, **plan) as run:
        list(run)
    return data.fingerprint

run(sys.argv[1])
before = peak()
run(sys.argv[2])
print(peak() - before)
"""


@pytest.mark.skipif(not Path("/proc").exists(), reason="reads /proc")
@pytest.mark.parametrize("dtype", ["float32", pytest.param("uint8", marks=pytest.mark.slow)])
def test_memory_does_not_grow_with_the_data(dtype: str, tmp_path: Path) -> None:
    """Loaded, checked, hashed, trained on and scored: 400 MB need less than a quarter of that, at the peak."""
    rows = 400 * 2**20 // np.dtype(dtype).itemsize // 3_072
    for name, n in (("little", 3000), ("much", rows)):
        made = np.lib.format.open_memmap(tmp_path / f"{name}.npy", "w+", dtype, (n, 3, 32, 32))  # holes: zeros
        made[::7] = 1
        del made
    command = [sys.executable, "-c", MEMORY, str(tmp_path / "little.npy"), str(tmp_path / "much.npy")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert float(done.stdout) < 100
    (tmp_path / "much.npy").unlink()


def test_which_arrays_stay_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x = inputs("floats")
    rows = mapped(tmp_path, x)
    np.save(tmp_path / "fortran.npy", np.asfortranarray(x))
    assert on_disk(x) is None
    assert on_disk(np.load(tmp_path / "x.npy", mmap_mode="c")) is None  # private: the program may have changed it
    assert on_disk(rows[::2]) is None
    assert on_disk(rows[[1, 5]]) is None  # NumPy has read them
    assert on_disk(np.load(tmp_path / "fortran.npy", mmap_mode="r")) is None
    part = on_disk(rows[10:30][5:])  # where a map begins is not where its slice begins
    assert part is not None
    assert np.array_equal(np.asarray(part), x[15:30])
    written = np.lib.format.open_memmap(tmp_path / "new.npy", "w+", np.float32, (20, 3))
    written[:] = 4
    found = on_disk(written)
    assert found is not None
    assert np.asarray(found).tolist() == [[4.0] * 3] * 20
    np.save(tmp_path / "y.npy", LABELS)
    (tmp_path / "new.npy").unlink()
    assert isinstance(read("arrays", data_dir=tmp_path).x, np.ndarray)  # small: in memory, where batches are faster
    monkeypatch.setattr("fedspeed.data.user_data.LARGE", 1000)
    assert isinstance(read("arrays", data_dir=tmp_path).x, OnDisk)
    assert isinstance(read("arrays", data_dir=tmp_path, mapped=False).x, np.ndarray)


def test_a_process_keeps_few_files_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x = np.arange(40.0).reshape(20, 2)
    for i, row in enumerate(x):
        np.save(tmp_path / f"x-{i}.npy", row[None])
    monkeypatch.setattr(module, "OPEN", 3)
    rows = OnDisk.files([tmp_path / f"x-{i}.npy" for i in range(20)])
    gc.collect()  # or files that other tests left open may be closed between the counts
    before = len(os.listdir("/proc/self/fd"))
    order = np.random.default_rng(0).permutation(20)
    assert np.array_equal(rows.read(order), x[order])
    assert len(os.listdir("/proc/self/fd")) == before + 3
    del rows
    assert len(os.listdir("/proc/self/fd")) == before


def test_shards_are_read_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    for i in range(12):
        np.save(tmp_path / f"x-{i}.npy", np.full((2, 3), float(i)))
        np.save(tmp_path / f"y-{i}.npy", np.full(2, i))
    data = read("arrays", data_dir=tmp_path, holdout=0, mapped=True)
    assert np.array_equal(np.asarray(data.x)[:, 0], data.y)
    assert data.y.tolist() == sorted([*range(12)] * 2)
    assert isinstance(read("arrays", data_dir=tmp_path, holdout=0).x, np.ndarray)


def test_parts_of_the_data_stay_on_disk(tmp_path: Path) -> None:
    """The first samples, a hold-out of clients; smaller pictures are in memory."""
    x = inputs("pictures")
    np.save(tmp_path / "x.npy", x)
    np.save(tmp_path / "y.npy", LABELS)
    np.savez(tmp_path / "x.npz", x=x, y=LABELS)
    for about in ({"train_size": 100, "test_size": 50}, {"held_out": 2}, {"shrink": 2}):
        options = {"split": "iid", "clients": 5, **about}
        here = load("arrays", data_dir=tmp_path, mapped=True, **options)
        assert here.fingerprint == load("arrays", data_dir=tmp_path / "x.npz", **options).fingerprint
        assert isinstance(here.x, torch.Tensor if "shrink" in about else TensorOnDisk)


def refuse(folder: Path, says: str, **options: Any) -> None:
    with pytest.raises(UserError, match=says) as caught:
        read("arrays", data_dir=folder, mapped=True, **options)
    assert "\n" not in str(caught.value)


def test_bad_folders_are_refused_in_one_line(folder: Path, tmp_path: Path) -> None:
    def bad(says: str, **files: Any) -> None:
        place = tmp_path / "bad"
        shutil.copytree(folder, place)
        for name, a in files.items():
            file = place / f"{name.replace('_', '-')}.npy"
            file.unlink(missing_ok=True)
            if callable(a):
                np.save(file, inputs("pictures")[100:650])
                a(file)
            elif a is not None:
                np.save(file, a)
        refuse(place, says)
        shutil.rmtree(place)

    middle = inputs("pictures")[100:650]
    bad(r"x-1\.npy: expected rows as in .*x-0\.npy \(uint8 of .*found float32", x_1=middle.astype(np.float32))
    bad(r"x-1\.npy: expected rows as in .*shape \(8, 8, 3\).*found uint8 of shape \(8, 4, 3\)", x_1=middle[:, :, :4])
    bad(r"shards x-000\.npy, .* without a gap, found numbers 0, 2", x_1=None)
    bad(r"without a gap, found numbers 2;", x_0=None, x_1=None)
    bad(r"expected .*x\.npy or shards of it, found both", x=middle)
    bad(r"shards of y with as many rows as those of x \[100, 550, 1953\], found \[100, 549, 1953\]", y_1=LABELS[:549])
    bad(r"no array 'y'", y_0=None, y_1=None, y_2=None)
    bad(r"cannot read .*x-1\.npy as a plain array", x_1=np.array([{}], object))
    bad(r"cannot read .*y-1\.npy as a plain array", y_1=np.array([{}] * 550, object))
    bad(r"cannot read .*x-1\.npy as a plain array", x_1=cut)
    bad(r"x-1\.npy: expected rows one after the other \(C order\)", x_1=np.asfortranarray(middle))
    bad(r"2503 inputs but 2603 targets|expected shards of y", x_0=inputs("pictures")[:0])


def test_bad_values_are_named_by_their_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK", 1000)  # rows of many chunks
    x = inputs("doubles")
    x[[1900, 2000], 3] = np.nan, np.inf
    with pytest.raises(UserError, match=r"inputs must be finite; row 1900 is not \(2 in all\)"):
        from_arrays(mapped(tmp_path, x), LABELS)
    x[[1900, 2000], 3] = 0, 1e300  # does not fit into a file's float32
    np.save(tmp_path / "x.npy", x)
    np.save(tmp_path / "y.npy", LABELS)
    refuse(tmp_path, r"row 2000 is not \(1 in all\)")
    whole = np.full((N, 2), 2**63, np.uint64)
    with pytest.raises(UserError, match="must fit into 64 bits with a sign"):
        from_arrays(mapped(tmp_path, whole), LABELS)
    with pytest.raises(UserError, match="100 inputs but 2603 targets"):
        from_arrays(mapped(tmp_path, x)[:100], LABELS)
    with pytest.raises(UserError, match="mapped must be true or false"):
        load("arrays", data_dir=tmp_path, mapped="yes")
