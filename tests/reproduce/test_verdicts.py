"""Metrics of packed results, and verdicts: what must hold, what must not, and what must stay undecided."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from made_up import finals, result, sheet

from fedspeed.errors import UserError
from fedspeed.report.statistics import interval, t_975, t_p
from fedspeed.reproduce.table import Cell, cell_name, censored, metrics
from fedspeed.reproduce.verdicts import Claim, holm, judge, parse


def verdict(expression: str, table: dict, **changes) -> str:
    return judge(Claim("it is so", holds_if=(expression,)), sheet(table, **changes)).verdict


def contrast(expression: str, table: dict, metric: str = "", **changes):
    return judge(Claim("it is so", metric=metric, holds_if=(expression,)), sheet(table, **changes)).contrasts[0]


# --- metrics ---


def test_metrics_of_a_finished_run():
    found = metrics(result(final=45.0, curve=[10, 20, 30, 36, 35, 40, 42, 41]), [0.36, 0.825])
    assert found["final"] == pytest.approx(45)
    assert found["last"] == pytest.approx(41)
    assert found["last5"] == pytest.approx((36 + 35 + 40 + 42 + 41) / 5)
    assert found["best"] == pytest.approx(42)
    assert (found["test_loss"], found["train_loss"]) == (1.5, 0.5)
    assert (found["seconds"], found["grad_evals"], found["bytes"]) == (160.0, 8000.0, 80e6)
    assert found["drift"] == pytest.approx(6.5), "the mean of the last quarter: 6 and 7"
    assert found["sharpness"] is None
    reached = [found[f"{cost}_to_36"] for cost in ("rounds", "bytes", "grad_evals", "seconds")]
    assert reached == [40.0, 40e6, 4000.0, 80.0]
    assert found["rounds_to_82.5"] is None
    assert found["mean5_rounds_to_36"] == 70.0, "30, 36, 35, 40, 42: the first five whose mean is there"
    assert found["mean5_rounds_to_82.5"] is None


def test_a_run_that_a_rule_stopped_was_given_the_rounds_it_has():
    """A target above the one it stopped at is not reached within those, not within all that were planned."""
    stopped = result(curve=[10, 20, 36], status="stopped: accuracy 0.36 >= 0.36 in round 30")
    stopped["config"] = {"rounds": 500}
    assert censored(stopped, "rounds_to_80") == 31
    assert censored({**stopped, "status": "finished"}, "rounds_to_80") == 501


def test_measures():
    assert metrics(result(measures={"sharpness": 12.3, "sam_gap": 0.04}), [])["sharpness"] == 12.3


@pytest.mark.parametrize(("curve", "last"), [([30, 20], 20.0), ([30, math.nan], 0.0), ([], 0.0)])
def test_a_diverged_run_counts_with_its_last_accuracy(curve, last):
    """Also where the packed result holds a final accuracy: that of the model before the round that failed."""
    found = metrics(result(final=77.0, curve=curve, status="diverged: round 21"), [0.5])
    assert found["final"] == found["last"] == last
    assert found["rounds_to_50"] is None


def test_a_loss_without_number_is_none():
    diverged = result(status="diverged: x", final=10.0)
    diverged["final"] = None
    assert metrics(diverged, [])["train_loss"] is None


def test_a_damaged_record():
    broken = result()
    del broken["rounds"]["bytes"]
    with pytest.raises(
        UserError, match=r"expected status, final and rounds, found KeyError\('bytes'\); its file is damaged"
    ):
        metrics(broken, [])


@pytest.mark.parametrize("target", [36, 0.0, 1.0])
def test_a_target_in_percent(target):
    with pytest.raises(UserError, match="accuracies in"):
        metrics(result(), [target])


def test_an_unknown_metric():
    with pytest.raises(UserError, match="unknown metric 'rounds_to_40'; did you mean 'rounds_to_36'"):
        Cell("a", "b", ()).values("rounds_to_40", [0.36])
    with pytest.raises(UserError, match="unknown metric 'accuracy'"):
        sheet({"A": finals(1, 2)}, metric="accuracy")


def test_cell_names():
    assert cell_name("A", "x") == "A/x"
    assert cell_name("A", "") == "A"


# --- the interval, against independent truths ---


def test_interval_of_textbook_samples():
    """mean +- t s / sqrt(n), with the quantiles of a printed table."""
    three = [4.1, 5.3, 6.8]
    half = 4.302653 * np.std(three, ddof=1) / np.sqrt(3)
    assert interval(three) == pytest.approx((np.mean(three) - half, np.mean(three) + half), abs=1e-6)
    ten = [float(x) for x in range(1, 11)]  # mean 5.5, variance 55/6
    half = 2.262157 * math.sqrt(55 / 6 / 10)
    assert interval(ten) == pytest.approx((5.5 - half, 5.5 + half), abs=1e-6)
    assert interval([3.0]) == interval([]) == (-math.inf, math.inf)


@pytest.mark.parametrize("df", [*range(1, 31), 31, 40, 60, 120, 1000])
def test_quantiles_against_the_density(df):
    """P(0 < T < t) = 0.475, by Simpson's rule on Student's density."""
    x = np.linspace(0, t_975(df), 20001)
    density = np.exp(math.lgamma((df + 1) / 2) - math.lgamma(df / 2)) / np.sqrt(df * np.pi)
    y = density * (1 + x * x / df) ** (-(df + 1) / 2)
    area = (x[1] - x[0]) / 3 * (y[0] + y[-1] + 4 * y[1:-1:2].sum() + 2 * y[2:-1:2].sum())
    assert area == pytest.approx(0.475, abs=1e-6)


@pytest.mark.parametrize("df", [1, 2, 3, 4, 9, 10, 31])
@pytest.mark.parametrize("t", [0.3, 1.7, 5.0])
def test_p_against_the_density(df, t):
    """1 - P(-t < T < t), by Simpson's rule; the sign of t plays no part."""
    x = np.linspace(0, t, 20001)
    density = np.exp(math.lgamma((df + 1) / 2) - math.lgamma(df / 2)) / np.sqrt(df * np.pi)
    y = density * (1 + x * x / df) ** (-(df + 1) / 2)
    area = (x[1] - x[0]) / 3 * (y[0] + y[-1] + 4 * y[1:-1:2].sum() + 2 * y[2:-1:2].sum())
    assert t_p(t, df) == t_p(-t, df) == pytest.approx(1 - 2 * area, abs=1e-9)
    assert t_p(t_975(df), df) == pytest.approx(0.05, abs=1e-6)


def test_the_interval_covers_95_percent():
    rng = np.random.default_rng(0)
    samples = rng.normal(2.0, 3.0, (4000, 4))
    covered = [low < 2.0 < high for low, high in (interval(list(sample)) for sample in samples)]
    assert np.mean(covered) == pytest.approx(0.95, abs=0.015)


def test_a_contrast_is_the_interval_of_the_paired_sums():
    found = contrast("2*A - B + 0.5*C > 0", {"A": finals(10, 20, 30), "B": finals(1, 5, 2), "C": finals(4, 4, 8)})
    assert found.values == pytest.approx((21.0, 37.0, 62.0))
    assert (found.low, found.high) == pytest.approx(interval([21.0, 37.0, 62.0]))
    assert found.mean == pytest.approx(40)


# --- verdicts ---


def test_a_clear_gap():
    table = {"A": finals(60, 61, 62), "B": finals(50, 51.2, 51.9)}
    assert verdict("A - B > 0", table) == "holds"
    assert verdict("A - B < 0", table) == "does not hold"
    assert verdict("B - A < 0", table) == "holds"
    assert verdict("B - A > 0", table) == "does not hold"
    assert verdict("A - B > 20", table) == "does not hold"
    assert verdict("A - B > 10", table) == "undecided", "the threshold lies inside the interval"


def test_noise_leaves_it_undecided():
    """A is ahead on average by 1 with a deviation of 4: nothing follows from three seeds."""
    assert verdict("A - B > 0", {"A": finals(55, 51, 47), "B": finals(50, 50, 50)}) == "undecided"


def test_pairing_removes_what_seeds_share():
    """Seeds differ by 20 points, the gap by 0.2. The same runs, the pairs mixed up, decide nothing."""
    a, b = finals(30, 40, 50), finals(29, 38.9, 49.1)
    assert verdict("A - B > 0", {"A": a, "B": b}) == "holds"
    mixed = [{**run, "seed": (run["seed"] + 1) % 3} for run in b]
    assert verdict("A - B > 0", {"A": a, "B": mixed}) == "undecided"


def test_seeds_are_paired_by_number_not_by_place():
    a, b = finals(30, 40, 50), finals(29, 38.9, 49.1)
    assert verdict("A - B > 0", {"A": a, "B": b[::-1]}) == "holds"


def test_only_seeds_that_all_cells_have():
    table = {"A": finals(30, 40, 50), "B": finals(29, 38.9, 49.1)[:2]}
    assert contrast("A - B > 0", table).values == pytest.approx((1.0, 1.1))
    table["B"] = [result(7, 29.0), result(8, 30.0)]
    found = contrast("A - B > 0", table)
    assert (found.values, found.verdict) == ((), "undecided")


def test_one_seed_decides_nothing():
    assert verdict("A - B > 0", {"A": finals(90), "B": finals(10)}) == "undecided"
    assert verdict("A - B > 0", {"A": finals(10), "B": finals(90)}) == "undecided"
    assert verdict("A - B = 80 within 5", {"A": finals(90), "B": finals(10)}) == "undecided"


def test_a_missing_cell():
    table = {"A": finals(60, 61), "B": []}
    assert verdict("A - B > 0", table) == "not run"
    assert verdict("A - C > 0", table) == "not run"
    assert contrast("A - C > 0", table).note == "no C"
    claim = Claim("of both", each={"m": ["B", "C"]}, holds_if=("A - {m} > 0",))
    assert judge(claim, sheet({"A": finals(60, 61), "C": finals(1, 2)})).verdict == "not run"
    assert judge(claim, sheet({"A": finals(60, 61.01), "C": finals(90, 91)})).verdict == "does not hold"  # refuted


def test_part_of_a_data_set_decides_nothing():
    table = {"A": finals(60, 61, 62), "B": finals(50, 51, 52)}
    for expression in ("A - B > 0", "A - B < 0", "A = 61 within 9"):
        found = judge(Claim("c", holds_if=(expression,)), sheet(table, partial=True))
        assert found.verdict == "no verdict: part of the data set"
        assert found.contrasts[0].mean == pytest.approx(61 if "within" in expression else 10)
        assert found.contrasts[0].verdict == found.verdict


def test_equality():
    """The differences are -0.1, 0.1, 0: mean 0, half width 4.302653 * 0.1 / sqrt(3) = 0.2484."""
    table = {"A": finals(50.0, 51.0, 52.0), "B": finals(50.1, 50.9, 52.0)}
    assert verdict("A - B = 0 within 0.25", table) == "holds"
    assert verdict("A - B = 0 within 0.24", table) == "undecided"
    assert verdict("A - B = 0.4 within 0.1", table) == "does not hold"
    assert verdict("A - B = -0.4 within 0.1", table) == "does not hold"
    assert verdict("A - B = 0.4 within 0.2", table) == "undecided"
    same = {"A": finals(50, 51), "B": finals(50, 51)}
    assert verdict("A - B = 0 within 0", same) == "holds"
    assert verdict("A - B > 0", same) == "undecided", "equal is not more"


def test_one_that_fails_makes_the_claim_fail():
    table = {"A": finals(60, 61, 62), "B": finals(50, 51, 52.5), "C": finals(70, 71, 72.5), "D": finals(55, 61, 65)}

    def of(*others: str) -> str:
        return judge(Claim("first", each={"m": list(others)}, holds_if=("A - {m} > 0",)), sheet(table)).verdict

    assert of("B") == "holds"
    assert of("B", "D") == "undecided"
    assert of("B", "D", "C") == "does not hold"


def test_each_is_a_product():
    table = {f"{row}/{column}": finals(i, i + 1) for i, row in enumerate("ABC") for column in ("x", "y")}
    claim = Claim("c", each={"m": ["B", "C"], "c": ["x", "y"]}, holds_if=("{m}/{c} - A/{c} > 0", "A/x > -1"))
    found = [contrast.text for contrast in judge(claim, sheet(table, columns=("x", "y"))).contrasts]
    assert sorted(found) == sorted(["B/x - A/x > 0", "B/y - A/y > 0", "C/x - A/x > 0", "C/y - A/y > 0", "A/x > -1"])
    assert claim.cells() == set(table)


def test_where_a_claim_is_asked():
    """Of presets it names, or all; of cells that are there; a size without a sign at the paper's scale only."""
    claim = Claim("c", holds_if=("A > 0",), presets=("mlp",))
    assert claim.asked("mlp", {"A", "B"}, False)
    assert not claim.asked("cnn", {"A", "B"}, False)
    assert replace(claim, presets=()).asked("cnn", {"A"}, False)
    assert not replace(claim, presets=()).asked("cnn", {"B"}, False)
    size = Claim("c", size_if=("A = 5 within 1",))
    assert size.asked("paper", {"A"}, True)
    assert not size.asked("cnn", {"A"}, False)


# --- Holm's correction ---


def test_holm_by_hand():
    """4 * 0.01 = 0.04; 3 * 0.02 = 0.06; 2 * 0.03 = 0.06; 1 * 0.04 is raised to the 0.06 before it."""
    assert holm([0.03, 0.01, 0.04, 0.02]) == pytest.approx([0.06, 0.04, 0.06, 0.06])
    assert holm([0.6, 0.9]) == [1.0, 1.0]
    assert holm([]) == []
    assert holm([0.05]) == [0.05]


def spread(gap: float, error: float = 1.0) -> list[dict]:
    """Five seeds whose differences from 50, 50, ... have this mean and this standard error."""
    step = error * math.sqrt(5) / math.sqrt(2.5)  # -2, -1, 0, 1, 2 deviate by sqrt(2.5)
    return finals(*(50 - gap + step * k for k in (-2, -1, 0, 1, 2)))


def test_one_contrast_of_many_does_not_refute_by_chance():
    """t = -3 with 4 degrees of freedom has p = 0.0399: alone that refutes, as one of three it is 0.12."""
    table = {"A": finals(*[50] * 5), "lost": spread(-3), "even": spread(0.1), "noise": spread(-0.2)}
    alone = judge(Claim("first", holds_if=("A - lost > 0",)), sheet(table))
    assert alone.verdict == "does not hold"
    assert alone.contrasts[0].p == pytest.approx(0.0399, abs=1e-4)
    claim = Claim("first", each={"m": ["lost", "even", "noise"]}, holds_if=("A - {m} > 0",))
    found = judge(claim, sheet(table))
    assert found.verdict == "undecided"
    assert found.contrasts[0].adjusted == pytest.approx(3 * alone.contrasts[0].p)
    table["lost"] = spread(-6)  # t = -6: p = 0.0039, 0.012 as one of three
    assert judge(claim, sheet(table)).verdict == "does not hold"


def test_all_that_hold_alone_hold_together_only_after_the_correction():
    """p = 0.0399 twice: 0.0798. With t = 3.5 (p = 0.0249) twice: 0.0498, Holm's first step decides both."""
    claim = Claim("first", each={"m": ["B", "C"]}, holds_if=("A - {m} > 0",))
    weak = {"A": finals(*[50] * 5), "B": spread(3), "C": spread(3, -1.0)}
    assert judge(claim, sheet(weak)).verdict == "undecided"
    assert judge(claim, sheet({**weak, "B": spread(3.5), "C": spread(3.5, -1.0)})).verdict == "holds"
    strong_and_weak = judge(claim, sheet({**weak, "B": spread(6)}))
    assert strong_and_weak.verdict == "holds", "the second step asks for 0.05 of the larger p"


def test_the_same_runs_in_two_columns_are_one_test():
    both = {"A/x": finals(*[50] * 5), "B/x": spread(3)}
    both |= {"A/y": both["A/x"], "B/y": both["B/x"]}
    claim = Claim("first", each={"c": ["x", "y"]}, holds_if=("A/{c} - B/{c} > 0",))
    assert judge(claim, sheet(both, columns=("x", "y"))).verdict == "holds"


# --- diverged runs, and seeds without spread ---


def test_a_contrast_with_a_diverged_run_is_undecided():
    """At 10 points it would refute or bear out anything."""
    broken = finals(10, 10.5, 10.2)
    broken[1] = {**broken[1], "status": "diverged: round 3", "final": None}
    table = {"A": finals(60, 61, 62), "B": broken, "C": finals(50, 51, 52.5), "D": finals(70, 71, 72.5)}
    for expression in ("A - B > 0", "A - B < 0", "B - C > 0", "B = 10 within 30"):
        found = contrast(expression, table)
        assert (found.verdict, found.note, found.p) == ("undecided (diverged)", "diverged: B", None)
        assert len(found.values) == 3, "the numbers are shown"

    def of(*others: str):
        return judge(Claim("first", each={"m": list(others)}, holds_if=("A - {m} > 0",)), sheet(table))

    assert of("B", "C").verdict == "undecided (diverged)"
    assert of("B", "C").contrasts[1].adjusted == of("C").contrasts[0].p, "what cannot be tested is not in the family"
    assert of("B", "D").verdict == "does not hold", "another one refutes it"


def test_seeds_that_differ_by_the_same_decide_nothing():
    """Two evaluations apart in every run: the interval is coarse, not the difference sure. Counts are exact."""
    table = {"A": finals(60, 61, 62), "B": finals(50, 51, 52)}
    found = contrast("A - B > 0", table)
    assert (found.low, found.high) == pytest.approx((10, 10))
    assert (found.verdict, found.note) == ("undecided", "the same in every seed: no spread")
    assert contrast("A - B < 0", table).verdict == contrast("A - B = 10 within 1", table).verdict == "undecided"
    same = {"A": finals(50, 51), "B": finals(50, 51)}
    assert verdict("A - B = 0 within 0.01", same) == "holds", "the same runs"
    assert contrast("A > 50", table, "grad_evals").verdict == "holds"
    assert contrast("A < 50", table, "grad_evals").verdict == "does not hold"


# --- sizes, ranks, counts ---


def test_size_at_the_papers_scale_and_sign_elsewhere():
    """Ahead by about 2 where the paper has 6: the sign holds, the size does not."""
    table = {"A": finals(52, 53.1, 53.9), "B": finals(50, 51, 52)}
    claim = Claim("6 ahead", "tolerance", holds_if=("A - B > 0",), size_if=("A - B = 6 within 1",))
    small, full = judge(claim, sheet(table)), judge(claim, sheet(table, preset="paper", papers_scale=True))
    assert (small.verdict, small.said) == ("holds", "the paper's, its sign")
    assert (full.verdict, full.said) == ("does not hold", "the paper's, our tolerance")


def test_ranks_are_of_the_means_from_the_best():
    table = {"A/x": finals(60, 61, 62), "B/x": finals(70, 71, 72.5), "C/x": finals(50, 51, 52.5), "D/x": []}
    table |= {
        name.replace("x", "y"): finals(*(r["final"]["accuracy"] * 50 for r in runs)) for name, runs in table.items()
    }
    table["A/y"] = finals(60, 60, 61)
    made = sheet(table, columns=("x", "y"))

    def ranks(expression: str, **more):
        return judge(
            Claim("c", each={"m": ["B", "C", "D"], "c": ["x", "y"]}, holds_if=(expression,), **more), made
        ).ranks

    assert ranks("A/{c} - {m}/{c} > 0") == ("A 2 of 3 on x", "A 1 of 3 on y"), "D was not run"
    assert ranks("{m}/{c} - A/{c} > 0") == ("A 2 of 3 on x", "A 1 of 3 on y"), "from the best, whatever is claimed"
    assert ranks("{m}/{c} - A/x > 0") == (), "not within a column"
    assert ranks("A/{c} - {m}/{c} > 1") == ()
    loss = sheet({"A": finals(1, 2), "B": finals(3, 4), "C": finals(5, 6)}, metric="test_loss", show=())
    for name, value in (("A", 0.5), ("B", 0.4), ("C", 0.6)):
        for run in loss.cells[name].results:
            run["final"]["loss"] = value
    found = judge(Claim("c", each={"m": ["A", "C"]}, holds_if=("{m} - B > 0",)), loss)
    assert found.ranks == ("B 1 of 3",), "the lowest loss is the best"


def test_a_rank_that_others_share_is_said_as_such():
    """None reaches the target: nobody is first."""
    table = {name: [result(0, 50.0, [40.0, 50.0])] for name in "ABC"} | {"D": [result(0, 90.0, [70.0, 90.0])]}
    made = sheet(table, metric="rounds_to_80", show=(), targets=(0.8,))
    for rivals, expected in ((["B", "C"], "A 1 to 3 of 3"), (["B", "C", "D"], "A 2 to 4 of 4")):
        found = judge(Claim("c", each={"m": rivals}, holds_if=("{m} - A > 0",)), made)
        assert found.ranks == (expected,)


def test_ratios_are_differences_of_logarithms():
    """Halved and a bit; divided by four and a bit: A's factor is the larger, though its difference is the smaller."""
    table = {"A/x": [2000, 2100, 1900], "A/y": [500, 510, 490], "B/x": [8000, 8100, 7900], "B/y": [4000, 4200, 3900]}
    made = {name: [{**result(s), "measures": {"value": v}} for s, v in enumerate(row)] for name, row in table.items()}
    words = {"columns": ("x", "y"), "metric": "value", "show": ()}
    for ratio, expected in ((True, "holds"), (False, "does not hold")):
        claim = Claim("c", ratio=ratio, holds_if=("A/x - A/y - B/x + B/y > 0",))
        assert judge(claim, sheet(made, **words)).verdict == expected
    found = judge(Claim("c", ratio=True, holds_if=("A/x - A/y > 0",)), sheet(made, **words)).contrasts[0]
    assert found.mean == pytest.approx(sum(math.log(a / b) for a, b in zip(*list(table.values())[:2], strict=True)) / 3)


@pytest.mark.parametrize("metric", ["seconds", "seconds_per_round", "seconds_to_40"])
def test_times_are_not_judged(metric):
    table = {"A": finals(60, 61, 62), "B": finals(50, 51, 52)}
    found = judge(Claim("faster", metric=metric, holds_if=("A - B < 0",)), sheet(table, targets=(0.4,)))
    assert (found.verdict, found.contrasts) == ("no verdict: not timed alone", ())


def test_early_is_after_a_fifth_of_the_rounds():
    curve = [10.0, 20, 30, 40, 50, 60, 70]
    assert metrics(result(curve=curve), [])["early"] == 20.0, "a fifth of 70 rounds is 14: evaluated at 20"
    assert metrics(result(curve=curve, config={"rounds": 50}), [])["early"] == 10.0


def test_a_loss_that_is_no_number_decides_nothing():
    """Dropping the seed that diverged would leave the two that flatter the method."""
    runs = finals(50, 50, 50)
    runs[2] = {**runs[2], "status": "diverged: round 3", "final": None}
    found = contrast("A - B < 1", {"A": runs, "B": finals(50, 50, 50)}, metric="train_loss")
    assert (found.verdict, found.note) == ("undecided (diverged)", "diverged: A")
    runs[2] = {**runs[2], "status": "finished"}
    found = contrast("A - B < 1", {"A": runs, "B": finals(50, 50, 50)}, metric="train_loss")
    assert (found.verdict, found.note) == ("undecided", "A has no train_loss for seed 2")


# --- targets that were never reached ---

SOON, FAST, SLOW = [40.0, 45, 45, 50], [10.0, 40, 45, 50], [10.0, 20, 30, 40]
NEVER = [10.0, 20, 30, 35]


def runs(*curves: list[float]) -> list[dict]:
    return [result(seed, 50.0, curve) for seed, curve in enumerate(curves)]


def test_never_reached_counts_as_one_round_more_than_there_were():
    table = {"A": runs(FAST, FAST, SOON), "B": runs(NEVER, NEVER, NEVER)}
    found = contrast("B - A > 0", table, "rounds_to_40", targets=(0.4,))
    assert found.values == (21.0, 21.0, 31.0)
    assert (found.low, found.high, found.verdict) == (pytest.approx(interval([21, 21, 31])[0]), math.inf, "holds")
    assert found.note == "B did not reach the target in every run: a bound"
    reverse = contrast("A - B > 0", table, "rounds_to_40", targets=(0.4,))
    assert (reverse.low, reverse.high, reverse.verdict) == (-math.inf, -found.low, "does not hold")


def test_a_gap_to_a_bound_is_not_known_to_be_small():
    """24 rounds more at the least: neither `< 90` nor `= 24` follows."""
    table = {"A": runs(FAST, FAST, SOON), "B": runs(NEVER, NEVER, NEVER)}
    assert contrast("B - A < 90", table, "rounds_to_40", targets=(0.4,)).verdict == "undecided"
    assert contrast("B - A = 24 within 50", table, "rounds_to_40", targets=(0.4,)).verdict == "undecided"


@pytest.mark.parametrize("metric", ["rounds_to_40", "grad_evals_to_40", "bytes_to_40"])
def test_two_that_never_reach_it_cannot_be_compared(metric):
    """B spends twice as much a round: its total is larger, which says nothing about what the target costs."""
    dear = runs(NEVER, NEVER)
    for run in dear:
        run["rounds"] = {k: [2 * x for x in v] if k in ("bytes", "grad_evals") else v for k, v in run["rounds"].items()}
    table = {"A": runs(NEVER, NEVER), "B": dear}
    assert contrast("B - A > 0", table, metric, targets=(0.4,)).verdict == "undecided"
    assert contrast("A - B > 0", table, metric, targets=(0.4,)).verdict == "undecided"


def test_a_run_that_diverged_early_did_not_get_there_early():
    """It was given 40 rounds and broke off after 10: it counts with 41, and decides nothing."""
    broken = [result(s, 10.0, [10.0], status="diverged: x", config={"rounds": 40}) for s in range(2)]
    found = contrast("B - A > 0", {"A": broken, "B": runs(SLOW, SLOW)}, "rounds_to_40", targets=(0.4,))
    assert found.values == (-1.0, -1.0)
    assert found.verdict == "undecided (diverged)"


# --- expressions ---


def test_parse():
    found = parse("FedSpeed/CIFAR-10 IID - 0.5*FedAvg/Dir-0.6 + lr = 0.1/50% = -1.5 within 2e-1")
    assert found.terms == ((1, "FedSpeed/CIFAR-10 IID"), (-0.5, "FedAvg/Dir-0.6"), (1, "lr = 0.1/50%"))
    assert (found.op, found.bound, found.within) == ("=", -1.5, 0.2)
    assert parse("-2*A < .5").terms == ((-2.0, "A"),)
    assert parse("A - -2*B < 5").terms == ((1.0, "A"), (2.0, "B"))


@pytest.mark.parametrize(
    ("text", "piece"),
    [
        ("A - B", "found 'A - B'"),
        ("A - B >= 0", "found 'A - B >= 0'"),
        ("A - B > C", "found 'A - B > C'"),
        ("A - B>0", "found 'A - B>0'"),
        ("A = 0", "`within NUMBER` after"),
        ("A > 0 within 1", "`within NUMBER` after"),
        ("A = 0 within -1", "`within` a number >= 0"),
        ("A +  - B > 0", "a cell name"),
        ("A + > 0", "found '' in 'A . > 0'"),
        ("- A > 0", "found '' in '- A > 0'"),
        ("A - - B > 0", "found '- B'"),
        ("2* > 0", r"found '2\*'"),
        ("A > 0 > 1", "found 'A > 0' in"),
        (" > 0", "found '' in|found '> 0'|found ' > 0'"),
    ],
)
def test_parse_errors_name_the_claim_and_the_piece(text, piece):
    with pytest.raises(UserError, match=piece) as caught:
        Claim("FedSpeed is first", holds_if=(text,))
    assert "claim 'FedSpeed is first': expected" in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"holds_if": ()}, "at least one expression"),
        ({"holds_if": "A > 0"}, "a list of at least one expression"),
        ({"holds_if": ("A > 0",), "size_if": ("A > B",)}, "found 'A > B'"),
        ({"holds_if": ("{m} > 0",)}, r"a placeholder of `each` \(which is empty\), found 'm'"),
        ({"holds_if": ("{m} > 0", "{n} > 0"), "each": {"m": ["A"]}}, "found 'n'"),
        ({"holds_if": ("{m} > 0",), "each": {"m": []}}, "each.m to be a list of at least one name"),
        ({"holds_if": ("{m} > 0",), "each": {"m": "AB"}}, "each.m to be a list"),
        ({"holds_if": ("A > 0",), "each": {"m": ["A"]}}, "to be used"),
        ({"holds_if": ("A > 0",), "source": "rumour"}, "found 'rumour'"),
    ],
)
def test_wrong_claims(fields, message):
    with pytest.raises(UserError, match=message):
        Claim("c", **fields)
