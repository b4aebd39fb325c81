"""The report page: the numbers of the runs, whatever their names and however they ended, and never a traceback."""

from __future__ import annotations

import base64
import csv
import json
import math
import re
import shutil
import statistics
import subprocess
import sys
import zlib
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from made_runs import made_run

from fedspeed import Config, FedDyn, run_config
from fedspeed.cli import main
from fedspeed.report import page_data as embedding
from fedspeed.report.comparison import Comparison, configured_targets, targets_of
from fedspeed.report.run_files import collect, finished, read_any
from fedspeed.report.statistics import Gap, interval
from fedspeed.runs.directory import RunDir, exclusive, read_split

HOSTILE = "</script><img src=x onerror=alert(1)>\"'&\u202e"


@pytest.fixture
def runs(tmp_path, monkeypatch) -> Path:
    """Two methods, three seeds each."""
    monkeypatch.chdir(tmp_path)
    for seed in range(3):
        made_run(tmp_path / f"runs/a-s{seed}", "fedavg", seed)
        made_run(tmp_path / f"runs/b-s{seed}", "fedspeed", seed, gain=0.05)
    return tmp_path / "runs"


def report(*given: str) -> str:
    assert main(["report", *given, "-o", "report.html", "--quiet"]) == 0
    return Path("report.html").read_text("utf-8")


class Parts(HTMLParser):
    """Elements with their attributes, text by the id of the element around it, cells of the verdict's table."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.inside, self.texts, self.lines = "", {}, []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self.inside = dict(attrs).get("id") or self.inside
        if tag == "tr" and self.inside == "verdict-table":
            self.lines.append([])
        if tag in ("td", "th") and self.inside == "verdict-table":
            self.lines[-1].append("")

    def handle_endtag(self, tag):
        if tag == "table":
            self.inside = ""

    def handle_data(self, data):
        self.texts[self.inside] = self.texts.get(self.inside, "") + data
        if self.inside == "verdict-table" and self.lines and self.lines[-1]:
            self.lines[-1][-1] += data


def data_of(page: str) -> dict[str, Any]:
    attributes, text = re.search(r'<script id="data" type="application/json"([^>]*)>([^<]*)</script>', page).groups()
    return json.loads(zlib.decompress(base64.b64decode(text)) if "deflate" in attributes else text)


def column(data: dict[str, Any], run: dict[str, Any], name: str) -> list[Any]:
    found = data["columns"][run["columns"][name]]
    return found if isinstance(found, list) else [found] * run["rounds"]


# --- numbers ---


def test_the_table_says_what_the_summaries_say(runs):
    lines = Parts(report("runs", "--columns", "all")).lines
    title = lines[0]
    summaries = [RunDir(runs / f"b-s{seed}").raw_summary() for seed in range(3)]
    speed = dict(zip(title, next(line for line in lines if line[0] == "FedSpeed"), strict=True))
    for name, key in (
        ("last %", "last_accuracy"),
        ("best %", "best_accuracy"),
        ("last-5 mean %", "mean_last5_accuracy"),
    ):
        values = [100 * summary[key] for summary in summaries]
        assert speed[name] == f"{statistics.fmean(values):.2f} ± {statistics.stdev(values):.2f}"
    baseline = statistics.fmean(RunDir(runs / f"a-s{seed}").raw_summary()["mean_last5_accuracy"] for seed in range(3))
    target = math.floor(100 * baseline)
    first = []
    for seed in range(3):
        scores = [r.test_accuracy for r in RunDir(runs / f"b-s{seed}").records()]
        first.append(next(t for t, score in enumerate(scores, 1) if score >= target / 100))
    assert speed[f"rounds to {target}%"].startswith(f"{statistics.fmean(first):.1f}")
    assert speed[f"gradients to {target}%"].startswith(f"{20 * statistics.fmean(first):.0f}")


@pytest.mark.parametrize("packed", [False, True])
def test_the_data_hold_every_number_of_every_round(runs, packed, monkeypatch):
    if packed:
        monkeypatch.setattr(embedding, "PLAIN", 10)
    data = data_of(report("runs"))
    for row, name in zip(data["rows"], "ab", strict=True):
        for seed, run in enumerate(row["runs"]):
            records = RunDir(runs / f"{name}-s{seed}").records()
            for key in ("test_accuracy", "test_loss", "train_loss", "drift", "update_norm", "lr", "bytes_up"):
                assert column(data, run, key) == [getattr(record, key) for record in records]
            assert column(data, run, "seconds") == pytest.approx([record.seconds for record in records], abs=6e-7)
            assert column(data, run, "cohort") == [4] * 10
            times = data["columns"][run["took_part"]["each"]]
            assert times == [sum(i in record.cohort for record in records) for i in range(12)]
            split = read_split(runs / f"{name}-s{seed}" / "split.json")
            assert data["splits"][run["split"]]["sizes"] == split.sizes


def test_the_same_runs_make_the_same_page(runs):
    assert report("runs") == report("runs")


def test_simulated_time_and_numbers_of_methods_are_there_if_runs_have_them(own_folder):
    made_run(own_folder / "a", record=lambda f: {**f, "metrics": {"virtual_seconds": 2.0 * f["round"], "angle": 0.5}})
    data = data_of(report("a"))
    run = data["rows"][0]["runs"][0]
    assert column(data, run, "virtual_seconds") == [2.0 * t for t in range(1, 11)]
    assert column(data, run, "metrics.angle") == [0.5] * 10
    assert "metrics.virtual_seconds" not in run["columns"]


@pytest.mark.skipif(not shutil.which("node"), reason="needs node")
def test_the_table_of_configs_leaves_out_seeds(tmp_path):
    from fedspeed.report.page import configs

    made_run(tmp_path / "a-s0", "fedavg", 0)
    made_run(tmp_path / "b-s1", "fedspeed", 1)
    rows, _ = collect([tmp_path])
    assert [row.runs[0].summary["seed"] for row in rows] == [0, 1]
    assert configs(rows).startswith('<p class="note">Nothing but method and seed.</p>')


def test_the_norms_of_x_and_of_the_running_mean_are_curves_with_a_title(own_folder):
    """A real run of FedDyn, and the page's own script for what it draws."""
    run_config(Config(rounds=3, clients=4, active=2, local_steps=1, method=FedDyn()), "a")
    data = data_of(report("a"))
    lines = [json.loads(line)["metrics"] for line in Path("a/rounds.jsonl").read_text().splitlines()]
    for name in ("x_norm", "H_norm"):
        assert column(data, data["rows"][0]["runs"][0], f"metrics.{name}") == [line[name] for line in lines]
    page = Path(embedding.__file__).parent / "page"
    code = (page / "curves.js").read_text("utf-8").partition("// The series of a panel")[0]
    show = "console.log(JSON.stringify(panelsOf(data).map((panel) => [panel.key, panel.title])))"
    script = (
        f"const runsOf = (data) => data.rows.flatMap((row) => row.runs);\n{code}\nconst data = {json.dumps(data)};\n"
    )
    told = subprocess.run(["node", "-e", script + show], capture_output=True, text=True, check=True).stdout
    titles = dict(json.loads(told))
    assert titles["metrics.x_norm"] == "Norm of x, ‖x‖"
    assert titles["metrics.H_norm"] == "Norm of H, ‖H‖"
    assert titles["drift"] == "Drift, mean ‖x_iK − x‖²"


def test_client_scores_are_there_if_a_run_has_them(runs, monkeypatch):
    import numpy as np

    class Scores:
        rounds, on, columns = np.array([5, 10]), "train", ("accuracy", "loss")
        accuracy, loss = np.array([[0.1, 0.2], [0.5, 0.25]]), np.array([[2.0, 3.0], [1.0, np.inf]])

    monkeypatch.setattr(RunDir, "client_metrics", lambda self: Scores, raising=False)
    found = data_of(report("runs"))["rows"][0]["runs"][0]["clients"]
    assert found == {"round": 10, "on": "train", "accuracy": [0.5, 0.25], "loss": [1.0, None]}


def test_every_method_can_be_the_baseline(runs):
    data = data_of(report("runs", "--baseline", "fedspeed"))
    assert data["baseline"] == "FedSpeed"
    (there,) = (gap for gap in data["gaps"]["FedAvg"] if gap["metric"] == "last_accuracy")
    (back,) = (gap for gap in data["gaps"]["FedSpeed"] if gap["metric"] == "last_accuracy")
    assert there["mean"] == pytest.approx(-back["mean"])
    assert [there["low"], there["high"]] == pytest.approx([-back["high"], -back["low"]])


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ([0.01, 0.03], "undecided; by estimate 3 more seeds would decide"),
        ([0.02, 0.021, 0.022], "yes, better"),
        ([-0.001, 0.001, 0.0], "no: less than half a point"),
        ([0.3, -0.3], "undecided: 2 seeds"),
        ([0.02, 0.02, 0.02], "undecided"),  # a coarse test set: another such seed would say no more
        ([0.1], "unknown: 1 seed; one more gives an interval"),
        ([], "no seed in common"),
    ],
)
def test_what_would_decide(values, says):
    mean = statistics.fmean(values) if values else None
    gap = Gap("a", "last_accuracy", tuple(range(len(values))), tuple(values), mean, *interval(values))
    assert embedding.answer(gap) == says
    if gap.more:  # with that many seeds of the same deviation the interval leaves out zero, with one fewer it does not
        deviation, n = statistics.stdev(values), len(values) + gap.more
        t = {4: 3.182446, 5: 2.776445}  # of 3 and 4 degrees of freedom
        assert t[n] * deviation / math.sqrt(n) < mean <= t[n - 1] * deviation / math.sqrt(n - 1)


def test_targets(runs):
    rows = finished(collect([runs])[0])
    mean = statistics.fmean(RunDir(runs / f"b-s{seed}").raw_summary()["mean_last5_accuracy"] for seed in range(3))
    assert targets_of(rows, "fedspeed") == [math.floor(100 * mean) / 100]
    made_run(runs / "c", "fedprox", config={"targets": [0.5, 0.7]})
    assert targets_of(finished(collect([runs])[0])) == [0.5, 0.7]


# --- safety ---


def test_nothing_is_loaded_and_no_other_script_runs(runs):
    page = report("runs")
    parts = Parts(page)
    loaded = [
        (tag, key, value)
        for tag, given in parts.tags
        for key, value in given.items()
        if key in ("src", "srcset", "action", "data", "poster", "background")
        or (key == "href" and not str(value).startswith(("#", "data:,")))
    ]
    assert loaded == []
    policy = next(given["content"] for tag, given in parts.tags if tag == "meta" and "http-equiv" in given)
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    style = page[page.index("<style>") : page.index("</style>")]
    assert "url(" not in style
    assert "@import" not in style


def test_names_cannot_break_out(own_folder):
    config = {"method": {"name": f"x{HOSTILE}", HOSTILE: HOSTILE}, "data": {"name": HOSTILE}, HOSTILE: "a"}
    made_run(
        own_folder / "a<b>", config=config, summary={"environment": {"torch": HOSTILE}, "digests": {"model": HOSTILE}}
    )
    split = RunDir(own_folder / "a<b>").split_file
    split.write_text(json.dumps({**json.loads(split.read_text()), "classes": [HOSTILE] * 5, "data": HOSTILE}))
    page = report("a<b>")
    parts = Parts(page)
    assert [tag for tag, _ in parts.tags if tag == "img"] == []
    assert [given for _, given in parts.tags if any(key.startswith("on") for key in given)] == []
    assert len([tag for tag, _ in parts.tags if tag == "script"]) == 2
    assert data_of(page)["rows"][0]["label"].startswith("x</script><img")
    assert "\u202e" not in page


def test_the_report_imports_no_torch(runs):
    code = (
        "import sys; from fedspeed.cli import main; main(['report', 'runs', '-o', 'x.html', '--quiet']); "
        "assert 'torch' not in sys.modules; assert 'matplotlib' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_licence_goes_along(runs):
    """With the package, and with every page, which is a copy of the library too."""
    from importlib import resources

    vendor = resources.files("fedspeed.report") / "vendor"
    assert "Permission is hereby granted" in (vendor / "uPlot.LICENSE").read_text("utf-8")
    page = report("runs")
    for words in (
        "Copyright (c) 2022 Leon Sorokin",
        "Permission is hereby granted",
        'THE SOFTWARE IS PROVIDED "AS IS"',
    ):
        assert words in page
    assert "v1.6.32" in (vendor / "uPlot.iife.min.js").read_text("utf-8")[:80]


# --- runs that are not as one would like ---


def test_runs_that_are_not_done_are_shown_but_not_counted(runs):
    RunDir(runs / "a-s1").summary_file.unlink()
    made_run(runs / "a-s2", "fedavg", 2, status="failed: no more disk")
    with RunDir(runs / "b-s0").rounds_file.open("a") as file:
        file.write('{"round": 11, "coho')
    lines = RunDir(runs / "b-s1").rounds_file.read_text().splitlines()
    RunDir(runs / "b-s1").rounds_file.write_text("\n".join([*lines[:4], lines[4].replace("5", '"x"', 1), *lines[5:]]))
    page = report("runs")
    parts = Parts(page)
    for told in (
        "a-s1: interrupted after 10 rounds",
        "a-s2: failed: no more disk",
        "b-s0: damaged: line 11 of rounds.jsonl",
    ):
        assert told in page
    assert "b-s1: damaged: line 5 of rounds.jsonl is not a round (round is " in page
    data = data_of(page)
    assert [(run["done"], run["rounds"]) for run in data["rows"][0]["runs"]] == [(True, 10), (False, 10), (False, 10)]
    assert [(run["done"], run["rounds"]) for run in data["rows"][1]["runs"]] == [(False, 10), (False, 4), (True, 10)]
    assert data["gaps"]["FedAvg"][0]["answer"] == "no seed in common"
    assert [line[0] for line in parts.lines[1:]] == ["FedAvg", "FedSpeed"]


def test_tables_cannot_name_runs_that_are_not_counted_so_the_command_does(runs, capsys):
    for path in runs.iterdir():
        RunDir(path).summary_file.unlink()
    (runs / "a-s0" / "rounds.jsonl").write_text("")
    (runs / "b-s0" / "config.toml").write_text("x = [")
    assert main(["report", "runs", "-o", "t.md"]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "a-s0: interrupted after 0 rounds" in told
    assert "a-s1: interrupted after 10 rounds" in told
    assert "Left out: runs/b-s0: runs/b-s0/config.toml is not valid TOML" in told
    assert "learning-rate decay" not in Path("t.md").read_text()  # there is no run to have one


def test_rounds_that_were_cut_off_between_two_lines_are_missed(runs):
    file = RunDir(runs / "a-s1").rounds_file
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:4]))
    assert read_any(runs / "a-s1").summary["status"] == "damaged: 10 rounds in its summary, 4 in rounds.jsonl"


def test_a_run_that_goes_on(runs):
    RunDir(runs / "a-s1").summary_file.unlink()
    with exclusive(runs / "a-s1"):
        assert read_any(runs / "a-s1").summary["status"] == "running"
        assert "a-s1: running" in report("runs")


def test_only_a_run_that_goes_on(runs):
    for name in ("rounds_file", "summary_file"):
        getattr(RunDir(runs / "a-s1"), name).unlink()
    page = report("runs/a-s1")
    assert "No run is finished yet" in page
    assert data_of(page)["rows"][0]["runs"][0]["rounds"] == 0


def test_nan_everywhere(own_folder):
    nothing = {"test_accuracy": None, "test_loss": math.nan, "train_loss": math.inf, "drift": math.nan}
    made_run(own_folder / "runs/a", status="diverged: NaN", record=lambda f: {**f, **nothing})
    made_run(own_folder / "runs/b", "fedspeed", seed=1)
    page = report("runs")
    run = data_of(page)["rows"][0]["runs"][0]
    assert "test_accuracy" not in run["columns"]
    assert "FedAvg (1 of 1 diverged)" in [line[0] for line in Parts(page).lines]
    text = RunDir(own_folder / "runs/b").rounds_file.read_text().replace('"drift": ', '"drift": NaN, "x": ', 1)
    RunDir(own_folder / "runs/b").rounds_file.write_text(text)
    assert "b: damaged: line 1 of rounds.jsonl" in report("runs")


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"summary": {"data_fingerprint": "other"}}, "different data sets"),
        ({"summary": {"environment": {"fedspeed": "0.0.9", "torch": "2.5"}}}, "different torch: 2.13.0, 2.5"),
        ({}, "one seed only"),
    ],
)
def test_what_makes_runs_hard_to_compare_is_said(own_folder, changes, told):
    made_run(own_folder / "runs/a")
    made_run(own_folder / "runs/b", "fedspeed", **changes)
    page = report("runs")
    assert told in page
    answers = {gap["answer"] for gap in data_of(page)["gaps"]["FedAvg"]}
    assert answers == ({"other data"} if "data" in told else {"unknown: 1 seed; one more gives an interval"})


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["empty"], "empty holds no runs"),
        (["nowhere"], "nowhere holds no runs"),
        (["runs", "-o", "runs"], "runs is a folder; use -o runs/report.html"),
        (["runs", "-o", "page.doc"], "expected a file that ends in .html, .md, .tex, .csv"),
        (["runs", "--baseline", "fedsped"], "did you mean 'fedspeed'"),
        (["broken"], "expected finished runs, found none; broken: broken/config.toml is not valid TOML"),
        (["runs", "--format", "docx"], "invalid choice: 'docx'"),
        (["runs", "--targets", "80"], "targets must be accuracies in (0, 1), got 80.0; 0.85 is 85%"),
        (["runs", "--targets", "nan"], "targets must be accuracies in (0, 1), got nan; 0.85 is 85%"),
    ],
)
def test_bad_input_is_one_line(runs, given, told, capsys):
    Path("empty").mkdir()
    Path("broken").mkdir()
    Path("broken/config.toml").write_text("a = ")
    assert main(["report", *given]) == 2
    error = capsys.readouterr().err
    assert told in error
    assert error.count("\n") == 1
    assert not Path("report.html").exists()


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"summary": {"split_fingerprint": ["x"]}}, "damaged: its summary cannot be read"),
        ({"summary": {"data_fingerprint": {}}}, "damaged: its summary cannot be read"),
        ({"summary": {"status": ""}}, "damaged: its summary cannot be read"),
        ({"summary": {"rounds": 12}}, "damaged: 12 rounds in its summary, 10 in rounds.jsonl"),
        ({"config": {"rounds": math.inf}}, ""),
        ({"config": {"targets": [math.nan, 80, "x"]}}, ""),
        ({"config": {"method": {"name": 3}}}, "it lacks a method or a seed"),
        ({"config": {"method": "fedavg", "method.name": "fedavg"}}, "it lacks a method or a seed"),
    ],
)
def test_files_that_say_strange_things(runs, changes, told):
    made_run(runs / "c", "fedprox", **changes)
    page = report("runs")
    assert told in page
    assert len(Parts(page).lines) >= 3
    rows = collect([runs])[0]
    Comparison(rows, configured_targets(rows))  # what compare does


def test_other_data_make_no_winner(runs):
    for seed in range(3):
        made_run(runs / f"b-s{seed}", "fedspeed", seed, gain=0.05, summary={"data_fingerprint": "other"})
    page = report("runs")
    assert "FedAvg was run on other data" in page
    assert "better than FedAvg" not in page
    assert "<td><b>" not in page


@pytest.mark.parametrize("content", ["", "[1]", '{"sizes": "x"}', '{"sizes": [1], "counts": [[1], [2]]}', "[" * 9999])
def test_a_split_that_is_none(runs, content):
    for folder in runs.iterdir():
        RunDir(folder).split_file.write_text(content)
    assert data_of(report("runs"))["splits"] == {}


# --- for papers ---


def test_a_bar_in_a_name_ends_no_column(runs):
    made_run(runs / "c", config={"split": "a|b"})
    assert main(["report", "runs", "-o", "t.md", "--quiet"]) == 0
    table = Path("t.md").read_text().split("\n\n")[0].splitlines()
    assert any(r"a\|b" in line for line in table)
    assert len({line.replace(r"\|", "").count("|") for line in table}) == 1


def test_the_formats_have_the_same_numbers(runs):
    lines = Parts(report("runs", "--columns", "all")).lines
    for name in ("t.md", "t.tex", "t.csv"):
        assert main(["report", "runs", "-o", name, "--columns", "all", "--quiet"]) == 0
    cells = [cell.replace("±", "+-") for line in lines[1:] for cell in line]
    page, latex = Path("t.md").read_text(), Path("t.tex").read_text()
    assert [
        cell for cell in cells if cell.replace("FedAvg", "fedavg").replace("FedSpeed", "fedspeed") not in page
    ] == []
    assert [cell for cell in cells if cell.replace("+-", r"$\pm$").replace(">", "$>$") not in latex] == []
    rows = list(csv.DictReader(Path("t.csv").read_text().splitlines()))
    assert [float(row["last_accuracy"]) for row in rows][:3] == [
        RunDir(runs / f"a-s{seed}").raw_summary()["last_accuracy"] for seed in range(3)
    ]


@pytest.mark.parametrize(("kind", "starts"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")])
def test_figures(runs, kind, starts):
    assert main(["report", "runs", "--format", kind, "--quiet"]) == 0
    for name in (f"report.{kind}", f"report-differences.{kind}"):
        assert Path(name).read_bytes().startswith(starts)


def test_unfinished_runs_are_in_no_table(runs):
    RunDir(runs / "a-s1").summary_file.unlink()
    found = Comparison(finished(collect([runs], unfinished=True)[0]), ())
    assert [len(row.runs) for row in found.rows] == [2, 3]
    assert found.gaps[0].seeds == (0, 2)


def test_a_method_of_a_file_has_a_card_and_is_not_executed(own_folder):
    run = made_run(own_folder / "a", config={"method": {"name": "code/own-1234.py:Own", "code": "1234"}})
    run.code.mkdir()
    (run.code / "own-1234.py").write_text(
        'raise SystemExit("executed")\nclass Own:\n    """My own <method>.\n\n    x = y\n    """'
    )
    page = report("a")
    assert "My own &lt;method&gt;." in page
    assert "Own, a custom method" in page
