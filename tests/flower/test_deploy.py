"""`fedspeed deploy`: the app it writes, and one line for what is missing."""

from __future__ import annotations

import io
import re
import socket
import subprocess
import tomllib
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest

from fedspeed import flower
from fedspeed.cli import main
from fedspeed.errors import UserError

ROOT = Path(__file__).parents[2]
pytestmark = [  # flwr's own, of click and pathspec
    pytest.mark.filterwarnings("ignore:'click.utils:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:GitWildMatchPattern:DeprecationWarning"),
]
needs_flwr = pytest.mark.skipif(find_spec("flwr") is None, reason="make test-flower has it")


def refused(capsys, *words: object) -> str:
    assert main([str(word) for word in words]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1, err
    return err


@pytest.fixture
def app(tmp_path, capsys):
    assert main(["deploy", "flower", str(tmp_path / "app")]) == 0
    out = capsys.readouterr().out
    assert "README.md" in out
    return tmp_path / "app"


def test_the_app_is_whole(app):
    project = tomllib.loads((app / "pyproject.toml").read_text())
    flwr = project["tool"]["flwr"]["app"]
    assert flwr["components"] == {"serverapp": "app:server", "clientapp": "app:client"}
    assert flwr["fab-include"] == ["app.py"]
    code = (app / "app.py").read_text()
    compile(code, "app.py", "exec")
    assert {"server", "client"} <= set(re.findall(r"^(\w+) = \w+_app\(", code, re.M))
    assert "keys/" in (app / ".gitignore").read_text().split()


def test_a_folder_with_something_in_it_is_left_alone(tmp_path, capsys):
    (tmp_path / "mine.txt").write_text("mine")
    assert "expected a new or an empty folder" in refused(capsys, "deploy", "flower", tmp_path)
    assert "expected a new or an empty folder" in refused(capsys, "deploy", "flower", tmp_path / "mine.txt")
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


@pytest.mark.skipif(find_spec("flwr") is not None, reason="there is one")
def test_without_flwr(app, capsys):
    told = refused(capsys, "deploy", "check", app)
    assert "expected flwr>=1.42,<1.43, found no flwr; pip install 'fedspeed[flower]'" in told


@pytest.mark.parametrize("version", ["1.41.0", "1.43.0", "2.0"])
def test_another_flwr(monkeypatch, version):
    monkeypatch.setattr(flower, "version", lambda name: version)
    with pytest.raises(UserError, match=f"found flwr {version}; pip install"):
        flower.require_flwr()


def test_the_extra_is_the_range_that_is_required():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert flower.RANGE in extras["flower"]


def pins(name: str) -> dict[str, str]:
    lines = (ROOT / name).read_text().splitlines()
    found = (line.partition("==") for line in lines if line and not line.startswith("#"))
    return {package.lower().replace("_", "-"): version for package, _, version in found}


def test_the_pins_of_both_environments_agree():
    """But for what flwr does not go together with."""
    ours, flowers = pins("constraints.txt"), pins("constraints-flower.txt")
    other = {package for package in ours.keys() & flowers.keys() if ours[package] != flowers[package]}
    assert other == {"fastapi", "packaging", "protobuf", "rich", "starlette", "typer", "uvicorn"}
    assert flowers["flwr"].startswith("1.42.")
    assert flowers["torch"] == ours["torch"]


@needs_flwr
def test_the_app_imports_and_finds_its_data(app, capsys):
    assert main(["deploy", "check", str(app), "--client", "2"]) == 0
    out = capsys.readouterr().out
    assert "fedspeed-app, fedspeed, 5 rounds" in out
    assert "client 2: 479 samples of shape (1, 8, 8), 10 classes" in out


@needs_flwr
def test_flower_takes_the_app(app):
    """Its own validation, and the bundle that travels to devices: no key is in it."""
    from flwr.cli.build import build_fab_from_disk
    from flwr.cli.config_utils import load_and_validate

    (app / "keys").mkdir()
    (app / "keys" / "device-0").write_text("secret")
    _, warnings = load_and_validate(app / "pyproject.toml")
    assert warnings == []
    names = zipfile.ZipFile(io.BytesIO(build_fab_from_disk(app))).namelist()
    assert sorted(names) == [".info/CONTENT", "app.py", "pyproject.toml"]


@needs_flwr
def test_what_is_missing_is_one_line(app, tmp_path, capsys):
    check = ["deploy", "check", app]
    assert "found No such file or directory; make one with" in refused(capsys, *check, "--key", tmp_path / "none")
    (tmp_path / "text").write_text("no key")
    assert "expected an OpenSSH private key" in refused(capsys, *check, "--key", tmp_path / "text")
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / "ed")], check=True)
    assert "expected a key on a NIST curve" in refused(capsys, *check, "--key", tmp_path / "ed")
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        free = f"127.0.0.1:{s.getsockname()[1]}"
    assert f"no server answers at {free} (ConnectionRefusedError" in refused(capsys, *check, "--superlink", free)
    assert "no server answers at no.such.host.invalid:1" in refused(
        capsys, *check, "--superlink", "no.such.host.invalid:1"
    )
    assert "expected --superlink HOST:PORT" in refused(capsys, *check, "--superlink", "here")
    assert "expected a certificate in" in refused(
        capsys, *check, "--superlink", free, "--root-certificates", tmp_path / "text"
    )
    for client in (3, -1):
        assert f"expected --client in 0..2, found {client}" in refused(capsys, *check, "--client", client)
    assert "client 0 has no data (RuntimeError: the disk is away)" in _without_data(app, capsys)
    (app / "app.py").write_text("import no_such_module")
    assert "found ModuleNotFoundError" in refused(capsys, *check) or "no_such_module" in refused(capsys, *check)
    project = (app / "pyproject.toml").read_text()
    flwr = project[project.index("[tool.flwr.app]") :]
    (app / "pyproject.toml").write_text('project = "x"\n' + flwr)
    assert "pyproject.toml with [tool.flwr.app.components]" in refused(capsys, *check)
    (app / "pyproject.toml").unlink()
    assert "pyproject.toml with [tool.flwr.app.components]" in refused(capsys, *check)


def _without_data(app: Path, capsys) -> str:
    code = (app / "app.py").read_text()
    broken = re.sub(r"    return fedspeed.load_data\(.*own part", "    raise RuntimeError('the disk is away')", code)
    assert broken != code
    (app / "app.py").write_text(broken)
    return refused(capsys, "deploy", "check", app, "--client", 0)
