"""The stored results: pages follow from the stored runs, and docs/explanation/reproduction.md links to them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fedspeed.reproduce import Reproduction
from fedspeed.reproduce.page import judged, markdown
from fedspeed.reproduce.recipes import find_recipe, recipes, scale, settings

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "explanation" / "reproduction.md"
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
    links = re.findall(r"\]\((\.\./\.\./results/[^)]*)\)", text)
    assert {f"../../results/iclr2023/{folder.name}/README.md" for folder in STORED.iterdir()} <= set(links)
    assert all((PAGE.parent / link).exists() for link in links)
    named = set(re.findall(r"`((?:table|fig)\d[a-z0-9-]*)`", text))
    assert named
    assert named <= set(recipes())


def correction(setting):
    """Pictures per client, local steps K, and gamma at lam = 10."""
    n = setting["data"].get("train_size", 50000) // setting["clients"]
    K = setting["local_epochs"] * -(-n // setting["batch_size"])
    return n, K, f"{1 - (1 - setting['lr'] / 10) ** K:.3f}"


@pytest.mark.parametrize("preset", ["cnn", "mlp"])
def test_what_a_preset_says_of_its_scale_is_that_of_its_settings(preset):
    told = scale(preset)
    steps = re.search(
        r": (\d+) with 10 of 100 clients and (\d+) with 10 of 500, .* has (\d+) and (\d+) \(10 by its main text\)\. So",
        told,
    )
    gammas = re.search(r" is ([\d.]+) and ([\d.]+) at lr = 0\.1, .*, where the paper's is ([\d.]+) and ([\d.]+);", told)
    places = [(preset, "base"), (preset, "lowpart"), ("paper", "C10-100"), ("paper", "C10-500-appendix")]
    expected = [correction(settings(name)[place]) for name, place in places]
    assert [int(k) for k in steps.groups()] == [K for _, K, _ in expected]
    assert list(gammas.groups()) == [gamma for *_, gamma in expected]


def test_the_page_of_a_preset_says_of_what_scale_it_is():
    for folder in STORED.iterdir():
        assert scale(folder.name) in (folder / "README.md").read_text("utf-8")


def test_the_table_of_what_is_matched_is_that_of_the_settings():
    named = {
        "paper": {"10%": "C10-100", "2%, appendix": "C10-500-appendix", "2%, main text": "C10-500-main"},
        "`paper-2pct-mixed`": {"": "C10-500-mixed"},
    }
    lines = re.findall(r"^\| (?:`?paper|`cnn|`mlp)[^|]*\| \d+ of .*$", PAGE.read_text("utf-8"), re.M)
    assert len(lines) == 11
    for line in lines:
        what, clients, pictures, steps, gamma, rounds, visits = (cell.strip() for cell in line.strip("| ").split("|"))
        preset, _, share = what.partition(" (")[0].partition(", ")
        places = named.get(preset, {"10%": "base", "2%": "lowpart"})
        setting = settings(preset.strip("`"))[places[share]]
        n, K, expected = correction(setting)
        assert clients == f"{setting['active']} of {setting['clients']}"
        assert (int(pictures), int(steps), int(rounds)) == (n, K, setting["rounds"])
        assert gamma == expected
        assert float(visits) == setting["rounds"] * setting["active"] / setting["clients"]


def test_the_long_runs_are_told_as_they_are_stored():
    """docs/explanation/paper-scale.md: accuracy by round, and on all test pictures at the end."""
    text = (ROOT / "docs" / "explanation" / "paper-scale.md").read_text("utf-8").partition("## How far they are")[2]
    rounds = [int(t.replace(",", "")) for t in re.search(r"^\| round \| (.*) \|$", text, re.M)[1].split(" | ")]
    results = Reproduction("paper-2pct-mixed", STORED / "paper-2pct-mixed").store.results().values()
    known = [r for r in results if r["config"]["split"] == "iid" and r["config"]["model"]["init"] == "zero-residual"]
    stored = {r["config"]["method"]["name"]: r for r in known}
    assert len(stored) == len(known)
    told = [name.lower() for name in re.findall(r"^\| (Fed\w+|SCAFFOLD) \|", text, re.M)]
    assert sorted(told) == sorted([*stored, *stored]), "a line for each in both tables"
    for name, result in stored.items():
        lines = re.findall(rf"^\| {name} \| (.*) \|$", text, re.M | re.I)
        numbers, curve = (line.split(" | ") for line in lines)
        assert numbers[4] == f"{100 * result['final']['accuracy']:.2f}%"
        seen = dict(zip(result["rounds"]["round"], result["rounds"]["test_accuracy"], strict=True))
        reached = [next((f"{t:,}" for t, a in seen.items() if a >= target), "> 1,000") for target in (0.75, 0.825)]
        assert [numbers[0], numbers[2]] == reached
        assert len(curve) == len(rounds)
        assert [float(a) for a in curve] == pytest.approx([100 * seen[t] for t in rounds], abs=0.051)
