"""`fedspeed.compare` and its kin in Python: the runs of the command and of `simulate`, and nothing else."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import fedspeed
from fedspeed.cli import main
from fedspeed.config.plan import Plan, Settings
from fedspeed.errors import UserError
from fedspeed.experiments.batch import _remove_begun
from fedspeed.runs.directory import RunDir, exclusive
from fedspeed.server.simulation import Simulation

QUICK = {"rounds": 3, "active": 3, "local_steps": 2, "batch_size": 5}
NAMED = {"model": "linear", "data": "digits", "clients": 8, "split": "iid"}


class Net(nn.Module):
    """A user's own module."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layers(x)
        return out


pytestmark = pytest.mark.usefixtures("own_folder")


@pytest.fixture
def data() -> fedspeed.Federated:
    x = np.random.default_rng(0).normal(size=(120, 4)).astype("float32")
    return fedspeed.Federated.from_arrays(x, (x[:, 0] > 0).astype(int), np.arange(120) % 6, holdout=0.2)


def by_hand(method, data, seed: int, out: str) -> None:
    """The loop that `compare` replaces."""
    for _ in fedspeed.simulate(method, Net, data, out=out, seed=seed, **QUICK):
        pass


def test_own_module_and_arrays_make_the_runs_of_simulate(data):
    methods = ["fedavg", fedspeed.FedSpeed(rho=0.05), fedspeed.Scaffold]
    found = fedspeed.compare(methods, Net, data, out="made", seeds=2, **QUICK)
    assert [row.label for row in found.rows] == ["fedavg", "fedspeed:rho=0.05", "scaffold"]
    assert [[run.summary["seed"] for run in row.runs] for row in found.rows] == [[0, 1]] * 3
    for method, folder in zip(methods, ("fedavg", "fedspeed_rho=0.05", "scaffold"), strict=True):
        for seed in (0, 1):
            by_hand(method, data, seed, f"hand/{folder}-s{seed}")
            assert fedspeed.diff(f"hand/{folder}-s{seed}", f"made/{folder}-s{seed}") == []
    starts = [{RunDir(run.path).config()["model"]["digest"] for run in row.runs} for row in found.rows]
    assert starts[0] == starts[1] == starts[2]  # paired: for a seed all methods start from one model
    assert len(starts[0]) == 2
    assert Path("made/table.tex").exists()
    assert "fedspeed:rho=0.05" in repr(found)
    assert "FedSpeed (rho=0.05)" in found._repr_html_()


def test_names_make_the_runs_of_the_command():
    found = fedspeed.compare({"fedavg": "fedavg", "fedspeed": fedspeed.FedSpeed()}, **NAMED, out="py", seeds=2, **QUICK)
    flags = [f"--{key.replace('_', '-')}={value}" for key, value in {**NAMED, **QUICK}.items()]
    assert main(["compare", "fedavg", "fedspeed", *flags, "--seeds", "2", "--out", "cli", "--quiet"]) == 0
    for name in ("fedavg-s0", "fedavg-s1", "fedspeed-s0", "fedspeed-s1"):
        assert fedspeed.diff(f"py/{name}", f"cli/{name}") == []
    assert Path("py/table.md").read_text() == Path("cli/table.md").read_text()
    assert repr(fedspeed.compare("cli")) == repr(found)
    assert fedspeed.verify("py/fedavg-s0").broken == []
    assert fedspeed.resume("py/fedavg-s0")["status"] == "finished"


SCRIPT = """
import fedspeed
print("the script begins")
fedspeed.compare(["fedavg", "fedspeed"], "linear", "digits", clients=8, active=2, rounds=2, seeds=1, out="c", jobs=2)
"""


@pytest.mark.parametrize("file", ["script.py", "-"])
def test_a_script_needs_no_guard_for_runs_side_by_side(file):
    """Processes of a pool do not execute it again, neither a file nor a program read from stdin."""
    Path("script.py").write_text(SCRIPT)
    ran = subprocess.run([sys.executable, file], input=SCRIPT, capture_output=True, text=True, check=True)
    assert ran.stdout.count("the script begins") == 1
    assert len(list(Path("c").glob("*/model.safetensors"))) == 2


def test_torch_s_default_type_reaches_the_processes():
    """A script that sets it has the same numbers however many runs go side by side."""
    how = {"clients": 8, "active": 2, "rounds": 1, "seeds": 2, "local_steps": 1}
    torch.set_default_dtype(torch.float64)
    try:
        for jobs in (1, 2):
            fedspeed.compare(["fedavg"], "linear", "digits", out=str(jobs), jobs=jobs, **how)
    finally:
        torch.set_default_dtype(torch.float32)
    one, two = (RunDir(Path(jobs, "fedavg-s1")) for jobs in "12")
    assert one.model_digest() == two.model_digest()


def test_refused_runs_side_by_side_leave_nothing():
    """Of those that begin when the first is refused, too: the corrected call may use the same folder."""
    head = "from torch import nn\n\n\ndef net(shape, outputs):\n"
    Path("net.py").write_text(head + "    return nn.Sequential(nn.Flatten(), nn.Linear(64, 3))\n")
    how = {"clients": 8, "active": 2, "rounds": 1, "seeds": 2, "local_steps": 1, "out": "c", "jobs": 2}
    for _ in range(3):
        with pytest.raises(UserError, match="expected 10 outputs, one per class, found 3"):
            fedspeed.compare(["fedavg", "fedspeed"], "net.py:net", "digits", **how)
        assert not list(Path("c").glob("*/*"))


def test_refused_runs_leave_the_runs_of_other_processes(tmp_path):
    """Those with rounds, and those that another process has just begun: it holds their folder."""
    begun, done, ours = (tmp_path / name for name in ("begun", "done", "ours"))
    missing = {folder: RunDir(folder).missing_folders() for folder in (begun, done, ours)}
    for folder in missing:
        folder.mkdir()
        (folder / "config.toml").touch()
    (done / "rounds.jsonl").write_text("{}\n")
    with exclusive(begun):
        _remove_begun(missing)
    assert (begun.exists(), done.exists(), ours.exists()) == (True, True, False)


def test_a_call_that_was_stopped_continues(data, monkeypatch):
    advance, calls = Simulation.advance, []

    def stop_once(self):
        calls.append(1)
        if len(calls) == 5:  # the second round of the second run
            raise KeyboardInterrupt
        return advance(self)

    monkeypatch.setattr(Simulation, "advance", stop_once)
    how = {"out": "made", "seeds": 1, **QUICK}
    with pytest.raises(KeyboardInterrupt):
        fedspeed.compare(["fedavg", "fedprox"], Net, data, **how)
    fedspeed.compare(["fedavg", "fedprox"], Net, data, **how)
    assert len(calls) == 5 + 2  # the two rounds that were left
    fedspeed.compare(["fedavg", "fedprox"], Net, data, **how)
    assert len(calls) == 7
    by_hand("fedprox", data, 0, "hand")
    assert fedspeed.diff("hand", "made/fedprox-s0") == []


def test_data_may_follow_the_seed_and_a_run_may_diverge():
    def split(seed: int) -> fedspeed.Federated:
        return fedspeed.load_data("digits", split="dirichlet:0.3", clients=6, seed=seed)

    how = {**QUICK, "lr": 1e30, "local_steps": 9}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = fedspeed.compare(["fedavg"], lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), split,
                                 out="a", seeds=2, **how)  # fmt: skip
    assert [run.state for run in found.rows[0].runs] == ["diverged", "diverged"]
    assert len({run.summary["split_fingerprint"] for run in found.rows[0].runs}) == 2
    assert "2 of 2 diverged" in repr(found)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"methods": "fedavg"}, "expected a list of methods"),
        ({"methods": []}, "expected a list of methods"),
        ({"methods": ["fedavg", fedspeed.FedAvg()]}, "got fedavg twice"),
        ({"methods": ["fedsped"]}, "did you mean 'fedspeed'"),
        ({"out": None}, "expected out= a folder"),
        ({"seeds": 0}, "expected how many seeds"),
        ({"seeds": [1, 1]}, "expected different seeds"),
        ({"seed": 3}, "unknown keyword of compare 'seed'"),
        ({"round": 3}, "did you mean 'rounds'"),
        ({"targets": [80]}, r"targets: expected accuracies in \(0, 1\), found 80; 0.85 is 85%"),
        ({"targets": "0.8"}, "targets: expected a list of accuracies"),
        ({"progress": True}, "expected progress= a function"),
        ({"methods": {"a": "fedavg", "b": fedspeed.FedAvg()}}, "got a and b, which are the same"),
        ({"methods": ["fedavg", "fedprox"], "labels": {"fedavg": "fedprox"}}, "'fedprox' twice"),
        ({"jobs": 2}, "expected jobs=1"),
        ({"jobs": -1}, "jobs must be"),
        ({"overwrite": True}, "choose another out"),
        ({"split": "iid"}, "split is for data by name"),
        ({"baseline": "fedprox"}, "baseline: expected one of fedavg"),
        ({"columns": "foo"}, "unknown column 'foo'"),
        ({"columns": ["rounds"]}, r"column rounds: expected a target accuracy.*targets="),
        ({"labels": {"fedprox": "X"}}, "labels: expected OLD=NEW with OLD one of fedavg"),
        ({"size": "wide"}, "size: expected column, page or WIDTHxHEIGHT"),
        ({"model": "", "data": "", "methods": ["fedavg"]}, "expected a model and data, or folders of runs"),
        ({"model": 3}, "model: expected an nn.Module"),
        ({"data": 3}, "data"),
    ],
)  # fmt: skip
def test_bad_input_is_refused_before_a_run(data, given, said):
    how = {"methods": ["fedavg"], "model": Net, "data": data, "out": "made", "seeds": 1, **QUICK, **given}
    with pytest.raises(UserError, match=said):
        fedspeed.compare(**how)
    assert not Path("made").exists()


def test_a_report_is_the_one_of_the_command(data):
    fedspeed.compare(["fedavg", "scaffold"], Net, data, out="made", seeds=2, **QUICK)
    for name in ("a.html", "a.tex", "a.csv", "a.png"):
        assert fedspeed.report("made", name, columns="last5", labels={"fedavg": "Base"}, title="none") == Path(name)
        other = f"b{Path(name).suffix}"
        given = ["--columns", "last5", "--labels", "fedavg=Base", "--title", "none", "--quiet"]
        assert main(["report", "made", "-o", other, *given]) == 0
        assert Path(name).read_bytes() == Path(other).read_bytes()
    assert r"Base & " in Path("a.tex").read_text()
    assert "SCAFFOLD & " in Path("a.tex").read_text()
    assert "scaffold" in Path("a.csv").read_text()


def test_the_keywords_are_the_fields_of_the_plan():
    """A new field of `Plan` is also a line of `Settings`, for editors."""
    kinds = {field.name: str(field.type) for field in dataclasses.fields(Plan)}
    written = {name: getattr(kind, "__forward_arg__", str(kind)) for name, kind in Settings.__annotations__.items()}
    assert list(written) == list(kinds)
    assert {name: kind for name, kind in written.items() if kind not in ("Any", kinds[name])} == {}
    for function in (fedspeed.simulate, fedspeed.compare):
        found = inspect.signature(function).parameters
        assert set(kinds) - set(found) == ({"seed"} if "seeds" in found else set())
        assert str(found["rounds"]) == f"rounds: int = {Plan().rounds}"  # as `help` and the site show it
        assert "ForwardRef" not in str(inspect.signature(function))


def test_editors_see_the_public_names():
    """What a type checker imports is what `__getattr__` finds."""
    tree = ast.parse(Path(fedspeed.__file__).read_text())
    (block,) = (node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    seen: dict[str, object] = {}
    for node in block.body:
        code = ast.unparse(node).replace("from .", "from fedspeed.")
        exec(code, seen)
    assert set(fedspeed.__all__) <= set(seen)
    for name in set(fedspeed.__all__) - {"report"}:
        assert seen[name] is getattr(fedspeed, name), name


def test_an_edited_class_is_not_shown_with_old_numbers(data):
    """A notebook: the cell of a method is edited, and the cell that compares runs again."""
    cell = "import fedspeed\nclass Mine(fedspeed.FedAvg):\n    def rate(self, k, K):\n        return 1.0\n"
    how = {"out": "made", "seeds": 2, "targets": 0.8, **QUICK}

    def compare(text: str, **others: str):
        space: dict[str, type] = {"__name__": "__main__"}
        exec(text, space)
        return fedspeed.compare({**others, "avg": "fedavg", "mine": space["Mine"]}, Net, data, **how)

    first = compare(cell)
    assert "kept" not in repr(first)
    again = compare("# moved\n" + cell)
    assert repr(again) == f"{first!r}\n\nkept 4 runs that were finished before"
    assert "kept 4 runs" in again._repr_html_()
    with pytest.raises(UserError, match=r"mine-s0 holds another run: .* differs in method, .*choose another out"):
        compare(cell.replace("1.0", "0.5"))
    with pytest.raises(UserError, match="differs in method"):  # before a new method is trained
        compare(cell.replace("1.0", "0.5"), new="fedprox")
    assert not Path("made/new-s0").exists()
    assert fedspeed.compare("made").targets == [0.8]  # stored with the runs


@pytest.mark.parametrize("named", [True, False])
def test_progress_is_a_line_for_every_run(data, named):
    said: list[str] = []
    what = NAMED if named else {"model": Net, "data": data}
    how = {**what, "out": "made", "seeds": 2, "progress": said.append, **QUICK}
    fedspeed.compare(["fedavg"], **how)
    ends = [line for line in said if line.startswith(("1/2 runs, fedavg-s0: ", "2/2 runs, fedavg-s1: "))]
    assert len(ends) >= 2
    said.clear()
    assert repr(fedspeed.compare(["fedavg"], **how)).endswith("kept 2 runs that were finished before")
    assert said == []


def test_the_seeds_are_named_for_a_seed(data):
    with pytest.raises(UserError) as raised:
        fedspeed.compare(["fedavg"], Net, data, out="made", seed=3)
    known = str(raised.value).partition("Known: ")[2].split(", ")
    assert "did you mean 'seeds'" in str(raised.value)
    assert "seeds" in known
    assert "seed" not in known
