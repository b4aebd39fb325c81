"""One flipped bit in any file of a run directory is found by `verify`; files of older versions are still read."""

from __future__ import annotations

import json
import random
import shutil
import tomllib
from pathlib import Path

import pytest
from sealing import resealed

import fedspeed
from fedspeed.cli import main
from fedspeed.config.config import Config
from fedspeed.errors import UserError
from fedspeed.runs.config_file import config_digest
from fedspeed.runs.launch import resume, run_config
from fedspeed.runs.verify import verify
from fedspeed.utils.files import seal_holds

SMALL = {"rounds": 2, "clients": 5, "active": 3, "local_steps": 1, "batch_size": 10, "engine": "loop",
         "backend": "serial", "model": "linear", "method": "fedspeed", "client_metrics": "every=1"}  # fmt: skip
OWN = """
from torch import nn


def build(shape, outputs):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, outputs))
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("flips")
    (folder / "own.py").write_text(OWN)
    run_config(Config.from_dict(SMALL), folder / "finished")
    run_config(Config.from_dict({**SMALL, "states": "disk", "model": f"{folder / 'own.py'}:build"}), folder / "disk")
    fedspeed.fork(folder / "finished", 1, folder / "forked", {"lr": 0.05})
    return folder


@pytest.fixture
def run(runs, tmp_path) -> Path:
    return Path(shutil.copytree(runs / "finished", tmp_path / "run"))


def found(run: Path) -> list[str]:
    """What `verify` finds, or what it refuses the directory for."""
    try:
        return verify(run, allow_code=True).broken
    except UserError as error:
        return [str(error)]


def files_of(run: Path) -> list[Path]:
    return sorted(path for path in run.rglob("*") if path.is_file() and path.stat().st_size)


def still_means_the_same(before: bytes, after: bytes) -> bool:
    """Of a config: only fields that change no result (where it is computed, rounds to come) are others."""
    return config_digest(tomllib.loads(before.decode())) == config_digest(tomllib.loads(after.decode()))


@pytest.mark.filterwarnings("ignore:.*was changed since the run began")
@pytest.mark.parametrize("bits", [2, pytest.param(100, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["finished", "disk", "forked"])
def test_one_flipped_bit_in_any_file_is_found(runs, kind, bits):
    draw, run = random.Random(f"{kind} 1"), runs / kind
    assert found(run) == []
    for path in files_of(run):
        before = path.read_bytes()
        for _ in range(bits):
            after = bytearray(before)
            at, bit = draw.randrange(len(before)), draw.randrange(8)
            after[at] ^= 1 << bit
            path.write_bytes(after)
            assert found(run) or (path.name == "config.toml" and still_means_the_same(before, bytes(after))), (
                f"bit {bit} of byte {at} of {path.relative_to(run)}: {bytes(after[max(0, at - 20) : at + 20])!r}"
            )
        path.write_bytes(before)
    assert found(run) == []


def test_another_split_is_found_and_a_missing_one_is_told(run, capsys):
    file = run / "split.json"
    split = json.loads(file.read_text())
    split["counts"][0], split["counts"][1] = split["counts"][1], split["counts"][0]
    kept = file.read_text()
    file.write_text(json.dumps(split) + "\n")
    assert main(["verify", str(run)]) == 1
    assert "split.json is not that of the data" in capsys.readouterr().out.replace("\n", " ")
    file.write_text(kept)
    assert found(run) == []
    file.unlink()
    result = verify(run)
    assert result.broken == []
    assert any("split.json is not there, so it is not bound" in text for text in result.held)


@pytest.mark.parametrize("key", ["uploads", "client_metrics", "waited", "bound", "log", "seal"])
def test_a_renamed_key_of_a_manifest_is_refused(run, key):
    newest = run / "checkpoints" / "2.json"
    text = newest.read_text()
    newest.write_text(text.replace(f'"{key}"', f'"{key[:-1]}_"', 1))
    assert any("2.json is damaged" in wrong and f"unknown ['{key[:-1]}_']" in wrong for wrong in found(run))
    with pytest.raises(UserError, match="damaged"):
        resume(run, rounds=3)
    newest.write_text(text)
    assert found(run) == []


@pytest.mark.parametrize("name", ["variables", "data", "config"])
def test_a_renamed_name_of_what_a_run_is_bound_to_is_refused_without_a_seal_too(run, name):
    for newest in (run / "checkpoints").glob("*.json"):
        manifest = {key: value for key, value in json.loads(newest.read_text()).items() if key != "seal"}
        manifest["bound"][f"{name}x"] = manifest["bound"].pop(name)
        newest.write_text(resealed(manifest))
    assert any(f"unknown ['{name}x']" in wrong for wrong in found(run))


def test_files_of_older_versions_are_read_and_hold(run, runs, tmp_path):
    """Without seals, and without what later versions bind; a run goes on from there, and then has them."""
    forked = Path(shutil.copytree(runs / "forked", tmp_path / "forked"))
    for old in (run, forked):
        for path in [*(old / "checkpoints").glob("*.json"), old / "summary.json", old / "fork.json"]:
            if path.exists():
                plain = {key: value for key, value in json.loads(path.read_text()).items() if key != "seal"}
                plain.get("bound", {}).pop("variables", None)
                path.write_text(json.dumps(plain))
        assert found(old) == []
    resume(run, rounds=3)
    assert found(run) == []
    assert seal_holds((run / "checkpoints" / "3.json").read_text()) is True


def test_a_summary_that_lost_its_seal_is_found(run):
    file = run / "summary.json"
    file.write_text(file.read_text().replace('"seal"', '"zeal"'))
    assert any("summary.json: seal is missing" in wrong for wrong in found(run))


BUFFERED = """
from pathlib import Path

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, outputs):
        super().__init__()
        self.head = nn.Linear(64, outputs)
        numbers = [float(a) for a in Path(PLACE).read_text().split()]
        self.register_buffer("scale", torch.tensor(numbers))

    def forward(self, x):
        return self.head(x.flatten(1) * self.scale)


def build(shape, outputs):
    return Net(outputs)
"""


def test_buffers_that_come_from_another_file_are_bound(tmp_path):
    """No parameter is frozen; the numbers of the buffer are in no config and in no checkpoint."""
    (tmp_path / "numbers").write_text("1 " * 64)
    (tmp_path / "net.py").write_text(BUFFERED.replace("PLACE", repr(str(tmp_path / "numbers"))))
    run = tmp_path / "run"
    run_config(Config.from_dict({**SMALL, "model": f"{tmp_path / 'net.py'}:build"}), run)
    assert verify(run, allow_code=True).broken == []
    (tmp_path / "numbers").write_text("1 " * 63 + "1.5")
    with pytest.raises(
        UserError, match=r"another frozen weights: .*; build the model with the frozen weights and buff"
    ):
        resume(run, rounds=3, allow_code=True)
    assert any("frozen weights" in wrong for wrong in found(run))
