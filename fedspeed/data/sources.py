"""Sources of a published data set, in order: your own copy, the cache, its home, a mirror.

Every source gives the same arrays: the reader rebuilds the published files from the decoded data and compares
checksums, and the cache keeps a digest of its arrays.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import UserError
from ..utils.locks import locked_beside
from .augment import Augmentation
from .fetch import Home, Unreachable, cache_dir
from .samples import Progress, Samples, silent

Reader = Callable[[Path, bool, Progress], Samples]
"""`read(path, part, progress)`: decode and verify a copy; `part` accepts one that is not the complete set."""


@dataclass(frozen=True)
class Published:
    """A published data set.

    Args:
        read: decodes and verifies a folder or an archive.
        homes: the places to download it from, in order.
        classes, augmentation: facts about it beside the arrays.
        slow: decoding takes so long that the user's own copy, too, is kept decoded in the cache.
    """

    name: str
    read: Reader
    homes: tuple[Home, ...]
    classes: int
    augmentation: Augmentation
    slow: bool = False

    def obtain(
        self, data_dir: str | Path | None = None, part: bool = False, progress: Progress | None = None
    ) -> Samples:
        """Return the samples from the first source that has them."""
        progress = progress or silent
        if data_dir is not None:
            found = self._own(Path(data_dir).expanduser(), part, progress)
        else:
            folder = cache_dir() / self.name
            with locked_beside(folder):
                found = restore(folder, self.name) or self._fetch(folder, progress)
        return replace(found, classes=found.classes or self.classes, augmentation=self.augmentation)

    def _own(self, path: Path, part: bool, progress: Progress) -> Samples:
        if not self.slow or not path.exists():
            return self.read(path, part, progress)
        place = hashlib.blake2b(f"{path.resolve()}|{part}".encode(), digest_size=6).hexdigest()
        folder, mark = cache_dir() / f"{self.name}-{place}", stamp(path)
        with locked_beside(folder):
            if found := restore(folder, self.name, mark):
                return found
            samples = self.read(path, part, progress)
            try:
                keep(folder, samples, mark)
            except OSError:  # a read-only cache costs time only
                return samples
            return restore(folder, self.name, mark) or samples

    def _fetch(self, folder: Path, progress: Progress) -> Samples:
        tried = []
        downloads = folder.with_name(f"{folder.name}-download")
        try:
            downloads.mkdir(parents=True, exist_ok=True)
            for home in self.homes:
                try:
                    samples = self.read(home.fetch(downloads, progress), False, progress)
                except (Unreachable, UserError) as error:
                    tried.append(f"{home.place} ({error})")
                    continue
                keep(folder, samples, home.place)
                shutil.rmtree(downloads)
                return restore(folder, self.name) or samples
        except OSError as error:
            raise UserError(
                f"data {self.name}: cannot write to the cache {folder.parent} ({error.strerror}); set FEDSPEED_CACHE "
                "to a folder you can write to"
            ) from error
        with contextlib.suppress(OSError):
            downloads.rmdir()  # stays if it holds something the next attempt can continue
        raise UserError(
            f"data {self.name}: no source could be used; tried the cache {folder}; {'; '.join(tried)}. Give a copy "
            "you have with data_dir (--data-dir PATH: the published archive, or its folder)"
        )


def stamp(path: Path) -> str:
    """Return a digest of names, sizes and times of change of a file, or of all files of a folder."""
    digest = hashlib.blake2b(digest_size=16)
    for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
        status = file.stat()
        digest.update(f"{file}|{status.st_size}|{status.st_mtime_ns}\n".encode())
    return digest.hexdigest()


ARRAYS = ("x", "y", "x_test", "y_test")
_intact: set[str] = set()  # stamps of folders whose digest this process has checked


def keep(folder: Path, samples: Samples, source: str) -> None:
    """Put arrays into the cache, under a temporary name first: only complete sets ever have their final name."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    place = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        for name in ARRAYS:
            if (array := getattr(samples, name)) is not None:
                np.save(place / f"{name}.npy", array, allow_pickle=False)
        about = {
            "name": samples.name,
            "source": source,
            "sha256": samples.digest(),
            "classes": samples.classes,
            "labels": samples.labels,
        }
        (place / "about.json").write_text(json.dumps(about, indent=2) + "\n")
        place.chmod(0o755)
        if folder.exists():
            shutil.rmtree(folder)
        os.replace(place, folder)
    except BaseException:
        shutil.rmtree(place, ignore_errors=True)
        raise


def keep_own(name: str, samples: Samples, data_dir: str | Path) -> None:
    """Put a published data set that was read from the user's copy into the cache, unless it is there already."""
    folder = cache_dir() / name
    with locked_beside(folder):
        if not (folder / "about.json").exists():
            keep(folder, samples, str(Path(data_dir).expanduser().resolve()))


def restore(folder: Path, name: str, source: str | None = None) -> Samples | None:
    """Return arrays from the cache, mapped so that processes share the memory; None if there are none.

    Args:
        source: return them only if they were made from this source.
    """
    if not (folder / "about.json").exists():
        return None
    try:
        about: dict[str, Any] = json.loads((folder / "about.json").read_text())
        if source not in (None, about["source"]):
            return None
        present = [a for a in ARRAYS if (folder / f"{a}.npy").exists()]
        arrays = {a: np.load(folder / f"{a}.npy", mmap_mode="c", allow_pickle=False) for a in present}
        samples = Samples(name, **arrays, classes=about["classes"], labels=tuple(about["labels"]))
        mark = stamp(folder)
        intact = mark in _intact or samples.digest() == about["sha256"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"data {name}: the cache {folder} is damaged ({error}); delete that folder") from error
    if not intact:
        raise UserError(f"data {name}: the cache {folder} was altered (wrong digest); delete that folder")
    _intact.add(mark)
    return samples
