"""Tables, charts and figures of runs: the right numbers, in any width, in every format."""

from __future__ import annotations

import csv as csv_format
import io
import json
import math
import statistics
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import tomli_w

from fedspeed.errors import UserError
from fedspeed.report import tables
from fedspeed.report.comparison import Comparison, Look
from fedspeed.report.figures import COLOURS, MARKS, chart, draw_curves, save, style
from fedspeed.report.run_files import (
    Row,
    RunFiles,
    folders_of_runs,
    gather,
    seeds_of,
    setting,
    short,
    spread,
)
from fedspeed.report.statistics import gaps

LONG = "somewhere/of/my/own/method.py:FederatedAveragingWithMomentumAndMore:beta=0.95,eta_g=0.1"


def run_files(accuracies: list[float | None], status: str = "finished", seed: int = 0, **changes) -> RunFiles:
    """A run of so many rounds that sends 1 MB down and 0.5 MB up in each."""
    rounds = [
        {
            "round": t,
            "test_accuracy": a,
            "test_loss": 0.3 if a is None else 1 - a,
            "bytes_down": 10**6,
            "bytes_up": 5 * 10**5,
            "grad_evals": 25.0,
            "seconds": 0.5,
        }
        for t, a in enumerate(accuracies, 1)
    ]
    scored = [a for a in accuracies if a is not None]
    plain = {
        "status": status,
        "seed": seed,
        "rounds": len(rounds),
        "last_accuracy": scored[-1] if scored else None,
        "best_accuracy": max(scored, default=None),
        "mean_last5_accuracy": statistics.fmean(scored[-5:]) if scored else None,
        "last_test_loss": 0.25,
        "last_train_loss": 0.5,
        "bytes_down": 10**6 * len(rounds),
        "bytes_up": 5 * 10**5 * len(rounds),
        "grad_evals": 100.0,
        "seconds": 2.0,
        "eval_seconds": 0.5,
    }
    config = {"rounds": 4, "lr_decay": 0.998, "method": {"name": "fedavg"}, **changes.pop("config", {})}
    return RunFiles(Path(f"x-s{seed}"), rounds, {**plain, **changes}, config)


def row(label: str, *finals: float, **changes) -> Row:
    """A run per seed that is all the time at this accuracy."""
    return Row(label, [run_files([a] * 4, seed=seed, **changes) for seed, a in enumerate(finals)])


ROWS = [row("fedavg", 0.5, 0.6, 0.55), row(LONG, 0.7, 0.75, 0.74), row("fedspeed:rho=0", 0.61, 0.69, 0.66)]


# --- the table ---


def test_a_table_by_hand():
    rows = [
        Row("a", [run_files([0.5, 0.7]), run_files([0.4, 0.5], seed=1)]),
        Row("b", [run_files([0.5], status="diverged: NaN"), run_files([], seed=1)]),
        Row("c", [run_files([0.5])]),
    ]
    header, lines = tables.table(rows, (), ["all"])
    a, b, c = (dict(zip(header, line, strict=True)) for line in lines)
    assert a["method"] == "a"
    assert a["last %"] == "60.00 +- 14.14"  # standard deviation of 50 and 70 with n - 1
    assert a["best %"] == "60.00 +- 14.14"
    assert a["last-5 mean %"] == "52.50 +- 10.61"
    assert (a["MB sent"], a["gradients"], a["seconds"]) == ("3.0", "100", "2.0")
    assert b["method"] == "b (1 of 2 diverged)"
    assert b["last %"] == "50.00"
    assert c["method"] == "c (1 of 2 seeds)"
    assert "test loss" not in header


def test_without_accuracies_the_loss_takes_their_place():
    rows = [Row("a", [run_files([None, None], last_test_loss=2.6e25), run_files([None], seed=1)])]
    header, [line] = tables.table(rows)
    assert not any("%" in title for title in header)
    assert dict(zip(header, line, strict=True))["test loss"] == "1.3e+25 +- 1.8e+25"
    assert [gap.metric for gap in gaps([*rows, row("b", 0.5)])] == ["mean_last5_accuracy", "last_accuracy"]
    other = Row("b", [run_files([None], last_test_loss=0.1), run_files([None], seed=1, last_test_loss=0.15)])
    same = Row("a", [run_files([None]), run_files([None], seed=1)])
    assert [(gap.metric, gap.mean) for gap in gaps([same, other])] == [("last_test_loss", pytest.approx(-0.125))]


def test_targets_are_in_the_table_with_bounds_where_not_all_reached_them():
    """80% in rounds 2 and 3; once of two, of 4 rounds given; never. 1.5 MB per round."""
    rows = [
        Row("both", [run_files([0.7, 0.8, 0.9, 0.9]), run_files([0.1, 0.2, 0.85, 0.1], seed=1)]),
        Row("one", [run_files([0.7, 0.8, 0.9, 0.9]), run_files([0.1] * 4, seed=1)]),
        Row("none", [run_files([0.1] * 4), run_files([0.1] * 2, status="diverged: NaN", seed=1)]),
    ]
    header, lines = tables.table(rows, [0.8], ["all"])
    at = [header.index("rounds to 80%"), header.index("MB to 80%")]
    assert [[line[i] for i in at] for line in lines] == [
        ["2.5 +- 0.7", "3.8 +- 1.1"],
        ["> 3 (1 of 2)", "> 4.5 (1 of 2)"],
        ["> 4", "> 4.5"],
    ]


@pytest.mark.parametrize(("value", "shown"), [(0.12345, "0.1235"), (30617569160463768572919808.0, "3.1e+25")])
def test_a_diverging_loss_is_short(value, shown):
    assert short(value) == shown
    assert len(spread([value, 3 * value], digits=4)) <= 20


def test_spread_and_markdown():
    assert spread([]) == "-"
    assert spread([1.0], digits=0) == "1"
    assert tables.markdown(("x", "y"), [("1", "2")]) == "| x | y |\n| --- | --- |\n| 1 | 2 |\n"


@pytest.mark.parametrize("width", [40, 60, 80, 100, 120, 400])
@pytest.mark.parametrize("targets", [(), (0.6, 0.9)], ids=str)
@pytest.mark.parametrize("rows", [ROWS, [ROWS[0], ROWS[2]], [row("a", 0.5)]], ids=["long", "short", "one seed"])
def test_a_table_fits_and_nothing_in_it_is_cut(rows, targets, width):
    header, lines = tables.table(rows, targets, ["all"])
    keep = [column.keep for column in tables.columns(rows, targets)]
    text, dropped = tables.fit(header, lines, keep, width)
    assert max(map(len, text.splitlines())) <= width
    whole = "".join(text.split())
    for line in lines:
        for title, cell in zip(header, line, strict=True):
            assert title in dropped or cell.replace(" ", "") in whole
    assert "last-5 mean %" not in dropped
    assert (width < 400) or dropped == []
    gap_text, _ = tables.fit(*tables.gap_table(gaps(rows)), tables.GAP_KEEP, width) if len(rows) > 1 else ("", [])
    assert all(len(line) <= width for line in gap_text.splitlines())


def test_short_names_stay_beside_their_numbers_and_what_matters_least_goes_first():
    header, lines = tables.table([ROWS[0], ROWS[2]], (), ["all"])
    keep = [column.keep for column in tables.columns(ROWS, ())]
    text, dropped = tables.fit(header, lines, keep, 80)
    assert dropped == ["best %", "gradients", "seconds"]
    assert text.splitlines()[2].startswith("fedavg          55.00 +- 5.00  55.00 +- 5.00  0.5000 +- 0.0000")


# --- formats ---


def test_csv_is_a_line_per_run_with_numbers():
    lines = list(csv_format.DictReader(io.StringIO(tables.csv(ROWS, [0.6]))))
    assert len(lines) == 9
    assert [line["seed"] for line in lines[:3]] == ["0", "1", "2"]
    assert float(lines[3]["last_accuracy"]) == 0.7
    assert (lines[3]["method"], lines[3]["status"], lines[3]["folder"]) == (LONG, "finished", "x-s0")
    assert [line["rounds_to_60"] for line in lines] == ["", "1", "", *["1"] * 6]


def test_latex_has_a_line_per_method():
    lines = tables.tabular(*tables.table(ROWS, (), ["all"])).splitlines()
    assert lines[0] == r"\begin{tabular}{lrrrrrrr}"
    assert len(lines) == 7
    assert r"\_g=0.1 & 73.00 $\pm$ 2.65 &" in lines[4]


def test_bold_is_the_best_of_a_column_and_what_the_seeds_do_not_distinguish():
    """Differences to the best: of `a` 10, 10.1 and 9.9 points, of `c` 1, -1 and 0.5; `c` alone sends less."""
    best, near, far = (0.8, 0.82, 0.81), (0.79, 0.83, 0.805), (0.7, 0.719, 0.711)
    rows = [row("a", *far), row("b", *best), row("c", *near, bytes_up=1)]
    shown = tables.choose(rows, (), ["last5", "mb", "gradients"])
    assert tables.leaders(rows, shown) == {(1, 0), (2, 0), (2, 1)}
    text = tables.booktabs(*tables.table(rows, (), ["last5", "mb", "gradients"]), tables.leaders(rows, shown))
    lines = text.splitlines()
    assert [line for line in lines if line.endswith("rule")] == [r"\toprule", r"\midrule", r"\bottomrule"]
    assert lines[0] == r"\begin{tabular}{@{}lrrr@{}}"
    assert lines[4].count("textbf") == 0
    assert lines[5].startswith(r"b & \textbf{81.00 $\pm$ 1.00} & ")
    assert lines[6].count("textbf") == 2


def test_two_seeds_distinguish_no_scores():
    """By the rule of the table of differences; a cost that is the same in all seeds is exact."""
    rows = [row("a", 0.7, 0.701), row("b", 0.8, 0.8), row("c", 0.79, 0.795, bytes_up=1)]
    assert tables.leaders(rows, tables.choose(rows, (), ["last", "mb"])) == {(0, 0), (1, 0), (2, 0), (2, 1)}
    rows = [row("a", 0.7, 0.71, 0.72, bytes_up=1), row("b", 0.8, 0.81, bytes_up=1), row("c", 0.9, 0.9)]
    assert tables.leaders(rows, tables.choose(rows, (), ["mb"])) == {(0, 0), (1, 0)}  # a seed of b failed
    rows = [row("a", 0.7, 0.71, 0.72), row("b", 0.8, 0.81, 0.82)]  # equal differences in all seeds decide nothing
    assert tables.leaders(rows, tables.choose(rows, (), ["last"])) == {(0, 0), (1, 0)}


def test_latex_has_a_minus_and_no_hyphen_before_a_number():
    lines = tables.booktabs(("method", "gap"), [("my-9", "-0.07"), ("b", "[-1.50, +3e-7]")]).splitlines()
    assert lines[4:6] == [r"my-9 & $-$0.07 \\", r"b & [$-$1.50, +3e-7] \\"]


def test_of_one_seed_only_the_best_is_bold():
    rows = [row("a", 0.5), row("b", 0.501)]
    assert tables.leaders(rows, tables.choose(rows, (), ["last"])) == {(1, 0)}


def test_other_labels_may_replace_those_with_commas():
    labels = ["fedavg", "fedspeed:rho=0,lam=100", "fedspeed"]
    look = Look(labels="fedspeed:rho=0,lam=100=FedSpeed, rho = 0,fedavg=FedAvg")
    assert list(look.named(labels, papers=False).values()) == ["FedAvg", "FedSpeed, rho = 0", "fedspeed"]
    assert Look(labels={"fedavg": "A"}).named(labels, papers=True) == {
        "fedavg": "A", "fedspeed:rho=0,lam=100": "FedSpeed (rho=0, lam=100)", "fedspeed": "FedSpeed",
    }  # fmt: skip
    for wrong in (
        *("fedprox=X", "fedavg", "fedavg=", "fedavg=fedspeed", "x", "=", ","),
        *("fedavg=A,fedspeed:rho=0=B", "fedspeed=A,fedavgg=B", "fedspeed:rho=0,lam=100=A,fedsped:rho=1=B"),
        "fedavg=A (b, c),fedsped=C",
    ):
        with pytest.raises(UserError, match="labels: expected"):
            Look(labels=wrong).named(labels, papers=False)
    ours = {"fedavg": "A, fedspeed: exact"}  # of a mapping every comma is one of a name
    assert Look(labels=ours).named(labels, papers=False)["fedavg"] == ours["fedavg"]


def test_two_methods_of_one_paper_name_keep_their_own():
    labels = ["a.py:Mine", "b.py:Mine", "scaffold", "fedavg lr=0.1", "fedspeed+topk:0.01"]
    names = Look().named(labels, papers=True)
    assert list(names.values()) == ["a.py:Mine", "b.py:Mine", "SCAFFOLD", "fedavg lr=0.1", "fedspeed+topk:0.01"]


@pytest.mark.parametrize("size", ["x", "0x3", "3", "nanx3", "3x1e9", "wide", "3x2x1", (3, 2)])
def test_a_wrong_size_is_refused(size):
    assert Look(size="column").inches[0] == 3.25
    assert Look(size="5x3.5").inches == (5.0, 3.5)
    assert Look().inches is None
    with pytest.raises(UserError, match="size: expected column, page or WIDTHxHEIGHT"):
        _ = Look(size=size).inches


def test_columns_are_chosen_by_name_and_unknown_ones_refused():
    titles = [column.title for column in tables.choose(ROWS, (0.8, 0.9), ["method", "rounds", "last5", "virtual-s"])]
    assert titles == ["rounds to 80%", "rounds to 90%", "last-5 mean %", "virtual s"]
    with pytest.raises(UserError, match=r"unknown column 'foo'.* Known: all, best, client-mean, gradients"):
        tables.choose(ROWS, (), ["foo"])
    for name in ("rounds", "mb-to-80"):  # without a target there are no rounds to it
        with pytest.raises(UserError, match=f"column {name}: expected a target accuracy.*--targets"):
            tables.choose(ROWS, (), [name])


def test_scores_over_clients_say_on_which_data_and_a_small_spread_is_good():
    scores = [{"accuracy_mean": 0.5, "accuracy_worst10": 0.1, "accuracy_sd": sd} for sd in (0.2, 0.1)]
    rows = [Row(name, [run_files([0.5], client_train=one)]) for name, one in zip("ab", scores, strict=True)]
    names = ["worst10", "spread", "personalised"]  # of the last there is none
    shown = tables.choose(rows, (), names)
    assert [column.title for column in shown] == ["client training worst tenth %", "client training sd %"]
    assert tables.table(rows, (), names)[1] == [("a", "10.00", "20.00"), ("b", "10.00", "10.00")]
    assert tables.leaders(rows, shown) == {(1, 1)}
    losses = [Row("a", [run_files([None], client_test={"loss_mean": 1.5, "loss_sd": "?"})])]
    assert [column.title for column in tables.client_columns(losses)] == ["client test loss mean"]
    assert tables.table(losses, (), ["client-mean"])[1] == [("a", "1.5000")]


def test_latex_labels_have_greek_letters_and_may_hold_maths():
    assert tables.symbols("FedX (rho=0.05, beta1=0.9, eta_g=1, lam=5)") == (
        r"FedX ($\rho$=0.05, $\beta_1$=0.9, $\eta_g$=1, $\lambda$=5)"
    )
    assert tables.symbols(r"50% $\lambda_1 \to 0$ & $5") == r"50\% $\lambda_1 \to 0$ \& \$5"
    assert tables.symbols("zeta=1 thorho=2 rho") == "zeta=1 thorho=2 rho"
    latex = Comparison([row("a", 0.7, 0.71, 0.72), row("b", 0.5, 0.52, 0.51)], ()).latex()
    assert "\n% Bold: the best of a column" in latex
    assert "Bold" not in Comparison([row("a", 0.7)], ()).latex()


def test_a_key_of_two_labels_is_refused():
    with pytest.raises(UserError, match="labels: expected OLD=NEW"):
        Look(labels="Mine=X").named(["a.py:Mine", "b.py:Mine"], papers=True)
    assert Look(labels="Mine=X").named(["a.py:Mine", "fedavg"], papers=False) == {"a.py:Mine": "X", "fedavg": "fedavg"}


def test_the_usual_table_has_five_columns():
    usual = ("method", "last-5 mean %", "best %", "MB sent", "gradients")
    assert tables.table(ROWS)[0] == usual
    assert tables.table(ROWS, [0.8])[0] == ("method", "last-5 mean %", "best %", "rounds to 80%", "gradients")


def test_json_has_numbers_under_machine_names():
    rows = [Row("a", [run_files([0.5]), run_files([], status="diverged: x", seed=3)]), row("b", 0.7)]
    plain = json.loads(json.dumps(tables.data(rows, [0.9], gaps(rows), "a"), allow_nan=False))
    first = plain["rows"][0]
    assert (first["method"], first["seeds"], first["status"]) == ("a", [0, 3], ["finished", "diverged"])
    assert first["last_accuracy"] == {"values": [0.5, None], "mean": 0.5, "std": None, "n": 1}
    assert first["rounds_to_90"] == {"values": [None, None], "mean": None, "std": None, "n": 0}
    gap = plain["differences"][0]
    assert (plain["baseline"], gap["method"], gap["seeds"], gap["low"], gap["real"]) == (
        "a",
        "b",
        [0],
        None,
        "undecided: diverged",
    )


# --- is the difference real? ---


@pytest.mark.parametrize(
    ("ours", "theirs", "answer"),
    [
        ([0.70, 0.71, 0.72], [0.60, 0.62, 0.61], "yes, better"),
        ([0.60, 0.62, 0.61], [0.70, 0.71, 0.72], "yes, worse"),
        ([0.70, 0.60, 0.72], [0.60, 0.62, 0.61], "undecided"),
        ([0.700, 0.601, 0.652], [0.701, 0.600, 0.652], "no"),
        ([0.70, 0.60], [0.70, 0.60], "no"),
        ([0.70, 0.60], [0.60, 0.50], "undecided: 2 seeds"),  # to the last digit the same by chance
        ([0.700, 0.600, 0.500], [0.704, 0.604, 0.504], "undecided"),  # also within half a point
        ([0.700, 0.600], [0.704, 0.604], "undecided: 2 seeds"),
        ([0.7000, 0.6001], [0.6000, 0.5000], "undecided: 2 seeds"),  # two seeds
        ([0.70], [0.60], "unknown: 1 seed"),
    ],
)
def test_the_answer(ours, theirs, answer):
    (first, _) = gaps([row("theirs", *theirs), row("ours", *ours)])
    assert (first.method, first.answer) == ("ours", answer)


def test_the_interval_is_students_and_pairs_seeds():
    """Differences 1, 2, 3: mean 2, half-width 4.302653 / sqrt(3), whatever the seeds themselves do."""
    (first, _) = gaps([row("a", 0.30, 0.90, 0.50), row("b", 0.31, 0.92, 0.53)])
    assert first.values == pytest.approx((0.01, 0.02, 0.03))
    assert (first.low, first.high) == pytest.approx(
        (0.02 - 0.04302653 / math.sqrt(3), 0.02 + 0.04302653 / math.sqrt(3))
    )


def test_only_seeds_that_both_have_and_a_diverged_run_decides_nothing():
    """It counted as 0%, so that a method which diverged was `worse` with an interval."""
    runs = [run_files([0.4], seed=5), run_files([], status="diverged: NaN", seed=7), run_files([0.9], seed=9)]
    (first, _) = gaps([Row("a", [run_files([0.5], seed=7), run_files([0.5], seed=5)]), Row("b", runs)])
    assert (first.seeds, first.values) == ((5,), pytest.approx((-0.1,)))
    assert first.answer == "undecided: diverged"
    lost = [run_files([0.1], status="diverged: NaN", seed=seed) for seed in (5, 7)]
    (first, _) = gaps([Row("a", [run_files([0.5], seed=7), run_files([0.5], seed=5)]), Row("b", lost)])
    assert (first.values, first.answer) == ((), "undecided: diverged")


def test_another_baseline():
    assert [gap.method for gap in gaps(ROWS, "fedspeed:rho=0")][::2] == ["fedavg", LONG]
    with pytest.raises(UserError, match="unknown --baseline 'fedspeed:rho=1'; did you mean 'fedspeed:rho=0'"):
        gaps(ROWS, "fedspeed:rho=1")


# --- runs in folders ---


def stored(folder: Path, name: str, seed: int = 0, status: str = "finished", **config) -> Path:
    run = run_files([0.5, 0.6], status, seed, config={"seed": seed, "lr": 0.1, **config})
    place = folder / name
    place.mkdir(parents=True)
    (place / "config.toml").write_text(tomli_w.dumps(run.config))
    (place / "rounds.jsonl").write_text("".join(json.dumps(r) + "\n" for r in run.rounds))
    (place / "summary.json").write_text(json.dumps(run.summary))
    return place


def test_rows_are_named_by_what_differs_and_seeds_are_joined(tmp_path):
    speed = {"name": "fedspeed", "rho": 0.1, "lam": 10.0}
    for seed in (10, 2):
        stored(tmp_path, f"avg-s{seed}", seed, workers=seed)
        stored(tmp_path, f"speed-s{seed}", seed, method=speed)
        stored(tmp_path, f"zero-s{seed}", seed, method={**speed, "rho": 0.0})
    rows, out = gather(folders_of_runs(tmp_path))
    assert [r.label for r in rows] == ["fedavg", "fedspeed:rho=0.1", "fedspeed:rho=0"]
    assert [[run.summary["seed"] for run in r.runs] for r in rows] == [[2, 10]] * 3
    assert out == []
    assert [r.label for r in gather(folders_of_runs(tmp_path), {"fedspeed": {**speed, "lam": 5.0}})[0]] == [
        "fedavg", "fedspeed:rho=0.1,lam=10", "fedspeed:rho=0,lam=10",
    ]  # fmt: skip


def test_other_keys_that_differ_are_in_the_name(tmp_path):
    stored(tmp_path, "a", lr=0.1, data={"name": "digits"})
    stored(tmp_path, "b", lr=0.05, data={"name": "digits"})
    assert [r.label for r in gather(folders_of_runs(tmp_path))[0]] == ["fedavg lr=0.1", "fedavg lr=0.05"]


def test_unfinished_and_repeated_runs_are_left_out_by_name(tmp_path):
    stored(tmp_path, "a")
    stored(tmp_path, "again")
    stored(tmp_path, "diverged", 1, "diverged: NaN")
    stored(tmp_path, "stopped", 2, "interrupted")
    (stored(tmp_path, "killed", 3) / "summary.json").unlink()
    (tmp_path / "notes").mkdir()
    rows, out = gather(folders_of_runs(tmp_path))
    assert [[run.path.name for run in r.runs] for r in rows] == [["a", "diverged"]]
    assert [text.partition(": ")[2].removeprefix("the same run as ").removeprefix(str(tmp_path)) for text in out] == [
        "/a", "not finished: it has no summary.json that can be read", "interrupted",
    ]  # fmt: skip


def test_why_a_run_cannot_be_read_is_told(tmp_path):
    stored(tmp_path, "a")
    (stored(tmp_path, "b", 1) / "config.toml").write_text("x = [")
    (told,) = gather(folders_of_runs(tmp_path))[1]
    assert told.startswith(f"{tmp_path / 'b'}: not finished: {tmp_path / 'b' / 'config.toml'} is not valid TOML")


def test_a_name_cannot_break_a_markdown_table():
    assert tables.markdown(("a",), [("x|<b>",)]).splitlines()[-1] == r"| x\|&lt;b> |"


def test_a_folder_without_runs_is_refused(tmp_path):
    assert folders_of_runs(stored(tmp_path, "one")) == [tmp_path / "one"]
    with pytest.raises(UserError, match="holds no runs"):
        folders_of_runs(tmp_path / "one" / "none")


def test_the_setting_is_what_all_runs_share():
    config = {"data": {"name": "digits"}, "split": "iid", "active": 5, "clients": 50}
    assert setting([row("a", 0.1, config=config)]) == "digits, iid, 5 of 50 clients"
    assert setting([row("a", 0.1, config=config), row("b", 0.1, config={**config, "active": 6})]) == "digits, iid"
    assert [seeds_of([row("a", *[0.1] * n) for n in counts]) for counts in ((1,), (3, 3), (2, 3))] == [
        "1 seed", "3 seeds", "2 to 3 seeds",
    ]  # fmt: skip


# --- chart and figure ---


def test_data_from_python_are_called_by_their_own_name():
    given = {"data": {"name": "given", "set": "hospitals"}, "split": "natural"}
    assert setting([Row("a", [run_files([0.5], config=given)])]) == "hospitals, natural"


def test_the_figure_of_a_regression_is_called_loss(tmp_path):
    Comparison([Row("a", [run_files([None, None])])], ()).write(tmp_path)
    assert sorted(path.name for path in tmp_path.glob("*.p*")) == ["loss.pdf", "loss.png"]


def test_a_band_takes_the_rounds_all_seeds_have():
    made = Row("a", [run_files([0.5, None, 0.7]), run_files([0.3, 0.4, 0.5]), run_files([0.1, 0.2, 0.3])])
    assert [(t, mean) for t, mean, _ in made.band()] == [(1, pytest.approx(0.3)), (3, pytest.approx(0.5))]
    assert [deviation for _, _, deviation in made.band()] == pytest.approx([0.2, 0.2])


def test_the_chart_puts_a_mark_where_the_curve_is():
    """Highest value top row, last round last column; nothing to draw is nothing drawn."""
    drawing = chart([Row("up", [run_files([0.1, 0.3, 0.5, 0.9])])], width=19, height=5).splitlines()
    assert drawing[0].startswith("    90% |")
    assert drawing[0][-1] == "o"
    assert "o up" in drawing[-1]
    assert "round 4" in drawing[-2]
    assert chart([Row("none", [run_files([])])]) == ""
    assert "o flat" in chart([Row("flat", [run_files([0.5, 0.5])])])


@pytest.mark.parametrize("width", [40, 60, 80, 120])
def test_the_chart_fits_and_gives_every_method_a_mark_of_its_own(width):
    rows = [row(f"method{i}", 0.5 + i / 100) for i in range(26)] + [ROWS[1]]
    drawing = chart(rows, width)
    assert max(map(len, drawing.splitlines())) <= width
    legend = " ".join(drawing.partition("round 4")[2].split())
    assert all(f"{MARKS[i]} method{i}" in legend for i in range(26))
    assert len(set(MARKS)) == len(MARKS) >= 26
    assert all(mark in drawing for mark in MARKS[:26])
    assert "(2 more are in the table)" in chart([row(f"m{i}", 0.5) for i in range(len(MARKS) + 2)])


def test_a_figure_is_the_same_bytes_in_every_format(tmp_path):
    rows = [row("a", 0.1, 0.2), row("b", 0.3)]
    first, again = (save(draw_curves(rows, "t"), tmp_path / name / "figure") for name in "ab")
    assert [path.suffix for path in first] == [".png", ".svg", ".pdf"]
    assert first[0].read_bytes().startswith(b"\x89PNG")
    assert ET.parse(first[1]).getroot().tag.endswith("svg")
    assert first[2].read_bytes().startswith(b"%PDF")
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in again]
    save(draw_curves([Row("nothing", [run_files([])])]), tmp_path / "empty")  # and no warning of an empty legend


def test_two_dozen_methods_are_told_apart_and_the_legend_is_beside_the_picture():
    rows = [row(f"method{i}", 0.5 + i / 100) for i in range(24)]
    figure = draw_curves(rows)
    lines = [line for line in figure.axes[0].lines if not line.get_label().startswith("_")]
    assert len({(line.get_color(), line.get_linestyle(), line.get_marker()) for line in lines}) == 24
    assert len({(style(i)["color"], str(style(i)["linestyle"])) for i in range(24)}) == 24
    assert len(set(COLOURS)) == len(COLOURS)
    assert figure.axes[0].get_legend() is None
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == [r.label for r in rows]
    figure.canvas.draw()
    assert legend.get_window_extent().x0 >= figure.axes[0].get_window_extent().x1
    box = legend.get_window_extent()
    assert box.y0 >= 0
    assert box.x1 <= figure.bbox.x1
    assert draw_curves(rows[:3]).axes[0].get_legend() is not None


def test_a_figure_shows_mean_and_deviation_and_every_accuracy():
    runs = [run_files([0.1, 0.2, 0.3, *[0.90 + d] * 9], seed=d) for d in (0.0, 0.02)]
    axes = draw_curves([Row("a", runs)]).axes[0]
    (line,) = [line for line in axes.lines if line.get_label() == "a"]
    assert line.get_ydata()[-1] == pytest.approx(91)
    (band,) = axes.collections
    height = band.get_paths()[0].get_extents().y1
    assert height == pytest.approx(91 + 100 * statistics.stdev([0.90, 0.92]))
    assert axes.get_ylim()[0] < 10  # the climb is part of the data


def test_a_huge_loss_at_first_does_not_set_the_axis():
    run = run_files([None] * 13)
    for record, loss in zip(run.rounds, [1e9, *[0.9, 0.91] * 6], strict=True):
        record["test_loss"] = loss
    axes = draw_curves([Row("a", [run])]).axes[0]
    assert axes.get_ylim() == pytest.approx((0.9 - 0.0006, 0.91 + 0.0006))


@pytest.mark.parametrize(("size", "pixels"), [("column", 975), ("page", 2025), ("5x3", 1500)])
def test_a_figure_for_a_paper_has_its_width_and_no_title(tmp_path, size, pixels):
    """A PNG says its width in bytes 16 to 19, and has 300 dots per inch; a PDF embeds TrueType, no Type 3."""
    found = Comparison(ROWS, (), "", Look(title="none", size=size))
    found.write(tmp_path)
    assert int.from_bytes((tmp_path / "accuracy.png").read_bytes()[16:20], "big") == pixels
    assert b"/Type3" not in (tmp_path / "accuracy.pdf").read_bytes()
    assert b"/FontFile2" in (tmp_path / "accuracy.pdf").read_bytes()
    assert found.figure().axes[0].get_title() == ""


def test_a_diverged_run_ends_in_a_cross_and_the_legend_says_so():
    runs = [run_files([0.1, 0.4, 0.6]), run_files([0.1, 0.3], status="diverged: NaN", seed=1)]
    axes = draw_curves([row("b", 0.5), Row("a", runs), Row("c", [run_files([], status="diverged: NaN")])]).axes[0]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == [
        "b", "a (1 of 2 diverged)", "c (1 of 1 diverged)",
    ]  # fmt: skip
    crosses = [line for line in axes.lines if line.get_marker() == "x"]
    assert [(list(line.get_xdata()), list(line.get_ydata())) for line in crosses] == [([2], [30.0])]


def test_differences_of_losses_fit_too():
    lines = [("fedspeed", "-0.1000", "[-0.2000, +0.0000]", "yes, better")]
    text, dropped = tables.fit(tables.GAP_LOSS, lines, tables.GAP_KEEP, 80)
    assert text.splitlines()[1].split() == ["fedspeed", "-0.1000", "[-0.2000,", "+0.0000]", "yes,", "better"]
    assert dropped == []
