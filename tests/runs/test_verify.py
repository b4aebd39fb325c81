"""`fedspeed verify` finds what was changed, whatever was changed; each of its checks is able to fail."""

from __future__ import annotations

import json
import math
import os
import shutil
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from sealing import put_state, resealed, seal
from watching import Rounds

from fedspeed.backends.serial import Serial
from fedspeed.cli import main
from fedspeed.client.tree_bytes import read_state, write_state
from fedspeed.config.config import Config
from fedspeed.errors import UserError
from fedspeed.methods import METHODS, FedSpeed
from fedspeed.runs.checkpoint import Checkpoints
from fedspeed.runs.directory import RunDir, is_running, line
from fedspeed.runs.launch import resume, run_config
from fedspeed.runs.summary import digests
from fedspeed.runs.verify import verify
from fedspeed.server import round as server_round
from fedspeed.utils.files import Hash

SMALL = {"rounds": 3, "clients": 6, "active": 3, "local_steps": 2, "batch_size": 10, "engine": "loop"}


def make(out: Path, method="fedspeed", **changes) -> Path:
    tables = {**SMALL, "backend": "serial", "model": "linear", "method": method, **changes}
    run_config(Config.from_dict(tables), out)
    return out


@pytest.fixture(scope="module")
def original(tmp_path_factory) -> Path:
    return make(tmp_path_factory.mktemp("verify") / "run")


@pytest.fixture
def run(original, tmp_path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "run"))


def files(run: Path) -> dict[str, bytes]:
    return {str(p.relative_to(run)): p.read_bytes() for p in sorted(run.rglob("*")) if p.is_file()}


def change_state(run: Path, method, field: str) -> None:
    """Add a little to one coordinate of one client's newest state, and seal."""
    saved = Checkpoints(run).latest()
    client, _ = max(saved.generations.items(), key=lambda item: item[1])
    state = saved.state(client, method.init_client(read_server(run, method).x.float()))
    getattr(state, field)[0] += 0.01
    put_state(run, client, state)


def read_server(run: Path, method):
    newest = Checkpoints(run).manifests()[0]
    like = method.init_server(torch.zeros(650, dtype=torch.float64))
    return read_state(newest.with_name(f"server@{newest.stem}"), like)


def broken(run: Path, **how) -> str:
    before = files(run)
    found = verify(run, **how)
    assert files(run) == before, "verify only reads"
    return "\n".join(found.broken)


def test_a_good_run_holds(run):
    found = verify(run)
    assert found.broken == []
    held = "\n".join(found.held)
    for said in (
        "digests of the checkpoint of round 3",
        "digests of the checkpoint of round 2",
        "H is the mean of all",
        "summary.json",
        "model.safetensors",
        "round 3 run again",
    ):
        assert said in held
    assert found.differs == {}
    assert found.checked_on["back end"] == "serial"
    assert {"torch", "cpu", "numpy", "python", "system"} <= set(found.checked_on)
    assert "rounds 1 to 3 run again" in "\n".join(verify(run, every_round=True).held)


@pytest.mark.parametrize("method", ["fedavg", "scaffold", "fedsmoo", "fedadmm", "feddyn", "fedgamma", "fedinit"])
@pytest.mark.parametrize("states", ["memory", "disk"])
def test_runs_of_methods_hold(tmp_path, method, states):
    table = {"name": "fedinit", "base": "fedspeed"} if method == "fedinit" else method
    run = make(tmp_path / "run", table, states=states, weighting="samples")
    found = verify(run)
    assert found.broken == []
    assert any("is the mean of all" in text for text in found.held) == (method != "fedavg")


@pytest.mark.parametrize("changes", [{"state_dtype": "float16"}, {"engine": "block"}, {"checkpoint_every": 2}])
def test_runs_of_other_settings_hold(tmp_path, changes):
    found = verify(make(tmp_path / "run", **{"rounds": 5, **changes}))
    assert found.broken == []


@pytest.mark.parametrize("which", ["checkpoints/server@3", "checkpoints/3.json", "checkpoints/2.json", "states/"])
def test_a_flipped_byte_is_named(run, which):
    name = which if not which.endswith("/") else next(n for n in files(run) if n.startswith(which))
    data = bytearray((run / name).read_bytes())
    data[len(data) // 2] ^= 1
    (run / name).write_bytes(data)
    assert Path(name).name in broken(run)


def test_a_state_changed_with_its_digest_breaks_the_running_sum(run):
    change_state(run, FedSpeed(), "h")
    said = broken(run)
    assert "the server's H is the mean of all clients' h: off by 0.00167" in said
    assert "the state of client" in said
    assert "digest" not in said


@pytest.mark.parametrize(("method", "field", "kept"), [("scaffold", "c", "c"), ("fedadmm", "xh", "x")])
def test_other_running_sums_break(tmp_path, method, field, kept):
    run = make(tmp_path / "run", method)
    change_state(run, METHODS[method](), field)
    assert f"the server's {kept} is the mean of all clients' {field}: off by 0.00167" in broken(run)


def test_only_the_re_run_sees_a_changed_dual_without_a_sum(tmp_path):
    run = make(tmp_path / "run", "fedsmoo")
    change_state(run, METHODS["fedsmoo"](), "mu")
    said = broken(run)
    assert "the state of client" in said
    assert "mean of all" not in said


def test_a_changed_server_vector_is_found(run):
    changed = read_server(run, FedSpeed())
    changed.x[3] += 1e-12
    write_state(run / "checkpoints" / "server@3", changed)
    seal(run)
    assert broken(run) == "round 3: the server's x in the checkpoint differs from the round run again"


def test_a_changed_last_record_is_found(run):
    lines = (run / "rounds.jsonl").read_text().splitlines()
    record = json.loads(lines[-1])
    record["drift"] *= 1 + 1e-15
    (run / "rounds.jsonl").write_text("\n".join([*lines[:-1], json.dumps(record)]) + "\n")
    assert "round 3: drift is" in broken(run)


def test_a_changed_early_record_is_found(run):
    """By the checkpoints' digests; if they agree, by the summary's; if that agrees too, with --all."""
    lines = (run / "rounds.jsonl").read_text().splitlines()
    record = json.loads(lines[0])
    record["update_norm"] *= 1 + 1e-15
    (run / "rounds.jsonl").write_text("\n".join([json.dumps(record), *lines[1:]]) + "\n")
    said = broken(run)
    assert "3.json: rounds.jsonl is damaged" in said
    assert "2.json: rounds.jsonl is damaged" in said
    seal(run)
    said = broken(run)
    assert said.startswith("summary.json: digests is")
    assert "\n" not in said
    summary = json.loads((run / "summary.json").read_text())
    summary["digests"] = digests(run, RunDir(run).records())
    RunDir(run).write_summary(summary)
    assert broken(run) == ""
    assert "round 1: update_norm is" in broken(run, every_round=True)


def test_a_missing_record_is_found(run):
    lines = (run / "rounds.jsonl").read_text().splitlines()
    (run / "rounds.jsonl").write_text("\n".join(lines[:-1]) + "\n")
    said = broken(run)
    assert "3.json: rounds.jsonl is damaged" in said
    assert "rounds.jsonl holds 2 rounds" in said
    seal(run)
    said = broken(run)
    assert "damaged" not in said
    assert "round 3 is missing" in said


@pytest.mark.parametrize(("old", "new", "said"), [
    ("lr = 0.1", "lr = 0.2", "round 3: lr is"),
    ("seed = 0", "seed = 1", "summary.json: seed is 0"),
    ("targets = []", "targets = [0.5]", "summary.json: targets"),
    ('name = "linear"', 'name = "mlp"', "was changed"),
    ("rounds = 3", "rounds = 2", "rounds.jsonl holds 3 rounds, config.toml says 2"),
])  # fmt: skip
def test_a_changed_config_is_found(run, old, new, said):
    text = (run / "config.toml").read_text()
    assert f"\n{old}\n" in text
    (run / "config.toml").write_text(text.replace(f"\n{old}\n", f"\n{new}\n"))
    assert said in broken(run)


def test_a_changed_summary_or_model_is_found(run, tmp_path):
    other = make(tmp_path / "other", seed=1)
    shutil.copy(other / "model.safetensors", run / "model.safetensors")
    summary = json.loads((run / "summary.json").read_text())
    (run / "summary.json").write_text(json.dumps({**summary, "best_accuracy": 0.99}))
    said = broken(run)
    assert "model.safetensors is not the model" in said
    assert "best_accuracy is 0.99" in said


def test_other_versions_are_told(run, capsys):
    summary = json.loads((run / "summary.json").read_text())
    summary["environment"]["torch"] = "1.0"
    RunDir(run).write_summary(summary)
    assert main(["verify", str(run)]) == 0
    out = capsys.readouterr().out
    assert f"not the run's own torch: 1.0 then, {torch.__version__} now" in out
    assert "all holds" in out


def test_exit_codes(run, tmp_path, capsys):
    assert main(["verify", str(run), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["broken"] == []
    (run / "checkpoints" / "server@3").unlink()
    assert main(["verify", str(run)]) == 1
    assert "BROKEN: checkpoint" in capsys.readouterr().out
    assert main(["verify", str(tmp_path / "none")]) == 2
    assert "holds no run" in capsys.readouterr().err


def test_a_run_that_just_began_has_nothing_to_verify(run):
    shutil.rmtree(run / "checkpoints")
    with pytest.raises(UserError, match="nothing to verify"):
        verify(run)
    assert verify(run, every_round=True).broken == []


def edit_summary(run: Path, **changes) -> None:
    """Keys replaced, or left out where they are None."""
    summary = json.loads((run / "summary.json").read_text()) | changes
    kept = {key: value for key, value in summary.items() if key not in changes or value is not None}
    RunDir(run).write_summary(kept)


def edit_model(run: Path, change) -> None:
    """Other tensors, and a summary that agrees."""
    path = run / "model.safetensors"
    save_file(change(load_file(path)), path)
    edit_summary(run, digests=digests(run, RunDir(run).records()))


def add_one(tensors):
    return {**tensors, "extra": torch.zeros(3)}


def widened(tensors):
    return {name: a.double() for name, a in tensors.items()}


def without_bias(tensors):
    return {name: a for name, a in tensors.items() if "bias" not in name}


@pytest.mark.parametrize(("change", "said"), [
    (add_one, "holds extra, which the model does not have"),
    (widened, "is float64 of shape (10, 64), expected float32 of shape (10, 64)"),
    (without_bias, "bias is missing"),
    (lambda tensors: {name: a + 1e-6 for name, a in tensors.items()}, "is not the model of"),
])  # fmt: skip
def test_another_model_is_found(run, change, said):
    """With checkpoints, and by a re-run where there are none; if the summary does not agree, by its digest too."""
    honest = json.loads((run / "summary.json").read_text())["digests"]
    edit_model(run, change)
    assert said in broken(run)
    shutil.rmtree(run / "checkpoints")
    assert said in broken(run, every_round=True)
    edit_summary(run, digests=honest)
    assert "summary.json: digests is" in broken(run, every_round=True)


@pytest.mark.parametrize("what", ["file", "pipe"])
def test_a_missing_model_is_found(run, what):
    (run / "model.safetensors").unlink()
    if what == "pipe":
        os.mkfifo(run / "model.safetensors")
        assert "model.safetensors is missing" in "\n".join(verify(run).broken)
    else:
        assert "model.safetensors is missing" in broken(run)


@pytest.mark.parametrize(
    "key", ["status", "rounds", "best_accuracy", "last_test_loss", "targets", "seed", "environment", "digests"]
)
def test_a_missing_or_misspelt_key_of_the_summary_is_found(run, key):
    value = json.loads((run / "summary.json").read_text())[key]
    edit_summary(run, **{key: None})
    assert f"summary.json: {key} is missing" in broken(run)
    edit_summary(run, **{f"{key}x": value})
    assert f"summary.json: {key} is missing" in broken(run)


def test_a_status_that_no_run_has_is_found(run):
    edit_summary(run, status="finisied")
    assert "summary.json: status is 'finisied'" in broken(run)


def test_states_left_out_are_found(run):
    newest = Checkpoints(run).manifests()[0]
    manifest = json.loads(newest.read_text())
    manifest["log"] |= {"bytes": 0, "digest": Hash().digest()}
    newest.write_text(resealed(manifest))
    assert "by rounds.jsonl the state of client" in broken(run)


def test_another_configs_checkpoints_are_found(run, tmp_path):
    other = make(tmp_path / "other", seed=1)
    for name in ("checkpoints", "states"):
        shutil.rmtree(run / name)
        shutil.copytree(other / name, run / name)
    for name in ("rounds.jsonl", "uploads.bin"):
        shutil.copy(other / name, run / name)
    assert "is of another config: expected config" in broken(run)


def test_a_run_that_goes_on_is_never_broken(tmp_path):
    """Looked at after every round, by the process itself, and once with --all."""
    seen = []

    def look(record):
        if (tmp_path / "run" / "checkpoints" / "1.json").exists() or seen:
            seen.append(verify(tmp_path / "run", every_round=record.round == 7))

    tables = {**SMALL, "rounds": 8, "backend": "serial", "model": "linear", "method": "fedspeed"}
    run_config(Config.from_dict(tables), tmp_path / "run", observers=[Rounds(look)])
    assert len(seen) >= 6
    for found in seen:
        assert found.broken == []
        assert any(text.startswith("the run is in progress; checked up to round") for text in found.held)
        assert any(text.startswith("digests of the checkpoint") for text in found.held)
    assert "rounds 1 to 7 run again: the same bits" in seen[-2].held
    assert verify(tmp_path / "run").broken == []


def test_verify_of_a_run_that_goes_on_finds_damage(tmp_path):
    seen = []

    def look(record):
        if record.round == 4:
            for thread in set(threading.enumerate()) - {threading.main_thread()}:
                thread.join()
            path = tmp_path / "run" / "checkpoints" / "server@4"
            data = path.read_bytes()
            path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
            seen.extend(verify(tmp_path / "run").broken)

    make_watched = {**SMALL, "rounds": 5, "backend": "serial", "model": "linear", "method": "fedspeed"}
    run_config(Config.from_dict(make_watched), tmp_path / "run", observers=[Rounds(look)])
    assert len(seen) == 1
    assert "server@4 is damaged" in seen[0]


def test_nobody_starts_while_a_run_is_verified(run):
    with is_running(run) as going_on:
        assert not going_on
        (run / "summary.json").unlink()
        with pytest.raises(UserError, match="is in use"):
            resume(run)
    resume(run)


@pytest.mark.parametrize("where", ["evaluation", "step", "line", "round"])
def test_an_interrupted_run_holds(tmp_path, monkeypatch, where):
    """Ctrl-C while the model is evaluated, just before a round counts, before its line is written, and after it."""
    calls = []

    def interrupt(real):
        def called(*args, **kwargs):
            calls.append(where)
            if len(calls) == 3:
                raise KeyboardInterrupt
            return real(*args, **kwargs)

        return called

    def stop(record):
        if where == "round" and record.round == 3:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        if where == "evaluation":
            patch.setattr(Serial, "evaluate", interrupt(Serial.evaluate))
        if where == "step":
            patch.setattr(server_round, "score_round", interrupt(server_round.score_round))
        if where == "line":
            patch.setattr("fedspeed.runs.recorder.line", interrupt(line))
        tables = {**SMALL, "rounds": 5, "backend": "serial", "model": "linear", "method": "fedspeed"}
        with pytest.raises(KeyboardInterrupt):
            run_config(Config.from_dict(tables), tmp_path / "run", observers=[Rounds(stop)])
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    done = len((tmp_path / "run" / "rounds.jsonl").read_text().splitlines())
    assert summary["status"] == "interrupted"
    assert summary["rounds"] == done == (3 if where == "round" else 2)
    assert verify(tmp_path / "run").broken == []
    assert verify(tmp_path / "run", every_round=True).broken == []
    resume(tmp_path / "run")
    assert verify(tmp_path / "run").broken == []


def test_a_last_loss_that_is_not_finite(tmp_path, monkeypatch):
    """The summary is the same whether the run was resumed or not, and verify agrees with both."""
    tables = {**SMALL, "rounds": 4, "backend": "serial", "model": "linear", "method": "fedspeed"}
    real = server_round.score_round

    def infinite(backend, work, x, t, *rest):
        scored = real(backend, work, x, t, *rest)
        return scored._replace(test=scored.test._replace(loss=math.inf)) if t > 2 else scored

    monkeypatch.setattr(server_round, "score_round", infinite)
    straight = run_config(Config.from_dict(tables), tmp_path / "a")
    run_config(Config.from_dict(tables), tmp_path / "b")
    (tmp_path / "b" / "summary.json").unlink()
    resumed = resume(tmp_path / "b")
    keep = [key for key in straight if not key.endswith("seconds")]
    assert straight["last_test_loss"] is None
    assert {key: straight[key] for key in keep} == {key: resumed[key] for key in keep}
    assert verify(tmp_path / "a").broken == verify(tmp_path / "b").broken == []
