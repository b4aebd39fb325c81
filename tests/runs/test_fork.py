"""Forks and longer runs: bits against runs made in one go, and against a loop that changes the plan by hand."""

from __future__ import annotations

import dataclasses
import json
import shutil
import socket

import pytest
import torch
from same_bits import leaves

import fedspeed
from fedspeed import FedAvg, FedSpeed, TopK
from fedspeed.cli import main
from fedspeed.config.config import Config
from fedspeed.config.stopping import Stopping
from fedspeed.errors import UserError
from fedspeed.methods import METHODS, WRAPPERS
from fedspeed.record import TIMES, rounds_digest
from fedspeed.report.diff import differences
from fedspeed.report.labels import kind_of, labels
from fedspeed.report.run_files import gather
from fedspeed.runs.directory import RunDir, exclusive
from fedspeed.runs.fork import forked
from fedspeed.runs.launch import prepare, resume, run_config
from fedspeed.runs.verify import verify
from fedspeed.server.observers import Observer
from fedspeed.utils.files import difference, merged, sealed

SMALL = {"model": "linear", "rounds": 7, "clients": 12, "active": 4, "local_steps": 2, "batch_size": 10,
         "eval_every": 3, "split": "dirichlet-class:0.5", "backend": "serial", "checkpoint_every": 2,
         "lr_decay": 0.9}  # fmt: skip
KINDS = {
    "fedspeed": {"method": "fedspeed", "states": "disk", "engine": "loop"},
    "scaffold": {"method": "scaffold", "engine": "block"},
}


def config(kind="fedspeed", **changes):
    return Config.from_dict({**SMALL, **KINDS[kind], **changes})


@pytest.fixture(scope="module")
def parents(tmp_path_factory):
    """A finished run of every kind; its checkpoints are of rounds 6 and 7."""
    folder = tmp_path_factory.mktemp("parents")
    for kind in KINDS:
        run_config(config(kind), folder / kind)
    return folder


def timeless(records):
    return [{k: v for k, v in record.to_dict().items() if k not in TIMES} for record in records]


def files(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def kept(run):
    """Every client's state at the newest checkpoint of a run."""
    from fedspeed.runs.checkpoint import Checkpoints

    saved = Checkpoints(run).latest()
    like = prepare(fedspeed.Config.from_toml(run / "config.toml")).method.init_client(torch.zeros(650))
    return {i: leaves(saved.state(i, like)) for i in saved.entries}


def assert_same(a, b):
    assert [found for found in differences(a, b) if found.name != "keep_every"] == []
    assert (a / "uploads.bin").read_bytes() == (b / "uploads.bin").read_bytes()
    one, other = kept(a), kept(b)
    assert one.keys() == other.keys()
    assert one
    assert all(torch.equal(x, y) for i in one for x, y in zip(one[i], other[i], strict=True))


@pytest.mark.parametrize(("kind", "at"), [("fedspeed", 6), ("fedspeed", 3), ("scaffold", 6), ("scaffold", 5)])
def test_without_a_change_it_is_the_parent(parents, tmp_path, kind, at):
    before = files(parents)
    fedspeed.fork(parents / kind, at, tmp_path / "b")
    assert_same(parents / kind, tmp_path / "b")
    assert files(parents) == before
    if at == 6:  # a checkpoint: not even times differ
        lines = [(run / "rounds.jsonl").read_bytes().splitlines()[:at] for run in (parents / kind, tmp_path / "b")]
        assert lines[0] == lines[1]


def by_hand(old, new, at):
    """Rounds of one plan, then server and states put into a simulation of another."""
    with prepare(old) as first, prepare(new) as second:
        records = [first.step() for _ in range(at)]
        second.restore(at, first.server, first.elapsed)
        for i in first.states:
            second.states.stage(i, first.states.get(i), first.states.generations[i])
        second.states.commit()
        records += [second.step() for _ in range(new.rounds - at)]
        return timeless(records), second.x


@pytest.mark.parametrize(
    ("kind", "at", "changes"),
    [
        ("fedspeed", 6, {"lr": 0.03, "method.rho": 0.3}),
        ("fedspeed", 2, {"lr_decay": 1.0, "eval_every": 2, "weight_decay": 0.0}),
        ("scaffold", 7, {"rounds": 9, "local_steps": 0, "local_epochs": 1, "batch_size": 20}),
        ("scaffold", 4, {"warmup": "lr=6", "method": {"eta_g": 0.5}, "engine": "loop", "dropout": 0.5}),
    ],
)
def test_with_changes_it_is_a_loop_that_changes_the_plan(parents, tmp_path, kind, at, changes):
    out = tmp_path / "b"
    fedspeed.fork(parents / kind, at, out, changes)
    plain = {key: value for key, value in changes.items() if "." not in key}
    if "method.rho" in changes:
        plain["method"] = {"name": kind, "rho": 0.3}
    new = config(kind, **{**plain, **({"method": {"name": kind, **plain["method"]}} if "method" in plain else {})})
    records, x = by_hand(config(kind), new, at)
    assert timeless(RunDir(out).records()) == records
    from safetensors.torch import load_file

    assert torch.equal(torch.cat([a.reshape(-1) for a in load_file(out / "model.safetensors").values()]).sort()[0],
                       x.sort()[0])  # fmt: skip
    assert verify(out, every_round=True).broken == []


@pytest.mark.slow
def test_on_another_back_end_it_is_the_same(parents, tmp_path):
    """Workers of the first rounds' settings, then of the others'."""
    for backend in ("serial", "process"):
        changes = {"lr": 0.05, "method.rho": 0.3, "backend": backend, "workers": 2}
        fedspeed.fork(parents / "fedspeed", 3, tmp_path / backend, changes)
    assert timeless(RunDir(tmp_path / "serial").records()) == timeless(RunDir(tmp_path / "process").records())
    assert (tmp_path / "serial/uploads.bin").read_bytes() == (tmp_path / "process/uploads.bin").read_bytes()


def test_a_fork_of_a_fork_and_its_config_run_from_the_start(parents, tmp_path):
    b, c, d, again = (tmp_path / name for name in ("b", "c", "d", "again"))
    fedspeed.fork(parents / "fedspeed", 4, b, {"lr": 0.05, "rounds": 8})
    fedspeed.fork(b, 6, c, {"lr": 0.01, "method.lam": 5.0})
    fedspeed.fork(b, 3, d, {"lr": 0.01})  # before the first fork: what b changed at 4 is no matter
    lrs = {name: [record.lr / 0.9 ** (record.round - 1) for record in RunDir(run).records()]
           for name, run in (("c", c), ("d", d))}  # fmt: skip
    assert lrs["c"] == pytest.approx([0.1] * 4 + [0.05] * 2 + [0.01] * 2)
    assert lrs["d"] == pytest.approx([0.1] * 3 + [0.01] * 5)
    assert RunDir(c).config()["until"] == {"4": {"lr": 0.1, "method": {"lam": 10.0}},
                                           "6": {"lr": 0.05, "method": {"lam": 10.0}}}  # fmt: skip
    for run in (c, d):
        assert verify(run, every_round=True).broken == []
    run_config(Config.from_toml(c / "config.toml"), again)
    assert_same(c, again)


class Stop(Observer):
    def __init__(self, at):
        self.at = at

    def round(self, record, run):
        if record.round == self.at:
            raise KeyboardInterrupt


@pytest.mark.parametrize("stop", [2, 5])
@pytest.mark.parametrize("lost", [False, True])
def test_a_fork_that_was_stopped_goes_on(parents, tmp_path, stop, lost):
    """Also from round 0, where its checkpoints were lost."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    fedspeed.fork(parents / "scaffold", 4, whole, {"lr": 0.05})
    with pytest.raises(KeyboardInterrupt):
        fedspeed.fork(parents / "scaffold", 4, cut, {"lr": 0.05}, observers=[Stop(stop)])
    if lost:
        shutil.rmtree(cut / "checkpoints")
    resume(cut)
    assert_same(whole, cut)


def test_a_run_that_diverged_is_forked_before_it_did(tmp_path):
    with pytest.raises(fedspeed.Diverged):
        run_config(config("scaffold", engine="loop", lr=1e16, warmup="lr=7", rounds=7), tmp_path / "a")
    done = len(RunDir(tmp_path / "a").records())
    assert 1 <= done < 7
    summary = fedspeed.fork(tmp_path / "a", 1, tmp_path / "b", {"lr": 0.1, "warmup": ""})
    assert summary["status"] == "finished"
    assert summary["rounds"] == 7


@pytest.mark.parametrize(
    "settings", [{"warmup": "lr=5", "method": {"name": "fedspeed", "rho": 0.2}}, {"client_metrics": "every=4"}]
)
def test_a_longer_run_is_one_made_in_one_go(tmp_path, settings):
    """Round 7 was evaluated, and measured, only because it was the last."""
    run_config(config(**settings, checkpoint_every=1), tmp_path / "a")
    run_config(config(**settings, checkpoint_every=1, rounds=11), tmp_path / "long")
    assert main(["extend", str(tmp_path / "a"), "--rounds", "11", "--quiet"]) == 0
    assert_same(tmp_path / "a", tmp_path / "long")
    assert fedspeed.extend(tmp_path / "a", 11)["rounds"] == 11  # nothing left to do


@pytest.mark.parametrize(
    ("kind", "change", "why"),
    [
        *(("fedspeed", {name: value}, name) for name, value in {
            "seed": 1, "model": "mlp", "data": "synthetic", "split": "iid", "clients": 13, "active": 5,
            "cohort": "bernoulli", "state_dtype": "float16", "network": "lte", "client_metrics": "every=2",
            "augment": "none", "batch_norm": "group", "validation": "0.1", "until": {"3": {"lr": 1.0}}}.items()),
        ("fedspeed", {"method": "fedavg"}, "the method: its states are fedspeed's"),
        ("fedspeed", {"method": {"name": "scaffold"}}, "the method"),
        ("fedspeed", {"method.correction": False}, "method.correction: states are server.x"),
        ("fedspeed", {"method.server": "active"}, "method.server: what the server keeps as a mean"),
        ("fedspeed", {"weighting": "samples"}, "weighting: the server's H is a mean"),
    ],
)  # fmt: skip
def test_what_the_rounds_so_far_rest_on_stays(parents, tmp_path, kind, change, why):
    with pytest.raises(UserError, match=f"a fork cannot change {why}") as refused:
        fedspeed.fork(parents / kind, 4, tmp_path / "x" / "b", change)
    assert "\n" not in str(refused.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("method", "change"),
    [
        ({"name": "topk", "base": "fedspeed"}, {"weighting": "samples"}),
        ({"name": "quantise", "base": {"name": "clip", "base": "scaffold"}}, {"weighting": "samples"}),
        ({"name": "clip", "base": "fedspeed"}, {"method.base.server": "active"}),
        ({"name": "afedpd"}, {"weighting": "samples"}),
        ({"name": "topk", "base": "afedpdsam"}, {"weighting": "samples"}),
    ],
)
def test_a_mean_over_all_clients_stays_one_also_inside_a_wrapper_and_where_clients_hold_it(method, change):
    """A wrapper names no running mean, and A-FedPD's clients keep q_i whose mean with the weights is 0."""
    old = Config.from_dict({**SMALL, "method": method})
    with pytest.raises(UserError, match=f"a fork cannot change {next(iter(change))}") as no:
        forked(old, 3, change)
    assert "\n" not in str(no.value)


def test_noise_that_epsilon_counts_is_the_same_in_all_rounds():
    pytest.importorskip("dp_accounting")
    old = Config.from_dict({**SMALL, "method": {"name": "dp", "noise": 1.0, "base": {"name": "topk"}}})
    assert forked(old, 3, {"method.clip": 0.5}).stretches[0][1].method.clip == 1.0
    with pytest.raises(UserError, match="a fork cannot change the method's noise"):
        forked(old, 3, {"method.noise": 2.0})
    with pytest.raises(UserError, match="expected the same noise in all rounds"):
        Config.from_dict({**old.to_dict(), "until": {"3": {"method": {"noise": 2.0}}}})


@pytest.mark.parametrize(
    ("at", "more", "told"),
    [
        ("0", [], "at: expected how many rounds of RUN to share, 1 to 7, found 0"),
        ("8", [], "1 to 7, found 8"),
        ("7", [], "a fork at round 7 of 7 has no round of its own; change rounds too (--set rounds=14)"),
        ("3", ["--set", "rounds=3"], "a fork at round 3 of 3 has no round of its own"),
        ("3", ["--set", "lr"], "--set: expected KEY=VALUE such as lr=0.05"),
        ("3", ["--set", "lrr=0.1"], "unknown config key 'lrr'; did you mean 'lr'?"),
        ("3", ["--set", "lr=-1"], "lr must be in (0, inf), got -1.0"),
        ("3", ["--set", "method.rhoo=1"], "unknown field of FedSpeed 'rhoo'"),
        ("3", ["--out", "RUN"], "already holds a run; choose another --out"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(parents, own_folder, capsys, at, more, told):
    before, run = files(parents), str(parents / "fedspeed")
    given = [part.replace("RUN", run) for part in more]
    out = [] if "--out" in given else ["--out", "b"]
    assert main(["fork", run, "--at", at, *given, *out]) == 2
    assert told.replace("RUN", run) in capsys.readouterr().err
    assert files(parents) == before
    assert list(own_folder.iterdir()) == []


def test_a_run_that_goes_on_is_not_forked(parents, tmp_path):
    with exclusive(parents / "fedspeed"), pytest.raises(UserError, match="is in progress; fork it when it has ended"):
        fedspeed.fork(parents / "fedspeed", 4, tmp_path / "b")
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_parent_is_named(parents, tmp_path):
    run = tmp_path / "a"
    shutil.copytree(parents / "fedspeed", run)
    log = next(run.glob("states/log@*"))
    log.write_bytes(b"x" + log.read_bytes()[1:])
    with pytest.raises(UserError, match=f"{log.name} is damaged"):
        fedspeed.fork(run, 6, tmp_path / "b")
    assert not (tmp_path / "b").exists()


def test_rounds_that_are_not_the_parents_again_are_no_fork(parents, tmp_path):
    """A line of the parent's was edited, or it was made on another machine."""
    run = tmp_path / "a"
    shutil.copytree(parents / "fedspeed", run)
    lines = (run / "rounds.jsonl").read_text().splitlines()
    lines[1] = json.dumps(json.loads(lines[1]) | {"drift": 1.0})
    (run / "rounds.jsonl").write_text("\n".join(lines) + "\n")
    with pytest.raises(UserError, match=f"the first 3 rounds are not those of {run}"):
        fedspeed.fork(run, 3, tmp_path / "b", {"lr": 0.05})
    assert not (tmp_path / "b").exists()


def test_verify_knows_whose_rounds_they_are(parents, tmp_path, capsys):
    out = tmp_path / "b"
    fedspeed.fork(parents / "fedspeed", 6, out, {"lr": 0.05})
    assert f"the first 6 rounds are those of {parents / 'fedspeed'}" in verify(out).held
    assert main(["show", str(out)]) == 0
    assert "fork of" in (shown := capsys.readouterr().out.replace("\n", " "))
    assert "lr 0.1 -> 0.05" in shown
    told = json.loads((out / "fork.json").read_text())
    (out / "fork.json").write_text(sealed(told | {"rounds": "0" * 32}, indent=1) + "\n")
    assert any("rounds are not those of" in wrong for wrong in verify(out).broken)
    (out / "fork.json").write_text("[]")
    with pytest.raises(UserError, match=r"fork\.json is not a fork\.json of format 1"):
        verify(out)


@pytest.mark.parametrize("at", [2, 6])
def test_no_rule_ends_a_fork_in_rounds_that_are_not_its_own(parents, tmp_path, at):
    summary = fedspeed.fork(parents / "fedspeed", at, tmp_path / "b", {"stop_at": "train_loss=100"})
    assert summary["rounds"] == at + 1  # the first of its own
    assert summary["stopped"]["round"] == at + 1 if at < 6 else summary["status"] == "finished"
    assert verify(tmp_path / "b").broken == []


def test_in_a_comparison_forks_are_rows_of_their_own(tmp_path):
    for seed in (0, 1):
        run_config(config(seed=seed), tmp_path / f"a{seed}")
        fedspeed.fork(tmp_path / f"a{seed}", 6, tmp_path / f"b{seed}", {"lr": 0.05})
    rows, left_out = gather([tmp_path / name for name in ("a0", "a1", "b0", "b1")])
    assert [row.label for row in rows] == ["fedspeed lr=0.1", "fedspeed lr=0.05 until.6.lr=0.1"]
    assert [len(row.runs) for row in rows] == [2, 2]
    assert left_out == []


def test_labels_of_methods_in_wrappers_name_what_is_unusual():
    usual = {name: cls.from_fields({}).to_dict() for name, cls in (METHODS | WRAPPERS).items()}
    methods = [TopK(FedSpeed(), fraction=0.1), TopK(FedSpeed(rho=0.3), fraction=0.1), TopK(FedAvg(), fraction=0.1)]
    assert labels([kind_of({"method": method.to_dict()}) for method in methods], usual) == [
        "fedspeed:rho=0.1+topk:fraction=0.1",
        "fedspeed:rho=0.3+topk:fraction=0.1",
        "fedavg+topk:fraction=0.1",
    ]


@pytest.mark.parametrize("until", ["3", {"x": {}}, {"9": {"lr": 0.1}}, {"0": {"lr": 0.1}}, {"3": 0.1},
                                   {"3": {"seed": 1}}, {"3": {"lr": -1.0}}, {"3": {"nothing": 1}}, {"9" * 5000: {}},
                                   {"3": {"method": "fedavg"}}, {"3": {"until": {}}},
                                   {"3": {"backend": "ray", "ray_address": "10.0.0.1:6379"}}])  # fmt: skip
def test_a_config_says_what_its_first_rounds_had_or_is_refused(until):
    assert Config.from_dict({**SMALL, "until": {"3": {"lr": 0.5}}}).config_at(2).lr == 0.5
    with pytest.raises(UserError) as refused:
        Config.from_dict({**SMALL, "until": until})
    assert "\n" not in str(refused.value)


def test_what_was_otherwise_laid_over_gives_it_back():
    then = {"a": 1, "t": {"b": 2, "c": [3], "u": {"d": 4}}, "e": ""}
    now = {"a": 1, "t": {"b": 5, "c": [3], "u": {"d": 6}}, "e": "x"}
    assert difference(then, now) == {"t": {"b": 2, "u": {"d": 4}}, "e": ""}
    assert merged(now, difference(then, now)) == then
    assert difference(then, then) == {}


def test_fields_that_came_later_and_placement():
    """A warm-up that there was not is said to be none; where a run is computed is no matter."""
    found = forked(config(), 4, {"warmup": "lr=3", "backend": "process", "targets": [0.5], "rounds": 9})
    assert found.to_dict()["until"] == {"4": {"warmup": ""}}
    assert found.config_at(3).warmup == ""
    assert found.config_at(4) is None
    assert "until" not in forked(config(), 4, {"rounds": 9}).to_dict()


def test_rules_of_a_fork_say_nothing_of_the_rounds_it_shares(tmp_path):
    run_config(config(eval_every=1, rounds=3), tmp_path / "short")
    scores = [record.test_accuracy for record in RunDir(tmp_path / "short").records()]
    found = fedspeed.fork(tmp_path / "short", 3, tmp_path / "patient", {"rounds": 8, "patience": 4})
    assert found["rounds"] >= 4  # its first stretch is of a run of 3 rounds, for which a patience of 4 is too long
    assert min(scores) > 0.001
    changes = {"rounds": 5, "stop_at": "accuracy=0.001"}
    found = fedspeed.fork(tmp_path / "short", 2, tmp_path / "from_0", changes)
    assert found["stopped"]["round"] == 3  # rounds 1 and 2 had the goal's score already, and are run again
    assert verify(tmp_path / "from_0").broken == []


def test_patience_counts_the_rounds_that_were_scored_then(parents):
    """Rounds 1, 2, 4 and 5 of the parent were not scored; with eval_every 1 they would look like rounds no better."""
    fork = forked(config(), 6, {"eval_every": 1, "rounds": 20, "patience": 2})
    rules = Stopping(fork)
    assert rules.restart_from(RunDir(parents / "fedspeed").records()[:5]) is None
    assert rules.stale == 0


def test_a_time_budget_counts_through_stretches(parents, tmp_path):
    fedspeed.fork(parents / "fedspeed", 3, tmp_path / "a", {"lr": 0.05, "max_time": "1h"})
    fedspeed.fork(tmp_path / "a", 5, tmp_path / "b", {"lr": 0.04})
    used = [record.wall_seconds for record in RunDir(tmp_path / "b").records()]
    assert used == sorted(used)


@pytest.mark.parametrize("method", ['name = "{}"', 'base = "{}"', 'base = {{name = "{}"}}', 'base.base.name = "{}"'])
def test_first_rounds_of_somebodys_run_execute_nothing(parents, tmp_path, capsys, method):
    ran, run = tmp_path / "ran", tmp_path / "run"
    (tmp_path / "evil.py").write_text(f"open({str(ran)!r}, 'w')\nfrom fedspeed import FedSpeed as Evil\n")
    shutil.copytree(parents / "fedspeed", run)
    with (run / "config.toml").open("a") as file:
        file.write("[until.3.method]\n" + method.format(f"{tmp_path}/evil.py:Evil"))
    assert main(["verify", str(run)]) == 2
    assert "until.3.method: expected fields of the run's own method, found another" in capsys.readouterr().err
    assert not ran.exists()


@pytest.mark.parametrize("command", [["resume"], ["verify", "--all"], ["replay", "--round", "1", "--client", "0"]])
def test_first_rounds_of_somebodys_run_are_sent_to_no_cluster(parents, tmp_path, capsys, command):
    """Whoever is named there would be sent code, and sends some."""
    run = tmp_path / "run"
    shutil.copytree(parents / "fedspeed", run)
    with socket.create_server(("127.0.0.1", 0)) as somebody, (run / "config.toml").open("a") as file:
        file.write(f'[until.3]\nbackend = "ray"\nray_address = "127.0.0.1:{somebody.getsockname()[1]}"\n')
        file.flush()
        assert main([command[0], str(run), *command[1:]]) == 2
        somebody.settimeout(0)
        with pytest.raises(BlockingIOError):
            somebody.accept()
    assert "says where rounds are computed" in capsys.readouterr().err


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stop", [None, 5, 6])
def test_checkpoints_that_are_kept_can_be_forked_exactly_whatever_came_after(tmp_path, monkeypatch, kind, stop):
    """A new log of states begins at almost every checkpoint, which supersedes the files of the kept ones."""
    monkeypatch.setattr("fedspeed.runs.state_log.GROWTH", 1)
    monkeypatch.setattr("fedspeed.runs.state_log.SLACK", 1)
    whole, kept = config(kind, checkpoint_every=1), config(kind, checkpoint_every=1, keep_every=2)
    run_config(whole, tmp_path / "whole")
    if stop:
        with pytest.raises(KeyboardInterrupt):
            run_config(kept, tmp_path / "kept", observers=[Stop(stop)])
        resume(tmp_path / "kept")
    else:
        run_config(kept, tmp_path / "kept")
    assert {int(path.stem) for path in RunDir(tmp_path / "kept").manifests()} == {2, 4, 6, 7}
    assert verify(tmp_path / "kept").broken == []
    assert_same(tmp_path / "whole", tmp_path / "kept")
    for at in (2, 4):
        fedspeed.fork(tmp_path / "kept", at, tmp_path / f"fork{at}")
        assert_same(tmp_path / "whole", tmp_path / f"fork{at}")
        lines = [(tmp_path / run / "rounds.jsonl").read_bytes().splitlines()[:at] for run in ("kept", f"fork{at}")]
        assert lines[0] == lines[1]  # not even times differ: it began from the checkpoint


def test_kept_checkpoints_stay_when_the_run_continues_without_saying_so_again(tmp_path):
    run_config(config(checkpoint_every=1, keep_every=2), tmp_path / "run")
    resume(tmp_path / "run", rounds=9, placement={"checkpoint_every": 1, "keep_every": 0})
    assert {2, 4, 6, 8, 9} <= {int(path.stem) for path in RunDir(tmp_path / "run").manifests()}


def test_a_fork_with_another_schedule_may_have_more_rounds(tmp_path):
    run_config(config("scaffold", lr_schedule="cosine", lr_decay=1.0), tmp_path / "a")
    fedspeed.fork(tmp_path / "a", 3, tmp_path / "b", {"lr_schedule": "constant"})
    resume(tmp_path / "b", rounds=10)
    rates = [record.lr for record in RunDir(tmp_path / "b").records()]
    assert rates[:3] == [record.lr for record in RunDir(tmp_path / "a").records()][:3]
    assert rates[3:] == [0.1] * 7


def test_rounds_of_a_version_without_scores_of_clients_on_training_data_have_the_same_digest(tmp_path):
    run_config(config("scaffold", client_metrics="every=1"), tmp_path / "run")
    records = RunDir(tmp_path / "run").records()
    assert records[0].client_train
    before = [dataclasses.replace(record, client_train={}) for record in records]
    assert rounds_digest(before) == rounds_digest(records)
