"""The README does what it says, is short, and says nothing that the pages behind it do not."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path

import pytest
from processor import SAME_BITS
from test_documents import DOCUMENTS

from fedspeed.cli import build_parser, main
from fedspeed.methods import METHODS

ROOT = Path(__file__).parents[2]


def blocks(path: Path, *languages: str) -> list[str]:
    return [code for name, code in re.findall(r"```(\w*)\n(.*?)```", path.read_text(), re.DOTALL) if name in languages]


COMMANDS = [
    (path.name, line.strip())
    for path in DOCUMENTS
    for block in blocks(path, "sh", "")
    for line in block.replace("\\\n", " ").splitlines()
    if line.strip().startswith("fedspeed ")
]


def test_the_python_example_prints_what_is_shown(capsys):
    """On the kind of processor that wrote the page to the digit, elsewhere within five points of accuracy."""
    (example,), (shown,) = (blocks(ROOT / "README.md", language) for language in ("python", "text"))
    assert len([line for line in example.splitlines() if line.strip()]) <= 10
    exec(compile(example, "README.md", "exec"), {"__name__": "readme"})
    printed = capsys.readouterr().out
    assert len(printed.splitlines()) >= 4
    if SAME_BITS:
        assert printed == shown
    number = re.compile(r"[\d.]+(?=%)")
    assert number.sub("", printed) == number.sub("", shown)
    pairs = zip(number.findall(printed), number.findall(shown), strict=True)
    assert all(abs(float(here) - float(there)) < 5 for here, there in pairs)


def test_what_it_says_of_the_reproduction_is_stored():
    """Its percentages are those of the stored pages: the server's rule on `cnn`, methods on CIFAR-10 and CIFAR-100."""
    found = (ROOT / "README.md").read_text().partition("## What the reproduction found")[2].partition("\n## ")[0]
    stored = (ROOT / "results" / "iclr2023" / "cnn" / "serverrule.md").read_text()
    for name in ("FedSpeed active", "FedAvg", "FedSpeed all"):
        accuracies = re.search(rf"^\| {name} \| (.*) \|$", stored, re.M)[1].split(" | ")  # at 100%, 50%, 10%, 2%
        assert f"{float(accuracies[2].split()[0]):.1f}%" in found, name
    page = (ROOT / "docs/explanation/reproduction.md").read_text()
    for cell in ("80% | FedSpeed | 136", "40% | FedSpeed | 522", "40% | FedDyn | 661", "80% | FedCM | 109"):
        (best,) = re.findall(rf"to {re.escape(cell)} .* best ([\d.]+)%", page)
        assert f"{float(best):.1f}%" in found
    (reached,) = re.findall(r"to 80% \| FedDyn \| 121 \| (\d+) ", page)
    assert f"80% at round {reached}" in found
    (ten,), (two,) = (re.findall(rf"to {level}% \| FedAvg \| \d+ \| (\d+) ", page) for level in (80, 40))
    assert f"({ten}, {two} rounds)" in found


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
    """Its speed is the benchmarks', its commands and its choice of tools are part of longer tables."""
    text = (ROOT / "README.md").read_text()
    assert len(text) < 6000
    assert rows("README.md")
    pages = ("docs/explanation/benchmarks.md", "docs/guides/install.md", "docs/reference/cli.md")
    assert rows("README.md") <= set().union(*(rows(page) for page in pages))
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
