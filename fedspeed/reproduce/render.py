"""Tables, figures and verdicts of a recipe as files, and one page that leads to them."""

from __future__ import annotations

import csv
from pathlib import Path

from ..files import write
from ..report.splits import heat_map
from ..report.tables import markdown
from . import Reproduction, facts, page
from .claims import SOURCES
from .plot import figure
from .recipes import Recipe, papers_scale, recipes, scale
from .table import Cell, Sheet
from .verdicts import DIVERGED, FAILS, HOLDS, UNDECIDED, Verdict, judge

WALK = "## Table by table, figure by figure"
CLAIMS = ("claim", "contrast", "paper", "ours", "contrasts", "verdict")


def judged(work: Reproduction, recipe: Recipe) -> tuple[Sheet, list[Verdict]]:
    """A recipe's sheet, and the verdicts on the claims that its preset is asked."""
    sheet = work.sheet(recipe)
    full, cells = papers_scale(work.preset), recipe.cell_names(work.preset)
    return sheet, [judge(claim, sheet) for claim in recipe.claims if claim.asked(work.preset, cells, full)]


def lost(work: Reproduction, sheet: Sheet) -> list[Cell]:
    """Cells that the files of a sheet hold and that cannot be filled now: their data are not on this machine."""
    path = work.store.out / f"{sheet.name}.csv"
    gone = [c for c in sheet.cells.values() if not c.results and not work.available(c.tables["data"]["name"])]
    if not gone or not path.exists():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        filled = {(line["row"], line["column"]) for line in csv.DictReader(file) if line["n"] != "0"}
    return [cell for cell in gone if (cell.row, cell.column) in filled]


def render(work: Reproduction, recipe: Recipe, sheet: Sheet, verdicts: list[Verdict]) -> None:
    """Write NAME.md, .csv, .tex, .png, .svg from the stored runs."""
    out = work.store.out
    out.mkdir(parents=True, exist_ok=True)
    with work.store.alone():
        pictures = figure(sheet, out / recipe.name)
        if recipe.kind == "split":
            pictures += _heat_maps(work, recipe)
        shown = "".join(f"\n![{path.stem}]({path.name})\n" for path in pictures if path.suffix == ".png")
        write(out / f"{recipe.name}.md", page.markdown(sheet, verdicts) + shown)
        write(out / f"{recipe.name}.csv", page.csv(sheet))
        write(out / f"{recipe.name}.tex", page.latex(sheet))


def _heat_maps(work: Reproduction, recipe: Recipe) -> list[Path]:
    made = {}
    for cell in recipe.cells(work.preset):
        if cell.row not in made and work.available(cell.tables["data"]["name"]):
            name = f"{recipe.name}-{cell.row.replace(' ', '-')}.png"
            made[cell.row] = heat_map(facts.of_split(cell, 0)[1], work.store.out / name, cell.row)
    return list(made.values())


def index(work: Reproduction) -> Path | None:
    """README.md of a results folder: every recipe that was rendered with its claim, the paper's numbers beside ours,
    the figure and the verdicts, and what all runs took. None, and nothing is written, where it would lose numbers."""
    out = work.store.out
    summary = list[tuple[str, ...]]()
    short = list[tuple[str, Verdict]]()
    walk = list[str]()
    for recipe in recipes().values():
        if work.preset not in recipe.presets or not (out / f"{recipe.name}.md").exists():
            continue
        sheet, told = judged(work, recipe)
        if lost(work, sheet):
            return None
        of_paper = [verdict for verdict in told if verdict.source != "ours"]
        of_us = [verdict for verdict in told if verdict.source == "ours"]
        summary.append((f"[{recipe.name}]({recipe.name}.md)", recipe.title, _counts(of_paper), _counts(of_us)))
        short += [(recipe.name, verdict) for verdict in of_paper]
        walk += [f"\n### {recipe.title}\n\n{' '.join(recipe.claim.split())} ([page]({recipe.name}.md))\n\n"]
        walk += ["\n".join(page.results(sheet, details=False))]
        walk += [f"\n![{recipe.name}]({recipe.name}.png)\n"] if (out / f"{recipe.name}.png").exists() else []
        walk += ["\n", markdown(CLAIMS, list(page.claims(told)))] if told else []
    text = [f"# Reproduction, preset `{work.preset}`\n\n"]
    text += [f"{scale(work.preset)}\n\n"] * bool(scale(work.preset))
    text += [*_in_short(short), "## Recipes\n\n"]
    text += [markdown(("recipe", "what", "the paper's claims", "ours"), summary), _spent(work), f"\n{WALK}\n\n"]
    text += [f"Of each claim the contrast that is furthest from holding. {page.HOW}\n", *walk]
    with work.store.alone():
        write(out / "README.md", "".join(text))
    return out / "README.md"


def _counts(verdicts: list[Verdict]) -> str:
    kinds = [verdict.verdict for verdict in verdicts]
    return ", ".join(f"{kinds.count(kind)} {kind}" for kind in sorted(set(kinds)))


def _in_short(found: list[tuple[str, Verdict]]) -> list[str]:
    """The paper's claims by what came out; those of recipes that share runs are not independent."""
    parts = {"hold": (HOLDS,), "do not hold": (FAILS,), "are undecided": (UNDECIDED, DIVERGED)}
    parts["have no verdict"] = tuple({verdict.verdict for _, verdict in found}.difference(*parts.values()))
    text = ["## The paper's claims in short\n\n"] if found else []
    for what, kinds in parts.items():
        chosen = [(name, verdict) for name, verdict in found if verdict.verdict in kinds]
        text.append(f"{len(chosen)} of {len(found)} {what}{':' if chosen else '.'}\n\n" if found else "")
        for name, verdict in chosen:
            why = f"; {verdict.verdict}" if verdict.verdict not in (HOLDS, FAILS, UNDECIDED) else ""
            ranks = f"; rank: {', '.join(verdict.ranks)}" if verdict.ranks else ""
            told = verdict.text if verdict.said == SOURCES["paper"] else page.said(verdict)
            text.append(f"- [{name}]({name}.md): {told}{ranks}{why}\n")
        text.append("\n" if chosen else "")
    return text


def _spent(work: Reproduction) -> str:
    """What all runs took, by their own clocks."""
    runs = work.store.results()
    minutes = sum(run.get("wall_seconds", 0) for run in runs.values()) / 60
    return f"\n{len(runs)} runs took {minutes:.0f} minutes in all, {minutes / 2:.0f} with two side by side.\n"
