"""The README does what it says."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from test_documents import DOCUMENTS

from fedspeed.cli import build_parser, main
from fedspeed.methods import METHODS

ROOT = Path(__file__).parents[1]


def blocks(path: Path, *languages: str) -> list[str]:
    return [code for name, code in re.findall(r"```(\w*)\n(.*?)```", path.read_text(), re.DOTALL) if name in languages]


COMMANDS = [
    (path.name, line.strip())
    for path in DOCUMENTS
    for block in blocks(path, "sh", "")
    for line in block.replace("\\\n", " ").splitlines()
    if line.strip().startswith("fedspeed ")
]


def test_the_python_example_runs(capsys):
    example = blocks(ROOT / "README.md", "python")[0]
    assert len([line for line in example.splitlines() if line.strip()]) <= 10
    exec(compile(example.replace("rounds=60", "rounds=3"), "README.md", "exec"), {"__name__": "readme"})
    assert len(capsys.readouterr().out.splitlines()) >= 4


@pytest.mark.parametrize(("document", "command"), COMMANDS, ids=lambda text: text[:60])
def test_every_command_is_one_the_program_takes(document, command):
    words = shlex.split(command, comments=True)[1:]
    assert words
    build_parser().parse_args(words)


def test_there_are_commands_to_test():
    assert len(COMMANDS) > 10


def test_the_make_targets_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {
        t
        for path in DOCUMENTS
        for t in re.findall(r"^make ([a-z-]+)|`make ([a-z-]+)", path.read_text(), re.M)
        for t in t
        if t
    }
    assert named <= targets
    assert {"setup", "demo", "test", "test-all", "check", "help", "bench"} <= targets


def test_the_table_of_methods_is_the_program_s(capsys):
    """Family, state, vectors down and up, gradients per step as measured by running the hooks, fields: as printed."""
    text = (ROOT / "README.md").read_text()
    assert main(["methods", "--markdown"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("\n") == 2 + len(METHODS)
    assert printed in text, "the table changed: put what `fedspeed methods --markdown` prints into README.md"


def test_the_table_is_true_of_methods_one_knows():
    rows = dict(re.findall(r"^\| [\w -]+ \| `(\w+)` \| (.*?) \|$", (ROOT / "README.md").read_text(), re.MULTILINE))
    assert set(rows) == set(METHODS)
    assert rows["fedavg"] == "- | 1 / 1 | 1 | eta_g 1.0"
    assert rows["scaffold"] == "c | 2 / 2 | 1 | eta_g 1.0"
    assert rows["fedsam"].startswith("- | 1 / 1 | 2 | rho 0.1,")
    assert rows["fedgmt"].startswith("h | 2 / 1 | 1.33 | gamma 1.0,")
