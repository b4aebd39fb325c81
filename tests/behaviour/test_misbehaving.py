"""Back ends, observers and methods of somebody else that do wrong: one line that names them, and no false success."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedspeed import Config, Observer, run_config
from fedspeed.backends.serial import Serial
from fedspeed.cli import main, options
from fedspeed.runs.verify import verify
from fedspeed.server import observers
from fedspeed.utils.registry import BACKENDS

SMALL = {"rounds": 2, "clients": 5, "active": 3, "local_steps": 1, "batch_size": 2, "method": "scaffold",
         "model": "vector", "split": "natural", "data": {"name": "quadratic", "d": 3, "n": 2}}  # fmt: skip
RUN = [
    "run",
    "--rounds",
    "2",
    "--clients",
    "5",
    "--active",
    "3",
    "--local-steps",
    "1",
    "--batch-size",
    "2",
    "--data",
    "quadratic",
    "--model",
    "vector",
]
RUN += ["--split", "natural", "--set", "data.d=3", "--set", "data.n=2", "--quiet", "--out", "out"]


pytestmark = pytest.mark.usefixtures("own_folder")


def one_line_of(capsys, code: int, *words: str) -> str:
    assert main(list(words)) == code
    err = capsys.readouterr().err
    assert err.count("\n") == 1, err
    assert "defect" not in err
    return err


# --- back ends ---


class Few(Serial):
    def run(self, jobs, down, state):
        return list(super().run(jobs, down, state))[:-1]


class Many(Serial):
    def run(self, jobs, down, state):
        replies = list(super().run(jobs, down, state))
        return [*replies, replies[0]]


class Turned(Serial):
    def run(self, jobs, down, state):
        return list(super().run(jobs, down, state))[::-1]


class Late(Serial):
    def run(self, jobs, down, state):
        yield next(iter(super().run(jobs, down, state)))
        raise OSError("connection lost\nfor ever")


class Nothing(Serial):
    def run(self, jobs, down, state):
        return None


class Numbers(Serial):
    def run(self, jobs, down, state):
        return [3 for _ in jobs]


class Exits(Serial):
    def run(self, jobs, down, state):
        raise SystemExit(0)


class BlindEyes(Serial):
    def evaluate(self, x, validation=False):
        return None


class PoorEyes(Serial):
    def evaluate(self, x, validation=False):
        raise RuntimeError("no test set")


class NoArguments(Serial):
    def __init__(self):
        pass


class NoCluster(Serial):
    def __init__(self, work, workers, touched):
        raise OSError("no cluster")


class Another(Serial):
    def __new__(cls, *_):
        return 3


class Stuck(Serial):
    def close(self):
        raise RuntimeError("cannot close")


@pytest.mark.parametrize(
    ("cls", "says"),
    [
        (Few, "in job order, found none for client"),
        (Many, "in job order, found one too many"),
        (Turned, "in place of client"),
        (Late, "run failed (OSError: connection lost)"),
        (Nothing, "run failed (TypeError"),
        (Numbers, "must give a Reply or Failed, found 3"),
        (Exits, "run failed (SystemExit: 0)"),
        (BlindEyes, "evaluate must return a Score of two floats, found None"),
        (PoorEyes, "evaluate failed (RuntimeError: no test set)"),
        (NoArguments, "cannot be made (TypeError"),
        (NoCluster, "cannot be made (OSError: no cluster)"),
        (Another, "expected an object with run, found 3"),
    ],
)
def test_a_back_end_that_does_wrong_is_named(capsys, monkeypatch, cls, says):
    monkeypatch.setitem(BACKENDS, "theirs", f"{__name__}:{cls.__name__}")
    err = one_line_of(capsys, 2, *RUN, "--backend", "theirs")
    assert err.startswith("fedspeed: error: back end theirs: ")
    assert says in err
    lines = Path("out/rounds.jsonl")
    assert not lines.exists() or lines.read_text() == ""
    if "made" in says or "object" in says:
        assert not Path("out").exists()


@pytest.mark.filterwarnings("always")
def test_a_back_end_that_cannot_be_closed_is_a_warning(capsys, monkeypatch):
    monkeypatch.setitem(BACKENDS, "theirs", f"{__name__}:Stuck")
    err = one_line_of(capsys, 0, *RUN, "--backend", "theirs")
    assert "warning: back end theirs: close failed (RuntimeError: cannot close)" in err


def test_a_back_end_whose_module_ends_the_program(capsys, monkeypatch):
    Path("leaves.py").write_text("import sys\nsys.exit(0)\n")
    monkeypatch.syspath_prepend(".")
    monkeypatch.setitem(BACKENDS, "theirs", "leaves:Any")
    assert "back end theirs: leaves:Any cannot be loaded (SystemExit: 0)" in one_line_of(
        capsys, 2, *RUN, "--backend", "theirs"
    )
    assert not Path("out").exists()


# --- observers ---


class Leaves(Observer):
    def __init__(self):
        raise SystemExit(0)


class Mute(Exception):
    def __str__(self):
        raise KeyError("x")


class Wordless(Observer):
    def round(self, record, run):
        raise Mute


class GivesUp(Observer):
    def round(self, record, run):
        raise GeneratorExit


class Stops(Observer):
    def round(self, record, run):
        raise SystemExit(0)


class Scribbles(Observer):
    def round(self, record, run):
        record.metrics["a"] = 1.0
        record.cohort.clear()

    def ended(self, status, summary):
        summary.clear()


def observed(monkeypatch, cls) -> list[str]:
    monkeypatch.setitem(observers.OBSERVERS, "theirs", f"{__name__}:{cls.__name__}")
    return [*RUN, "--log", "theirs"]


def test_an_observer_that_exits_when_made(capsys, monkeypatch):
    err = one_line_of(capsys, 2, *observed(monkeypatch, Leaves))
    assert "observer theirs: cannot be made (SystemExit: 0)" in err
    assert not Path("out").exists()


@pytest.mark.filterwarnings("always")
@pytest.mark.parametrize(("cls", "says"), [(Wordless, "(Mute)"), (GivesUp, "(GeneratorExit)")])
def test_an_observer_that_raises_oddly_is_dropped(capsys, monkeypatch, cls, says):
    err = one_line_of(capsys, 0, *observed(monkeypatch, cls))
    assert f"observer {cls.__name__}.round failed {says}" in err


def test_an_exit_of_an_observer_is_no_success(capsys, monkeypatch):
    assert "interrupted" in one_line_of(capsys, 130, *observed(monkeypatch, Stops))


def test_what_an_observer_does_to_its_arguments_stays_with_it():
    plain = run_config(Config.from_dict(SMALL), "plain")
    summary = run_config(Config.from_dict(SMALL), "out", observers=[Scribbles()])
    assert summary["digests"] == plain["digests"]
    assert verify(Path("out")).broken == []


# --- methods ---

OWN = """
import sys
from dataclasses import dataclass
from fedspeed import Wrapper

@dataclass(frozen=True)
class Arguments(Wrapper):
    def __init__(self, a, b): ...

@dataclass(frozen=True)
class Refuses(Wrapper):
    def __post_init__(self): raise RuntimeError("no\\nreally")

@dataclass(frozen=True)
class Thing(Wrapper):
    thing: object = object()

@dataclass(frozen=True)
class Mean(Wrapper):
    @property
    def running_mean(self): raise RuntimeError("no mean")

@dataclass(frozen=True)
class Leaves(Wrapper):
    def sent(self, up): sys.exit(0)

@dataclass(frozen=True)
class Raises(Wrapper):
    def upload(self, xK, down, client, run): raise ValueError("boom")
"""


@pytest.mark.parametrize(
    ("name", "says", "more"),
    [
        ("Arguments", "method own.py:Arguments: cannot be made", ""),
        ("Refuses", "method own.py:Refuses: cannot be made with {} (RuntimeError: no)", ""),
        ("Thing", "a config in TOML holds numbers, texts, lists and tables", ""),
        ("Mean", "Mean.running_mean: before round 1: RuntimeError: no mean", ""),
        ("Leaves", "Leaves.sent must not end the program", ""),
        ("Raises", "Raises.upload: before round 1: ValueError: boom", "--backend process --workers 2"),
    ],
)
def test_a_wrapper_that_does_wrong_is_named(capsys, name, says, more):
    Path("own.py").write_text(OWN)
    assert says in one_line_of(capsys, 2, *RUN, "--method", f"own.py:{name}", *more.split())
    if name != "Leaves":  # which fails in a round: the run is there, and says so
        assert not Path("out").exists()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("import sys\nsys.exit(0)\n", "own.py: cannot be imported: SystemExit: 0"),
        ("def (:\n", "own.py: cannot be imported: SyntaxError: invalid syntax ("),
        ("", "Known: none"),
    ],
)
def test_a_file_that_cannot_be_used(capsys, text, says):
    Path("own.py").write_text(text)
    err = one_line_of(capsys, 2, *RUN, "--method", "own.py:Any")
    assert says in err
    assert err.count("line 1") <= 1


@pytest.mark.parametrize("name", ["Arguments", "Raises"])
def test_methods_explains_none_that_fails(capsys, name):
    Path("own.py").write_text(OWN)
    assert f"method own.py:{name}: " in one_line_of(capsys, 2, "methods", f"own.py:{name}")


# --- what a new user is told ---


def test_the_next_command_leaves_open_what_was_left_open():
    config = Config.from_dict({"data": "synthetic", "split": "natural"})
    assert options.as_given(config) == ["--data", "synthetic", "--split", "natural"]


def test_theory_says_what_it_took_from_inspect(capsys):
    assert main([*RUN, "--method", "fedspeed"]) == 0
    Path("out/inspect.json").write_text('{"eigenvalue": 2.0, "dissimilarity": 4.0}')
    capsys.readouterr()
    assert main(["theory", "--from", "out"]) == 0
    assert "L and sigma_g: from inspect.json" in capsys.readouterr().out
    assert main(["theory", "--from", "out", "--L", "5"]) == 0
    told = capsys.readouterr().out
    assert "\nsigma_g: from inspect.json" in told
    assert "lam L 50" in told


def test_a_skew_beyond_numbers_is_refused(capsys):
    words = ["run", "--split", "lognormal-size:1e308", "--clients", "4", "--active", "2", "--quiet", "--out", "out"]
    assert "split lognormal-size: expected" in one_line_of(capsys, 2, *words)
    assert not Path("out").exists()
