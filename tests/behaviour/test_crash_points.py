"""A run that ends in the middle of any file operation, or on a full disk, loses nothing. Real processes, real files."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from crashing import outcome

from fedspeed.cli import main
from fedspeed.config.config import Config
from fedspeed.errors import UserError
from fedspeed.report.diff import differences
from fedspeed.runs.launch import resume, run_config
from fedspeed.runs.verify import verify

TINY = {"rounds": 4, "clients": 8, "active": 3, "local_steps": 1, "batch_size": 5, "engine": "loop", "model": "linear"}


def config(**changes) -> Config:
    return Config.from_dict({**TINY, "backend": "serial", "method": "fedsmoo", **changes})


def sweep(folder: Path, *options: str) -> tuple[int, int]:
    script = Path(__file__).parents[1] / "support" / "crashing.py"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(script), str(folder), *options],
        capture_output=True, text=True, timeout=600, env=environment, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    operations, crashes = done.stdout.split()
    return int(operations), int(crashes)


def test_a_crash_at_some_file_operations(tmp_path):
    """Every eleventh; all of them are tried below."""
    operations, crashes = sweep(tmp_path, "fedsmoo", "memory", "11", "compact")
    assert operations > 80
    assert crashes >= operations // 11


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedsmoo", "scaffold", "afedpd"])
@pytest.mark.parametrize("states", ["memory", "disk"])
@pytest.mark.parametrize("when", ["run", "again"])
@pytest.mark.parametrize("log", ["one", "compact"])
def test_a_crash_at_every_file_operation(tmp_path, method, states, when, log):
    """Of a run of three rounds, and of the resume that has the last of them to do; with one log, and with new ones."""
    operations, crashes = sweep(tmp_path, method, states, "1", when, log)
    assert crashes == operations > (80 if when == "run" else 40)


@pytest.fixture
def small_disk(tmp_path):
    """Makes a file system of a few pages, and gives it room later; needs the right to mount."""
    place, mounted = tmp_path / "disk", []
    place.mkdir()

    def size(kilobytes: int) -> Path:
        how = f"size={kilobytes}k" + (",remount" if mounted else "")
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", how, "fedspeed-test", str(place)], capture_output=True)
        if done.returncode:
            pytest.skip(f"no right to mount: {done.stderr.decode().strip()}")
        mounted.append(place)
        return place

    yield size
    if mounted:
        subprocess.run(["umount", str(place)], check=True)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="mounts a tmpfs")
@pytest.mark.parametrize("states", ["memory", "disk"])
@pytest.mark.parametrize("kilobytes", [8, 20, 32, 48, 64, 84, 104])
def test_a_full_disk(tmp_path, small_disk, kilobytes, states):
    run_config(config(states=states), tmp_path / "whole")
    out = small_disk(kilobytes) / "run"
    with pytest.raises(UserError, match=r"cannot write.*No space left on device.*kept.*fedspeed resume"):
        run_config(config(states=states), out)
    with pytest.raises(UserError, match="No space left"):  # still full: says so again, loses nothing
        resume(out)
    small_disk(4096)
    resume(out)
    assert outcome(out) == outcome(tmp_path / "whole")


LIMITED = """\
import resource, sys
from fedspeed.cli import main
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]), resource.RLIM_INFINITY))
sys.exit(main(sys.argv[2:]))
"""


@pytest.mark.skipif(os.name != "posix", reason="limits the size of files")
@pytest.mark.parametrize(
    ("limit", "last", "states"),
    [
        pytest.param(10_000, 0, "memory", marks=pytest.mark.slow),
        (17_000, 20, "disk"),
        pytest.param(40_000, 2, "memory", marks=pytest.mark.slow),
    ],
)
def test_a_limit_on_the_size_of_files(tmp_path, limit, last, states):
    """Below the server's vectors (15.7 kB); below rounds.jsonl of 60 rounds; below the log of some states."""
    whole, out, file = tmp_path / "whole", tmp_path / "out", tmp_path / "c.toml"
    file.write_text(config(rounds=60, eval_every=60, states=states, checkpoint_every=1).to_toml())
    assert main(["run", str(file), "--out", str(whole), "--quiet"]) == 0
    command = [sys.executable, "-c", LIMITED, str(limit), "run", str(file), "--out", str(out), "--quiet"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("fedspeed: error: cannot write")
    assert "File too large" in done.stderr
    assert "kept" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    done_rounds = len((out / "rounds.jsonl").read_text().splitlines())
    assert last <= done_rounds < 60
    assert main(["resume", str(out), "--quiet"]) == 0
    assert outcome(out) == outcome(whole)


def test_a_run_directory_that_cannot_be_written(tmp_path):
    run_config(config(), tmp_path)
    (tmp_path / "summary.json").unlink()
    (tmp_path / "rounds.jsonl.part").mkdir()
    with pytest.raises(UserError, match="cannot write"):
        resume(tmp_path)


SMALL_FILES = """
import resource, sys
from fedspeed.cli import main
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]), resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
sys.exit(main(sys.argv[2:]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("most", [100, 3000, 9000, 20000])
def test_where_there_is_no_room_a_run_stops_in_one_line_and_goes_on_later(tmp_path, most):
    """No file may have more bytes: as on a full disk, writing fails in the config, in rounds, in a checkpoint."""
    options = "--clients 6 --active 3 --rounds 4 --local-steps 1 --model linear --backend serial --quiet".split()  # noqa: SIM905
    run = ["run", *options, "--out", str(tmp_path / "a"), "--resume", "auto"]
    ended = subprocess.run(
        [sys.executable, "-B", "-c", SMALL_FILES, str(most), *run], capture_output=True, text=True, check=False
    )
    assert (ended.returncode, ended.stderr.count("\n")) == (2, 1), ended.stderr
    assert "File too large" in ended.stderr
    assert main(run) == 0
    assert main(["run", *options, "--out", str(tmp_path / "whole")]) == 0
    assert differences(tmp_path / "whole", tmp_path / "a") == []
    assert verify(tmp_path / "a").broken == []
