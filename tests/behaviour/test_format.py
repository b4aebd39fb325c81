"""Run directories of earlier versions still resume, and nothing in a run directory is executed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from watching import Rounds, Stop, stop_after

from fedspeed.cli import main
from fedspeed.client.trees import tree_leaves
from fedspeed.config import config
from fedspeed.errors import UserError
from fedspeed.methods import FedSMOO
from fedspeed.runs import checkpoint
from fedspeed.runs.config_file import named_code, read_config
from fedspeed.runs.launch import resume, run_config
from fedspeed.runs.verify import verify
from fedspeed.utils.files import digest

FIXTURES = Path(__file__).parents[1] / "fixtures"


@pytest.fixture
def old(tmp_path) -> Path:
    """A run of 3 rounds that the first version with checkpoints wrote, stopped after round 2."""
    return Path(shutil.copytree(FIXTURES / "run-format-1", tmp_path / "run"))


@pytest.fixture(params=[1, 2])
def any_format(tmp_path, request) -> Path:
    """A run of 3 rounds of each format, stopped after round 2."""
    return Path(shutil.copytree(FIXTURES / f"run-format-{request.param}", tmp_path / "run"))


def test_there_is_a_run_of_every_format():
    assert config.CONFIG_FORMAT == 1
    formats = range(1, checkpoint.CHECKPOINT_FORMAT + 1)
    assert [p.name for p in sorted(FIXTURES.glob("run-format-*"))] == [f"run-format-{n}" for n in formats]


def test_every_format_resumes_to_completion(any_format):
    old = any_format
    before = (old / "rounds.jsonl").read_text().splitlines()
    summary = resume(old)
    assert summary["status"] == "finished"
    assert summary["rounds"] == 3
    after = [json.loads(text) for text in (old / "rounds.jsonl").read_text().splitlines()]
    for then, now in zip(before, after, strict=False):
        assert now.items() >= json.loads(then).items()
    assert [record["round"] for record in after] == [1, 2, 3]
    assert [p.stem for p in checkpoint.Checkpoints(old).manifests()] == ["3", "2"]


def test_every_format_can_be_verified_here(any_format):
    """Its digests and running sums hold anywhere; bits are compared with what this machine makes of it."""
    old = any_format
    found = verify(old)
    assert not [text for text in found.broken if "run again" not in text]
    resume(old)
    assert verify(old).broken == []


def as_format_1(run: Path) -> None:
    """Rewrite the checkpoints as the first version wrote them: a file for every state, none with names of fields."""
    checkpoints = checkpoint.Checkpoints(run)
    every = {path: checkpoints.read(path) for path in checkpoints.manifests()}
    names: dict[Path, set[str]] = {path: {f"checkpoints/server@{path.stem}"} for path in every}
    for path, saved in every.items():
        for client, entry in saved.entries.items():
            own = run / "states" / f"{client}@{entry.generation}"
            if not entry.digest:
                line, _, numbers = saved.log.read_bytes()[entry.start : entry.start + entry.length].partition(b"\n")
                own.write_bytes(json.dumps(json.loads(line)["leaves"]).encode() + b"\n" + numbers)
            names[path].add(f"states/{own.name}")
    for name in set().union(*names.values()):
        header, _, numbers = (run / name).read_bytes().partition(b"\n")
        plain = [about[-3:] for about in json.loads(header)]
        (run / name).write_bytes(json.dumps(plain).encode() + b"\n" + numbers)
    for path, files in names.items():
        manifest = {"format": 1, "round": int(path.stem), "files": {name: digest(run / name) for name in files}}
        path.write_text(json.dumps(manifest))
    (run / "states" / "log@1").unlink()


@pytest.mark.parametrize("states", ["memory", "disk"])
def test_format_1_ends_with_the_same_bits(tmp_path, states):
    """The first checkpoint after the resume is of format 2, and names every state once more."""
    tables = {"rounds": 5, "clients": 6, "active": 2, "local_steps": 1, "engine": "loop", "backend": "serial",
              "method": "fedsmoo", "model": "linear", "states": states}  # fmt: skip

    run_config(config.Config.from_dict(tables), tmp_path / "whole")
    with pytest.raises(Stop):
        run_config(config.Config.from_dict(tables), tmp_path / "run", observers=[stop_after(3)])
    as_format_1(tmp_path / "run")
    resume(tmp_path / "run")
    assert (tmp_path / "run" / "model.safetensors").read_bytes() == (tmp_path / "whole/model.safetensors").read_bytes()
    a, b = (checkpoint.Checkpoints(tmp_path / name).latest() for name in ("run", "whole"))
    assert a.manifest.log is not None
    assert a.generations == b.generations
    like = FedSMOO().init_client(torch.zeros(650))
    for i in b.entries:
        for x, y in zip(tree_leaves(a.state(i, like)), tree_leaves(b.state(i, like)), strict=True):
            assert torch.equal(x, y)
    assert verify(tmp_path / "run").broken == []


def test_a_later_format_is_refused_by_name(old):
    text = (old / "config.toml").read_text()
    (old / "config.toml").write_text(text.replace("format = 1", "format = 99"))
    with pytest.raises(UserError, match="expected format 1, found 99; use the fedspeed that wrote it"):
        resume(old)


def test_a_manifest_of_a_later_format_is_refused_by_name(old):
    newest = old / "checkpoints" / "2.json"
    newest.write_text(json.dumps({**json.loads(newest.read_text()), "format": 99}))
    with pytest.raises(UserError, match="expected format 1 or 2, found 99"):
        resume(old)


EVIL = """\
from pathlib import Path
from fedspeed import FedAvg
Path(__file__).with_name("executed").touch()
class Evil(FedAvg):
    pass
"""


def plant(run: Path, tables: str) -> Path:
    """A run directory whose config names a Python file beside it; returns what that file would leave behind."""
    (run / "evil.py").write_text(EVIL)
    text = (run / "config.toml").read_text()
    start = text.index("[method]")
    end = text.index("[", start + 1)
    (run / "config.toml").write_text(text[:start] + tables.replace("EVIL", f"{run}/evil.py:Evil") + text[end:])
    return run / "executed"


@pytest.mark.parametrize("tables", [
    '[method]\nname = "EVIL"\n',
    '[method]\nname = "fedinit"\nbase = "EVIL"\n',
    '[method]\nname = "fedinit"\n[method.base]\nname = "fedinit"\nbase = {name = "EVIL"}\n',
])  # fmt: skip
@pytest.mark.parametrize("command", ["resume", "verify", "inspect", "run"])
def test_a_run_directory_executes_nothing(old, tables, command, capsys):
    (old / "model.safetensors").touch()  # for inspect
    executed = plant(old, tables)
    options = [str(old)] if command != "run" else ["--resume", "auto", "--out", str(old)]
    assert main([command, *options]) == 2
    assert ("or of other code" if command == "run" else "add --allow-code") in capsys.readouterr().err
    assert not executed.exists()


def test_code_runs_where_the_user_allows_it(old):
    executed = plant(old, '[method]\nname = "EVIL"\n')
    with pytest.raises(UserError, match="is not a state of this run"):  # FedAvg has another server than FedSpeed
        resume(old, allow_code=True)
    assert executed.exists()


def test_a_method_the_user_names_can_be_resumed(tmp_path, monkeypatch):
    (tmp_path / "own.py").write_text(EVIL)
    options = ["run", "--method", f"{tmp_path}/own.py:Evil", "--rounds", "2", "--clients", "4", "--active", "2",
               "--local-steps", "1", "--model", "linear", "--out", str(tmp_path / "out"), "--quiet"]  # fmt: skip
    assert main(options) == 0
    (tmp_path / "out" / "summary.json").unlink()
    assert main([*options, "--resume", "auto"]) == 0
    assert main(["resume", str(tmp_path / "out"), "--quiet"]) == 0  # made here, from this very code
    monkeypatch.setenv("FEDSPEED_STATE", str(tmp_path / "of another user"))
    assert main(["resume", str(tmp_path / "out"), "--quiet"]) == 2
    assert main(["resume", str(tmp_path / "out"), "--quiet", "--allow-code"]) == 0
    assert main(["verify", str(tmp_path / "out"), "--allow-code", "--json"]) == 0


def test_remote_data_counts_as_code():
    assert named_code({"data": {"name": "huggingface", "path": "some/data"}}) == {"data huggingface"}
    assert named_code({"data": "huggingface", "data_dir": "copy"}) == set()
    assert named_code({"data": "digits", "method": {"name": "fedspeed"}}) == set()


@pytest.mark.parametrize("folder", ["states", "checkpoints"])
def test_folders_cannot_lead_elsewhere(old, tmp_path, folder):
    elsewhere = tmp_path / "elsewhere"
    shutil.move(old / folder, elsewhere)
    (elsewhere / "me@example.org").touch()
    (old / folder).symlink_to(elsewhere)
    with pytest.raises(UserError, match="is a link"):
        resume(old)
    with pytest.raises(UserError, match="is a link"):
        read_config(old)
    assert (elsewhere / "me@example.org").exists()


def test_half_written_names_cannot_lead_elsewhere(old, tmp_path):
    """A link under a temporary name is replaced, not followed."""
    precious = tmp_path / "precious"
    precious.write_text("mine")
    names = ["rounds.jsonl", "summary.json", "model.safetensors", "config.toml", "checkpoints/3.json",
             "checkpoints/server@3", "states/log@3", *(f"states/{i}@2" for i in range(10))]  # fmt: skip
    for name in names:
        (old / f"{name}.part").symlink_to(precious)
    (old / "states" / "log@3").symlink_to(precious)
    resume(old)
    assert precious.read_text() == "mine"
    assert not list(old.rglob("*.part"))


def test_only_its_own_files_are_removed(old):
    for name in ("me@example.org", "1@2@3", "x@1"):
        (old / "states" / name).touch()
    resume(old)
    assert {"me@example.org", "1@2@3", "x@1"} <= {p.name for p in (old / "states").iterdir()}


def test_the_older_checkpoint_stays_whole_over_a_resume(old):
    """A run that is stopped right after it was resumed still has two good checkpoints."""

    def stop(record):
        raise Stop

    with pytest.raises(Stop):
        resume(old, observers=[Rounds(stop)])
    kept = checkpoint.Checkpoints(old)
    for path in kept.manifests():
        kept.read(path)
