"""The table in docs/explanation/, of reproduction.md and table4-blocks.md, follows from stored runs.

`python tests/reproduce/test_blocks.py` writes it into both pages.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from fedspeed.config.damping import damping
from fedspeed.report.tables import markdown
from fedspeed.reproduce import Reproduction
from fedspeed.reproduce.recipes import find_recipe
from fedspeed.reproduce.table import metrics

ROOT = Path(__file__).parents[2]
STORED = ROOT / "results" / "iclr2023"
PAGES = [ROOT / "docs" / "explanation" / "reproduction.md", ROOT / "docs" / "explanation" / "table4-blocks.md"]
BLOCKS = {
    "released-c10-100": "CIFAR-10, 10 of 100, to 80%",
    "released-c100-500": "CIFAR-100, 10 of 500, to 40%",
    "released-c10-500": "CIFAR-10, 10 of 500 (appendix), to 75%",
}
CHECKS = {"released-start": ["released-c10-100", "released-c10-500"], "released-c100-start": ["released-c100-500"]}
"""The checks of the start, and the blocks that each of them decides."""
HEADER = ("block, IID", "method", "paper", "ours, first score", "ours / paper", "ours, mean of five", "state")


def table() -> str:
    """Paper's rounds beside ours, block by block, from the stored runs and those in progress."""
    recipe, lines = find_recipe("table4-low"), []
    for preset, title in BLOCKS.items():
        store, chosen = Reproduction(preset, STORED / preset).store, recipe.preset(preset)
        progress = STORED / preset / "progress.jsonl"
        begun = [json.loads(line) for line in progress.read_text("utf-8").splitlines()] if progress.exists() else []
        results = list(store.results().values())
        for cell in recipe.cells(preset):
            paper = recipe.values.get(f"{cell.row.partition(',')[0]}/{cell.column}")  # of FedADMM whichever rule it was
            config = cell.config(0).to_dict()
            done = next((r for r in results if same(r["config"], config)), None)
            label = f"table4-low {cell.row} {cell.column} seed 0"
            line = next((line for line in begun if line["label"] == label), None)
            lines.append((title, cell.row, str(paper or "-"), *ours(done, line, chosen, cell.config(0).rounds, paper)))
    return markdown(HEADER, lines)


def same(a: dict, b: dict) -> bool:
    """Whether two configs are the same run, wherever it was computed."""
    names = ("method", "split", "data", "model", "rounds", "lr_decay", "decay_outside_mix", "seed", "stop_at")
    return all(a.get(name) == b.get(name) for name in names)


def ours(done, line, chosen, limit, paper) -> tuple[str, ...]:
    """First score at the target, its ratio to the paper's, the mean of five, and how the run ended."""
    if done is None:
        state = "not run" if line is None else f"in progress: round {line['rounds']} of {limit}, {_last(line['curve'])}"
        return ("-", "-", "-", state)
    low = chosen.targets[0]
    found = metrics(done, [low])
    first, steady = found[f"rounds_to_{100 * low:g}"], found[f"mean5_rounds_to_{100 * low:g}"]
    ended = done["summary"]["rounds"]
    state = f"{'stopped by its rule' if str(done['status']).startswith('stopped') else done['status']}, round {ended}"
    state += f", best {found['best']:.2f}%"
    if first is None:
        return (f"> {ended}", f"> {ended / paper:.2f}" if paper else "-", f"> {ended}", state)
    return (
        f"{first:.0f}",
        f"{first / paper:.2f}" if paper else "-",
        f"{steady:.0f}" if steady else f"> {ended}",
        state,
    )


def _last(curve) -> str:
    return f"{100 * curve[-1][1]:.2f}%" if curve else "not scored yet"


def course() -> str:
    """Accuracy and norms of the methods with a running mean on CIFAR-100, round by round."""
    shown = (5, 50, 100, 200, 300, 400, 520, 600, 730, 840, 925)
    found = {name: (scores, norms) for name, scores, norms in map(read, ("fedspeed", "feddyn"))}
    lines = []
    for name, (scores, norms) in found.items():
        lines.append((f"{name}, accuracy %", *(f"{100 * scores[t]:.1f}" if t in scores else "-" for t in shown)))
        lines.append((f"{name}, norm of x", *(f"{norms[t]['x_norm']:.0f}" if t in norms else "-" for t in shown)))
        lines.append((f"{name}, norm of H", *(f"{norms[t]['H_norm']:.2f}" if t in norms else "-" for t in shown)))
    return markdown(("round", *map(str, shown)), lines)


def read(name: str) -> tuple[str, dict, dict]:
    """The scores and the norms of a method's stored run on CIFAR-100, by rounds."""
    results = Reproduction("released-c100-500", STORED / "released-c100-500").store.results().values()
    (result,) = (r for r in results if r["config"]["method"]["name"] == name)
    scores = dict(zip(result["rounds"]["round"], result["rounds"]["test_accuracy"], strict=True))
    return name, scores, {found["round"]: found for found in result["rounds"]["metrics"]}


def block(text: str) -> str:
    """The page with the tables of now."""
    for mark, made in (("blocks", table), ("course", course)):
        pattern = re.compile(rf"<!-- {mark} -->\n.*?<!-- end of {mark} -->", re.S)
        text = pattern.sub(lambda _, mark=mark, made=made: f"<!-- {mark} -->\n{made()}<!-- end of {mark} -->", text)
    return text


def test_the_tables_of_both_pages_are_those_of_the_stored_runs():
    for page in PAGES:
        text = page.read_text("utf-8")
        assert "<!-- blocks -->" in text, page.name
        assert block(text) == text, f"{page.name}: python tests/reproduce/test_blocks.py"


@pytest.mark.parametrize(("check", "blocks"), CHECKS.items())
def test_the_start_of_a_block_is_the_one_its_check_decided(check, blocks):
    """The rule's second point: the start with the higher mean of the two seeds' last scores."""
    scores: dict[str, dict[int, float]] = {}
    for result in Reproduction(check, STORED / check).store.results().values():
        scores.setdefault(result["config"]["model"]["init"], {})[result["seed"]] = result["final"]["accuracy"]
    assert {start: set(seeds) for start, seeds in scores.items()} == {"usual": {0, 1}, "zero-residual": {0, 1}}
    best = max(scores, key=lambda start: sum(scores[start].values()))
    for block in blocks:
        assert {cell.config(0).model.options["init"] for cell in find_recipe("table4-low").cells(block)} == {best}
    text = PAGES[1].read_text("utf-8").partition("## The start: what the checks decided")[2]
    for seeds in scores.values():
        assert f"{100 * seeds[0]:.2f} and {100 * seeds[1]:.2f}%" in text


def test_the_norm_of_x_is_least_where_the_linear_model_passes_through_zero():
    """The run that shows an undamped mean: predicted before it, from p, K, lr, w and weight decay alone."""
    cell = next(c for c in find_recipe("table4-low").cells("released-c100-500") if c.row == "FedSpeed")
    config = cell.config(0)
    found = damping(config.method, config, [100] * 500)
    _, _, norms = read("fedspeed")
    least = min(norms.values(), key=lambda record: record["x_norm"])["round"]
    assert found.ratio < 0.2
    assert abs(found.zero - least) <= 10


def test_numbers_that_the_page_has_in_words():
    """FedDyn is ahead of FedSpeed in every score, and its norm of x falls, rises and falls again."""
    (_, speed, _), (_, dyn, norms) = read("fedspeed"), read("feddyn")
    assert all(dyn[t] > speed[t] for t in speed)
    scores = [dyn[t] for t in sorted(dyn)]
    assert f"{100 * max(sum(scores[i : i + 5]) / 5 for i in range(len(scores) - 4)):.1f}" == "38.4"
    size = {t: found["x_norm"] for t, found in norms.items()}
    first = min((t for t in size if t < 500), key=size.get)
    top = max((t for t in size if t > first), key=size.get)
    least = min((t for t in size if t > top), key=size.get)
    assert (first, top, least) == (310, 575, 840)


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(block(page.read_text("utf-8")), "utf-8")
