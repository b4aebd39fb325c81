"""Tables, figures and verdicts of a recipe as files, and one page that leads to them."""

from __future__ import annotations

import json
from pathlib import Path

from ..files import write
from ..report import sheets
from ..report.cells import Sheet
from ..report.splits import heat_map
from ..report.tables import markdown
from ..report.verdicts import Verdict, judge
from . import Reproduction, facts
from .recipes import Recipe, recipes

WALK = "## Table by table, figure by figure"
CLAIMS = ("claim", "contrast", "paper", "ours", "verdict")


def render(work: Reproduction, recipe: Recipe) -> list[Verdict]:
    """Write NAME.md, .csv, .tex, .png, .svg of what is there, and return the verdicts."""
    out = work.store.out
    out.mkdir(parents=True, exist_ok=True)
    sheet, verdicts = _judged(work, recipe)
    pictures = sheets.figure(sheet, out / recipe.name)
    if recipe.kind == "split":
        pictures += _heat_maps(work, recipe)
    shown = "".join(f"\n![{path.stem}]({path.name})\n" for path in pictures if path.suffix == ".png")
    write(out / f"{recipe.name}.md", sheets.markdown(sheet, verdicts) + shown)
    write(out / f"{recipe.name}.csv", sheets.csv(sheet))
    write(out / f"{recipe.name}.tex", sheets.latex(sheet))
    return verdicts


def _judged(work: Reproduction, recipe: Recipe) -> tuple[Sheet, list[Verdict]]:
    """A recipe's sheet, and the verdicts on the claims that its preset is asked."""
    sheet = work.sheet(recipe)
    return sheet, [judge(claim, sheet) for claim in recipe.claims if claim.asked_of(work.preset)]


def _heat_maps(work: Reproduction, recipe: Recipe) -> list[Path]:
    made = {}
    for case in recipe.cases(work.preset):
        if case.row not in made and work.available(case.tables["data"]["name"]):
            name = f"{recipe.name}-{case.row.replace(' ', '-')}.png"
            made[case.row] = heat_map(facts.of_split(case, 0)[1], work.store.out / name, case.row)
    return list(made.values())


def index(work: Reproduction) -> Path:
    """README.md of a results folder: every recipe that was rendered with its claim, the paper's numbers beside ours,
    the figure and the verdicts, and what all runs took."""
    out, summary, walk = work.store.out, list[tuple[str, ...]](), list[str]()
    for recipe in recipes().values():
        if work.preset not in recipe.presets or not (out / f"{recipe.name}.md").exists():
            continue
        sheet, told = _judged(work, recipe)
        kinds = [verdict.verdict for verdict in told]
        counts = ", ".join(f"{kinds.count(kind)} {kind}" for kind in sorted(set(kinds)))
        summary.append((f"[{recipe.name}]({recipe.name}.md)", recipe.title, counts))
        walk += [f"\n### {recipe.title}\n\n{' '.join(recipe.claim.split())} ([page]({recipe.name}.md))\n\n"]
        walk += ["\n".join(sheets.results(sheet, details=False))]
        walk += [f"\n![{recipe.name}]({recipe.name}.png)\n"] if (out / f"{recipe.name}.png").exists() else []
        walk += ["\n", markdown(CLAIMS, list(sheets.claims(told)))] if told else []
    page = [f"# Reproduction, preset `{work.preset}`\n\n", markdown(("recipe", "what", "verdicts"), summary)]
    page += [_spent(work), f"\n{WALK}\n\n"]
    page += ["Of each claim the contrast that is furthest from holding; in brackets its 95% interval.\n", *walk]
    write(out / "README.md", "".join(page))
    return out / "README.md"


def _spent(work: Reproduction) -> str:
    """What all runs took, by their own clocks."""
    paths = sorted((work.store.out / "runs").glob("*.json"))
    minutes = sum(json.loads(path.read_text("utf-8"))["wall_seconds"] for path in paths) / 60
    return f"\n{len(paths)} runs took {minutes:.0f} minutes in all, {minutes / 2:.0f} with two side by side.\n"
