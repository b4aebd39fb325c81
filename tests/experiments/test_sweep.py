"""`fedspeed sweep` and `fedspeed.sweep`: killed and repeated it has the numbers of single runs; what it refuses, and
what it says of its points."""

from __future__ import annotations

import csv
import json
import math
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest
from made_runs import made_run
from quick_runs import MODULE, QUICK, bits

import fedspeed
from fedspeed import Config, UserError
from fedspeed.cli import main
from fedspeed.cli.sweep import parse_grid, parse_point
from fedspeed.experiments.batch import folder_name, one_command
from fedspeed.experiments.grid import apply, combinations, label_of, qualify, read_points
from fedspeed.experiments.sweep import plan, run_sweep
from fedspeed.report.figures import draw_sweep
from fedspeed.report.run_files import Row, RunFiles
from fedspeed.report.sweep import Swept

RATES = ("0.02", "0.1", "0.5", "1")


pytestmark = pytest.mark.usefixtures("own_folder")


# --- one folder, one command ---


@pytest.mark.parametrize(
    "command",
    [["sweep", "--grid", "lr=0.1,0.2"], ["compare", "fedavg", "fedprox"], ["tune", "fedavg", "--budget", "1000"]],
    ids=str,
)
def test_a_folder_that_another_command_works_in_is_refused_in_one_line(command, capsys):
    given = [*command, *QUICK, "--rounds", "2", "--seeds", "1", "--quiet", "--out", "two"]
    with one_command(Path("two")):
        assert main(given) == 2
    error = capsys.readouterr().err
    assert re.fullmatch(r"fedspeed: error: two is in use: another process is running there; .*\n", error)
    assert not Path("two").exists()  # neither command has left anything


@pytest.mark.slow
def test_two_sweeps_at_once_one_ends_well_and_the_other_says_why():
    given = ["sweep", "--grid", "lr=0.1,0.2", *QUICK, "--rounds", "6", "--seeds", "2", "--quiet", "--out", "two"]
    both = [subprocess.Popen([*MODULE, *given], stderr=subprocess.PIPE, text=True) for _ in range(2)]
    errors = [one.communicate(timeout=120)[1] for one in both]
    codes = [one.returncode for one in both]
    assert codes.count(0) >= 1
    for code, error in zip(codes, errors, strict=True):  # the later one may begin when the other has ended
        assert (code, error) == (0, "") or (code == 2 and "two is in use" in error and error.count("\n") == 1)
    assert len(list(Path("two").glob("*/summary.json"))) == 4
    assert Path("two/sweep.png").is_file()
    assert not list(Path("two").rglob("*.part"))


def test_the_same_from_python():
    with one_command(Path("two")), pytest.raises(UserError, match="two is in use"):
        run_sweep({"rounds": 1}, Path("two"), {"lr": [0.1, 0.2]}, None, 1)
    with one_command(Path("three")), pytest.raises(UserError, match="three is in use"):
        fedspeed.tune(["fedavg"], 1000, out="three", clients=10, rounds=1)


# --- going on ---


@pytest.mark.parametrize("jobs", ["1", pytest.param("2", marks=pytest.mark.slow)])
def test_four_values_three_seeds_killed_and_repeated_have_the_numbers_of_single_runs(jobs, capsys):
    quick = [*QUICK, "--rounds", "6", "--quiet"]
    given = ["sweep", "--grid", f"lr={','.join(RATES)}", *quick, "--seeds", "3", "--jobs", jobs, "--out", "s"]
    with subprocess.Popen([*MODULE, *given], stderr=subprocess.PIPE, start_new_session=True) as process:
        deadline = time.monotonic() + 120
        while len(list(Path("s").glob("*/summary.json"))) < 3:
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.01)
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=60)
    kept = {path: path.stat().st_mtime_ns for path in Path("s").glob("*/summary.json")}
    assert 3 <= len(kept) < 12
    assert not Path("s/table.md").exists()
    given = [word for word in given if word != "--quiet"]
    assert main([*given, "--jobs", "1"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("12 runs: 4 points x 3 seeds; into s\n")
    assert f"{len(kept)} of 12 runs are done already and kept" in out
    assert all(path.stat().st_mtime_ns == when for path, when in kept.items())
    for lr in RATES:
        for seed in range(3):
            assert main(["run", "--lr", lr, "--seed", str(seed), *quick, "--out", f"single/lr={lr}-s{seed}"]) == 0
    assert len(bits("s")) == 12
    assert bits("s") == bits("single")
    told = json.loads(Path("s/table.json").read_text())
    for point in told["points"]:
        scores = [
            json.loads(Path(f"single/{point['label']}-s{seed}/summary.json").read_text())["mean_last5_accuracy"]
            for seed in range(3)
        ]
        half = 4.302653 * statistics.stdev(scores) / math.sqrt(3)  # Student's t, 2 degrees of freedom, 97.5%
        found = point["score"]
        assert list(found["values"].values()) == pytest.approx(scores, abs=1e-15)
        expected = [statistics.fmean(scores), statistics.fmean(scores) - half, statistics.fmean(scores) + half]
        assert [found["mean"], found["low"], found["high"]] == pytest.approx(expected)
    best = max(told["points"], key=lambda point: point["score"]["mean"])
    assert [one["label"] for one in told["best"]] == [best["label"]]
    for name, start in {"sweep.png": b"\x89PNG", "sweep.svg": b"<?xml", "report.html": b"<!doctype html>"}.items():
        assert Path("s", name).read_bytes().lower().startswith(start.lower())


def test_more_values_and_seeds_join_what_is_there_and_another_config_does_not(capsys):
    given = ["sweep", *QUICK, "--out", "s"]
    assert main([*given, "--grid", "rho=0", "--seeds", "1", "--quiet"]) == 0
    assert main([*given, "--grid", "method.rho=0,0.1", "--seeds", "2", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert sorted(path.name for path in Path("s").glob("*-s*")) == ["rho=0-s0", "rho=0-s1", "rho=0.1-s0", "rho=0.1-s1"]
    assert told["fields"] == {"method.rho": [0, 0.1]}
    assert main([*given, "--grid", "rho=0,0.2", "--lr", "0.3", "--seeds", "1"]) == 2
    assert "s/rho=0-s0 holds a run of another config (it differs in lr)" in capsys.readouterr().err
    assert not Path("s/rho=0.2-s0").exists()
    lines = list(csv.DictReader(Path("s/table.csv").read_text().splitlines()))
    assert [(line["method.rho"], line["seed"]) for line in lines] == [
        ("0", "0"),
        ("0", "1"),
        ("0.1", "0"),
        ("0.1", "1"),
    ]


def test_a_run_that_fails_is_named_and_the_others_are_kept(capsys):
    assert main(["sweep", *QUICK, "--grid", "split=iid,foo", "--seeds", "1", "--out", "s"]) == 2
    told = capsys.readouterr()
    assert re.fullmatch(r"fedspeed: split=foo seed 0: unknown split 'foo'; .*\n", told.err)
    assert re.search(r"^split=iid +\d+\.\d\d +- ", told.out, re.M)
    assert sorted(path.name for path in Path("s").glob("*-s*")) == ["split=iid-s0"]


# --- what is refused ---

REFUSED = {
    "sweep: expected one of --grid, --point and --points, got none": [],
    "got --grid and --point; leave one out": ["--grid", "lr=1", "--point", "lr=2"],
    "--grid: expected values for lr, such as lr=1,2; got none": ["--grid", "lr="],
    "--grid: expected FIELD=VALUE,VALUE such as": ["--grid", "lr"],
    "expected a value between commas, got 'lr=0.1,,1'": ["--grid", "lr=0.1,,1"],
    "unknown field 'learning_rate'; did you mean 'lr'?": ["--grid", "learning_rate=0.1"],
    "unknown field of FedSpeed 'lamm'; did you mean 'lam'?": ["--grid", "method.lamm=1"],
    "sweep at method=fedavg,rho=1: unknown field of FedAvg": ["--grid", "method=fedavg", "--grid", "method.rho=1"],
    "sweep at lr=abc: Config: lr must be a number, got 'abc'": ["--grid", "lr=0.1,abc"],
    "sweep at rounds=1.5: Config: rounds must be a whole": ["--grid", "rounds=2,1.5"],
    "expected different points, got lr=0.1 twice": ["--grid", "lr=0.1,0.10"],
    "got lr=1 and lr=1,rho=0.1, which are one run": ["--point", "lr=1", "--point", "lr=1,rho=0.1"],
    "expected one value for method.rho, got 0.1 and 0.2": ["--grid", "rho=0.1", "--grid", "method.rho=0.2"],
    "`seed` cannot be swept over": ["--grid", "seed=1,2", "--seeds", "3"],
    "expected different seeds, got [1, 1]": ["--grid", "lr=1", "--seeds", "1,1"],
    "sweep: backend has no effect on results": ["--grid", "backend=serial,process"],
    "expected local_epochs or local_steps, got both": ["--grid", "local_epochs=1,2"],
    "sweep: expected at most 200 runs, got 300; if all": ["--grid", "clip=" + ",".join(map(str, range(100)))],
    "model linear has no options, found 'width'": ["--grid", "model.width=1,2"],
    "unknown key of p.toml 'point'; did you mean 'points'?": ["--points", "p.toml"],
}


@pytest.mark.parametrize("said", REFUSED)
def test_bad_input_is_one_line_and_leaves_nothing(said, capsys):
    Path("p.toml").write_text("[[point]]\nlr = 1\n")
    assert main(["sweep", *REFUSED[said], *QUICK, "--out", "s"]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1
    assert not Path("s").exists()


# --- points ---


def test_points_from_words_and_files():
    assert parse_grid(["lr=0.05,1", "model.hidden=[32],[64,64]", "split=iid,dirichlet:0.6"]) == {
        "lr": [0.05, 1],
        "model.hidden": [[32], [64, 64]],
        "split": ["iid", "dirichlet:0.6"],
    }
    assert parse_point("lr=0.1, warmup='lr=1,rho=2',rho=0.05") == {"lr": 0.1, "warmup": "lr=1,rho=2", "rho": 0.05}
    Path("d").mkdir()
    Path("d/p.toml").write_text("[[points]]\nlr = 0.1\nmethod.rho = 0.0\n[[points]]\nmethod = 'own.py:Mine'\n")
    first, second = read_points(Path("d/p.toml"))
    assert qualify({}, first) == {"lr": 0.1, "method.rho": 0.0}
    assert second["method"]["name"] == f"{Path('d/own.py').resolve()}:Mine"


def test_methods_with_fields_and_wrappers_are_points():
    assert parse_grid(["method=fedavg,fedspeed:rho=0+topk:0.1"])["method"] == [
        {"name": "fedavg"},
        {"name": "topk", "fraction": 0.1, "base": {"name": "fedspeed", "rho": 0}},
    ]
    given = ["--grid", "method=fedavg,fedspeed:rho=0+topk:0.1", *QUICK, "--rounds", "2", "--seeds", "1"]
    assert main(["sweep", *given, "--stop-at", "accuracy=0.99", "--quiet", "--out", "s"]) == 0
    assert (
        main(["run", *QUICK, "--rounds", "2", "--method", "fedspeed:rho=0+topk:0.1", "--quiet", "--out", "one/a"]) == 0
    )
    inside = "method=topk,fraction=0.1,base=fedspeed(rho=0)"
    assert bits("s")[f"{folder_name(inside)}-s0"] == bits("one")["a"]
    table = Path("s/table.md").read_text()
    assert inside in table
    assert "rounds to 99%" in table
    assert main(["sweep", *given, "--stop-at", "accuracy=0.01", "--quiet", "--out", "t"]) == 0
    with Path("t/table.csv").open() as lines:
        assert {line["status"] for line in csv.DictReader(lines)} == {"stopped"}


@pytest.mark.parametrize(
    "words",
    ["--grid method=fedavg,fedprox:mu=0.5+topk:0.1", "--point method=fedavg --point method=fedprox:mu=0.5+topk:0.1"],
)
def test_methods_have_fields_and_wrappers_as_everywhere(words):
    assert main(["sweep", *words.split(), *QUICK, "--rounds", "1", "--quiet", "--seeds", "1", "--out", "s"]) == 0
    made = {path.parent.name: Config.from_toml(path).method for path in Path("s").glob("*/config.toml")}
    assert made == {
        "method=fedavg-s0": fedspeed.FedAvg(),
        "method=topk_fraction=0.1_base=fedprox_mu=0.5_-s0": fedspeed.TopK(fedspeed.FedProx(mu=0.5), fraction=0.1),
    }


def test_a_point_on_top_of_a_config():
    base = {"method": {"name": "fedspeed", "rho": 0.5}, "lr": 1.0, "model": "linear"}
    kept = apply(base, qualify(base, {"lam": 2, "lr": 0.5}))
    assert kept == {**base, "method": {"name": "fedspeed", "rho": 0.5, "lam": 2}, "lr": 0.5}
    assert apply(base, {"method": "fedavg"})["method"] == {"name": "fedavg"}
    assert apply(base, qualify(base, {"mu": 1, "method": "fedprox"}))["method"] == {"name": "fedprox", "mu": 1}
    inner = apply({"method": {"name": "fedinit", "base": "fedsam"}}, {"method.base.rho": 0.2})
    assert inner["method"] == {"name": "fedinit", "base": {"name": "fedsam", "rho": 0.2}}
    assert base["method"] == {"name": "fedspeed", "rho": 0.5}


def test_every_combination_once_and_folders_of_long_labels_differ():
    points = combinations({"lr": [1, 2], "method.lam": [3, 4, 5]})
    assert len({label_of(point) for point in points}) == len(points) == 6
    names = {folder_name(f"model.hidden=[{'1,' * 200}{i}]") for i in range(3)}
    assert len(names) == 3
    assert max(map(len, names)) < 120
    with pytest.raises(UserError, match=r"expected a list of values for lr, got 0\.1"):
        combinations({"lr": 0.1})
    with pytest.raises(UserError, match="got an empty grid"):
        combinations({})
    with pytest.raises(UserError, match="expected a point such as"):
        plan({}, [3], [0], Path("s"))


# --- what it says ---


def swept(points: list[dict], gains: list[float], seeds: int = 3, **changes) -> Swept:
    """Points whose runs were made by hand, each better by its gain."""
    rows = []
    for i, (point, gain) in enumerate(zip(points, gains, strict=True)):
        runs = [made_run(Path(f"m/{i}-s{seed}"), seed=seed, gain=gain, **changes) for seed in range(seeds)]
        rows.append(Row(label_of(point), [RunFiles.read(run.path) for run in runs]))
    return Swept(points, rows)


def test_the_best_point_and_those_that_the_seeds_do_not_prove_worse():
    found = swept(combinations({"lr": [1, 2, 3]}), [0.0, 0.1, 0.1])
    (best,) = found.best
    means = {row.label: statistics.fmean(run.summary["mean_last5_accuracy"] for run in row.runs) for row in found.rows}
    assert best.label == max(means, key=lambda label: means[label])
    assert best.rivals == [({"lr=2", "lr=3"} - {best.label}).pop()]
    assert "chosen on the test set" in found.verdict[-1]
    assert (
        "1 seed cannot show whether it really is" in swept(combinations({"lr": [1, 2]}), [0.0, 0.1], seeds=1).verdict[0]
    )


def test_a_point_that_diverged_is_not_the_best():
    made = swept(combinations({"lr": [1, 2]}), [0.0, 0.1])
    made_run(Path("m/1-s0"), seed=0, gain=0.15, status="diverged: NaN in round 9")
    runs = [RunFiles.read(run.path) for run in made.rows[1].runs]
    found = Swept(made.points, [made.rows[0], Row("lr=2", runs)])
    assert [best.label for best in found.best] == ["lr=1"]
    assert found.table[1][1][0] == "lr=2 (1 of 3 diverged)"
    assert found.verdict[0].endswith("%); left aside, diverged or without all seeds: lr=2")


def test_a_run_that_a_rule_stopped_says_so():
    made = swept(combinations({"lr": [1, 2]}), [0.0, 0.1], seeds=1)
    told = made_run(Path("m/1-s0"), seed=0, gain=0.1, status="stopped: accuracy 0.9 >= 0.8 in round 9")
    found = Swept(made.points, [made.rows[0], Row("lr=2", [RunFiles.read(told.path)])])
    assert [run["status"] for run in found.runs()] == ["finished", "stopped"]


def test_points_of_different_data_have_a_best_each_and_are_not_averaged():
    points = combinations({"split": ["iid", "dirichlet:0.1"], "lr": [1, 2]})
    found = swept(points, [0.15, 0.1, 0.0, 0.05])
    assert [(best.label, best.where) for best in found.best] == [
        ("split=iid,lr=1", {"split": "iid"}),
        ("split=dirichlet:0.1,lr=2", {"split": "dirichlet:0.1"}),
    ]
    assert found.best[0].rivals in ([], ["split=iid,lr=2"])
    assert "points that differ in data or split are other problems: nothing is averaged over them" in found.verdict
    axes = draw_sweep(found).axes[0]
    drawn = [container.lines[0].get_ydata().tolist() for container in axes.containers]
    assert drawn == [[pytest.approx(100 * score.mean) for score in found.scores[i : i + 2]] for i in (0, 2)]


def test_with_validation_data_points_are_chosen_on_them():
    """What is best on the test set is not: validation scores fall where test scores rise."""

    def turned(fields):
        return {**fields, "validation_accuracy": 1 - fields["test_accuracy"], "validation_loss": 1.0}

    found = swept(combinations({"lr": [1, 2]}), [0.0, 0.1], record=turned, summary={"chosen_on": "validation"})
    assert found.best[0].label == "lr=1"
    assert found.table[0][:3] == ("point", "validation last-5 mean %", "95% interval")
    assert "last-5 mean %" in found.table[0][3:]
    assert found.verdict[-1].startswith("chosen on validation data")


def test_the_figure_fits_the_fields():
    one = draw_sweep(swept(combinations({"lr": [0.01, 0.1, 1]}), [0.1, 0.15, 0.0])).axes[0]
    assert one.get_xscale() == "log"
    assert draw_sweep(swept(combinations({"lr": [1, 2, 3]}), [0.1, 0.15, 0.0])).axes[0].get_xscale() == "linear"
    words = draw_sweep(swept(combinations({"method": ["fedavg", "fedcm"]}), [0.0, 0.1])).axes[0]
    assert [label.get_text() for label in words.get_xticklabels()] == ["fedavg", "fedcm"]
    found = swept(combinations({"lr": [2, 1], "method.lam": [1, 10]}), [0.1, 0.15, 0.0, 0.05])
    map_ = draw_sweep(found).axes[0]
    numbers = [text.get_text() for text in map_.texts]
    assert numbers == [found.number(found.scores[i].mean) for i in (2, 3, 0, 1)]  # lr from below, by size
    (frame,) = map_.patches
    assert (frame.get_x(), frame.get_y()) == (0.5, 0.5)  # lam=10, lr=2
    several = draw_sweep(swept(combinations({"lr": [1, 2], "clip": [1, 2], "method.lam": [1, 2]}), [0.0] * 8)).axes[0]
    assert len(several.get_yticklabels()) == 8


# --- from Python ---


def test_a_sweep_from_python_is_that_of_the_command_line(capsys):
    base = {"clients": 10, "active": 2, "rounds": 3, "local_steps": 1, "model": "linear", "backend": "serial"}
    found = run_sweep(base, Path("p"), {"lr": (0.1, 0.2), "lam": [10]}, None, seeds=[5])
    assert (
        main(["sweep", "--grid", "lr=0.1,0.2", "--grid", "lam=10", *QUICK, "--seeds", "5,", "--out", "c", "--quiet"])
        == 0
    )
    assert bits("p") == bits("c")
    for run in found.runs():
        assert (run["method.lam"], run["seed"], run["status"]) == (10, 5, "finished")
        assert run["score"] == run["mean_last5_accuracy"]
        assert Config.from_toml(Path(run["folder"], "config.toml")).lr == run["lr"]
    with pytest.raises(UserError, match="expected a grid or points, got both"):
        run_sweep(base, Path("q"), {"lr": [1]}, [{"lr": 1}])
    with pytest.raises(UserError, match="expected how many seeds"):
        run_sweep(base, Path("q"), {"lr": [1]}, None, seeds=0)
    assert not Path("q").exists()


def test_a_sweep_is_a_frame(monkeypatch):
    pandas = pytest.importorskip("pandas", reason="pip install pandas")
    base = {"clients": 10, "active": 2, "rounds": 2, "local_steps": 1, "model": "linear", "backend": "serial"}
    frame = fedspeed.sweep(Config.from_dict(base), grid={"lr": [0.1, 0.2]}, seeds=1, out="s")
    assert isinstance(frame, pandas.DataFrame)
    assert frame["lr"].tolist() == [0.1, 0.2]
    assert frame.attrs["best"][0]["label"] in ("lr=0.1", "lr=0.2")


def test_without_pandas_nothing_is_run(monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(UserError, match=r"pandas cannot be imported .*; pip install pandas"):
        fedspeed.sweep(grid={"lr": [0.1]}, out="s")
    assert not Path("s").exists()
