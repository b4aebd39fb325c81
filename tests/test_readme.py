"""The README does what it says, is short, and says nothing that the pages behind it do not."""

from __future__ import annotations

import re
import shlex
import tomllib
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


def rows(path: str) -> set[str]:
    """The lines of a document's tables."""
    return {line for line in (ROOT / path).read_text().splitlines() if line.startswith("| ")}


def test_it_is_short_and_its_tables_are_those_of_the_pages():
    """Its speed is the benchmarks', its choice of tools part of the longer one."""
    text = (ROOT / "README.md").read_text()
    assert len(text) < 6000
    assert rows("README.md")
    assert rows("README.md") <= rows("docs/explanation/benchmarks.md") | rows("docs/guides/install.md")
    for tool in ("Flower", "pfl-research", "FL-Simulator"):
        assert f"[{tool}](https://" in text


def test_the_citation_is_that_of_the_file():
    """BibTeX and CITATION.cff name the same paper and the same authors."""
    bibtex = blocks(ROOT / "README.md", "bibtex")[0]
    cited = (ROOT / "CITATION.cff").read_text()
    families = re.findall(r"family-names: (\w+)", cited)
    assert re.findall(r"(\w+), \w+(?: and |})", bibtex) == families
    assert re.search(r"title = {(.*)},", bibtex)[1] in cited


def test_every_extra_is_named_with_what_is_left_out_of_all():
    """Also by one that is new: it is in `all`, or the page says that it is not."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    inside = set(re.search(r"\[(.*)\]", extras.pop("all")[0])[1].split(","))
    told = {}
    for line in rows("docs/guides/install.md"):
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        told |= {name: cells[-1] for name in re.findall(r"`([\w-]+)`", cells[0])}
    assert {name: told.get(name, "")[:3].strip(":") for name in extras} == {
        name: "yes" if name in inside else "no" for name in extras
    }


def test_the_table_of_methods_is_the_program_s(capsys):
    """Family, state, vectors down and up, gradients per step as measured by running the hooks, fields: as printed."""
    text = (ROOT / "docs" / "reference" / "method-table.md").read_text()
    assert main(["methods", "--markdown"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("\n") == 2 + len(METHODS)
    assert printed in text, (
        "the table changed: put what `fedspeed methods --markdown` prints into docs/reference/method-table.md"
    )


def test_the_table_is_true_of_methods_one_knows():
    text = (ROOT / "docs" / "reference" / "method-table.md").read_text()
    rows = dict(re.findall(r"^\| [\w -]+ \| `(\w+)` \| (.*?) \|$", text, re.MULTILINE))
    assert set(rows) == set(METHODS)
    assert rows["fedavg"] == "- | 1 / 1 | 1 | eta_g 1.0"
    assert rows["scaffold"] == "c | 2 / 2 | 1 | eta_g 1.0"
    assert rows["fedsam"].startswith("- | 1 / 1 | 2 | rho 0.1,")
    assert rows["fedgmt"].startswith("h | 2 / 1 | 1.33 | gamma 1.0,")
