"""A run to a high target continues the run to the low one: the bits of one rule from the start, no round made twice."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from forked import forked

from fedspeed.cli import main
from fedspeed.config.stopping import parse_pairs
from fedspeed.errors import UserError
from fedspeed.reproduce import Reproduction
from fedspeed.reproduce.page import index
from fedspeed.reproduce.recipes import find_recipe, minutes_of, recipes, runs_of
from fedspeed.reproduce.runs import Run, Store, _work, apart

PRESET = "smoke-blocks"
CONTINUED = [(recipe, name) for recipe in recipes().values() for name, p in recipe.presets.items() if p.continues]


def run_of(out: Path, recipe: str, row: str = "FedSpeed") -> Run:
    work = Reproduction(PRESET, out)
    (run,) = work.runs(find_recipe(recipe), lambda cell: cell.row == row)
    return run


def made(out: Path, run: Run) -> tuple[dict | None, list[int]]:
    """Make a run as a worker does; return its result, and every round that was computed for it."""
    rounds: list[int] = []

    def tell(news: tuple[float, str]) -> None:
        if "client" not in news[1]:
            rounds.append(int(re.match(r"round (\d+)/", news[1])[1]))

    return _work(out, 0.0, run, tell), rounds


def alone(run: Run) -> Run:
    """The same run, with its rule from the start."""
    return replace(run, first=None, keep=False)


def same(a: dict, b: dict) -> bool:
    """Whether two results are the same run bit for bit: every score, and the digests of all rounds and of the model."""
    return apart(a, b) == 0 and a["summary"]["digests"] == b["summary"]["digests"] and a["config"] == b["config"]


@pytest.fixture(scope="module", params=["FedSpeed", "FedDyn"])
def from_the_start(request, tmp_path_factory) -> tuple[str, dict]:
    """A run with the high rule from the start; of the low runs FedSpeed's is stopped by its rule, FedDyn's is not."""
    out = tmp_path_factory.mktemp("start")
    result, rounds = made(out, alone(run_of(out, "table4", request.param)))
    assert rounds == list(range(1, result["summary"]["rounds"] + 1))
    assert "continues" not in result
    return request.param, result


def test_the_low_target_then_the_high_one_is_the_high_one_from_the_start(from_the_start, tmp_path):
    row, expected = from_the_start
    low, first_rounds = made(tmp_path, run_of(tmp_path, "table4-low", row))
    end = low["summary"]["rounds"]
    assert low["status"].startswith({"FedSpeed": "stopped: mean of 5 scores", "FedDyn": "finished"}[row])
    assert first_rounds == list(range(1, end + 1))
    assert (tmp_path / "work" / low["key"]).is_dir(), "kept for the high target"

    high, rounds = made(tmp_path, run_of(tmp_path, "table4", row))
    assert end < high["summary"]["rounds"]
    assert rounds == list(range(end + 1, high["summary"]["rounds"] + 1)), "no round is computed twice"
    assert same(high, expected)
    assert high["continues"] == low["key"]
    assert Store(tmp_path).get(low["key"]) == low, "the low target's result stays as it is"
    assert [path.name for path in (tmp_path / "work").iterdir()] == [".runs.lock"], "nothing is left behind"


def test_the_high_target_alone_makes_and_stores_the_low_one_first(from_the_start, tmp_path):
    row, expected = from_the_start
    high, rounds = made(tmp_path, run_of(tmp_path, "table4", row))
    assert rounds == list(range(1, high["summary"]["rounds"] + 1))
    assert same(high, expected)
    low, own = made(tmp_path / "low", run_of(tmp_path / "low", "table4-low", row))
    assert same(Store(tmp_path).get(low["key"]), low)
    assert own == list(range(1, low["summary"]["rounds"] + 1))


def test_a_low_run_under_way_is_finished_and_stored_before_it_is_continued(from_the_start, tmp_path):
    row, expected = from_the_start

    def stop(news: tuple[float, str]) -> None:
        if news[1].startswith("round 7/"):
            raise KeyboardInterrupt

    low = run_of(tmp_path, "table4-low", row)
    with pytest.raises(KeyboardInterrupt):
        _work(tmp_path, 0.0, low, stop)
    high, rounds = made(tmp_path, run_of(tmp_path, "table4", row))
    assert rounds == list(range(rounds[0], high["summary"]["rounds"] + 1))
    assert 7 <= rounds[0] <= 8, "the checkpoint of round 6 (every third), or that of the interruption"
    assert same(high, expected)
    assert high["continues"] == low.key
    assert Store(tmp_path).get(low.key)["summary"]["rounds"] < high["summary"]["rounds"]


def test_a_crash_at_any_step_of_the_hand_over_costs_no_round(from_the_start, tmp_path):
    row, expected = from_the_start
    low = run_of(tmp_path, "table4-low", row)
    result, _ = made(tmp_path, low)
    high = run_of(tmp_path, "table4", row)
    Store(tmp_path).hand_over(low.key, high.key)  # killed here: its config has the old rule
    again, rounds = made(tmp_path, high)
    assert rounds[0] == result["summary"]["rounds"] + 1
    assert same(again, expected)


def test_without_the_kept_folder_the_run_is_made_from_the_start(tmp_path):
    low = run_of(tmp_path, "table4-low")
    result, _ = made(tmp_path, replace(low, keep=False))
    assert not (tmp_path / "work" / low.key).exists()
    high, rounds = made(tmp_path, run_of(tmp_path, "table4"))
    assert rounds[0] == 1
    assert "continues" not in high, "its first rounds were computed again, and it says so"
    assert apart(result, Store(tmp_path).get(low.key)) == 0


def test_a_low_run_that_another_command_makes_is_left_to_it(tmp_path):
    pytest.importorskip("fcntl")
    high = run_of(tmp_path, "table4")
    with Store(tmp_path).claim(high.first.key):
        assert made(tmp_path, high) == (None, [])
    assert Store(tmp_path).results() == {}


def test_a_result_of_the_high_target_needs_no_folder(tmp_path):
    made(tmp_path, run_of(tmp_path, "table4"))
    assert not run_of(tmp_path, "table4-low").keep


def test_both_recipes_in_one_command_side_by_side(tmp_path, capsys):
    with forked():
        command = ["reproduce", "table4", "table4-low", "--preset", PRESET, "--jobs", "2", "--out", str(tmp_path)]
        assert main(command) == 0
    assert "another command" not in capsys.readouterr().out
    results = Store(tmp_path).results()
    assert len(results) == 4
    continued = {r["continues"]: r for r in results.values() if "continues" in r}
    assert len(continued) == 2
    minutes = sum(r["wall_seconds"] for r in continued.values()) / 60
    assert f"4 runs took {minutes:.0f} minutes" in index(Reproduction(PRESET, tmp_path)).read_text("utf-8")


def test_a_kept_folder_is_named_with_the_command_that_uses_it(tmp_path, capsys):
    with forked():
        low = ["reproduce", "table4-low", "--preset", PRESET, "--only", "FedDyn", "--out", str(tmp_path)]
        assert main(low) == 0
    key = run_of(tmp_path, "table4-low", "FedDyn").key
    told = " ".join(capsys.readouterr().out.split())
    assert f"{tmp_path / 'work' / key} is kept, since table4 continues it" in told


def test_rules_that_the_user_replaces_make_one_run_of_both(tmp_path):
    work = Reproduction(PRESET, tmp_path, overrides={"stop_at": "none", "rounds": 2})
    high, low = (work.runs(find_recipe(name))[0] for name in ("table4", "table4-low"))
    assert high.key == low.key
    assert (high.first, low.keep) == (None, False)


# --- the recipes ---


@pytest.mark.parametrize(("recipe", "preset"), CONTINUED, ids=lambda given: getattr(given, "name", given))
def test_a_run_that_continues_another_differs_in_its_rule_alone(recipe, preset):
    """The higher goal of the same score is reached no sooner, so the first run ends no later than the second."""
    assert not recipe.measure, "the run that is continued would have to measure it, too"
    for cell in recipe.cells(preset):
        low, high = recipe.beginning(preset, cell).config(0), cell.config(0)
        assert replace(high, rounds=low.rounds, stop_at=low.stop_at) == low
        assert high.rounds > low.rounds
        (score, goal), *mean = parse_pairs(low.stop_at)
        (other, higher), *of = parse_pairs(high.stop_at)
        assert (score, mean) == (other, of)
        assert score == "accuracy"
        assert float(higher) > float(goal)


def test_the_high_target_of_the_block_is_what_the_rule_says():
    """With 100 clients FedSpeed and FedDyn continue to 85%, up to 1.4 times the paper's 280 and 400 rounds."""
    found = {c.row: c.config(0) for c in find_recipe("table4").cells("released-c10-100")}
    assert {row: (config.rounds, config.stop_at) for row, config in found.items()} == {
        "FedSpeed": (392, "accuracy=0.85,mean=5"),
        "FedDyn": (560, "accuracy=0.85,mean=5"),
    }


def test_rounds_that_two_runs_share_are_estimated_once():
    high, low = find_recipe("table4"), find_recipe("table4-low")
    assert runs_of(high, "released-c10-100") == 2
    assert runs_of(low, "released-c10-100") == len(low.cells("released-c10-100")) - 2
    assert minutes_of(high, "released-c10-100") > 0


def test_continues_names_a_recipe():
    recipe = find_recipe("table4")
    (cell, *_) = recipe.cells(PRESET)
    wrong = replace(recipe, presets={PRESET: replace(recipe.presets[PRESET], continues="table4-lo")})
    with pytest.raises(UserError, match="table4-low"):
        wrong.beginning(PRESET, cell)
