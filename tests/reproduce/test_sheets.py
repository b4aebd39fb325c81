"""Renderings of a reproduced table: what stands in them, and the same bytes every time."""

from __future__ import annotations

import csv as csv_format
import io
import re
import xml.etree.ElementTree as ET
from dataclasses import replace

import matplotlib.image
import numpy as np
import pytest
from made_up import finals, result, sheet

from fedspeed.errors import UserError
from fedspeed.report.tables import tabular
from fedspeed.reproduce import page, plot
from fedspeed.reproduce.table import Cell
from fedspeed.reproduce.verdicts import Claim, judge

COLUMNS = ("IID", "Dir-0.6")
TABLE = {
    "FedSpeed/IID": finals(60.0, 61.0, 62.0),
    "FedSpeed/Dir-0.6": finals(50.0, 51.0, 52.0),
    "FedAvg/IID": finals(55.0, 55.5, 57.0),
    "FedAvg/Dir-0.6": finals(40.0, 42.0, 41.5),
}
PAPER = {"FedSpeed/IID": 82.68, "FedAvg/IID": 77.01}
SHEET = sheet(TABLE, COLUMNS, values=PAPER)
FIRST = Claim("FedSpeed is first", each={"c": list(COLUMNS)}, holds_if=("FedSpeed/{c} - FedAvg/{c} > 0",))


def test_a_page():
    text = page.markdown(SHEET, [judge(FIRST, SHEET)])
    assert text.startswith("# Table 7: modules\n\nTable 7 of the paper; preset `cnn`.\n")
    assert "**Claim.** each adds" in text
    assert "**Setting.** 100 clients" in text
    assert "| FedSpeed | 61.00 +- 1.00 | 82.68 | 51.00 +- 1.00 |\n" in text, "60, 61, 62 deviate by 1"
    assert "|  | IID | paper | Dir-0.6 |\n" in text, "a paper column only where the paper has numbers"
    assert "|  | best test accuracy (%) |\n" in text
    assert "| FedAvg/Dir-0.6 | 41.17 +- 1.04 |\n" in text
    assert "- FedSpeed is first (the paper's): **holds**. 2 for, 0 against, 0 undecided:\n" in text
    assert "3 seeds per cell, 12 runs, 384 seconds of computing in total" in text, (
        "12 runs of 30 s and 2 s of evaluation"
    )
    assert text.endswith("    fedspeed reproduce table7 --preset cnn\n")
    assert text.isascii()


def test_a_run_that_stands_in_two_cells_is_counted_once():
    table = {**TABLE, "FedAvg/IID": TABLE["FedAvg/Dir-0.6"]}
    assert "9 runs, 288 seconds" in page.markdown(sheet(table, COLUMNS), [])


def test_a_page_says_how_many_seeds_it_has():
    few = sheet({"A": finals(50.0, 51.0, 52.0), "B": finals(50.0)}, seeds=3)
    for made, told in (
        (few, "\n\nup to 3 seeds per cell, 4 runs"),
        (replace(few, seeds=1), "\n\n1 seed per cell, 4 runs"),
    ):
        assert told in page.markdown(made, [])


def test_a_page_says_which_code_made_the_runs():
    runs = [result(0, 50.0), result(1, 51.0, commit="abc"), result(2, 52.0, commit="abc")]
    assert " Commits: abc (2 runs), not recorded (1 runs)." in page.markdown(sheet({"A": runs}), [])
    assert " Commit: abc." in page.markdown(sheet({"A": runs[1:]}), [])


def test_contrasts_show_their_interval():
    made = sheet({"A": finals(1.0, 2.0, 3.0)})
    text = page.markdown(made, [judge(Claim("A is much", source="ours", holds_if=("A > 1",)), made)])
    assert "- A is much (ours): **undecided**.\n  - `A > 1`: 2.00 [-0.484, 4.48], 3 seeds, p 0.23, undecided\n" in text


def test_of_many_contrasts_the_worst_are_shown():
    gaps = {"near": 0.5, "far": 9.0, "lost": -4.0, "far2": 8.0, "noise": 0.01}
    table = {"A": finals(50, 51, 52.0)}
    for name, gap in gaps.items():
        wobble = 3.0 if name == "noise" else 0.1
        table[name] = finals(50 - gap + wobble, 51 - gap - wobble, 52 - gap)
    table["broken"] = [{**run, "status": "diverged: round 3"} for run in finals(10, 11, 12)]
    made = sheet(table)
    found = judge(Claim("A is first", each={"m": [*gaps, "broken"]}, holds_if=("A - {m} > 0",)), made)
    text = page.markdown(made, [found])
    counts = "3 for, 1 against, 2 undecided (1 diverged). Rank: A 2 of 7; the 3 furthest from it:\n"
    assert f"**does not hold**. {counts}" in text
    assert re.findall(r"`A - (\w+) > 0`", text) == ["lost", "noise", "broken"]
    ((said, contrast, _, _, counted, verdict),) = page.claims([found])
    assert (said, contrast, verdict) == ("A is first (the paper's)", "`A - lost > 0`", "**does not hold**")
    assert counted == "3 for, 1 against, 2 undecided (1 diverged). Rank: A 2 of 7"


def test_numbers_the_paper_prints_further():
    """60, 61, 62 against 50, 51, 52: a drop of 10; ratios have nothing of ours beside them."""
    drops = {"IID - Dir-0.6": {"FedSpeed": 1.01}, "cost ratio": {"FedAvg": 1.57}}
    text = page.markdown(replace(SHEET, printed=drops), [])
    assert "|  | IID - Dir-0.6 | paper | paper's cost ratio |\n" in text
    assert "| FedSpeed | 10.00 | 1.01 | - |\n" in text
    assert "| FedAvg | 14.67 | - | 1.57 |\n" in text, "55.83 - 41.17"


def test_the_papers_rounds_are_for_its_own_target():
    curves = {"A": [[40.0, 45], [10.0, 45], [45.0, 45]], "B": [[10.0, 45], [10.0, 45], [10.0, 45]]}
    table = {name: [result(s, 45.0, c) for s, c in enumerate(seeds)] for name, seeds in curves.items()}
    words = {"metric": "rounds_to_40", "show": (), "targets": (0.4,), "values": {"A": 280, "B": 620}}
    claim = Claim("A is faster", holds_if=("B - A > 0",))
    for scale, header, beside in ((False, "paper, its target", None), (True, "paper", 340)):
        made = sheet(table, papers_scale=scale, **words)
        assert f"|  |  | {header} |\n" in page.markdown(made, [])
        assert judge(claim, made).contrasts[0].paper == beside


def test_a_page_says_of_what_scale_it_is():
    assert "\n**Scale.** Half of it.\n" in page.markdown(replace(SHEET, scale="Half of it."), [])
    assert "**Scale.**" not in page.markdown(SHEET, [])


def test_times_are_shown_with_a_warning():
    assert page.UNTIMED in page.markdown(sheet({"A": finals(1, 2)}, show=("seconds_per_round",)), [])
    assert page.UNTIMED not in page.markdown(sheet({"A": finals(1, 2)}), [])


def test_curves_that_no_run_has_are_said_and_left_out(monkeypatch, tmp_path):
    """Each curve has its own row of panels."""
    made = sheet(DRAWN, COLUMNS, curves=("server_loss", "test_loss", "train_loss"))
    text = page.markdown(made, [])
    assert "- drawn: server's loss, test data; active clients' loss in their steps\n" in text
    assert "- not in the stored runs, recorded from now on: server's loss, clients' data\n" in text
    axes = panels(made, monkeypatch, tmp_path)
    labels = [panel.get_ylabel() for panel in axes]
    assert labels == ["server's loss, test data"] * 2 + ["active clients' loss in their steps"] * 2
    for runs in DRAWN.values():
        for run in runs:
            run["rounds"]["server_loss"] = [2.0, None, 1.0]
    axes = panels(made, monkeypatch, tmp_path)
    assert len(axes) == 6
    drawn = next(line for line in axes[0].lines if line.get_label() == "FedSpeed")
    assert (list(drawn.get_xdata()), list(drawn.get_ydata())) == ([10, 30], [2.0, 1.0]), "where it was measured"


def test_one_seed_and_missing_cells():
    made = sheet({"A": finals(60), "B": finals(50), "C": []}, values={"C": 70.5}, seeds=1)
    made = replace(made, cells={**made.cells, "C": Cell("C", "one", (), "not run: data unavailable")})
    verdicts = [judge(Claim("c", holds_if=(text,)), made) for text in ("A - B > 0", "A - C > 0")]
    text = page.markdown(made, verdicts)
    assert "10.00, one seed: no interval, undecided" in text
    assert "**not run**.\n  - `A - C > 0`: no C, not run\n" in text
    assert "| A | 60.00 | - |\n" in text
    assert "| C | not run | 70.5 |\n" in text
    assert "- not run: data unavailable: C\n" in text
    assert "1 seed per cell, 2 runs" in text


def test_part_of_a_data_set_is_said_twice():
    made = replace(SHEET, partial=True)
    text = page.markdown(made, [judge(FIRST, made)])
    assert "part of the data set only: the numbers are shown, nothing is decided" in text
    assert "**no verdict: part of the data set**" in text
    assert "**holds**" not in text


def test_diverged_runs_are_named():
    runs = finals(50, 51, 52)
    runs[1] = {**runs[1], "status": "diverged: round 3", "final": None}
    made = sheet({"A": runs}, show=("train_loss",))
    text = page.markdown(made, [])
    assert "- diverged in 1 of 3 runs: A\n" in text
    assert "| A | 0.5000 +- 0.0000 (2 of 3) |\n" in text


def test_targets_that_were_not_reached():
    """Reached after 20, 30 and 40 rounds; in two of three runs; in none of 40 rounds."""
    curves = {
        "all": ([10.0, 40, 40, 40], [10.0, 20, 40, 40], [10.0, 20, 30, 40]),
        "some": ([10.0, 40, 40, 40], [10.0, 20, 40, 40], [10.0, 20, 30, 35]),
        "none": ([10.0, 20, 30, 35],) * 3,
    }
    table = {name: [result(s, 40.0, c) for s, c in enumerate(seeds)] for name, seeds in curves.items()}
    made = sheet(table, metric="rounds_to_40", show=("bytes_to_40",), targets=(0.4,), values={"none": ">1500"})
    text = page.markdown(made, [])
    assert "Rounds to reach 40 %, mean +- standard deviation" in text
    assert "| all | 30.0 +- 10.0 | - |\n" in text
    assert "| some | > 30.3 (2 of 3 reached) | - |\n" in text, "(20 + 30 + 41) / 3"
    assert "| none | > 40 | >1500 |\n" in text
    assert "|  | sent to reach 40 % (MB) |\n" in text
    assert "| all | 30.00 +- 10.00 |\n" in text
    assert "| none | > 40 |\n" in text
    lines = list(csv_format.DictReader(io.StringIO(page.csv(made))))
    assert [(line["row"], line["not_reached"]) for line in lines if line["metric"] == "rounds_to_40"] == [
        ("all", "0"),
        ("some", "1"),
        ("none", "3"),
    ]


def test_counts_that_need_no_runs():
    """Cells of `data` and `split` recipes: a number a seed, no rounds, no summary."""
    facts = [{**result(s, 1.0, []), "key": "fact", "measures": {"value": 50000}} for s in range(2)]
    for fact in facts:
        del fact["summary"], fact["final"], fact["seconds_per_round"], fact["config"]
    made = sheet({"CIFAR-10": facts}, metric="value", show=("value",), values={"CIFAR-10": 50000}, seeds=2)
    found = [judge(Claim("c", holds_if=(f"CIFAR-10 = {n} within 0",)), made) for n in (50000, 50001)]
    assert [verdict.verdict for verdict in found] == ["holds", "does not hold"]
    text = page.markdown(made, found)
    assert "| CIFAR-10 | 50000 | 50000 |\n" in text
    assert "2 seeds per cell; counted, nothing was trained. To run it again:\n" in text


def test_a_bar_in_a_name_does_not_end_a_column():
    assert r"| a\|b | 1.00 |" in page.markdown(sheet({"a|b": finals(1.0)}), [])


def test_csv():
    lines = list(csv_format.DictReader(io.StringIO(page.csv(SHEET))))
    assert len(lines) == 8, "four cells, two metrics"
    first = lines[0]
    assert {k: first[k] for k in ("recipe", "preset", "row", "column", "metric", "unit", "n", "paper")} == {
        "recipe": "table7",
        "preset": "cnn",
        "row": "FedSpeed",
        "column": "IID",
        "metric": "final",
        "unit": "%",
        "n": "3",
        "paper": "82.68",
    }
    assert float(first["mean"]) == pytest.approx(61)
    assert float(first["standard_deviation"]) == pytest.approx(1)
    assert [line["paper"] for line in lines if line["metric"] == "best"] == [""] * 4


def test_csv_keeps_the_papers_number_of_a_cell_that_was_not_run():
    lines = list(csv_format.DictReader(io.StringIO(page.csv(sheet({"A": []}, values={"A": 77.01})))))
    assert [(line["mean"], line["n"], line["paper"]) for line in lines] == [("", "0", "77.01")]


def test_latex():
    made = sheet({r"50% & {a_b} #1 $~^\ ": finals(60.0, 61.0, 62.0)}, values={r"50% & {a_b} #1 $~^\ ": ">1500"})
    lines = tabular(*page.primary(made)).splitlines()
    assert lines[0] == r"\begin{tabular}{lrr}"
    assert lines[1:3] == [r" &  & paper \\", r"\hline"]
    assert lines[3] == (
        r"50\% \& \{a\_b\} \#1 \$\textasciitilde{}\textasciicircum{}\textbackslash{}  & 61.00 $\pm$ 1.00 & $>$1500 \\"
    )
    assert lines[4] == r"\end{tabular}"


CURVES = [[10.0, 30, 45], [12.0, 28, 44], [11.0, 33, 46]]
DRAWN = {
    f"{row}/{column}": [result(s, c[-1] + i, c) for s, c in enumerate(CURVES)]
    for i, row in enumerate(("FedSpeed", "FedAvg"))
    for column in ("IID", "Dir-0.6")
}


@pytest.mark.parametrize("kind", ["curves", "lines", "bars"])
def test_figures_are_the_same_bytes_every_time(kind, tmp_path):
    made = sheet(DRAWN, COLUMNS, figure=kind, values={"FedAvg/IID": 77.01, "FedSpeed/IID": ">82"})
    first = plot.figure(made, tmp_path / "a" / "table7")
    assert [path.name for path in first] == ["table7.png", "table7.svg"]
    again = plot.figure(made, tmp_path / "b" / "table7")
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in again]
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == ["table7.png", "table7.svg"], "no parts left"
    picture = matplotlib.image.imread(first[0])
    assert np.ptp(picture[..., :3]) > 0.5, "not an empty page"
    assert ET.parse(first[1]).getroot().tag.endswith("svg")
    changed = replace(made, title="Another title")
    assert plot.figure(changed, tmp_path / "c" / "table7")[1].read_bytes() != first[1].read_bytes()


def panels(made, monkeypatch, tmp_path):
    """The axes of the figure that would be written."""
    from matplotlib.figure import Figure

    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda self, file, **_: drawn.append(self))
    plot.figure(made, tmp_path / "x")
    return drawn[0].axes


def test_curves_are_means_over_seeds(monkeypatch, tmp_path):
    axes = panels(sheet(DRAWN, COLUMNS), monkeypatch, tmp_path)
    assert [panel.get_title() for panel in axes] == list(COLUMNS)
    labelled = {line.get_label(): line for line in axes[0].lines if not line.get_label().startswith("_")}
    assert list(labelled) == ["FedSpeed", "FedAvg"]
    assert list(labelled["FedAvg"].get_xdata()) == [10, 20, 30]
    assert labelled["FedAvg"].get_ydata() == pytest.approx(np.mean(CURVES, axis=0))
    assert len(axes[0].lines) == 2 * (3 + 1), "the seeds are behind"
    colours = [{line.get_label(): line.get_color() for line in panel.lines} for panel in axes]
    assert colours[0]["FedAvg"] == colours[1]["FedAvg"] != colours[0]["FedSpeed"]


def test_rows_and_columns_without_a_run_are_not_drawn_and_leave_the_others_their_colours(monkeypatch, tmp_path):
    whole = panels(sheet(DRAWN, COLUMNS), monkeypatch, tmp_path)
    table = {name: [] if name.startswith("FedSpeed") or name.endswith("IID") else runs for name, runs in DRAWN.items()}
    (axes,) = panels(sheet(table, COLUMNS), monkeypatch, tmp_path)
    assert axes.get_title() == "Dir-0.6"
    assert [text.get_text() for text in axes.figure.legends[0].get_texts()] == ["FedAvg"]
    before, after = ({line.get_label(): line.get_color() for line in panel.lines} for panel in (whole[1], axes))
    assert after["FedAvg"] == before["FedAvg"]


@pytest.mark.parametrize("kind", ["lines", "bars"])
def test_the_papers_numbers_have_a_panel_of_their_own(kind, monkeypatch, tmp_path):
    paper = {"FedAvg/IID": 77.01, "FedAvg/Dir-0.6": ">1500", "FedSpeed/IID": "not given"}
    ours, theirs = panels(sheet(DRAWN, COLUMNS, figure=kind, values=paper), monkeypatch, tmp_path)
    seen = [y for line in theirs.lines for y in line.get_ydata()]
    assert 77.01 in seen
    assert 1500 in seen
    heights = [bar.get_height() for bar in ours.patches] if kind == "bars" else list(ours.lines[0].get_ydata())
    assert heights[:2] == pytest.approx([45.0, 45.0]), "FedSpeed's mean of 45, 44 and 46"
    assert len(panels(sheet(DRAWN, COLUMNS, figure=kind), monkeypatch, tmp_path)) == 1


def test_a_curve_that_diverged_ends_in_a_cross_and_the_legend_has_the_word(monkeypatch, tmp_path):
    runs = [result(0, 30.0, [10.0, 30]), result(1, 20.0, [10.0], status="diverged: round 13")]
    (axes,) = panels(sheet({"A": runs, "B": finals(50, 51)}), monkeypatch, tmp_path)
    crosses = [line for line in axes.lines if line.get_marker() == "x" and len(line.get_xdata())]
    assert [(list(line.get_xdata()), list(line.get_ydata())) for line in crosses] == [([10], [10.0])]
    assert [text.get_text() for text in axes.figure.legends[0].get_texts()] == ["A", "B", "diverged"]
    (axes,) = panels(sheet({"B": finals(50, 51)}), monkeypatch, tmp_path)
    assert [text.get_text() for text in axes.figure.legends[0].get_texts()] == ["B"]


@pytest.mark.parametrize(
    ("columns", "places"),
    [
        (("w=0.1", "w=1", "w=100"), [-1, 0, 2]),
        (("w=0", "w=1", "w=100"), [0, 1, 2]),
        (("E=1", "w=10", "w=100"), [0, 1, 2]),
        (("IID", "Dir-0.6", "Dir-0.3"), [0, 1, 2]),
    ],
    ids=str,
)
def test_numbers_stand_on_a_logarithmic_axis_and_lines_on_each_other_are_told_apart(
    columns, places, monkeypatch, tmp_path
):
    table = {f"{row}/{column}": finals(50, 51) for row in "AB" for column in columns}
    (axes,) = panels(sheet(table, columns, figure="lines"), monkeypatch, tmp_path)
    assert list(axes.get_xticks()) == pytest.approx(places)
    a, b = (next(c for c in axes.containers if c.get_label() == row).lines[0] for row in "AB")
    assert list(a.get_xdata()) == pytest.approx(places)
    assert a.get_linewidth() > b.get_linewidth()
    assert (a.get_linestyle(), a.get_marker()) != (b.get_linestyle(), b.get_marker())


def test_accuracies_and_the_papers_have_one_scale(monkeypatch, tmp_path):
    made = sheet(DRAWN, COLUMNS, figure="bars", values={"FedAvg/IID": 77.01})
    ours, theirs = panels(made, monkeypatch, tmp_path)
    assert ours.get_ylim() == theirs.get_ylim()
    assert ours.get_ylim()[1] > 77.01


def test_no_figure(tmp_path):
    assert plot.figure(replace(SHEET, figure="none"), tmp_path / "x") == []
    assert plot.figure(sheet({"A": []}), tmp_path / "x") == []
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(UserError, match="unknown figure 'curve'; did you mean 'curves'"):
        plot.figure(replace(SHEET, figure="curve"), tmp_path / "x")
    with pytest.raises(UserError, match="unknown curve 'accuracy'"):
        plot.figure(replace(SHEET, curves=("accuracy",)), tmp_path / "x")
