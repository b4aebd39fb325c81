"""The doors: no code from the current folder, no orphans, no run lost by a signal or by its output."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from poisoned import poison, trip
from same_bits import SETTINGS, assert_same_bits, digits, outcome
from watching import Rounds

from fedspeed import simulate
from fedspeed.cli import main
from fedspeed.cli.output import Outlet
from fedspeed.config.config import Config
from fedspeed.errors import Terminated, UserError
from fedspeed.methods import FedSpeed
from fedspeed.runs.launch import run_config
from fedspeed.utils import processes
from fedspeed.utils import processes as environment_module
from fedspeed.utils.processes import bits_environment, environment

MODULE = [sys.executable, "-m", "fedspeed"]
SCRIPT = "import re\nimport sys\nfrom fedspeed.cli import main\nif __name__ == '__main__':\n    sys.exit(main())\n"
LONG = [
    "run",
    "--rounds",
    "4000",
    "--clients",
    "8",
    "--active",
    "4",
    "--local-steps",
    "1",
    "--engine",
    "loop",
    "--checkpoint-every",
    "1",
]
WORKERS = ["--backend", "process", "--workers", "2"]


def entry(way: str, folder: Path) -> list[str]:
    """A way in: what pip writes as the script `fedspeed`, or `python -m`."""
    if way == "module":
        return MODULE
    (folder / "bin").mkdir()
    (folder / "bin" / "fedspeed").write_text(SCRIPT)
    return [sys.executable, str(folder / "bin" / "fedspeed")]


@pytest.mark.slow
@pytest.mark.parametrize(("way", "command"), [("script", "resume ."), ("module", "verify . --all")])
def test_nothing_in_the_current_folder_is_executed(way: str, command: str, tmp_path: Path) -> None:
    assert trip(tmp_path / "run", entry(way, tmp_path), [command]) == []


@pytest.mark.slow
@pytest.mark.parametrize("way", ["script", "module"])
def test_nothing_in_the_current_folder_is_executed_by_any_command(way: str, tmp_path: Path) -> None:
    assert trip(tmp_path / "run", entry(way, tmp_path)) == []


def test_the_safe_path_is_for_new_processes_only(monkeypatch: pytest.MonkeyPatch) -> None:
    for before in (None, "1", ""):
        monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
        if before is not None:
            monkeypatch.setenv("PYTHONSAFEPATH", before)
        with processes.safe_path():
            assert os.environ["PYTHONSAFEPATH"] == "1"
        assert os.environ.get("PYTHONSAFEPATH") == before
    monkeypatch.setattr(processes, "sys", SimpleNamespace(flags=SimpleNamespace(ignore_environment=1, safe_path=False)))
    with pytest.raises(UserError, match=r"started with -E, .*start it with -P as well"), processes.safe_path():
        pass


OWN = """
    from fedspeed.methods import FedAvg

    class Mine(FedAvg):
        pass
"""


def test_a_method_from_a_file_is_found_in_workers_too(tmp_path: Path) -> None:
    folder = tmp_path / "own"
    folder.mkdir()
    (folder / "mine.py").write_text(textwrap.dedent(OWN))
    given = [*LONG, *WORKERS[:2], "--workers", "1", "--method", f"{folder / 'mine.py'}:Mine", "--rounds", "1"]
    given += ["--quiet", "--out", "out"]
    subprocess.run([*entry("script", tmp_path), *given], cwd=tmp_path, check=True)
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["status"] == "finished"


def test_a_method_imports_from_its_own_folder_and_not_from_the_current_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nor does a file of its folder stand in for an installed module, in the method or in anything else."""
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "mine.py").write_text("import json, numpy, beside_it\n" + textwrap.dedent(OWN))
    mark = poison(tmp_path / "own")
    monkeypatch.chdir(poison(tmp_path / "current").parent)
    Path("beside_it.py").write_text(f"open({str(mark)!r}, 'w')")
    command = ["run", "--method", "../own/mine.py:Mine", *LONG[1:], "--rounds", "1", "--quiet", "--out", "../out"]
    assert main(command) == 2
    assert "install it, or put it beside mine.py as beside_it.py" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    (tmp_path / "own" / "beside_it.py").write_text("import random, torch\nassert random.Random and torch.nn\n")
    assert main(command) == 0
    assert {path.name for path in (tmp_path / "out" / "code").rglob("*.py")} == {"mine.py", "beside_it.py"}
    assert not mark.exists()
    assert not Path("PWNED").exists()


USER = """
    import fedspeed
    from nets import Net

    if __name__ == "__main__":
        data = fedspeed.load_data("digits", clients=6)
        settings = {"rounds": 1, "active": 2, "local_steps": 1, "batch_size": 10, "engine": "loop", "workers": 1}
        run = fedspeed.simulate(fedspeed.FedAvg(), Net(), data, backend="process", **settings)
        print([record.round for record in run])
"""


def test_a_script_keeps_the_folder_it_lies_in(tmp_path: Path) -> None:
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "script.py").write_text(textwrap.dedent(USER))
    (folder / "nets.py").write_text(
        "from torch import nn\n\n\nclass Net(nn.Sequential):\n    def __init__(self):\n"
        "        super().__init__(nn.Flatten(), nn.Linear(64, 10))\n"
    )
    done = subprocess.run(
        [sys.executable, str(folder / "script.py")], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout == "[1]\n"


def until(condition: Callable[[], object], what: str) -> None:
    """Wait for something that takes a moment; forever is a minute or two."""
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.02)


def children(pid: int) -> list[int]:
    """Worker processes of a process; not the resource tracker."""
    found = []
    for folder in Path("/proc").iterdir():
        try:
            parent = re.search(r"^PPid:\s*(\d+)", (folder / "status").read_text(), re.M)
            if parent and int(parent[1]) == pid and b"spawn_main" in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
        except (OSError, ValueError):
            continue
    return found


def alive(pid: int) -> bool:
    """Whether a process is there, and not only waiting to be buried."""
    try:
        return not re.search(r"^State:\s*[ZX]", Path(f"/proc/{pid}/status").read_text(), re.M)
    except OSError:
        return False


linux = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")


def started(given: list[str], out: Path, rounds: int = 2) -> subprocess.Popen[str]:
    """A run that is some rounds under way."""
    process = subprocess.Popen(
        [*MODULE, *given, "--out", str(out), "--quiet"], stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    lines = out / "rounds.jsonl"
    until(lambda: process.poll() is not None or (lines.exists() and lines.read_text().count("\n") >= rounds), "rounds")
    assert process.poll() is None, process.communicate()
    return process


@linux
@pytest.mark.parametrize(
    "how", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)], ids=["SIGTERM", "Ctrl-C"]
)
def test_a_signal_ends_a_run_with_a_stopped_worker_and_all_is_kept(how: signal.Signals, tmp_path: Path) -> None:
    """A worker that hears nothing is not waited for."""
    process = started([*LONG, *WORKERS], tmp_path / "run")
    workers = children(process.pid)
    assert len(workers) == 2
    os.kill(workers[0], signal.SIGSTOP)
    time.sleep(0.5)
    process.send_signal(how)
    _, told = process.communicate(timeout=120)
    ended = {signal.SIGTERM: (143, "terminated"), signal.SIGINT: (130, "interrupted")}[how]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (process.returncode, summary["status"]) == ended
    assert told.endswith(f"fedspeed: {ended[1]}; what was done is kept, `fedspeed resume RUN` continues it\n")
    until(lambda: not any(alive(pid) for pid in workers), "the workers to end")


def test_a_signal_ends_serial_work_too(tmp_path: Path) -> None:
    process = started(LONG, tmp_path / "run")
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=120)
    assert process.returncode == 143
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "terminated"


def test_a_termination_inside_a_library_call_is_noted(tmp_path: Path) -> None:
    def stop(record: object) -> None:
        raise Terminated

    with pytest.raises(KeyboardInterrupt):
        run_config(
            Config.from_dict({"rounds": 3, "active": 2, "clients": 5}), tmp_path / "run", observers=[Rounds(stop)]
        )
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "terminated"


@linux
def test_an_interrupted_round_is_run_again_with_the_same_bits(quick_workers: None) -> None:
    """Answers to the round that was given up are not taken for those of the next."""
    serial = outcome(FedSpeed(), rounds=3)
    data, model = digits()
    with simulate(FedSpeed(), model, data, backend="process", workers=2, **{**SETTINGS, "rounds": 3}) as run:
        records = [run.step()]
        stopped = run.backend.workers[0].process.pid
        os.kill(stopped, signal.SIGSTOP)
        threading.Timer(1.0, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            run.step()
        assert run.t == 1
        records += list(run)
        assert not alive(stopped)
        states = {i: run.states.get(i) for i in run.states}
    timeless = [{**r.to_dict(), "seconds": 0, "eval_seconds": 0} for r in records]
    assert_same_bits(serial, (timeless, run.x, states))


@linux
def test_workers_of_a_killed_parent_leave_even_if_they_are_stopped(tmp_path: Path) -> None:
    process = started([*LONG, *WORKERS], tmp_path / "run")
    workers = children(process.pid)
    assert len(workers) == 2
    os.kill(workers[0], signal.SIGSTOP)
    process.kill()
    process.communicate()
    until(lambda: not any(alive(pid) for pid in workers), "the workers to end")


SLOW = """
    import multiprocessing, os, time
    from fedspeed.methods import FedAvg

    if multiprocessing.parent_process() is not None:  # a worker, which loads its method as it starts
        open(f"started-{os.getpid()}", "w").close()
        time.sleep(3000)

    class Slow(FedAvg):
        pass
"""


@linux
@pytest.mark.parametrize(
    "kernel",
    [pytest.param(True, id="Linux sees to it"), pytest.param(False, id="a thread does", marks=pytest.mark.slow)],
)
def test_workers_of_a_killed_parent_leave_while_they_start(kernel: bool, tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(textwrap.dedent(SLOW))
    (tmp_path / "start.py").write_text(
        "import sys\nfrom fedspeed.backends import process\nfrom fedspeed.cli import main\n"
        f"process.in_main_thread = lambda: {kernel}\nsys.exit(main())\n"
    )
    given = [*LONG, *WORKERS, "--method", "slow.py:Slow", "--out", "run"]
    process = subprocess.Popen([sys.executable, "start.py", *given], cwd=tmp_path, stderr=subprocess.DEVNULL)
    until(lambda: len(list(tmp_path.glob("started-*"))) == 2, "the workers to start")
    process.kill()
    process.wait()
    workers = [int(path.name.removeprefix("started-")) for path in tmp_path.glob("started-*")]
    until(lambda: not any(alive(pid) for pid in workers), "the workers to end")


SHORT = [
    "run",
    "--rounds",
    "40",
    "--clients",
    "8",
    "--active",
    "4",
    "--local-steps",
    "1",
    "--engine",
    "loop",
    "--out",
    "run",
]


def finished(folder: Path) -> bool:
    summary = json.loads((folder / "run" / "summary.json").read_text())
    return (summary["status"], summary["rounds"]) == ("finished", 40)


def test_a_reader_wholeaves_does_not_stop_a_run(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [*MODULE, *SHORT], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.readline().startswith("fedspeed: lr 0.1, ")
    process.stdout.close()
    assert (process.stderr.read(), process.wait()) == ("", 0)
    process.stderr.close()
    assert finished(tmp_path)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
@pytest.mark.parametrize(
    "command", [SHORT, pytest.param(["methods"], marks=pytest.mark.slow), ["--help"]], ids=" ".join
)
def test_output_that_cannot_be_written_is_an_error_in_the_end(command: list[str], tmp_path: Path) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*MODULE, *command], cwd=tmp_path, stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert done.returncode == 2
    assert re.fullmatch(r"fedspeed: error: standard output cannot be written \(No space left.*\n", done.stderr)
    assert command != SHORT or finished(tmp_path)


@pytest.mark.skipif(os.name != "posix", reason="a POSIX shell")
@pytest.mark.parametrize("closed", [pytest.param(">&-", marks=pytest.mark.slow), "<&- >&- 2>&-"])
def test_closed_standard_streams(closed: str, tmp_path: Path) -> None:
    subprocess.run(f'"{sys.executable}" -m fedspeed {" ".join(SHORT)} {closed}', shell=True, cwd=tmp_path, check=True)
    assert finished(tmp_path)
    for line in (tmp_path / "run" / "rounds.jsonl").read_text().splitlines():
        json.loads(line)


def test_what_an_encoding_does_not_have(tmp_path: Path) -> None:
    with open(tmp_path / "out", "w", encoding="ascii") as stream:
        Outlet(stream).write("4 ± 1 §\n")
    assert (tmp_path / "out").read_text() == "4 ? 1 ?\n"


def test_the_commandleaves_streams_and_signals_as_they_were(capsys: pytest.CaptureFixture[str]) -> None:
    before = sys.stdout, sys.stderr, signal.getsignal(signal.SIGTERM)
    assert main(["models"]) == 0
    assert (sys.stdout, sys.stderr, signal.getsignal(signal.SIGTERM)) == before
    assert "resnet18_gn" in capsys.readouterr().out


def test_variables_that_change_bits_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in environment_module.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert environment("cpu")["variables"] == "none"
    monkeypatch.setenv("MKL_CBWR", "COMPATIBLE")
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "SSE41")
    monkeypatch.setenv("OMP_NUM_THREADS", "7")  # changes none
    assert bits_environment() == {"MKL_CBWR": "COMPATIBLE", "ONEDNN_MAX_CPU_ISA": "SSE41"}
    assert environment("cpu")["variables"] == "MKL_CBWR=COMPATIBLE, ONEDNN_MAX_CPU_ISA=SSE41"


def test_diff_and_verify_say_which_variables_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [str(tmp_path / name) for name in "ab"]
    for run, value in zip(runs, ("", "COMPATIBLE"), strict=True):
        monkeypatch.setenv("MKL_CBWR", value)
        assert main(["run", "--rounds", "1", "--clients", "5", "--active", "2", "--quiet", "--out", run]) == 0
    monkeypatch.setenv("MKL_CBWR", "")
    assert main(["diff", *runs]) == 1
    assert "MKL_CBWR=COMPATIBLE" in capsys.readouterr().out
    main(["verify", runs[1]])
    assert "MKL_CBWR=COMPATIBLE" in capsys.readouterr().out


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no affinity here")
def test_cores_are_those_that_may_be_used() -> None:
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        assert environment("cpu")["cores"] == 1
    finally:
        os.sched_setaffinity(0, before)


def test_a_large_quadratic_does_not_depend_on_threads() -> None:
    code = (
        "from fedspeed.data.problems import quadratic\nfor d in (20, 50, 51, 200):\n"
        "    print(quadratic(d=d, n=2, clients=2, shared=False, sigma_l=0.1).digest())\n"
    )
    told = {
        subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "OPENBLAS_NUM_THREADS": n, "OMP_NUM_THREADS": n},
            capture_output=True, text=True, check=True,
        ).stdout
        for n in "14"
    }  # fmt: skip
    assert len(told) == 1
    assert len(told.pop().split()) == 4


RC = "axes.prop_cycle: cycler('color', ['black'])\nlines.linewidth: 99\n"


def test_figures_take_no_settings_from_the_current_folder(tmp_path: Path) -> None:
    """matplotlib evaluates what is in them."""
    (tmp_path / "matplotlibrc").write_text(RC)
    code = "from fedspeed.report.figures import *; new_figure(); print(load_matplotlib().rcParams['lines.linewidth'])"
    told = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert float(told.stdout) != 99


def test_a_run_directory_gives_no_orders_to_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Escapes in keys, names and what a summary says were printed raw."""
    run = tmp_path / "run"
    assert main(["run", "--rounds", "1", "--clients", "4", "--out", str(run), "--quiet"]) == 0
    orders = "\x1b]0;owned\x07\x1b[2J"
    summary = json.loads((run / "summary.json").read_text())
    summary["environment"]["torch"] = orders
    (run / "summary.json").write_text(json.dumps({**summary, orders: 1}))
    config = (run / "config.toml").read_text()
    main(["verify", str(run)])
    main(["diff", str(run), str(run)])
    (run / "config.toml").write_text(config.replace('name = "fedspeed"', f"name = {json.dumps(orders)}"))
    for command in ("resume", "verify", "inspect"):
        assert main([command, str(run)]) == 2
    (run / "config.toml").write_text(config + f"{json.dumps(orders)} = 1\n")
    main(["diff", str(run), str(run)])
    shown = capsys.readouterr()
    assert "owned" in shown.out + shown.err
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f]", shown.out + shown.err)
