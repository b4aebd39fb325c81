"""The benchmark harness works: the arithmetic of its ratios, its models, its protocol. Never how fast anything is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch

import fedspeed
from fedspeed.models.trim import untrim

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks import checkpoint, machine, report, start, stock  # noqa: E402
from benchmarks.contenders.ours import MODELS  # noqa: E402
from benchmarks.contests import CONTESTS, OURS, Entry  # noqa: E402
from benchmarks.goals import goals  # noqa: E402
from benchmarks.runner import Contender, Failed  # noqa: E402
from benchmarks.stats import ratio  # noqa: E402
from benchmarks.timing import Outcome, Timed  # noqa: E402
from benchmarks.workloads import WORKLOADS, Part  # noqa: E402

STARTED = {"run": {"median": 1.2}, "version": {"median": 0.4}}
linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the benchmarks read /proc")


@pytest.mark.parametrize("name", ["resnet18_gn", "cnn", "mlp"])
def test_stock_models_are_our_models(name):
    shape = (64,) if name == "mlp" else (3, 32, 32)
    x, y = np.zeros((2, *shape), "f4"), np.array([0, 9])
    ours_name, options = MODELS[name]
    ours = fedspeed.build_model(ours_name, fedspeed.Federated.from_arrays(x, y, clients=[[0, 1]]), **options).double()
    plain = stock.build(name).double()
    full = untrim(ours)
    assert [p.shape for p in plain.parameters()] == [a.shape for a in full.values()]
    with torch.no_grad():
        for p, a in zip(plain.parameters(), full.values(), strict=True):
            p.copy_(a)
    inputs = torch.randn(3, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(plain(inputs), ours(inputs), rtol=0, atol=1e-10)


def test_ratio_of_pairs():
    slow, fast = [2.0, 20.0, 2.2, 2.0, 2.1], [1.0, 10.0, 1.1, 1.0, 1.05]  # the second pair was disturbed together
    found = ratio(slow, fast)
    assert (found.value, found.low, found.high) == pytest.approx((2, 2, 2))
    wide = ratio([1.0, 3.0, 2.0], [1.0, 1.0, 1.0])
    assert wide.low < wide.value < wide.high
    with pytest.raises(ValueError, match="pairs"):
        ratio([1.0], [1.0, 2.0])


def test_every_contest_compares_with_a_contender_of_its_own():
    for contest in CONTESTS.values():
        names = [entry.name for entry in contest.entries]
        assert len(set(names)) == len(names)
        assert all(entry.against in (*names, "") for entry in contest.entries)
        assert contest.workload in WORKLOADS
        whole = WORKLOADS[contest.workload]
        for part in (contest.quick_part, contest.usual_part):
            assert part.active <= whole.active
            assert part.epochs <= whole.epochs
    only = CONTESTS["W1"].only(["Flower"], peers=True)
    assert [entry.name for entry in only.entries] == [OURS, "Flower"]


def test_goals_tell_met_from_missed_and_from_not_measured():
    contest = CONTESTS["W2"].only([""], peers=False)
    rows = [Timed(entry, seconds=[1.0 if entry.name == OURS else 1.2] * 3) for entry in contest.entries]
    rows[2].seconds = []
    outcome = Outcome(contest, 10, 1, rows, foreign=[0.0, 0.5, 0.0])
    found = {goal.about: goal for goal in goals({"W2": outcome}, None, STARTED)}
    best = found["W2: times faster than the best of the others"]
    assert best.met is False
    assert "1.20" in best.found
    assert "without bare loop 2x1" in best.found
    assert found["start-up: `fedspeed run --data digits` to its first round done"].met is True
    assert found["start-up: `fedspeed --version`"].met is False
    assert found["W1: times faster than the best of the others"].met is None
    assert "1 of 3" in report.busy(0.0, [outcome])[0]
    assert report.busy(0.0, [Outcome(contest, 10, 1, rows, foreign=[0.0])]) == []
    assert report.table([outcome]).count("\n") == 1 + len(rows)


def test_every_goal_is_about_rows_that_exist():
    """A goal whose contender is renamed would be `not measured` for ever."""
    held = {
        name: Outcome(contest, 1, 1, [Timed(entry, seconds=[1.0] * 3) for entry in contest.entries])
        for name, contest in CONTESTS.items()
    }
    memory = {"peaks": [{"failure": "", "rss": 1, "segments": 1, "clients": 500}], "growth": 0.0, "full": True}
    each = {"written": 1, "share": 0.01}
    many = {"first": 1.0, "last": 1.0, "share": 0.01}
    waited = {"default": each, "every round": each}
    found = goals(held, memory, STARTED, waited, many, {"step": 3.0, "limit": 2.0})
    assert [goal.about for goal in found if goal.met is None] == []
    assert len({goal.about for goal in found}) == len(found)
    wanted = {goal.about: goal.wanted for goal in found}
    assert wanted["W5: bare loop 2x1 / fedspeed: FedAvg"] == ">= 4"
    assert wanted["W5-fedspeed: bare loop 2x1, two gradients per step / fedspeed: FedSpeed"] == ">= 3.6"
    assert [goal.met for goal in found if "limit of its profile" in goal.about] == [True]
    missed = goals(held, memory, STARTED, waited, many, {"step": 3.1, "limit": 2.0})
    assert [goal.met for goal in missed if "limit of its profile" in goal.about] == [False]


@linux
def test_a_process_tree_is_counted_once():
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        pids = [process.pid for process in machine.tree(os.getpid())]
        assert child.pid in pids
        assert len(set(pids)) == len(pids)
        rss, pss = (sum(machine.tree_memory(child.pid, proportional=p)) for p in (False, True))
        assert 0 < pss <= 1.1 * rss
        assert machine.tree_peak(child.pid) >= 0.9 * rss
        before, handle = machine.tree_segments(os.getpid()), os.memfd_create("test")
        os.write(handle, bytes(10**6))
        assert machine.tree_segments(os.getpid()) - before == pytest.approx(10**6, abs=4096)
        os.close(handle)
    finally:
        child.communicate(b"\n")


@linux
def test_a_contender_that_ends_says_why(tmp_path):
    contender = Contender(Entry("broken", "no_such_program"), "smoke", Part(), tmp_path / "log")
    with pytest.raises(Failed, match="No module named"):
        contender.ready()
    contender.close()


@pytest.mark.slow
@linux
def test_a_contest_from_start_to_finish(tmp_path):
    command = [sys.executable, "-m", "benchmarks", "--only", "smoke", "--pairs", "2", "--out", str(tmp_path / "out")]
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert "| smoke | bare loop 2x1 |" in done.stdout
    (path,) = (tmp_path / "out").glob("*.json")
    result = json.loads(path.read_text())
    (contest,) = result["contests"]
    assert [row["failure"] for row in contest["contenders"]] == ["", "", ""]
    assert {row["parameters"] for row in contest["contenders"]} == {4810}
    assert all(len(row["seconds"]) == 2 and 0 <= row["accuracy_after"] <= 1 for row in contest["contenders"])
    assert len(contest["cores_used_by_others"]) == 2
    assert result["environment"]["torch"] == torch.__version__
    assert str(ROOT) not in path.read_text().replace(" ".join(command[1:]), "")


def test_waiting_for_checkpoints_is_timed_round_by_round(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = checkpoint.waits("smoke", every=1, rounds=3)
    assert found["written"] == len(found["seconds"]) == len(found["waited"]) == 3
    assert 0 < found["share"] == pytest.approx(sum(found["waited"]) / sum(found["seconds"]))
    assert not list((tmp_path / "fedspeed-bench").iterdir())  # the run directory is gone


def test_the_goal_for_checkpoints_needs_one_to_have_been_due():
    each = {"written": 1, "share": 0.01}
    goal = goals({}, None, None, {"default": each, "every round": each})[-2]
    assert goal.met is True
    assert "1.00%" in goal.found
    assert goals({}, None, None, {"default": {**each, "written": 0}, "every round": each})[-2].met is None


def test_many_clients_are_timed_by_the_clock(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = checkpoint.crowd(clients=60, active=5, rounds=12)
    assert 5 < found["touched"] <= 60
    assert 0 < found["first_reported"] <= found["first"]
    assert found["share"] > 0  # of a busy machine it may exceed 1: rounds and waits are timed apart
    assert goals({}, None, None, None, {**found, "first": 1.0, "last": 1.1})[-1].met is True
    assert goals({}, None, None, None, {**found, "first": 1.0, "last": 1.3})[-1].met is False
    assert goals({}, None, None)[-1].met is None


def test_scale_measures_what_it_says(tmp_path):
    from benchmarks import scale

    case = scale.Case("scaffold", 40, 10, 4, recorded=True)
    row = {**asdict(case), **scale.run(case, tmp_path)}
    assert row["parameters"] == 27
    assert 10 <= row["touched"] <= 40
    assert row["peak_rss"] >= row["imported_rss"] > 0
    assert len((tmp_path / "run" / "rounds.jsonl").read_text().splitlines()) == 4
    assert scale.table([row]).splitlines()[2].startswith("| scaffold | 40 | 10 | memory | yes |")


def test_mapped_measures_what_it_says(tmp_path, monkeypatch, quick_workers):
    from benchmarks import mapped

    (tmp_path / "x").mkdir()
    mapped.write(tmp_path / "x", 0.005, 0.002)
    monkeypatch.setattr(mapped, "PLAN", {**mapped.PLAN, "rounds": 3, "local_steps": 2})
    assert len(list((tmp_path / "x").glob("x-*.npy"))) == 3
    assert sum(file.stat().st_size for file in (tmp_path / "x").glob("x-*.npy")) == pytest.approx(5e6, rel=0.01)
    found = [mapped.run(tmp_path / "x", on) for on in (True, False)]
    assert [row["pictures"] for row in found] == [int(5e6 / mapped.PICTURE)] * 2
    row = {"gigabytes": 0.005, "mapped": True, **found[0], "peak_rss": 1e9, "peak_pss": 5e8}
    assert mapped.table([row]).splitlines()[2].startswith("| 406 | 0.005 | on disk |")


MEASURED = ROOT / "benchmarks" / "results" / "start"


def test_the_page_on_the_start_shows_what_was_measured(tmp_path):
    page = (ROOT / "docs" / "explanation" / "paper-scale.md").read_text("utf-8")
    for table in start.tables(MEASURED):
        assert table in page, "python -m benchmarks.start"
    for file in MEASURED.glob("*.jsonl"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    assert start.draw(tmp_path).read_bytes().startswith(b"\x89PNG")


def test_the_common_mode_is_where_the_last_layer_is_and_as_curved_as_it_says():
    """Moving the weights by u m^T / ||m|| moves the outputs of f by u (m.f) / ||m||: the curvature along it, picture by
    picture, in NumPy; and by `common_mode` from means alone, which is near where pictures hardly differ."""
    rng = np.random.default_rng(0)
    x = (3 + 0.05 * rng.normal(size=(60, 6))).astype("float32")
    data = fedspeed.Federated.from_arrays(x, rng.integers(0, 4, 60), clients=[list(range(60))])
    run = fedspeed.simulate("fedavg", torch.nn.Sequential(torch.nn.Linear(6, 4)), data, rounds=1, active=1)
    v, form = start.common_mode(run, run.x)
    W, b = (p.detach().double().numpy() for p in run.model.parameters())
    logits = x @ W.T + b
    p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    m = x.mean(0, dtype="float64")
    u = v.numpy()[:24].reshape(4, 6) @ m / np.linalg.norm(m)
    assert np.linalg.norm(u) == pytest.approx(1)
    variance = p @ u**2 - (p @ u) ** 2
    expected = np.mean((x @ m / np.linalg.norm(m)) ** 2 * variance)
    flat = run.work.flat
    image = flat.hvp(run.x, v, torch.as_tensor(x), torch.as_tensor(data.y), run.work.loss)
    assert float(v @ image) == pytest.approx(expected, rel=1e-4)
    assert form == pytest.approx(expected, rel=0.05)
