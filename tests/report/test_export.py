"""Runs as tables, on the terminal and in notebooks; runs, targets and packages that are not there."""

from __future__ import annotations

import csv
import fcntl
import json
import os
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
import tomli_w
from federations import Softmax

from fedspeed import FedAvg, RunDir, UserError, load_runs, simulate
from fedspeed.cli import main
from fedspeed.report.export import TABLES, TRACKERS, need
from fedspeed.report.run_files import Source, read_runs

PACKAGES = {"parquet": "pyarrow", **{name: name for name in TRACKERS}}


def lines(n: int, **changes) -> list[dict]:
    """Rounds of a run that gets better; accuracy in the even ones."""
    return [
        {"round": t, "cohort": [3, t], "lr": 0.1, "train_loss": 1 / t, "test_loss": None if t % 2 else 2 / t,
         "test_accuracy": None if t % 2 else 1 - 1 / t, "drift": 0.1, "update_norm": 0.2, "bytes_down": 10**6,
         "bytes_up": 5 * 10**5, "grad_evals": 4.0, "dropped": [3] if t == 2 else [], "stragglers": [],
         "seconds": 2.0, "eval_seconds": 0.5, "metrics": {"spread": t / 8}, **changes}
        for t in range(1, n + 1)
    ]  # fmt: skip


def run_folder(
    path: Path, n: int = 4, status: str | None = "finished", rounds: list[dict] | None = None, **config
) -> Path:
    """A run directory written by hand; without a status it has no summary, as if it had been killed."""
    path.mkdir(parents=True)
    tables = {
        "format": 2,
        "rounds": 4,
        "lr": 0.1,
        "seed": 0,
        "split": "iid",
        "method": {"name": "fedavg"},
        "data": {"name": "digits"},
    }
    (path / "config.toml").write_text(tomli_w.dumps({**tables, **config}))
    rounds = lines(n) if rounds is None else rounds
    (path / "rounds.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rounds))
    if status:
        (path / "summary.json").write_text(json.dumps({"status": status, "rounds": len(rounds)}))
    return path


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refused(capsys, *given: str) -> str:
    """What a command that is refused says: one line, and nothing on standard output."""
    assert main(list(given)) == 2
    told = capsys.readouterr()
    assert told.err.startswith("fedspeed: error: ")
    assert told.err.count("\n") == 1
    assert told.out == ""
    return told.err


# --- tables ---


def test_a_table_has_every_round_and_what_differs(capsys):
    run_folder(Path("runs/a"), method={"name": "fedspeed", "rho": 0.1})
    run_folder(Path("runs/b"), n=2, seed=7, method={"name": "fedspeed", "rho": 0.2})
    assert main(["export", "runs", "--to", "csv"]) == 0
    assert capsys.readouterr().out == "2 runs, 6 rounds to csv: rounds.csv\n"
    with Path("rounds.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    wanted = [("runs/a", "0", "0.1", line) for line in lines(4)] + [("runs/b", "7", "0.2", line) for line in lines(2)]
    assert len(table) == 6
    for found, (run, seed, rho, line) in zip(table, wanted, strict=True):
        spread = line.pop("metrics")["spread"]
        about = {"run": run, "method": "fedspeed", "data": "digits", "seed": seed, "config.method.rho": rho}
        numbers = {
            key: " ".join(map(str, v)) if isinstance(v, list) else "" if v is None else str(v)
            for key, v in line.items()
        }
        assert found == {**about, **numbers, "metrics.spread": str(spread)}


def test_a_table_replaces_no_file_unasked(capsys):
    run_folder(Path("runs/a"))
    Path("mine.csv").write_text("mine")
    given = ["export", "runs/a", "--to", "csv", "-o", "mine.csv"]
    assert "mine.csv exists; choose another -o, or --overwrite it" in refused(capsys, *given)
    assert Path("mine.csv").read_text() == "mine"
    assert main([*given, "--overwrite"]) == 0
    assert Path("mine.csv").read_text().startswith("run,method,data,seed,round,")


@pytest.mark.slow
def test_a_frame_and_a_parquet_file_are_the_same():
    pandas = pytest.importorskip("pandas", reason="pip install pandas")
    pytest.importorskip("pyarrow", reason="pip install pyarrow")
    run_folder(Path("runs/a"))
    run_folder(Path("runs/b"), lr=0.2)
    found = load_runs("runs")
    assert list(found["run"]) == ["runs/a"] * 4 + ["runs/b"] * 4
    assert list(found["config.lr"]) == [0.1] * 4 + [0.2] * 4
    assert [None if value != value else value for value in found["test_accuracy"]] == 2 * [None, 0.5, None, 0.75]
    assert list(found["cohort"])[:2] == [[3, 1], [3, 2]]
    assert main(["export", "runs", "--to", "parquet", "-o", "x.parquet"]) == 0
    stored = pandas.read_parquet("x.parquet")
    lists = ["cohort", "dropped", "stragglers"]
    assert [[list(one) for one in stored[key]] for key in lists] == [list(found[key]) for key in lists]
    pandas.testing.assert_frame_equal(stored.drop(columns=lists), found.drop(columns=lists))
    (run_folder(Path("runs/c")) / "summary.json").write_text("{")
    with pytest.warns(UserWarning, match="left out: .*c: .*damaged"):
        assert len(load_runs(["runs/a", Path("runs/c")])) == 4


# --- what is not there ---


def test_an_unknown_target_is_named_before_anything_is_read(capsys):
    told = refused(capsys, "export", "nowhere", "--to", "tensorbored")
    assert "unknown target 'tensorbored'; did you mean 'tensorboard'? Known: csv, mlflow, parquet," in told


@pytest.mark.parametrize("target", PACKAGES)
def test_a_package_that_is_missing_is_named_with_its_command(target, capsys, monkeypatch):
    run_folder(Path("runs/a"))
    package = PACKAGES[target]
    monkeypatch.setitem(sys.modules, package, None)
    before = sorted(Path().rglob("*"))
    assert f"{package} cannot be imported (" in (told := refused(capsys, "export", "runs/a", "--to", target))
    assert told.endswith(f"; pip install {package}\n")
    if target in TRACKERS:
        for command in (["run"], ["compare", "fedavg"]):
            told = refused(capsys, *command, "--out", "new", "--rounds", "1", "--log", target)
            assert told.startswith(f"fedspeed: error: observer {target}: {package} cannot be imported (")
            assert told.endswith(f"; pip install {package}\n")
    assert sorted(Path().rglob("*")) == before


def test_a_folder_of_its_name_is_no_package(here, monkeypatch):
    """wandb makes one called `wandb` where it runs."""
    Path("some_tracker").mkdir()
    monkeypatch.syspath_prepend(here)
    with pytest.raises(UserError, match=r"some_tracker cannot be imported .*; pip install some_tracker$"):
        need("some_tracker")


def test_load_runs_says_what_it_needs(monkeypatch):
    run_folder(Path("runs/a"))
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(UserError, match=r"pandas cannot be imported .*; pip install pandas"):
        load_runs("runs/a")


def test_no_tracker_is_imported_unasked():
    code = "import sys, fedspeed.cli, fedspeed.report.export; fedspeed.load_runs; fedspeed.cli.build_parser(); "
    code += f"found = {{*sys.modules}} & {{'torch', 'pandas', 'pyarrow', *{TRACKERS}}}; assert not found, found"
    subprocess.run([sys.executable, "-c", code], check=True)


# --- runs in every state ---


def damaged(path: Path) -> None:
    """A line in the middle is no round."""
    text = (path / "rounds.jsonl").read_text().splitlines()
    (path / "rounds.jsonl").write_text("\n".join([text[0], "{oops", *text[2:], ""]))


DAMAGE = {
    "a line": (damaged, "runs/bad/rounds.jsonl is damaged: expected 4 rounds, found 1"),
    "fewer": (lambda p: (p / "rounds.jsonl").write_text(json.dumps(lines(1)[0])), "expected 4 rounds, found 1"),
    "no rounds": (lambda p: (p / "rounds.jsonl").unlink(), "expected 4 rounds, found 0"),
    "a summary": (lambda p: (p / "summary.json").write_text("{"), "summary.json is damaged: it cannot be read"),
    "a config": (lambda p: (p / "config.toml").write_text("rounds = "), "is not valid TOML"),
    "no method": (lambda p: (p / "config.toml").write_text("rounds = 3"), "runs/bad/config.toml names no method"),
    "of a killed one": (lambda p: (damaged(p), (p / "summary.json").unlink()), "expected 3 rounds, found 1"),
    "bytes": (lambda p: (p / "rounds.jsonl").write_bytes(b"\xff\xfe\x00" * 50), "expected 4 rounds, found 0"),
}  # fmt: skip


@pytest.mark.parametrize("what", DAMAGE)
def test_a_damaged_run_is_one_line_and_leaves_the_others(what, capsys):
    run_folder(Path("runs/good"))
    damage, says = DAMAGE[what]
    damage(run_folder(Path("runs/bad")))
    assert says in refused(capsys, "export", "runs/bad", "--to", "csv")
    assert says in refused(capsys, "show", "runs/bad")
    assert not Path("rounds.csv").exists()
    assert main(["export", "runs", "--to", "csv"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("left out: runs/bad: ")
    assert says in first
    assert second == "1 run, 4 rounds to csv: rounds.csv"


@pytest.mark.parametrize("target", [*TABLES, *TRACKERS])
def test_folders_without_runs_are_one_line(target, capsys):
    Path("empty").mkdir()
    for name in ("empty", "nowhere"):
        assert f"{name} holds no runs: expected a run directory" in refused(capsys, "export", name, "--to", target)
    assert "empty holds no run: expected a config.toml" in refused(capsys, "show", "empty")


def test_help_keeps_names_as_they_are_written(capsys):
    with pytest.raises(SystemExit):
        main(["export", "--help"])
    assert "Export runs to TensorBoard, Weights & Biases" in capsys.readouterr().out


def test_a_killed_run_has_the_rounds_it_wrote(capsys):
    path = run_folder(Path("runs/a"), n=3, status=None)
    with (path / "rounds.jsonl").open("a") as file:
        file.write('{"round": 4, "coh')
    run = Source.read(path)
    assert (len(run.records), run.status) == (3, "interrupted")
    assert main(["show", "runs/a"]) == 0
    assert "interrupted, 3 of 4 rounds, 4.5 MB sent, 12 gradients, 7.5 s" in capsys.readouterr().out


def test_a_run_under_way_has_its_rounds_so_far(capsys):
    path = run_folder(Path("runs/a"), n=2, status=None)
    held = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert main(["export", "runs/a", "--to", "csv"]) == 0
        assert main(["show", "runs/a"]) == 0
    finally:
        os.close(held)
    told = capsys.readouterr().out
    assert "1 run, 2 rounds to csv (1 still running: their rounds so far): rounds.csv" in told
    assert "\nrunning, 2 of 4 rounds" in told


def test_runs_are_told_apart(capsys):
    for path in ("x/runs/a", "y/runs/a"):
        run_folder(Path(path))
    assert "two runs are called runs/a: x/runs/a and y/runs/a" in refused(
        capsys, "export", "x/runs", "y/runs", "--to", "csv"
    )
    runs, _ = read_runs([Path("x/runs"), Path("x/runs/a"), Path("x/../x/runs/a")])
    assert len(runs) == 1


def test_a_run_that_continues_is_the_same_run_and_another_config_is_not():
    one, longer, other = (
        Source(Path("runs/a"), {"rounds": rounds, "lr": lr, "method": {"name": "fedavg"}}, [])
        for rounds, lr in ((3, 0.1), (5, 0.1), (3, 0.2))
    )
    assert one.key == longer.key != other.key
    assert Source(Path("runs/b"), one.config, []).key != one.key


# --- on the terminal ---


def test_show_prints_the_summary_and_curves(capsys):
    run_folder(Path("runs/a"), rounds=lines(40))
    assert main(["show", "runs/a"]) == 0
    told = capsys.readouterr().out
    assert told.startswith(
        "runs/a: fedavg on digits iid, seed 0\nfinished, 40 of 4 rounds, 60.0 MB sent, 160 gradients, 100.0 s\n"
        "accuracy last 97.50%, best 97.50%, mean of last 5 97.20%\n"
    )
    assert told.count("o") > 10  # the curve
    assert "train loss █" in told
    assert told.rstrip().endswith("1 to 0.025")


@pytest.mark.parametrize(
    ("rounds", "shown", "not_shown"),
    [
        ([], "finished, 0 of 4 rounds\n", "loss"),
        (lines(3, test_accuracy=None, test_loss=None), "train loss █", "accuracy"),
        (lines(3, train_loss=None, test_loss=None, test_accuracy=None), "finished, 3 of 4", "loss"),
    ],
    ids=["no rounds", "losses only", "nothing finite"],
)
def test_show_has_less_where_less_was_measured(rounds, shown, not_shown, capsys):
    run_folder(Path("runs/a"), rounds=rounds)
    assert main(["show", "runs/a"]) == 0
    told = capsys.readouterr().out
    assert shown in told
    assert not_shown not in told


def test_show_of_a_diverged_run_says_so(capsys):
    run_folder(Path("runs/a"), n=2, status="diverged: client 3 of round 3\nand more")
    assert main(["show", "runs/a"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[1].startswith("diverged, 2 of 4 rounds, ")
    assert shown[2] == "client 3 of round 3"


# --- in notebooks ---


class Checked(HTMLParser):
    """Every tag that is opened is closed, and which there are."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.open.append(tag)
        self.tags.add(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_startendtag(self, tag, attrs):
        self.tags.add(tag)


def test_a_run_directory_in_a_notebook():
    run_folder(Path("<script>alert(1)"), status="failed: <img src=x>")
    text = RunDir("<script>alert(1)")._repr_html_()
    assert Checked(text).tags == {"div", "p", "b", "table", "tr", "th", "td", "svg", "polyline"}
    assert "failed: &lt;img src=x&gt;" in text
    assert "test_accuracy, rounds 2 to 4: 0.5 to 0.75, last 0.75" in text
    assert "<svg" not in RunDir("nowhere")._repr_html_()
    assert repr(RunDir("nowhere")) == "<RunDir nowhere: no run yet>"
    assert repr(RunDir("<script>alert(1)")).startswith("<RunDir <script>alert(1): failed: <img src=x>, ")
    run_folder(Path("flat"), status=None, rounds=lines(2, train_loss=None))
    assert "rounds so far" in RunDir("flat")._repr_html_()


def test_a_simulation_in_a_notebook():
    problem = Softmax()
    given = {"rounds": 3, "active": 2, "local_steps": 1, "batch_size": 2}
    alone = simulate(FedAvg(), problem.model(), problem.federated(), **given)
    assert "round 0 of 3" in alone._repr_html_()
    assert "<svg" not in alone._repr_html_()
    assert [record.round for record in alone] == [record.round for record in alone.records] == [1, 2, 3]
    assert "train_loss, rounds 1 to 3" in alone._repr_html_()
    assert Checked(problem.federated()._repr_html_()).tags >= {"table", "td"}
    with simulate(FedAvg(), problem.model(), problem.federated(), out="run", **given) as run:
        list(run)
    text = run._repr_html_()
    assert Checked(text).tags >= {"svg", "table"}
    assert "round 3 of 3" in text
    assert "train_loss, rounds 1 to 3" in text
