"""`fedspeed data`: what it prints, what it writes, and its exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import layouts
import numpy as np
import pytest

from fedspeed.cli import data as command
from fedspeed.cli import main
from fedspeed.data import DATASETS
from fedspeed.data.samples import Samples
from fedspeed.data.splits import SPLITS
from fedspeed.report.figures import bubbles, heat_map

PNG = b"\x89PNG\r\n\x1a\n"


def test_list_names_every_data_set(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "list"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in DATASETS)
    assert "fedspeed[hf]" in shown


def test_the_help_explains_every_split() -> None:
    assert {line.split()[0].partition(":")[0] for line in command.SPLITS_HELP.splitlines()[1:]} == set(SPLITS)


def test_show_prints_numbers_and_writes_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "figures"
    assert main(["data", "show", "digits", "--split", "dirichlet:0.6", "--clients", "20", "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    assert "1,437 training samples, 360 for testing" in shown
    assert "71 to 72 samples per client" in shown
    assert "of 10 hold half of a client's data" in shown
    assert "unused        0 (0.0%)" in shown
    assert "fingerprint" in shown
    files = sorted(p.name for p in out.iterdir())
    assert files == ["digits-dirichlet-0.6-20-0-bubbles.png", "digits-dirichlet-0.6-20-0-heat.png"]
    assert all((out / f).read_bytes().startswith(PNG) for f in files)


def test_show_as_json(own_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["data", "show", "digits", "--split", "dirichlet-refill:0.1", "--clients", "20", "--json"]
    assert main([*arguments, "--no-figures"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["repeats"] == found["unused"] > 0
    assert (sum(found["sizes"]), found["clients"], found["split"]) == (1437, 20, "dirichlet-refill:0.1")
    assert list(own_folder.iterdir()) == []


def test_options_reach_the_data_set(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--set", "alpha=0.5", "--set", "size=20", "--split", "natural", "--clients", "5", "--no-figures"]
    assert main(["data", "show", "synthetic", *options]) == 0
    assert "20 to 20 samples per client" in capsys.readouterr().out
    as_in_run = [text.replace("alpha", "data.alpha").replace("size", "data.size") for text in options]
    assert main(["data", "show", "synthetic", *as_in_run]) == 0
    assert "20 to 20 samples per client" in capsys.readouterr().out


def test_fetch_checks_your_copy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = layouts.folder(layouts.binary(layouts.records(layouts.TEN)), tmp_path / "cifar")
    assert main(["data", "fetch", "cifar10", "--data-dir", str(folder), "--set", "part=true"]) == 0
    assert "30 training and 6 test samples of shape (3, 32, 32)" in capsys.readouterr().out
    assert main(["data", "fetch", "cifar10", "--data-dir", str(folder)]) == 2
    assert "are not the published ones" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "expected an action"),
        (["show", "cifr10"], "did you mean 'cifar10'"),
        (["show", "digits", "--split", "dirichlet:-1"], "a number > 0"),
        (["show", "digits", "--clients", "5000"], "5000 clients but only 1437 samples"),
        (["show", "digits", "--set", "size"], "expected OPTION=VALUE"),
        (["show", "digits", "--set", "clients=3"], "--set clients: not an option of the data set"),
        (["show", "synthetic", "--set", "beta=high"], "beta must be a number, found 'high'"),
        (["show", "cifar10", "--data-dir", "nowhere"], "found nothing at nowhere"),
        (["fetch", "tinyimagenet", "--data-dir", "nowhere.zip"], "found nothing at nowhere.zip"),
        (["show", "digits", "--out", "file/inside"], "cannot write to file/inside"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    arguments: list[str],
    message: str,
    own_folder: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (own_folder / "file").write_text("")
    assert main(["data", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert [p.name for p in own_folder.iterdir() if p.name != "cache"] == ["file"]


def test_figures_of_large_splits(tmp_path: Path) -> None:
    counts = np.random.default_rng(0).integers(0, 9, (500, 200))
    for draw in (heat_map, bubbles):
        assert draw(counts, tmp_path / "deep" / "a.png", "title").read_bytes().startswith(PNG)
    assert [p.name for p in (tmp_path / "deep").iterdir()] == ["a.png"]


def test_a_published_copy_is_kept_for_later_commands(tmp_path, monkeypatch, capsys) -> None:
    """Only a whole set: a part, or a set with options, stays where it is."""
    made = Samples("cifar10", *(np.zeros(s, np.uint8) for s in ((4, 3, 32, 32), (4,), (2, 3, 32, 32), (2,))))
    monkeypatch.setattr("fedspeed.data.read", lambda name, **options: made)
    monkeypatch.setenv("FEDSPEED_CACHE", str(tmp_path / "cache"))
    assert main(["data", "fetch", "cifar10", "--data-dir", str(tmp_path), "--set", "part=true"]) == 0
    assert not (tmp_path / "cache" / "cifar10").exists()
    assert main(["data", "fetch", "cifar10", "--data-dir", str(tmp_path)]) == 0
    kept = tmp_path / "cache" / "cifar10"
    assert f"kept in {kept}" in capsys.readouterr().out
    assert json.loads((kept / "about.json").read_text())["sha256"] == made.digest()
    before = (kept / "about.json").stat().st_mtime_ns
    assert main(["data", "fetch", "cifar10", "--data-dir", str(tmp_path)]) == 0
    assert (kept / "about.json").stat().st_mtime_ns == before
