"""Every command and every Python example of README and docs runs as printed, in order, in one folder per document.

Commands are only made shorter: fewer rounds, the recipes' smallest preset, and for CIFAR-10 a few made-up pictures.
"""

from __future__ import annotations

import importlib.util
import re
import shlex
from glob import glob
from pathlib import Path
from typing import Any

import pytest
from data.layouts import TEN, binary, records, tar

from fedspeed.cli import main

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
HAS_HF = importlib.util.find_spec("datasets") is not None

STEP = re.compile(r"```(?P<language>\w*)\n(?P<block>.*?)```|`(?P<inline>fedspeed [^`]+)`", re.DOTALL)
NO_COMMAND = re.compile(r"\bRUN\b|--help|^fedspeed \w+( show)?$|^fedspeed run config.toml$")  # one spoken of, not given
ELSEWHERE = ("--data huggingface",)  # needs the network
LONGER = {"README.md", "theory.md", "reproduction.md", "survive.md"}

QUICK = ["--rounds", "2"]
SHORTER: list[tuple[str, list[str]]] = [  # for commands that match: what is appended
    (r"^run ", QUICK),
    (r"^compare (?!runs/)", [*QUICK, "--seeds", "1"]),
    (r"^(run|compare) .*--data cifar10", ["--data-dir", "cifar.tar.gz", "--set", "data.part=true"]),
    (r"^data \w+ cifar10", ["--data-dir", "cifar.tar.gz", "--set", "part=true"]),
    (r"^theory rate( |$)", ["--rounds", "4,8", "--seeds", "2", "--m", "2"]),
    (r"^reproduce (?!list)", ["--preset", "smoke", "--seeds", "1", "--set", "rounds=2", "--set", "device=cpu"]),
    (r"^inspect ", ["--samples", "50"]),
]


def steps(path: Path) -> list[tuple[str, str]]:
    """What a document tells to do, in its order: ("python", code) or ("command", text)."""
    found = []
    for match in STEP.finditer(path.read_text("utf-8")):
        if match["language"] == "python":
            found.append(("python", match["block"]))
        elif match["inline"]:
            text = " ".join(match["inline"].split())
            if not NO_COMMAND.search(text):
                found.append(("command", text))
        elif match["language"] in ("sh", ""):
            lines = [line.strip() for line in match["block"].replace("\\\n", " ").splitlines()]
            found += [("command", line) for line in lines if line.startswith("fedspeed ")]
    return found


def words(command: str) -> list[str]:
    """The arguments as a shell would give them, and what makes them shorter."""
    given = [part for word in shlex.split(command, comments=True)[1:] for part in sorted(glob(word)) or [word]]
    given = ["table7" if given[0] == "reproduce" and word == "all" else word for word in given]
    return given + [more for pattern, extra in SHORTER if re.search(pattern, " ".join(given)) for more in extra]


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """What the documents take as given: run directories NAME (stopped), A and B, a method's file, a cifar10."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEDSPEED_CACHE", str(tmp_path / "cache"))
    for name in ("NAME", "A", "B"):
        assert main(["run", "--quiet", "--out", f"runs/{name}", *QUICK]) == 0
    Path("runs/NAME/summary.json").unlink()
    tar(binary(records(TEN, n=40)), tmp_path / "cifar.tar.gz")
    for kind, code in steps(ROOT / "docs" / "new-method.md"):
        name = re.match(r"# (\w+\.py)\n", code)
        if kind == "python" and name:
            Path(name[1]).write_text(code + "\n\nMyMethod = FedAvgM\n" * (name[1] == "my_method.py"))
    return tmp_path


@pytest.mark.parametrize(
    "path",
    [pytest.param(p, marks=pytest.mark.slow if p.name in LONGER else (), id=p.name) for p in DOCUMENTS if steps(p)],
)
def test_everything_runs_as_printed(path, folder, capsys):
    names: dict[str, Any] = {"__name__": "documentation"}
    failed = []
    for kind, text in steps(path):
        if kind == "command" and not any(needs in text for needs in ELSEWHERE):
            code = main(words(text))
            err = capsys.readouterr().err
            if code:
                failed.append(f"{text}\n    exit code {code}: {err.splitlines()[-1] if err else ''}")
        elif kind == "python" and (HAS_HF or "needs: datasets" not in text):
            exec(compile(text.replace("rounds=60", "rounds=2"), path.name, "exec", dont_inherit=True), names)
    assert failed == []


def test_nothing_is_left_out():
    """The documents' commands are found: the fenced ones, and those inside of sentences."""
    found = [text for path in DOCUMENTS for kind, text in steps(path) if kind == "command"]
    fenced = [
        line.strip()
        for path in DOCUMENTS
        for line in path.read_text("utf-8").replace("\\\n", " ").splitlines()
        if line.startswith("fedspeed ")
    ]
    assert set(fenced) <= set(found)
    assert "fedspeed run --method fedinit --set method.base=fedspeed" in found
    assert len(found) > len(fenced) + 4
