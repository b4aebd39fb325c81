"""A checkpoint is gone on with only in the run it is of: its config, its data, its rounds, all of its states."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import tomli_w
from crashing import outcome
from sealing import resealed, seal
from watching import Rounds

from fedspeed.config.config import Config
from fedspeed.errors import UserError
from fedspeed.runs.launch import resume, run_config
from fedspeed.runs.verify import verify
from fedspeed.utils.files import Hash, read_toml

TINY = {"rounds": 5, "clients": 6, "active": 3, "local_steps": 2, "batch_size": 5, "engine": "loop", "model": "linear",
        "backend": "serial", "method": "fedspeed"}  # fmt: skip


class Stop(BaseException):
    """The run is stopped from outside."""


def stopped(out: Path, **changes) -> Path:
    """A run that was stopped after three of five rounds."""

    def stop(record):
        if record.round == 3:
            raise Stop

    with pytest.raises(Stop):
        run_config(Config.from_dict({**TINY, **changes}), out, observers=[Rounds(stop)])
    return out


def refused(run: Path, match: str, **how) -> None:
    """Resume says why not, and changes nothing."""
    before = {p: p.read_bytes() for p in run.rglob("*") if p.is_file()}
    with pytest.raises(UserError, match=match):
        resume(run, **how)
    assert {p: p.read_bytes() for p in run.rglob("*") if p.is_file()} == before


def save(path: Path, shift: float = 0.0, drop: int = 0) -> Path:
    r = np.random.default_rng(0)
    x, y = r.normal(size=(60, 4)).astype("f4"), r.integers(0, 3, 60)
    x[17] += shift
    np.savez(path, x=x, y=y, x_test=x, y_test=y)
    return path


def test_other_data_are_refused(tmp_path):
    file = save(tmp_path / "mine.npz")
    run = stopped(tmp_path / "run", data="arrays", data_dir=str(file), split="iid")
    save(file, shift=1.0)
    refused(run, r"is of another data: expected data \w+, found \w+; put the data back")
    save(file)
    resume(run)


def test_data_that_were_moved_are_the_same_data(tmp_path):
    file = save(tmp_path / "mine.npz")
    run = stopped(tmp_path / "run", data="arrays", data_dir=str(file), split="iid")
    shutil.move(file, tmp_path / "moved.npz")
    edit(run, data_dir=str(tmp_path / "moved.npz"))
    assert resume(run)["status"] == "finished"


def edit(run: Path, **changes) -> None:
    (run / "config.toml").write_text(tomli_w.dumps({**read_toml(run / "config.toml"), **changes}))


@pytest.mark.parametrize("changes", [
    {"seed": 1}, {"lr": 0.2}, {"method": {"name": "fedspeed", "rho": 0.2}}, {"weighting": "samples"}, {"eval_every": 2},
    {"engine": "block"},
])  # fmt: skip
def test_another_config_is_refused(tmp_path, changes):
    run = stopped(tmp_path / "run")
    edit(run, **changes)
    refused(run, r"is of another config: expected config \w+, found \w+; put config.toml back")


@pytest.mark.parametrize(
    "changes", [{"rounds": 6}, {"targets": [0.5]}, {"states": "disk"}, {"checkpoint_every": 2}, {"workers": 2}]
)
def test_what_changes_no_bit_may_be_changed(tmp_path, changes):
    run = stopped(tmp_path / "run")
    edit(run, **changes)
    assert resume(run)["status"] == "finished"


@pytest.mark.parametrize("rounds", [True, False])
def test_the_checkpoints_of_another_run_are_refused(tmp_path, rounds):
    run, other = stopped(tmp_path / "run"), stopped(tmp_path / "other", seed=5)
    for name in ("checkpoints", "states"):
        shutil.rmtree(run / name)
        shutil.copytree(other / name, run / name)
    if rounds:
        for name in ("rounds.jsonl", "uploads.bin"):
            shutil.copy(other / name, run / name)
    refused(run, "is of another config" if rounds else r"rounds.jsonl is damaged \(expected \d+ bytes")


def test_an_edited_earlier_line_is_refused(tmp_path):
    run = stopped(tmp_path / "run")
    lines = (run / "rounds.jsonl").read_text().splitlines(keepends=True)
    record = json.loads(lines[0])
    record["bytes_up"] += 1
    (run / "rounds.jsonl").write_text("".join([json.dumps(record) + "\n", *lines[1:]]))
    refused(run, r"3.json: rounds.jsonl is damaged \(expected \d+ bytes of digest \w+, found \d+ bytes of digest \w+\)")


def test_a_shorter_log_is_refused(tmp_path):
    run = stopped(tmp_path / "run")
    log = run / "states" / "log@1"
    log.write_bytes(log.read_bytes()[:-1])
    refused(
        run, r"states/log@1 is damaged \(expected (\d+) bytes of digest \w+, found \d+ bytes.*the one of round 2 is"
    )


@pytest.mark.parametrize("kept", [0, 1])
def test_states_left_out_are_refused(tmp_path, kept):
    """All of them, or those after the first checkpoint; the manifest and its digests are in order."""
    run = stopped(tmp_path / "run")
    newest, log = run / "checkpoints" / "3.json", run / "states" / "log@1"
    manifest, data = json.loads(newest.read_text()), log.read_bytes()
    end = len(data) // 3 * kept  # a third is one round's
    hashed = Hash()
    hashed.update(data[:end])
    manifest["log"] |= {"bytes": end, "digest": hashed.digest()}
    newest.write_text(resealed(manifest))
    refused(run, r"round 3: by rounds.jsonl the state of client \d is of round \d, in the checkpoint (none|of round 1)")


def test_states_left_out_of_format_1_are_refused(tmp_path):
    run = Path(shutil.copytree(Path(__file__).parents[1] / "fixtures" / "run-format-1", tmp_path / "run"))
    newest = run / "checkpoints" / "2.json"
    manifest = json.loads(newest.read_text())
    manifest["files"] = {name: value for name, value in manifest["files"].items() if "states" not in name}
    newest.write_text(resealed(manifest))
    refused(run, "by rounds.jsonl the state of client 0 is of round 2, in the checkpoint none")


def test_a_log_cannot_lead_elsewhere(tmp_path):
    """Appending to a link would change what it leads to."""
    run, precious = stopped(tmp_path / "run"), tmp_path / "precious"
    shutil.move(run / "states" / "log@1", precious)
    (run / "states" / "log@1").symlink_to(precious)
    refused(run, "states/log@1 is damaged.*found a link")


@pytest.mark.parametrize("pattern", ["checkpoints/server@3", "checkpoints/3.json", "states/*@2", "rounds.jsonl"])
def test_no_file_of_a_checkpoint_can_lead_elsewhere(tmp_path, pattern):
    """Also if what a link leads to has the right digest: it may change when somebody else likes."""
    run = stopped(tmp_path / "run", states="disk")
    file = next(run.glob(pattern))
    shutil.move(file, tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    refused(run, f"{file.name} is damaged.*found a link")
    found = verify(run)
    assert any("found a link" in text for text in found.broken)


@pytest.mark.parametrize("changes", [{"states": "memory"}, {"states": "disk"}])
def test_the_place_of_states_may_change_at_every_resume(tmp_path, changes):
    """From memory to disk to memory, and the other way: the same model and the same states as without a break."""
    from fedspeed.runs.checkpoint import Checkpoints

    def stop_at(t):
        def stop(record):
            if record.round == t:
                raise Stop

        return stop

    places = ["memory", "disk", "memory"] if changes["states"] == "memory" else ["disk", "memory", "disk"]
    for n, place in enumerate(places, 1):
        if n == 1:
            with pytest.raises(Stop):
                run_config(
                    Config.from_dict({**TINY, "states": place}), tmp_path / "run", observers=[Rounds(stop_at(2))]
                )
            continue
        edit(tmp_path / "run", states=place)
        if n == 2:
            with pytest.raises(Stop):
                resume(tmp_path / "run", observers=[Rounds(stop_at(4))])
        else:
            resume(tmp_path / "run")
    run_config(Config.from_dict({**TINY, "states": "memory"}), tmp_path / "whole")
    a, b = (outcome(tmp_path / name) for name in ("run", "whole"))  # also: no file too many
    assert (a[0], a[2]) == (b[0], b[2])
    a, b = (Checkpoints(tmp_path / name).latest() for name in ("run", "whole"))
    assert a.generations == b.generations
    import torch

    from fedspeed.methods import FedSpeed

    like = FedSpeed().init_client(torch.zeros(650))
    assert all(torch.equal(a.state(i, like).h, b.state(i, like).h) for i in b.entries)


def test_a_sealed_run_goes_on(tmp_path):
    """The tests' own sealing leaves a good run good."""
    run = stopped(tmp_path / "run")
    seal(run)
    assert resume(run)["status"] == "finished"


TRIMMED = """
from torch import nn
from fedspeed.models.trim import trimmed

def build(shape, outputs):
    net = nn.Sequential(nn.Unflatten(1, (1, 1, 64)), nn.Conv2d(1, 4, 3, padding=1, bias=False))
    return trimmed(nn.Sequential(nn.Flatten(), net, nn.Flatten(), nn.Linear(256, outputs)), shape)
"""


def test_a_trimmed_network_that_was_stored_in_another_order_is_refused(tmp_path):
    """As many numbers, in other places: the run would go on from nonsense."""
    (tmp_path / "net.py").write_text(TRIMMED)
    run = stopped(tmp_path / "run", model=f"{tmp_path / 'net.py'}:build", checkpoint_every=1)
    newest = max((run / "checkpoints").glob("*.json"), key=lambda path: int(path.stem))
    manifest = json.loads(newest.read_text())
    assert manifest["bound"].pop("layout") == "tap by tap"
    kept = newest.read_text()
    newest.write_text(resealed(manifest))
    refused(run, "another layout: expected layout of old, found tap by tap; filters of", allow_code=True)
    newest.write_text(kept)
    resume(run, allow_code=True)
    assert len((run / "rounds.jsonl").read_text().splitlines()) == 5


def test_variables_that_change_bits_are_told_and_bind_nobody(tmp_path, monkeypatch):
    from fedspeed.config.config import Config
    from fedspeed.runs.launch import resume, run_config

    def stop(record):
        raise KeyboardInterrupt

    config = Config.from_dict({"rounds": 2, "clients": 4, "active": 2, "local_steps": 1, "backend": "serial"})
    monkeypatch.delenv("OPENBLAS_CORETYPE", raising=False)  # a machine may have it set
    with pytest.raises(KeyboardInterrupt):
        run_config(config, tmp_path / "a", observers=[Rounds(stop)])
    monkeypatch.setenv("OPENBLAS_CORETYPE", "Haswell")
    with pytest.warns(UserWarning, match=r"variables that change the last bits differ .*OPENBLAS_CORETYPE.*Haswell"):
        assert resume(tmp_path / "a")["status"] == "finished"
