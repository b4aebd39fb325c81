"""Metrics of packed results, and verdicts: what must hold, what must not, and what must stay undecided."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from made_up import finals, result, sheet

from fedspeed.errors import UserError
from fedspeed.report.paired import interval, t_975
from fedspeed.reproduce.claims import Claim, judge, parse
from fedspeed.reproduce.table import Cell, cell_name, metrics


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
    assert cell_name("A", "x", ("x", "y")) == "A/x"
    assert cell_name("A", "x", ("x",)) == "A"


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
    assert judge(claim, sheet({"A": finals(60, 61), "C": finals(90, 91)})).verdict == "does not hold"  # already refuted


def test_part_of_a_data_set_decides_nothing():
    table = {"A": finals(60, 61, 62), "B": finals(50, 51, 52)}
    for expression in ("A - B > 0", "A - B < 0"):
        found = judge(Claim("c", holds_if=(expression,)), sheet(table, partial=True))
        assert found.verdict == "no verdict: part of the data set"
        assert found.contrasts[0].mean == pytest.approx(10)
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


def test_a_claim_of_other_presets():
    claim = Claim("c", holds_if=("A > 0",), presets=("mlp",))
    assert judge(claim, sheet({"A": finals(1, 2)})).verdict == "not run"
    assert judge(replace(claim, presets=("mlp", "cnn")), sheet({"A": finals(40, 41)})).verdict == "holds"


def test_a_loss_that_is_no_number_decides_nothing():
    """Dropping the seed that diverged would leave the two that flatter the method."""
    runs = finals(50, 50, 50)
    runs[2] = {**runs[2], "status": "diverged: round 3", "final": None}
    found = contrast("A - B < 1", {"A": runs, "B": finals(50, 50, 50)}, metric="train_loss")
    assert (found.verdict, found.note) == ("undecided", "A has no train_loss for seed 2")


# --- targets that were never reached ---

FAST, SLOW, NEVER = [10.0, 40, 45, 50], [10.0, 20, 30, 40], [10.0, 20, 30, 35]


def runs(*curves: list[float]) -> list[dict]:
    return [result(seed, 50.0, curve) for seed, curve in enumerate(curves)]


def test_never_reached_counts_as_one_round_more_than_there_were():
    found = contrast("B - A > 0", {"A": runs(FAST, FAST), "B": runs(NEVER, NEVER)}, "rounds_to_40", targets=(0.4,))
    assert found.values == (21.0, 21.0)
    assert (found.low, found.high, found.verdict) == (21.0, math.inf, "holds")
    assert found.note == "B did not reach the target in every run: a bound"
    reverse = contrast("A - B > 0", {"A": runs(FAST, FAST), "B": runs(NEVER, NEVER)}, "rounds_to_40", targets=(0.4,))
    assert (reverse.low, reverse.high, reverse.verdict) == (-math.inf, -21.0, "does not hold")


def test_a_gap_to_a_bound_is_not_known_to_be_small():
    """21 rounds more at the least: neither `< 30` nor `= 21` follows."""
    table = {"A": runs(FAST, FAST), "B": runs(NEVER, NEVER)}
    assert contrast("B - A < 30", table, "rounds_to_40", targets=(0.4,)).verdict == "undecided"
    assert contrast("B - A = 21 within 1", table, "rounds_to_40", targets=(0.4,)).verdict == "undecided"


@pytest.mark.parametrize("metric", ["rounds_to_40", "grad_evals_to_40", "bytes_to_40", "seconds_to_40"])
def test_two_that_never_reach_it_cannot_be_compared(metric):
    """B spends twice as much a round: its total is larger, which says nothing about what the target costs."""
    dear = runs(NEVER, NEVER)
    for run in dear:
        run["rounds"] = {k: [2 * x for x in v] if k in ("bytes", "grad_evals") else v for k, v in run["rounds"].items()}
    table = {"A": runs(NEVER, NEVER), "B": dear}
    assert contrast("B - A > 0", table, metric, targets=(0.4,)).verdict == "undecided"
    assert contrast("A - B > 0", table, metric, targets=(0.4,)).verdict == "undecided"


def test_a_run_that_diverged_early_did_not_get_there_early():
    """It was given 40 rounds and broke off after 10."""
    broken = [result(s, 10.0, [10.0], status="diverged: x", config={"rounds": 40}) for s in range(2)]
    found = contrast("B - A > 0", {"A": broken, "B": runs(SLOW, SLOW)}, "rounds_to_40", targets=(0.4,))
    assert found.values == (-1.0, -1.0)
    assert found.verdict == "does not hold"
    costs = contrast("B - A > 0", {"A": broken, "B": runs(SLOW, SLOW)}, "bytes_to_40", targets=(0.4,))
    assert costs.verdict == "undecided", "it had sent less when it broke off, which is no merit"


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
        ({"holds_if": "A > 0"}, "at least one expression"),
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
