"""Trackers, each installed and reading back what it was given: every number of every round once, whatever happened."""

from __future__ import annotations

import json
import struct
import tomllib
from pathlib import Path

import pytest
import readers
from watching import Stop, stop_after

from fedspeed import Config, run_config
from fedspeed.cli import main
from fedspeed.report.diff import differences
from fedspeed.runs.launch import resume

pytestmark = pytest.mark.slow
TRACKERS = ["tensorboard", "wandb", "mlflow"]
SMALL = {"rounds": 5, "clients": 5, "active": 2, "local_steps": 1, "batch_size": 2, "backend": "serial", "seed": 3,
         "dropout": 0.3, "eval_every": 2, "checkpoint_every": 2,
         "method": {"name": "fedspeed", "rho": 0.05}, "data": "digits"}  # fmt: skip


@pytest.fixture(params=TRACKERS)
def tracker(request, tmp_path, monkeypatch) -> str:
    """A tracker that writes to a place of its own, empty."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/own.db")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    monkeypatch.setenv("WANDB_CACHE_DIR", str(tmp_path / "cache"))
    pytest.importorskip(request.param, reason=f"pip install {request.param}")
    return request.param


def held(tracker: str, place: Path | None = None) -> dict[str, readers.Held]:
    """What it holds, where it was told to write, or in its own place."""
    if tracker == "tensorboard":
        return readers.tensorboard(place or Path("runs"))
    if tracker == "wandb":
        return readers.wandb(place or Path())
    return readers.mlflow(f"sqlite:///{(place / 'mlflow.db' if place else Path('own.db')).resolve()}")


def single(value: float) -> float:
    return struct.unpack("f", struct.pack("f", value))[0]


def same(found: readers.Held, out: Path, tracker: str) -> bool:
    """Whether a tracker holds what the run's files say, no more and no less."""
    wanted: dict = {}
    for line in (out / "rounds.jsonl").read_text().splitlines():
        plain = json.loads(line)
        step = plain.pop("round")
        tables = ("metrics", "signs")
        named = {f"{table}/{name}": value for table in tables for name, value in plain.pop(table, {}).items()}
        for name, value in (plain | named).items():
            number = len(value) if isinstance(value, list) else value
            if number is not None:
                readers.put(wanted, step, name, single(number) if tracker == "tensorboard" else number)
    assert found.rounds == wanted
    config = readers.flat(tomllib.loads((out / "config.toml").read_text()))
    for key, value in config.items():
        assert found.parameters[key] == value or str(found.parameters[key]) == str(value), key
    assert found.tags == {"method": "fedspeed", "data": "digits", "seed": "3"}
    return True


def test_a_tracker_reads_back_what_was_logged(tracker):
    run_config(Config.from_dict(SMALL), Path("runs/a"), observers=[tracker])
    (found,) = held(tracker).values()
    assert same(found, Path("runs/a"), tracker)
    assert any("test_loss" not in numbers for numbers in found.rounds.values())  # rounds that were not evaluated
    run_config(Config.from_dict(SMALL), Path("runs/b"))
    assert differences(Path("runs/a"), Path("runs/b")) == []


def test_a_resumed_run_is_in_it_once(tracker):
    """Round 3 comes after the checkpoint of round 2: it is run again, and its times are others."""
    out = Path("runs/a")
    with pytest.raises(Stop):
        run_config(Config.from_dict(SMALL), out, observers=[tracker, stop_after(3)])
    resume(out, observers=[tracker])
    resume(out, rounds=7, observers=[tracker])
    (found,) = held(tracker).values()
    assert sorted(found.rounds) == [1, 2, 3, 4, 5, 6, 7]
    assert same(found, out, tracker)


def test_exported_runs_are_the_same_and_there_once(tracker):
    for name in ("a", "b"):
        run_config(Config.from_dict(SMALL | {"rounds": 3, "lr": 0.1 if name == "a" else 0.2}), Path("runs", name))
    place = Path("exported")
    for given in (["runs"], ["runs/a", "runs/b"]):  # the second replaces the first
        assert main(["export", *given, "--to", tracker, "-o", str(place)]) == 0
    found = held(tracker, place)
    assert len(found) == 2
    by_rate = {str(run.parameters["lr"]): run for run in found.values()}
    assert same(by_rate["0.1"], Path("runs/a"), tracker)
    assert same(by_rate["0.2"], Path("runs/b"), tracker)


def test_a_tracker_that_is_down_stops_nothing(tracker, monkeypatch):
    Path("file").write_text("not a folder")
    monkeypatch.setenv("WANDB_DIR", "file")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    Path("runs/a").mkdir(parents=True)
    Path("runs/a/tensorboard").write_text("not a folder")
    with pytest.warns(UserWarning, match=r"observer \w+\.started failed .*; it is dropped, the run continues"):
        run_config(Config.from_dict(SMALL), Path("runs/a"), observers=[tracker])
    run_config(Config.from_dict(SMALL), Path("runs/b"))
    assert differences(Path("runs/a"), Path("runs/b")) == []


def test_an_export_that_cannot_be_written_is_one_line(tracker, capsys):
    run_config(Config.from_dict(SMALL | {"rounds": 2}), Path("runs/a"))
    Path("file").write_text("not a folder")
    assert main(["export", "runs/a", "--to", tracker, "-o", "file/x"]) == 2
    told = capsys.readouterr()
    assert told.err.startswith(f"fedspeed: error: {tracker} could not be written (")
    assert told.err.count("\n") == 1
    assert told.out == ""


def test_nothing_but_the_result_is_printed(tracker, capsys):
    """With --json somebody reads standard output."""
    assert main(["run", "--rounds", "2", "--out", "runs/a", "--log", tracker, "--json"]) == 0
    told = capsys.readouterr()
    assert json.loads(told.out)["rounds"] == 2
    assert told.err == ""


def test_runs_side_by_side_are_all_in_it(tracker):
    """The first of them may find a tracker without its tables."""
    given = ["compare", "fedavg", "fedspeed", "--rounds", "2", "--clients", "5", "--active", "2", "--local-steps", "1"]
    assert main([*given, "--seeds", "1", "--jobs", "2", "--out", "runs", "--log", tracker, "--quiet"]) == 0
    assert sorted(len(run.rounds) for run in held(tracker).values()) == [2, 2]
