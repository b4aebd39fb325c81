"""`--model file.py:build`, `--data file.py:load`: run, resumed from elsewhere, edited, refused, in workers."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from watching import Rounds

from fedspeed.cli import main
from fedspeed.config.config import Config, Spec
from fedspeed.errors import UserError
from fedspeed.report.diff import differences
from fedspeed.runs.directory import RunDir
from fedspeed.runs.launch import prepare, resume, run_config

OWN = """
import numpy as np
import torch
from fedspeed import Federated
from fedspeed.data import from_arrays


class Net(torch.nn.Module):
    def __init__(self, inputs, width, outputs):
        super().__init__()
        self.first, self.last = torch.nn.Linear(inputs, width), torch.nn.Linear(width, outputs)

    def forward(self, x):
        return self.last(torch.tanh(self.first(x)))


def build(shape, outputs, width=5):
    return Net(shape[0], width, outputs)


def broken(shape, outputs):
    return torch.nn.Linear(shape[0], outputs, nonsense=1)


def arrays(seed, n, kind):
    stream = np.random.default_rng(seed)
    x = stream.normal(size=(n, 4)).astype("f4")
    total = x.sum(1)
    return x, (total > 0).astype("i8") if kind == "classes" else total


def load(seed=0, n=90, kind="classes"):
    x, y = arrays(seed, n, kind)
    return from_arrays(x, y)


def shared(seed=0, **options):
    x, y = arrays(seed, 60, "classes")
    return Federated.from_arrays(x, y, np.arange(60) % options.get("clients_of_mine", 3), holdout=0.2)


def nothing():
    return 3


def fails(seed):
    return {}["x"]


not_a_function = 3
"""


def line(text: str) -> int:
    """Where it stands."""
    return next(i for i, each in enumerate(OWN.splitlines(), 1) if text in each)


SMALL = ["--rounds", "4", "--local-epochs", "1", "--batch-size", "10"]


@pytest.fixture
def own(tmp_path) -> Path:
    path = tmp_path / "mine" / "own.py"
    path.parent.mkdir()
    path.write_text(OWN)
    return path


def tables(own: Path, **given: object) -> dict[str, object]:
    usual = {"rounds": 4, "local_epochs": 1, "batch_size": 10, "clients": 6, "active": 3, "backend": "serial"}
    return {**usual, "model": {"name": f"{own}:build", "width": 3}, "data": f"{own}:load", **given}


def test_from_the_command_line(own, tmp_path, capsys):
    files = ["--model", f"{own}:build", "--set", "model.width=3", "--data", f"{own}:load", "--set", "data.n=80"]
    out = tmp_path / "a"
    assert main(["run", *files, "--clients", "6", "--active", "3", *SMALL, "--out", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["parameters"] == 4 * 3 + 3 + 3 * 2 + 2
    stored = tomllib.loads((out / "config.toml").read_text())
    copy = out / stored["model"]["name"].rpartition(":")[0]
    assert copy.read_text() == OWN
    assert stored["data"]["name"].rpartition(":")[0] == stored["model"]["name"].rpartition(":")[0]
    assert (stored["model"]["width"], stored["data"]["n"], stored["model"]["origin"]) == (3, 80, str(own))
    assert main(["run", str(out / "config.toml"), "--out", str(tmp_path / "b"), "--quiet"]) == 0
    assert differences(out, tmp_path / "b") == []
    assert main(["verify", str(out)]) == 2
    assert "--allow-code" in capsys.readouterr().err
    assert main(["verify", str(out), "--all", "--allow-code"]) == 0
    assert main(["compare", str(out), str(tmp_path / "b"), "--json", "--out", str(tmp_path / "c")]) == 0


def test_the_same_command_goes_on_with_it(own, tmp_path):
    command = ["run", "--model", f"{own}:build", "--data", f"{own}:shared", *SMALL, "--out", str(tmp_path / "a")]
    assert main([*command, "--resume", "auto", "--quiet"]) == 0
    assert main([*command, "--resume", "auto", "--quiet"]) == 0
    own.write_text(OWN.replace("tanh", "relu"))
    assert main([*command, "--resume", "auto", "--quiet"]) == 2


def stop(record):
    if record.round == 2:
        raise KeyboardInterrupt


def test_resumed_from_another_folder_with_the_code_it_began_with(own, tmp_path, monkeypatch):
    monkeypatch.chdir(own.parent)
    relative = {"model": {"name": "own.py:build", "width": 3}, "data": "own.py:load"}
    run_config(Config.from_dict(tables(own, **relative)), tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        run_config(Config.from_dict(tables(own, **relative)), tmp_path / "a", observers=[Rounds(stop)])
    own.write_text(OWN.replace("tanh", "relu"))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"names (data|model) .*own-.*--allow-code"):
        resume(tmp_path / "a")
    with pytest.warns(UserWarning, match="own.py was changed since the run began") as told:
        resume(tmp_path / "a", allow_code=True)
    assert len(told) == 1
    assert differences(tmp_path / "whole", tmp_path / "a") == []
    (own.parent / "later").mkdir()
    (tmp_path / "a").rename(own.parent / "later" / "a")  # the directory alone holds all it needs
    own.unlink()
    assert resume(own.parent / "later" / "a", allow_code=True, rounds=5)["rounds"] == 5


def test_a_copy_that_was_edited_is_not_executed(own, tmp_path):
    run_config(Config.from_dict(tables(own)), tmp_path / "a")
    copy = next((tmp_path / "a" / "code").glob("*.py"))
    copy.write_text("raise SystemExit('executed')")
    with pytest.raises(UserError, match="was changed \\(expected digest"):
        resume(tmp_path / "a", allow_code=True)


def test_worker_processes_find_the_classes(own, tmp_path, quick_workers):
    """In processes that know nothing of the file."""
    method = """
from fedspeed import FedAvg
class Mine(FedAvg):
    pass
"""
    own.write_text(OWN + method)
    for backend in ("serial", "process"):
        given = tables(own, method=f"{own}:Mine", backend=backend, workers=2, engine="loop")
        run_config(Config.from_dict(given), tmp_path / backend)
    digests = {RunDir(tmp_path / backend).model_digest() for backend in ("serial", "process")}
    assert len(digests) == 1


@pytest.mark.parametrize("backend", ["serial", pytest.param("process", marks=pytest.mark.slow)])
def test_an_edit_after_the_config_was_read_changes_nothing(own, tmp_path, backend):
    """Copies, the run and its workers have the text that was read, not the file as it is by then."""
    config = Config.from_dict(tables(own, backend=backend, workers=2, engine="loop", rounds=1))
    own.write_text("raise SystemExit('edited')")
    run_config(config, tmp_path / "a")
    assert [path.read_text() for path in (tmp_path / "a" / "code").iterdir()] == [OWN]


@pytest.mark.parametrize("kind", ["model", "data"])
def test_a_file_alone_is_asked_what_of_it(own, kind):
    with pytest.raises(UserError, match=f"{kind} .*which function of .* is it"):
        prepare(Config.from_dict(tables(own, **{kind: str(own)})))


def test_samples_are_split_and_a_federated_is_taken_as_it_is(own):
    config = Config(data=Spec(f"{own}:load"), model=Spec(f"{own}:build"), split="iid", clients=5, backend="serial")
    assert config == Config.from_dict(config.to_dict())
    with prepare(config) as simulation:
        assert simulation.data.clients == 5
    given = tables(own, data={"name": f"{own}:shared", "clients_of_mine": 4})
    with prepare(Config.from_dict({**given, "clients": 0, "active": 0})) as simulation:
        assert (simulation.data.clients, simulation.plan.active) == (4, 4)
    with pytest.raises(UserError, match="expected 6 clients, found 4; leave --clients out"):
        prepare(Config.from_dict(given))


def test_regression_has_outputs_like_its_targets(own, tmp_path):
    summary = run_config(
        Config.from_dict(tables(own, data={"name": f"{own}:load", "kind": "numbers"}, split="iid", lr=0.05)),
        tmp_path / "a",
    )
    assert summary["last_accuracy"] is None
    assert summary["last_test_loss"] < 4


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"model": "{own}:bild"}, "did you mean 'build'"),
        ({"model": "{own}:broken"}, rf"nonsense.*own\.py, line {line('nonsense')}"),
        ({"model": {"name": "{own}:build", "wide": 3}}, "unknown option of model .*did you mean 'width'"),
        ({"model": "{own}:not_a_function"}, "expected a function build"),
        ({"model": "{own}:nothing"}, "cannot be built"),
        ({"model": "nowhere.py:build"}, "there is no file .*file.py:build"),
        ({"model": "mlpp"}, "did you mean 'mlp'"),
        ({"data": "{own}:nothing"}, "expected Samples or a Federated, found a int"),
        ({"data": "{own}:fails"}, rf"KeyError: 'x' \(.*own\.py, line {line('return {}[')}\)"),
        ({"data": {"name": "{own}:load", "m": 3}}, "unknown option of data"),
        ({"data": "{bad}:load"}, r"cannot be imported: SyntaxError.*bad\.py, line 2\)"),
        ({"data": "nowhere.py:load"}, "there is no file .*file.py:load"),
    ],
    ids=str,
)
def test_errors_name_file_and_line(own, tmp_path, given, says):
    bad = own.with_name("bad.py")
    bad.write_text("import os\ndef load(:\n")

    def filled(value):
        if isinstance(value, dict):
            return {key: filled(inner) for key, inner in value.items()}
        return value.format(own=own, bad=bad) if isinstance(value, str) else value

    with pytest.raises(UserError, match=says):
        run_config(Config.from_dict(tables(own, **filled(given))), tmp_path / "a")
    assert not (tmp_path / "a").exists()


def test_reading_a_config_executes_no_model_and_no_data_file(own):
    own.write_text("raise SystemExit('executed')")
    code = (
        f"from fedspeed.config.config import Config; import sys\n"
        f"c = Config.from_dict({{'model': '{own}:build', 'data': '{own}:load'}})\n"
        f"assert c.model.code == c.data.code != ''; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
