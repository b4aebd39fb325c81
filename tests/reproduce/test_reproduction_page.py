"""The stored results: pages are those that the stored runs give, and docs/reproduction.md leads to what is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fedspeed.reproduce import Reproduction
from fedspeed.reproduce.page import markdown
from fedspeed.reproduce.recipes import find_recipe, recipes
from fedspeed.reproduce.render import judged

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reproduction.md"
STORED = ROOT / "results" / "iclr2023"
PAGES = [
    path for path in sorted(STORED.glob("*/*.md")) if path.name != "README.md" and find_recipe(path.stem).kind == "runs"
]


@pytest.mark.parametrize("preset", sorted({path.parent.name for path in PAGES}))
def test_pages_show_the_stored_runs(preset, tmp_path, monkeypatch):
    """Without the data: their digests are known, so the runs are found."""
    monkeypatch.setenv("FEDSPEED_CACHE", str(tmp_path))
    work = Reproduction(preset, STORED / preset)
    for path in PAGES:
        if path.parent.name == preset:
            shown = markdown(*judged(work, find_recipe(path.stem)))
            assert path.read_text("utf-8").startswith(shown), f"fedspeed reproduce {path.stem} --preset {preset}"


def test_the_page_leads_to_what_is_there():
    text = PAGE.read_text("utf-8")
    links = re.findall(r"\]\((\.\./results/[^)]*)\)", text)
    assert {f"../results/iclr2023/{folder.name}/README.md" for folder in STORED.iterdir()} <= set(links)
    assert all((PAGE.parent / link).exists() for link in links)
    named = set(re.findall(r"`((?:table|fig)\d[a-z0-9-]*)`", text))
    assert named
    assert named <= set(recipes())
