"""The tutorials, and the pages beside them that show output, run from their first block to their last, as printed.

Python blocks share one namespace per page, commands and files one folder. A ```text block is what the block before it
prints: spaces aside, `...` is anything. Where numbers stand is compared everywhere, values only where bits are the
same as on the machine that wrote the pages (`processor.py`). A block that says `needs: NAME` runs where there is NAME.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import processor
import pytest
import torch
from processor import FORCE, SAME_BITS
from torch.backends.cpu import get_cpu_capability

from fedspeed.cli import main
from fedspeed.utils.processes import VARIABLES, vendor

ROOT = Path(__file__).parents[2]
notebooks = SimpleNamespace(**runpy.run_path(str(ROOT / "docs" / "_ext" / "notebooks.py")))

TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("[0-9]*.md"))
PAGES = [*TUTORIALS, *sorted((ROOT / "docs" / "coming-from").glob("*.md")), ROOT / "docs" / "guides" / "diagnose.md"]
QUICK = {"2-your-data", "flower", "pfllib"}  # the others take more than a few seconds
NUMBER = r"[-+]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?"


def pattern(expected: str, exact: bool) -> re.Pattern[str]:
    """Return the pattern that an output must have to be the expected one: with its numbers, or with any number."""

    def escaped(word: str) -> str:
        between = [re.escape(text) for text in re.split(NUMBER, word)]
        return re.escape(word) if exact else NUMBER.join(between)

    parts = [r"\s+".join(escaped(word) for word in part.split()) for part in expected.split("...")]
    return re.compile(r".*?".join(rf"\s*{part}\s*" for part in parts), re.DOTALL)


def as_shown(expected: str, printed: str) -> bool:
    """Whether an output is the expected one: on every processor by places, on the pages' own by the numbers, too."""
    ways = (False, True) if SAME_BITS else (False,)
    return all(pattern(expected, exact).search(printed) for exact in ways)


def shell(block: str) -> list[str]:
    """The commands of a block, without comments."""
    lines = (line.strip() for line in block.replace("\\\n", " ").splitlines())
    return [line for line in lines if line and not line.startswith("#")]


def run_command(line: str) -> None:
    """`fedspeed ...` in this process, which has torch already; other commands in a shell, but for pip and make."""
    may_fail = line.endswith("|| true")
    given = shlex.split(line.removesuffix("|| true"), comments=True)
    if given[0] == "fedspeed":
        code = main(given[1:])
        assert may_fail or code == 0, f"{line}: exit code {code}"
    elif given[0] not in ("pip", "make", "git", "source", "python3"):
        done = subprocess.run(line, shell=True, capture_output=True, text=True)
        sys.stdout.write(done.stdout + done.stderr)
        assert done.returncode == 0, f"{line}: {done.stderr}"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a reader works: an empty folder, a terminal of 100 columns, `fedspeed` on the path."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("FEDSPEED_CACHE", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def marks(path: Path) -> tuple[pytest.MarkDecorator, ...]:
    return () if path.stem in QUICK else (pytest.mark.slow,)


@pytest.mark.parametrize("path", [pytest.param(path, marks=marks(path), id=path.stem) for path in PAGES])
def test_a_page_runs_and_prints_what_it_shows(path, folder, capsys):
    names: dict[str, Any] = {"__name__": "__main__"}
    before = set(sys.modules)
    ran = printed = ""
    try:
        for block in notebooks.blocks(path.read_text("utf-8")):
            if block.language in ("python", "sh"):
                if block.needs and importlib.util.find_spec(block.needs) is None:
                    ran = ""
                    continue
                ran = block.text
                if block.file:
                    Path(block.file).write_text(block.text)
                elif block.language == "python":
                    exec(compile(block.text, path.name, "exec", dont_inherit=True), names)
                else:
                    for line in shell(block.text):
                        run_command(line)
                printed = "".join(capsys.readouterr())
            elif block.language == "text" and ran:
                assert as_shown(block.text, printed), f"{ran}\nprints\n{printed}\nand the page says\n{block.text}"
    finally:
        for name in set(sys.modules) - before:
            if str(getattr(sys.modules[name], "__file__", "")).startswith(str(folder)):
                del sys.modules[name]


@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_every_tutorial_is_a_notebook_with_the_same_code(path):
    notebook = notebooks.convert(path)
    code = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    wanted = [block for block in notebooks.blocks(path.read_text("utf-8")) if block.language in ("python", "sh")]
    assert len(code) == len(wanted) > 1
    for cell, block in zip(code, wanted, strict=True):
        assert cell.endswith(block.text.strip())
        assert cell.startswith("%%sh\n") == (block.language == "sh")
    assert len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])
    try:
        import nbformat
    except ImportError:
        return
    nbformat.validate(nbformat.reads(json.dumps(notebook), as_version=4))


@pytest.mark.slow
def test_a_notebook_runs_in_jupyter_s_kernel(folder, monkeypatch):
    """Cells of Python, of the shell, and one that writes a file, in the order of the page."""
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    monkeypatch.setenv("JUPYTER_PLATFORM_DIRS", "1")
    monkeypatch.setenv("IPYTHONDIR", str(folder / "ipython"))
    path = ROOT / "docs" / "tutorials" / "2-your-data.md"
    notebook = nbformat.reads(json.dumps(notebooks.convert(path)), as_version=4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Jupyter's own
        nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(folder)}}).execute()
    printed = "".join(out.get("text", "") for cell in notebook.cells for out in cell.get("outputs", ()))
    for block in notebooks.blocks(path.read_text("utf-8")):
        assert block.language != "text" or as_shown(block.text, printed)
    assert (folder / "my_data.py").exists()


def test_what_is_compared_can_differ():
    assert pattern("last 87.31 ... done", exact=True).search("so:\nlast   87.31\nand\ndone")
    assert not pattern("last 87.31", exact=True).search("last 87.32")
    assert pattern("last 87.31 +- 1e-3", exact=False).search("last 87.32 +- 2e-4")
    assert not pattern("last 87.31", exact=False).search("last of all")


@pytest.mark.parametrize("exact", [False, True])
def test_blanks_before_a_number_are_any_number_of_blanks(exact):
    """They were not where any number is taken: its sign took the `+` of `\\s+` with it."""
    assert pattern("best 92.50% -1.5e-3 2,000", exact).search("best  92.50%\n   -1.5e-3 \t 2,000")
    assert not pattern("best 92.50%", exact).search("best92.50%")
    assert not pattern("best 92.50%", exact).search("best 92.50")
    assert pattern("a(1)+b [2] c.3", exact).search("a(1)+b  [2]  c.3")
    assert not pattern("a(1)+b", exact).search("a(1))b")


def test_the_branch_for_other_processors_can_be_forced(monkeypatch):
    for name in (FORCE, *VARIABLES):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(processor, "MADE_ON", (torch.__version__.split("+")[0], get_cpu_capability(), vendor()))
    assert processor.same_bits()
    for name in (FORCE, "MKL_ENABLE_INSTRUCTIONS"):
        monkeypatch.setenv(name, "SSE4_2")
        assert not processor.same_bits()
        monkeypatch.delenv(name)
    monkeypatch.setattr(processor, "MADE_ON", (torch.__version__.split("+")[0], "AVX1024", vendor()))
    assert not processor.same_bits()
    monkeypatch.setattr(processor, "MADE_ON", (torch.__version__.split("+")[0], get_cpu_capability(), "AnotherMaker"))
    assert not processor.same_bits()
