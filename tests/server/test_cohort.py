"""Who takes part: counts and exact probabilities of every cohort, a sampler that knows losses, and refusals."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from collections import Counter
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest
import torch
from same_bits import assert_same_bits, digits, outcome
from watching import Stop, stop_after

from fedspeed import DP, FedAvg, FedSpeed, Observer, Plan, UserError, simulate
from fedspeed.cli import main
from fedspeed.config.config import Config
from fedspeed.config.network import Clock
from fedspeed.experiments.tune.tuner import gradients
from fedspeed.record import Record
from fedspeed.report.diff import differences
from fedspeed.runs.directory import RunDir
from fedspeed.runs.fork import fork
from fedspeed.runs.launch import resume, run_config
from fedspeed.server.cohort import Cohort

SIZES = np.array([1, 2, 3, 4, 10])
CHOICE = """
import numpy as np


class PowerOfChoice:
    def __init__(self, d=5):
        self.d = d

    def __call__(self, round, rng, clients, active, history):
        some = rng.choice(clients, self.d, replace=False, p=history.sizes / history.sizes.sum())
        losses = np.where(np.isnan(history.losses), np.inf, history.losses)[some]
        return some[np.argsort(-losses, kind="stable")[:active]]
"""
SMALL = {
    "rounds": 8, "clients": 9, "active": 3, "local_epochs": 1, "batch_size": 10, "model": "linear", "engine": "loop",
    "backend": "serial", "split": "dirichlet-class:0.5",
}  # fmt: skip


@pytest.fixture
def choice(tmp_path) -> Path:
    path = tmp_path / "mine" / "choice.py"
    path.parent.mkdir()
    path.write_text(CHOICE)
    return path


def config(choice: Path, **changes) -> Config:
    return Config.from_dict({**SMALL, "cohort": {"name": f"{choice}:PowerOfChoice", "d": 5}, **changes})


def drawn(cohort: str, rounds: int, sizes=SIZES, active: int = 2, seed: int = 0) -> list[list[int]]:
    draws = Cohort(Plan(cohort=cohort, active=active, seed=seed, rounds=rounds), np.asarray(sizes))
    found = [draws.draw(t).tolist() for t in range(rounds)]
    assert found == [draws.draw(t).tolist() for t in range(rounds)]  # a draw changes nothing
    assert all(each == sorted(set(each)) for each in found)
    return found


# Counts


@pytest.mark.parametrize("cohort", ["cyclic", "cyclic:in-order"])
@pytest.mark.parametrize(("clients", "active"), [(7, 3), (6, 2), (5, 5), (4, 1)])
def test_cyclic_visits_everyone_equally(cohort, clients, active):
    found = drawn(cohort, 3 * clients, np.ones(clients), active)
    assert {len(each) for each in found} == {active}
    for first in range(2 * clients):  # any N rounds in a row
        often = Counter(i for each in found[first : first + clients] for i in each)
        assert often == dict.fromkeys(range(clients), active)


def test_cyclic_has_an_order_of_the_seed_or_of_the_ids():
    assert drawn("cyclic:in-order", 4, np.ones(7), 3) == [[0, 1, 2], [3, 4, 5], [0, 1, 6], [2, 3, 4]]
    first = {seed: drawn("cyclic", 4, np.ones(30), 3, seed) for seed in (0, 1)}
    assert first[0] != first[1]
    assert (
        drawn("cyclic", 20, np.ones(30), 3)[:10] == drawn("cyclic", 20, np.ones(30), 3)[10:]
    )  # one order for all passes


def test_weighted_draws_in_proportion_to_samples_without_replacement():
    """Exact inclusion probabilities: the sum over all ordered pairs of p_i p_j / (1 - p_i)."""
    p, rounds = SIZES / SIZES.sum(), 8000
    exact = np.zeros(5)
    for i, j in permutations(range(5), 2):
        exact[[i, j]] += p[i] * p[j] / (1 - p[i])
    assert math.isclose(exact.sum(), 2)
    often = Counter(i for each in drawn("weighted:samples", rounds) for i in each)
    for i in range(5):
        spread = math.sqrt(exact[i] * (1 - exact[i]) / rounds)
        assert abs(often[i] / rounds - exact[i]) < 4 * spread, i
    assert abs(exact[4] - 2 * p[4]) > 0.1  # 4 spreads, 0.02, tell it from proportions themselves, 1 for client 4


def trace(tmp_path: Path, text: str, name: str = "trace.csv") -> str:
    (tmp_path / name).write_text(text)
    return f"availability:{tmp_path / name}"


SPANS = [(0, 1, 6), (1, 1, 2), (1, 5, 6), (2, 2, 400), (3, 4, 400), (4, 4, 400), (2, 3, 8)]
CSV = "client, from, to\n" + "".join(f"{i},{a},{b}\n" for i, a, b in SPANS)


def test_availability_never_selects_someone_who_is_away(tmp_path):
    found = drawn(trace(tmp_path, CSV), 400)
    for t, each in enumerate(found, 1):
        there = {i for i, a, b in SPANS if a <= t <= b}
        assert set(each) <= there
        assert len(each) == min(2, len(there))
    often = Counter(i for each in found[6:] for i in each)  # 3 clients are there, each in 2 of 3 cohorts
    assert set(often) == {2, 3, 4}
    assert all(abs(n / 394 - 2 / 3) < 4 * math.sqrt(2 / 9 / 394) for n in often.values())
    spans = {str(i): [[a, b] for j, a, b in SPANS if j == i] for i in range(5)}
    assert drawn(trace(tmp_path, json.dumps(spans), "trace.json"), 400) == found


def test_a_sampler_that_draws_as_fixed_does_has_its_bits():
    def sample(round, rng, clients, active, history):
        return rng.choice(clients, active, replace=False, shuffle=False)

    ours, theirs = outcome(FedSpeed()), outcome(FedSpeed(), cohort=sample)
    for record in theirs[0]:
        assert len(record.pop("client_losses")) == len(record["cohort"])
    assert_same_bits(ours, theirs)


# What a sampler knows


class Watcher:
    """Keeps what it was shown; the answer does not depend on it."""

    def __init__(self):
        self.shown = {}

    def __call__(self, round, rng, clients, active, history):
        self.shown[round] = history.losses.copy(), history.seconds.copy(), list(history.rounds)
        with pytest.raises(ValueError, match="read-only"):
            history.losses[0] = 0.0
        return rng.choice(clients, active, replace=False)


@pytest.mark.parametrize("network", ["", "lte"])
def test_the_history_is_the_replies_that_were_counted(network):
    """Against losses of clients that take their turns alone, and times by the clock's own formula."""
    data, model = digits()
    watcher, settings = (
        Watcher(),
        {"rounds": 4, "active": 5, "local_epochs": 1, "batch_size": 10, "dropout": 0.4, "engine": "loop"},
    )
    with simulate(FedAvg(), model, data, cohort=watcher, network=network, **settings) as run:
        records = list(run)
    losses, seconds = np.full(data.clients, np.nan), np.full(data.clients, np.nan)
    for record in records:
        known, times, rounds = watcher.shown[record.round]
        np.testing.assert_array_equal(known, losses)
        np.testing.assert_array_equal(times, seconds)
        assert len(rounds) == record.round - 1
        counted = [i for i in record.cohort if i not in record.dropped]
        assert record.train_loss == pytest.approx(np.mean(record.client_losses), rel=1e-12)
        losses[counted] = record.client_losses
        if network:
            turns = zip(counted, record.client_flops, record.client_bytes_up, strict=True)
            down = record.bytes_down / len(record.cohort)
            seconds[counted] = [Clock("lte").client(i, down, flops, up) for i, flops, up in turns]
    assert any(record.dropped for record in records)
    first = [i for i in records[0].cohort if i not in records[0].dropped]
    for client, loss in zip(first, records[0].client_losses, strict=True):
        with simulate(FedAvg(), model, data, cohort=lambda *_, i=client: [i], **{**settings, "dropout": 0.0}) as alone:
            assert next(iter(alone)).train_loss == loss


def test_losses_are_stored_only_for_a_sampler(tmp_path, choice):
    run_config(Config.from_dict({**SMALL, "rounds": 1}), tmp_path / "a")
    assert "client_losses" not in (tmp_path / "a" / "rounds.jsonl").read_text()
    run_config(config(choice, rounds=1), tmp_path / "b")
    (record,) = RunDir(tmp_path / "b").records()
    assert len(record.client_losses) == 3
    assert Record.from_dict(json.loads(json.dumps(record.to_dict()))) == record


def test_observers_are_given_the_setting_as_text(choice):
    shown = []

    class Reader(Observer):
        def started(self, run, config):
            shown.append(json.loads(json.dumps(config))["cohort"])

    data, model = digits()
    for cohort in (f"{choice}:PowerOfChoice", Watcher(), "cyclic"):
        with simulate(FedAvg(), model, data, cohort=cohort, rounds=1, local_steps=1, observers=[Reader()]) as run:
            run.step()
    assert shown == ["choice.py:PowerOfChoice", "Watcher", "cyclic"]


# Resumed, forked, replayed, on every back end


def test_killed_and_resumed_is_the_straight_run(tmp_path, choice):
    """A real process, killed by SIGKILL after its fourth round; what the sampler knew is restored from the records."""
    run_config(config(choice), tmp_path / "whole")
    (choice.parent / "config.toml").write_text(config(choice).to_toml())
    program = (
        "import os, signal, sys\nfrom pathlib import Path\nfrom fedspeed import Observer\n"
        "from fedspeed.config.config import Config\nfrom fedspeed.runs.launch import run_config\n"
        "class Kill(Observer):\n    def round(self, record, run):\n"
        "        if record.round == 4:\n            os.kill(os.getpid(), signal.SIGKILL)\n"
        "run_config(Config.from_toml(Path(sys.argv[1])), sys.argv[2], observers=[Kill()])\n"
    )
    words = [sys.executable, "-c", program, str(choice.parent / "config.toml"), str(tmp_path / "a")]
    done = subprocess.run(
        words, capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    choice.unlink()
    resume(tmp_path / "a", allow_code=True)
    assert differences(tmp_path / "whole", tmp_path / "a") == []
    assert main(["verify", str(tmp_path / "a"), "--all", "--allow-code"]) == 0
    assert main(["verify", str(tmp_path / "a"), "--allow-code"]) == 0


def test_a_fork_knows_the_rounds_it_shares(tmp_path, choice):
    changes = {"network": "lte", "stragglers": 0.3, "dropout": 0.2}
    run_config(config(choice, **changes), tmp_path / "a")
    whole = RunDir(tmp_path / "a").records()
    fork(tmp_path / "a", 5, tmp_path / "same", {}, allow_code=True)
    assert [r.cohort for r in RunDir(tmp_path / "same").records()] == [r.cohort for r in whole]
    fork(tmp_path / "a", 5, tmp_path / "b", {"lr": 0.5}, allow_code=True)
    assert [r.cohort for r in RunDir(tmp_path / "b").records()[:6]] == [r.cohort for r in whole[:6]]
    with pytest.raises(Stop):
        fork(tmp_path / "a", 3, tmp_path / "c", {"lr": 0.5}, allow_code=True, observers=[stop_after(6)])
    resume(tmp_path / "c", allow_code=True)
    fork(tmp_path / "a", 3, tmp_path / "d", {"lr": 0.5}, allow_code=True)
    assert differences(tmp_path / "c", tmp_path / "d") == []
    for name in "abcd":
        assert main(["verify", str(tmp_path / name), "--all", "--allow-code"]) == 0
        last = RunDir(tmp_path / name).records()[-1]
        client = next(i for i in last.cohort if i not in last.dropped)
        words = ["replay", str(tmp_path / name), "--round", "8", "--client", str(client), "--allow-code"]
        assert main(words) == 0


def test_an_object_of_the_caller_s_resumes_with_the_same_object_only(tmp_path, choice):
    space: dict = {}
    exec(CHOICE, space)
    sampler = space["PowerOfChoice"]
    sampler.__module__ = __name__
    data, model = digits()

    def run(cohort, **more):
        settings = {"rounds": 6, "active": 3, "local_epochs": 1, "batch_size": 10, "cohort": cohort}
        return simulate(FedSpeed(), model, data, **settings, **more)

    whole = run(sampler(5))
    cohorts = [record.cohort for record in whole]
    with run(sampler(5), out=tmp_path / "a") as first:
        for record in first:
            if record.round == 3:
                break
    with pytest.raises(UserError, match=r"holds another run: expected cohort the object .*d=5.*found .*d=6"):
        run(sampler(6), out=tmp_path / "a", resume=True)
    with run(sampler(5), out=tmp_path / "a", resume=True) as again:
        list(again)
    assert [record.cohort for record in RunDir(tmp_path / "a").records()] == cohorts
    assert torch.equal(again.x, whole.x)
    assert main(["resume", str(tmp_path / "a")]) == 2


@pytest.mark.parametrize("cohort", ["weighted:samples", "choice"])
def test_two_workers_give_the_bits_of_serial(cohort, choice, quick_workers):
    given = f"{choice}:PowerOfChoice" if cohort == "choice" else cohort
    here = outcome(FedSpeed(), cohort=given, backend="serial")
    assert_same_bits(here, outcome(FedSpeed(), cohort=given, backend="process", workers=2))


def test_an_object_that_cannot_be_pickled_runs_in_workers(quick_workers):
    here = outcome(FedSpeed(), cohort=lambda round, rng, clients, active, history: [round, 0], backend="serial")
    there = outcome(FedSpeed(), cohort=lambda round, rng, *_: [0, round], backend="process", workers=2)
    assert_same_bits(here, there)


@pytest.mark.parametrize("cohort", ["cyclic", "weighted:samples", "availability", "choice"])
@pytest.mark.parametrize("method", ["fedspeed", "scaffold"])
def test_the_mean_over_all_clients_is_that_mean(cohort, method, tmp_path, choice, capsys):
    """The server's running mean against the states of all clients, by `verify`, however many were active."""
    given = {"choice": {"name": f"{choice}:PowerOfChoice"}}.get(cohort, cohort)
    if cohort == "availability":
        given = trace(tmp_path, "client,from,to\n0,1,5\n1,1,3\n2,2,5\n3,5,5\n4,5,5\n")
    tables = {**SMALL, "rounds": 5, "method": method, "cohort": given, "dropout": 0.2}
    run_config(Config.from_dict(tables), tmp_path / "a")
    assert main(["verify", str(tmp_path / "a"), "--all", "--allow-code"]) == 0
    assert "is the mean of all clients'" in capsys.readouterr().out


def test_the_cost_of_a_search_is_known_before_it(choice):
    """The gradients of a cohort by name are those of its records; of a sampler, those of cohorts drawn uniformly."""
    data, model = digits()
    settings = {"rounds": 4, "active": 3, "local_epochs": 1, "batch_size": 10}
    for cohort in ("cyclic", "weighted:samples"):
        with simulate(FedAvg(), model, data, cohort=cohort, **settings) as run:
            spent = np.cumsum([record.grad_evals for record in run])
        assert gradients(FedAvg(), Plan(cohort=cohort, **settings), data.sizes) == spent.tolist()
    own, fixed = (Plan(cohort=cohort, **settings) for cohort in (f"{choice}:PowerOfChoice", "fixed"))
    assert gradients(FedAvg(), own, data.sizes) == gradients(FedAvg(), fixed, data.sizes)


# A trace is a part of the run


def test_a_trace_is_copied_and_resumed_without_permission(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("who.csv").write_text("client,from,to\n0,1,9\n4,1,2\n5,3,9\n")
    Path("run.toml").write_text('cohort = "availability:who.csv"\n')
    tables = {**Config.from_toml(Path("run.toml")).to_dict(), **SMALL, "rounds": 6}
    del tables["augment"]
    run_config(Config.from_dict({**tables, "cohort": "availability:who.csv"}), "whole")
    with pytest.raises(Stop):
        run_config(Config.from_dict({**tables, "cohort": "availability:who.csv"}), "a", observers=[stop_after(3)])
    Path("who.csv").write_text("client,from,to\n7,1,9\n")
    with pytest.warns(UserWarning, match=r"who\.csv was changed since the run began"):
        resume(Path("a"))
    assert differences(Path("whole"), Path("a")) == []
    assert [record.cohort for record in RunDir(Path("a")).records()] == [[0, 4]] * 2 + [[0, 5]] * 4
    with (Path("a") / "config.toml").open() as file:
        copy = next(line for line in file if "availability:code/who-" in line)
    copied = Path("a") / copy.partition("availability:")[2].strip().strip('"')
    with pytest.warns(UserWarning, match="was changed"), pytest.raises(UserError, match="none in round 10"):
        resume(Path("a"), rounds=10)
    copied.write_text("client,from,to\n0,1,99\n")
    with (
        pytest.warns(UserWarning, match="was changed"),
        pytest.raises(UserError, match=r"was changed .expected digest"),
    ):
        resume(Path("a"), rounds=10)


TRACES = [
    ("", r"expected CSV with the columns client,from,to.*empty file"),
    ("client,start,to\n0,1,2\n", r"expected CSV with the columns client,from,to.*client, start, to"),
    ("client,from,to\n0,1\n", "expected CSV with the columns client,from,to"),
    ("client,from,to\n0,1,x\n", "invalid literal"),
    ("client,from,to\n0,1.5,3\n", "invalid literal"),
    ("client,from,to\n9,1,9\n", "expected a client of 0 to 8 and rounds 1 <= from <= to, found client 9 from 1 to 9"),
    ("client,from,to\n-1,1,9\n", "found client -1 from 1 to 9"),
    ("client,from,to\n0,0,9\n", "found client 0 from 0 to 9"),
    ("client,from,to\n0,5,4\n", "found client 0 from 5 to 4"),
    ("client,from,to\n0,1,2\n1,4,9\n", "at least one client in each of the 8 rounds, found none in round 3"),
    ("client,from,to\n0,1,7\n", "found none in round 8"),
    ("client,from,to\n", "found none in round 1"),
    ("client,from,to\n0,1,99999999999999999999\n", "expected CSV"),
    ('{"0": [[1, 8]]', "expected CSV.*or JSON"),
    ("[]", "a list"),
    ('{"0": [[1, "8"]]}', r"\[1, '8'\] of client 0"),
    ('{"0": [[1, true]]}', r"\[1, True\] of client 0"),
    ('{"zero": [[1, 8]]}', "invalid literal"),
    ('{"0": [1, 8]}', "expected CSV.*or JSON"),
    ('{"0": 8}', "expected CSV.*or JSON"),
]


@pytest.mark.parametrize(("text", "says"), TRACES)
def test_a_broken_trace_is_one_line_and_leaves_nothing(text, says, tmp_path):
    given = trace(tmp_path, text, "trace.json" if text[:1] in ("{", "[") else "trace.csv")
    with pytest.raises(UserError, match=says) as found:
        run_config(Config.from_dict({**SMALL, "cohort": given}), tmp_path / "a")
    assert "\n" not in str(found.value)
    assert not (tmp_path / "a").exists()


def test_a_trace_that_is_no_text(tmp_path):
    (tmp_path / "trace.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="expected CSV"):
        run_config(Config.from_dict({**SMALL, "cohort": f"availability:{tmp_path}/trace.csv"}), tmp_path / "a")


# Refusals

WRONG = [
    ("cyclical", "unknown cohort 'cyclical'; did you mean 'cyclic'?"),
    ("weighted", "cohort weighted: expected weighted:samples, found 'weighted'"),
    ("weighted:loss", "cohort weighted: expected weighted:samples, found 'weighted:loss'"),
    ("cyclic:", "cohort cyclic: expected cyclic or cyclic:in-order, found 'cyclic:'"),
    ("fixed:3", "cohort fixed: expected fixed, found 'fixed:3'"),
    ("availability", "cohort availability: expected availability:FILE, found 'availability'"),
    ("availability:", "cohort availability: expected availability:FILE, found 'availability:'"),
    ("availability:gone.csv", "there is no file"),
    ("gone.py:sample", "there is no file"),
    ("gone.py", "cohort gone.py: expected path/to/file.py:sample"),
]


@pytest.mark.parametrize(("given", "says"), WRONG)
def test_a_wrong_name_is_one_line(given, says, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["run", "--cohort", given, "--out", "a"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("fedspeed: error: ")
    assert says in err
    assert err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


ANSWERS = [
    ("[1, 1]", "found client 1 twice"),
    ("[]", "found none"),
    ("[0, 9]", "found client 9"),
    ("[-1]", "found client -1"),
    ("[10**30]", "found client 1000"),
    ("[0.0, 1.0]", r"found \[0.0, 1.0\]"),
    ("[True]", r"found \[True\]"),
    ("['0']", r"found \['0'\]"),
    ("'01'", "found '01'"),
    ("3", "found 3"),
    ("None", "found None"),
    ("np.array([[0], [1]])", "found array"),
    ("asked.append(round) or [len(asked) % clients]", "when asked again; draw from rng alone"),
    ("1 / 0", r"failed in round 1: ZeroDivisionError: division by zero \(.*own\.py, line 4\)"),
]


@pytest.mark.parametrize(("answer", "says"), ANSWERS)
def test_a_wrong_answer_is_refused_before_anything_is_written(answer, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text(
        f"import numpy as np\nasked = []\ndef sample(round, rng, clients, active, history):\n    return {answer}\n"
    )
    with pytest.raises(UserError, match=says) as found:
        run_config(Config.from_dict({**SMALL, "clients": 9, "cohort": "own.py:sample"}), "a")
    assert str(found.value).startswith("cohort own.py:sample: ")
    assert "\n" not in str(found.value)
    assert not Path("a").exists()


def test_a_wrong_answer_of_a_later_round_ends_the_run_which_can_be_read(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text("def sample(round, rng, clients, active, history):\n    return [0] * (round < 3)\n")
    with pytest.raises(UserError, match="in round 3, found none"):
        run_config(Config.from_dict({**SMALL, "cohort": "own.py:sample"}), "a")
    assert [record.cohort for record in RunDir(Path("a")).records()] == [[0], [0]]


def test_what_is_no_sampler_is_refused(tmp_path):
    (tmp_path / "own.py").write_text("sample = 3\nclass Sampler:\n    def __init__(self, d): pass\n")
    for given, says in (
        ({"name": f"{tmp_path}/own.py:sample"}, "expected a function or a class, found 3"),
        ({"name": f"{tmp_path}/own.py:Sampler"}, "missing 1 required positional argument: 'd'"),
        (
            {"name": f"{tmp_path}/own.py:Sampler", "d": 1},
            "failed in round 1: TypeError: 'Sampler' object is not callable",
        ),
        ({"name": f"{tmp_path}/own.py:Other"}, "Other"),
        ({"name": "cyclic", "d": 3}, "expected options only beside path/to/file.py:NAME, found d"),
        (7, "cohort: expected a name"),
        ("given", "found objects that were given to fedspeed.simulate"),
    ):
        with pytest.raises(UserError, match=says):
            run_config(Config.from_dict({**SMALL, "cohort": given}), tmp_path / "a")
    with pytest.raises(UserError, match=r"Config: cohort must be a name or path/to/file.py:NAME"):
        Config(cohort=lambda *_: [0])
    with pytest.raises(UserError, match=r"found <class 'test_cohort.Watcher'>"):
        Plan(cohort=Watcher)


@pytest.mark.parametrize("cohort", ["bernoulli", "cyclic", "weighted:samples", "choice"])
def test_privacy_is_counted_for_fixed_cohorts_alone(cohort, choice):
    given = f"{choice}:PowerOfChoice" if cohort == "choice" else cohort
    with pytest.raises(
        UserError, match=r"needs cohort = fixed, got .*proven for cohorts of a fixed size that are drawn"
    ):
        Config(method=DP(FedAvg()), cohort=given)


def test_cohorts_that_favour_some_are_named_so(tmp_path, choice, capsys):
    quick = ["--clients", "9", "--active", "3", "--rounds", "1", "--local-steps", "1", "--model", "linear"]
    for number, (cohort, biased) in enumerate((("cyclic", False), ("bernoulli", False), ("weighted:samples", True),
                                               (f"{choice}:PowerOfChoice", True))):  # fmt: skip
        out = tmp_path / str(number)
        assert main(["run", *quick, "--cohort", cohort, "--out", str(out)]) == 0
        named = f"cohort {cohort.rpartition('/')[2]}"
        said = " ".join(capsys.readouterr().out.split())
        assert f"{named} (clients are not drawn uniformly)" in said if biased else f"{named} fedspeed" in said
        assert ("cohort" in json.loads((out / "summary.json").read_text())) == biased
        assert main(["compare", str(out), "--out", str(tmp_path / f"c{number}")]) == 0
        assert ("not drawn uniformly" in " ".join(capsys.readouterr().out.split())) == biased
