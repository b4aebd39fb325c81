"""`fedspeed verify` finds what was changed, whatever was changed; each of its checks is able to fail."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from fedspeed.checkpoint import Checkpoints, digest
from fedspeed.cli import main
from fedspeed.config import Config
from fedspeed.errors import UserError
from fedspeed.methods import METHODS, FedADMM, FedInit, FedSpeed
from fedspeed.run import run_config
from fedspeed.states import read_state, write_state
from fedspeed.verify import running_sum, verify

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


def seal(run: Path) -> None:
    """Make every manifest agree with the files again: only what the files say can give a change away."""
    for path in Checkpoints(run).manifests():
        manifest = json.loads(path.read_text())
        manifest["files"] = {name: digest(run / name) for name in manifest["files"]}
        path.write_text(json.dumps(manifest))


def change_state(run: Path, method, field: str, checkpoint: int = 0) -> None:
    """Add a little to one coordinate of one client's newest state, and seal."""
    saved = Checkpoints(run).read(Checkpoints(run).manifests()[checkpoint])
    client, t = max(saved.generations.items(), key=lambda item: item[1])
    like = method.init_client(read_server(run, method).x.float())
    path = run / "states" / f"{client}@{t}"
    state = read_state(path, like)
    getattr(state, field)[0] += 0.01
    write_state(path, state)
    seal(run)


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


@pytest.mark.parametrize(("method", "field", "server"), [("scaffold", "c", "c"), ("fedadmm", "xh", "x")])
def test_other_running_sums_break(tmp_path, method, field, server):
    run = make(tmp_path / "run", method)
    change_state(run, METHODS[method](), field)
    assert f"the server's {server} is the mean of all clients' {field}: off by 0.00167" in broken(run)


def test_only_the_re_run_sees_a_changed_dual_without_a_sum(tmp_path):
    run = make(tmp_path / "run", "fedsmoo")
    change_state(run, METHODS["fedsmoo"](), "mu")
    said = broken(run)
    assert "the state of client" in said
    assert "mean of all" not in said


def test_a_changed_server_vector_is_found(run):
    server = read_server(run, FedSpeed())
    server.x[3] += 1e-12
    write_state(run / "checkpoints" / "server@3", server)
    seal(run)
    assert broken(run) == "round 3: the server's x in the checkpoint differs from the round run again"


def test_a_changed_last_record_is_found(run):
    lines = (run / "rounds.jsonl").read_text().splitlines()
    record = json.loads(lines[-1])
    record["drift"] *= 1 + 1e-15
    (run / "rounds.jsonl").write_text("\n".join([*lines[:-1], json.dumps(record)]) + "\n")
    assert "round 3: drift is" in broken(run)


def test_a_changed_early_record_is_found_with_all(run):
    lines = (run / "rounds.jsonl").read_text().splitlines()
    record = json.loads(lines[0])
    record["update_norm"] *= 1 + 1e-15
    (run / "rounds.jsonl").write_text("\n".join([json.dumps(record), *lines[1:]]) + "\n")
    assert broken(run) == ""
    assert "round 1: update_norm is" in broken(run, every_round=True)


def test_a_missing_record_is_found(run):
    lines = (run / "rounds.jsonl").read_text().splitlines()
    (run / "rounds.jsonl").write_text("\n".join(lines[:-1]) + "\n")
    said = broken(run)
    assert "rounds.jsonl holds 2 rounds" in said
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
    (run / "summary.json").write_text(json.dumps(summary))
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


def test_which_methods_keep_a_sum():
    assert {name for name, cls in METHODS.items() if running_sum(cls())} == {
        "scaffold", "fedgamma", "feddyn", "fedspeed", "fedsmoo", "fedadmm"
    }  # fmt: skip
    assert running_sum(FedSpeed(server="active")) is None
    assert running_sum(FedADMM(variant="gong")) is None
    assert running_sum(FedInit(FedSpeed())) == ("h", "H")
