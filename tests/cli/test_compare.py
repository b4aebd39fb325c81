"""`fedspeed compare`: it goes on where it was stopped, runs side by side, reads folders, and says what it found."""

from __future__ import annotations

import csv as csv_format
import json
import re
import signal
import subprocess
import time
import warnings
from pathlib import Path

import pytest
from quick_runs import MODULE, QUICK, bits
from test_cli import in_a_terminal

from fedspeed import Config
from fedspeed.cli import compare, main, options
from fedspeed.experiments import batch
from fedspeed.methods import FAMILIES
from fedspeed.report.run_files import RunFiles
from fedspeed.runs.directory import RunDir

TITLES = ("method", "last-5 mean %", "best %", "MB sent", "gradients")
OWN = """
from dataclasses import dataclass
from fedspeed.methods import FedAvg

@dataclass(frozen=True)
class Mine(FedAvg):
    pass

@dataclass(frozen=True)
class Broken(FedAvg):
    def update(self, server, mean, round):
        if round.t == 1:
            raise RuntimeError("as I wrote it")
        return super().update(server, mean, round)
"""


pytestmark = pytest.mark.usefixtures("own_folder")


def test_compare_prints_a_table_a_chart_and_where_the_files_are(capsys):
    assert main(["compare", "fedavg", "fedspeed:rho=0,lam=100", *QUICK, "--seeds", "5,7", "--out", "c"]) == 0
    out = capsys.readouterr().out
    table = Path("c/table.md").read_text()
    for title in TITLES:
        assert title in out
        assert title in table
    assert re.search(r"^fedavg +\d+\.\d\d \+- \d+\.\d\d ", out, re.M)
    assert "o fedavg   + fedspeed:rho=0,lam=100" in out
    for text in (out, table):
        assert "mean +- standard deviation over 2 seeds; learning-rate decay 0.998 per round" in text
        assert "Is the difference to fedavg real? (points, paired over seeds, 95% t-interval)" in text
    assert re.search(r"^fedspeed:rho=0,lam=100 +[+-]\d+\.\d\d +\[.*\] +(yes|no|undecided)", out, re.M)
    assert "next: fedspeed report c   (one page" in out
    kinds = {"accuracy.png": b"\x89PNG", "accuracy.pdf": b"%PDF", "accuracy.svg": b"<?xml", "table.tex": b"% mean"}
    assert all(Path("c", name).read_bytes().startswith(start) for name, start in kinds.items())
    assert len(list(csv_format.DictReader(Path("c/table.csv").read_text().splitlines()))) == 4
    folders = ["fedavg-s5", "fedavg-s7", "fedspeed_rho=0_lam=100-s5", "fedspeed_rho=0_lam=100-s7"]
    assert sorted(path.name for path in Path("c").iterdir() if path.is_dir()) == folders
    config = Config.from_toml(Path("c", folders[-1], "config.toml"))
    assert (config.method.lam, config.method.rho, config.seed, config.lr_decay) == (100.0, 0.0, 7, 0.998)


def test_one_seed_says_that_nothing_can_be_known(capsys):
    assert main(["compare", "fedavg", "fedspeed", *QUICK, "--seeds", "1", "--out", "c"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^1 seed; learning-rate decay", out, re.M)
    assert re.search(r"^fedspeed +[+-]\d+\.\d\d +- +unknown: 1 seed", out, re.M)


@pytest.mark.parametrize(
    ("flags", "decay", "said"),
    [
        ([], 0.998, "decay 0.998"),
        (["--paper-decay"], 0.9995, "decay 0.9995"),
        (["--lr-decay", "0.9"], 0.9, "decay 0.9 "),
        (["--file", "own.toml"], 0.998, "decay 0.998"),
        (["--file", "given.toml"], 0.95, "decay 0.95 "),
        (["--file", "given.toml", "--paper-decay"], 0.9995, "decay 0.9995"),
    ],
    ids=str,
)
def test_compare_gives_all_methods_one_decay_unless_asked(capsys, flags, decay, said):
    Path("own.toml").write_text(Config().to_toml())
    Path("given.toml").write_text("lr_decay = 0.95")
    assert main(["compare", "fedspeed", *QUICK, "--seeds", "1", "--out", "c", *flags]) == 0
    assert Config.from_toml(Path("c/fedspeed-s0/config.toml")).lr_decay == decay
    assert said in capsys.readouterr().out


def test_json_is_numbers_and_nothing_else(capsys):
    given = ["--seeds", "2", "--targets", "0.01,0.999", "--json", "--out", "b"]
    assert main(["compare", "fedavg", "fedspeed:rho=0", *QUICK, *given]) == 0
    told = json.loads(capsys.readouterr().out)
    first, second = told["rows"]
    assert [first["method"], second["method"]] == ["fedavg", "fedspeed:rho=0"]
    summaries = [json.loads(Path(f"b/fedavg-s{s}/summary.json").read_text()) for s in (0, 1)]
    assert first["last_accuracy"]["values"] == [s["last_accuracy"] for s in summaries]
    assert first["last_accuracy"]["mean"] == pytest.approx(sum(s["last_accuracy"] for s in summaries) / 2)
    assert first["rounds_to_1"]["values"] == [s["targets"]["0.01"]["round"] for s in summaries]
    assert first["bytes_to_1"]["values"] == [s["targets"]["0.01"]["bytes"] for s in summaries]
    assert first["rounds_to_99.9"]["n"] == 0
    assert [gap["metric"] for gap in told["differences"]] == ["mean_last5_accuracy", "last_accuracy"]
    assert told["differences"][0]["values"] == pytest.approx(
        [b - a for a, b in zip(*(r["mean_last5_accuracy"]["values"] for r in told["rows"]), strict=True)]
    )
    written = json.loads(Path("b/table.json").read_text())
    assert written == {key: told[key] for key in written}


def test_off_a_terminal_a_line_per_run_and_the_targets(capsys):
    given = ["--rounds", "40", "--seeds", "2", "--targets", "0.3,0.999", "--out", "c"]
    assert main(["compare", "fedavg", "fedspeed", *QUICK, *given]) == 0
    out = capsys.readouterr().out
    lines = re.findall(r"^(\w+ seed \d): accuracy \d+\.\d\d%, 40 rounds, \d+\.\d s  \((\d)/4 runs", out, re.M)
    assert lines == [("fedavg seed 0", "1"), ("fedspeed seed 0", "2"), ("fedavg seed 1", "3"), ("fedspeed seed 1", "4")]
    assert "round 2/40" not in out
    header = next(line for line in out.splitlines() if line.startswith("method"))
    assert header.split("  ")[-3:] == ["rounds to 30%", "rounds to 99.9%", "gradients"]
    assert re.search(r"^fedavg .* > 40 ", out, re.M)


def test_what_a_run_needed_for_its_targets_is_said(capsys):
    assert main(["run", *QUICK, "--targets", "0.01,0.999", "--out", "a"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^1% accuracy: in round 1, after \d+\.\d MB$", out, re.M)
    assert "99.9% accuracy: not reached\n" in out


def test_a_comparison_that_diverges_says_so_and_goes_on(capsys):
    flags = ["--lr", "1e30", "--local-steps", "9", "--seeds", "2", "--out", "c"]
    assert main(["compare", "fedavg", "fedcm", *QUICK, *flags]) == 0
    out = capsys.readouterr().out
    assert out.count("diverged (NaN or Inf)") == 4
    assert re.search(r"^fedcm \(2 of 2 diverged\)", out, re.M)
    assert main(["compare", "fedavg", "fedcm", *QUICK, *flags]) == 0
    assert "4 of 4 runs are done already and kept" in capsys.readouterr().out  # it would diverge again


# --- going on ---


def test_the_same_command_goes_on_and_ends_with_the_bits_of_one_that_was_not_stopped(monkeypatch, capsys):
    given = ["compare", "fedavg", "fedspeed", *QUICK, "--rounds", "6", "--seeds", "2"]
    assert main([*given, "--quiet", "--out", "whole"]) == 0
    seen = 0

    def stop(self, record, run, on_round=batch.ProgressObserver.round):
        nonlocal seen
        seen += 1
        if seen == 10:  # round 4 of the second run
            raise KeyboardInterrupt
        on_round(self, record, run)

    with monkeypatch.context() as patched:
        patched.setattr(batch.ProgressObserver, "round", stop)
        assert main([*given, "--quiet", "--out", "c", "--overwrite"]) == 130
    again = " ".join([*given, "--quiet", "--out", "c"])
    assert capsys.readouterr().err == f"fedspeed: interrupted; what was done is kept, `fedspeed {again}` continues it\n"
    assert sorted(path.name for path in Path("c").iterdir()) == ["fedavg-s0", "fedspeed-s0"]
    kept = Path("c/fedavg-s0/summary.json").stat().st_mtime_ns
    rounds = []
    with monkeypatch.context() as patched:
        on_round = batch.ProgressObserver.round
        patched.setattr(
            batch.ProgressObserver, "round", lambda self, r, run: (rounds.append(r.round), on_round(self, r, run))
        )
        assert main([*given, "--out", "c"]) == 0
    assert "1 of 4 runs are done already and kept" in capsys.readouterr().out
    assert rounds == [5, 6, *range(1, 7), *range(1, 7)]
    assert Path("c/fedavg-s0/summary.json").stat().st_mtime_ns == kept
    assert bits("c") == bits("whole")


def test_without_out_the_message_names_the_folder(monkeypatch, capsys):
    monkeypatch.setattr(batch.ProgressObserver, "round", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    assert main(["compare", "fedavg", *QUICK, "--quiet"]) == 130
    (folder,) = Path("runs").iterdir()
    assert f"--quiet --out {folder}` continues it\n" in capsys.readouterr().err


def test_other_targets_and_another_place_are_no_other_run(capsys):
    given = ["compare", "fedavg", *QUICK, "--seeds", "1", "--out", "c"]
    assert main([*given, "--quiet"]) == 0
    assert main([*given, "--targets", "0.01", "--backend", "auto"]) == 0
    out = capsys.readouterr().out
    assert "1 of 1 runs are done already and kept" in out
    assert "rounds to 1%" in out
    assert main([*given, "--lr", "0.2"]) == 2
    assert "c/fedavg-s0 holds a run of another config (it differs in lr)" in capsys.readouterr().err
    assert main([*given, "--lr", "0.2", "--overwrite", "--quiet"]) == 0
    assert Config.from_toml(Path("c/fedavg-s0/config.toml")).lr == 0.2


def test_how_residual_blocks_are_computed_makes_neither_a_row_nor_another_run(capsys):
    few = "--model resnet18_gn --split iid --clients 300 --active 1 --rounds 1 --local-steps 1 --batch-size 2"
    given = ["compare", "fedavg", *few.split(), "--quiet", "--out", "c"]
    assert main([*given, "--seeds", "2"]) == 0
    config = Path("c/fedavg-s0/config.toml")
    text = config.read_text("utf-8")
    config.write_text(re.sub(r'layers = "\w+"\n', "", text), "utf-8")  # as before there was a choice
    assert config.read_text("utf-8") != text
    capsys.readouterr()
    assert main(["compare", "c", "--out", "again"]) == 0
    out = capsys.readouterr().out
    assert "layers" not in out
    assert "over 2 seeds" in " ".join(out.split())
    config.write_text(text, "utf-8")
    assert main([*given, "--seeds", "1", "--lr", "0.2"]) == 2
    assert "(it differs in lr)" in capsys.readouterr().err


def test_more_methods_and_seeds_join_what_is_there(capsys):
    assert main(["compare", "fedavg", *QUICK, "--seeds", "1", "--out", "c", "--quiet"]) == 0
    assert main(["compare", "fedspeed", "fedavg", *QUICK, "--seeds", "2", "--out", "c"]) == 0
    out = capsys.readouterr().out
    assert "1 of 4 runs are done already" in out
    assert "Is the difference to fedspeed real?" in out


def test_control_c_of_runs_side_by_side_and_then_the_same_command(tmp_path, quick_workers):
    Path("own.py").write_text(OWN)
    given = ["compare", "fedavg", "own.py:Mine", *QUICK, "--rounds", "60", "--checkpoint-every", "1"]
    given += ["--seeds", "2", "--jobs", "2", "--out", "c"]
    with subprocess.Popen([*MODULE, *given], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 120
        while not any(path.read_text().count("\n") > 3 for path in Path("c").glob("*/rounds.jsonl")):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err == f"fedspeed: interrupted; what was done is kept, `fedspeed {' '.join(given)}` continues it\n"
    before = {path: rounds_kept(path.parent) for path in Path("c").glob("*/rounds.jsonl")}
    assert any(before.values())
    assert main([*given, "--quiet"]) == 0
    assert main([*given, "--quiet", "--jobs", "1", "--out", "alone"]) == 0
    assert bits("c") == bits("alone")
    assert len(bits("c")) == 4
    for path, text in before.items():  # with times: these rounds were not run again
        assert path.read_text().startswith(text)


def rounds_kept(folder: Path) -> str:
    """The lines of all rounds of a finished run, else of those up to its last checkpoint."""
    run = RunDir(folder)
    lines = run.rounds_file.read_text().splitlines(keepends=True)
    checkpoints = run.manifests()
    return "".join(lines[: len(lines) if run.model_file.exists() else int(checkpoints[0].stem) if checkpoints else 0])


# --- failures ---


@pytest.mark.parametrize("jobs", ["1", "2"])
def test_a_run_that_fails_is_named_and_the_others_go_on(capfd, jobs, quick_workers):
    Path("own.py").write_text(OWN)
    given = ["compare", "fedavg", "own.py:Broken", "fedcm", *QUICK, "--seeds", "2", "--jobs", jobs, "--out", "c"]
    assert main(given) == 2
    out, err = capfd.readouterr()
    assert len(re.findall(r"^fedspeed: own.py:Broken seed [01]: .*as I wrote it.*$", err, re.M)) == 2
    assert "Traceback" not in err
    assert re.search(r"^fedavg .*\+-", out, re.M)
    assert re.search(r"^fedcm .*\+-", out, re.M)
    assert not re.search(r"^own.py:Broken +\d", out, re.M)


def test_a_setting_that_no_run_can_start_with_stops_at_once(capsys):
    assert main(["compare", "fedavg", "fedspeed", "--data", "synthetic", "--model", "cnn", "--out", "c"]) == 2
    assert re.fullmatch(r"fedspeed: error: .*use linear or mlp\n", capsys.readouterr().err)
    assert not Path("c").exists()


def test_warnings_of_other_processes_are_one_line(capfd, quick_workers):
    flags = ["--seeds", "2", "--jobs", "2", "--lr", "0.1", "--out", "c", "--quiet"]
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        assert main(["compare", "fedspeed:lam=0.09", *QUICK, *flags]) == 0
    told = capfd.readouterr().err.splitlines()
    assert [line for line in told if "steps overshoot the prox centre" in line] == told
    assert len(told) == 1


# --- folders ---


def test_a_table_from_runs_that_are_there(capsys):
    """Nothing is run, also no Python file that a config names."""
    Path("own.py").write_text(OWN)
    given = ["fedspeed:rho=0", "own.py:Mine", "fedavg", *QUICK, "--seeds", "2"]
    assert main(["compare", *given, "--targets", "0.01", "--out", "c"]) == 0
    capsys.readouterr()
    first = json.loads(Path("c/table.json").read_text())
    for path in Path("c").glob("[at]*.*"):
        path.unlink()
    Path("own.py").unlink()
    (Path("c/fedavg-s1/summary.json")).unlink()
    assert main(["compare", "c", "--baseline", "fedspeed:rho=0"]) == 0
    out = capsys.readouterr().out
    assert "left out: c/fedavg-s1: not finished" in out
    assert "fedavg (1 of 2 seeds)" in out
    assert "Is the difference to fedspeed:rho=0 real?" in out
    assert "rounds to 1%" in out  # of the configs
    again = {row["method"]: row for row in json.loads(Path("c/table.json").read_text())["rows"]}
    assert list(again) == ["fedavg", "fedspeed:rho=0", "own.py:Mine"]
    assert [again[row["method"]] for row in first["rows"][:2]] == first["rows"][:2]
    assert Path("c/accuracy.png").exists()
    assert main(["compare", "c/own.py_Mine-s0", "c/fedavg-s0", "--quiet", "--out", "d"]) == 0
    assert [row["method"] for row in json.loads(Path("d/table.json").read_text())["rows"]] == ["own.py:Mine", "fedavg"]


def test_a_method_s_name_is_the_method_also_where_a_folder_is_called_so(capsys):
    assert main(["run", "--method", "fedcm", *QUICK, "--quiet", "--out", "fedavg"]) == 0
    assert main(["compare", "fedavg", *QUICK, "--seeds", "1", "--json", "--out", "c"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"][0]["method"] == "fedavg"
    assert main(["compare", "./fedavg", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"][0]["method"] == "fedcm"


# --- screen ---


@pytest.mark.parametrize("widths", [(60, 200), pytest.param((80, 120), marks=pytest.mark.slow)], ids=str)
def test_on_a_terminal_everything_fits(widths):
    name = "fedspeed:rho=0.05,lam=100"
    given = ["fedavg", name, *QUICK, "--seeds", "2", "--targets", "0.01", "--quiet", "--out", "c"]
    assert main(["compare", *given]) == 0
    for wide in widths:
        code, shown = in_a_terminal([*MODULE, "compare", "c", "--columns", "all"], (40, wide))
        assert code == 0, shown
        assert max(map(len, shown.splitlines())) <= wide
        assert "…" not in shown
        assert re.search(r"^fedspeed:lam=100,rho=0.05\s+\d+\.\d\d \+- \d+\.\d\d", shown, re.M)
        assert ("no room for" in shown) == (wide < 200)


# --- parsing ---


def test_parsing_of_methods_and_seeds():
    assert options.parse_method("fedspeed") == {"name": "fedspeed"}
    assert options.parse_method("fedspeed:rho=0.05, server=active") == {
        "name": "fedspeed", "rho": 0.05, "server": "active",
    }  # fmt: skip
    assert options.parse_method("my/own.py:Mine:rho=1") == {"name": "my/own.py:Mine", "rho": 1}
    assert compare.parse_seeds("3") == [0, 1, 2]
    assert compare.parse_seeds("3,1") == [3, 1]


def test_all_is_by_family_and_cost(capsys):
    """Costs as measured by running the hooks; what was named beside `all` stays where it was."""
    tables = compare.expand(["fedspeed:rho=0", "all", "fedinit:base=fedspeed"], {"active": 2, "clients": 10}, None)
    moved, groups = compare.by_cost(tables)
    names = [text for text, _ in moved]
    assert [names[0], names[1], names[-1]] == ["fedspeed:rho=0", "fedavg", "fedinit:base=fedspeed"]
    assert dict(moved) == dict(tables)
    assert names[1:-1] == [name for *_, some in groups for name in some.split(", ")]
    assert ("sharpness-aware", "1.33", "2 / 1", "fedgmt") in groups
    assert "fedsam" in next(
        some for family, grads, ways, some in groups if (grads, ways) == ("2", "1 / 1") and "sharp" in family
    )
    families = [family for family, *_ in groups]
    assert list(dict.fromkeys(families)) == [family for family in FAMILIES if family in families]
    for family in FAMILIES:
        costs = [float(grads) for whose, grads, *_ in groups if whose == family]
        assert costs == sorted(costs)


def test_a_damaged_summary_is_no_finished_run(tmp_path):
    assert main(["compare", "fedavg", *QUICK, "--seeds", "1", "--quiet", "--out", "c"]) == 0
    assert RunFiles.read(Path("c/fedavg-s0")).done
    Path("c/fedavg-s0/summary.json").write_text('{"status": "finished"}')
    assert main(["compare", "fedavg", *QUICK, "--seeds", "1", "--quiet", "--out", "c"]) == 0  # goes on
    assert RunFiles.read(Path("c/fedavg-s0")).done


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--columns", "last5,foo"], "unknown column 'foo'; Known: all, best, client-mean, gradients, last, last5"),
        (
            ["--columns", "last5,rounds"],
            "column rounds: expected a target accuracy, found none; add --targets",
        ),
        (["--columns", "worst10"], "column worst10: expected runs with such scores of clients, found none; make them"),
        (["--columns", "personalised", "--client-metrics", "every=2"], "--client-metrics every=10,personalised=5"),
        (["--baseline", "fedprox"], "--baseline: expected one of fedavg, scaffold, got 'fedprox'"),
        (["--labels", "fedprox=X"], "labels: expected OLD=NEW with OLD one of fedavg, scaffold, found 'fedprox=X'"),
        (["--labels", "fedavg=scaffold,scaffold=scaffold"], "expected a different name for every method"),
        (["--labels", r"fedavg=A $\foo$"], r"labels: expected maths such as $\rho_1$ between dollars, found 'A $"),
        (["--labels", "fedavg=scaffold"], "labels: expected a different name for every method, found 'scaffold' twice"),
        (["--size", "wide"], "size: expected column, page or WIDTHxHEIGHT from 1 to 40 inches, found 'wide'"),
    ],
)
def test_what_cannot_be_shown_is_refused_before_a_run(capsys, given, said):
    assert main(["compare", "fedavg", "scaffold", *QUICK, "--seeds", "1", "--out", "c", *given]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert len(error.splitlines()) == 1
    assert not Path("c").exists()


def test_one_method_in_two_spellings_is_refused(capsys):
    assert main(["compare", "fedavg", "FedAvg", *QUICK, "--seeds", "1", "--out", "c"]) == 2
    said = "compare: expected different methods and seeds, got fedavg-s0 twice; leave one out"
    assert said in capsys.readouterr().err
    assert not Path("c").exists()


def test_columns_labels_title_and_size_are_in_the_files(capsys):
    given = ["--columns", "last5,mb", "--labels", "fedavg=Base", "--title", "none", "--size", "column"]
    assert main(["compare", "fedavg", "scaffold", *QUICK, "--seeds", "2", "--out", "c", *given]) == 0
    assert re.search(r"^method +last-5 mean % +MB sent$", capsys.readouterr().out, re.M)
    assert Path("c/table.md").read_text().splitlines()[2].startswith("| Base | ")
    latex = Path("c/table.tex").read_text()
    assert re.findall(r"^(\w+) & ", latex, re.M) == ["Method", "Base", "SCAFFOLD"]
    assert {line["method"] for line in csv_format.DictReader(Path("c/table.csv").read_text().splitlines())} == {
        "fedavg", "scaffold",
    }  # fmt: skip
    assert "last_accuracy" in Path("c/table.csv").read_text()
    assert [row["method"] for row in json.loads(Path("c/table.json").read_text())["rows"]] == ["fedavg", "scaffold"]
    svg = Path("c/accuracy.svg").read_text()
    assert "SCAFFOLD" in svg
    assert "clients" not in svg  # the title


def test_scores_over_clients_are_columns_of_every_table(capsys):
    """The numbers of the table are the means of what `summary.json` says, in percent."""
    scored = ["--client-test", "0.2", "--client-metrics", "every=5,personalised=2"]
    names = ["--columns", "last5,client-mean,worst10,spread,personalised"]
    assert main(["compare", "fedavg", "scaffold", *QUICK, "--seeds", "2", "--out", "c", *scored, *names]) == 0
    keys = ("accuracy_mean", "accuracy_worst10", "accuracy_sd", "personalised_accuracy_mean")
    summaries = [json.loads(Path(f"c/fedavg-s{seed}/summary.json").read_text())["client_test"] for seed in (0, 1)]
    means = [f"{50 * (summaries[0][key] + summaries[1][key]):.2f}" for key in keys]
    assert main(["report", "c", "-o", "r.md", *names]) == 0
    assert main(["report", "c", "-o", "r.tex", *names]) == 0
    for name in ("c/table.md", "r.md"):
        header, _, first = (line.strip("| ").split(" | ") for line in Path(name).read_text().splitlines()[:3])
        titles = ["client test mean %", "client test worst tenth %", "client test sd %", "personalised test mean %"]
        assert header[2:] == titles
        assert [cell.partition(" +- ")[0] for cell in first[2:]] == means
    assert r"Client test worst tenth (\%)" in Path("r.tex").read_text()
    assert main(["report", "c", "-o", "r.csv"]) == 0
    line = next(csv_format.DictReader(Path("r.csv").read_text().splitlines()))
    assert [float(line[f"client_test_{key}"]) for key in keys] == [summaries[0][key] for key in keys]
    assert main(["report", "c", "-o", "r.html"]) == 0
    assert "client test worst tenth %" in Path("r.html").read_text()  # all columns
    assert main(["report", "c", "-o", "r.md", "--columns", "all"]) == 0
    assert "| client test sd % |" in Path("r.md").read_text()


def test_report_understands_the_names_and_keeps_the_order_of_compare(capsys):
    """The registry has fedavg before scaffold and fedspeed; fields in a config are in another order than typed."""
    typed = "fedspeed:rho=0,lam=100"
    assert main(["compare", "scaffold", typed, "fedavg", *QUICK, "--seeds", "1", "--out", "c"]) == 0
    ours = ["--labels", f"FedAvg=A,{typed}=Ours, and more", "--baseline", "SCAFFOLD"]
    for other in (typed, "fedspeed:lam=100,rho=0.0", "FedSpeed (rho=0, lam=100)"):
        both = ["--labels", f"FedAvg=A,{other}=Ours, and more", "--baseline", "Scaffold"]
        assert main(["report", "c", "-o", "r.md", *both]) == 0
        rows = re.findall(r"^\| ([^|]+) \| \d", Path("r.md").read_text(), re.M)
        assert rows == ["scaffold", "Ours, and more", "A"]
    assert main(["compare", "scaffold", typed, "fedavg", *QUICK, "--seeds", "1", "--out", "c", *ours]) == 0
    assert re.findall(r"^\| ([^|]+) \| \d", Path("c/table.md").read_text(), re.M) == ["scaffold", "Ours, and more", "A"]
    Path("c/table.json").write_text('{"rows": [1]}')  # of another kind: sorted by method
    assert main(["report", "c", "-o", "r.md"]) == 0
    assert re.findall(r"^\| (\w+)", Path("r.md").read_text(), re.M)[1] == "fedavg"
