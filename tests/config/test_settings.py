"""The settings in force stand in one line when a run starts, in the report and in comparisons: those of the config."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedspeed import Plan, load_data, simulate
from fedspeed.cli import main
from fedspeed.config.presets import paper_decay
from fedspeed.config.spec import ALWAYS, in_force, one_line
from fedspeed.methods import FedSpeed
from fedspeed.report.comparison import Comparison
from fedspeed.report.page import page
from fedspeed.report.run_files import collect
from fedspeed.runs.directory import RunDir

FEW = "--model linear --split iid --clients 6 --active 3 --rounds 2"
OTHER: dict[str, Any] = {
    "lr": 0.05, "lr_decay": 0.99, "weight_decay": 0.0, "weighting": "samples", "local_epochs": 2, "batch_size": 7,
    "active": 4, "cohort": "bernoulli",
}  # fmt: skip


def parsed(line: str) -> dict[str, str]:
    """A line of settings by name: `lr 0.1, active 3 of 6` -> {"lr": "0.1", "active": "3 of 6"}."""
    return dict(part.split(" ", 1) for part in line.split(", "))


def first_line(out: str, method: str) -> dict[str, str]:
    line = out.splitlines()[0]
    assert line.startswith(f"{method}: ")
    return parsed(line.removeprefix(f"{method}: "))


def expected(config: dict[str, Any], augment: str, loss: str) -> dict[str, str]:
    """Every setting as the config has it, by hand."""
    known = config | {"augment": augment, "loss": loss, "active": f"{config['active']} of {config['clients']}"}
    return {name: f"{known[name]:g}" if isinstance(known[name], float) else str(known[name]) for name in ALWAYS}


def test_the_first_line_of_a_run_lists_exactly_the_values_of_its_config(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "mine.npz", x=rng.integers(0, 256, (60, 8, 8), dtype=np.uint8), y=np.arange(60) % 3)
    options = [part for name, value in OTHER.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    mine = ["--data", "arrays", "--data-dir", str(tmp_path / "mine.npz")]
    command = ["run", "--method", "fedavg", *FEW.split()]
    for number, (given, augment) in enumerate((([], "none"), (options, "none"), (["--augment", "paper"], "flip"))):
        out = tmp_path / f"run{number}"
        assert main([*command, *mine, *given, "--out", str(out)]) == 0
        found = first_line(capsys.readouterr().out, "fedavg")
        told = "flip and crop by 1" if augment == "flip" else augment
        assert found == expected(RunDir(out).config(), told, "cross_entropy")
        if given is options:
            changed = {name: str(value).removesuffix(".0") for name, value in OTHER.items()} | {"active": "4 of 6"}
            assert {name: found[name] for name in OTHER} == changed
    assert main(["resume", str(tmp_path / "run0"), "--rounds", "3"]) == 0
    again = first_line(capsys.readouterr().out, "fedavg")
    assert again == expected(RunDir(tmp_path / "run0").config(), "none", "cross_entropy")


def test_a_quiet_run_and_one_for_a_program_print_no_settings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", *FEW.split(), "--quiet", "--out", str(tmp_path / "a")]) == 0
    assert capsys.readouterr().out == ""
    assert main(["run", *FEW.split(), "--json", "--out", str(tmp_path / "b")]) == 0
    assert json.loads(capsys.readouterr().out)["settings"] == {"augment": "none", "loss": "cross_entropy"}


def test_python_has_the_same_line() -> None:
    data = load_data("digits", split="iid", clients=6)
    run = simulate("fedspeed", "linear", data, active=3, lr_decay=0, local_steps=4, clip=2.0, warmup="lr=3")
    found = parsed(run.settings)
    assert found == {
        "lr": "0.1", "lr_decay": "0.9995", "weight_decay": "0.001", "weighting": "uniform", "augment": "none",
        "loss": "cross_entropy", "local_steps": "4", "batch_size": "50", "active": "3 of 6", "cohort": "fixed",
        "warmup": "lr=3", "clip": "2",
    }  # fmt: skip


@pytest.mark.parametrize("name", OTHER)
def test_every_setting_is_told_from_its_default(name: str) -> None:
    usual, other = (in_force(Plan(**given).fields()) for given in ({}, {name: OTHER[name]}))
    assert {key for key in usual if usual[key] != other[key]} == {name}


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("two") / "runs"
    few = ["--seeds", "1", "--quiet", "--out", str(out)]
    assert main(["compare", "fedavg", "fedspeed", *FEW.split(), "--paper-decay", *few]) == 0
    return out


def test_a_comparison_says_which_settings_differ(two: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = json.loads((two / "table.json").read_text())["settings"]
    assert told["different"] == {"lr_decay": {"fedavg": "0.998", "fedspeed": "0.9995"}}
    config = RunDir(two / "fedavg-s0").config()
    assert told["shared"] | {"lr_decay": "0.998"} == expected(config, "none", "cross_entropy")
    shared = f"ettings of all: {one_line(told['shared'])}; they differ in lr_decay: 0.998 (fedavg"
    assert f"s{shared}), 0.9995 (fedspeed).\n" in (two / "table.md").read_text()
    assert main(["compare", str(two), "--out", str(two.parent / "again")]) == 0
    assert f"s{shared}" in capsys.readouterr().out
    rows, _ = collect([two])
    assert f"S{shared}" in page(rows, Comparison(rows, []))


def test_a_comparison_of_other_settings_is_not_called_one_of_methods(two: Path, tmp_path: Path) -> None:
    few = ["--seeds", "1", "--quiet", "--out", str(tmp_path / "more"), "--rounds", "3", "--split", "dirichlet:0.6"]
    assert main(["compare", "fedavg", "fedspeed", *FEW.split(), "--paper-decay", *few]) == 0
    rows, _ = collect([two / "fedavg-s0", tmp_path / "more" / "fedspeed-s0"])
    configs = [row.runs[0].config for row in rows]
    assert configs[0]["rounds"] != 3
    assert configs[0]["split"] == "iid"
    found = Comparison(rows, [])
    different = found.data()["settings"]["different"]
    assert list(different["rounds"].values()) == [str(configs[0]["rounds"]), "3"]
    assert list(different["split"].values()) == ["iid", "dirichlet:0.6"]
    assert "compares more than their methods" in page(rows, found)
    tuned = [*few[:4], str(tmp_path / "tuned"), "--lr", "0.05", "--local-steps", "2"]
    assert main(["compare", "fedavg", "fedspeed", *FEW.split(), "--paper-decay", *tuned]) == 0
    rows, _ = collect([two / "fedavg-s0", tmp_path / "tuned" / "fedspeed-s0"])
    words = page(rows, Comparison(rows, []))
    assert "also differ in local_steps (" in words  # a rate may be tuned for each method
    assert "none" in words.partition("also differ in local_steps (")[2].partition(")")[0]
    alike, _ = collect([two])
    assert "compares more than their methods" not in page(alike, Comparison(alike, []))


def test_the_report_of_one_run_and_of_an_older_one_have_the_line(two: Path) -> None:
    rows, _ = collect([two / "fedspeed-s0"])
    text = page(rows, Comparison(rows, []))
    assert re.search(r'id="settings">Settings: lr 0\.1, lr_decay 0\.9995, .* loss cross_entropy, ', text)
    del rows[0].runs[0].summary["settings"]  # as runs of before had none: what the config says is told
    assert re.search(r'id="settings">Settings: lr 0\.1, lr_decay 0\.9995, ', page(rows, Comparison(rows, [])))


def test_methods_and_runs_speak_of_the_same_decay(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["methods", "fedspeed"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert (
        f"the paper's lr_decay {paper_decay(FedSpeed())} (--preset paper; the default of a run is {Plan().lr_decay}"
        in out
    )
