"""Tables, figures and verdicts of a recipe as files, and one page that leads to them."""

from __future__ import annotations

import json
from pathlib import Path

from ..report import sheets
from ..report.cells import Sheet
from ..report.runs import markdown
from ..report.splits import heat_map
from ..report.verdicts import Verdict, judge
from ..rundir import write
from . import Reproduction, facts
from .recipes import Recipe, recipes

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
    """README.md of a results folder: every recipe that was rendered, its verdicts, and what all runs took."""
    summary, claims = list[tuple[str, ...]](), list[str]()
    for recipe in recipes().values():
        if work.preset not in recipe.presets or not (work.store.out / f"{recipe.name}.md").exists():
            continue
        told = _judged(work, recipe)[1]
        kinds = [verdict.verdict for verdict in told]
        counts = ", ".join(f"{kinds.count(kind)} {kind}" for kind in sorted(set(kinds)))
        summary.append((f"[{recipe.name}]({recipe.name}.md)", recipe.title, counts))
        if told:
            claims += [f"\n### {recipe.title}\n\n", markdown(CLAIMS, list(sheets.claims(told)))]
    page = [
        f"# Reproduction, preset `{work.preset}`\n\n",
        markdown(("recipe", "what", "verdicts"), summary),
        _spent(work),
    ]
    page += ["\n## Claims\n\nOf each claim the contrast that is furthest from holding; in brackets its 95% interval.\n"]
    write(work.store.out / "README.md", "".join([*page, *claims]))
    return work.store.out / "README.md"


def _spent(work: Reproduction) -> str:
    """What all runs took, by their own clocks."""
    paths = sorted((work.store.out / "runs").glob("*.json"))
    minutes = sum(json.loads(path.read_text("utf-8"))["wall_seconds"] for path in paths) / 60
    return f"\n{len(paths)} runs took {minutes:.0f} minutes in all, {minutes / 2:.0f} with two side by side.\n"
