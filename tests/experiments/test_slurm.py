"""`fedspeed slurm`: scripts that bash and shellcheck accept and that really make runs, stopped or not; what it refuses.

The scripts are run by bash with the variables Slurm sets; `scontrol` and `sbatch` are stood in for by files that write
down how they were called.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
from quick_runs import QUICK, bits

from fedspeed.cli import main
from fedspeed.experiments.slurm import Job, script
from fedspeed.runs.directory import RunDir

CONFIG = """
data = "digits"
clients = 10
active = 2
rounds = 3
local_steps = 1
model = "linear"
backend = "serial"
"""


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("exp.toml").write_text(CONFIG)


def written(*given: str) -> str:
    """The script that a command writes into `j`."""
    assert main(["slurm", *given, "--out", "j", "--quiet"]) == 0
    return Path("j/slurm/job.sh").read_text()


def directives(text: str) -> dict[str, str]:
    """What is asked of sbatch."""
    lines = re.findall(r"^#SBATCH --([\w-]+)(?:=(.*))?$", text, re.M)
    assert len(lines) == len(dict(lines))
    return dict(lines)


def stub(name: str, text: str) -> None:
    """A program that writes down its arguments."""
    path = Path("bin", name)
    path.parent.mkdir(exist_ok=True)
    path.write_text(f'#!/bin/sh\necho "$@" >> {Path.cwd() / name}.calls\n{text}\n')
    path.chmod(0o755)


def environment(task: int = 0, job: int = 7) -> dict[str, str]:
    """As Slurm would set it."""
    given = {"JOB_ID": job, "ARRAY_TASK_ID": task, "JOB_NUM_NODES": 1, "CPUS_PER_TASK": 1}
    return {
        **os.environ,
        "PATH": f"{Path.cwd() / 'bin'}{os.pathsep}{os.environ['PATH']}",
        **{f"SLURM_{name}": str(value) for name, value in given.items()},
    }


def run_task(task: int) -> subprocess.CompletedProcess[str]:
    command = ["bash", "j/slurm/job.sh"]
    return subprocess.run(command, env=environment(task), capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize("nodes", ["1", "3"])
def test_bash_and_shellcheck_accept_the_script(nodes):
    written(
        "exp.toml", "--seeds", "2", "--nodes", nodes, "--setup", "module() { :; }; module load x", "--backend", "auto"
    )
    assert subprocess.run(["bash", "-n", "j/slurm/job.sh"], capture_output=True, check=True).stderr == b""
    if checker := shutil.which("shellcheck"):
        found = subprocess.run(
            [checker, "--severity=warning", "j/slurm/job.sh"], capture_output=True, text=True, check=False
        )
        assert (found.returncode, found.stdout) == (0, "")


def test_the_header_asks_for_what_was_said_and_for_a_place_in_the_queue_again():
    given = "--nodes 2 --cpus 8 --gpus 1 --mem 16G --time 1-0:00 --grace 90 --at-once 4 --partition p --account a"
    text = written("exp.toml", "--seeds", "5", "--backend", "auto", *given.split(), "--sbatch=--qos=long")
    asked = directives(text)
    assert asked.pop("output") == f'"{Path.cwd()}/j/slurm/%A_%a.log"'
    assert asked.pop("job-name") == "fedspeed-j"
    assert asked == {
        "array": "0-4%4", "nodes": "2", "ntasks-per-node": "1", "cpus-per-task": "8", "gpus-per-node": "1",
        "mem": "16G", "time": "1-0:00", "partition": "p", "account": "a", "open-mode": "append",
        "signal": "B:USR1@90", "requeue": "", "qos": "long",
    }  # fmt: skip
    assert text.index("#SBATCH --requeue") < text.index("\nset -u")  # sbatch reads no further than the first command
    one = directives(written("exp.toml", "--seeds", "1"))
    assert "array" not in one
    assert one["output"].endswith('/%j.log"')


def test_an_array_makes_the_runs_of_a_sweep_and_a_second_time_does_nothing(capsys):
    given = ["exp.toml", "--seeds", "1", "--grid"]
    written(*given, "lr=0.05,0.1")
    for task, name in enumerate(["lr=0.05-s0", "lr=0.1-s0"]):
        done = run_task(task)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
        assert (Path("j") / name / "summary.json").exists()
    when = [path.stat().st_mtime_ns for path in sorted(Path("j").glob("*/rounds.jsonl"))]
    assert run_task(0).returncode == 0
    assert main(["sweep", *given, "lr=0.05,0.1", "--out", "j"]) == 0
    assert "2 of 2 runs are done already and kept" in capsys.readouterr().out
    assert [path.stat().st_mtime_ns for path in sorted(Path("j").glob("*/rounds.jsonl"))] == when
    for lr in ("0.05", "0.1"):
        assert main(["run", "exp.toml", "--lr", lr, "--out", f"s/lr={lr}-s0", "--quiet"]) == 0
    assert bits("j") == bits("s")
    assert main(["slurm", *given, "lr=0.05,0.1", "--out", "j"]) == 2
    assert "all 2 runs in " in capsys.readouterr().err
    assert main(["slurm", *given, "lr=0.05,0.1,0.2", "--out", "j"]) == 0
    assert "1 run, 2 more are done; into " in capsys.readouterr().out


def stopped_by(sign: signal.Signals, **more: str) -> tuple[int, str]:
    """What the task of `j` ends with, and says, if it is sent a signal when its run has a checkpoint."""
    env = {**environment(), **more}
    with subprocess.Popen(["bash", "j/slurm/job.sh"], env=env, stdout=subprocess.PIPE, text=True) as process:
        end = time.monotonic() + 60
        while not RunDir("j/exp-s0").manifests():
            assert process.poll() is None
            assert time.monotonic() < end
            time.sleep(0.02)
        process.send_signal(sign)
        said, _ = process.communicate(timeout=60)
        return process.returncode, said


def test_near_its_time_limit_a_run_is_saved_and_queued_again_and_ends_with_the_same_bits():
    stub("scontrol", "")
    written("exp.toml", "--rounds", "400")
    code, said = stopped_by(signal.SIGUSR1, SLURM_ARRAY_JOB_ID="5")
    assert code >= 128  # ended by a signal
    assert Path("scontrol.calls").read_text() == "requeue 5_0\n"  # not 7, which may be the number of the whole array
    assert "the run goes on when the job is queued again" in said
    part = len(RunDir("j/exp-s0").records())
    assert 0 < part < 400
    assert run_task(0).returncode == 0
    assert main(["run", "exp.toml", "--rounds", "400", "--out", "s/exp-s0", "--quiet"]) == 0
    assert bits("j") == bits("s")
    assert Path("scontrol.calls").read_text() == "requeue 5_0\n"
    Path("j").rename("first")
    written("exp.toml", "--rounds", "100000")
    assert stopped_by(signal.SIGUSR1)[0] >= 128
    assert Path("scontrol.calls").read_text() == "requeue 5_0\nrequeue 7\n"


def test_a_job_that_is_cancelled_saves_and_does_not_queue_itself_again():
    stub("scontrol", "")
    written("exp.toml", "--rounds", "100000")
    assert stopped_by(signal.SIGTERM)[0] == 143
    assert not Path("scontrol.calls").exists()
    assert json.loads(Path("j/exp-s0/summary.json").read_text())["status"] == "terminated"


def test_a_config_and_its_code_are_those_of_when_the_job_was_written():
    Path("own.py").write_text("from fedspeed.methods import FedAvg\n\n\nclass Mine(FedAvg):\n    pass\n")
    written("exp.toml", "--method", "own.py:Mine", "--engine", "loop")
    Path("own.py").write_text("broken(")
    Path("exp.toml").write_text("rounds = 1")
    done = run_task(0)
    assert (done.returncode, done.stderr) == (0, "")
    assert len(RunDir("j/exp-s0").records()) == 3


def test_submit_hands_the_script_to_sbatch(monkeypatch, capsys):
    stub("sbatch", "echo '42;cluster'")
    monkeypatch.setenv("PATH", environment()["PATH"])
    assert main(["slurm", "exp.toml", "--out", "j", "--submit"]) == 0
    assert capsys.readouterr().out.endswith("submitted: job 42\n")
    assert Path("sbatch.calls").read_text() == f"--parsable {Path.cwd()}/j/slurm/job.sh\n"
    assert main(["slurm", "exp.toml", "--out", "j", "--submit", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["job"] == "42"
    stub("sbatch", "echo 'sbatch: error: Invalid partition' >&2; exit 1")
    assert main(["slurm", "exp.toml", "--out", "j", "--submit"]) == 2
    assert "Invalid partition" in capsys.readouterr().err


REFUSED = {
    "--submit: expected Slurm's sbatch on this machine, found none": ["--submit"],
    "--nodes: expected a whole number >= 1, got 0": ["--nodes", "0"],
    "--cpus: expected a whole number >= 1, got -1": ["--cpus", "-1"],
    "--time: expected minutes, H:MM:SS or D-H:MM such as 4:00:00, got 'soon'": ["--time", "soon"],
    "--mem: expected memory per node such as 16G, got 'much'": ["--mem", "much"],
    "--partition: expected a name": ["--partition", "a b"],
    "--sbatch: expected an option of sbatch such as --qos=long": ["--sbatch", "qos"],
    "--setup: expected one line of text": ["--setup", "a\nb"],
    "--overwrite: tasks of a job continue": ["--overwrite"],
    "backend serial, which uses one machine": ["--nodes", "2", "--backend", "serial"],
    "expected one config for --grid, --point and --points, got 2": ["exp.toml", "--grid", "lr=1,2"],
    "got exp-s0 twice": ["exp.toml"],
    "expected at most 200 runs, got 300": ["--seeds", "300"],
    "expected 1 to 1000 runs in an array, got 1001": ["--seeds", "1001", "--max-runs", "2000"],
    "--seeds: expected how many": ["--seeds", "x"],
    "did you mean --nodes?": ["--node", "2"],
    "unknown method 'fedsped'": ["--method", "fedsped"],
    "no quotes, backslashes or % in the place of a log": ["--out", "a%b"],
}  # fmt: skip


@pytest.mark.parametrize("told", REFUSED)
def test_what_is_wrong_is_told_in_a_line_and_nothing_is_written(told, capsys, monkeypatch):
    monkeypatch.setenv("PATH", "bin")
    assert main(["slurm", "exp.toml", *REFUSED[told], *(["--out", "j"] if "--out" not in REFUSED[told] else [])]) == 2
    err = capsys.readouterr().err
    assert told in err
    assert err.count("\n") == 1
    assert sorted(path.name for path in Path().iterdir()) == ["exp.toml"]


def test_another_run_in_its_place_is_refused(capsys):
    assert main(["run", *QUICK, "--lr", "0.7", "--out", "j/exp-s0", "--quiet"]) == 0
    assert main(["slurm", "exp.toml", "--out", "j"]) == 2
    assert "holds a run of another config" in capsys.readouterr().err
    assert not Path("j/slurm").exists()


def test_a_config_that_a_job_may_wait_for_is_not_replaced(capsys):
    written("exp.toml")
    before = Path("j/slurm/exp-s0.toml").read_text()
    assert main(["slurm", "exp.toml", "--lr", "0.7", "--out", "j"]) == 2
    assert "exp-s0.toml holds another config" in capsys.readouterr().err
    assert Path("j/slurm/exp-s0.toml").read_text() == before
    written("exp.toml", "--backend", "process")  # the same bits
    assert 'backend = "process"' in Path("j/slurm/exp-s0.toml").read_text()


def test_names_with_spaces_and_quotes_stay_words(tmp_path):
    text = script(Job(tmp_path / "a b", ["it's", "$(touch x)"], python="/opt/my python"))
    command = text.split("trap ")[0] + '\nprintf "%s\\n" "$python" "$out" "${runs[@]}"'
    done = subprocess.run(["bash", "-c", command], env=environment(), capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["/opt/my python", f"{tmp_path}/a b", "it's", "$(touch x)"]
    assert not Path("x").exists()
