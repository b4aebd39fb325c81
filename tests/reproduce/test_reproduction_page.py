"""The stored results: pages are those that the stored runs give, and docs/reproduction.md leads to what is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fedspeed.reproduce import Reproduction
from fedspeed.reproduce.page import markdown
from fedspeed.reproduce.recipes import find_recipe, recipes, settings
from fedspeed.reproduce.render import judged

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reproduction.md"
STORED = ROOT / "results" / "iclr2023"
OTHERS = {"README.md", "progress.md"}
PAGES = [
    path for path in sorted(STORED.glob("*/*.md")) if path.name not in OTHERS and find_recipe(path.stem).kind == "runs"
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


def test_the_table_of_what_is_matched_is_that_of_the_settings():
    named = {"paper": {"10%": "C10-100", "2%": "C10-500"}, "`paper-2pct`": {"": "C10-500"}}
    lines = re.findall(r"^\| (?:`?paper|`cnn|`mlp)[^|]*\| \d+ of .*$", PAGE.read_text("utf-8"), re.M)
    assert len(lines) == 10
    for line in lines:
        what, clients, pictures, steps, gamma, rounds, visits = (cell.strip() for cell in line.strip("| ").split("|"))
        preset, _, share = what.partition(" (")[0].partition(", ")
        places = named.get(preset, {"10%": "base", "2%": "lowpart"})
        setting = settings(preset.strip("`"))[places[share]]
        n = setting["data"].get("train_size", 50000) // setting["clients"]
        K = setting["local_epochs"] * -(-n // setting["batch_size"])
        assert clients == f"{setting['active']} of {setting['clients']}"
        assert (int(pictures), int(steps), int(rounds)) == (n, K, setting["rounds"])
        assert float(gamma) == round(1 - (1 - setting["lr"] / 10) ** K, 3)
        assert float(visits) == setting["rounds"] * setting["active"] / setting["clients"]
