"""Warm-up: against NumPy with a rate and a rho of every round, resumed, in files of the user's, and refused."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from federations import Softmax, package, transcription
from same_bits import files_of
from watching import Stop, stop_after

from fedspeed import FedAvg, FedInit, FedSAM, FedSpeed, UserError, Wrapper, param, simulate
from fedspeed.cli import main
from fedspeed.config.config import Config
from fedspeed.config.plan import Plan
from fedspeed.config.warmup import method_at, schedulable, shared
from fedspeed.methods import METHODS, build
from fedspeed.reproduce import recipes as recipe_files
from fedspeed.reproduce.table import Cell
from fedspeed.runs.launch import resume, run_config

PLAN = Plan(rounds=6, active=3, local_epochs=2, batch_size=4, lr=0.1, lr_decay=0.9, weight_decay=0.01, seed=3,
            warmup={"lr": 4, "rho": 3})  # fmt: skip
RATES = [0.025, 0.05 * 0.9, 0.075 * 0.81, 0.1 * 0.729, 0.1 * 0.6561, 0.1 * 0.59049]
PARTS = [1 / 3, 2 / 3, 1.0, 1.0, 1.0, 1.0]
NO_ASCENT = {"fedswa", "fedmoswa"}  # their rho is a rate
WARM = [name for name, cls in METHODS.items() if "rho" in cls().fields() and name not in NO_ASCENT]
QUICK = ["--rounds", "3", "--clients", "4", "--active", "2", "--local-epochs", "1"]


def test_the_methods_with_an_ascent_step_say_that_rho_is_schedulable():
    before = ["fedspeed", "fedsam", "mofedsam", "fedgamma", "fedsmoo", "fedlesam"]
    assert [*before, "afedpdsam", "fedgloss", "fednsam", "fedwmsam", "fedtoga", "fedlesamd", "fedlesams"] == WARM
    found = {name: schedulable(cls()) for name, cls in METHODS.items() if schedulable(cls())}
    assert found == {**{name: ["rho"] for name in WARM}, "fedgloss": ["rho", "rho_l"], "fedgmt": ["gamma"]}


def test_the_rate_rises_beside_its_decay():
    run = package(Softmax(), FedAvg(), Plan.from_fields({**PLAN.fields(), "warmup": "lr=4"}))
    assert [record.lr for record in run] == pytest.approx(RATES, rel=1e-15)


@pytest.mark.parametrize("engine", ["loop", "block"])
@pytest.mark.parametrize("name", [*WARM, "fedinit"])
def test_every_round_has_its_rate_and_rho(name, engine):
    """Client and server of a round see them (FedSMOO's server has a rho of its own); the oracle is told the numbers."""
    problem = Softmax(equal=12 if engine == "block" else 0)
    hyper, method = {"rho": 0.3}, None
    if name == "fedinit":
        name, method = "fedspeed", FedInit(FedSpeed(rho=0.3), beta=0.2)
        hyper = {"rho": 0.3, "relaxed_beta": 0.2}
    plan = Plan.from_fields({**PLAN.fields(), "engine": engine})
    run = package(problem, method or METHODS[name](rho=0.3), plan)
    assert run.plan.engine == engine
    plain = package(problem, method or METHODS[name](rho=0.3), Plan.from_fields({**plan.fields(), "warmup": "lr=4"}))
    scheduled = {"rho": [0.3 * part for part in PARTS]}
    for truth in transcription(problem, name, hyper, plan, 0.9, lrs=RATES, scheduled=scheduled):
        run.step()
        plain.step()
        np.testing.assert_allclose(run.x.numpy(), truth["x"], rtol=0, atol=1e-10)
    assert np.abs(run.x.numpy() - plain.x.numpy()).max() > 1e-6  # what 1e-10 can tell apart


def test_rho_begins_above_zero_so_every_round_costs_the_same():
    run = package(Softmax(equal=12), FedSpeed(rho=0.3), Plan.from_fields({**PLAN.fields(), "warmup": "rho=6"}))
    assert len({record.grad_evals for record in run}) == 1


SMALL = {"rounds": 6, "clients": 12, "active": 4, "local_epochs": 1, "batch_size": 10, "backend": "serial",
         "method": "fedsmoo", "warmup": {"lr": 5, "rho": 4}}  # fmt: skip


@pytest.mark.parametrize("engine", ["loop", "block"])
def test_stopped_resumed_and_longer_is_the_same_run(tmp_path, engine):
    config = Config.from_dict({**SMALL, "engine": engine})
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    run_config(config, whole)
    with pytest.raises(Stop):
        run_config(Config.from_dict({**SMALL, "engine": engine, "rounds": 5}), broken, observers=[stop_after(2)])
    with pytest.raises(Stop):
        resume(broken, observers=[stop_after(3)])
    resume(broken, rounds=6)
    assert files_of(whole) == files_of(broken)
    assert json.loads((whole / "summary.json").read_text())["warmup"] == "lr=5,rho=4"
    assert main(["verify", str(broken), "--all"]) == 0


def test_a_run_with_another_schedule_is_another_run(own_folder, capsys):
    common = {"rounds": 4, "active": 2, "local_epochs": 1}
    problem = Softmax()
    list(simulate(FedSpeed(), problem.model(), problem.federated(), warmup="lr=2", out="a", **common))
    with pytest.raises(UserError, match="holds another run: expected warmup 'lr=2', found 'nothing'"):
        simulate(FedSpeed(), problem.model(), problem.federated(), out="a", resume=True, **common)
    again = simulate(FedSpeed(), problem.model(), problem.federated(), warmup={"lr": 2}, out="a", resume=True, **common)
    assert again.t == 4
    assert main(["run", *QUICK, "--warmup", "lr=2", "--out", "b", "--quiet"]) == 0
    assert main(["run", *QUICK, "--warmup", "lr=3", "--out", "b", "--quiet", "--resume", "auto"]) == 2
    assert "holds a run of another config" in capsys.readouterr().err


def test_configs_without_a_schedule_keep_their_keys():
    """The key of a stored result, as the version before schedules computed it."""
    config = Config.from_dict({"rounds": 7, "method": {"name": "fedspeed", "rho": 0.05}})
    assert recipe_files.run_key(config, "abc") == "f65d25054cd89a2a"
    assert recipe_files.run_key(Config.from_dict({**config.to_dict(), "warmup": ""}), "abc") == "f65d25054cd89a2a"
    warm = [{"warmup": {"rho": 2, "lr": 3}}, {"warmup": "lr=3, rho=2"}]
    keys = {recipe_files.run_key(Config.from_dict({**config.to_dict(), **each}), "abc") for each in warm}
    assert len(keys) == 1
    assert keys != {"f65d25054cd89a2a"}


OWN = '''
from dataclasses import dataclass, field
from functools import cached_property
from fedspeed import FedAvg, param
from fedspeed.methods.base import Method

@dataclass(frozen=True)
class Scaled(FedAvg):
    """FedAvg times the square of `size`, which it computes when it is made, and again when it is asked."""
    size: float = param(2.0, "[0.5, inf)", "size", schedulable=True)
    square: float = field(default=0.0, init=False)
    block_safe = True

    def __post_init__(self):
        super().__post_init__()
        object.__setattr__(self, "square", self.size**2)

    @cached_property
    def again(self):
        return self.size**2

    def direction(self, x, grad, down, client):
        assert self.again == self.square
        return self.square * grad(x)
'''


@pytest.mark.parametrize("backend", ["serial", pytest.param("process", marks=pytest.mark.slow)])
def test_a_file_of_ones_own_says_so_in_one_word_and_is_made_anew_for_every_round(own_folder, backend):
    """Rates are scaled by what the method does with its field: FedAvg at those rates is the truth."""
    Path("own.py").write_text(OWN)
    problem, common = Softmax(), {"rounds": 4, "active": 3, "weight_decay": 0.0, "lr_decay": 1.0}
    method = build({"name": "own.py:Scaled"})
    plan = Plan(**common, lr=0.1, warmup={"size": 4}, backend=backend, workers=2)
    with package(problem, method, plan) as run:
        list(run)
    rates = [0.1 * (2.0 * part) ** 2 for part in (0.25, 0.5, 0.75, 1.0)]
    truth = transcription(problem, "fedavg", {}, plan, 1.0, lrs=rates)[-1]
    np.testing.assert_allclose(run.x.numpy(), truth["x"], rtol=0, atol=1e-10)
    with pytest.raises(UserError, match=r"warmup: size in round 1: Scaled: size must be in \[0.5, inf\), got 0.4"):
        package(problem, method, Plan(rounds=5, active=3, warmup="size=5"))


def test_a_wrapper_s_own_field_hides_that_of_its_base():
    from dataclasses import dataclass

    @dataclass(frozen=True)
    class Louder(Wrapper):
        rho: float = param(8.0, "[0, inf)", "rho", schedulable=True)

    first = method_at(Louder(FedSpeed(rho=0.4)), "rho=4", 0)
    assert (first.rho, first.base.rho) == (2.0, 0.4)
    first = method_at(FedInit(FedInit(FedSpeed(rho=0.4)), beta=0.2), "rho=4", 1)
    assert (first.rho, first.base.base.rho, first.beta) == (0.2, 0.2, 0.2)
    same = FedSpeed()
    assert method_at(same, "lr=9,rho=4", 3) is same


@pytest.mark.parametrize("default", [1, True, "all"])
def test_only_a_float_is_schedulable(default):
    with pytest.raises(UserError, match=r"has a float as its default such as 0\.1, got"):
        param(default, schedulable=True)


BAD = [
    ("lr=4", "lr must be at most the number of rounds, got 4 of 3"),
    ("lr=2,rho=99", "rho must be at most the number of rounds, got 99 of 3"),
    ("lr=-1", "lr must be a whole number of rounds >= 1, got -1"),
    ("lr=0", "lr must be a whole number of rounds >= 1, got 0; leave it out"),
    ("lr=1.5", "lr must be a whole number of rounds >= 1, got 1.5"),
    ("lr=ten", "lr must be a whole number of rounds >= 1, got ten"),
    ("lr=" + "9" * 5000, "lr must be a whole number of rounds >= 1, got 999"),
    ("lr=1,lr=2", "expected every field once, got lr twice"),
    ("10", "expected fields and numbers of rounds such as lr=10,rho=10, got '10'"),
    ("lr=", "expected fields and numbers of rounds such as lr=10,rho=10, got 'lr='"),
    ("lr=2,", "expected fields and numbers of rounds such as lr=10,rho=10, got 'lr=2,'"),
    ("rhoo=2", "unknown field of FedSpeed to schedule 'rhoo'; did you mean 'rho'? Known: lr, rho"),
    ("learning_rate=2", "unknown field of FedSpeed to schedule 'learning_rate'; did you mean 'lr'?"),
    ("weight_decay=2", "unknown field of FedSpeed to schedule 'weight_decay'; Known: lr, rho"),
    ("lam=2", "lam of FedSpeed cannot be scheduled, expected one of lr, rho; `fedspeed methods fedspeed` shows"),
]


@pytest.mark.parametrize(("given", "says"), BAD, ids=[given[:12] for given, _ in BAD])
@pytest.mark.parametrize("command", ["run", "compare fedspeed"])
def test_a_schedule_that_cannot_be_is_one_line(own_folder, capsys, command, given, says):
    assert main([*command.split(), *QUICK, f"--warmup={given}", "--out", "a"]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"fedspeed: error: warmup: {says}"), err
    assert err.count("\n") == 1
    assert list(Path().iterdir()) == []


@pytest.mark.parametrize(
    ("toml", "says"),
    [
        ("warmup = 10", "expected fields and numbers of rounds such as lr=10,rho=10, got 10"),
        ("warmup = ['lr']", "expected fields"),
        ("warmup = {lr = true}", "lr must be a whole number of rounds >= 1, got True"),
        ("warmup = {lr = 2.0}", "lr must be a whole number of rounds >= 1, got 2.0"),
        ("warmup = {lr = {rounds = 3}}", "lr must be a whole number of rounds >= 1, got {'rounds': 3}"),
        ("warmup = {'lr,rho' = 3}", "expected fields"),
        ("warmup = {rho = 3}\nmethod = 'fedavg'", "unknown field of FedAvg to schedule 'rho'; Known: lr"),
        ("warmup = {base = 3}\nmethod = 'fedinit'", "base of FedInit cannot be scheduled, expected one of lr; "),
        ("warmup_rounds = 3", ""),
    ],
)
def test_a_file_s_schedule_that_cannot_be(tmp_path, capsys, toml, says):
    file = tmp_path / "a.toml"
    file.write_text(toml)
    assert main(["run", str(file), "--out", str(tmp_path / "a")]) == 2
    err = capsys.readouterr().err
    assert (f"warmup: {says}" if says else "unknown config key 'warmup_rounds'; did you mean 'warmup'?") in err
    assert err.count("\n") == 1


def test_from_python_it_is_refused_before_anything_runs():
    problem = Softmax()
    with pytest.raises(UserError, match="lam of FedSpeed cannot be scheduled"):
        simulate(FedSpeed(), problem.model(), problem.federated(), rounds=3, active=2, warmup={"lam": 2})


def test_a_comparison_shares_it_among_those_who_have_the_field(own_folder, capsys):
    methods = ["fedavg", "fedspeed", "fedinit:base=fedsam"]
    given = [*QUICK, "--warmup", "lr=2,rho=3", "--seeds", "1"]
    assert main(["compare", *methods, *given, "--out", "c"]) == 0
    note = "warm-up lr=2 of fedavg; lr=2,rho=3 of fedspeed, fedinit:base=fedsam"
    assert note in " ".join(capsys.readouterr().out.split())
    assert note in Path("c/table.md").read_text()
    written = [Config.from_toml(path).warmup for path in sorted(Path("c").glob("*/config.toml"))]
    assert written == ["lr=2", "lr=2,rho=3", "lr=2,rho=3"]
    assert main(["compare", *methods, *given, "--out", "c"]) == 0
    assert "3 of 3 runs are done already" in capsys.readouterr().out
    assert main(["compare", "c", "--baseline", "fedavg"]) == 0  # rows have the names they had
    capsys.readouterr()
    assert main(["compare", "fedavg", "scaffold", *given, "--out", "d"]) == 2
    assert "unknown field of FedAvg, Scaffold to schedule 'rho'; Known: lr" in capsys.readouterr().err


def test_a_run_s_hint_compares_in_its_setting(own_folder, capsys):
    assert main(["run", *QUICK, "--warmup", "rho=3,lr=2", "--out", "a"]) == 0
    out = capsys.readouterr().out
    assert "decay 0.998 per round, warm-up lr=2,rho=3;" in " ".join(out.split())
    assert re.search(r"next: fedspeed compare fedavg fedspeed .*--warmup lr=2,rho=3", " ".join(out.split()))
    assert main(["inspect", "a", "--samples", "20", "--clients", "2", "--iterations", "2"]) == 0
    assert "a: warm-up lr=2,rho=3" in capsys.readouterr().out
    assert json.loads(Path("a/inspect.json").read_text())["warmup"] == "lr=2,rho=3"
    assert main(["theory", "check", "--from", "a", "--L", "1"]) in (0, 1)
    told = " ".join(capsys.readouterr().out.split())
    assert "lr_decay 0.998, warmup lr=2,rho=3" in told
    assert "a constant rho" in told


def test_methods_shows_what_can_be_scheduled(capsys):
    assert main(["methods"]) == 0
    out = capsys.readouterr().out
    assert len(re.findall(r"rho=[\d.]+\*", out)) == len(WARM)
    assert "lam=10.0*" not in out
    assert main(["methods", "fedspeed"]) == 0
    assert len(re.findall("--warmup rho=N", " ".join(capsys.readouterr().out.split()))) == 1


RECIPE = """
title = "t"
claim = "c"
about = "a"
rows = [{name = "A", method = {name = "fedavg"}}, {name = "B", method = {name = "fedspeed"}, warmup = {lr = 3}}]
[presets.smoke.set]
rounds = 9
warmup = {lr = 4, FIELD = 5}
"""


def test_a_recipe_s_setting_is_for_every_row(tmp_path):
    file = tmp_path / "own.toml"
    file.write_text(RECIPE.replace("FIELD", "rho"))
    cells = recipe_files.read(file).cells("smoke")
    assert [cell.config(0).warmup for cell in cells] == ["lr=4", "lr=3,rho=5"]
    for field, says in (("lam", "lam of FedSpeed cannot be scheduled"), ("roh", "to schedule 'roh'; did you mean")):
        file.write_text(RECIPE.replace("FIELD", field))
        with pytest.raises(UserError, match=says):
            recipe_files.read(file).cells("smoke")[0].config(0)
    file.write_text(RECIPE.replace("FIELD", "rho").replace("rounds = 9", "rounds = 4"))
    with pytest.raises(UserError, match="rho must be at most the number of rounds, got 5 of 4"):
        recipe_files.read(file).cells("smoke")[1].config(0)
    alone = Cell("A", "", tables={"method": {"name": "fedsam"}, "warmup": "rho=2"})
    assert alone.config(0).warmup == "rho=2"


def test_a_part_of_a_shared_schedule():
    assert shared({"warmup": {"rho": 2}}, FedAvg(), [FedAvg(), FedSAM()]) == {"warmup": ""}
    assert shared({"warmup": ""}, FedAvg(), [FedAvg()]) == {}


# --- fields that follow the rate ---


FOLLOWING = Plan.from_fields({**PLAN.fields(), "warmup": "lr=4", "follow_lr": "rho"})


def test_with_the_same_value_rho_has_the_bits_of_the_rate():
    rhos = [FOLLOWING.method_at(FedSpeed(rho=0.1), t, 0.5).rho for t in range(6)]
    assert rhos == [FOLLOWING.rate(t, 0.5) for t in range(6)]
    assert rhos == pytest.approx(RATES, rel=1e-15)
    own = Plan(rounds=3, lr_decay=0.0, follow_lr="rho")  # the paper's own decay of the method
    assert [own.method_at(FedSpeed(rho=0.2), t, 0.9995).rho for t in (0, 2)] == pytest.approx([0.2, 0.2 * 0.9995**2])
    same = FedSpeed()
    assert Plan(rounds=3, lr_decay=1.0, follow_lr="rho").method_at(same, 2, 0.5) is same
    with pytest.raises(UserError, match="expected fields of the method, each once, such as rho or rho,rho_l, got 3"):
        Plan(follow_lr=3)


@pytest.mark.parametrize("engine", ["loop", "block"])
@pytest.mark.parametrize("warm", ["lr=4", "lr=4,rho=3"])
@pytest.mark.parametrize("name", ["fedspeed", "fedsmoo", "fedinit"])
def test_every_round_has_a_rho_that_follows_its_rate(name, warm, engine):
    """FedSMOO's server has a rho of its own; a warm-up of rho is a factor beside what follows."""
    problem = Softmax(equal=12 if engine == "block" else 0)
    hyper, method = {"rho": 0.3}, None
    if name == "fedinit":
        name, method = "fedspeed", FedInit(FedSpeed(rho=0.3), beta=0.2)
        hyper = {"rho": 0.3, "relaxed_beta": 0.2}
    plan = Plan.from_fields({**FOLLOWING.fields(), "engine": engine, "warmup": warm})
    run = package(problem, method or METHODS[name](rho=0.3), plan)
    plain = package(problem, method or METHODS[name](rho=0.3), Plan.from_fields({**plan.fields(), "follow_lr": ""}))
    rhos = [3 * rate * (part if "rho" in warm else 1.0) for rate, part in zip(RATES, PARTS, strict=True)]
    for truth in transcription(problem, name, hyper, plan, 0.9, lrs=RATES, scheduled={"rho": rhos}):
        run.step()
        plain.step()
        np.testing.assert_allclose(run.x.numpy(), truth["x"], rtol=0, atol=1e-10)
    assert np.abs(run.x.numpy() - plain.x.numpy()).max() > 1e-6  # what 1e-10 can tell apart


@pytest.mark.parametrize("backend", ["serial", pytest.param("process", marks=pytest.mark.slow)])
@pytest.mark.parametrize("engine", ["loop", "block"])
def test_following_survives_a_stop_a_fork_and_a_replay(tmp_path, engine, backend):
    tables = {**SMALL, "engine": engine, "backend": backend, "workers": 2, "lr_decay": 0.9, "warmup": {"rho": 2},
              "follow_lr": ["rho"]}  # fmt: skip
    whole, broken, fork = tmp_path / "whole", tmp_path / "broken", tmp_path / "fork"
    run_config(Config.from_dict(tables), whole)
    with pytest.raises(Stop):
        run_config(Config.from_dict({**tables, "rounds": 5}), broken, observers=[stop_after(2)])
    resume(broken, rounds=6)
    assert files_of(whole) == files_of(broken)
    assert json.loads((whole / "summary.json").read_text())["follow_lr"] == "rho"
    assert main(["verify", str(broken), "--all"]) == 0
    run_config(Config.from_dict({**tables, "follow_lr": ""}), tmp_path / "other")
    assert files_of(whole)[1] != files_of(tmp_path / "other")[1]
    assert main(["fork", str(tmp_path / "other"), "--at", "1", "--set", "follow_lr=rho", "--out", str(fork)]) == 0
    assert files_of(fork)[1] == files_of(whole)[1]  # the rate of round 1 is its value, so round 1 is the same
    cohort = files_of(whole)[0][4]["cohort"]
    assert main(["replay", str(fork), "--round", "5", "--client", str(cohort[0])]) == 0


def test_configs_that_follow_nothing_keep_their_keys():
    config = Config.from_dict({"rounds": 7, "method": {"name": "fedspeed", "rho": 0.05}, "follow_lr": []})
    assert recipe_files.run_key(config, "abc") == "f65d25054cd89a2a"
    told = [Config.from_dict({**config.to_dict(), "follow_lr": each}) for each in (["rho"], "rho ", "rho")]
    assert len({recipe_files.run_key(each, "abc") for each in told}) == 1
    assert Config.from_dict(told[0].to_dict()) == told[0]


LOST = [
    ("lam", "lam of FedSpeed cannot be scheduled, expected one of rho; `fedspeed methods fedspeed` shows which"),
    ("rhoo", "unknown field of FedSpeed to schedule 'rhoo'; did you mean 'rho'? Known: rho"),
    ("lr", "unknown field of FedSpeed to schedule 'lr'; Known: rho"),
    ("rho,rho", "expected fields of the method, each once, such as rho or rho,rho_l, got 'rho,rho'"),
    ("rho=2", "expected fields of the method, each once, such as rho or rho,rho_l, got 'rho=2'"),
]


@pytest.mark.parametrize(("given", "says"), LOST, ids=[given for given, _ in LOST])
def test_what_cannot_follow_is_one_line(own_folder, capsys, given, says):
    for command in (["run"], ["compare", "fedspeed"]):
        assert main([*command, *QUICK, f"--follow-lr={given}", "--out", "a"]) == 2
        err = capsys.readouterr().err
        assert err.startswith(f"fedspeed: error: follow_lr: {says}"), err
        assert err.count("\n") == 1
    assert list(Path().iterdir()) == []


def test_a_value_that_a_late_round_cannot_have_is_refused_before_the_first(own_folder):
    Path("own.py").write_text(OWN)
    method = build({"name": "own.py:Scaled"})  # size, 2, must be at least 0.5
    with pytest.raises(UserError, match=r"follow_lr: size in round 20: Scaled: size must be in \[0.5, inf\), got 0.27"):
        package(Softmax(), method, Plan(rounds=20, active=3, lr_decay=0.9, follow_lr="size"))
    assert package(Softmax(), method, Plan(rounds=10, active=3, lr_decay=0.9, follow_lr="size"))


def test_a_comparison_lets_it_follow_where_there_is_one(own_folder, capsys):
    given = [*QUICK, "--follow-lr", "rho", "--seeds", "1", "--out", "c"]
    assert main(["compare", "fedavg", "fedspeed", *given]) == 0
    assert "following lr: none of fedavg; rho of fedspeed" in " ".join(capsys.readouterr().out.split())
    written = [Config.from_toml(path).follow_lr for path in sorted(Path("c").glob("*/config.toml"))]
    assert written == ["", "rho"]
    run = next(Path("c").glob("fedspeed*"))
    assert main(["theory", "check", "--from", str(run), "--L", "1"]) in (0, 1)
    assert "a constant rho" in " ".join(capsys.readouterr().out.split())
    with pytest.raises(UserError, match="follow_lr: unknown field of FedAvg to schedule 'rho'; Known: none"):
        shared({"follow_lr": "rho"}, FedAvg(), [FedAvg()])
