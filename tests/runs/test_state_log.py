"""The log of client states: what holds, what a checkpoint costs, and when the log begins anew."""

from __future__ import annotations

import builtins
import os
import re
import threading
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from watching import Stop, stop_after

from fedspeed.client.tree_bytes import read_state, write_state
from fedspeed.config.config import Config
from fedspeed.errors import UserError
from fedspeed.runs import checkpoint, state_log
from fedspeed.runs.checkpoint import Checkpoints
from fedspeed.runs.directory import RunDir
from fedspeed.runs.launch import resume, run_config
from fedspeed.runs.state_log import Change, StateLog, read_entry, read_log
from fedspeed.server.simulation import Simulation
from fedspeed.server.states import ClientStates, DiskStates
from fedspeed.utils.files import prefix


class State(NamedTuple):
    h: torch.Tensor
    x: torch.Tensor


class Swapped(NamedTuple):
    x: torch.Tensor
    h: torch.Tensor


class Server(NamedTuple):
    x: torch.Tensor


def state(value: float) -> State:
    return State(torch.full((5,), value), torch.full((5,), -value))


@pytest.mark.parametrize("seed", range(3))
def test_the_last_record_of_a_client_holds(tmp_path, monkeypatch, seed):
    """Random changes against a dict; the log begins anew now and then, and its file is what its hash says."""
    monkeypatch.setattr(state_log, "SLACK", 1000)
    chance, run = np.random.default_rng(seed), RunDir(tmp_path)
    log, truth, logs = StateLog(run), dict[int, tuple[int, float]](), set()
    for t in range(1, 60):
        clients = sorted(chance.choice(8, 3, replace=False).tolist())
        changes = [Change(i, t - 1, state(float(chance.normal()))) for i in clients]
        truth |= {change.client: (t - 1, float(change.state.h[0])) for change in changes}
        gone = log.append(changes, t)
        assert all(path.name.startswith("log@") for path in gone)
        logs.add(log.path)
        assert log.path.stat().st_size == log.hash.count
        assert prefix(log.path, log.hash.count).digest() == log.hash.digest()
        found = read_log(log.path, log.hash.count)
        assert found == log.live
        assert {
            i: (e.generation, float(read_entry(run, log.path, i, e, state(0.0)).h[0])) for i, e in found.items()
        } == truth
        record = max(entry.length for entry in found.values())
        assert log.hash.count <= 2 * sum(entry.length for entry in found.values()) + 1000 + 3 * record
    assert len(logs) > 3


def test_fields_of_one_shape_are_not_read_in_each_others_place(tmp_path):
    write_state(tmp_path / "0@0", state(1.0))
    assert torch.equal(read_state(tmp_path / "0@0", state(0.0)).h, torch.ones(5))
    with pytest.raises(UserError, match=r"is not a state of this run .*expected the fields x, h, found h, x"):
        read_state(tmp_path / "0@0", Swapped(torch.zeros(5), torch.zeros(5)))
    log = StateLog(RunDir(tmp_path))
    log.append([Change(0, 0, state(1.0))], 1)
    with pytest.raises(UserError, match="is not a state of this run"):
        read_entry(RunDir(tmp_path), log.path, 0, log.live[0], Swapped(torch.zeros(5), torch.zeros(5)))


class Watch:
    """Counts what is asked of the file system, and the bytes written."""

    def __init__(self, monkeypatch) -> None:
        self.calls: Counter[str] = Counter()
        for name in ("stat", "lstat", "fsync", "open", "unlink", "replace", "scandir", "listdir"):
            monkeypatch.setattr(os, name, self.watched(name, getattr(os, name)))
        opened = self.watched("open", builtins.open)
        monkeypatch.setattr("io.open", opened)

    def watched(self, name, f):
        def called(*args, **kwargs):
            self.calls[name] += 1
            return f(*args, **kwargs)

        return called


@pytest.mark.parametrize("where", ["memory", "disk"])
def test_a_checkpoint_costs_what_changed_and_not_what_there_is(tmp_path, monkeypatch, where):
    """With 20 and with 400 clients touched: as many file operations, as few bytes; also where none is due."""

    def cost(touched: int, every: int) -> tuple[Counter, int, int]:
        folder = tmp_path / f"{touched}-{every}"
        folder.mkdir()
        states = ClientStates() if where == "memory" else DiskStates(folder / "states", keep_old=True)
        checkpoints, server = Checkpoints(folder, 10**6 if every else 0), Server(torch.zeros(5))
        for i in range(touched):
            states.stage(i, state(float(i)), 0)
        states.commit()
        for t in (1, 2, 3):
            checkpoints.write(t, server, states) if not every else checkpoints.maybe_write(t, server, states)
            checkpoints.wait()
            for i in (3, 4):
                states.stage(i, state(float(t)), t)
            states.commit()
        before = sum(path.stat().st_size for path in folder.rglob("log@*"))
        with monkeypatch.context() as patch:
            watch = Watch(patch)
            checkpoints.maybe_write(4, server, states)
            checkpoints.wait()
        manifest = folder / "checkpoints" / "4.json"
        size = manifest.stat().st_size // 100 if not every else 0
        return watch.calls, size, sum(path.stat().st_size for path in folder.rglob("log@*")) - before

    few, many = cost(20, every=0), cost(400, every=0)
    assert few == many
    assert few[0]["fsync"] <= 6 + (2 if where == "disk" else 0)
    assert cost(400, every=1)[0].total() == 0


def test_states_are_hashed_once_over_a_resume(tmp_path, monkeypatch):
    """Those that the first checkpoint after it carries over are not read again."""
    config = {"rounds": 4, "clients": 8, "active": 2, "local_steps": 1, "engine": "loop", "model": "linear",
              "backend": "serial", "method": "fedspeed", "states": "disk"}  # fmt: skip

    with pytest.raises(Stop):
        run_config(Config.from_dict(config), tmp_path, observers=[stop_after(3)])
    saved = Checkpoints(tmp_path).latest()
    hashed: Counter[str] = Counter()
    for name in ("digest", "prefix"):
        real = getattr(checkpoint, name)

        def seen(path: Path, *args, real=real, **kwargs):
            hashed[path.name] += 1
            return real(path, *args, **kwargs)

        monkeypatch.setattr(checkpoint, name, seen)
    resume(tmp_path)
    assert all(hashed[f"{i}@{t}"] == 1 for i, t in saved.generations.items())
    assert max(hashed.values()) == 1


@pytest.mark.parametrize("where", ["memory", "disk"])
def test_a_resume_reads_a_state_once_and_writes_what_changes(tmp_path, monkeypatch, where):
    """States that have files are read once before the first round, to check them; a log twice, as it is loaded, too.
    The first checkpoint after that has what the round changed."""
    config = {"rounds": 4, "clients": 40, "active": 2, "local_steps": 1, "engine": "loop", "model": "linear",
              "backend": "serial", "method": "feddyn", "states": where, "checkpoint_every": 1}  # fmt: skip
    read: Counter[str] = Counter()

    with pytest.raises(Stop):
        run_config(Config.from_dict(config), tmp_path, observers=[stop_after(3)])
    run, real, saved = RunDir(tmp_path), builtins.open, Checkpoints(tmp_path).latest()
    size = {path.name: path.stat().st_size for path in run.states.iterdir()}

    def watched(file, mode="r", *args, **kwargs):
        opened = real(file, mode, *args, **kwargs)
        if isinstance(file, Path) and file.parent == run.states and mode == "rb":
            return Reads(opened, file.name, read)
        return opened

    before: Counter[str] = Counter()
    advance = Simulation.advance

    def first_round(self):
        if not before:
            before.update(read)
        return advance(self)

    monkeypatch.setattr("io.open", watched)
    monkeypatch.setattr(Simulation, "advance", first_round)
    resume(tmp_path)
    log = run.log_path(1)
    states = size.keys() - {log.name}
    assert len(states) == (len(set(saved.generations)) if where == "disk" else 0)
    assert {name: before[name] for name in states} == {name: size[name] for name in states}
    assert size[log.name] <= before[log.name] <= (2.5 if where == "memory" else 4) * size[log.name]
    added = log.read_bytes()[size[log.name] :]
    assert sorted(int(n) for n in re.findall(rb'{"client": (\d+),', added)) == sorted(run.records()[3].cohort)


class Reads:
    """A file that counts the bytes that are read from it."""

    def __init__(self, file, name: str, read: Counter[str]) -> None:
        self.file, self.name, self.counts = file, name, read

    def __enter__(self):
        self.file.__enter__()
        return self

    def __exit__(self, *error) -> None:
        self.file.__exit__(*error)

    def __getattr__(self, what: str):
        real = getattr(self.file, what)
        if what not in ("read", "readline", "readinto"):
            return real

        def counted(*args):
            found = real(*args)
            self.counts[self.name] += found if what == "readinto" else len(found)
            return found

        return counted


def test_checkpoints_of_every_method_hold_in_a_new_log_each_round(tmp_path, monkeypatch):
    monkeypatch.setattr(state_log, "SLACK", 0)
    monkeypatch.setattr(state_log, "GROWTH", 1)
    config = {"rounds": 6, "clients": 5, "active": 2, "local_steps": 1, "engine": "loop", "model": "linear",
              "backend": "serial", "method": {"name": "fedinit", "base": "fedsmoo"}}  # fmt: skip
    run_config(Config.from_dict(config), tmp_path)
    saved = Checkpoints(tmp_path).latest()
    assert saved.log.name != "log@1"
    assert len(list((tmp_path / "states").iterdir())) <= 2


def test_rounds_do_not_wait_for_slow_checkpoints(tmp_path, monkeypatch):
    """While one is being written, others are not due; the last is, and holds what all of them would have."""
    monkeypatch.setattr(checkpoint, "PATIENCE", 0.0)
    monkeypatch.setattr(checkpoint, "SHARE", -1.0)
    (tmp_path / "rounds.jsonl").touch()
    states, server, go = ClientStates(), Server(torch.zeros(5)), threading.Event()
    checkpoints = Checkpoints(tmp_path, bound={"config": "a", "data": "b", "split": "c"})
    real = checkpoint.write_state

    def slow(path, tree):
        assert go.wait(60)
        real(path, tree)

    monkeypatch.setattr(checkpoint, "write_state", slow)
    for t in (1, 2, 3):
        states.stage(t, state(float(t)), t - 1)
        states.stage(0, state(float(t)), t - 1)
        states.commit()
        checkpoints.maybe_write(t, server, states)  # would never return if it waited
    go.set()
    checkpoints.write(3, server, states)
    checkpoints.wait()
    assert [path.stem for path in checkpoints.manifests()] == ["3", "1"]
    saved = Checkpoints(tmp_path).latest()
    assert saved.generations == {0: 2, 1: 0, 2: 1, 3: 2}
    assert torch.equal(saved.state(0, state(0.0)).h, torch.full((5,), 3.0))


def test_rounds_wait_if_one_asked_for_every_checkpoint(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "PATIENCE", 0.0)
    monkeypatch.setattr(checkpoint, "SHARE", -1.0)
    checkpoints, states = Checkpoints(tmp_path, every=1), ClientStates()
    for t in range(1, 6):
        checkpoints.maybe_write(t, Server(torch.zeros(5)), states)
    checkpoints.wait()
    assert [path.stem for path in checkpoints.manifests()] == ["5", "4"]
    assert checkpoints.waited > 0
