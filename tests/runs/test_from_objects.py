"""Run directories of objects given to `simulate`: killed and resumed, refused, ended in every way, compared."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import given_script
import numpy as np
import pytest
import torch
from torch import nn
from watching import Clients

import fedspeed
from fedspeed.cli import main
from fedspeed.record import PLACED, TIMES
from fedspeed.report.diff import differences
from fedspeed.runs.directory import RunDir

SCRIPT = Path(__file__).parents[1] / "support" / "given_script.py"


def outcome(out: Path) -> tuple[object, ...]:
    """What no break may change: rounds but for times, model, server's vectors, summary but for times."""
    rounds = [json.loads(line) for line in (out / "rounds.jsonl").read_text().splitlines()]
    summary = json.loads((out / "summary.json").read_text())
    newest = max((out / "checkpoints").glob("server@*"), key=lambda path: int(path.name.partition("@")[2]))
    return (
        [{k: v for k, v in each.items() if k not in TIMES} for each in rounds],
        {k: v for k, v in summary.items() if k not in (*TIMES, *PLACED, "seal")},
        RunDir(out).model_digest(),
        newest.name,
        newest.read_bytes(),
    )


def status(out: Path) -> str:
    return json.loads((out / "summary.json").read_text())["status"]


def script(kind: str, out: Path, backend: str, kill: int, *words: str) -> int:
    command = [sys.executable, str(SCRIPT), kind, str(out), backend, str(kill), *words]
    return subprocess.run(command, capture_output=True).returncode


@pytest.mark.parametrize(
    ("kind", "backend"),
    [("readme", "serial"), *(pytest.param("own", name, marks=pytest.mark.slow) for name in ("process", "serial"))],
)
def test_killed_and_resumed_is_the_straight_run(tmp_path, kind, backend):
    assert script(kind, tmp_path / "a", backend, 3) == 9
    assert not (tmp_path / "a" / "summary.json").exists()
    assert script(kind, tmp_path / "a", backend, 0, "resume") == 0
    run = getattr(given_script, kind)(str(tmp_path / "b"))
    for _ in run:
        pass
    ours = outcome(tmp_path / "a")
    assert ours == outcome(tmp_path / "b")
    assert len(ours[0]) == 5
    assert ours[1]["status"] == "finished"


def test_the_directory_says_what_was_given(tmp_path):
    run = given_script.own(tmp_path / "a")
    tables = tomllib.loads((tmp_path / "a" / "config.toml").read_text())
    assert tables["model"]["name"] == tables["data"]["name"] == "given"
    assert tables["model"]["class"] == "given_script:Net"
    assert tables["model"]["parameters"] == 21
    assert tables["data"]["fingerprint"] == given_script.numbers().fingerprint
    assert tables["loss"] == "given_script:huber"
    assert (tables["clients"], tables["active"], tables["engine"]) == (6, 3, run.plan.engine)


def test_without_a_directory_the_bits_are_the_same(tmp_path):
    runs = [given_script.own(tmp_path / "a"), given_script.own(None)]
    records = [[{**r.to_dict(), **dict.fromkeys(TIMES)} for r in run] for run in runs]
    assert records[0] == records[1]
    assert torch.equal(runs[0].x, runs[1].x)


def ends_by_break(run):
    for record in run:
        if record.round == 2:
            break


def ends_by_an_error(run):
    with run:
        for record in run:
            if record.round == 2:
                raise ZeroDivisionError("mine")


def ends_by_ctrl_c(run):
    with run:
        for record in run:
            if record.round == 2:
                raise KeyboardInterrupt


def ends_by_ctrl_c_in_a_round(run):
    def interrupt(done, total):
        if run.t == 2:
            raise KeyboardInterrupt

    run.observers.all.append(Clients(interrupt))
    for _ in run:
        pass


def ends_by_close(run):
    rounds = iter(run)
    next(rounds), next(rounds)
    run.close()
    assert list(rounds) == []


def ends_by_steps(run):
    run.step(), run.step()


@pytest.mark.parametrize(
    ("end", "says"),
    [
        (ends_by_break, "interrupted"),
        (ends_by_an_error, "failed: mine"),
        (ends_by_ctrl_c, "interrupted"),
        (ends_by_ctrl_c_in_a_round, "interrupted"),
        (ends_by_close, "interrupted"),
        (ends_by_steps, "interrupted"),
    ],
)
def test_every_end_leaves_a_run_that_goes_on(tmp_path, end, says):
    run = given_script.own(tmp_path / "a")
    with suppress(ZeroDivisionError, KeyboardInterrupt):
        end(run)
    assert status(tmp_path / "a") == says
    assert len((tmp_path / "a" / "rounds.jsonl").read_text().splitlines()) == 2
    resumed = given_script.own(tmp_path / "a", resume=True)
    assert resumed.t == 2
    assert [record.round for record in resumed] == [3, 4, 5]
    for _ in given_script.own(tmp_path / "b"):
        pass
    assert outcome(tmp_path / "a") == outcome(tmp_path / "b")


def test_a_script_that_fails_without_with_leaves_a_summary(tmp_path):
    code = (
        f"import sys; sys.path.insert(0, {str(SCRIPT.parent)!r}); import given_script\n"
        f"for record in given_script.own({str(tmp_path / 'a')!r}):\n    assert record.round < 2"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 1
    assert status(tmp_path / "a") == "interrupted"


def test_a_break_can_be_gone_on_with_at_once_and_the_last_round_ends_it(tmp_path):
    run = given_script.own(tmp_path / "a")
    ends_by_break(run)
    for record in run:
        if record.round == 5:
            break
    assert status(tmp_path / "a") == "finished"
    for _ in given_script.own(tmp_path / "b"):
        pass
    assert outcome(tmp_path / "a") == outcome(tmp_path / "b")


def test_a_simulation_that_was_overtaken_writes_nothing(tmp_path):
    first = given_script.own(tmp_path / "a")
    ends_by_break(first)
    for _ in given_script.own(tmp_path / "a", resume=True):
        pass
    before = outcome(tmp_path / "a")
    with pytest.raises(fedspeed.UserError, match="not where this simulation left it"):
        first.step()
    assert outcome(tmp_path / "a") == before


def test_finished_is_left_alone_and_more_rounds_are_one_long_run(tmp_path):
    for _ in given_script.own(tmp_path / "a"):
        pass
    files = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    done = given_script.own(tmp_path / "a", resume=True)
    assert (done.t, list(done)) == (5, [])
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == files
    assert [record.round for record in given_script.own(tmp_path / "a", resume=True, rounds=7)] == [6, 7]
    for _ in given_script.own(tmp_path / "b", rounds=7):
        pass
    assert outcome(tmp_path / "a") == outcome(tmp_path / "b")
    with pytest.raises(fedspeed.UserError, match="at least the 7 rounds"):
        given_script.own(tmp_path / "a", resume=True)


DATA = given_script.numbers()
OTHER = {
    "method": ({"method": fedspeed.FedAvg()}, "method.name"),
    "field": ({"method": fedspeed.Scaffold(eta_g=0.5)}, "method.eta_g"),
    "plan": ({"lr": 0.06}, "lr"),
    "model": ({"model": lambda: nn.Sequential(nn.Linear(3, 1), nn.Flatten(0))}, "model.class"),
    "seed": ({"seed": 1}, "seed"),
    "x0": ({"model": given_script.Net()}, "model.digest"),
    "data": ({"data": replace(DATA, x=DATA.x + 1)}, "data.fingerprint"),
    "split": ({"data": replace(DATA, indices=np.roll(DATA.indices, 1))}, "data.split_fingerprint"),
    "loss": ({"loss": nn.functional.mse_loss}, "loss"),
    "settings of a loss": ({"loss": nn.SmoothL1Loss(beta=0.7)}, "loss"),
    "no_decay": ({"no_decay": ["bias"]}, "no_decay"),
}


@pytest.mark.parametrize("what", OTHER)
def test_another_run_is_refused(tmp_path, what):
    usual = {"method": fedspeed.Scaffold(), "model": given_script.Net, "data": DATA, "loss": given_script.huber}
    usual |= {"rounds": 3, "active": 3, "batch_size": 8, "local_epochs": 1, "lr": 0.05, "out": tmp_path / "a"}
    ends_by_break(fedspeed.simulate(**usual))
    files = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    changed, key = OTHER[what]
    with pytest.raises(fedspeed.UserError, match=f"holds another run: expected .*{key}") as raised:
        fedspeed.simulate(**usual | changed, resume=True)
    assert "choose another out" in str(raised.value)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == files
    assert fedspeed.simulate(**usual, resume=True).t == 2


def test_an_existing_run_is_not_overwritten(tmp_path):
    given_script.own(tmp_path / "a")
    with pytest.raises(fedspeed.UserError, match="resume=True continues it, or choose another out"):
        given_script.own(tmp_path / "a")
    with pytest.raises(fedspeed.UserError, match="expected out= a folder"):
        given_script.own(None, resume=True)
    with pytest.raises(fedspeed.UserError, match="resume= True or False"):
        given_script.own(tmp_path / "a", resume="never")


def test_bad_input_leaves_nothing(tmp_path):
    with pytest.raises(fedspeed.UserError, match="at most the number of clients"):
        given_script.own(tmp_path / "deep" / "a", active=7)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ["resume", "verify", "inspect"])
def test_commands_that_would_need_the_objects_say_so(tmp_path, capsys, command):
    for _ in given_script.own(tmp_path / "a"):
        pass
    assert main([command, str(tmp_path / "a")]) == 2
    told = capsys.readouterr().err.strip()
    assert len(told.splitlines()) == 1
    assert "resume=True" in told


def test_diff_and_compare_take_it(tmp_path, capsys):
    for seed in (0, 1):
        for name, method in (("avg", fedspeed.FedAvg()), ("scaffold", fedspeed.Scaffold())):
            data = fedspeed.load_data("digits", split="iid", clients=6, seed=seed, train_size=120)
            settings = {"rounds": 2, "active": 2, "seed": seed, "local_epochs": 1}
            for _ in fedspeed.simulate(method, "linear", data, out=tmp_path / "runs" / f"{name}-{seed}", **settings):
                pass
    assert {d.section for d in differences(tmp_path / "runs" / "avg-0", tmp_path / "runs" / "avg-1")} >= {"config"}
    assert differences(tmp_path / "runs" / "avg-0", tmp_path / "runs" / "avg-0") == []
    assert main(["compare", str(tmp_path / "runs"), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert len(rows) == 2  # two methods of two seeds each


CELL = """
import numpy as np
import torch
from torch import nn
import fedspeed

class Mine(fedspeed.FedAvg):
    name = "mine"
    def rate(self, k, K):
        return 1.0 * super().rate(k, K)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 1)
    def forward(self, x):
        return self.last(torch.tanh(self.first(x))).flatten()

def stack():
    return nn.Sequential(nn.Linear(3, 1), nn.Dropout(0.1), nn.Flatten(0))

def loss(found, wanted):
    return 1.0 * (found - wanted).pow(2).mean()

def sampler(round, rng, clients, active, history):
    return [0, 1, 2]

chosen = Net
"""
EDITED = {
    "method": ("1.0 * super", "2.0 * super"),
    "model": ("torch.tanh", "torch.relu"),
    "layers": ("nn.Dropout(0.1)", "nn.Dropout(0.5)"),
    "loss": ("1.0 * (found", "3.0 * (found"),
    "cohort": ("[0, 1, 2]", "[3, 4, 5]"),
}


def in_a_notebook(text: str, out: Path) -> fedspeed.Simulation:
    """A cell that defines everything, and one that simulates."""
    cell: dict[str, object] = {"__name__": "__main__"}
    exec(text, cell)
    plan = {"rounds": 2, "active": 3, "batch_size": 8, "local_epochs": 1, "lr": 0.05, "cohort": cell["sampler"]}
    return fedspeed.simulate(cell["Mine"], cell["chosen"], DATA, loss=cell["loss"], out=out, resume=True, **plan)


@pytest.mark.parametrize("what", EDITED)
def test_edited_code_is_another_run(tmp_path, what):
    text = CELL.replace("chosen = Net", "chosen = stack") if what == "layers" else CELL
    assert len(list(in_a_notebook(text, tmp_path / "a"))) == 2
    files = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert text.count(EDITED[what][0]) == 1
    with pytest.raises(fedspeed.UserError, match=f"differs in {what}, .*choose another out") as raised:
        in_a_notebook(text.replace(*EDITED[what]), tmp_path / "a")
    assert "\n" not in str(raised.value)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == files
    assert list(in_a_notebook("# The cell has moved.\n\n" + text, tmp_path / "a")) == []


@pytest.mark.parametrize("how", ["an older version", "another Python"])
def test_code_is_compared_only_where_digests_can_tell(tmp_path, how):
    out = tmp_path / "a"
    in_a_notebook(CELL, out).close()
    tables = RunDir(out).config()
    own = tables.pop("own_code")
    RunDir(out).write_tables(tables if how == "an older version" else {**tables, "own_code": {**own, "made_by": "X"}})
    assert [record.round for record in in_a_notebook(CELL.replace(*EDITED["loss"]), out)] == [1, 2]


def test_code_neither_names_rows_nor_is_compared_between_versions(tmp_path):
    from fedspeed.report.labels import kind_of

    for name in "ab":
        assert len(list(in_a_notebook(CELL, tmp_path / name))) == 2
    run = RunDir(tmp_path / "b")
    tables = run.config()
    assert not any("own_code" in key for key in kind_of(tables))
    run.write_tables({**tables, "own_code": {**tables["own_code"], "loss": "edited"}})
    assert [d.name for d in differences(tmp_path / "a", tmp_path / "b")] == ["own_code.loss"]
    run.write_tables({**tables, "own_code": {"made_by": "X"}})
    assert differences(tmp_path / "a", tmp_path / "b") == []


def test_another_cohort_is_named_plainly(tmp_path):
    def mine(round, rng, clients, active, history):
        return [0, 1, 2]

    given_script.own(tmp_path / "a", cohort=mine).close()
    with pytest.raises(fedspeed.UserError, match=r"expected cohort the object .*mine, found 'bernoulli'; "):
        given_script.own(tmp_path / "a", cohort="bernoulli", resume=True)
    given_script.own(tmp_path / "b").close()
    with pytest.raises(fedspeed.UserError, match=r"expected cohort 'fixed', found the object .*mine; "):
        given_script.own(tmp_path / "b", cohort=mine, resume=True)


def test_targets_are_stored(tmp_path):
    given_script.readme(tmp_path / "a", targets=[0.5]).close()
    assert RunDir(tmp_path / "a").config()["targets"] == [0.5]
    for _ in given_script.readme(tmp_path / "a", resume=True):
        pass
    assert list(RunDir(tmp_path / "a").summary()["targets"]) == ["0.5"]
    given_script.readme(tmp_path / "a", resume=True, targets=0.6)
    assert RunDir(tmp_path / "a").config()["targets"] == [0.6]
