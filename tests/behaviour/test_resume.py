"""A run may be killed at any instant and goes on with the same bits. Real processes, real signals."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file
from sealing import resealed
from watching import Rounds, Stop, stop_after

from fedspeed.cli import main
from fedspeed.config.config import Config
from fedspeed.errors import UserError
from fedspeed.runs import checkpoint
from fedspeed.runs.launch import resume, run_config

SMALL = {"rounds": 8, "clients": 12, "active": 4, "local_epochs": 1, "batch_size": 10, "engine": "loop"}


def config(method="fedspeed", **changes) -> Config:
    return Config.from_dict({**SMALL, "backend": "serial", "method": method, **changes})


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """The outcome of an undisturbed run of `config(method, states=states)`, made once."""

    @cache
    def made(method: str, states: str) -> tuple:
        out = tmp_path_factory.mktemp("straight")
        run_config(config(method, states=states), out)
        return outcome(out)

    return made


def outcome(out: Path) -> tuple:
    """Everything of a run but the times: rounds, model, states, the last checkpoint's digests.

    A run that is killed may have other checkpoints, and so another log; what holds of it is the same.
    """
    rounds = [json.loads(text) for text in (out / "rounds.jsonl").read_text().splitlines()]
    timeless = [{k: v for k, v in r.items() if not k.endswith("seconds")} for r in rounds]
    saved = checkpoint.Checkpoints(out).latest()
    model = {name: tensor.tolist() for name, tensor in load_file(out / "model.safetensors").items()}
    kept = {client: bytes_of(saved, client) for client in saved.entries}
    return timeless, model, kept, saved.generations, saved.manifest.server, saved.manifest.bound


def bytes_of(saved, client: int) -> bytes:
    """A client's state as it lies in its file, or its record in the log."""
    entry = saved.entries[client]
    if entry.digest:
        return saved.run.state_path(client, entry.generation).read_bytes()
    return saved.log.read_bytes()[entry.start : entry.start + entry.length]


@pytest.mark.parametrize("command", ["resume", "run"])
def test_a_run_goes_on_elsewhere_if_it_is_told_to(tmp_path, command, quick_workers):
    """A job that is queued again has other nodes; a run begun on a cluster may go on without one."""
    whole, out = tmp_path / "whole", tmp_path / "out"
    run_config(config(), whole)
    with pytest.raises(Stop):
        run_config(config(), out, observers=[stop_after(2)])
    given = ["--backend", "process", "--workers", "2", "--quiet"]
    begun = ["run", str(out / "config.toml"), "--resume", "auto", "--out", str(out)]
    assert main([*(["resume", str(out)] if command == "resume" else begun), *given]) == 0
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["backend"], summary["workers"]) == ("process", 2)
    assert summary["digests"] == json.loads((whole / "summary.json").read_text())["digests"]


@pytest.mark.parametrize("method", ["fedavg", "scaffold", "fedspeed", "fedsmoo", "afedpd"])
@pytest.mark.parametrize("states", ["memory", "disk"])
def test_a_stopped_run_goes_on_with_the_same_bits(tmp_path, method, states, straight):
    broken = tmp_path / "broken"
    with pytest.raises(Stop):
        run_config(config(method, states=states), broken, observers=[stop_after(1)])
    with pytest.raises(Stop):
        resume(broken, observers=[stop_after(5)])
    resume(broken)
    assert outcome(broken) == straight(method, states)


def test_sparse_checkpoints_replay_what_was_lost(tmp_path):
    run_config(config(), tmp_path / "whole")
    with pytest.raises(Stop):
        run_config(config(checkpoint_every=3), tmp_path / "broken", observers=[stop_after(5)])
    assert [p.stem for p in checkpoint.Checkpoints(tmp_path / "broken").manifests()] == ["3"]
    resume(tmp_path / "broken")
    assert outcome(tmp_path / "broken") == outcome(tmp_path / "whole")


def test_without_a_checkpoint_it_starts_at_round_0(tmp_path):
    run_config(config(), tmp_path / "whole")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.toml").write_text((tmp_path / "whole" / "config.toml").read_text())
    (tmp_path / "broken" / "rounds.jsonl").write_text('{"round": 1, "cut')
    resume(tmp_path / "broken")
    assert outcome(tmp_path / "broken") == outcome(tmp_path / "whole")


def test_a_finished_run_is_left_as_it_is(tmp_path, capsys):
    run_config(config(), tmp_path)
    before = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")}
    assert main(["resume", str(tmp_path)]) == 0
    assert "finished already" in capsys.readouterr().out
    assert {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")} == before


def test_run_resume_auto(tmp_path, capsys):
    options = [
        "--clients",
        "12",
        "--active",
        "4",
        "--rounds",
        "8",
        "--local-epochs",
        "1",
        "--out",
        str(tmp_path),
        "--quiet",
    ]
    assert main(["run", *options, "--resume", "auto"]) == 0
    assert main(["run", *options, "--resume", "auto"]) == 0
    assert main(["run", *options, "--resume", "auto", "--lr", "0.2"]) == 2
    assert "another config" in capsys.readouterr().err


def test_two_checkpoints_are_kept_and_no_file_that_none_names(tmp_path):
    run_config(config("fedsmoo"), tmp_path)
    manifests = checkpoint.Checkpoints(tmp_path).manifests()
    assert [p.stem for p in manifests] == ["8", "7"]
    found = {str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*@*")}
    assert found == {"checkpoints/server@8", "checkpoints/server@7", "states/log@1"}
    run_config(config("fedsmoo", states="disk"), tmp_path / "disk")
    found = {str(p.relative_to(tmp_path / "disk")) for p in (tmp_path / "disk").rglob("*@*")}
    kept = checkpoint.Checkpoints(tmp_path / "disk")
    generations = [kept.read(path).generations.items() for path in kept.manifests()]
    files = {f"states/{client}@{t}" for items in generations for client, t in items}
    assert found == {"checkpoints/server@8", "checkpoints/server@7", "states/log@1", *files}


VICTIMS = [
    ("memory", "server"), ("memory", "manifest"), ("memory", "log"), ("memory", "log cut off"), ("memory", "rounds"),
    ("disk", "log"), ("disk", "state"), ("disk", "state missing"),
]  # fmt: skip


@pytest.mark.parametrize(("states", "victim"), VICTIMS)
def test_a_damaged_checkpoint_is_named_and_an_older_one_offered(tmp_path, states, victim, straight):
    with pytest.raises(Stop):
        run_config(config(states=states), tmp_path, observers=[stop_after(5)])
    kept = checkpoint.Checkpoints(tmp_path)
    newest, older = kept.manifests()
    new, old = (kept.read(path) for path in (newest, older))
    client = min(i for i, t in new.generations.items() if old.generations.get(i) != t)
    state = tmp_path / "states" / f"{client}@{new.generations[client]}"
    which, _, how = victim.partition(" ")
    file, needed = {  # and how much of it the older checkpoint needs
        "server": (new.server, 0), "manifest": (newest, 0), "state": (state, 0),
        "log": (new.log, old.manifest.log.length), "rounds": (tmp_path / "rounds.jsonl", old.manifest.rounds.length),
    }[which]  # fmt: skip
    data = bytearray(file.read_bytes())
    data[(needed + len(data)) // 2] ^= 0x40
    file.write_bytes(bytes(data[:needed] if how == "cut off" else data))
    if how == "missing":
        file.unlink()
    with pytest.raises(UserError, match=rf"{file.name}.*damaged.*round {older.stem} is older"):
        resume(tmp_path)
    newest.unlink()
    resume(tmp_path)
    assert outcome(tmp_path) == straight("fedspeed", states)


def test_a_manifest_cannot_name_files_elsewhere(tmp_path):
    with pytest.raises(Stop):
        run_config(config(), tmp_path, observers=[stop_after(2)])
    newest = checkpoint.Checkpoints(tmp_path).manifests()[0]
    manifest = json.loads(newest.read_text())
    for part, name in (("log", "states/../../log@1"), ("log", "checkpoints/server@1"), ("server", "../server@2"),
                       ("rounds", "../rounds.jsonl"), ("log", "states/1@1"), ("log", "log@1")):  # fmt: skip
        changed = {**manifest, part: {**manifest[part], "file": name}}
        newest.write_text(resealed(changed))
        with pytest.raises(UserError, match=r"damaged.*unexpected files"):
            resume(tmp_path)


def start(out: Path, *options: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "fedspeed", *options, "--quiet"]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True)


def kill_loop(out: Path, options: list[str], seed: int, kills: int) -> None:
    """Start or resume, kill the whole process group at a random instant, again and again, then let it finish.

    Every other kill waits for the rounds to go on, so that not all fall into the start of a process.
    """
    chance = random.Random(seed)
    for number in range(kills):
        before = progress(out)
        process = start(out, "run", *options, "--resume", "auto")
        if number % 2:
            wait(process, 60.0, lambda before=before: progress(out) != before)
        wait(process, chance.uniform(0.0, 0.5) if number % 2 else chance.uniform(0.5, 5.0))
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    process = start(out, "run", *options, "--resume", "auto")
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors.decode()


def progress(out: Path) -> list[str]:
    """The checkpoints there are."""
    return sorted(path.name for path in out.glob("checkpoints/*.json"))


def wait(process: subprocess.Popen, seconds: float, until=lambda: False) -> None:
    """Let a process run for so long, or until something is so, or it ends."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and process.poll() is None and not until():
        time.sleep(0.005)


CASES = [
    (method, backend, states)
    for method in ("fedavg", "scaffold", "fedspeed", "fedsmoo")
    for backend in ("serial", "process")
    for states in ("memory", "disk")
] + [("afedpd", "process", "disk")]


def kill_case(tmp_path, method, backend, states, kills, seed, more=()):
    options = ["--method", method, "--clients", "12", "--active", "4", "--rounds", "40", "--batch-size", "10",
               "--local-epochs", "2", "--engine", "loop", "--states", states, "--split",
               "dirichlet:0.6", *more]  # fmt: skip
    whole = tmp_path / "whole"
    assert main(["run", *options, "--backend", "serial", "--out", str(whole), "--quiet"]) == 0
    broken = tmp_path / "broken"
    placed = [*options, "--backend", backend, "--workers", "2", "--out", str(broken)]
    kill_loop(broken, placed, seed, kills)
    assert outcome(broken) == outcome(whole)
    assert not list(Path("/dev/shm").glob("fedspeed-*"))


def test_kill_9_at_random_instants(tmp_path):
    kill_case(tmp_path, "fedspeed", "serial", "memory", kills=2, seed=0)


KILLS = int(os.environ.get("FEDSPEED_KILLS", "2"))
"""Kills a combination; `make soak` takes more."""


@pytest.mark.slow
@pytest.mark.parametrize(("method", "backend", "states"), CASES)
def test_kill_9_at_random_instants_everywhere(tmp_path, method, backend, states):
    """Sixteen combinations, two kills each if nothing else is said."""
    kill_case(tmp_path, method, backend, states, KILLS, seed=CASES.index((method, backend, states)))


@pytest.mark.slow
def test_kill_9_while_clients_run_adam(tmp_path):
    """The state of a local optimiser ends with a turn, so there is nothing of it to lose."""
    more = ["--local-optimizer", "adam", "--lr", "0.01"]
    kill_case(tmp_path, "fedspeed", "process", "disk", KILLS, seed=3, more=more)


@pytest.mark.slow
def test_kill_9_while_clients_are_scored(tmp_path):
    """Scores of the server's model, of clients' own and after local steps are in the records that are compared."""
    more = ["--client-test", "0.2", "--client-metrics", "every=2,own,personalised=2"]
    kill_case(tmp_path, "fedspeed", "process", "disk", KILLS, seed=4, more=more)
    for name in ("whole", "broken"):
        last = json.loads((tmp_path / name / "rounds.jsonl").read_text().splitlines()[-1])
        assert any(key.startswith("client_") for key in last), sorted(last)


@pytest.mark.slow
def test_kill_9_while_the_data_stay_on_disk(tmp_path):
    """A resumed run opens the same shards again."""
    stream = np.random.default_rng(0)
    (tmp_path / "data").mkdir()
    for shard in range(3):
        np.save(tmp_path / "data" / f"x-{shard}.npy", stream.normal(size=(200, 7)).astype("f4"))
    np.save(tmp_path / "data" / "y.npy", stream.integers(0, 4, 600))
    more = ["--data", "arrays", "--data-dir", str(tmp_path / "data"), "--set", "data.mapped=true", "--model", "mlp"]
    kill_case(tmp_path, "fedspeed", "process", "disk", KILLS, seed=5, more=more)


def test_two_processes_cannot_run_in_one_directory(tmp_path):
    """The second is refused with a message and changes nothing; when the first is gone, it may."""
    first, second = [], []

    def meanwhile(record):
        if record.round == 3:
            command = [sys.executable, "-m", "fedspeed", "resume", str(tmp_path / "run")]
            told = subprocess.run(command, capture_output=True, text=True, timeout=120)
            second.append((told.returncode, told.stderr))
        first.append(record.round)

    run_config(config(), tmp_path / "run", observers=[Rounds(meanwhile)])
    assert first == list(range(1, 9))
    assert second[0][0] == 2
    assert "another process is running there" in second[0][1]
    run_config(config(), tmp_path / "alone")
    assert outcome(tmp_path / "run") == outcome(tmp_path / "alone")
    resume(tmp_path / "run")
