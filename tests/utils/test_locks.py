"""Temporary folders go with their owner, whatever becomes of it, and never before. Real processes."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from federations import Softmax, package

from fedspeed.config.config import Config
from fedspeed.config.plan import Plan
from fedspeed.methods import FedSpeed
from fedspeed.runs.inspect import inspect_run
from fedspeed.runs.launch import run_config
from fedspeed.runs.verify import verify
from fedspeed.utils.files import Scratch, scratch, sweep

PLAN = Plan(rounds=3, active=3, local_steps=1, batch_size=4)

LOOP = """\
import sys, os, signal
sys.path.insert(0, {tests!r})
from federations import Softmax, package
from fedspeed.methods import FedSpeed
from fedspeed.config.plan import Plan
run = package(Softmax(), FedSpeed(), Plan(rounds=3, active=3, local_steps=1, batch_size=4), states="disk")
for record in run:
    pass
print(run.states.folder, len(os.listdir(run.states.folder)), flush=True)
{end}
"""


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch) -> Path:
    """A folder for temporary folders of its own."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


def left(place: Path) -> list[str]:
    return sorted(path.name for path in place.glob("fedspeed-*"))


def start(end: str) -> subprocess.CompletedProcess:
    script = LOOP.format(tests=str(Path(__file__).parents[1] / "support"), end=end)
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize(
    "end",
    [
        "",
        *(
            pytest.param(end, marks=pytest.mark.slow)
            for end in ("raise SystemExit(3)", "raise KeyError('x')", "del run")
        ),
    ],
)
def test_the_loop_of_the_readme_leaves_nothing(place, end):
    """Neither closed nor used `with`; the states were there until the end."""
    done = start(end)
    assert int(done.stdout.split()[1]) > 3
    assert left(place) == []


def test_what_a_killed_process_left_goes_at_the_next_start(place):
    done = start("os.kill(os.getpid(), signal.SIGKILL)")
    assert done.returncode == -signal.SIGKILL
    (name,) = left(place)
    (place / "fedspeed-verify-of-an-older-version").mkdir()  # holds no lock, and may be in use
    (place / "fedspeed-states-link.held").symlink_to(place / name)
    held = Scratch("fedspeed-verify-")
    assert left(place) == sorted([held.path.name, "fedspeed-states-link.held", "fedspeed-verify-of-an-older-version"])
    sweep()
    assert held.path.exists()
    held.close()
    assert not held.path.exists()


def test_states_can_be_read_while_the_simulation_lives(place):
    run = package(Softmax(), FedSpeed(), PLAN, states="disk")
    assert len(list(run)) == 3
    folder = run.states.folder
    assert all(run.states.get(i) is not None for i in run.states)
    states = run.states
    del run
    gc.collect()
    assert all(states.get(i) is not None for i in states)
    del states
    gc.collect()
    assert not folder.exists()


def test_a_forked_child_takes_nothing_with_it(place):
    held = Scratch("fedspeed-states-")
    child = os.fork()
    if not child:
        held._finalizer()
        os._exit(0)
    os.waitpid(child, 0)
    assert held.path.exists()
    sweep()
    assert held.path.exists()
    held.close()


def test_inspect_and_verify_leave_nothing(place):
    tables = {"rounds": 2, "clients": 6, "active": 2, "local_steps": 1, "model": "linear", "backend": "serial",
              "states": "disk", "method": "fedspeed"}  # fmt: skip
    run_config(Config.from_dict(tables), place / "run")
    inspect_run(place / "run", samples=20, clients=2, iterations=3)
    assert verify(place / "run").broken == []
    with pytest.raises(KeyError), scratch("fedspeed-verify-"):
        raise KeyError
    assert left(place) == []
