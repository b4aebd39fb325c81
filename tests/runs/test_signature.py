"""A run that the user made here from this very code needs no `--allow-code`; all others do."""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from sealing import resealed
from watching import Rounds

from fedspeed.cli import main
from fedspeed.config.config import Config
from fedspeed.errors import UserError
from fedspeed.runs.config_file import read_config
from fedspeed.runs.directory import RunDir
from fedspeed.runs.launch import resume, run_config
from fedspeed.runs.signature import make_key, read_key
from fedspeed.runs.verify import verify

OWN = """
from subprocess import run
from fedspeed.methods import FedAvg
import helper
class Mine(FedAvg):
    def direction(self, x, grad, down, client):
        return helper.one() * grad(x)
"""
ASKS = "whose code would be executed; a run directory is only data unless you trust it: add --allow-code if you do"
SMALL = {"rounds": 3, "clients": 6, "active": 3, "local_steps": 1, "model": "linear", "backend": "serial",
         "eval_every": 1}  # fmt: skip


@pytest.fixture
def state(tmp_path, monkeypatch) -> Path:
    """The state folder of this test's user, which does not exist yet."""
    folder = tmp_path / "state" / "inner"
    monkeypatch.setenv("FEDSPEED_STATE", str(folder))
    return folder


@pytest.fixture
def run(tmp_path, state) -> Path:
    """A run of own code that was interrupted after two rounds."""
    (tmp_path / "mine.py").write_text(OWN)
    (tmp_path / "helper.py").write_text("def one():\n    return 1.0\n")
    config = Config.from_dict({**SMALL, "method": f"{tmp_path / 'mine.py'}:Mine"})

    def stop(record):
        if record.round == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_config(config, tmp_path / "run", observers=[Rounds(stop)])
    return tmp_path / "run"


def refused(run: Path, why: str) -> None:
    """It asks as it always did, and says why it has to."""
    with pytest.raises(UserError, match=re.escape(ASKS) + re.escape(why and f" ({why}") + ("" if why else "$")):
        read_config(run)


def other_user(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("FEDSPEED_STATE", str(tmp_path / "of another user"))


def test_every_command_takes_a_run_of_ones_own(run, own_folder, capsys):
    client = str(RunDir(run).records()[0].cohort[0])
    assert main(["resume", "run", "--quiet"]) == 0
    assert main(["verify", "run", "--all"]) == 0
    assert main(["extend", "run", "--rounds", "4", "--quiet"]) == 0  # it changes the config
    assert main(["fork", "run", "--at", "2", "--set", "lr=0.05", "--out", "forked", "--quiet"]) == 0
    assert main(["extend", "forked", "--rounds", "5", "--quiet"]) == 0
    assert main(["replay", "run", "--round", "1", "--client", client]) == 0
    assert main(["inspect", "run", "--samples", "20"]) == 0
    assert main(["explain", "run", "--allow-code"]) == 0
    assert main(["explain", "run"]) == 0
    (own_folder / "elsewhere").mkdir()
    shutil.move("run", "elsewhere/moved")
    (own_folder / "mine.py").unlink()
    assert main(["extend", "elsewhere/moved", "--rounds", "5", "--quiet"]) == 0
    assert main(["verify", "elsewhere/moved"]) == 0
    assert "signature" not in capsys.readouterr().out


def test_the_key_is_made_when_it_is_needed_and_for_the_user_alone(tmp_path, state):
    run_config(Config.from_dict({**SMALL, "rounds": 1}), tmp_path / "plain")
    assert not state.exists()
    assert not RunDir(tmp_path / "plain").signature_file.exists()
    key = make_key()
    assert (make_key(), read_key(), len(key)) == (key, key, 32)
    assert [path.name for path in state.iterdir()] == ["key"]
    assert stat.S_IMODE((state / "key").stat().st_mode) == 0o600
    assert stat.S_IMODE(state.stat().st_mode) == 0o700


def test_processes_that_make_a_key_at_once_have_the_same(state):
    program = "from fedspeed.runs.signature import make_key; input(); print(make_key().hex())"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen([sys.executable, "-c", program], **pipes) for _ in range(4)]
    for process in processes:
        process.stdin.write("\n")
        process.stdin.flush()
    keys = {process.communicate()[0] for process in processes}
    assert keys == {f"{read_key().hex()}\n"}
    assert [path.name for path in state.iterdir()] == ["key"]


def test_a_run_of_another_user_asks(run, tmp_path, monkeypatch):
    other_user(monkeypatch, tmp_path)
    refused(run, "it was signed with another key, by another user or on another machine")
    make_key()
    refused(run, "it was signed with another key, by another user or on another machine")
    assert resume(run, allow_code=True, rounds=4)["rounds"] == 4
    refused(run, "it was signed with another key")  # allowed once is not signed


def test_a_key_of_no_bytes_signs_nothing(run, state):
    """Without a key here, a stranger cannot sign with what stands for none."""
    signature = RunDir(run).signature_file
    (state / "key").unlink()
    for key in (b"", b"None", bytes(32)):
        import hmac

        name = hmac.new(key, b"name", "sha256").hexdigest()[:16]
        signature.write_text(resealed({**json.loads(signature.read_text()), "key": name}))
        refused(run, "it was signed with another key")


def copy_of(run: Path, name: str = "*.py") -> Path:
    return next((run / "code").glob(f"mine-*/{name}"))


@pytest.mark.parametrize("name", ["mine.py", "helper.py"])
def test_code_that_was_edited_is_not_executed(run, tmp_path, name):
    path = copy_of(run, name)
    path.write_text(f"open({str(tmp_path / 'PWNED')!r}, 'w')\n" + path.read_text())
    with pytest.raises(UserError, match="was changed \\(expected digest") as caught:
        read_config(run)
    found = re.search(r"found (\w+\+1)\)", str(caught.value))[1]
    config = run / "config.toml"
    config.write_text(re.sub(r'code = "\w+\+1"', f'code = "{found}"', config.read_text()))  # a forger computes it too
    refused(run, "its config or code was changed after it was signed")
    config.write_text(re.sub(r"code = .*\n", "", config.read_text()))
    refused(run, "its config or code was changed after it was signed")
    assert not (tmp_path / "PWNED").exists()


def test_a_file_that_was_added_is_not_executed(tmp_path, state):
    """Not even one that the code would like to import, and that is not installed."""
    (tmp_path / "mine.py").write_text("try:\n    import cupy_of_mine\nexcept ImportError:\n    pass\n" + OWN)
    (tmp_path / "helper.py").write_text("def one():\n    return 1.0\n")
    run = tmp_path / "run"
    run_config(Config.from_dict({**SMALL, "method": f"{tmp_path / 'mine.py'}:Mine"}), run)
    evil = f"open({str(tmp_path / 'PWNED')!r}, 'w')"
    (copy_of(run).parent / "planted.py").write_text(evil)
    (run / "code" / "cupy_of_mine.py").write_text(evil)
    assert verify(run).broken == []
    (copy_of(run).parent / "cupy_of_mine.py").write_text(evil)
    with pytest.raises(UserError, match="was changed \\(expected digest"):
        read_config(run)
    assert not (tmp_path / "PWNED").exists()


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (":Mine", ":run"),  # subprocess.run of the user's own file
        ("eta_g = 1.0", "eta_g = 2.0"),
        ('data_dir = ""', 'data_dir = "/tmp"'),  # a loader may unpickle what lies there
        ("rounds = 3", "rounds = 30"),
    ],
)
def test_the_signature_is_of_the_config_too(run, before, after):
    config = run / "config.toml"
    assert before in config.read_text()
    config.write_text(config.read_text().replace(before, after, 1))
    refused(run, "its config or code was changed after it was signed")


def test_a_signature_of_another_run_does_not_count(run, tmp_path):
    (tmp_path / "evil.py").write_text(OWN.replace("import helper", "open('PWNED', 'w')"))
    run_config(Config.from_dict({**SMALL, "method": f"{tmp_path / 'mine.py'}:Mine"}), tmp_path / "other")
    shutil.copy(tmp_path / "other" / "signature.json", run / "signature.json")  # the same code, other rounds
    read_config(run)
    run_config(Config.from_dict({**SMALL, "method": f"{tmp_path / 'mine.py'}:Mine", "seed": 1}), tmp_path / "third")
    shutil.copy(tmp_path / "third" / "signature.json", run / "signature.json")
    refused(run, "its config or code was changed after it was signed")


def test_equal_runs_have_equal_signatures(tmp_path, run):
    for name in ("a", "b"):
        run_config(Config.from_dict({**SMALL, "method": f"{tmp_path / 'mine.py'}:Mine"}), tmp_path / name)
    assert (tmp_path / "a/signature.json").read_bytes() == (tmp_path / "b/signature.json").read_bytes()
    assert main(["diff", str(tmp_path / "a"), str(tmp_path / "b")]) == 0


def readable(key: Path) -> None:
    key.chmod(0o644)


def link(key: Path) -> None:
    key.rename(key.with_name("kept"))
    key.symlink_to("kept")


def short(key: Path) -> None:
    key.write_bytes(b"short")


def folder(key: Path) -> None:
    key.unlink()
    key.mkdir()


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (readable, "is not used: expected a file of yours that no other user can read; delete it"),
        (link, "cannot be read (Too many levels of symbolic links)"),
        (short, "is damaged: expected 32 bytes"),
        (folder, "is not used: expected a file of yours"),
    ],
)
def test_a_key_that_others_may_know_is_not_used(run, state, tmp_path, spoil, why):
    spoil(state / "key")
    refused(run, f"the key {state / 'key'} {why}")
    run_config(Config.from_dict({**SMALL, "method": f"{tmp_path / 'mine.py'}:Mine"}), tmp_path / "next")
    assert not (tmp_path / "next" / "signature.json").exists()
    refused(tmp_path / "next", "")


@pytest.mark.parametrize("case", ["file in its place", "no home", "relative"])
def test_without_a_place_for_a_key_all_works_as_before(run, tmp_path, monkeypatch, case):
    monkeypatch.chdir(tmp_path)
    if case == "file in its place":
        (tmp_path / "file").touch()
        monkeypatch.setenv("FEDSPEED_STATE", str(tmp_path / "file" / "state"))
    elif case == "relative":
        monkeypatch.setenv("FEDSPEED_STATE", "state/inner")  # it could come with a run directory
    else:
        monkeypatch.delenv("FEDSPEED_STATE")
        monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
        monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    with pytest.raises(UserError, match=re.escape(ASKS)):
        read_config(run)
    run_config(Config.from_dict({**SMALL, "method": "mine.py:Mine"}), tmp_path / "next")
    refused(tmp_path / "next", "")
    assert resume(tmp_path / "next", allow_code=True)["rounds"] == 3


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_home_that_cannot_be_written_works_as_before(tmp_path, monkeypatch):
    (tmp_path / "home").mkdir(mode=0o500)
    monkeypatch.setenv("FEDSPEED_STATE", str(tmp_path / "home" / "state"))
    with pytest.raises(UserError, match="no key can be made"):
        make_key()


def test_the_folder_of_the_state(tmp_path, monkeypatch):
    from fedspeed.runs.signature import state_folder

    monkeypatch.setenv("FEDSPEED_STATE", "/a/b")
    monkeypatch.setenv("XDG_STATE_HOME", "/c")
    assert state_folder() == Path("/a/b")
    monkeypatch.setenv("FEDSPEED_STATE", "")
    assert state_folder() == Path("/c/fedspeed")
    monkeypatch.delenv("XDG_STATE_HOME")
    assert state_folder() == Path.home() / ".local/state/fedspeed"


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"key": 3}', '{"key": "KEY", "signature": "\\ud800"}', "x" * 20_000])
def test_a_signature_may_hold_anything(run, text):
    signature = RunDir(run).signature_file
    key = json.loads(signature.read_text())["key"]
    signature.write_text(text.replace("KEY", key))
    with pytest.raises(UserError, match=re.escape(ASKS)):
        read_config(run)
    assert verify(run, allow_code=True).broken == [
        "signature.json is damaged; delete it, and the run asks before its code is executed"
    ]
    signature.unlink()
    signature.symlink_to("elsewhere.json")
    refused(run, "")


def test_a_data_set_of_the_hub_still_asks(run):
    """Its code is not in the run directory, so nobody signed it."""
    config = run / "config.toml"
    config.write_text(
        re.sub(r'\[data\]\nname = "digits"', '[data]\nname = "huggingface"\npath = "x"', config.read_text())
    )
    refused(run, "")
