"""Presets on the command line: the line that says what they set, and what is refused."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from fedspeed import reproduce
from fedspeed.cli import main
from fedspeed.reproduce import recipes
from fedspeed.utils.files import read_toml

QUICK = ["--rounds", "1", "--clients", "4", "--active", "2", "--local-steps", "1", "--model", "linear"]


pytestmark = pytest.mark.usefixtures("own_folder")


def told(capsys, *words: str) -> list[str]:
    """The lines on a preset that a command prints."""
    assert main([*words, *QUICK]) == 0
    out = capsys.readouterr().out
    return [line for line in out.splitlines() if "preset " in line]


def test_a_run_says_what_its_preset_set(capsys):
    fixed = ("run", "--preset", "released", "--method", "fedadam", "--cohort", "fixed", "--split", "iid", "--out", "a")
    assert told(capsys, *fixed) == [
        "preset released: clip=10, clip_mode=released, decay_outside_mix=true, method.tau=0.01; digits is not in the "
        "authors' code, its augmentation stays"
    ]
    stored = read_toml(Path("a/config.toml"))
    assert (stored["clip"], stored["cohort"], stored["augment"], stored["split"]) == (10.0, "fixed", "paper", "iid")
    assert "preset" not in stored
    assert told(capsys, "run", "a/config.toml", "--out", "again") == []  # resolved: nothing is left to say
    assert told(capsys, "run", "--preset", "paper", "--method", "fedavg", "--out", "b") == [
        "preset paper: lr_decay=0 (the decay that the paper gives the method)"
    ]


def test_what_is_quiet_stays_so(capsys):
    assert told(capsys, "run", "--preset", "released", "--quiet", "--out", "a") == []


def test_a_comparison_says_it_once_and_names_methods_with_values_of_their_own(capsys):
    words = ("compare", "fedavg", "scaffold", "fedadam", "--preset", "released", "--seeds", "1", "--out", "c")
    common = "preset released: cohort=bernoulli, clip=10, clip_mode=released, decay_outside_mix=true, "
    end = "split=dirichlet-refill:0.6; digits is not in the authors' code, its augmentation stays"
    assert told(capsys, *words) == [f"{common}{end}", f"fedadam: {common}method.tau=0.01, {end}"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("run --preset relased", "unknown preset 'relased'; did you mean 'released'? Known: paper, released"),
        ("run --preset released --data shakespeare", "preset released: expected pictures as in the"),
        ("compare fedspeed --preset released --data shakespeare", "preset released: expected pictures as in the"),
        ("run --preset released --method fedadmm", "preset released: expected a method of the authors' code, found"),
        ("compare fedspeed fedpd --preset released", "preset released: expected a method of the authors' code, found"),
        ("run --preset released --set method.roh=1", "unknown field of FedSpeed 'roh'; did you mean 'rho'?"),
        ("run --preset released --method topk --set method.base=fedpd", "preset released: expected a method of the"),
        ("run --preset paper --data x.npz", "unknown data set 'x.npz'"),
        ("reproduce table4-low --preset relased-c10-100", "unknown preset of table4-low 'relased-c10-100'"),
        ("reproduce table4 --preset released", "unknown preset of table4 'released'; did you mean 'released-c10-100'?"),
        ("reproduce table4 --preset released-c100-500", "unknown preset of table4 'released-c100-500'"),
        ("reproduce all --preset relesed", "no recipe has the preset 'relesed'"),
        ("reproduce table4-low --preset released-c10-100 --set data.name=shakespeare",
         "preset released-c10-100: expected its own data, cifar10, found shakespeare; omit data.name"),
        ("reproduce table4-low --preset smoke-blocks --set data=cifar10", "preset smoke-blocks: expected its own data"),
        ("reproduce table4-low --preset smoke-blocks --set roh=1", "unknown config key 'roh'"),
        ("reproduce table4-low --preset smoke-blocks --set method.roh=1", "unknown field of FedSpeed 'roh'; did you"),
        ("reproduce table4-low --preset released-c10-100 --only FedPD", "unknown row 'FedPD'"),
    ],
)  # fmt: skip
def test_a_word_that_does_not_fit_is_one_line(capsys, words, says):
    assert main(words.split()) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"fedspeed: error: {says}")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("preset = 3", "unknown preset '3'"),
        ('preset = ["released"]', "unknown preset"),
        ('preset = "released"\ncohrt = "fixed"', "unknown config key 'cohrt'; did you mean 'cohort'?"),
        ('preset = "released"\nmodel = 3', "config: model must be a name or a table with a name"),
        ('preset = "released"\nsplit = 3', "Config: split must be text, got 3"),
    ],
)
def test_a_file_with_a_word_that_does_not_fit_is_one_line(capsys, tmp_path, text, says):
    (tmp_path / "a.toml").write_text(text)
    assert main(["run", "a.toml"]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"fedspeed: error: {says}"), err
    assert err.count("\n") == 1


@pytest.fixture
def readings(tmp_path, monkeypatch):
    """A copy of the recipes and settings that a test may damage."""
    found = tmp_path / "recipes"
    shutil.copytree(recipes.FOLDER, found)
    for cached in (recipes.settings, recipes.recipes):
        cached.cache_clear()
    monkeypatch.setattr(recipes, "FOLDER", found)
    monkeypatch.setattr(reproduce, "FOLDER", found)
    yield found
    for cached in (recipes.settings, recipes.recipes):
        cached.cache_clear()


@pytest.mark.parametrize(
    ("file", "before", "after", "says"),
    [
        ("settings.toml", "[smoke.base]\n", "[smoke.base]\ncohrt = 1\n", "unknown config key 'cohrt'; did you mean"),
        ("table4-low.toml", "{ stop_at =", "{ stopat =", "unknown config key 'stopat'; did you mean 'stop_at'?"),
        ("table4-low.toml", "in_order = true", "inorder = true", "unknown key of recipe table4-low, preset "),
        ("table4-low.toml", "order = 14", "ordr = 14", "unknown key of recipe table4-low 'ordr'; did you"),
        ("table4-low.toml", 'name = "fedspeed", lam', 'name = "fedspeed", lamb', "unknown field of FedSpeed 'lamb'"),
        ("table4.toml", 'continues = "table4-low"', 'continues = "table4low"', "unknown recipe 'table4low'; did you"),
        ("table4-low.toml", 'setting = "base"', 'setting = "bas"',
         "unknown setting of preset smoke-blocks in recipe table4-low 'bas'; did you mean 'base'?"),
    ],
)  # fmt: skip
def test_a_reading_that_names_what_there_is_not_is_one_line(readings, capsys, file, before, after, says):
    text = (readings / file).read_text("utf-8")
    assert before in text
    (readings / file).write_text(text.replace(before, after), "utf-8")
    assert main(["reproduce", "table4", "table4-low", "--preset", "smoke-blocks", "--out", "out"]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"fedspeed: error: {says}"), err
    assert err.count("\n") == 1
    assert not Path("out").exists()
