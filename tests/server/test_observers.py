"""Observers: what they are told and when, and that no observer, however bad, changes or stops a run."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from federations import Softmax
from watching import Rounds

from fedspeed import Config, FedAvg, Observer, UserError, run_config, simulate
from fedspeed.cli import main
from fedspeed.report.diff import differences
from fedspeed.runs.directory import RunDir
from fedspeed.runs.launch import resume
from fedspeed.runs.verify import verify
from fedspeed.server import observers
from fedspeed.utils import registry

SMALL = {"rounds": 3, "clients": 5, "active": 2, "local_steps": 1, "batch_size": 2, "backend": "serial",
         "method": "fedspeed", "model": "vector", "split": "natural",
         "data": {"name": "quadratic", "d": 3, "n": 2}}  # fmt: skip
HOOKS = ("started", "client", "round", "ended")


def small(**changes) -> Config:
    return Config.from_dict({**SMALL, **changes})


def plain(**settings):
    problem = Softmax()
    settings = {"rounds": 3, "active": 2, "local_steps": 1, "batch_size": 2, **settings}
    return simulate(FedAvg(), problem.model(), problem.federated(), **settings)


class Diary(Observer):
    """Writes down what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple] = []

    def started(self, run, config):
        self.told.append(("started", run.t, config["rounds"], config["method"]["name"], run.out))

    def client(self, done, total):
        self.told.append(("client", done, total))

    def round(self, record, run):
        written = run.out and len((run.out / "rounds.jsonl").read_text().splitlines())
        self.told.append(("round", record.round, run.t, written))

    def ended(self, status, summary):
        self.told.append(("ended", status, summary["rounds"]))

    def without_clients(self) -> list[tuple]:
        return [entry for entry in self.told if entry[0] != "client"]


class Broken(Observer):
    """Raises in one hook."""

    def __init__(self, hook: str, error: BaseException) -> None:
        self.calls = 0

        def fail(*_):
            self.calls += 1
            raise error

        setattr(self, hook, fail)


def stop_at(t: int) -> Rounds:
    def stop(record):
        if record.round == t:
            raise KeyboardInterrupt

    return Rounds(stop)


# --- what they are told ---


def test_a_run_is_told_from_its_start_to_its_end(tmp_path):
    diary, out = Diary(), tmp_path / "a"
    summary = run_config(small(), out, observers=[diary])
    clients = [("client", 1, 2), ("client", 2, 2)]
    assert diary.told == [
        ("started", 0, 3, "fedspeed", out),
        *clients, ("round", 1, 1, 1), *clients, ("round", 2, 2, 2), *clients, ("round", 3, 3, 3),
        ("ended", "finished", 3),
    ]  # fmt: skip
    assert summary["status"] == "finished"
    again = Diary()
    resume(out, observers=[again])  # nothing is left to do, so nothing begins
    assert again.told == []


def test_a_run_that_is_stopped_and_gone_on_with(tmp_path):
    first, second = Diary(), Diary()
    with pytest.raises(KeyboardInterrupt):
        run_config(small(), tmp_path / "a", observers=[first, stop_at(2)])
    assert first.told[-1] == ("ended", "interrupted", 2)
    resume(tmp_path / "a", observers=[second], rounds=4)
    told = second.without_clients()
    assert told[0][0] == "started"
    assert told[0][1] in (1, 2)  # the checkpoint of round 2 may not have been due
    assert told[-2:] == [("round", 4, 4, 4), ("ended", "finished", 4)]


def test_a_run_that_diverges_says_so():
    diary = Diary()
    with pytest.raises(Exception, match="diverged"), plain(observers=[diary], lr=1e200, lr_decay=1.0) as run:
        list(run)
    assert diary.told[-1][0] == "ended"
    assert diary.told[-1][1].startswith("diverged: FedAvg")


def test_a_run_made_where_another_error_is_handled_is_finished():
    diary = Diary()
    try:
        raise ValueError("mine")
    except ValueError:
        list(plain(observers=[diary]))
    assert diary.told[-1] == ("ended", "finished", 3)


def fail_in_the_loop(run):
    with run:
        for _ in run:
            raise ValueError("mine")


@pytest.mark.parametrize("out", [False, True])
@pytest.mark.parametrize("how", ["iterated", "broken off", "stepped", "in the loop"])
def test_simulate_takes_observers(tmp_path, out, how):
    diary = Diary()
    run = plain(observers=[diary], **({"out": tmp_path / "a"} if out else {}))
    if how == "iterated":
        assert len(list(run)) == 3
        ends = ["finished"]
    elif how == "broken off":
        for record in run:
            if record.round == 2:
                break
        list(run)
        ends = ["interrupted", "finished"]
    elif how == "stepped":
        run.step()
        run.step()
        run.close()
        ends = ["interrupted"] * (2 if out else 1)  # a directory is whole after every step
    else:
        with pytest.raises(ValueError, match="mine"):
            fail_in_the_loop(run)
        ends = ["interrupted"]
    told = diary.without_clients()
    assert [entry[1] for entry in told if entry[0] == "ended"] == ends
    assert [entry[0] for entry in told].count("started") == len(ends)
    rounds = [entry[1] for entry in told if entry[0] == "round"]
    assert rounds == list(range(1, len(rounds) + 1))
    assert told[0][:4] == ("started", 0, 3, "fedavg")


# --- those that misbehave ---


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("error", [ValueError("no\nmore"), OSError(28, "full"), MemoryError()], ids=repr)
def test_one_that_raises_is_named_and_dropped_and_the_run_goes_on(tmp_path, hook, error):
    broken, diary = Broken(hook, error), Diary()
    with pytest.warns(
        UserWarning, match=rf"^observer Broken\.{hook} failed \({type(error).__name__}.*the run continues$"
    ):
        run_config(small(), tmp_path / "a", observers=[broken, diary])
    assert broken.calls == 1
    assert diary.told[-1] == ("ended", "finished", 3)
    run_config(small(), tmp_path / "b")
    assert differences(tmp_path / "a", tmp_path / "b") == []
    assert verify(tmp_path / "a").broken == []


class Meddler(Observer):
    """Changes all that it is told."""

    def started(self, run, config):
        config.clear()

    def round(self, record, run):
        record.cohort.clear()
        record.metrics["mine"] = 1.0

    def ended(self, status, summary):
        summary.clear()


def test_what_an_observer_is_told_is_its_own(tmp_path):
    diary = Diary()
    summary = run_config(small(), tmp_path / "a", observers=[Meddler(), diary])
    assert summary["status"] == "finished"
    assert diary.told[0][:3] == ("started", 0, 3)
    assert diary.told[-1] == ("ended", "finished", 3)
    assert verify(tmp_path / "a").broken == []
    run_config(small(), tmp_path / "b")
    assert differences(tmp_path / "a", tmp_path / "b") == []


def test_a_record_that_the_caller_changes_is_written_as_it_was(tmp_path):
    digests = []
    for name in ("a", "b"):
        for record in plain(out=tmp_path / name):
            if name == "a":
                record.cohort.clear()
        digests.append(json.loads((tmp_path / name / "summary.json").read_text())["digests"])
    assert digests[0] == digests[1]


class Eager(Observer):
    """Runs rounds of its own."""

    def __init__(self, hook: str) -> None:
        setattr(self, hook, lambda *_: self.run.step())


@pytest.mark.parametrize("hook", HOOKS)
def test_an_observer_runs_no_rounds(hook):
    eager = Eager(hook)
    run = plain(observers=[eager])
    eager.run = run
    with pytest.warns(UserWarning, match="Eager.* must not run rounds"):
        assert [record.round for record in run] == [1, 2, 3]
    alone = plain()
    assert [record.round for record in alone] == [1, 2, 3]
    assert run.x.equal(alone.x)


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_what_is_to_stop_the_program_does(tmp_path, hook, error):
    with pytest.raises(error):
        run_config(small(), tmp_path / "a", observers=[Broken(hook, error())])
    resume(tmp_path / "a")
    run_config(small(), tmp_path / "b")
    assert differences(tmp_path / "a", tmp_path / "b") == []


class Unmakeable(Observer):
    def __init__(self) -> None:
        raise RuntimeError("no account")


class NoObserver:
    pass


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("csv", r"observers: expected a list of observers or names, found 'csv'"),
        (3, r"observers: expected a list of observers or names, found 3"),
        ([3], r"observers: expected a fedspeed.Observer, found 3"),
        ([Diary], r"found <class '.*Diary'>; did you mean Diary\(\)\?"),
        (["cvs"], r"unknown observer 'cvs'; did you mean 'csv'\? Known: csv"),
        (["odd"], r"observer odd: no_such_module:X cannot be loaded \(ModuleNotFoundError"),
        (["bare"], r"observer bare: expected a fedspeed.Observer, found <.*NoObserver"),
        (["poor"], r"observer poor: cannot be made \(RuntimeError: no account\)"),
    ],
)
@pytest.mark.parametrize("how", ["run_config", "resume", "simulate"])
def test_the_wrong_kind_is_refused_before_anything_begins(tmp_path, monkeypatch, how, given, says):
    places = {"odd": "no_such_module:X", "bare": f"{__name__}:NoObserver", "poor": f"{__name__}:Unmakeable"}
    for name, place in places.items():
        monkeypatch.setitem(observers.OBSERVERS, name, place)
    if isinstance(given, list) and given[0] == "cvs":
        for name in places:
            monkeypatch.delitem(observers.OBSERVERS, name)
    out = tmp_path / "a"
    begin = {
        "run_config": lambda: run_config(small(), out, observers=given),
        "resume": lambda: resume(out, observers=given),
        "simulate": lambda: plain(out=out, observers=given),
    }
    with pytest.raises(UserError, match=says) as caught:
        begin[how]()
    assert "\n" not in str(caught.value)
    assert not out.exists()


def test_names_of_installed_packages(tmp_path, monkeypatch):
    entry = EntryPoint("diary", f"{__name__}:Shared", observers.GROUP)
    monkeypatch.setattr(registry, "entry_points", lambda group: [entry] if group == observers.GROUP else [])
    run_config(small(), tmp_path / "a", observers=["diary"])
    assert Shared.last.told[-1] == ("ended", "finished", 3)
    with pytest.raises(UserError, match="Known: csv, diary"):
        run_config(small(), tmp_path / "b", observers=["nobody"])


class Shared(Diary):
    last: Diary

    def __init__(self) -> None:
        super().__init__()
        Shared.last = self


# --- the command line ---


def command(*given: str) -> list[str]:
    return [*given, "--rounds", "3", "--clients", "5", "--active", "2", "--local-steps", "1", "--quiet"]


def table(out: Path) -> list[dict[str, str]]:
    with (out / "rounds.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_log_csv_writes_the_rounds_beside_the_run(tmp_path):
    out = tmp_path / "a"
    assert main([*command("run"), "--out", str(out), "--log", "csv"]) == 0
    rounds = [json.loads(text) for text in (out / "rounds.jsonl").read_text().splitlines()]
    assert [row["test_loss"] for row in table(out)] == [str(r["test_loss"]) for r in rounds]
    assert [[int(i) for i in row["cohort"].split()] for row in table(out)] == [r["cohort"] for r in rounds]
    assert "log" not in (out / "config.toml").read_text()
    assert verify(out).broken == []
    assert main(["resume", str(out), "--rounds", "5", "--quiet", "--log", "csv"]) == 0
    assert [row["round"] for row in table(out)] == ["1", "2", "3", "4", "5"]
    assert main([*command("run"), "--out", str(out), "--overwrite"]) == 0
    assert not (out / "rounds.csv").exists()  # which would be another run's


@pytest.mark.parametrize("jobs", ["1", pytest.param("2", marks=pytest.mark.slow)])
def test_compare_logs_every_run(tmp_path, jobs):
    given = [*command("compare", "fedavg", "fedspeed"), "--seeds", "1", "--jobs", jobs, "--out", str(tmp_path / "c")]
    assert main([*given, "--log", "csv"]) == 0
    assert [len(table(tmp_path / "c" / f"{name}-s0")) for name in ("fedavg", "fedspeed")] == [3, 3]
    assert main(given) == 0  # the same runs: what was logged is no part of them


@pytest.mark.parametrize("given", [command("run"), command("compare", "fedavg"), ["resume", "a"]], ids=lambda g: g[0])
def test_an_unknown_name_is_one_line(tmp_path, monkeypatch, capsys, given):
    monkeypatch.chdir(tmp_path)
    assert main([*command("run"), "--out", "a"]) == 0
    before = sorted(path.name for path in tmp_path.iterdir())
    assert main([*given, "--log", "tensorbored"]) == 2
    told = capsys.readouterr().err
    assert told.startswith("fedspeed: error: unknown observer 'tensorbored'")
    assert told.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == before


@pytest.mark.filterwarnings("default")
def test_an_observer_that_fails_is_one_line_on_the_command_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(observers.OBSERVERS, "bad", f"{__name__}:Bad")
    assert main([*command("run"), "--out", str(tmp_path / "a"), "--log", "bad"]) == 0
    assert capsys.readouterr().err == (
        "fedspeed: warning: observer Bad.round failed (RuntimeError: gone); it is dropped, the run continues\n"
    )


class Bad(Observer):
    def round(self, record, run):
        raise RuntimeError("gone")


def test_log_has_no_use_where_nothing_is_run(tmp_path, capsys):
    assert main([*command("compare", "fedavg"), "--seeds", "1", "--out", str(tmp_path / "c")]) == 0
    assert main(["compare", str(tmp_path / "c"), "--log", "csv"]) == 2
    assert "--log has no use" in capsys.readouterr().err


def test_csv_without_a_directory_is_told_and_dropped():
    with pytest.warns(UserWarning, match=r"observer Csv.started failed .*there is no directory"):
        assert len(list(plain(observers=["csv"]))) == 3


def test_observers_need_no_torch():
    code = (
        "import sys, fedspeed; fedspeed.Observer; from fedspeed.server.observers import Observers; Observers(['csv'])"
    )
    subprocess.run([sys.executable, "-c", f"{code}; assert 'torch' not in sys.modules"], check=True)


# --- where it ran ---


def test_the_summary_says_engine_back_end_and_workers(tmp_path, quick_workers):
    runs = [run_config(small(backend=name, workers=2), tmp_path / name) for name in ("serial", "process")]
    assert [(s["engine"], s["backend"], s["workers"]) for s in runs] == [("loop", "serial", 1), ("loop", "process", 2)]
    differ = {one.name for one in differences(tmp_path / "serial", tmp_path / "process")}
    assert differ == {"backend"}  # in the config; of the results nothing
    path = tmp_path / "serial" / "summary.json"
    old = {k: v for k, v in json.loads(path.read_text()).items() if k not in ("engine", "backend", "workers")}
    RunDir(tmp_path / "serial").write_summary(old)
    assert verify(tmp_path / "serial").broken == []
    assert resume(tmp_path / "serial") == {k: v for k, v in old.items() if k != "seal"}
    assert {one.name for one in differences(tmp_path / "serial", tmp_path / "process")} == {"backend"}
