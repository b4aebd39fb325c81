"""The package as pip installs it: an editable one is found from any folder, a wheel holds all of it and no more."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import fedspeed

ROOT = Path(__file__).parents[2]
OTHERS = ("CHANGELOG.md", "SECURITY.md", "constraints.txt")
BUILD = "import sys; from setuptools import build_meta; print(getattr(build_meta, sys.argv[1])(sys.argv[2]))"


@pytest.fixture(scope="module")
def clone(tmp_path_factory) -> Path:
    """A clone called `fedspeed`, as git makes it."""
    pytest.importorskip("setuptools", "77")
    place = tmp_path_factory.mktemp("home") / "fedspeed"
    place.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", "CITATION.cff", "MANIFEST.in", *OTHERS):
        shutil.copy(ROOT / name, place)
    shutil.copytree(
        ROOT / "fedspeed", place / "fedspeed", symlinks=True, ignore=shutil.ignore_patterns("__pycache__", "*.so")
    )
    return place


def built(clone: Path, how: str, out: Path) -> zipfile.ZipFile:
    done = subprocess.run([sys.executable, "-c", BUILD, how, str(out)], cwd=clone, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return zipfile.ZipFile(out / done.stdout.splitlines()[-1])


def test_an_editable_install_is_found_from_the_folder_that_holds_the_clone(clone, tmp_path):
    """The folder `fedspeed` beside the script, the clone, is none: a finder would only be asked after it."""
    built(clone, "build_editable", tmp_path).extractall(tmp_path / "site")
    script = clone.parent / "first.py"
    script.write_text(
        f"import site; site.addsitedir({str(tmp_path / 'site')!r})\nimport fedspeed; print(fedspeed.__file__)"
    )
    alone = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    done = subprocess.run([sys.executable, "-S", script], cwd=clone.parent, env=alone, capture_output=True, text=True)
    assert done.stdout.strip() == str(clone / "fedspeed" / "__init__.py"), done.stderr


def test_the_wheel_holds_the_package(clone, tmp_path):
    wheel = built(clone, "build_wheel", tmp_path)
    names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    wanted = [path for path in (ROOT / "fedspeed").rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert {name for name in names if not name.endswith(".so")} == {
        str(path.relative_to(ROOT)) for path in wanted if path.suffix not in (".so", ".c")
    }
    kernels = [name for name in names if name.endswith(".so")]
    assert len(kernels) == (shutil.which("cc") is not None)
    assert all(name.startswith("fedspeed/models/_kernels.") for name in kernels)
    assert "fedspeed/reproduce/iclr2023/table7.toml" in names
    assert f"fedspeed-{fedspeed.__version__}.dist-info/METADATA" in wheel.namelist()


def test_wheel_and_source_distribution_carry_licence_and_citation(clone, tmp_path):
    """A source distribution also has the constraints, and the wheel that it gives is the same."""
    wheel = built(clone, "build_wheel", tmp_path)
    inside = f"fedspeed-{fedspeed.__version__}.dist-info/licenses"
    done = subprocess.run(
        [sys.executable, "-c", BUILD, "build_sdist", str(tmp_path)], cwd=clone, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    with tarfile.open(tmp_path / done.stdout.splitlines()[-1]) as source:
        source.extractall(tmp_path / "unpacked", filter="data")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    for name in ("LICENSE", "CITATION.cff"):
        assert wheel.read(f"{inside}/{name}") == (ROOT / name).read_bytes()
        assert (unpacked / name).read_bytes() == (ROOT / name).read_bytes()
    assert all((unpacked / name).is_file() for name in OTHERS)
    again = built(unpacked, "build_wheel", tmp_path / "again")
    digests = [
        {one.filename: one.CRC for one in each.infolist() if "RECORD" not in one.filename} for each in (again, wheel)
    ]
    for found in digests:  # a library holds the folder that it was built in
        found.update({name: 0 for name in found if name.endswith(".so")})
    assert digests[0] == digests[1]


def test_without_a_compiler_the_package_is_installed_without_kernels(clone, tmp_path, monkeypatch):
    shutil.rmtree(clone / "build", ignore_errors=True)  # what other tests have built
    for library in (clone / "fedspeed").rglob("*.so"):
        library.unlink()
    monkeypatch.setenv("CC", "no-such-compiler")
    wheel = built(clone, "build_wheel", tmp_path)
    assert "fedspeed/models/compiled_kernels.py" in wheel.namelist()
    assert not any(name.endswith(".so") for name in wheel.namelist())


def test_the_citation_names_this_version():
    assert re.search(r"^version: (.*)$", (ROOT / "CITATION.cff").read_text(), re.M)[1] == fedspeed.__version__
