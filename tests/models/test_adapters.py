"""Models of other packages with random weights: peft, transformers, timm; the examples of docs/guides/models.md."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from watching import Stop, stop_after

import fedspeed
from fedspeed.cli import main
from fedspeed.config.config import Config
from fedspeed.runs.launch import resume, run_config
from fedspeed.runs.verify import verify

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")]
PAGE = Path(__file__).parents[2] / "docs" / "guides" / "models.md"
SMALL = {
    "rounds": 4,
    "clients": 10,
    "active": 3,
    "local_epochs": 1,
    "batch_size": 20,
    "backend": "serial",
    "split": "iid",
}


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """The files that the page shows."""
    monkeypatch.chdir(tmp_path)
    for code in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL):
        if name := re.match(r"# (\w+\.py)", code):
            (tmp_path / name[1]).write_text(code)
    return tmp_path


def rounds(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "rounds.jsonl").read_text().splitlines()]


def lora(**changes) -> Config:
    return Config.from_dict({**SMALL, "model": {"name": "lora.py:build", "rank": 8}, "method": "fedspeed", **changes})


def test_lora_trains_sends_adapters_alone_and_resumes(folder):
    pytest.importorskip("peft")
    numbers = 8 * (64 + 64 + 64 + 10)
    run_config(lora(rounds=20), folder / "whole")
    told = rounds(folder / "whole")
    assert all(r["bytes_up"] == r["bytes_down"] == 3 * 4 * numbers for r in told)
    assert told[-1]["test_accuracy"] > 0.25 > 0.15 > told[0]["test_accuracy"]
    with pytest.raises(Stop):
        run_config(lora(rounds=20), folder / "part", observers=[stop_after(7)])
    resume(folder / "part", allow_code=True)
    whole, part = (load_file(folder / name / "model.safetensors") for name in ("whole", "part"))
    assert whole.keys() == part.keys()
    assert all(torch.equal(whole[name], part[name]) for name in whole)
    assert verify(folder / "part", allow_code=True).broken == []


def test_lora_in_worker_processes_gives_the_same_bits(folder):
    pytest.importorskip("peft")
    for backend in ("serial", "process"):
        run_config(lora(backend=backend, workers=2), folder / backend)
    a, b = (load_file(folder / name / "model.safetensors") for name in ("serial", "process"))
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_adapters_can_be_merged(folder):
    pytest.importorskip("peft")
    run_config(lora(), folder / "run")
    data = fedspeed.load_data("digits", clients=10)
    model = fedspeed.build_model("lora.py:build", data, rank=8)
    model.load_state_dict(load_file(folder / "run" / "model.safetensors"))
    with torch.no_grad():
        before = model.eval()(data.x_test)
        plain = model.merge_and_unload()
        torch.testing.assert_close(plain(data.x_test), before, rtol=1e-4, atol=1e-5)
    assert [type(layer).__name__ for layer in plain] == ["Flatten", "Linear", "ReLU", "Linear"]


def test_lora_without_the_extra(folder):
    pytest.importorskip("peft")
    run_config(lora(rounds=2), folder / "run")
    hidden = "import sys; sys.modules['peft'] = None; from fedspeed.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", hidden, "resume", "run", "--rounds", "4", "--allow-code"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert "pip install 'fedspeed[lora]'" in done.stderr
    assert done.stderr.count("\n") == 1
    assert len(rounds(folder / "run")) == 2


def run(*given: str) -> list[dict]:
    small = [word for key, value in SMALL.items() for word in (f"--{key.replace('_', '-')}", str(value))]
    assert main(["run", "--quiet", "--out", "run", *small, *given]) == 0
    return rounds(Path("run"))


def test_transformers(folder):
    pytest.importorskip("transformers")
    told = run("--model", "letters.py:build", "--data", "letters.py:load", "--rounds", "20", "--method", "fedavg")
    assert told[-1]["test_loss"] < told[0]["test_loss"]
    assert verify(folder / "run", allow_code=True).broken == []


@pytest.mark.parametrize("given", [["vit"], *(["resnet", "--batch-norm", c] for c in ("group", "local", "average"))])
def test_timm(folder, given):
    pytest.importorskip("timm")
    told = run("--model", f"pictures.py:{given[0]}", *given[1:])
    assert all(r["train_loss"] < 4 for r in told)
    assert verify(folder / "run", allow_code=True).broken == []
