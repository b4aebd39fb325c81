"""`fedspeed tune` on digits: what is read, what is spent, which bits are the same, what is refused."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedspeed
from fedspeed.config.config import Config
from fedspeed.errors import UserError
from fedspeed.experiments.batch import RunTask, make_runs
from fedspeed.experiments.tune import labelled
from fedspeed.experiments.tune.result import result, trial_rows
from fedspeed.experiments.tune.tuner import Tuning
from fedspeed.runs.directory import RunDir
from fedspeed.runs.launch import run_config

SMALL: dict[str, Any] = {
    "model": "linear",
    "clients": 10,
    "active": 3,
    "rounds": 6,
    "local_epochs": 1,
    "batch_size": 40,
    "checkpoint_every": 3,
}
ARGS = [part for key, value in SMALL.items() for part in (f"--{key.replace('_', '-')}", str(value))]


def run_cli(*args: str) -> int:
    from fedspeed.cli import main

    return main(["tune", *args])


def counted(folder: Path, label: str) -> float:
    """The gradients of all trials of a method, from the lines of their records."""
    runs = [run for run in folder.glob("trials/*") if run.name.startswith(f"{label}_")]
    lines = [json.loads(line) for run in runs for line in (run / "rounds.jsonl").read_text().splitlines()]
    return sum(line["grad_evals"] for line in lines)


def searched(
    out: Path, methods: list[str], budget: float, strategy: str, space: tuple[str, ...] = (), **more: Any
) -> Any:
    """Only the search: judging and figures take longer."""
    tables = {name: {"name": name} for name in methods}
    tuning = Tuning(tables, {**SMALL, **more}, budget, strategy, [], [1000], [5], out)
    return tuning, tuning.search(make_runs)


@pytest.mark.parametrize("strategy", ["random", "halving"])
def test_every_method_spends_the_same_budget_by_its_records(tmp_path: Path, strategy: str) -> None:
    budget = 260.0
    tuning, _ = searched(tmp_path, ["fedavg", "fedspeed"], budget, strategy)
    rows = trial_rows(tuning)
    prices = {label: tuning.price(label) for label in tuning.methods}
    assert prices["fedspeed"] == 2 * prices["fedavg"]  # two gradients per step
    for label, price in prices.items():
        spent = counted(tmp_path, label)
        assert spent == sum(row["gradients"] for row in rows if row["method"] == label)
        assert budget - price < spent <= budget


@pytest.mark.parametrize("held_out", ["0.2", "clients:2"])
def test_the_test_set_plays_no_part_in_the_choice(tmp_path: Path, held_out: str, monkeypatch: Any) -> None:
    """With a test set of noise and wrong labels, and without any, every trial has the same bits."""
    from fedspeed.data import small as module
    from fedspeed.data.samples import Samples

    good = module.digits()
    assert good.x_test is not None
    assert good.y_test is not None
    noise = np.random.default_rng(0).normal(scale=1e6, size=good.x_test.shape).astype(np.float32)
    wrong = (good.y_test + 1) % 10
    found = []
    for name, x, y in (("good", good.x_test, good.y_test), ("bad", noise, wrong), ("none", None, None)):
        made = Samples("digits", good.x, good.y, x, y, classes=10)
        monkeypatch.setattr(module, "digits", lambda made=made: made)
        tuning, chosen = searched(tmp_path / name, ["fedavg", "fedprox"], 115.0, "halving", validation=held_out)
        runs = sorted((tmp_path / name / "trials").glob("*"))
        found.append((chosen, tuning.known, {run.name: RunDir(run).summary()["digests"] for run in runs}))
    assert found[0] == found[1] == found[2]
    assert len(found[0][2]) > 3
    records = [record for run in (tmp_path / "bad" / "trials").glob("*") for record in RunDir(run).records()]
    assert all(record.test_loss is None and record.test_accuracy is None for record in records)
    assert all(record.validation_accuracy is not None for record in records)


def test_survivors_of_halving_are_the_bits_of_a_run_in_one_go(tmp_path: Path) -> None:
    searched(tmp_path / "t", ["fedspeed"], 270.0, "halving")
    runs = {run: RunDir(run) for run in (tmp_path / "t" / "trials").glob("*")}
    lengths = sorted(len(run.records()) for run in runs.values())
    assert lengths[0] < lengths[-1] == 6  # some went on
    survivor = next(run for run in runs.values() if len(run.records()) == 6)
    run_config(Config.from_toml(survivor.config_file), tmp_path / "whole")
    assert survivor.summary()["digests"] == RunDir(tmp_path / "whole").summary()["digests"]
    early = next(run for run in runs.values() if len(run.records()) < 6)
    config = Config.from_toml(early.config_file)
    run_config(replace(config, rounds=6), tmp_path / "longer")
    both = [run.records(config.rounds) for run in (early, RunDir(tmp_path / "longer"))]
    timeless = [[replace(record, seconds=0.0, eval_seconds=0.0) for record in records] for records in both]
    assert timeless[0] == timeless[1]


@pytest.mark.parametrize("strategy", [pytest.param("random", marks=pytest.mark.slow), "halving"])
def test_a_search_that_was_stopped_goes_on(tmp_path: Path, strategy: str) -> None:
    """After a few trials, the last of which has not written its end; what is whole is not touched again."""
    whole, chosen = searched(tmp_path / "whole", ["fedavg"], 200.0, strategy)

    def some(tasks: list[RunTask]) -> dict[str, str]:
        make_runs(tasks[:3])
        RunDir(tasks[2].folder).remove_results()
        raise KeyboardInterrupt

    def search() -> Tuning:
        return Tuning(whole.methods, {**SMALL}, 200.0, strategy, [], [1000], [5], tmp_path / "stopped")

    with pytest.raises(KeyboardInterrupt):
        search().search(some)
    kept = {path: path.stat().st_mtime_ns for path in tmp_path.glob("stopped/trials/*/summary.json")}
    assert len(kept) == 2
    tuning = search()
    assert tuning.search(make_runs) == chosen
    assert tuning.known == whole.known
    assert [row | {"run": ""} for row in trial_rows(tuning)] == [row | {"run": ""} for row in trial_rows(whole)]
    if strategy == "random":
        assert {path: path.stat().st_mtime_ns for path in kept} == kept


def test_the_result_has_points_trials_and_judgement(tmp_path: Path) -> None:
    methods = ["fedavg", fedspeed.FedSpeed(rho=0.0)]
    tuned = fedspeed.tune(methods, 200, space={"lam": [1, 10, 100]}, seeds=2, out=tmp_path, **SMALL)
    assert list(tuned.chosen) == ["fedavg", "fedspeed:rho=0"]
    assert set(tuned.chosen["fedspeed:rho=0"]) == {"lr", "lam"}
    for label, point in tuned.chosen.items():  # the choice is the best of its trials, and first of equals
        own = [row for row in tuned.rows if row["method"] == label]
        best = max(own, key=lambda row: row["score"])
        assert {key: best[key] for key in point} == point
        assert tuned.scores[label] == best["score"]
        records = RunDir(tmp_path / best["run"]).records()
        assert best["score"] == pytest.approx(sum(r.validation_accuracy or 0 for r in records[-5:]) / 5)
    assert [one["seeds"] for one in tuned.judged] == [[0, 1], [0, 1]]
    for one, label in zip(tuned.judged, tuned.chosen, strict=True):
        runs = [run for run in tmp_path.glob("judged/*-s?") if run.name.startswith(label.replace(":", "_"))]
        config = Config.from_toml(runs[0] / "config.toml")
        assert config.validation == ""  # judged runs train on all of it
        assert config.test_set
        told = [RunDir(run).summary()["mean_last5_accuracy"] for run in runs]
        assert one["mean"] == pytest.approx(sum(told) / 2)
    files = {path.name for path in tmp_path.iterdir()}
    assert files >= {"tune.json", "trials.csv", "budget.png", "budget.svg", "budget.pdf", "trials", "judged"}
    stored = json.loads((tmp_path / "tune.json").read_text())
    assert stored["used"]["held_out"] == "0.2"
    assert stored["used"]["tuning_seeds"] == [1000]
    assert stored["chosen"] == tuned.chosen

    def nothing(tasks: list[RunTask]) -> dict[str, str]:
        raise AssertionError(tasks)

    tables = {"fedavg": {"name": "fedavg"}, "fedspeed:rho=0": {"name": "fedspeed", "rho": 0.0}}
    again = Tuning(tables, SMALL, 200, "random", ["lam=1,10,100"], [1000], [0, 1], tmp_path)
    chosen = again.search(nothing)  # all is there
    assert result(again, chosen, *again.judge(nothing, chosen)).data() == tuned.data()


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["random", "halving"])
def test_killed_at_any_instant_it_goes_on_to_the_same_end(tmp_path: Path, strategy: str) -> None:
    given = [*["fedavg", "fedspeed", "--budget", "250", "--seeds", "1", "--quiet", "--strategy"], strategy, *ARGS]
    assert run_cli(*given, "--out", str(tmp_path / "whole")) == 0
    command = [sys.executable, "-m", "fedspeed", "tune", *given, "--out", str(tmp_path / "killed")]
    trials = tmp_path / "killed" / "trials"
    process = subprocess.Popen(command, env=os.environ)
    while process.poll() is None and len(list(trials.glob("*/rounds.jsonl"))) < 3:
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "killed" / "tune.json").exists()
    assert run_cli(*given, "--out", str(tmp_path / "killed")) == 0
    for name in ("tune.json", "trials.csv"):
        assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


BAD = [
    ("fedavg fedspeed --budget 10", "expected at least 108 gradients, one run of fedspeed per tuning seed, got 10"),
    ("fedavg --budget 1e12", "expected at most 10000 runs per method"),
    ("fedavg --budget many", "expected a number of gradients such as 1e5, got 'many'"),
    ("fedavg --budget 1e3 --strategy best", "unknown strategy 'best'"),
    ("fedsped --budget 1e3", "unknown method 'fedsped'; did you mean 'fedspeed'"),
    ("fedavg fedavg --budget 1e3", "got fedavg twice"),
    ("fedspeed --budget 1e3 --space fedspeed.lan=1", "did you mean 'lam'"),
    ("fedspeed --budget 1e3 --space lam=", "lam is empty"),
    ("fedspeed --budget 1e3 --space lam=-1,1", "space of fedspeed: FedSpeed: lam must be in (0, inf), got -1.0"),
    ("fedavg --budget 1e3 --lr 0.1", "nothing of fedavg is left to tune"),
    ("fedavg --budget 1e3 --tune-seeds 2,3 --seeds 3", "expected none in common, got 2 in both"),
    ("fedavg --budget 1e3 --strategy grid", "got grid; use `fedspeed sweep --grid`"),
    ("fedavg --budget 1e3 --overwrite", "choose another --out"),
    ("fedavg --budget 1e3 --no-test-set", "trials never see the test set"),
    ("fedavg --budget 1e3 --baseline fedspeed", "--baseline: expected one of fedavg"),
    ("fedavg --budget 1e3 --validation 2", "validation: expected"),
    ("fedavg --budget 1e3 --patience 2", "tune: expected runs of all their rounds, got patience = 2; leave it out"),
]


@pytest.mark.parametrize(("text", "told"), BAD)
def test_bad_input_is_one_line_and_leaves_nothing(text: str, told: str, tmp_path: Path, capsys: Any) -> None:
    words = text.split()
    rest = [] if "--rounds" in words else ARGS
    if "--rounds" in words:
        rest = [word for word in ARGS if word not in ("--rounds", "6")]
    assert run_cli(*words, *rest, "--out", str(tmp_path / "t")) == 2
    error = capsys.readouterr().err
    assert told in error
    assert error.count("\n") == 1
    assert not (tmp_path / "t").exists()


BAD_IN_PYTHON: list[tuple[dict[str, Any], str]] = [
    ({"budget": "x"}, "expected a number of gradients > 0, got 'x'"),
    ({"methods": []}, "expected methods, such as fedavg fedspeed; got none"),
    ({"methods": [3]}, "expected a method's name, its table or a method, got 3"),
    ({"method": "fedavg"}, "method is not a setting of all runs, got 'fedavg'; give methods"),
    ({"seeds": [7, 1000]}, "expected none in common, got 1000 in both"),
    ({"tune_seeds": 0}, "--tune-seeds: expected different seeds, at least one"),
    ({"jobs": -1}, "jobs must be a whole number >= 0, got -1"),
    ({"space": {"lr": []}}, "lr is empty"),
    ({"space": {"lr": 3}}, "expected a list of values or text such as 0.01..1:log, got 3"),
    ({"learning_rate": 3}, "unknown config key 'learning_rate'; did you mean 'lr'?"),
]


@pytest.mark.parametrize(("given", "told"), BAD_IN_PYTHON)
def test_bad_input_from_python(given: dict[str, Any], told: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as error:
        fedspeed.tune(**{"methods": [fedspeed.FedAvg], "budget": 1e3, "out": tmp_path / "t", **SMALL, **given})
    assert told in str(error.value)
    assert not (tmp_path / "t").exists()


def test_without_optuna_it_says_how_to_install_it(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    assert run_cli("fedavg", "--budget", "1e3", "--strategy", "optuna", *ARGS, "--out", str(tmp_path / "t")) == 2
    assert "pip install 'fedspeed[optuna]'" in capsys.readouterr().err
    assert not (tmp_path / "t").exists()


@pytest.mark.skipif(find_spec("optuna") is None, reason="optuna is not installed: pip install optuna")
def test_optuna_is_the_same_search_every_time(tmp_path: Path) -> None:
    found = [searched(tmp_path / name, ["fedprox"], 170, "optuna") for name in ("a", "b")]
    assert found[0][0].known == found[1][0].known
    assert found[0][1] == found[1][1]
    assert len({trial.point for trial in found[0][0].known["fedprox"]}) == 3


def test_a_dry_run_shows_the_spaces_and_runs_nothing(own_folder: Path, capsys: Any) -> None:
    assert (
        run_cli(*["fedavg", "fedspeed", "--budget", "500", "--space", "fedspeed.lam=1,10,100", "--dry-run"], *ARGS) == 0
    )
    said = capsys.readouterr().out
    assert "lam 1,10,100" in said
    assert "lr 0.01..1:log" in said
    assert "tuned on 0.2 of every client, which no client trains on, seeds 1000" in said
    assert list(own_folder.iterdir()) == []


@pytest.mark.slow
def test_without_accuracies_the_loss_is_what_counts(tmp_path: Path, capsys: Any) -> None:
    setting = "--data quadratic --model vector --split natural --clients 6 --active 3 --rounds 3 --local-steps 2"
    given = [*setting.split(), "--space", "lr=0.001,0.01,0.1", "--seeds", "2", "--out", str(tmp_path)]
    assert run_cli("fedavg", "fedprox:mu=0.1", "--budget", "60", "--strategy", "random", *given) == 0
    said = capsys.readouterr().out
    assert "best method at a share of the budget, on held-out data: " in said
    assert "(loss " in said
    assert "Is the difference to fedavg real?" in said
    found = json.loads((tmp_path / "tune.json").read_text())
    for label, point in found["chosen"].items():
        losses = {}
        for run in tmp_path.glob(f"trials/{label.replace(':', '_')}*-s1000"):
            records = RunDir(run).records()
            losses[Config.from_toml(run / "config.toml").lr] = sum(r.validation_loss or 0 for r in records) / 3
        assert len(losses) == 3
        assert point["lr"] == min(losses, key=lambda lr: losses[lr])
        assert found["held_out_scores"][label] == pytest.approx(-losses[point["lr"]])
    assert {one["metric"] for one in found["judged"]} == {"last_test_loss"}


def test_what_is_predicted_is_what_records_count(tmp_path: Path) -> None:
    """With unequal clients, dropouts, stragglers, cohorts of any size, and parts of minibatches."""
    from fedspeed.experiments.tune.tuner import gradients
    from fedspeed.runs.launch import load_federation

    base = {"clients": 12, "rounds": 4, "batch_size": 7, "local_epochs": 2, "stragglers": 0.5, "dropout": 0.3}
    methods: list[Any] = [{"name": "fedspeed", "ascent_fraction": 0.3}, "fedlesam", {"name": "fedspeed", "rho": 0.0}]
    for i, method in enumerate(methods):
        more = {"cohort": "bernoulli", "validation": "clients:2"} if i else {"validation": "0.2", "local_steps": 5}
        config = Config.from_dict({**base, **more, "model": "linear", "active": 4, "method": method})
        run_config(config, tmp_path / str(i))
        records = RunDir(tmp_path / str(i)).records()
        given, data = load_federation(config)
        sums = [sum(r.grad_evals for r in records[: t + 1]) for t in range(4)]
        assert gradients(config.method, given, data.sizes) == pytest.approx(sums, rel=1e-12)


def test_another_config_in_the_folder_is_refused(tmp_path: Path) -> None:
    searched(tmp_path, ["fedavg"], 60, "random")
    with pytest.raises(UserError, match="holds a run of another config"):
        searched(tmp_path, ["fedavg"], 60, "random", weight_decay=0.1)


def test_the_method_inside_a_wrapper_is_tuned_like_the_method_alone(tmp_path: Path) -> None:
    inside = {"name": "topk", "fraction": 0.1, "base": {"name": "fedspeed", "lam": 5.0}}
    methods = {"fedspeed": {"name": "fedspeed"}, "fedspeed:lam=5+topk:0.1": inside}

    def made(*space: str) -> Tuning:
        return Tuning(methods, SMALL, 300.0, "random", space, [1000], [5], tmp_path)

    tuning = made()
    alone, wrapped = tuning.spaces.values()
    assert wrapped == {"lr": alone["lr"], "base.rho": alone["rho"]}  # lam and fraction were given
    drawn = [dict(search.draw(3)) for search in tuning.searches.values()]
    assert drawn[0]["rho"] == drawn[1]["base.rho"]
    label = "fedspeed:lam=5+topk:0.1"
    config = tuning.config(label, (("lr", 0.2), ("base.rho", 0.3)), 1000)
    assert config.method.to_dict()["base"] | {"rho": 0.3, "lam": 5.0} == config.method.to_dict()["base"]
    assert [str(one) for one in made("rho=0.1,0.2").spaces[label].values()][1:] == ["0.1,0.2"]
    assert str(made("base.rho=0.3").spaces["fedspeed"]["rho"]) == "0.01..0.5:log"
    with pytest.raises(UserError, match="unknown method in --space 'bse'"):
        made("bse.rho=0.1")


@pytest.mark.parametrize(
    ("strategy", "rule", "told"),
    [
        ("random", {"stop_at": "validation_accuracy=0.3"}, "expected runs of all their rounds"),
        ("random", {"stop_at": "accuracy=0.3"}, "expected runs of all their rounds"),
        ("halving", {"patience": 2}, "expected runs of all their rounds"),
    ],
)
def test_rules_that_would_end_trials_elsewhere_are_refused(
    tmp_path: Path, strategy: str, rule: dict[str, Any], told: str
) -> None:
    with pytest.raises(UserError, match=told) as refused:
        fedspeed.tune(["fedavg"], 300, strategy=strategy, out=tmp_path / "t", **SMALL, **rule)
    assert "\n" not in str(refused.value)
    assert list(tmp_path.iterdir()) == []


def test_a_method_in_a_wrapper_is_called_by_what_is_unusual() -> None:
    label, table = labelled(fedspeed.TopK(fedspeed.FedSpeed(rho=0.3), fraction=0.1))
    assert label == "fedspeed:rho=0.3+topk:fraction=0.1"
    assert table == {"name": "topk", "fraction": 0.1, "base": {"name": "fedspeed", "rho": 0.3}}
    assert labelled({"name": "topk", "base": "scaffold"})[0] == "scaffold+topk"
