"""A run directory means the same from every folder, holds the code of its method, and can be given more rounds."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from watching import Rounds

from fedspeed.cli import main
from fedspeed.config.config import Config
from fedspeed.errors import UserError
from fedspeed.runs.config_file import as_stored, read_config, same_run
from fedspeed.runs.launch import resume, run_config

METHOD = """
from dataclasses import dataclass
from fedspeed.methods import FedAvg

@dataclass(frozen=True)
class Mine(FedAvg):
    def direction(self, x, grad, down, client):
        return 1.0 * grad(x)
"""
SMALL = {"rounds": 4, "clients": 6, "active": 3, "local_epochs": 1, "model": "linear", "backend": "serial"}
OPTIONS = ["--rounds", "4", "--clients", "6", "--active", "3", "--local-epochs", "1", "--model", "linear", "--quiet"]
TIMES = ("seconds", "eval_seconds", "wall_seconds", "checkpoint_seconds", "seal")


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(METHOD)
    return tmp_path


def stopped(out: Path, config: Config, at: int) -> None:
    """A run that ends as by Ctrl-C after a round."""

    def stop(record):
        if record.round == at:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_config(config, out, observers=[Rounds(stop)])


def rounds(out: Path) -> list[dict]:
    lines = [json.loads(line) for line in (out / "rounds.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key not in TIMES} for line in lines]


def summary(out: Path) -> dict:
    found = json.loads((out / "summary.json").read_text())
    found.pop("digests", None)  # of files that hold times
    return {key: value for key, value in found.items() if key not in TIMES}


def same(a: Path, b: Path) -> None:
    assert rounds(a) == rounds(b)
    assert (a / "model.safetensors").read_bytes() == (b / "model.safetensors").read_bytes()
    assert summary(a) == summary(b)


# The code of a method from a file is a part of the run


def test_an_edit_of_the_file_changes_no_run_that_was_begun(here):
    """A4: a run went on with the other algorithm, and `verify` said that all holds."""
    config = Config.from_dict({**SMALL, "method": "mine.py:Mine"})
    run_config(config, here / "straight")
    stopped(here / "a", config, 2)
    (here / "mine.py").write_text(METHOD.replace("1.0 *", "5.0 *"))
    with pytest.warns(UserWarning, match=r"mine\.py was changed since the run began; its own copy"):
        resume(here / "a", allow_code=True)
    same(here / "a", here / "straight")


@pytest.mark.filterwarnings("default")
def test_commands_say_that_the_file_was_changed(here, capsys):
    assert main(["run", "--method", "mine.py:Mine", *OPTIONS, "--out", "a"]) == 0
    assert main(["verify", "a", "--allow-code"]) == 0
    assert "changed" not in capsys.readouterr().err
    (here / "mine.py").write_text(METHOD.replace("1.0 *", "5.0 *"))
    assert main(["verify", "a", "--allow-code", "--all"]) == 0  # the run's own copy is what is checked
    assert re.search(r"warning: .*mine\.py was changed since the run began", capsys.readouterr().err)
    assert main(["run", "--method", "mine.py:Mine", *OPTIONS, "--out", "b"]) == 0
    assert main(["diff", "a", "b"]) == 1
    out = capsys.readouterr().out
    assert "method.code" in out
    assert "origin" not in out


def test_the_copy_is_what_is_executed_from_every_folder_even_when_the_file_is_gone(here, monkeypatch):
    config = Config.from_dict({**SMALL, "method": "mine.py:Mine"})
    run_config(config, here / "straight")
    stopped(here / "a", config, 2)
    (here / "mine.py").unlink()
    shutil.move(here / "a", here / "b")
    (here / "elsewhere").mkdir()
    monkeypatch.chdir(here / "elsewhere")
    (here / "elsewhere" / "mine.py").write_text("raise SystemExit('another file was executed')")
    resume(here / "b", allow_code=True)
    same(here / "b", here / "straight")
    assert main(["run", "../b/config.toml", "--out", "again", "--quiet"]) == 0
    same(here / "elsewhere" / "again", here / "straight")


def test_a_copy_that_was_changed_is_not_executed(here):
    stopped(here / "a", Config.from_dict({**SMALL, "method": "mine.py:Mine"}), 2)
    copy = next((here / "a" / "code").glob("mine-*.py"))
    copy.write_text("open('PWNED', 'w')\n" + METHOD)
    with pytest.raises(UserError, match=r"mine-\w+\.py was changed \(expected digest \w+, found \w+\); put it back"):
        resume(here / "a", allow_code=True)
    assert not (here / "PWNED").exists()


def test_cached_bytecode_is_not_executed(here):
    """What was hashed is what runs: a __pycache__ beside the file is not looked at."""
    import py_compile

    evil = here / "evil.py"
    evil.write_text("open('PWNED', 'w')\n" + METHOD)
    place = here / "__pycache__" / f"mine.cpython-{''.join(map(str, os.sys.version_info[:2]))}.pyc"
    py_compile.compile(str(evil), cfile=str(place), invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)
    Config.from_dict({**SMALL, "method": "mine.py:Mine"})
    assert not (here / "PWNED").exists()


def test_code_inside_a_wrapper_is_kept_too(here):
    config = Config.from_dict({**SMALL, "method": {"name": "fedinit", "base": "mine.py:Mine"}})
    run_config(config, here / "a")
    assert "mine-" in (here / "a" / "config.toml").read_text()
    (here / "mine.py").unlink()
    again = read_config(here / "a", allow_code=True)
    assert again.method.base.code == config.method.base.code


def test_run_resume_auto_trusts_the_code_that_the_user_names_and_no_other(here, capsys):
    command = ["run", "--method", "mine.py:Mine", *OPTIONS, "--out", "a", "--resume", "auto"]
    stopped(here / "a", Config.from_dict({**SMALL, "method": "mine.py:Mine", "backend": "auto"}), 2)
    assert main(command) == 0
    assert len(rounds(here / "a")) == 4
    (here / "mine.py").write_text(METHOD.replace("1.0 *", "5.0 *"))
    assert main(command) == 2
    assert "or of other code" in capsys.readouterr().err


def test_overwriting_drops_the_copies_but_no_file_of_the_user_s(here):
    run_config(Config.from_dict({**SMALL, "method": "mine.py:Mine"}), here / "a")
    (here / "a" / "code" / "notes.txt").write_text("mine")
    run_config(Config.from_dict(SMALL), here / "a", overwrite=True)
    assert [p.name for p in (here / "a" / "code").iterdir()] == ["notes.txt"]


def test_overwriting_a_run_from_its_own_config_keeps_its_code(here):
    """The only copy of the code was deleted, and then missed."""
    run_config(Config.from_dict({**SMALL, "method": "mine.py:Mine"}), here / "a")
    shutil.copytree(here / "a", here / "b")
    (here / "mine.py").unlink()
    assert main(["run", "a/config.toml", "--out", "a", "--overwrite", "--quiet"]) == 0
    same(here / "a", here / "b")
    assert len(list((here / "a" / "code").glob("mine-*.py"))) == 1


@pytest.mark.parametrize("name", ["checkpoints/best.pt", "states/texas.csv", "code/train-20240101.py"])
def test_folders_of_the_user_s_are_not_taken_for_a_run_s(here, name, capsys):
    """They were deleted, silently."""
    path = here / "proj" / name
    path.parent.mkdir(parents=True)
    path.write_text("mine")
    for options in (["--method", "mine.py:Mine"], ["--model", "mlp", "--set", "model.hidden=[1000000000000]"]):
        main(["run", *OPTIONS, *options, "--out", "proj"])
        assert path.read_text() == "mine"
    assert name.startswith("code/") or "would be lost" in capsys.readouterr().err


def test_a_worker_that_is_replaced_has_the_code_the_run_began_with(here):
    """The file was read again, and may have been edited by then."""
    from fedspeed.backends.packing import sources
    from fedspeed.methods import from_code

    method = Config.from_dict({**SMALL, "method": {"name": "fedinit", "base": "mine.py:Mine"}}).method
    (here / "mine.py").write_text("raise SystemExit('edited')")
    ((source, code),) = sources(method)
    assert code == (METHOD.encode(), ())
    assert from_code(Path(source.rpartition(":")[0]), "Mine", code).code == method.base.code


def test_names_of_runs_hold_neither_paths_nor_colons(here):
    assert main(["run", "--method", "mine.py:Mine", *OPTIONS]) == 0
    (name,) = [p.name for p in (here / "runs").iterdir()]
    assert re.fullmatch(r"\d{8}-\d{6}-Mine-digits-s0", name)


def test_files_of_a_run_have_one_mode(here):
    run_config(Config.from_dict(SMALL), here / "a")
    assert len({p.stat().st_mode & 0o777 for p in (here / "a").iterdir() if p.is_file()}) == 1


# Paths


def test_data_are_found_from_every_folder_and_asked_for_when_they_moved(here, monkeypatch, capsys):
    """Another file of the same name in another folder was taken silently."""
    for folder, seed in (("one", 0), ("two", 1)):
        (here / folder).mkdir()
        r = np.random.default_rng(seed)
        np.savez(here / folder / "mine.npz", x=r.normal(size=(60, 4)).astype("f4"), y=r.integers(0, 3, 60))
    monkeypatch.chdir(here / "one")
    given = {**SMALL, "data": "arrays", "data_dir": "mine.npz", "split": "iid"}
    run_config(Config.from_dict(given), here / "straight")
    stopped(here / "a", Config.from_dict(given), 2)
    stopped(here / "b", Config.from_dict(given), 2)
    monkeypatch.chdir(here / "two")
    assert main(["run", "../a/config.toml", "--out", "../again", "--quiet"]) == 0
    same(here / "again", here / "straight")
    assert main(["resume", "../a", "--quiet"]) == 0
    same(here / "a", here / "straight")
    (here / "moved").mkdir()
    shutil.move(here / "one" / "mine.npz", here / "moved" / "theirs.npz")
    assert main(["resume", "../b", "--quiet"]) == 2
    assert re.search(r"nothing at .*one/mine\.npz; if the data were moved.*--data-dir", capsys.readouterr().err)
    assert main(["resume", "../b", "--quiet", "--data-dir", "../moved/theirs.npz"]) == 0
    assert rounds(here / "b") == rounds(here / "straight")
    assert read_config(here / "b").data_dir == str(here / "moved" / "theirs.npz")


def test_a_config_file_means_files_beside_it(here, monkeypatch):
    (here / "e.toml").write_text('rounds = 2\nmethod = "mine.py:Mine"\ndata_dir = "some"\n')
    (here / "sub").mkdir()
    monkeypatch.chdir(here / "sub")
    config = Config.from_toml(Path("../e.toml"))
    assert config.method.source == f"{here / 'mine.py'}:Mine"
    assert config.data_dir == str(here / "some")


# More rounds


@pytest.mark.parametrize("method", ["fedspeed", "scaffold", "fedadam"])
@pytest.mark.parametrize("eval_every", [1, 3])
def test_a_finished_run_given_more_rounds_is_one_long_run(here, method, eval_every):
    """A7. With eval_every = 3 round 4 was evaluated only because it was the last."""
    short = Config.from_dict({**SMALL, "method": method, "eval_every": eval_every})
    run_config(replace(short, rounds=9), here / "long")
    run_config(short, here / "a")
    assert main(["resume", str(here / "a"), "--rounds", "9", "--quiet"]) == 0
    same(here / "a", here / "long")
    assert read_config(here / "a") == read_config(here / "long")


def test_more_rounds_by_editing_the_config_and_by_the_same_command(here, capsys):
    run_config(Config.from_dict({**SMALL, "rounds": 7}), here / "long")
    for out in ("a", "b"):
        run_config(Config.from_dict(SMALL), here / out)
    path = here / "a" / "config.toml"
    path.write_text(path.read_text().replace("rounds = 4", "rounds = 7"))
    assert main(["verify", "a"]) == 0, capsys.readouterr()
    assert main(["resume", "a", "--quiet"]) == 0
    same(here / "a", here / "long")
    more = [*OPTIONS[2:], "--rounds", "7", "--backend", "serial", "--out", "b", "--resume", "auto"]
    assert main(["run", *more]) == 0
    same(here / "b", here / "long")
    assert main(["verify", "b", "--all"]) == 0


def test_a_run_killed_while_it_is_made_longer_goes_on(here):
    config = Config.from_dict({**SMALL, "eval_every": 3})
    run_config(replace(config, rounds=9), here / "long")
    run_config(config, here / "a")

    def stop(record):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        resume(here / "a", rounds=9, observers=[Rounds(stop)])
    resume(here / "a")
    same(here / "a", here / "long")


def test_fewer_rounds_are_refused(here, capsys):
    run_config(Config.from_dict(SMALL), here / "a")
    assert main(["resume", "a", "--rounds", "3"]) == 2
    assert "expected at least the 4 rounds of the run, got 3" in capsys.readouterr().err
    assert main(["resume", "a", "--rounds", "4"]) == 0
    assert "finished already" in capsys.readouterr().out


# One learning-rate decay


@pytest.mark.parametrize(("options", "decay"), [([], 0.998), (["--preset", "paper"], 0.9995)])
def test_the_decay_in_force_is_stored_and_printed(here, capsys, options, decay):
    """B10: FedAvg had 0.998 and FedSpeed 0.9995 by default, and the config said 0.0 for both."""
    command = [word for word in OPTIONS if word != "--quiet"]
    assert main(["run", "--method", "fedspeed", *command, *options, "--out", "a"]) == 0
    assert f"decay {decay:g} per round" in " ".join(capsys.readouterr().out.split())
    assert read_config(here / "a").lr_decay == decay
    last = rounds(here / "a")[-1]
    assert last["lr"] == pytest.approx(0.1 * decay**3, rel=1e-12)


def test_old_configs_with_decay_0_keep_their_meaning(here):
    config = Config.from_dict({**SMALL, "lr_decay": 0.0})
    run_config(config, here / "a")
    assert rounds(here / "a")[-1]["lr"] == pytest.approx(0.1 * 0.9995**3, rel=1e-12)
    assert same_run(read_config(here / "a"), config)
    assert as_stored(config)["lr_decay"] == 0.9995


def damaged(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"x")


def test_more_rounds_never_cost_the_checkpoint_there_is(here, capsys):
    """With eval_every = 3 round 4 is run again from the checkpoint before it; that one may be damaged, or missing."""
    config = Config.from_dict({**SMALL, "eval_every": 3})
    run_config(config, here / "a")
    damaged(here / "a" / "checkpoints" / "server@3")
    before = {p: p.read_bytes() for p in (here / "a").rglob("*") if p.is_file()}
    assert main(["resume", "a", "--rounds", "9", "--quiet"]) == 2
    assert "server@3 is damaged" in capsys.readouterr().err
    assert {p: p.read_bytes() for p in (here / "a").rglob("*") if p.is_file()} == before
    run_config(replace(config, checkpoint_every=4), here / "b")
    assert main(["resume", "b", "--rounds", "9", "--quiet"]) == 2
    assert "there is no checkpoint before it" in capsys.readouterr().err
    assert main(["verify", "b"]) == 0


@pytest.mark.parametrize("states", ["memory", "disk"])
def test_a_run_that_was_moved_does_not_write_into_another(here, states):
    config = Config.from_dict({**SMALL, "states": states, "method": "scaffold", "checkpoint_every": 2})
    run_config(replace(config, seed=1), here / "other")
    other = {p.relative_to(here / "other"): p.read_bytes() for p in (here / "other").rglob("*") if p.is_file()}

    def move(record):
        if record.round == 3:
            until = time.monotonic() + 60
            while not (here / "a" / "checkpoints" / "2.json").exists() and time.monotonic() < until:
                time.sleep(0.01)  # no checkpoint is under way while the folder is moved
            shutil.move(here / "a", here / "elsewhere")
            shutil.copytree(here / "other", here / "a")

    with pytest.raises(UserError, match=r"was moved during the run|cannot write|not a state"):
        run_config(config, here / "a", observers=[Rounds(move)])
    found = {p.relative_to(here / "a"): p.read_bytes() for p in (here / "a").rglob("*") if p.is_file()}
    assert {path: found[path] for path in other} == other
    run_config(config, here / "straight")
    resume(here / "elsewhere")
    same(here / "elsewhere", here / "straight")


def test_a_place_below_the_home_folder_is_stored_whole(here, monkeypatch):
    monkeypatch.setenv("HOME", str(here))
    r = np.random.default_rng(0)
    np.savez(here / "mine.npz", x=r.normal(size=(60, 4)).astype("f4"), y=r.integers(0, 3, 60))
    given = {**SMALL, "data": "arrays", "data_dir": "mine.npz", "split": "iid"}
    stopped(here / "a", Config.from_dict(given), 2)
    shutil.move(here / "mine.npz", here / "theirs.npz")
    assert main(["resume", "a", "--quiet", "--data-dir", "~/theirs.npz"]) == 0
    assert read_config(here / "a").data_dir == str(here / "theirs.npz")


def test_a_config_of_before_means_the_current_folder_and_says_so(here):
    run_config(Config.from_dict({**SMALL, "method": "mine.py:Mine"}), here / "a")
    path = here / "a" / "config.toml"
    kept = [line for line in path.read_text().splitlines() if not line.startswith(("code = ", "origin = "))]
    path.write_text(re.sub(r'name = "code/mine-\w+\.py:Mine"', 'name = "mine.py:Mine"', "\n".join(kept)))
    with pytest.warns(UserWarning, match=r"mine\.py of the current folder is taken"):
        assert read_config(here / "a", allow_code=True).method.source == f"{here / 'mine.py'}:Mine"


def test_a_run_that_was_terminated_verifies(here):
    from fedspeed.errors import Terminated

    def stop(record):
        if record.round == 2:
            raise Terminated

    with pytest.raises(Terminated):
        run_config(Config.from_dict(SMALL), here / "a", observers=[Rounds(stop)])
    assert summary(here / "a")["status"] == "terminated"
    assert main(["verify", "a"]) == 0


@pytest.mark.parametrize("number", ["SIGINT", "SIGTERM"])
def test_signals_come_after_what_belongs_together(number):
    import signal

    from fedspeed.utils.processes import delay_signals

    done, which = [], getattr(signal, number)

    def handler(*_):
        raise KeyboardInterrupt

    before = signal.signal(which, handler)
    try:
        with pytest.raises(KeyboardInterrupt), delay_signals():  # noqa: PT012
            done.append(1)
            signal.raise_signal(which)
            done.append(2)
        assert done == [1, 2]
        assert signal.getsignal(which) is handler
    finally:
        signal.signal(which, before)
