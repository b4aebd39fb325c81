"""Runs of hours: made by one process each, chosen one by one, and seen while they last."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from fedspeed.cli import main
from fedspeed.config.config import Config
from fedspeed.errors import UserError
from fedspeed.reproduce import Reproduction
from fedspeed.reproduce.page import write_progress
from fedspeed.reproduce.recipes import find_recipe, merge, run_key, settings
from fedspeed.reproduce.runs import Run, Store, make


def runs(count: int) -> list[Run]:
    tables = merge(settings("smoke")["base"], {"rounds": 1, "method": {"name": "fedavg"}})
    configs = [Config.from_dict({**tables, "seed": seed}) for seed in range(count)]
    return [Run(run_key(config, "digits"), f"seed {config.seed}", config) for config in configs]


# --- a run is made once ---


def test_a_claim_is_one_process_s_until_the_run_is_stored(tmp_path):
    pytest.importorskip("fcntl")
    mine, other = Store(tmp_path), Store(tmp_path)
    with mine.claim("a") as ours, other.claim("a") as again, other.claim("b") as another:
        assert (ours, again, another) == (True, False, True)
    with other.claim("a") as ours:
        assert ours, "let go of"
        other.put({"key": "a", "measures": {}})
    assert [path.name for path in other.work.glob(".*.lock") if path.name != ".runs.lock"] == [".b.lock"]


def test_a_result_that_was_stored_later_is_found_in_either_place(tmp_path):
    store, result = Store(tmp_path), {"key": "a", "measures": {}}
    assert store.results() == {}
    assert store.later("a", store.read_at) is None
    Store(tmp_path).put(result)
    assert store.later("a", store.read_at) == result
    Store(tmp_path).pack()
    assert store.later("a", store.read_at) == result
    assert store.later("b", store.read_at) is None
    os.utime(store.packed, (0, 0))
    assert store.later("a", store.read_at) is None, "older than what is known: not read again"


def test_runs_that_others_make_or_have_made_are_left_to_them(tmp_path, quick_workers):
    pytest.importorskip("fcntl")
    busy, done, ours = runs(3)
    store, other, finished = Store(tmp_path), Store(tmp_path), []
    assert store.results() == {}
    theirs = {"key": done.key, "measures": {}, "told": "by another command"}
    other.put(theirs)
    with other.claim(busy.key):
        left = make([busy, done, ours], store, 1, lambda run, part, note: None, finished.append)
    assert left == [busy]
    assert finished == [done, ours]
    assert store.get(done.key) == theirs
    assert Store(tmp_path).get(ours.key)["status"] == "finished"
    assert Store(tmp_path).get(busy.key) is None


# --- order and choice ---


def labels(**chosen: str) -> list[str]:
    work = Reproduction("paper-2pct-mixed", Path("unused"))
    work._digests["cifar10"] = ("published", True)

    def wanted(cell) -> bool:
        return all(getattr(cell, name) == value for name, value in chosen.items())

    return [run.label for run in work.runs(find_recipe("table1"), wanted)]


def test_the_paper_s_setting_is_run_in_the_order_that_was_written_down():
    order = [
        "FedSpeed",
        "FedAvg",
        "FedCM",
        "FedDyn",
        "FedAdam",
        "SCAFFOLD",
        "FedProx",
        "FedADMM",
        "FedSpeed, usual start",
    ]
    told = [f"table1 {row} CIFAR-10 {split} seed 0" for split in ("IID", "Dir-0.6") for row in order]
    assert labels() == told
    assert labels(row="FedCM") == [told[2], told[11]]


@pytest.mark.parametrize(
    ("given", "told"),
    [(["--only", "FedSped"], "did you mean 'FedSpeed'"), (["--split", "dirichlet:0.5"], "dirichlet:0.6")],
)
def test_a_choice_of_nothing_is_refused(given, told, capsys, tmp_path):
    assert main(["reproduce", "fig1", "--preset", "smoke", *given, "--out", str(tmp_path)]) == 2
    assert told in capsys.readouterr().err


@pytest.mark.slow
def test_a_choice_makes_those_runs_only(tmp_path, capsys):
    command = ["reproduce", "fig1", "--preset", "smoke", "--seeds", "1", "--set", "rounds=1", "--out", str(tmp_path)]
    assert main([*command, "--only", "FedCM", "--split", "iid", "--quiet"]) == 0
    (result,) = Store(tmp_path).results().values()
    assert (result["config"]["method"]["name"], result["config"]["split"]) == ("fedcm", "iid")


# --- how far they are ---


def begin(work: Reproduction, run: Run, accuracies: list[float | None]) -> None:
    place = work.store.work / run.key
    place.mkdir(parents=True)
    lines = [{"round": t, "seconds": 1800.0, "test_accuracy": a} for t, a in enumerate(accuracies, 1)]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (place / "rounds.jsonl").write_text(text + '{"round": 9')  # it was killed while it wrote


def test_progress_is_what_unfinished_runs_have_so_far(tmp_path):
    work = Reproduction("smoke", tmp_path)
    first, second = work.runs(find_recipe("fig1"))[:2]
    assert write_progress(work) is None
    assert not list(tmp_path.glob("progress*"))
    begin(work, first, [0.25, None, 0.61, 0.5])
    page = write_progress(work).read_text()
    (line,) = map(json.loads, (tmp_path / "progress.jsonl").read_text().splitlines())
    assert (line["key"], line["rounds"], line["of"], line["seconds"]) == (first.key, 4, 10, 7200)
    assert line["curve"] == [[1, 0.25], [3, 0.61], [4, 0.5]]
    row = next(text for text in page.splitlines() if "in progress |" in text)
    assert [cell.strip() for cell in row.split("|")[2:-1]] == [
        "in progress",
        "4 of 10",
        "50.00",
        "61.00",
        "3",
        "-",
        "2.0",
    ]
    assert page.count("not begun") > 1

    elsewhere = {**line, "key": second.key, "rounds": 7}
    (tmp_path / "progress.jsonl").write_text(json.dumps({**line, "rounds": 2}) + "\n" + json.dumps(elsewhere) + "\n")
    write_progress(work)
    lines = map(json.loads, (tmp_path / "progress.jsonl").read_text().splitlines())
    found = {line["key"]: line["rounds"] for line in lines}
    assert found == {first.key: 4, second.key: 7}, "what is here is further; what another machine has stays"

    rounds = {"round": [10], "test_accuracy": [0.7]}
    summary = {"rounds": 10, "seconds": 3600.0}
    for run in (first, second):
        done = {"key": run.key, "measures": {}, "status": "finished", "rounds": rounds, "summary": summary}
        work.store.put(done)
        told = write_progress(work)
    assert told is None
    assert not list(tmp_path.glob("progress*"))


def test_progress_of_data_that_are_not_here_stays(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDSPEED_CACHE", str(tmp_path / "empty"))
    (tmp_path / "progress.jsonl").write_text("kept")
    assert write_progress(Reproduction("paper-2pct-mixed", tmp_path)) is None
    assert (tmp_path / "progress.jsonl").read_text() == "kept"


def test_damaged_progress_is_named(tmp_path):
    (tmp_path / "progress.jsonl").write_text("[1]\n")
    with pytest.raises(UserError, match=r"progress.jsonl: expected lines about runs"):
        write_progress(Reproduction("smoke", tmp_path))
