"""The pages that the site makes from the code: nothing public is without one, and what they print can be run."""

from __future__ import annotations

import argparse
import dataclasses
import re
import shlex
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import fedspeed
from fedspeed.cli import COMMANDS, Parser, build_parser
from fedspeed.config.config import Config
from fedspeed.data import DATASETS, options
from fedspeed.methods import METHODS, WRAPPERS
from fedspeed.models import MODELS
from fedspeed.record import Record
from fedspeed.reproduce.recipes import FOLDER
from fedspeed.runs.directory import FILES

ROOT = Path(__file__).parents[2]
EXT = ROOT / "docs" / "_ext"
if str(EXT) not in sys.path:
    sys.path.append(str(EXT))

import apipages  # noqa: E402
import assemble  # noqa: E402
import marks  # noqa: E402


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    """Every page that is made, by name."""
    return dict(assemble.generated())


def parsers(parser: Parser, name: str = "") -> Iterator[tuple[str, Parser]]:
    """Every command and action, by the page it is on."""
    for key, inner in parser.inner().items():
        yield name or key, inner
        yield from parsers(inner, name or key)


def test_every_public_name_has_a_page(pages):
    for name in fedspeed.__all__:
        thing = getattr(fedspeed, name)
        called = {cls: key for key, cls in (METHODS | WRAPPERS).items()}.get(thing) if isinstance(thing, type) else None
        page = pages[f"methods/{called}.md" if called else f"api/{name}.md"]
        assert re.search(rf"auto\w+:: fedspeed\.{name}\n", page), name
        assert f"[`{name}`](" in pages["api/index.md"], name


def test_every_name_of_a_public_module_is_on_its_page(pages):
    """Those one may write as `fedspeed.NAME`, and whatever is in their `__all__`."""
    assert set(fedspeed._MODULES) - {"methods", "report"} <= set(apipages.modules())  # the latter is a function too
    for module in (fedspeed.data, fedspeed.theory):
        page = pages[f"api/module-{module.__name__.rpartition('.')[2]}.md"]
        for name in module.__all__:
            assert f"## {marks.plain(name)}\n" in page, name
    assert ":: fedspeed.terms.ascend_\n" in pages["api/module-terms.md"]


def test_every_command_and_option_is_on_a_page(pages):
    found = 0
    for command, parser in parsers(build_parser()):
        for action in parser._actions:
            for flag in action.option_strings:
                if not isinstance(action, argparse._HelpAction):
                    assert re.search(rf"^````{{option}}.*(?<![\w-]){flag}\b", pages[f"cli/{command}.md"], re.M), flag
                    found += 1
    assert found > 200
    assert {f"cli/{command}.md" for command in COMMANDS} <= set(pages)


def test_every_method_data_set_model_and_recipe_has_a_page(pages):
    """Methods with all fields and their reference, data sets with all options."""
    for name, cls in (METHODS | WRAPPERS).items():
        page = pages[f"methods/{name}.md"]
        for field in dataclasses.fields(cls):
            assert f"| `{field.name}` |" in page, (name, field.name)
        assert name in WRAPPERS or "## Reference" in page, name
    for name in DATASETS:
        assert all(f"| `{option}` |" in pages[f"data/{name}.md"] for option in options(name)), name
    assert {f"models/{name}.md" for name in MODELS} <= set(pages)
    stored = {path.stem for path in FOLDER.glob("*.toml")} - {"settings", "data"}
    assert {f"recipes/{name}.md" for name in stored} <= set(pages)


def test_every_config_key_record_field_and_file_of_a_run_is_on_a_page(pages):
    text = pages["config.md"]
    for field in dataclasses.fields(Config):
        assert f"| `{field.name}` |" in text or f"| `[{field.name}]` |" in text, field.name
    text = pages["reference/run-directory.md"]
    for field in dataclasses.fields(Record):
        assert f"| `{field.name}` |" in text, field.name
    assert all(f"`{name}`" in text for name in FILES)


def test_the_config_that_is_shown_is_one(pages):
    shown = re.search(r"```toml\n(.*?)```", pages["config.md"], re.S)
    assert Config.from_dict(tomllib.loads(shown[1])).method == fedspeed.FedSpeed(rho=0.05)


def test_a_method_page_says_what_the_method_is(pages):
    """FedSpeed's box and its rule, SCAFFOLD's cost, an erratum, a link to what it recovers."""
    page = pages["methods/fedspeed.md"]
    assert "\n 4  server sends x^t to the clients of S^t\n" in page
    assert "[FedDyn](feddyn.md)(alpha=1/lam)" in page
    assert "### The server's rule under partial participation" in page
    assert "| `lam` | `10.0` | `(0, inf)` |" in page
    assert "| vectors per active client and round | 2 down, 2 up |" in pages["methods/scaffold.md"]


def test_the_code_on_made_pages_runs(pages):
    """Python runs, commands are ones the program takes; so are the examples that `--help` ends with."""
    parser, python, commands = build_parser(), 0, 0
    for name, text in pages.items():
        for language, block in re.findall(r"^```(python|sh|text)\n(.*?)^```", text, re.M | re.S):
            if language == "python":
                exec(compile(block, name, "exec"), {"__name__": "page"})
                python += 1
            for line in re.findall(r"^ *(fedspeed [a-z].*)$", block.replace("\\\n", " "), re.M):
                words = shlex.split(re.sub(r" {3,}.*$| > .*$", "", line), comments=True)[1:]  # remarks stand apart
                if language == "sh" or (name.startswith("cli/") and "[-h]" not in line):
                    parser.parse_args(words)
                    commands += 1
    assert python >= len(METHODS)
    assert commands > 100


def test_documents_are_put_together_with_links_that_lead_somewhere(tmp_path):
    """Every link of every page, of our own making too, is to a file that is there; a second time nothing is written."""
    assemble.assemble(tmp_path)
    found = sorted(tmp_path.rglob("*.md"))
    for page in found:
        for link in assemble.LINK.finditer(page.read_text("utf-8")):
            if link["to"] and "://" not in link["to"]:
                assert (page.parent / link["to"]).is_file(), f"{page.relative_to(tmp_path)}: {link['to']}"
    before = {page: page.stat().st_mtime_ns for page in found}
    (tmp_path / "stale.md").write_text("# of an earlier build\n")
    assemble.assemble(tmp_path)
    assert {page: page.stat().st_mtime_ns for page in sorted(tmp_path.rglob("*.md"))} == before
    assert (tmp_path / "results" / "cnn" / "table7.png").is_file()


def test_a_link_that_leads_nowhere_stops_the_build(tmp_path):
    stage = assemble.Stage(tmp_path)
    here = ("docs/guides/data.md", "guides/data.md")
    with pytest.raises(SystemExit, match=r"docs/guides/data\.md links to nowhere\.md, which is not a file"):
        stage.linked("[a](nowhere.md)", *here)
    kept = "`[a](nowhere.md)` and\n\n```\n[a](nowhere.md)\n```\n"
    assert stage.linked(kept, *here) == kept
    text = stage.linked("[`cnn`](../../results/iclr2023/cnn/README.md) ![x](../figures/demo.png)", *here)
    assert text == "[`cnn`](../results/cnn/index.md) ![x](../figures/demo.png)"


def test_plain_text_stays_plain():
    assert marks.plain("a_b *c* `d_e` <f> |g|") == r"a\_b \*c\* `d_e` \<f\> \|g\|"
    assert marks.cell("`a | b`\nc") == r"`a \| b` c"
    said = marks.sections("One.\n\nArgs:\n    a, b: two\n        lines.\n\nExample:\n    >>> 1\n    1\n\nMore.")
    assert said == {"": "One.\n\nMore.", "Args": "a, b: two\n    lines.", "Example": ">>> 1\n1"}
    assert marks.items(said["Args"]) == [("a, b", "two lines.")]
    assert marks.boxed("x\n\n    y\n\n      z\n\nw") == [(False, "x"), (True, "y\n\n  z"), (False, "w")]
