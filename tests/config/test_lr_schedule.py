"""Schedules of the rate: against NumPy in every round, on every back end, resumed, extended, forked, and refused."""

from __future__ import annotations

import math
import signal
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from federations import Softmax, package, transcription
from same_bits import assert_same_bits, files_of
from same_bits import outcome as small_run
from watching import Stop, stop_after

from fedspeed import FedAvg, FedDyn, FedProx, FedSpeed, UserError, simulate
from fedspeed.cli import main
from fedspeed.config.config import Config
from fedspeed.config.damping import damping, warning_of
from fedspeed.config.lr_schedule import MOST_TEXT, schedule_text
from fedspeed.config.plan import Plan
from fedspeed.reproduce import recipes as recipe_files
from fedspeed.runs.launch import extend, resume, run_config
from fedspeed.runs.simulate import as_plan

WARM = [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
HALF3, HALF2 = math.sqrt(3) / 2, math.sqrt(2) / 2
FACTORS = {
    "constant": [1.0] * 6,
    "exponential:0.9": [1.0, 0.9, 0.81, 0.729, 0.6561, 0.59049],
    "step:2,5:0.1": [1.0, 1.0, 0.1, 0.1, 0.1, 0.01],
    "cosine": [1.0, (1 + HALF3) / 2, 0.75, 0.5, 0.25, (1 - HALF3) / 2],
    "cosine:floor=0.2,rounds=4": [1.0, 0.6 + 0.4 * HALF2, 0.6, 0.6 - 0.4 * HALF2, 0.2, 0.2],
    "cosine:rounds=12": [(1 + np.cos(np.pi * t / 12)) / 2 for t in range(6)],
    "polynomial:1": [1.0, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6],
    "polynomial:2,floor=0.1,rounds=3": [1.0, 0.1 + 0.4, 0.1 + 0.1, 0.1, 0.1, 0.1],
    "piecewise:1=1,3=0.5,6=2": [1.0, 0.75, 0.5, 1.0, 1.5, 2.0],
}
PLAN = Plan(rounds=6, active=3, local_epochs=2, batch_size=4, lr=0.1, weight_decay=0.01, seed=3, warmup="lr=4")
QUICK = ["--rounds", "5", "--clients", "4", "--active", "2", "--local-epochs", "1"]


def planned(schedule, **fields) -> Plan:
    return as_plan(PLAN, {"lr_schedule": schedule, **fields})


@pytest.mark.parametrize("engine", ["loop", "block"])
@pytest.mark.parametrize(("method", "follow"), [("fedavg", ""), ("fedspeed", "rho")])
@pytest.mark.parametrize("schedule", FACTORS)
def test_every_round_is_numpys(schedule, method, follow, engine):
    """Rate, weight decay and a rho that follows the rate, with a warm-up; the oracle is given the numbers."""
    problem = Softmax(equal=12 if engine == "block" else 0)
    rates = [0.1 * a * b for a, b in zip(FACTORS[schedule], WARM, strict=True)]
    plan = planned(schedule, engine=engine, follow_lr=follow)
    run = package(problem, FedSpeed(rho=0.3) if follow else FedAvg(), plan)
    other = package(problem, FedSpeed(rho=0.3) if follow else FedAvg(), replace(plan, lr_schedule=""))
    rhos = {"scheduled": {"rho": [3 * rate for rate in rates]}} if follow else {}
    truth = transcription(problem, method, {"rho": 0.3} if follow else {}, plan, 1.0, lrs=rates, **rhos)
    for t, found in enumerate(truth):
        record = run.step()
        other.step()
        assert record.lr == pytest.approx(rates[t], rel=1e-14)
        np.testing.assert_allclose(run.x.numpy(), found["x"], rtol=0, atol=1e-10)
    assert run.plan.engine == engine
    if schedule != "constant":  # beside it lr_decay is 1
        assert np.abs(run.x.numpy() - other.x.numpy()).max() > 1e-6  # what 1e-10 can tell apart


OWN = "def falling(t):\n    return 1 / (1 + t)\n"
FILES = {
    "piecewise:a.csv": ("a.csv", "round,factor\n1, 1\n3,0.5\n\n6,2\n"),
    "piecewise:b.csv": ("b.csv", "1,1\n3,0.5\n6,2\n"),
    "piecewise:a.json": ("a.json", '{"1": 1, "3": 0.5, "6": 2}'),
    "piecewise:b.json": ("b.json", "[[1, 1], [3, 0.5], [6, 2]]"),
    "piecewise:a.toml": ("a.toml", "1 = 1\n3 = 0.5\n6 = 2.0\n"),
}


@pytest.mark.parametrize("given", [*FILES, {1: 1, 3: 0.5, 6: 2}, [1, 0.75, 0.5, 1, 1.5, 2], "list"], ids=str)
def test_a_file_a_table_and_a_list_are_the_same_schedule(given, own_folder):
    for name, text in FILES.values():
        Path(name).write_text(text)
    given = np.array([1, 0.75, 0.5, 1, 1.5, 2]) if isinstance(given, str) and given == "list" else given
    plan = planned(given)
    assert [plan.rate(t, 0.5) for t in range(6)] == [
        pytest.approx(0.1 * a * b, rel=1e-14) for a, b in zip(FACTORS["piecewise:1=1,3=0.5,6=2"], WARM, strict=True)
    ]


def test_a_config_s_file_is_beside_the_config(tmp_path, monkeypatch):
    (tmp_path / "a.csv").write_text(FILES["piecewise:a.csv"][1])
    (tmp_path / "own.py").write_text(OWN)
    monkeypatch.chdir("/")
    for schedule, text in (("piecewise:a.csv", "1=1,3=0.5,6=2"), ("own.py:falling", "1=1,2=0.5,3=0.3333333333333333")):
        (tmp_path / "run.toml").write_text(f'rounds = 3\nlr_schedule = "{schedule}"\n')
        assert Config.from_toml(tmp_path / "run.toml").lr_schedule == f"piecewise:{text}"


def test_numbers_keep_all_their_bits_and_stretches_of_equal_ones_are_short():
    factors = [1 / (3 + t) for t in range(50)]
    plan = Plan(rounds=50, lr=1.0, lr_schedule=factors)
    assert [plan.rate(t, 1.0) for t in range(50)] == factors
    assert Plan(**plan.fields()) == plan
    assert (
        schedule_text(lambda t: 0.3 if t < 70_000 else 0.1, 100_000) == "piecewise:1=0.3,70000=0.3,70001=0.1,100000=0.1"
    )
    with pytest.raises(
        UserError, match=f"expected at most {MOST_TEXT:,} characters, found .*; round the factors to six"
    ):
        schedule_text(lambda t: 1 / (3 + t), 5_000)
    assert schedule_text(lambda t: round(1 / (3 + t), 6), 5_000)


def test_exponential_is_the_decay_to_the_bit():
    runs = [
        package(Softmax(), FedAvg(), replace(PLAN, **how))
        for how in ({"lr_decay": 0.9}, {"lr_schedule": "exponential:0.9"})
    ]
    rates = [[record.lr for record in run] for run in runs]
    assert rates[0] == rates[1]
    assert torch.equal(runs[0].x, runs[1].x)


RAY = [pytest.mark.slow, pytest.mark.xdist_group("ray"), pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize("backend", ["process", pytest.param("ray", marks=RAY)])
def test_bits_are_the_same_in_workers(backend, quick_workers):
    """A function does not travel: it is called in the driver, and rho follows the rate in the workers."""
    if backend == "ray":
        pytest.importorskip("ray")
    rates, called = {}, []

    def restarts(t):
        called.append(t)
        return 0.5 + 0.5 * math.cos(math.pi * (t % 2) / 3)

    for schedule in (restarts, "cosine", "step:1:0.1"):
        given = {"lr_schedule": schedule, "follow_lr": "rho", "warmup": "lr=2"}
        here = small_run(FedSpeed(), backend="serial", **given)
        assert_same_bits(here, small_run(FedSpeed(), backend=backend, workers=2, **given))
        rates[str(schedule)] = [record["lr"] for record in here[0]]
    assert called == [0, 1, 2] * 2
    assert len({tuple(each) for each in rates.values()}) == 3


# --- run directories ---


SMALL = {"rounds": 6, "clients": 12, "active": 4, "local_epochs": 1, "batch_size": 10, "backend": "serial",
         "method": "fedspeed", "follow_lr": "rho", "warmup": "lr=2"}  # fmt: skip


@pytest.mark.parametrize(
    "schedule", ["cosine:rounds=6", "polynomial:2,rounds=9", "step:2,4:0.5", "own.py:falling", "piecewise:a.csv"]
)
def test_stopped_resumed_and_longer_is_the_same_run(own_folder, schedule):
    """The files of a schedule are gone by then, and its code is not executed again."""
    Path("own.py").write_text(OWN)
    Path("a.csv").write_text(FILES["piecewise:a.csv"][1])
    config = Config.from_dict({**SMALL, "lr_schedule": schedule})
    run_config(config, "whole")
    with pytest.raises(Stop):
        run_config(replace(config, rounds=5), "broken", observers=[stop_after(2)])
    Path("own.py").unlink()
    Path("a.csv").unlink()
    with pytest.raises(Stop):
        resume("broken", observers=[stop_after(3)])
    extend("broken", 6)
    assert files_of(Path("whole")) == files_of(Path("broken"))
    assert not Path("whole/code").exists()
    assert main(["verify", "broken", "--all"]) == 0


SCRIPT = """
import os, signal, sys, fedspeed
data = fedspeed.load_data("digits", clients=20)
how = dict(rounds=9, active=4, local_epochs=1, lr_schedule=lambda t: 1 / (1 + t), follow_lr="rho", backend="serial")
for record in fedspeed.simulate("fedspeed", "mlp", data, out=sys.argv[1], resume=True, **how):
    if str(record.round) == sys.argv[2]:
        os.kill(os.getpid(), signal.SIGKILL)
"""


def test_killed_and_resumed_from_python(tmp_path):
    """The same call continues it, and its function gives the same numbers."""
    for out, at, code in (("out", "3", -signal.SIGKILL), ("out", "0", 0), ("whole", "0", 0)):
        assert subprocess.run([sys.executable, "-c", SCRIPT, str(tmp_path / out), at]).returncode == code
    assert files_of(tmp_path / "out") == files_of(tmp_path / "whole")
    assert [r["lr"] for r in files_of(tmp_path / "out")[0]] == [0.1 * (1 / (1 + t)) for t in range(9)]


@pytest.mark.parametrize(
    ("schedule", "says"),
    [
        ("cosine", "found 0 in round 9 of cosine:rounds=6; start a run with cosine with rounds=9 or a floor"),
        ("polynomial:1", "found 0 in round 9 of polynomial:1,rounds=6; start a run with polynomial with rounds=9"),
        ([1, 0.9, 0.8, 0.7, 0.6, 0.5], "expected factors from round 1 to round 9, found 1 to 6; add the others"),
    ],
    ids=str,
)
def test_more_rounds_than_a_schedule_has(tmp_path, schedule, says):
    """Its past would change, or there are no numbers; the run stays as it is, and a fork has another schedule."""
    out, fork = tmp_path / "out", tmp_path / "fork"
    run_config(Config.from_dict({**SMALL, "lr_schedule": schedule}), out)
    before = files_of(out)
    with pytest.raises(UserError, match=f"^lr_schedule: .*{says}"):
        extend(out, 9)
    assert main(["fork", str(out), "--at", "3", "--set", "rounds=9", "--out", str(fork)]) == 2
    assert not fork.exists()
    assert files_of(out) == before
    changed = ["--set", "rounds=9", "--set", "lr_schedule=step:6:0.5"]
    assert main(["fork", str(out), "--at", "3", *changed, "--out", str(fork), "--quiet"]) == 0
    assert files_of(fork)[0][:3] == before[0][:3]
    assert [r["lr"] for r in files_of(fork)[0][3:]] == [0.1] * 3 + [0.05] * 3
    config = tomllib.loads((fork / "config.toml").read_text())
    run_config(Config.from_dict(config), tmp_path / "again")  # the config alone gives the fork's bits
    assert files_of(tmp_path / "again")[1] == files_of(fork)[1]


def test_a_long_table_of_numbers_is_shown_in_short_and_a_config_can_be_read_back(own_folder, capsys):
    Path("own.py").write_text("def f(t):\n    return 1 / (3 + t)\ndef g(t):\n    return 1 / (7 + t)\n")
    assert main(["run", *QUICK[2:], "--rounds", "30", "--lr-schedule", "own.py:f", "--out", "a"]) == 0
    out = capsys.readouterr().out
    assert "lr_schedule piecewise:1=0.3333333333333333,..,30=0.03125#" in " ".join(out.split())
    assert max(map(len, out.splitlines())) < 400
    assert main(["compare", "a"]) == 0
    assert "learning-rate schedule piecewise:1=0.3333333333333333,..,30=0.03125#" in " ".join(
        capsys.readouterr().out.split()
    )
    long = {**SMALL, "rounds": 3000, "lr_schedule": "own.py:f"}
    with pytest.raises(Stop):
        run_config(Config.from_dict(long), "b", observers=[stop_after(2)])
    with pytest.raises(Stop):
        resume("b", observers=[stop_after(3)])
    assert main(["fork", "b", "--at", "2", "--set", "lr_schedule=own.py:g", "--out", "c"]) == 2
    assert "config.toml: expected at most 100,000 bytes, found" in capsys.readouterr().err
    assert not Path("c").exists()


def test_a_floor_holds_after_the_end(tmp_path):
    config = Config.from_dict({**SMALL, "warmup": "", "rounds": 2, "lr_schedule": "cosine:floor=0.5"})
    run_config(config, tmp_path)
    extend(tmp_path, 4)
    assert [r["lr"] for r in files_of(tmp_path)[0]] == pytest.approx([0.1, 0.075, 0.05, 0.05])
    with pytest.raises(UserError, match=r"rounds = 4|holds a run"):
        run_config(replace(config, rounds=4, lr_schedule="cosine:floor=0.5"), tmp_path)


def test_a_run_with_another_schedule_is_another_run(own_folder, capsys):
    problem, common = Softmax(), {"rounds": 4, "active": 2, "local_epochs": 1}
    list(simulate(FedAvg(), problem.model(), problem.federated(), lr_schedule=lambda t: 1 / (1 + t), out="a", **common))
    again = {"out": "a", "resume": True, **common, "lr_schedule": [1, 1 / 2, 1 / 3, 1 / 4]}
    assert simulate(FedAvg(), problem.model(), problem.federated(), **again).t == 4
    with pytest.raises(
        UserError, match=r"holds another run: expected lr_schedule 'piecewise:1=1,2=0\.5,.*, found 'cosine:rounds=4'"
    ):
        simulate(FedAvg(), problem.model(), problem.federated(), **{**again, "lr_schedule": "cosine"})
    assert main(["run", *QUICK, "--lr-schedule", "cosine", "--out", "b", "--quiet"]) == 0
    assert main(["run", *QUICK, "--lr-schedule", "cosine", "--out", "b", "--quiet", "--resume", "auto"]) == 0
    assert main(["run", *QUICK, "--lr-schedule", "constant", "--out", "b", "--quiet", "--resume", "auto"]) == 2
    assert "holds a run of another config" in capsys.readouterr().err


def test_configs_without_a_schedule_keep_their_keys():
    """The key of a stored result, as the version before schedules computed it."""
    config = Config.from_dict({"rounds": 7, "method": {"name": "fedspeed", "rho": 0.05}, "lr_schedule": ""})
    assert recipe_files.run_key(config, "abc") == "f65d25054cd89a2a"
    keys = {recipe_files.run_key(replace(config, lr_schedule=each), "abc") for each in ("cosine", "cosine:rounds=7")}
    assert len(keys) == 1
    assert keys != {"f65d25054cd89a2a"}


EVIL = "open('executed', 'w').close()\ndef f(t):\n    return 1.0\n"


@pytest.mark.parametrize(
    "where", ["lr_schedule = 'evil.py:f'", "lr_schedule = {name = 'evil.py:f'}", "[until.2]\nlr_schedule = 'evil.py:f'"]
)
def test_a_run_directory_s_code_is_not_executed(own_folder, capsys, where):
    assert main(["run", *QUICK, "--out", "a", "--quiet"]) == 0
    Path("a/evil.py").write_text(EVIL)
    tables = Path("a/config.toml").read_text()
    Path("a/config.toml").write_text(f"{where}\n{tables}" if "until" not in where else f"{tables}\n{where}\n")
    for command in (["resume", "a"], ["verify", "a"], ["fork", "a", "--at", "2", "--out", "b"], ["report", "a"]):
        main(command)
    assert main(["resume", "a", "--rounds", "9"]) == 2
    assert "evil.py:f, whose code would be executed" in (err := capsys.readouterr().err) or "found a file" in err
    assert warning_of({**tomllib.loads(Path("a/config.toml").read_text())}, [10] * 4) == ""
    assert not list(Path().rglob("executed"))


# --- beside other settings ---


def test_it_stands_instead_of_the_decay(own_folder, capsys):
    for given in ({}, {"lr_decay": 1.0}, {"preset": "paper"}):
        assert Config.from_dict({"lr_schedule": "cosine", **given}).lr_decay == 1.0
    assert main(["run", *QUICK, "--lr-schedule", "cosine", "--lr-decay", "0.9", "--out", "a"]) == 2
    assert "expected no lr_decay beside cosine:rounds=5, found 0.9; leave one out" in capsys.readouterr().err
    assert (
        main(["compare", "fedavg", "fedspeed", *QUICK, "--lr-schedule", "cosine", "--paper-decay", "--out", "a"]) == 2
    )
    assert "--paper-decay and --lr-schedule: expected one of them" in capsys.readouterr().err
    assert not Path("a").exists()


def test_what_a_run_and_a_comparison_print(own_folder, capsys):
    assert main(["run", *QUICK, "--lr-schedule", "cosine", "--out", "a"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "lr 0.1, lr_schedule cosine:rounds=5, weight_decay 0.001" in out
    assert "lr 0.1, cosine:rounds=5; data" in out
    assert "next: fedspeed compare" in out
    assert "--lr-schedule cosine:rounds=5" in out
    assert main(["theory", "check", "--from", "a", "--L", "1"]) in (0, 1)
    assert "lr_schedule cosine:rounds=5" in capsys.readouterr().out
    methods = ["fedavg", "fedspeed", *QUICK, "--seeds", "1"]
    assert main(["compare", *methods, "--lr-schedule", "cosine", "--follow-lr", "rho", "--out", "c"]) == 0
    assert "learning-rate schedule cosine:rounds=5; following lr: none of fedavg; rho of fedspeed" in " ".join(
        capsys.readouterr().out.split()
    )
    grid = ["--grid", "lr_schedule=cosine,constant,'step:1,3:0.5'", "--grid", "rounds=3,4", "--seeds", "1"]
    assert main(["sweep", "--method", "fedavg", *QUICK[2:], *grid, "--out", "s"]) == 0
    found = {Config.from_toml(path).lr_schedule for path in Path("s").rglob("config.toml")}
    assert found == {"cosine:rounds=3", "cosine:rounds=4", "constant", "step:1,3:0.5"}


def test_a_trial_of_fewer_rounds_is_the_beginning_of_the_whole():
    whole = Config.from_dict({"rounds": 81, "lr_schedule": "cosine"})
    trial = replace(whole, rounds=27)
    assert [trial.rate(t, 1.0) for t in range(27)] == [whole.rate(t, 1.0) for t in range(27)]


def test_checks_of_a_method_see_the_largest_rate_and_every_extreme_round():
    fits = {"rounds": 9, "clients": 4, "active": 2, "method": {"name": "fedprox", "mu": 5.0}, "lr": 0.1}
    assert Config.from_dict({**fits, "lr_schedule": {1: 1, 5: 3, 9: 1}})
    with pytest.raises(UserError) as found:
        FedProx(mu=5.0).check(0.5, 2, 4)
    with pytest.raises(UserError) as same:
        Config.from_dict({**fits, "lr_schedule": {1: 1, 5: 5, 9: 1}})
    assert str(same.value) == str(found.value)


def test_damping_simulates_the_scheduled_rates():
    plan = Plan(rounds=1500, active=10, local_steps=10)
    given = [{"lr_decay": 0.9995}, {"lr_schedule": "exponential:0.9995"}, {"lr_schedule": "step:100:0.01"}]
    found = [damping(FedDyn(alpha=0.1), replace(plan, **how), [100] * 500).zero for how in given]
    assert found[0] == found[1] == 415
    assert found[2] is None or found[2] > 415


# --- refused ---


BAD = [
    ("cosin", "unknown lr_schedule 'cosin'; did you mean 'cosine'?"),
    ("cosine:3", "expected cosine, cosine:floor=0.01 or cosine:rounds=500, found 'cosine:3'"),
    ("cosine:floor=2", "expected cosine, cosine:floor=0.01"),
    ("cosine:floor=0.1,floor=0.2", "expected cosine, cosine:floor=0.01"),
    ("cosine:rounds=0", "expected a finite number >= 1 as the number of a round, found 0"),
    ("cosine:rounds=2.5", "expected rounds as whole numbers from 1 on, found 2.5"),
    ("cosine:rounds=3", "expected a finite factor above 0 in every round, found 0 in round 5 of cosine:rounds=3"),
    ("constant:1", "expected constant, found 'constant:1'"),
    ("exponential", "expected exponential:0.998, found 'exponential'"),
    ("exponential:0.9,0.8", "expected exponential:0.998"),
    ("exponential:-0.9", "expected a finite number above 0 as factor of exponential, found -0.9"),
    ("exponential:nan", "expected a finite number above 0 as factor of exponential, found nan"),
    ("exponential:1e-100", "expected a finite factor above 0 in every round, found 0 in round 5"),
    ("exponential:1e100", "expected a finite factor above 0 in every round, found inf in round 5"),
    ("step:3", "expected step:30,60:0.1, found 'step:3'"),
    ("step:4,2:0.1", "expected rounds in ascending order, each once, found 2 after 4"),
    ("step:two:0.1", "expected a finite number >= 1 as the number of a round, found two"),
    ("step:2:0", "expected a finite number above 0 as factor of step, found 0"),
    ("polynomial", "expected polynomial:2 or polynomial:2,floor=0.01,rounds=500, found 'polynomial'"),
    ("polynomial:-1", "expected a finite number above 0 as power of polynomial, found -1"),
    ("piecewise", "expected piecewise:1=1,50=0.1 or piecewise:FILE, found 'piecewise'"),
    ("piecewise:1=1,3=0.5", "expected factors from round 1 to round 5, found 1 to 3"),
    ("piecewise:2=1,9=1", "expected factors from round 1 to round 5, found 2 to 9"),
    ("piecewise:1=1,9=-1", "expected a finite number above 0 as factor of round 9, found -1"),
    ("piecewise:1=0,9=0", "expected a finite number above 0 as factor of round 1, found 0"),
    ("piecewise:1=1,9=inf", "expected a finite number above 0 as factor of round 9, found inf"),
    ("piecewise:1=1,1=2,9=1", "expected rounds in ascending order, each once, found 1 after 1"),
    ("piecewise:none.csv", "cannot read none.csv: No such file or directory; expected rows `round,factor`"),
    ("piecewise:short.csv", "expected factors from round 1 to round 5, found 1 to 2"),
    ("piecewise:twice.json", "expected rounds in ascending order, each once, found 1 after 1"),
    ("piecewise:bad.csv", "bad.csv: expected rows `round,factor` in a .csv"),
    ("piecewise:bad.json", "bad.json: expected rows `round,factor` in a .csv"),
    ("piecewise:bad.toml", "bad.toml: expected rows `round,factor` in a .csv"),
    ("piecewise:nan.csv", "expected a finite number above 0 as factor of round 2, found nan"),
    ("none.py:f", "there is no file"),
    ("own.py", "which function of own.py is it?"),
    ("own.py:g", "unknown function in"),
    ("own.py:negative", "expected a finite number above 0 as factor of round 4, found -0.5"),
    ("own.py:text", "expected a finite number above 0 as factor of round 1, found fast"),
    ("own.py:fails", "fails(0) failed: ZeroDivisionError: division by zero"),
    ("own.py:NUMBER", "expected a name such as cosine, a function of t or a list of factors, found '3'"),
]  # fmt: skip
OWN_BAD = """
NUMBER = 3
def negative(t): return 2.5 - t
def text(t): return "fast"
def fails(t): return 1 / 0
"""


@pytest.mark.parametrize(("given", "says"), BAD, ids=[given for given, _ in BAD])
def test_a_schedule_that_cannot_be_is_one_line(own_folder, capsys, given, says):
    texts = {"short.csv": "1,1\n2,1\n", "twice.json": '{"1": 1, "1": 2}', "bad.csv": "1,1,1\n", "bad.json": "{",
             "bad.toml": "a b", "nan.csv": "1,1\n2,nan\n", "own.py": OWN_BAD}  # fmt: skip
    for name, text in texts.items():
        Path(name).write_text(text)
    assert main(["run", *QUICK, "--lr-schedule", given, "--out", "a"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("fedspeed: error: ")
    assert "lr_schedule" in err or "function in" in err
    assert says in err
    assert err.count("\n") == 1
    assert {path.name for path in Path().iterdir()} - {"__pycache__"} == set(texts)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ([1, 0.5], "expected factors from round 1 to round 5, found 1 to 2"),
        ([], "expected factors from round 1 to round 5, found none"),
        ([1, 1, -1, 1, 1], "factor of round 3, found -1"),
        ([1, 1, math.nan, 1, 1], "factor of round 3, found nan"),
        ([0] * 5, "factor of round 1, found 0"),
        ([True] * 5, "factor of round 1, found True"),
        (lambda t: None, "factor of round 1, found None"),
        (lambda: 1, "failed: TypeError"),
        (3, "expected a name such as cosine, a function of t or a list of factors, found '3'"),
        (None, "expected a name such as cosine"),
        ("own.py:f", "there is no file"),
    ],
    ids=range(11),
)
def test_from_python_it_is_refused_before_anything_runs(given, says):
    problem = Softmax()
    with pytest.raises(UserError, match=says):
        simulate(FedAvg(), problem.model(), problem.federated(), rounds=5, active=2, lr_schedule=given)


def test_a_plan_reads_no_file():
    """Reports make plans of the configs of other users' run directories."""
    for given in ("own.py:f", "piecewise:/dev/zero"):
        with pytest.raises(UserError, match=r"a file is read by simulate and Config\.from_dict, found"):
            Plan(lr_schedule=given)
