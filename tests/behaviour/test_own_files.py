"""`--model file.py:build`, `--data file.py:load`, `--cohort file.py:sample`: run, resumed, edited, refused, sent."""

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


def test_from_the_command_line(own, tmp_path, capsys, monkeypatch):
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
    assert main(["verify", str(out)]) == 0
    monkeypatch.setenv("FEDSPEED_STATE", str(tmp_path / "of another user"))
    capsys.readouterr()
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
    monkeypatch.setenv("FEDSPEED_STATE", str(tmp_path / "of another user"))
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


# Code in several files


MANY = {
    "method.py": """
from dataclasses import dataclass

from base import Halved

import random
import torch


@dataclass(frozen=True)
class Mine(Halved):
    def direction(self, x, grad, down, client):
        from late import twice  # found too, and in workers

        assert random.Random and torch.nn
        return twice(super().direction(x, grad, down, client))
""",
    "base.py": "from fedspeed.methods import FedAvg\nfrom tools.numbers import HALF\n\n\nclass Halved(FedAvg):\n"
    "    def direction(self, x, grad, down, client):\n        return HALF * grad(x)\n",
    "late.py": "def twice(a):\n    return 2.0 * a\n",
    "tools/__init__.py": "",
    "tools/numbers.py": "from .deep import HALF\n",
    "tools/deep/__init__.py": "HALF = 0.5\n",
    "nets.py": "from layers.plain import Net\n\n\ndef build(shape, outputs):\n    return Net(outputs)\n",
    "layers/plain.py": "from torch import nn\n\n\nclass Net(nn.Sequential):\n    def __init__(self, outputs):\n"
    "        super().__init__(nn.Flatten(), nn.Linear(64, outputs))\n",
    "random.py": "raise SystemExit('executed')",
    "torch.py": "raise SystemExit('executed')",
}
"""The method is FedAvg: half of twice the gradient, exactly."""
SMALL_RUN = ["--rounds", "3", "--clients", "6", "--active", "3", "--local-steps", "2", "--engine", "loop", "--quiet"]


@pytest.fixture
def many(tmp_path, monkeypatch) -> Path:
    """A folder of the user's code, which is not the current one."""
    folder = tmp_path / "project"
    for name, text in MANY.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    return folder


def command(folder: Path, out: str, *more: str) -> list[str]:
    files = ["--method", f"{folder / 'method.py'}:Mine", "--model", f"{folder / 'nets.py'}:build"]
    return ["run", *files, *SMALL_RUN, "--out", out, *more]


def model_bits(out: str) -> str | None:
    return RunDir(out).model_digest()


def copied(out: str) -> set[str]:
    return {path.relative_to(Path(out, "code")).as_posix() for path in Path(out, "code").rglob("*.py")}


def test_a_method_and_a_model_in_several_files(many, quick_workers):
    """The same bits as FedAvg, whose method it is, on both back ends; the run holds what was imported, and no more."""
    for backend in ("serial", "process"):
        assert main(command(many, backend, "--backend", backend, "--workers", "2")) == 0
    assert (
        main(["run", "--method", "fedavg", "--model", f"{many / 'nets.py'}:build", *SMALL_RUN, "--out", "plain"]) == 0
    )
    assert model_bits("serial") == model_bits("process") == model_bits("plain")
    stored = tomllib.loads(Path("serial/config.toml").read_text())
    method, model = (stored[key]["code"] for key in ("method", "model"))
    assert (method[-2:], model[-2:]) == ("+5", "+1")
    wanted = {"method": ["method.py", "base.py", "late.py", "tools/__init__.py", "tools/numbers.py",
                         "tools/deep/__init__.py"], "nets": ["nets.py", "layers/plain.py"]}  # fmt: skip
    folders = {"method": f"method-{method[:8]}", "nets": f"nets-{model[:8]}"}
    assert copied("serial") == {f"{folders[key]}/{name}" for key, names in wanted.items() for name in names}
    assert main(["run", "serial/config.toml", "--out", "again", "--quiet"]) == 0
    assert differences(Path("serial"), Path("again")) == []


@pytest.mark.filterwarnings("default")  # the files are others by then, which commands say
def test_it_is_resumed_without_its_files_and_from_elsewhere(many, monkeypatch):
    assert main(command(many, "whole")) == 0
    config = Config.from_toml(Path("whole/config.toml"))
    with pytest.raises(KeyboardInterrupt):
        run_config(config, "cut", observers=[Rounds(stop)])
    for path in many.rglob("*.py"):
        path.write_text("raise SystemExit('executed')")
    Path("cut").rename(many.parent / "moved")
    monkeypatch.chdir(many.parent)
    assert main(["resume", "moved", "--quiet"]) == 0
    assert differences(many.parent / "elsewhere" / "whole", many.parent / "moved") == []
    assert main(["verify", "moved", "--all"]) == 0


def test_an_edit_of_a_file_beside_is_an_edit_of_the_code(many, capsys):
    assert main(command(many, "a")) == 0
    (many / "tools" / "deep" / "__init__.py").write_text("HALF = 0.25\n")
    assert main([*command(many, "a"), "--resume", "auto"]) == 2
    assert "or of other code" in capsys.readouterr().err
    assert main(command(many, "b")) == 0
    assert model_bits("a") != model_bits("b")
    with pytest.warns(UserWarning, match=r"method\.py or a file beside it was changed since the run began"):
        resume("a", rounds=4)
    (many / "random.py").write_text("")  # this one is no part of it
    resume("b", rounds=4)


def test_compare_takes_it_and_its_runs_are_in_other_processes(many, monkeypatch, capsys):
    monkeypatch.chdir(many)
    given = [word for word in SMALL_RUN if word != "--quiet"]
    files = ["fedavg", "method.py:Mine", "--model", "nets.py:build"]
    assert main(["compare", *files, *given, "--seeds", "2", "--jobs", "2", "--out", "../c", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert "Mine" in json.dumps(rows)
    found = {path.parent.name: RunDir(path.parent).model_digest() for path in Path("../c").glob("*/summary.json")}
    assert len(found) == 4
    assert len(set(found.values())) == 2  # one per seed


def test_other_commands_take_it(many, capsys):
    assert main(["methods", f"{many / 'method.py'}:Mine"]) == 0
    assert "1 gradient(s) per step" in " ".join(capsys.readouterr().out.split())
    assert main(["audit", f"{many / 'method.py'}:Mine", "--method", "fedavg"]) == 2  # it was imported, and looked at
    assert "Mine: it needs client(...)" in capsys.readouterr().err


def test_overwriting_removes_the_copies_and_no_file_of_the_user_s(many):
    assert main(command(many, "a")) == 0
    folder = next(Path("a/code").glob("method-*"))
    (folder / "notes.txt").write_text("mine")
    assert main(["run", *SMALL_RUN, "--out", "a", "--overwrite"]) == 0
    assert [path for path in Path("a/code").rglob("*") if path.is_file()] == [folder / "notes.txt"]
    assert not Path("a/signature.json").exists()


def test_a_run_that_could_not_begin_leaves_nothing(many):
    assert main([*command(many, "a"), "--data", f"{many / 'nets.py'}:nothing"]) == 2
    assert not Path("a").exists()


@pytest.mark.slow
def test_killed_and_resumed_without_asking(many, tmp_path):
    """A real process in the user's folder, with real workers; `kill -9`, and then only `resume`."""
    import os
    import signal
    import time

    assert main(command(many, "whole", "--rounds", "600")) == 0
    given = command(many, "cut", "--rounds", "600", "--checkpoint-every", "2", "--backend", "process", "--workers", "2")
    process = subprocess.Popen([sys.executable, "-m", "fedspeed", *given], start_new_session=True)
    deadline = time.monotonic() + 120
    while not list(Path("cut").glob("checkpoints/*.json")) and time.monotonic() < deadline:
        assert process.poll() is None
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert not Path("cut/summary.json").exists()
    subprocess.run([sys.executable, "-m", "fedspeed", "resume", "cut", "--quiet"], check=True)
    assert model_bits("cut") == model_bits("whole")


SETTING = """
class Block:
    def __init__(self, first=0):
        self.first = first

    def __call__(self, round, rng, clients, active, history):
        return [(self.first + round + i) % clients for i in range(active)]


def sample(round, rng, clients, active, history):
    return rng.choice(clients, active, replace=False, shuffle=False)
"""


@pytest.fixture
def who(tmp_path) -> Path:
    path = tmp_path / "mine" / "who.py"
    path.parent.mkdir()
    path.write_text(SETTING)
    return path


def cohorts(run: Path) -> list[list[int]]:
    return [record.cohort for record in RunDir(run).records()]


PLAIN_RUN = ["run", "--model", "linear", "--clients", "6", "--active", "2", *SMALL, "--quiet"]


def test_a_setting_from_a_file_is_a_part_of_the_run(who, tmp_path, capsys, monkeypatch):
    out, elsewhere = tmp_path / "a", tmp_path / "elsewhere"
    assert main([*PLAIN_RUN, "--cohort", f"{who}:Block", "--set", "cohort.first=3", "--out", str(out)]) == 0
    assert cohorts(out) == [[4, 5], [0, 5], [0, 1], [1, 2]]
    stored = tomllib.loads((out / "config.toml").read_text())["cohort"]
    assert (out / stored["name"].rpartition(":")[0]).read_text() == SETTING
    assert (stored["first"], stored["origin"]) == (3, str(who))
    who.unlink()
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    monkeypatch.setenv("FEDSPEED_STATE", str(tmp_path / "of another user"))
    for command in (["verify", "--all"], ["resume", "--rounds", "5"], ["replay", "--round", "2", "--client", "5"]):
        assert main([command[0], str(out), *command[1:]]) == 2
        assert "--allow-code" in capsys.readouterr().err
        assert main([command[0], str(out), *command[1:], "--allow-code"]) == 0
    assert cohorts(out)[4] == [2, 3]
    assert main(["fork", str(out), "--at", "2", "--set", "lr=0.05", "--out", str(elsewhere / "f"), "--allow-code"]) == 0
    assert cohorts(elsewhere / "f") == cohorts(out)


def test_a_setting_in_several_files(who, tmp_path):
    """Copied, signed and resumed as the others are."""
    main_file = who.with_name("chosen.py")
    main_file.write_text("from who import Block\n\n\nclass Chosen(Block):\n    pass\n")
    out = tmp_path / "a"
    assert main([*PLAIN_RUN, "--cohort", f"{main_file}:Chosen", "--set", "cohort.first=3", "--out", str(out)]) == 0
    assert cohorts(out) == [[4, 5], [0, 5], [0, 1], [1, 2]]
    assert copied(str(out)) == {f"{next((out / 'code').iterdir()).name}/{name}" for name in ("chosen.py", "who.py")}
    who.unlink()
    main_file.unlink()
    assert resume(out, rounds=5)["rounds"] == 5
    assert cohorts(out)[4] == [2, 3]


def test_a_function_of_a_file_gets_the_stream_of_the_round(who, tmp_path):
    assert main([*PLAIN_RUN, "--cohort", f"{who}:sample", "--out", str(tmp_path / "a")]) == 0
    assert main([*PLAIN_RUN, "--out", str(tmp_path / "b")]) == 0
    assert cohorts(tmp_path / "a") == cohorts(tmp_path / "b")  # the sampler draws as `fixed` does


def test_a_setting_in_a_config_means_the_file_beside_it(who, tmp_path):
    (who.parent / "run.toml").write_text(
        'rounds = 2\nclients = 6\nactive = 2\n[cohort]\nname = "who.py:Block"\nfirst = 1\n'
    )
    config = Config.from_toml(who.parent / "run.toml")
    assert isinstance(config.cohort, Spec)
    assert config.cohort.name == f"{who}:Block"
    assert Config.from_dict(config.to_dict()) == config
    assert Config.from_toml(who.parent / "run.toml").to_toml() == config.to_toml()


def test_sweeps_and_comparisons_take_a_setting_from_a_file(who, tmp_path, capsys):
    small = ["--model", "linear", "--clients", "6", "--active", "2", "--rounds", "2", "--local-steps", "1", "--quiet"]
    grid = ["--grid", f"cohort=fixed,{who}:Block", "--seeds", "1", "--jobs", "1"]
    assert main(["sweep", *grid, *small, "--out", str(tmp_path / "s")]) == 0
    found = sorted(str(cohorts(path.parent)) for path in (tmp_path / "s").rglob("config.toml"))
    assert len(found) == 2
    assert "[[1, 2], [2, 3]]" in found
    grid = ["--cohort", f"{who}:Block", "--grid", "cohort.first=0,3", "--seeds", "1", "--jobs", "1"]
    assert main(["sweep", *grid, *small, "--out", str(tmp_path / "d")]) == 0
    found = sorted(str(cohorts(path.parent)) for path in (tmp_path / "d").rglob("config.toml"))
    assert found == ["[[1, 2], [2, 3]]", "[[4, 5], [0, 5]]"]
    both = ["fedavg", "fedprox", "--seeds", "1", "--jobs", "1", *small, "--cohort", f"{who}:Block"]
    assert main(["compare", *both, "--out", str(tmp_path / "c")]) == 0
    runs = [path.parent for path in (tmp_path / "c").rglob("config.toml")]
    assert len(runs) == 2
    assert all(cohorts(run) == [[1, 2], [2, 3]] for run in runs)
    assert main(["compare", *both, "--out", str(tmp_path / "c")]) == 0  # what the user names is trusted


def test_the_file_of_a_first_stretch_needs_permission_too(who, tmp_path):
    run_config(Config(rounds=2, clients=6, active=2, local_steps=1), tmp_path / "a")
    config = tmp_path / "a" / "config.toml"
    config.write_text(config.read_text() + f'\n[until.1.cohort]\nname = "{who}:sample"\n')
    with pytest.raises(UserError, match=r"names cohort .*--allow-code"):
        resume(tmp_path / "a", rounds=3)
