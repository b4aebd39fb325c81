"""A folder of pictures with one folder per class, and the decoder of all picture files.

pets/cat/*.jpg, pets/dog/*.jpg                      a fraction of every class is set aside for testing
pets/train/cat/..., pets/test/cat/... (or val/)     your own test set
pets/clients.csv                                    optional lines `path,client`, for `split = natural`

Every loader of picture files decodes them with `pixels` or `decode`.
"""

from __future__ import annotations

import csv
import io
import warnings
from pathlib import Path

import numpy as np

from ..errors import UserError
from .archive import read_file
from .samples import Progress, Samples, silent
from .user_data import from_arrays

SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".ppm", ".pgm", ".tif", ".tiff"}

FORMATS = ("PNG", "JPEG", "BMP", "GIF", "WEBP", "PPM", "TIFF")
"""The formats that are recognised, whatever a file's name. Pillow would also start Ghostscript for PostScript."""
MOST = 2**26
"""The largest number of pixels of a picture; a few kilobytes can unpack to gigabytes."""
SIDE = 4096
"""The largest side, in pixels, that pictures can be resized to."""


class Unreadable(Exception):
    """A file that is not a picture, is damaged or too large."""


def pixels(blob: bytes, mode: str = "RGB", size: tuple[int, int] | None = None) -> np.ndarray:
    """Decode a picture to bytes (height, width, channels), or (height, width) if grey; raise `Unreadable`."""
    from PIL import Image

    Image.init()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about Pillow's own limit of size, and harmless damage
            with Image.open(io.BytesIO(blob), formats=[name for name in FORMATS if name in Image.OPEN]) as picture:
                if picture.width * picture.height > MOST:
                    raise Unreadable(f"{picture.width} x {picture.height} pixels, expected at most {MOST}")
                whole = picture.convert(mode)
            if size is not None and whole.size != size:
                whole = whole.resize(size, Image.Resampling.BILINEAR)
            return np.asarray(whole)
    except Unreadable:
        raise
    except Exception as error:  # damaged files raise nearly anything
        raise Unreadable(str(error) or type(error).__name__) from error


def decode(blob: bytes, where: str, size: tuple[int, int] | None = None, mode: str = "RGB") -> np.ndarray:
    """Decode a picture to bytes (channels, height, width); the error names the file."""
    try:
        found = pixels(blob, mode, size)
    except Unreadable as error:
        raise UserError(f"data: cannot decode the picture {where} ({error}); replace or remove it") from error
    return found.transpose(2, 0, 1) if found.ndim == 3 else found[None]


def images(
    size: int = 0,
    grey: bool = False,
    holdout: float = 0.2,
    *,
    data_dir: str | Path | None = None,
    progress: Progress | None = None,
) -> Samples:
    """Read pictures in class folders; classes are numbered by the sorted names of their folders.

    Args:
        size: resize every picture to `size` x `size`; 0 expects them to be of one size already.
        grey: one channel instead of three.
        holdout: the fraction of every class set aside where there is no `test` (or `val`) folder.
        data_dir: the folder.
    """
    if type(size) is not int or not 0 <= size <= SIDE:
        raise UserError(f"data images: size must be a whole number in 0..{SIDE} (pixels of a side), found {size!r}")
    if data_dir is None:
        raise UserError("data images: give the folder of pictures with data_dir (--data-dir FOLDER)")
    root = Path(data_dir).expanduser()
    if not root.is_dir():
        raise UserError(f"data images: expected a folder with one folder per class, found none at {root}")
    held = next((root / name for name in ("test", "val") if (root / name).is_dir()), None)
    train = root / "train" if held and (root / "train").is_dir() else root
    names = sorted(p.name for p in train.iterdir() if p.is_dir() and not p.name.startswith("."))
    files = _list(train, names)
    test = _list(held, names) if held and train != root else []
    shape = (size, size) if size else None
    x, y = _decode(files, shape, grey, progress or silent)
    parts = _decode(test, shape, grey, progress or silent) if test else None
    ids = _clients(root, files)
    return from_arrays(x, y, test=parts, clients=ids, holdout=holdout, name=root.name, labels=tuple(names))


def _list(folder: Path, names: list[str]) -> list[tuple[Path, int]]:
    found = []
    for label, name in enumerate(names):
        pictures = sorted(p for p in (folder / name).rglob("*") if p.suffix.lower() in SUFFIXES)
        if not pictures:
            raise UserError(f"data images: the class folder {folder / name} holds no pictures")
        found += [(picture, label) for picture in pictures]
    if not found:
        raise UserError(f"data images: {folder} has no class folders; expected {folder}/CLASS/*.png or *.jpg")
    return found


def _decode(
    files: list[tuple[Path, int]], shape: tuple[int, int] | None, grey: bool, progress: Progress
) -> tuple[np.ndarray, np.ndarray]:
    """Return pictures and labels."""
    pixels = np.empty(0, np.uint8)
    for i, (path, _) in enumerate(files):
        picture = decode(read_file(path), str(path), shape, "L" if grey else "RGB")
        if i == 0:
            n, (_, height, width) = len(files), picture.shape
            try:
                pixels = np.empty((n, *picture.shape), np.uint8)
            except MemoryError:
                raise UserError(
                    f"data images: {n} pictures of {width} x {height} need {n * picture.size / 1e9:.1f} GB of memory; "
                    f"set size=N with a smaller N"
                ) from None
        if picture.shape != pixels.shape[1:]:
            found, first = ("{2} x {1}".format(*s) for s in (picture.shape, pixels.shape[1:]))
            raise UserError(f"data images: {path} is {found}, {files[0][0]} is {first}; set size=N to resize them")
        pixels[i] = picture
        if i % 100 == 99 or i + 1 == len(files):
            progress("images: decoding", i + 1, len(files))
    return pixels, np.array([label for _, label in files])


def _clients(root: Path, files: list[tuple[Path, int]]) -> np.ndarray | None:
    table = root / "clients.csv"
    if not table.exists():
        return None
    try:
        rows = list(csv.reader(read_file(table).decode("utf-8").splitlines()))
    except (UnicodeDecodeError, csv.Error) as error:
        raise UserError(
            f"data images: {table} is not UTF-8 text of lines `path,client` ({error}); save it so"
        ) from None
    owner = {Path(row[0].strip()).as_posix(): row[1].strip() for row in rows if len(row) == 2}
    ids = []
    for path, _ in files:
        name = path.relative_to(root).as_posix()
        if name not in owner:
            raise UserError(f"data images: {table} names no client for {name}; expected a line `{name},CLIENT`")
        ids.append(owner[name])
    return np.array(ids)
