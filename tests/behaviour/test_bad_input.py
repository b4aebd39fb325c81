"""Input that nobody should give: one line that says what to do, exit code 2, and nothing left behind."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from pathlib import Path

import pytest

from fedspeed.cli import main
from fedspeed.config.config import Config
from fedspeed.runs.directory import RunDir
from fedspeed.runs.launch import run_config

QUICK = ["--rounds", "2", "--clients", "4", "--active", "2", "--local-epochs", "1", "--quiet"]


pytestmark = pytest.mark.usefixtures("own_folder")


def refused(capsys, *words: str) -> str:
    """The one line of a command that ends with 2."""
    assert main(list(words)) == 2
    err = capsys.readouterr().err
    assert err.startswith("fedspeed: "), err
    assert err.count("\n") == 1, err
    assert "defect" not in err
    return err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--model mlp --set model.hidden=[9223372036854775808]", "model mlp: cannot be built"),
        ("--model mlp --set model.hidden=[1000000000000]", "model mlp: cannot be built"),
        ("--data cifar10 --model resnet18_gn --set model.groups=0 --data-dir nowhere", "nothing at"),
        ("--local-epochs 1000000000", r"local_epochs must be in \[1, 1e6\]"),
        ("--local-steps 1000000000000", r"local_steps must be in \[0, 1e7\]"),
        (f"--local-steps {2**70}", r"local_steps must be in \[0, 1e7\]"),
        ("--data-dir nowhere --data arrays", "nothing at nowhere; if the data were moved"),
    ],
)
def test_sizes_beyond_any_use(capsys, words, says):
    """They ended in tracebacks and left a config.toml, so that the corrected command was refused."""
    err = refused(capsys, "run", *QUICK[:-3], "--quiet", *words.split(), "--out", "a")
    assert re.search(says, err), err
    assert list(Path().iterdir()) == []


def test_group_norm_of_no_groups(capsys):
    from fedspeed.data import load
    from fedspeed.errors import UserError
    from fedspeed.models import build_model

    with pytest.raises(UserError, match=r"model resnet18_gn: cannot be built with \{'groups': 0\}"):
        build_model("resnet18_gn", load("digits", clients=4), groups=0)


def test_a_failure_of_any_kind_leaves_nothing_behind(monkeypatch):
    """Only bad input was cleaned up after."""
    monkeypatch.setattr("fedspeed.data.load", lambda *a, **b: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run_config(Config(), Path("new/a"))
    assert list(Path().iterdir()) == []


def test_what_somebody_else_put_into_the_new_folder_stays(monkeypatch):
    def other(*a, **b):
        Path("new/theirs").mkdir()
        raise ZeroDivisionError

    monkeypatch.setattr("fedspeed.data.load", other)
    with pytest.raises(ZeroDivisionError):
        run_config(Config(), Path("new/a"))
    assert [str(p) for p in Path().rglob("*")] == ["new", "new/theirs"]


def test_a_run_that_another_process_finished_meanwhile_is_not_deleted(monkeypatch):
    """The check came before the lock."""
    from contextlib import contextmanager

    from fedspeed.errors import UserError
    from fedspeed.runs import launch

    config = Config.from_dict({"rounds": 1, "clients": 4, "active": 2, "backend": "serial"})
    exclusive = launch.exclusive

    @contextmanager
    def late(out):
        monkeypatch.setattr(launch, "exclusive", exclusive)
        run_config(config, Path("a"))
        with exclusive(out):
            yield

    monkeypatch.setattr(launch, "exclusive", late)
    with pytest.raises(UserError, match="already holds a run"):
        run_config(config, Path("a"))
    assert RunDir("a").finished()


@pytest.fixture
def done() -> Path:
    assert main(["run", *QUICK, "--out", "done"]) == 0
    return Path("done")


@pytest.mark.parametrize("name", ["config.toml", "rounds.jsonl", "summary.json"])
@pytest.mark.parametrize("command", ["resume", "verify", "diff", "inspect", "theory"])
def test_a_pipe_in_place_of_a_file_is_not_waited_for(done, capsys, name, command):
    (done / name).unlink()
    os.mkfifo(done / name)
    if name == "rounds.jsonl":
        (done / "summary.json").unlink()
    words = {"diff": ["diff", "done", "done"], "theory": ["theory", "--from", "done", "--L", "1"]}
    started = time.monotonic()
    code = main(words.get(command, [command, "done"]))
    assert time.monotonic() - started < 60
    assert code in (0, 1, 2)
    assert "defect" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("key", "value"),
    [("best_accuracy", None), ("bytes_down", 10**400), ("seconds", 10**400), ("last_accuracy", "x"), ("rounds", None)],
)
def test_an_odd_summary_does_not_stand_for_a_finished_run(done, key, value):
    summary = json.loads((done / "summary.json").read_text())
    (done / "summary.json").write_text(json.dumps({**summary, key: value}))
    assert RunDir(done).finished() is None
    assert main(["resume", "done"]) == 0
    assert RunDir(done).finished() is not None


def test_diff_of_tables_nested_beyond_use(done, capsys):
    (done / "summary.json").write_text('{"a":' * 3000 + "1" + "}" * 3000)
    assert "cannot be read" in refused(capsys, "diff", "done", "done")


def test_a_config_that_is_large_is_refused_before_it_is_parsed(done, capsys):
    (done / "config.toml").write_text("[" + ".".join(["a"] * 100_000) + "]\nb = 1\n")
    assert "expected at most 100000 bytes" in refused(capsys, "resume", "done")
    assert "expected at most 100000 bytes" in refused(capsys, "run", "done/config.toml", "--out", "b")


CHANGES = [
    ("lr = 0.1", "lr = 'x'"),
    ("lam = 10.0", ""),
    ("rounds = 2", "rounds = inf"),
    ("lr = 0.1", "lr = [[1], [2]]"),
    ("clients = 4", "clients = []"),
    ("rho = 0.1", "rho = {a = 1}"),
]


@pytest.mark.parametrize(("old", "new"), CHANGES)
def test_theory_of_a_config_that_was_changed(done, capsys, old, new):
    path = done / "config.toml"
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    refused(capsys, "theory", "--from", "done", "--L", "1")


@pytest.mark.parametrize("text", ['{"eigenvalue": "x"}', '{"dissimilarity": [1]}', "[" * 5000, '{"dissimilarity": -1}'])
def test_theory_of_an_odd_inspection(done, capsys, text):
    (done / "inspect.json").write_text(text)
    assert main(["theory", "--from", "done"]) in (0, 2)
    assert "defect" not in capsys.readouterr().err


def test_a_folder_of_states_that_is_a_link_is_refused_from_the_start(capsys):
    """A run worked, its resume refused; --overwrite left the old run's states in it."""
    Path("elsewhere").mkdir()
    Path("a").mkdir()
    Path("a/states").symlink_to("../elsewhere")
    assert "is a link" in refused(capsys, "run", *QUICK, "--out", "a")


@pytest.mark.skipif(sys.platform != "linux", reason="names of files are bytes on Linux only")
def test_a_folder_whose_name_is_not_text(capsys):
    os.mkdir(b"\xff")
    err = refused(capsys, "run", *QUICK, "--data", "arrays", "--data-dir", os.fsdecode(b"\xff"), "--out", "a")
    assert "rename the folder" in err
    assert [p for p in Path().iterdir() if p.name == "a"] == []


def test_commands_that_start_in_one_second_get_folders_of_their_own(monkeypatch, capsys):
    monkeypatch.setattr("time.strftime", lambda *_: "20260101-120000")
    for _ in range(3):
        assert main(["run", *QUICK]) == 0
    names = sorted(p.name for p in Path("runs").iterdir())
    assert names == [f"20260101-120000-fedspeed-digits-s0{end}" for end in ("", "-2", "-3")]
    refused(capsys, "run", *QUICK, "--model", "mlp", "--set", "model.hidden=[1000000000000]")
    assert len(list(Path("runs").iterdir())) == 3


def test_bad_input_leaves_no_folder_for_runs(capsys):
    refused(capsys, "run", *QUICK, "--model", "mlp", "--set", "model.hidden=[1000000000000]")
    assert list(Path().iterdir()) == []
