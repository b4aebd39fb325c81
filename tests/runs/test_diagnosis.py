"""Runs that really are ill say so, once, in their records, and in `fedspeed explain`; healthy ones say nothing."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from watching import Stop, stop_after

from fedspeed import (
    METHODS,
    Config,
    Diverged,
    FedAvg,
    Federated,
    FedSpeed,
    Record,
    Scaffold,
    build_model,
    run_config,
    simulate,
)
from fedspeed.cli import build_parser, main, options
from fedspeed.client import trees
from fedspeed.report.diff import differences
from fedspeed.report.run_files import Row, RunFiles
from fedspeed.report.tables import table
from fedspeed.runs.diagnosis import ADVICE, CHANGES, MEANING, WarnObserver, advise, diagnose
from fedspeed.runs.directory import RunDir, exclusive
from fedspeed.runs.launch import resume
from fedspeed.runs.verify import verify
from fedspeed.server.health import HealthMonitor, spread

DEMO = {"data": "digits", "split": "dirichlet:0.3", "clients": 50, "active": 5, "model": "mlp", "backend": "serial"}
DEAD = {**DEMO, "method": "fedavg", "lr": 20.0, "rounds": 8}
ILL = {
    "all alike": ({"method": "fedavg", "lr": 5.0}, ["constant outputs"]),
    "killed": ({"method": "fedavg", "lr": 20.0}, ["constant outputs", "dead layer: 2"]),
    "overshooting": ({"method": "fedavg", "lr": 100.0, "model": "linear"}, ["loss above guessing"]),
    "c runs away": (
        {"method": "scaffold", "lr": 10.0}, ["constant outputs", "growing state: server.x", "dead layer: 2"]),
    "too slow": ({"method": "fedavg", "lr": 1e-6}, ["standing still"]),
}  # fmt: skip


def told_by(tables: dict, out: Path) -> list[str]:
    told: list[str] = []
    run_config(Config.from_dict(tables), out, overwrite=True, observers=[WarnObserver(told.append)])
    return told


@pytest.mark.parametrize("name", ILL)
def test_an_ill_run_says_so_once_and_writes_it_down(tmp_path, name):
    tables, expected = ILL[name]
    told = told_by({**DEMO, "rounds": 16, **tables}, tmp_path / "a")
    summary = json.loads((tmp_path / "a" / "summary.json").read_text())
    assert list(summary["illnesses"]) == expected
    assert len(told) == len(expected)
    for text, since in zip(told, summary["illnesses"].values(), strict=True):
        assert text.startswith(f"round {since}: ")
        assert "; try --" in text
        assert f"`fedspeed explain {tmp_path / 'a'}`" in text
        assert "\n" not in text
    assert verify(tmp_path / "a").broken == []


@pytest.mark.parametrize("method", ["fedavg", "fedspeed", "scaffold", "fedadam"])
def test_a_healthy_run_has_neither_lines_nor_signs(tmp_path, method):
    assert told_by({**DEMO, "method": method, "rounds": 12, "batch_size": 10}, tmp_path / "a") == []
    assert "signs" not in (tmp_path / "a" / "rounds.jsonl").read_text()
    assert "illnesses" not in (tmp_path / "a" / "summary.json").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_the_demo_of_every_method_is_quiet(tmp_path, method):
    active = 50 if method == "fedpd" else 5
    tables = {**DEMO, "method": method, "rounds": 60, "batch_size": 10, "active": active}
    assert told_by(tables, tmp_path / "a") == []


def test_a_run_that_was_stopped_tells_and_holds_the_same(tmp_path):
    whole = told_by(DEAD, tmp_path / "whole")
    first, then = [], []
    with pytest.raises(Stop):
        run_config(Config.from_dict(DEAD), tmp_path / "a", observers=[WarnObserver(first.append), stop_after(5)])
    resume(tmp_path / "a", observers=[WarnObserver(then.append)])
    assert [text.split(";")[0] for text in first + then] == [text.split(";")[0] for text in whole]
    assert (len(first), len(then)) == (1, 1)
    assert differences(tmp_path / "whole", tmp_path / "a") == []


@pytest.mark.slow
def test_signs_are_the_same_on_every_back_end(tmp_path):
    run_config(Config.from_dict(DEAD), tmp_path / "a")
    run_config(Config.from_dict({**DEAD, "backend": "process", "workers": 2}), tmp_path / "b")
    assert {one.name for one in differences(tmp_path / "a", tmp_path / "b")} == {"backend", "workers"}


@pytest.mark.parametrize("tables", [DEAD, {**DEAD, "lr": 0.1, "method": "fedspeed"}], ids=["ill", "healthy"])
def test_looking_changes_no_bit(tmp_path, monkeypatch, tables):
    told_by(tables, tmp_path / "looked")
    monkeypatch.setattr(HealthMonitor, "round", lambda *_: {})
    monkeypatch.setattr(HealthMonitor, "client", lambda *_, **__: None)
    told_by(tables, tmp_path / "not")
    digests = [RunDir(tmp_path / name).model_digest() for name in ("looked", "not")]
    assert digests[0] == digests[1]
    assert verify(tmp_path / "not").broken == []
    monkeypatch.undo()
    assert verify(tmp_path / "not").broken == []  # as a run of a version that did not look


def two_blobs() -> Federated:
    r = np.random.default_rng(0)
    y = np.arange(120) % 2
    x = (r.normal(size=(120, 4)) + 2 * y[:, None]).astype("f4")
    return Federated.from_arrays(x[:80], y[:80], np.repeat(np.arange(4), 20), test=(x[80:], y[80:]), classes=2)


def test_a_round_costs_one_norm_per_vector(monkeypatch):
    calls, norm = [], trees.norm
    run = simulate(Scaffold(), nn.Linear(4, 2), two_blobs(), rounds=3, active=2, eval_every=3)
    monkeypatch.setattr(trees, "norm", lambda a: calls.append(a) or norm(a))
    run.step()
    assert len(calls) == 3  # the server's x and c, one client's c


def test_a_layer_that_a_bias_has_killed_is_named():
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    with torch.no_grad():
        model[0].bias.fill_(-1e3)
    told: list[str] = []
    records = list(simulate(FedAvg(), model, two_blobs(), rounds=6, active=2, observers=[WarnObserver(told.append)]))
    found = {one.name: one for one in diagnose(records)}
    assert found["dead layer"].about == "1"
    assert found["untrained weights"].about == "0.weight"
    assert records[-1].signs["zeros from 1"] == 40
    assert any("layer 1 gives zeros for all of 40 samples" in text for text in told)
    with torch.no_grad():
        model[0].bias.fill_(0)
    assert not any(r.signs for r in simulate(FedAvg(), model, two_blobs(), rounds=6, active=2))


def test_outputs_that_were_alike_from_the_start_were_not_lost():
    """A model that starts with small outputs, and takes small steps."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    with torch.no_grad():
        model[2].weight.mul_(1e-3)
    records = list(simulate(FedAvg(), model, two_blobs(), rounds=8, active=2, lr=1e-5, weight_decay=1.0))
    assert not any("spread of outputs" in record.signs for record in records)


@pytest.mark.slow
@pytest.mark.parametrize(("init", "ill"), [("usual", True), ("zero-residual", False)])
def test_the_start_of_resnet18_gn_under_fedspeed(init, ill):
    """The usual start loses what distinguishes pictures in the first rounds; zero residual branches do not."""
    r = np.random.default_rng(0)
    y = np.arange(300) % 10
    means = r.normal(size=(10, 3, 8, 8)).repeat(4, 2).repeat(4, 3)
    x = (0.5 * means[y] + r.normal(size=(300, 3, 32, 32))).astype("f4")
    owner = np.repeat(np.arange(2), 100)
    data = Federated.from_arrays(x[:200], y[:200], owner, test=(x[200:], y[200:]), classes=10)
    model = build_model("resnet18_gn", data, init=init, trim=True)
    records = list(simulate(FedSpeed(), model, data, rounds=5, active=2, batch_size=20, local_epochs=2))
    assert [one.name for one in diagnose(records)] == (["constant outputs"] if ill else [])


def test_the_spread_is_that_of_numpy():
    logits = torch.randn(50, 7, generator=torch.Generator().manual_seed(1)) + torch.arange(50)[:, None]
    a = logits.double().numpy()
    a = a - a.mean(1, keepdims=True)
    assert spread(logits) == pytest.approx(np.sqrt(a.var(axis=0).mean()), rel=1e-12)


# --- rules, on records made by hand ---


def records(signs: list[dict], **others) -> list[Record]:
    one = Record(1, [0], 0.1, 2.0, 2.5, 0.1, 1.0, 1.0, 1, 1, 1.0, [], [], 0.1, 0.1)
    return [replace(one, round=t, signs=each, **others) for t, each in enumerate(signs, 1)]


@pytest.mark.parametrize(
    ("sign", "values", "since"),
    [
        ("spread of outputs", [0.01, 0.009, 0.008], 3),
        ("spread of outputs", [0.01, 0.009], None),
        ("spread of outputs", [0.01, None, 0.009, 0.008], None),  # it recovered in between
        ("spread of outputs", [0.001, 0.002, 0.003, 0.004], None),  # it grows: a slow start
        ("norm server.c", [60, 70, 80, 130], 4),
        ("norm server.c", [60, 70, 65, 70, 65], None),  # large, but settled
        ("norm server.c", [60, None, 130, None, 300], None),
        ("zeros from 1", [9, 9, 9], 3),
        ("still 0.weight", [0.0], 1),
        ("accuracy of guessing", [0.1] * 10, 10),
        ("accuracy of guessing", [0.1] * 9, None),
        ("loss of guessing", [2.303] * 5, 5),
        ("loss of guessing", [2.303] * 4, None),
    ],
)
def test_when_a_sign_counts(sign, values, since):
    made = records([{} if value is None else {sign: value} for value in values])
    made = [replace(r, test_loss=2.5 + r.round / 10) for r in made]
    assert [one.since for one in diagnose(made)] == ([] if since is None else [since])


def test_a_slow_start_is_not_chance():
    """As FedCM with the CNN on digits: from guessing to 60% in forty rounds, its loss a little lower in each."""
    slow = [replace(r, test_loss=2.31 - r.round / 500) for r in records([{"accuracy of guessing": 0.1}] * 20)]
    assert diagnose(slow) == []
    stuck = [*slow[:12], *(replace(r, test_loss=2.28) for r in slow[12:])]
    assert [(one.name, one.since) for one in diagnose(stuck)] == [("chance", 14)]


def test_a_loss_that_swings_does_not_stand_still():
    swings = [replace(r, test_loss=2.4 + r.round % 2) for r in records([{"accuracy of guessing": 0.1}] * 11)]
    assert [one.name for one in diagnose(swings)] == ["chance"]


def test_rounds_that_are_not_evaluated_do_not_end_a_streak():
    made = records([{"spread of outputs": 0.001}, {}, {"spread of outputs": 0.001}, {}, {"spread of outputs": 0.001}])
    blind = [r if r.signs else replace(r, test_loss=None, test_accuracy=None) for r in made]
    assert ([one.since for one in diagnose(blind)], diagnose(made)) == ([5], [])


def test_a_record_with_signs_is_read_back():
    one = records([{"norm server.c": float("inf"), "still 0.weight": 0.0}])[0]
    plain = json.loads(json.dumps(one.to_dict()))
    assert plain["signs"] == {"norm server.c": None, "still 0.weight": 0.0}
    assert Record.from_dict(plain).signs == plain["signs"]
    assert "signs" not in replace(one, signs={}).to_dict()


# --- NaN on the way ---


@pytest.mark.parametrize(
    ("tables", "says"),
    [
        ({"lr": 1e30}, r"in round 1; try a lower --lr \(now 1e\+30\), .*: its loss was 2\.\d+ at first, .* at step \d"),
        ({"lr": 3e38, "weight_decay": 10.0, "local_steps": 1},
         r"in round 1; try a lower --lr .* finite, what came of the last step is not"),
        ({"method": {"name": "fedavg", "eta_g": 1e30}, "model": "mlp"},
         r"the server's x had run away to a norm of .*e\+"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("engine", ["loop", "block"])
def test_nan_is_told_with_its_cause(tmp_path, tables, says, engine):
    base = {**DEMO, "method": "fedavg", "model": "linear", "rounds": 6, "engine": engine}
    with pytest.raises(Diverged, match=says):
        run_config(Config.from_dict({**base, **tables}), tmp_path / "a")


class Blind(FedAvg):
    """Never asks for a gradient, and leaves the numbers."""

    def direction(self, x, grad, down, client):
        return x * 1e20


def test_nan_without_a_gradient_is_told():
    with pytest.raises(Diverged, match=r"Blind: client \d diverged .* fewer local steps \(now 2\)"):
        list(simulate(Blind(), nn.Linear(4, 2), two_blobs(), rounds=1, active=2, local_steps=2, engine="loop",
                      lr=1e30))  # fmt: skip


def test_a_model_that_has_no_loss_from_the_start_is_to_blame():
    model = nn.Sequential(nn.Linear(4, 2))
    with torch.no_grad():
        model[0].weight.fill_(3e38)
    with pytest.raises(Diverged, match="before any step: the first model, or the scale of the inputs, is to blame"):
        list(simulate(FedAvg(), model, two_blobs(), rounds=1, active=2))


# --- the command line ---


@pytest.fixture
def ill(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    told_by(DEAD, Path("ill"))
    return Path("ill")


SHORT = shlex.split("--data digits --clients 50 --active 5 --model mlp --lr 20 --rounds 7 --backend serial")


def test_a_line_each_while_it_runs_and_a_note_in_tables(tmp_path, capsys):
    out = tmp_path / "a"
    assert main(["run", "--method", "fedavg", *SHORT, "--out", str(out)]) == 0
    assert capsys.readouterr().out.count("fedavg: round 5: outputs no longer depend on the input") == 1
    _, lines = table([Row("a", [RunFiles.read(out)])])
    assert lines[0][0] == "a (1 of 1 unhealthy: constant outputs)"
    assert main(["run", "--method", "fedavg", *SHORT, "--out", str(out), "--overwrite", "--quiet"]) == 0
    assert capsys.readouterr().out == ""


@pytest.mark.slow
@pytest.mark.parametrize("jobs", ["1", "2"])
def test_compare_names_the_run_that_is_ill(tmp_path, capsys, jobs):
    given = ["--seeds", "2", "--jobs", jobs, "--out", str(tmp_path / "c")]
    assert main(["compare", "fedavg", *SHORT, *given]) == 0
    out = capsys.readouterr().out
    for seed in (0, 1):
        assert len(re.findall(rf"fedavg seed {seed}: round \d: outputs no longer depend", out)) == 1
    assert "fedavg (2 of 2 unhealthy: constant outputs)" in out
    assert json.loads((tmp_path / "c" / "table.json").read_text())["rows"][0]["illnesses"][0][0] == "constant outputs"


def explained(capsys, *given: str) -> str:
    assert main(["explain", *given]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out


def test_explain_says_what_when_why_and_what_to_try(ill, capsys):
    out = explained(capsys, "ill")
    assert out.startswith("ill: finished, 8 of 8 rounds; accuracy 10.")
    assert re.search(r"constant outputs\n  since round 5: .*\n  seen in 6 rounds; round: value 3: ", out)
    assert "dead layer: 2\n" in out
    assert "1. --lr 0.1 " in out
    command = re.search(r"for example: (fedspeed .*)", out)[1]
    assert main([*shlex.split(command)[1:], "--rounds", "1", "--quiet"]) == 0
    assert "lr = 0.1\n" in (Path("ill-2") / "config.toml").read_text()
    found = json.loads(explained(capsys, "ill", "--json"))
    assert [one["name"] for one in found["illnesses"]] == ["constant outputs", "dead layer"]


def test_explain_of_a_healthy_run(tmp_path, capsys):
    told_by({**DEMO, "method": "fedavg", "rounds": 3}, tmp_path / "a")
    assert "nothing of what is looked for was seen" in explained(capsys, str(tmp_path / "a"))


def test_explain_of_a_run_in_progress_of_a_killed_and_of_a_failed_one(ill, capsys):
    summary = json.loads((ill / "summary.json").read_text())
    (ill / "summary.json").unlink()
    assert "interrupted without a summary, 8 of 8 rounds" in explained(capsys, "ill")
    with exclusive(ill):
        out = explained(capsys, "ill")
    assert "running, 8 of 8 rounds so far" in out
    assert "constant outputs" in out
    (ill / "summary.json").write_text(json.dumps({**summary, "status": "failed: no room"}))
    assert "failed, 8 of 8 rounds (no room)" in explained(capsys, "ill")
    rounds = (ill / "rounds.jsonl").read_text()
    (ill / "rounds.jsonl").write_text("".join(rounds.splitlines(keepends=True)[:2]))
    assert "note: ill/rounds.jsonl is damaged: expected 8 rounds, found 2" in explained(capsys, "ill")
    (ill / "rounds.jsonl").unlink()
    out = explained(capsys, "ill")
    assert "no round is done yet" in out
    assert "nothing of what is looked for" not in out


def test_explain_of_a_run_that_diverged(own_folder, capsys):
    with pytest.raises(Diverged):
        told_by({**DEMO, "method": "fedavg", "model": "linear", "lr": 1e30, "rounds": 3}, Path("a"))
    out = explained(capsys, "a")
    assert re.search(r"diverged\n  since round 1: FedAvg: client \d+ diverged", out)
    assert "1. --lr 0.1 " in out


@pytest.mark.parametrize("bad", ['{"round": "x"}\n', "no json\n", '{"round": 9, "signs": 3}\n', "[]\n"])
def test_explain_of_a_damaged_run(ill, capsys, bad):
    lines = (ill / "rounds.jsonl").read_text().splitlines(keepends=True)
    (ill / "rounds.jsonl").write_text("".join([*lines[:6], bad, *lines[7:]]))
    (ill / "summary.json").write_text("{")
    out = explained(capsys, "ill")
    assert "the line after round 6 is not a round" in out
    assert "summary.json cannot be read" in out
    assert "constant outputs" in out


@pytest.mark.parametrize("make", [lambda path: None, Path.mkdir])
def test_explain_of_no_run_is_one_line(tmp_path, capsys, make):
    make(tmp_path / "none")
    assert main(["explain", str(tmp_path / "none")]) == 2
    assert re.fullmatch(r"fedspeed: error: .* holds no run: .*\n", capsys.readouterr().err)


CONFIGS = [
    {"model": {"name": "resnet18_gn"}, "method": "fedspeed"},
    {"model": {"name": "mlp"}, "method": {"name": "fedspeed", "server": "active"}, "active": 5, "clients": 50},
    {"model": "linear", "method": "fedadam", "local_steps": 7, "clip": 5.0},
    {"model": "mlp", "method": "fedsam", "rounds": 3},
]


@pytest.mark.parametrize("tables", CONFIGS, ids=str)
@pytest.mark.parametrize("name", ADVICE)
def test_every_suggestion_is_an_option_that_exists_and_changes_something(tables, name):
    before = Config.from_dict(tables).to_dict()
    found = advise(name, before)
    assert found or (name == "standing still")
    for advice in found:
        given = {key: before[key]["name"] for key in ("method", "model")} | {"rounds": str(before["rounds"])}
        words = [word for key, value in given.items() for word in (f"--{key}", value)]
        args = build_parser().parse_args(["run", *words, *shlex.split(advice.option)])
        after = Config.from_dict(options.tables(args)).to_dict()
        table, _, field = advice.key.rpartition(".")
        assert str((after[table] if table else after)[field]) not in (
            "",
            str((before[table] if table else before).get(field)),
        )


@pytest.mark.parametrize("name", sorted(set(ADVICE) - {"standing still"}))
def test_a_rate_far_above_the_usual_one_is_the_first_suspect(name):
    assert advise(name, {"lr": 50.0, "rounds": 20})[0].option == "--lr 0.1"


def test_a_suggested_warmup_is_no_longer_than_the_run_and_a_tiny_rate_is_left_at_once():
    assert "--warmup lr=5" in [advice.option for advice in advise("chance", {"lr": 0.1, "rounds": 20})]
    assert [advice.option for advice in advise("standing still", {"lr": 1e-7})] == ["--lr 0.01"]


def test_after_an_ill_run_the_next_command_is_explain(own_folder, capsys):
    options = "--method fedavg --lr 50 --clients 20 --active 5 --rounds 6 --out a"
    assert main(["run", *options.split()]) == 0
    assert "next: fedspeed explain a " in capsys.readouterr().out


def test_every_finding_has_words_and_advice_that_exist():
    assert set(MEANING) == set(ADVICE)
    assert {key for keys in ADVICE.values() for key in keys} == set(CHANGES)
    for odd in ({}, {"model": 3, "method": [], "lr": "x", "active": -1}):
        assert all(isinstance(advise(name, odd), list) for name in ADVICE)
