"""`fedspeed diff`: what differs between two runs, and nothing that does not."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from fedspeed.cli import main
from fedspeed.config.config import Config
from fedspeed.report.diff import differences
from fedspeed.runs.launch import run_config

TINY = {"rounds": 3, "clients": 6, "active": 3, "local_steps": 1, "batch_size": 5, "engine": "loop", "model": "linear"}


def make(out: Path, **changes) -> Path:
    run_config(Config.from_dict({**TINY, "backend": "serial", "method": "fedspeed", **changes}), out)
    return out


@pytest.fixture(scope="module")
def original(tmp_path_factory) -> Path:
    return make(tmp_path_factory.mktemp("diff") / "a")


def test_the_same_run_twice(original, tmp_path, capsys):
    """Times differ, and are no difference."""
    again = make(tmp_path / "b")
    assert (again / "rounds.jsonl").read_bytes() != (original / "rounds.jsonl").read_bytes()
    assert main(["diff", str(original), str(again)]) == 0
    assert "config: the same\ndata: the same\nenvironment: the same\nresults: the same\nmodel: the same" in (
        capsys.readouterr().out
    )


def test_another_seed_and_field(original, tmp_path, capsys):
    other = make(tmp_path / "b", seed=1, method={"name": "fedspeed", "rho": 0.05})
    assert main(["diff", str(original), str(other), "--json"]) == 1
    found = {(d["section"], d["name"]): (d["a"], d["b"]) for d in json.loads(capsys.readouterr().out)}
    assert found["config", "seed"] == (0, 1)
    assert found["config", "method.rho"] == (0.1, 0.05)
    assert ("data", "split_fingerprint") in found
    assert ("data", "data_fingerprint") not in found
    assert ("results", "round 1 (the first that differs): cohort") in found
    assert ("model", "digest of the parameters") in found
    assert not any(section == "environment" for section, _ in found)


def test_fields_that_one_method_does_not_have(original, tmp_path, capsys):
    other = make(tmp_path / "b", method={"name": "fedavg", "eta_g": 0.5})
    assert main(["diff", str(original), str(other)]) == 1
    out = capsys.readouterr().out
    assert out.startswith("different methods: fedspeed | fedavg ")
    assert "\n  method.rho: 0.1 | -\n" in out
    assert "\n  method.eta_g: - | 0.5\n" in out
    assert "None" not in out
    main(["diff", str(original), str(other), "--json"])
    found = {d["name"]: (d["a"], d["b"]) for d in json.loads(capsys.readouterr().out)}
    assert found["method.rho"] == (0.1, None)


def test_a_run_that_is_not_finished(original, tmp_path, capsys):
    other = Path(shutil.copytree(original, tmp_path / "b"))
    for name in ("summary.json", "model.safetensors"):
        (other / name).unlink()
    assert main(["diff", str(original), str(other)]) == 1
    out = capsys.readouterr().out
    assert "different methods" not in out
    assert "None" not in out
    assert "\n  status: 'finished' | -\n" in out


def altered(original: Path, tmp_path: Path, name: str, change) -> list[str]:
    other = Path(shutil.copytree(original, tmp_path / "b"))
    text = (other / name).read_text()
    (other / name).write_text(change(text))
    assert (other / name).read_text() != text
    return [f"{one.section}: {one.name}" for one in differences(original, other)]


def test_one_bit_of_one_round(original, tmp_path):
    def change(text):
        lines = [json.loads(line) for line in text.splitlines()]
        lines[1]["drift"] *= 1 + 3e-16
        return "".join(json.dumps(line) + "\n" for line in lines)

    assert altered(original, tmp_path, "rounds.jsonl", change) == ["results: round 2 (the first that differs): drift"]


def test_a_version(original, tmp_path):
    found = altered(original, tmp_path, "summary.json", lambda text: text.replace('"numpy": "', '"numpy": "9'))
    assert found == ["environment: numpy"]


def test_a_vendor_counts_where_both_runs_have_it(original, tmp_path):
    """Runs made before it was recorded have none."""
    other = altered(original, tmp_path, "summary.json", lambda text: text.replace('"vendor": "', '"vendor": "9'))
    assert other == ["environment: vendor"]
    shutil.rmtree(tmp_path / "b")
    assert not altered(original, tmp_path, "summary.json", lambda text: re.sub(r'"vendor": "[^"]*",\s*', "", text))


def test_a_shorter_run(original, tmp_path):
    found = altered(original, tmp_path, "rounds.jsonl", lambda text: text[: text.rindex('{"round"')])
    assert found == ["results: rounds in rounds.jsonl"]


def test_a_model(original, tmp_path):
    other = Path(shutil.copytree(original, tmp_path / "b"))
    data = bytearray((other / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (other / "model.safetensors").write_bytes(data)
    assert [one.section for one in differences(original, other)] == ["model"]


def test_bad_input(original, tmp_path, capsys):
    assert main(["diff", str(original), str(tmp_path)]) == 2
    assert "holds no run" in capsys.readouterr().err
    assert main(["diff", str(original)]) == 2
