"""Stopping: where a rule stops, against a naive search; the bits of a run without it; files, tables and bad input."""

from __future__ import annotations

import json
import random
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from federations import Softmax
from made_runs import made_run
from same_bits import files_of
from watching import Rounds, Stop, stop_after

from fedspeed import FedAvg, Observer, UserError, simulate
from fedspeed.cli import main
from fedspeed.config import stopping
from fedspeed.config.config import Config
from fedspeed.config.plan import Plan
from fedspeed.config.stopping import Stopping, goal_text, time_text
from fedspeed.data import Federated
from fedspeed.record import Record
from fedspeed.report.comparison import Comparison, configured_targets
from fedspeed.report.run_files import RunFiles, collect
from fedspeed.reproduce.recipes import run_key
from fedspeed.runs.launch import resume, run_config
from fedspeed.runs.summary import final_summary

SMALL = {"rounds": 10, "clients": 12, "active": 4, "local_steps": 2, "batch_size": 10, "backend": "serial"}
QUICK = ["--rounds", "6", "--clients", "8", "--active", "2", "--local-epochs", "1", "--quiet", "--out", "run"]


def record(t: int, accuracy: float | None = None, loss: float | None = None, seconds: float = 1.0, **more) -> Record:
    costs = {"drift": 0.0, "update_norm": 0.0, "bytes_down": 1, "bytes_up": 1, "grad_evals": 1.0, "eval_seconds": 0.5}
    return Record(round=t, cohort=[], lr=0.1, train_loss=1.0, test_loss=loss, test_accuracy=accuracy, dropped=[],
                  stragglers=[], seconds=seconds, **costs, **more)  # fmt: skip


def where(plan: Plan, records: list[Record]) -> int:
    """The round in which a run stops; 0 if it does not."""
    rules = Stopping(plan)
    for one in records:
        rules.update(one)
        if rules.fired:
            assert rules.fired.round == one.round
            return one.round
    return 0


# --- where ---


@pytest.mark.parametrize("seed", range(20))
def test_patience_is_what_a_naive_search_finds(seed):
    numbers = random.Random(seed)
    every, patience, delta = numbers.choice([1, 2, 3]), numbers.choice([1, 2, 4]), numbers.choice([0.0, 0.05])
    scores = [numbers.choice([0.1, 0.2, 0.22, 0.3, 0.5, 0.51]) for _ in range(60)]
    records = [record(t, s if t % every == 0 else None, 9.0) for t, s in enumerate(scores, 1)]
    scored = [(t, s) for t, s in enumerate(scores, 1) if t % every == 0]
    truth = 0
    for end in range(len(scored)):
        best = 0  # the place of the last score that beat the best before it by more than delta
        for i in range(1, end + 1):
            best = i if scored[i][1] - scored[best][1] > delta else best
        if end - best >= patience:
            truth = scored[end][0]
            break
    assert where(Plan(rounds=60, eval_every=every, patience=patience, min_delta=delta), records) == truth > 0


@pytest.mark.parametrize(
    ("rule", "stops"), [("accuracy=0.7", 3), ("accuracy>=0.71", 4), ("loss=0.5", 2), ("loss=0.1", 0)]
)
def test_a_goal_is_met_or_passed(rule, stops):
    records = [record(1, None, None), record(2, 0.6, 0.5), record(3, 0.7, 0.4), record(4, 0.9, 0.3)]
    assert where(Plan(rounds=9, stop_at=rule), records) == stops


def test_patience_prefers_what_rounds_are_chosen_on():
    """Validation where there is some; falling losses are better; one beyond numbers is none, live and read back."""
    steady = [record(t, 0.5, 1.0, validation_accuracy=t / 9, validation_loss=1.0) for t in range(1, 8)]
    assert where(Plan(rounds=9, patience=2), steady) == 0
    falling = [record(t, None, 1.0 / t) for t in range(1, 8)]
    assert where(Plan(rounds=9, patience=2), falling) == 0
    live = [record(1, None, 2.0), *(record(t, None, float("inf")) for t in range(2, 8))]
    back = [Record.from_dict(json.loads(json.dumps(one.to_dict()))) for one in live]
    assert where(Plan(rounds=9, patience=2), live) == where(Plan(rounds=9, patience=2), back) == 3


def test_time_is_what_the_records_say():
    """Of rounds that had no budget yet, what they took; then the clock's."""
    old = [record(t) for t in (1, 2)]  # 1.5 s each
    new = [record(3, wall_seconds=4.0), record(4, wall_seconds=9.0), record(5), record(6, wall_seconds=20.0)]
    assert [where(Plan(rounds=9, max_time=f"{s}s"), [*old, *new]) for s in (3, 3.5, 9.5, 21)] == [2, 3, 5, 0]


@pytest.mark.parametrize(
    ("given", "spelled"),
    [("accuracy=0.8", "accuracy=0.8"), (" test_accuracy >= .80 ", "accuracy=0.8"), ("loss<=1e-1", "loss=0.1"),
     ("train_loss = 0.30", "train_loss=0.3"), ("accuracy=1", "accuracy=1.0"), ("none", ""), ("", "")],
)  # fmt: skip
def test_goals_have_one_spelling(given, spelled):
    assert goal_text(given) == spelled == goal_text(spelled)


@pytest.mark.parametrize(
    ("given", "spelled", "seconds"),
    [("2h", "2h", 7200), ("90min", "1h30min", 5400), ("90m", "1h30min", 5400), ("1.5 h", "1h30min", 5400),
     ("1h30min5s", "1h30min5s", 5405), ("1d", "24h", 86400), ("0.25s", "0.25s", 0.25), ("none", "", 0)],
)  # fmt: skip
def test_times_have_one_spelling(given, spelled, seconds):
    assert time_text(given) == spelled == time_text(spelled)
    assert stopping.seconds(time_text(given)) == seconds


# --- bits ---


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("whole") / "run"
    run_config(Config.from_dict({**SMALL, "engine": "loop"}), out)
    return out


def goal_of(whole: Path, t: int) -> float:
    """An accuracy that is first reached in about round t."""
    scores = [json.loads(line)["test_accuracy"] for line in (whole / "rounds.jsonl").read_text().splitlines()]
    return max(scores[:t])


@pytest.mark.parametrize("backend", ["serial", pytest.param("process", marks=pytest.mark.slow)])
def test_a_stopped_run_is_the_beginning_of_the_whole_and_goes_on_to_its_end(tmp_path, whole, backend, capsys):
    goal = goal_of(whole, 6)
    config = {**SMALL, "engine": "loop", "backend": backend, "workers": 1, "stop_at": f"accuracy={goal}"}
    out = tmp_path / "run"
    summary = run_config(Config.from_dict(config), out)
    rounds = files_of(whole)[0]
    first = next(r["round"] for r in rounds if r["test_accuracy"] >= goal)
    assert files_of(out)[0] == rounds[:first]
    assert first < 10
    assert summary["stopped"] == {"by": "stop_at", "rule": f"accuracy={goal}", "round": first}
    assert (
        summary["status"] == f"stopped: accuracy {rounds[first - 1]['test_accuracy']:.6g} >= {goal:g} in round {first}"
    )
    assert main(["verify", str(out), "--all", "--backend", "serial"]) == 0
    before = files_of(out)
    assert resume(out) == summary
    assert resume(out, rounds=20) == summary
    assert files_of(out) == before
    capsys.readouterr()
    assert main(["resume", str(out)]) == 0
    told = capsys.readouterr().out
    assert "is stopped already" in told
    assert "--stop-at none" in told
    assert resume(out, stop_at="none")["status"] == "finished"
    again = files_of(out)
    assert again[:2] == files_of(whole)[:2]
    assert "stop_at" not in again[2]


def test_a_rule_may_change_and_another_may_come(tmp_path, whole):
    """A rule given later says nothing of rounds before it."""
    out = tmp_path / "run"
    config = Config.from_dict({**SMALL, "engine": "loop", "stop_at": f"accuracy={goal_of(whole, 3)}"})
    early = run_config(config, out)["rounds"]
    later = resume(out, stop_at=f"accuracy={goal_of(whole, 9)}")["rounds"]
    assert early < later <= 9
    ended = resume(out, stop_at="none", patience=1)
    rounds = files_of(whole)[0]
    assert ended["rounds"] > later or rounds[later - 1]["test_accuracy"] <= max(
        r["test_accuracy"] for r in rounds[: later - 1]
    )
    assert main(["verify", str(out)]) == 0
    assert resume(out, patience=0)["status"] == "finished"
    assert files_of(out)[:2] == files_of(whole)[:2]


def test_a_kill_before_the_end_is_written_changes_nothing(tmp_path, whole):
    out, goal = tmp_path / "run", goal_of(whole, 6)
    config = Config.from_dict({**SMALL, "engine": "loop", "stop_at": f"accuracy={goal}"})
    first = next(r["round"] for r in files_of(whole)[0] if r["test_accuracy"] >= goal)
    with pytest.raises(Stop):
        run_config(config, out, observers=[stop_after(first)])
    assert resume(out)["stopped"]["round"] == first
    with pytest.raises(Stop):
        resume(out, stop_at="none", observers=[stop_after(first + 2)])
    assert "stop_at" not in (out / "config.toml").read_text()  # a dropped rule stays dropped
    assert resume(out)["status"] == "finished"
    assert files_of(out)[:2] == files_of(whole)[:2]


@pytest.mark.parametrize("engine", ["loop", "block"])
def test_from_python_with_and_without_a_directory(tmp_path, engine):
    problem, told = Softmax(equal=12), []

    class Ended(Observer):
        def ended(self, status, summary):
            told.append(status)

    def run(**more):
        plan = {"rounds": 8, "active": 3, "batch_size": 4, "engine": engine, **more}
        return simulate(FedAvg(), problem.model(), problem.federated(), **plan)

    whole = run()
    losses = [r.test_loss for r in whole]
    rule = {"stop_at": f"loss={losses[3]}"}
    stopped = run(**rule, observers=[Ended()])
    assert [r.test_loss for r in stopped] == losses[:4]
    assert stopped.ended == told[0] == f"stopped: loss {losses[3]:.6g} <= {losses[3]:g} in round 4"
    assert "stopped: loss" in repr(stopped)
    assert list(stopped) == []
    written = run(**rule, out=tmp_path / "a")
    assert len(list(written)) == 4
    assert written.ended == stopped.ended
    with pytest.raises(UserError, match=r"no rounds are left \(stopped: loss"):
        written.step()
    assert list(run(**rule, out=tmp_path / "a", resume=True)) == []
    rest = run(out=tmp_path / "a", resume=True)
    assert [r.test_loss for r in rest] == losses[4:]
    assert bool((rest.x == whole.x).all())
    assert rest.ended == "finished"
    broken_off = run(**rule, out=tmp_path / "b")
    for one in broken_off:
        if one.round == 4:
            break
    broken_off.close()
    assert json.loads((tmp_path / "b" / "summary.json").read_text())["status"] == stopped.ended


# --- time ---


class Clock:
    """A clock that tests set."""

    def __init__(self) -> None:
        self.now = 1000.0

    def perf_counter(self) -> float:
        return self.now


def test_a_time_budget_counts_over_breaks_and_not_between_them(tmp_path, monkeypatch, whole):
    clock, out = Clock(), tmp_path / "run"
    monkeypatch.setattr(stopping, "time", clock)

    def tick(_: Record) -> None:  # ten seconds after every round: the next one's record tells
        clock.now += 10

    config = Config.from_dict({**SMALL, "engine": "loop", "max_time": "45s"})
    with pytest.raises(Stop):
        run_config(config, out, observers=[Rounds(tick), stop_after(3)])
    clock.now += 5000  # nobody runs it
    summary = resume(out, observers=[Rounds(tick)])
    rounds = [json.loads(line) for line in (out / "rounds.jsonl").read_text().splitlines()]
    # rounds 1 to 3 end at 0, 10 and 20 s; what passed after round 3 was lost with the process
    assert [r["wall_seconds"] for r in rounds] == [0, 10, 20, 20, 30, 40, 50]
    assert summary["status"] == "stopped: 45s used up in round 7"
    assert (summary["wall_seconds"], summary["stopped"]["by"]) == (50, "max_time")
    assert main(["verify", str(out)]) == 0
    assert resume(out, max_time="45s") == summary
    assert resume(out, max_time="1min", observers=[Rounds(tick)])["rounds"] == 9  # at 50 and 60 s
    assert resume(out, max_time="none")["status"] == "finished"
    assert files_of(out)[1] == files_of(whole)[1]


def test_a_time_budget_is_where_a_run_is_computed_not_what_it_is():
    plain, hours = (Config.from_dict({"rounds": 7, "max_time": time}) for time in ("", "2h"))
    assert run_key(plain, "abc") == run_key(hours, "abc")
    assert {"stop_at", "patience", "min_delta", "max_time"}.isdisjoint(plain.to_dict())
    config = Config.from_dict({"rounds": 7, "method": {"name": "fedspeed", "rho": 0.05}})
    assert run_key(config, "abc") == "f65d25054cd89a2a"  # as before there were rules


# --- who reads it ---


def test_verify_finds_a_reason_that_is_none(tmp_path, whole, capsys):
    out = tmp_path / "run"
    run_config(Config.from_dict({**SMALL, "engine": "loop", "stop_at": f"accuracy={goal_of(whole, 4)}"}), out)
    file = out / "summary.json"
    summary = json.loads(file.read_text())
    for status in ("stopped: because", "stopped: accuracy 0.99 >= 0.9 in round 2"):
        file.write_text(json.dumps({**summary, "status": status}))
        capsys.readouterr()
        assert main(["verify", str(out)]) == 1
        assert "status is 'stopped: " in capsys.readouterr().out
    file.write_text(json.dumps({**summary, "stopped": {"by": "patience", "rule": "3 by 0.0", "round": 2}}))
    assert main(["verify", str(out)]) == 1


STOPPED = {"by": "stop_at", "rule": "accuracy=0.6", "round": 5}


def made(folder: Path, method: str, seed: int, by: dict | None) -> None:
    """A run of 10 rounds, or one that a rule stopped in round 5."""
    more = {"summary": {"stopped": by}, "status": "stopped: so", "rounds": 5} if by else {"rounds": 10}
    rule = {"stop_at": "accuracy=0.6", "rounds": 10}
    made_run(folder / f"{method}-s{seed}", method, seed, config=rule, **more)


def test_tables_say_which_runs_were_stopped(tmp_path):
    made(tmp_path, "fedavg", 0, None)
    made(tmp_path, "fedavg", 1, STOPPED)
    made(tmp_path, "fedprox", 0, STOPPED)
    made(tmp_path, "fedprox", 1, STOPPED)
    rows, left_out = collect([tmp_path])
    assert left_out == []
    assert configured_targets(rows) == [0.6]
    found = Comparison(rows, [0.99])
    names = [line[0] for line in found.table[1]]
    assert names == ["fedavg (1 of 2 stopped: stop_at accuracy=0.6)", "fedprox (2 of 2 stopped: stop_at accuracy=0.6)"]
    at = found.table[0].index("rounds to 99%")
    assert [line[at] for line in found.table[1]] == ["> 7.5", "> 5"]  # what a stopped run had, not what it was to have
    assert "3 of 4 runs were stopped by a rule" in found.note
    assert {gap.real for gap in found.gaps} == {"undecided: stopped"}
    assert [row["status"] for row in found.data()["rows"]] == [["finished", "stopped"], ["stopped", "stopped"]]


def test_patience_and_time_leave_the_verdict_to_the_seeds(tmp_path):
    for seed in range(3):
        made(tmp_path, "fedavg", seed, None)
        made(tmp_path, "fedprox", seed, {"by": "max_time", "rule": "2h", "round": 5})
    rows, _ = collect([tmp_path])
    assert {gap.real for gap in Comparison(rows, []).gaps} <= {"yes", "no", "undecided"}


def test_a_comparison_with_a_goal_goes_on_and_keeps_what_stopped(own_folder, capsys):
    few = ["--rounds", "5", "--clients", "8", "--active", "4", "--local-epochs", "2", "--seeds", "1", "--out", "cmp"]
    command = ["compare", "fedavg", "fedspeed", *few, "--stop-at", "accuracy=0.15"]
    assert main(command) == 0
    states = {p.name: RunFiles.read(p).state for p in (own_folder / "cmp").iterdir() if p.is_dir()}
    assert "stopped" in states.values()
    assert "rounds to 15%" in (own_folder / "cmp" / "table.md").read_text()
    capsys.readouterr()
    assert main(command) == 0
    assert "2 of 2 runs are done already and kept" in capsys.readouterr().out
    assert main([*command[:-1], "accuracy=0.9"]) == 2
    assert "it differs in stop_at" in capsys.readouterr().err
    for words in (["show", "cmp/fedavg-s0"], ["explain", "cmp/fedavg-s0"], ["watch", "cmp", "--terminal"]):
        assert main(words) == 0
        assert "stopped" in capsys.readouterr().out


# --- bad input ---


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--stop-at accurcy=0.8", "unknown score of stop_at 'accurcy'; did you mean 'accuracy'?"),
        ("--stop-at accuracy=80", "got 80; 0.8 is 80%"),
        ("--stop-at accuracy=80%", "got 80%; 0.8 is 80%"),
        ("--stop-at accuracy<=0.8", "expected accuracy>=0.8"),
        ("--stop-at loss>=0.8", "expected loss<=0.8"),
        ("--stop-at accuracy=.", "as a share in (0, 1], got ."),
        ("--stop-at accuracy=1.5", "got 1.5; 0.015 is 1.5%"),
        ("--stop-at accuracy=nan", "as a share in (0, 1], got nan"),
        ("--stop-at loss=inf", "expected a number as the goal of loss"),
        ("--stop-at loss", "expected a score and its goal such as accuracy=0.8"),
        ("--stop-at validation_loss=1", "expects a validation set, found none; add one, --validation 0.1"),
        ("--patience -1", "patience must be in [0, inf), got -1"),
        ("--patience 6", "less than the 6 scored rounds of the run, got 6"),
        ("--patience 2 --eval-every 3", "less than the 2 scored rounds of the run (eval_every is 3), got 2"),
        ("--min-delta 0.1", "expects a patience too"),
        ("--max-time 3600", "got '3600'; 3600 seconds are 3600s"),
        ("--max-time 2hours", "expected a time such as 2h, 90min"),
        ("--max-time 0s", "expected a time such as 2h"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(own_folder, capsys, words, told):
    assert main(["run", *QUICK, *words.split()]) == 2
    captured = capsys.readouterr()
    assert told in captured.err
    assert len(captured.err.splitlines()) == 1
    assert not (own_folder / "run").exists()


def test_a_score_that_the_data_do_not_give_is_refused():
    x, y = np.random.default_rng(0).normal(size=(40, 3)).astype("float32"), np.arange(40) % 2
    untested = Federated.from_arrays(x, y, np.arange(40) % 4)
    numbers = Federated.from_arrays(x, x[:, 0].copy(), np.arange(40) % 4, test=(x, x[:, 0].copy()))
    for data, rule, told in (
        (untested, {"stop_at": "accuracy=0.5"}, "accuracy expects a test set"),
        (untested, {"patience": 2}, "expected a test or validation set"),
        (numbers, {"stop_at": "accuracy=0.5"}, "expects data with classes"),
    ):
        with pytest.raises(UserError, match=told):
            simulate("fedavg", "linear", data, rounds=5, active=2, **rule)
    assert simulate("fedavg", "linear", untested, rounds=5, active=2, stop_at="train_loss=0.1").ended == ""


def test_a_longer_run_may_get_a_patience_that_the_shorter_one_could_not_have(tmp_path):
    problem = Softmax()
    for rounds, rule in ((2, {}), (6, {"patience": 4})):
        run = simulate(FedAvg(), problem.model(), problem.federated(), rounds=rounds, active=3, out=tmp_path / "a",
                       resume=True, **rule)  # fmt: skip
        list(run)
    assert run.ended == "finished" or run.t == 5


def test_resume_takes_rules_and_nothing_else(tmp_path):
    made_run(tmp_path / "a", config={"rounds": 20})
    with pytest.raises(UserError, match="unknown keyword of resume 'patiense'; did you mean 'patience'"):
        resume(tmp_path / "a", patiense=3)


def test_an_odd_summary_does_not_stand_for_a_stopped_run(tmp_path):
    """Of somebody else's directory: what `stopped` holds may be anything."""
    plan = Plan(rounds=10, stop_at="accuracy=0.6")
    for told in (None, 3, [], {}, {"by": [], "rule": 1}, {"by": "patience", "rule": None}):
        run = made_run(tmp_path / "a", status="stopped: so", summary={"stopped": told})
        assert final_summary(run, plan) is None
        assert isinstance(RunFiles.read(run.path).stopped, str)
    run = made_run(tmp_path / "a", status="stopped: so", summary={"stopped": STOPPED})
    assert final_summary(run, plan) is not None
    assert final_summary(run, SimpleNamespace(**{**plan.fields(), "stop_at": "accuracy=0.7"})) is None


# --- a mean of scores ---


@pytest.mark.parametrize("seed", range(10))
def test_a_goal_on_a_mean_is_what_a_naive_search_finds(seed):
    """It waits for as many scores, counts scored rounds only, and a first score beyond the goal does not stop it."""
    numbers = random.Random(seed)
    every, of = numbers.choice([1, 2, 5]), numbers.choice([2, 3, 5])
    scores = [numbers.uniform(0.0, 0.02 * t) for t in range(1, 61)]
    records = [record(t, s if t % every == 0 else None, 9.0) for t, s in enumerate(scores, 1)]
    scored = [(t, s) for t, s in enumerate(scores, 1) if t % every == 0]
    windows = [(scored[i][0], [s for _, s in scored[i - of + 1 : i + 1]]) for i in range(of - 1, len(scored))]
    truth = next((t for t, last in windows if sum(last) / of >= 0.4), 0)
    assert where(Plan(stop_at=f"accuracy=0.4,mean={of}", eval_every=every, rounds=60), records) == truth


def test_a_goal_on_a_mean_in_words():
    stopped = Stopping(Plan(stop_at="accuracy=0.5,mean=2"))
    for t, accuracy in enumerate((0.6, 0.3, 0.5, 0.5), 1):
        assert not stopped.fired
        stopped.update(record(t, accuracy))
    assert stopped.status == "stopped: mean of 2 scores of accuracy 0.5 >= 0.5 in round 4"
    assert goal_text("accuracy = 0.5, mean = 1") == "accuracy=0.5"


@pytest.mark.parametrize(
    "given", ["accuracy=0.5,mean=0", "accuracy=0.5,mean=x", "accuracy=0.5,median=3", "accuracy=0.5,"]
)
def test_a_goal_on_a_mean_that_is_none(given):
    with pytest.raises(UserError, match=r"accuracy=0\.8,mean=5: the mean of five scores"):
        goal_text(given)
