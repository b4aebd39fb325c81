"""The pages of a reproduction: our numbers beside the paper's, verdicts, an index, and the progress of long runs."""

from __future__ import annotations

import csv as csv_format
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..record import first_at
from ..report.figures import heat_map
from ..report.tables import csv_lines, tabular
from ..report.tables import markdown as markdown_table
from ..runs.directory import RunDir
from ..utils.files import read_text, write
from . import Reproduction
from .plot import CURVES, drawn, figure
from .recipes import Recipe, papers_scale, recipes, scale, trained
from .runs import Run, of_split
from .table import DIGITS, UNITS, Cell, Result, Sheet, base, cell_name, estimate, is_diverged, label
from .verdicts import DIVERGED, FAILS, HOLDS, NOT_RUN, SOURCES, UNDECIDED, Contrast, Verdict, judge

HOW = (
    "In brackets: 95% t-interval of the mean, paired over seeds. A contrast is decided if its p is at most 0.05 after "
    "Holm's correction over the contrasts of its claim."
)
UNTIMED = "times of runs that were made side by side: not a measurement, nothing is judged by them (`make bench` times)"
CSV = ("recipe", "preset", "row", "column", "metric", "unit", "mean", "standard_deviation", "n", "not_reached", "paper")
WALK = "## Table by table, figure by figure"
CLAIMS = ("claim", "contrast", "paper", "ours", "contrasts", "verdict")


def markdown(sheet: Sheet, verdicts: Sequence[Verdict]) -> str:
    """Return the page of a recipe: claim, setting, our numbers beside the paper's, verdicts, cost, command."""
    where = f"{sheet.paper} of the paper" if sheet.paper else "A finding of ours"
    parts = [f"# {sheet.title}\n", f"{where}; preset `{sheet.preset}`.\n"]
    parts += [f"**Claim.** {sheet.claim.strip()}\n"] * bool(sheet.claim.strip())
    parts += [f"**Setting.** {sheet.about.strip()}\n"] * bool(sheet.about.strip())
    parts += [f"**Scale.** {sheet.scale}\n"] * bool(sheet.scale)
    parts += ["## Results\n", *results(sheet)]
    if verdicts:
        parts.append("## Verdicts\n")
        parts.append("".join(_verdict(verdict) for verdict in verdicts))
        parts.append(f"{HOW}\n")
    parts.append(f"## How it was run\n\n{_cost(sheet)} To run it again:\n")
    parts.append(f"    fedspeed reproduce {sheet.name} --preset {sheet.preset}\n")
    return "\n".join(parts)


def results(sheet: Sheet, details: bool = True) -> list[str]:
    """Return our numbers beside the paper's, the other metrics (`details`), and notes."""
    parts = [f"{caption(sheet)}:\n", markdown_table(*primary(sheet))]
    if sheet.partial:
        parts[:0] = ["**These runs had part of the data set only: the numbers are shown, nothing is decided.**\n"]
    others = [metric for metric in dict.fromkeys(sheet.show) if metric != sheet.metric]
    if details and others:
        parts.append(markdown_table(("", *map(label, others)), list(_details(sheet, others))))
    if details and sheet.printed:
        parts += ["Further numbers that the paper prints:\n", markdown_table(*_printed(sheet))]
    listed = "".join(f"- {note}\n" for note in notes(sheet))
    return parts + [listed] * bool(listed)


def caption(sheet: Sheet) -> str:
    """Return the caption of the primary table."""
    text = label(sheet.metric)
    return f"{text[:1].upper()}{text[1:]}, mean +- standard deviation over seeds"


def csv(sheet: Sheet) -> str:
    """Return one CSV line per cell and metric; where `not_reached` > 0 the mean is a lower bound."""
    lines: list[Sequence[Any]] = [CSV]
    for row, column in product(sheet.rows, sheet.columns):
        for metric in dict.fromkeys((sheet.metric, *sheet.show)):
            found = estimate(sheet.cell(row, column), metric, sheet.targets)
            paper = sheet.value(row, column) if metric == sheet.metric else None
            if found or paper is not None:
                numbers = (found.mean, found.deviation, found.n, found.missed) if found else (None, None, 0, 0)
                about = (sheet.name, sheet.preset, row, column, metric, UNITS.get(base(metric), ""))
                lines.append([*about, *numbers, paper])
    return csv_lines(lines)


def primary(sheet: Sheet) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return header and lines of the primary metric: our column, and the paper's beside it where it has numbers."""
    columns: list[tuple[str, ...]] = [("", *sheet.rows)]
    for column in sheet.columns:
        columns.append((column, *(_shown(sheet.cell(row, column), sheet.metric, sheet.targets) for row in sheet.rows)))
        papers = [sheet.value(row, column) for row in sheet.rows]
        if any(paper is not None for paper in papers):
            title = "paper, its target" if sheet.other_targets else "paper"
            columns.append((title, *("-" if paper is None else str(paper) for paper in papers)))
    header, *lines = zip(*columns, strict=True)
    return header, lines


def _printed(sheet: Sheet) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return header and lines of the paper's further numbers, with ours for a difference of two columns."""
    columns: list[tuple[str, ...]] = [("", *sheet.rows)]
    for name, values in sheet.printed.items():
        first, _, second = name.partition(" - ")
        title = f"paper's {name}"
        if first in sheet.columns and second in sheet.columns:
            columns.append((name, *(_difference(sheet, row, first, second) for row in sheet.rows)))
            title = "paper"
        columns.append((title, *(str(values.get(row, "-")) for row in sheet.rows)))
    header, *lines = zip(*columns, strict=True)
    return header, lines


def _difference(sheet: Sheet, row: str, first: str, second: str) -> str:
    found = [estimate(sheet.cell(row, column), sheet.metric, sheet.targets) for column in (first, second)]
    a, b = (each.mean if each else None for each in found)
    return "-" if a is None or b is None else f"{a - b:.{DIGITS.get(base(sheet.metric), 4)}f}"


def _details(sheet: Sheet, metrics: Sequence[str]) -> Iterator[tuple[str, ...]]:
    for row, column in product(sheet.rows, sheet.columns):
        cell = sheet.cell(row, column)
        if cell and cell.results:
            yield (cell_name(row, column), *(_shown(cell, metric, sheet.targets) for metric in metrics))


def _shown(cell: Cell | None, metric: str, targets: Sequence[float]) -> str:
    """Return `mean +- deviation`, or `> T` where runs did not reach the target, with how many did."""
    found = estimate(cell, metric, targets)
    if not cell or not cell.results or not found:
        return "not run" if cell and not cell.results else "-"
    if metric == "value" and not found.deviation and found.mean == round(found.mean):
        return f"{found.mean:.0f}"  # a count
    digits = DIGITS.get(base(metric), 4)
    if found.missed == found.n:  # never reached in T rounds counts as T + 1
        bound = found.mean - 1 if base(metric) in ("rounds", "mean5_rounds") else found.mean
        return f"> {bound:.{0 if bound == round(bound) else digits}f}"
    if found.missed:
        return f"> {found.mean:.{digits}f} ({found.n - found.missed} of {found.n} reached)"
    part = f" ({found.n} of {len(cell.results)})" if found.n < len(cell.results) else ""
    spread = "" if found.deviation is None else f" +- {found.deviation:.{digits}f}"
    return f"{found.mean:.{digits}f}{spread}{part}"


def notes(sheet: Sheet) -> Iterator[str]:
    """Yield notes on the tables: cells that were not run or are incomplete, and runs that diverged."""
    found: dict[str, list[str]] = {}
    for row, column in product(sheet.rows, sheet.columns):
        cell, name = sheet.cell(row, column), cell_name(row, column)
        if cell and cell.note:
            found.setdefault(cell.note, []).append(name)
        diverged = sum(map(is_diverged, cell.results)) if cell else 0
        if cell and diverged:
            found.setdefault(f"diverged in {diverged} of {len(cell.results)} runs", []).append(name)
    for note, names in found.items():
        yield f"{note}: {', '.join(names)}"
    if any(base(metric).startswith("seconds") for metric in (sheet.metric, *sheet.show)):
        yield UNTIMED
    if sheet.figure == "curves" and len(sheet.curves) > 1:
        seen = drawn(sheet)
        yield f"drawn: {'; '.join(CURVES[curve] for curve in seen)}"
        missing = [CURVES[curve] for curve in sheet.curves if curve not in seen]
        if missing:
            yield f"not in the stored runs, recorded from now on: {'; '.join(missing)}"


def _verdict(verdict: Verdict, most: int = 3) -> str:
    """Return the claim, its verdict, and the contrasts that are furthest from holding, as a list in Markdown."""
    contrasts = verdict.contrasts
    if len(contrasts) > 1 and verdict.count(NOT_RUN) == len(contrasts):
        return f"- {said(verdict)}: **{verdict.verdict}**.\n"
    worst = sorted(contrasts, key=_telling)[:most]
    count = f" {counts(verdict)}" if len(contrasts) > 1 else ""
    count += f"; the {most} furthest from it:" if len(contrasts) > most else ":" if count else ""
    lines = [f"- {said(verdict)}: **{verdict.verdict}**.{count}\n"]
    return "".join([*lines, *(f"  - `{contrast.text}`: {_contrast(contrast)}\n" for contrast in worst)])


def counts(verdict: Verdict) -> str:
    """Return the counts of the contrasts, `3 for, 1 against, 4 undecided (1 diverged)`, and the ranks of the row."""
    found = f"{verdict.count(HOLDS)} for, {verdict.count(FAILS)} against"
    open_ones, diverged = verdict.count(UNDECIDED, DIVERGED), verdict.count(DIVERGED)
    found += f", {open_ones} undecided" + (f" ({diverged} diverged)" if diverged else "")
    rest = len(verdict.contrasts) - verdict.count(HOLDS, FAILS, UNDECIDED, DIVERGED)
    found += f", {rest} without verdict" if rest else ""
    return f"{found}. Rank: {', '.join(verdict.ranks)}" if verdict.ranks else found


def _telling(contrast: Contrast) -> tuple[int, float]:
    """Return a sort key: failing contrasts first, then undecided ones by their leaning, others, holding ones."""
    order = {FAILS: 0, UNDECIDED: 1, DIVERGED: 2, HOLDS: 4}.get(contrast.verdict, 3)
    return order, contrast.leaning


def _contrast(contrast: Contrast) -> str:
    n = len(contrast.values)
    if n == 0:
        text = contrast.note or "no seed that all its cells have"
    elif n == 1:
        text = f"{_number(contrast.mean)}, one seed: no interval"
    else:
        text = f"{_number(contrast.mean)} [{_number(contrast.low)}, {_number(contrast.high)}], {n} seeds"
        text += "" if contrast.adjusted is None else f", p {contrast.adjusted:.2g}"
    paper = "" if contrast.paper is None else f", the paper's {_number(contrast.paper)}"
    return f"{text}{paper}, {contrast.verdict}" + (f" ({contrast.note})" if n and contrast.note else "")


def claims(verdicts: Sequence[Verdict]) -> list[tuple[str, ...]]:
    """Return one line per claim: claim, weakest contrast, the paper's number for it, ours, counts, verdict."""
    lines = list[tuple[str, ...]]()
    for verdict in verdicts:
        weakest = min(verdict.contrasts, key=_telling, default=None)
        paper = ours = "-"
        if weakest is not None:
            paper = "-" if weakest.paper is None else _number(weakest.paper)
            if len(weakest.values) > 1:
                ours = f"{_number(weakest.mean)} [{_number(weakest.low)}, {_number(weakest.high)}]"
        text = f"`{weakest.text}`" if weakest else ""
        count = counts(verdict) if len(verdict.contrasts) > 1 else "-"
        lines.append((said(verdict), text, paper, ours, count, f"**{verdict.verdict}**"))
    return lines


def said(verdict: Verdict) -> str:
    """Return the claim, and whose it is."""
    return f"{verdict.text} ({verdict.said})"


def _cost(sheet: Sheet) -> str:
    """Return seeds, runs and their time; a run of several cells counts once."""
    runs = {result["key"]: result for cell in sheet.cells.values() for result in cell.results if "summary" in result}
    fewer = any(0 < len(cell.results) < sheet.seeds for cell in sheet.cells.values())
    seeds = f"{'up to ' * fewer}{sheet.seeds} seed{'s' * (sheet.seeds != 1)} per cell"
    if not runs and any(cell.results for cell in sheet.cells.values()):
        return f"{seeds}; counted, nothing was trained."
    seconds = sum(map(_seconds, runs.values()))
    return f"{seeds}, {len(runs)} runs, {seconds:.0f} seconds of computing in total.{_commits(runs.values())}"


def _commits(runs: Iterable[Result]) -> str:
    """Return the commits of the code that made the runs."""
    counts = Counter(run.get("commit") or "not recorded" for run in runs)
    if len(counts) < 2:
        return "".join(f" Commit: {name}." for name in counts)
    return f" Commits: {', '.join(f'{name} ({counts[name]} runs)' for name in sorted(counts))}."


def _number(value: float) -> str:
    """Return a number with two decimals, or with three digits if it is small or huge.

    Example:
        >>> _number(1.234), _number(-0.00421), _number(2.5e7)
        ('1.23', '-0.00421', '2.5e+07')
    """
    return f"{value:.2f}" if 1 <= abs(value) < 1e5 else f"{value:.3g}"


def _seconds(result: Result) -> float:
    """Return the seconds of a run and its evaluations."""
    summary = result.get("summary") or {}
    spent = [summary.get(key) or 0.0 for key in ("seconds", "eval_seconds")]
    return float(sum(spent) or max(result["rounds"]["seconds"], default=0.0))


def judged(work: Reproduction, recipe: Recipe) -> tuple[Sheet, list[Verdict]]:
    """Return a recipe's sheet, and the verdicts on the claims that its preset tests."""
    sheet = work.sheet(recipe)
    full, cells = papers_scale(work.preset), recipe.cell_names(work.preset)
    return sheet, [judge(claim, sheet) for claim in recipe.claims if claim.asked(work.preset, cells, full)]


def lost(work: Reproduction, sheet: Sheet) -> list[Cell]:
    """Return the cells that the files of a sheet have and that cannot be filled now, because their data are missing."""
    path = work.store.out / f"{sheet.name}.csv"
    gone = [c for c in sheet.cells.values() if not c.results and not work.available(c.tables["data"]["name"])]
    if not gone or not path.exists():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        filled = {(line["row"], line["column"]) for line in csv_format.DictReader(file) if line["n"] != "0"}
    return [cell for cell in gone if (cell.row, cell.column) in filled]


def render(work: Reproduction, recipe: Recipe, sheet: Sheet, verdicts: list[Verdict]) -> None:
    """Write NAME.md, .csv, .tex, .png and .svg of a recipe from the stored runs."""
    out = work.store.out
    out.mkdir(parents=True, exist_ok=True)
    with work.store.alone():
        pictures = figure(sheet, out / recipe.name)
        if recipe.kind == "split":
            pictures += _heat_maps(work, recipe)
        shown = "".join(f"\n![{path.stem}]({path.name})\n" for path in pictures if path.suffix == ".png")
        write(out / f"{recipe.name}.md", markdown(sheet, verdicts) + shown)
        write(out / f"{recipe.name}.csv", csv(sheet))
        write(out / f"{recipe.name}.tex", tabular(*primary(sheet)))


def _heat_maps(work: Reproduction, recipe: Recipe) -> list[Path]:
    made = {}
    for cell in recipe.cells(work.preset):
        if cell.row not in made and work.available(cell.tables["data"]["name"]):
            name = f"{recipe.name}-{cell.row.replace(' ', '-')}.png"
            made[cell.row] = heat_map(of_split(cell, 0)[1], work.store.out / name, cell.row)
    return list(made.values())


def index(work: Reproduction) -> Path | None:
    """Write README.md of a results folder: every rendered recipe with its claim, the paper's numbers beside ours, the
    figure, the verdicts and the cost. Return None, and write nothing, where numbers would be lost."""
    out = work.store.out
    summary = list[tuple[str, ...]]()
    short = list[tuple[str, Verdict]]()
    walk = list[str]()
    for recipe in recipes().values():
        if work.preset not in recipe.presets or not (out / f"{recipe.name}.md").exists():
            continue
        sheet, verdicts = judged(work, recipe)
        if lost(work, sheet):
            return None
        of_paper = [verdict for verdict in verdicts if verdict.source != "ours"]
        of_us = [verdict for verdict in verdicts if verdict.source == "ours"]
        summary.append((f"[{recipe.name}]({recipe.name}.md)", recipe.title, _counts(of_paper), _counts(of_us)))
        short += [(recipe.name, verdict) for verdict in of_paper]
        walk += [f"\n### {recipe.title}\n\n{' '.join(recipe.claim.split())} ([page]({recipe.name}.md))\n\n"]
        walk += ["\n".join(results(sheet, details=False))]
        walk += [f"\n![{recipe.name}]({recipe.name}.png)\n"] if (out / f"{recipe.name}.png").exists() else []
        walk += ["\n", markdown_table(CLAIMS, claims(verdicts))] if verdicts else []
    text = [f"# Reproduction, preset `{work.preset}`\n\n"]
    text += [f"{scale(work.preset)}\n\n"] * bool(scale(work.preset))
    text += [*_in_short(short), "## Recipes\n\n"]
    text += [markdown_table(("recipe", "what", "the paper's claims", "ours"), summary), _spent(work), f"\n{WALK}\n\n"]
    text += [f"Of each claim the contrast that is furthest from holding. {HOW}\n", *walk]
    with work.store.alone():
        write(out / "README.md", "".join(text))
    return out / "README.md"


def _counts(verdicts: list[Verdict]) -> str:
    kinds = [verdict.verdict for verdict in verdicts]
    return ", ".join(f"{kinds.count(kind)} {kind}" for kind in sorted(set(kinds)))


def _in_short(found: list[tuple[str, Verdict]]) -> list[str]:
    """Return the paper's claims by verdict; those of recipes that share runs are not independent."""
    parts = {"hold": (HOLDS,), "do not hold": (FAILS,), "are undecided": (UNDECIDED, DIVERGED)}
    parts["have no verdict"] = tuple({verdict.verdict for _, verdict in found}.difference(*parts.values()))
    text = ["## The paper's claims in short\n\n"] if found else []
    for what, kinds in parts.items():
        chosen = [(name, verdict) for name, verdict in found if verdict.verdict in kinds]
        text.append(f"{len(chosen)} of {len(found)} {what}{':' if chosen else '.'}\n\n" if found else "")
        for name, verdict in chosen:
            why = f"; {verdict.verdict}" if verdict.verdict not in (HOLDS, FAILS, UNDECIDED) else ""
            ranks = f"; rank: {', '.join(verdict.ranks)}" if verdict.ranks else ""
            claim = verdict.text if verdict.said == SOURCES["paper"] else said(verdict)
            text.append(f"- [{name}]({name}.md): {claim}{ranks}{why}\n")
        text.append("\n" if chosen else "")
    return text


def _spent(work: Reproduction) -> str:
    """Return the time of all runs as a sentence; rounds that two runs share count once."""
    runs = work.store.results()
    shared = {run.get("continues") for run in runs.values()}
    minutes = sum(run.get("wall_seconds", 0) for key, run in runs.items() if key not in shared) / 60
    return f"\n{len(runs)} runs took {minutes:.0f} minutes in all, {minutes / 2:.0f} with two side by side.\n"


FILE, PAGE = "progress.jsonl", "progress.md"


def write_progress(work: Reproduction) -> Path | None:
    """Write progress.jsonl with the rounds so far of unfinished runs, and progress.md; return the page, or None.

    The line of a run on another machine is kept until it is finished. Without a run in progress, both are removed.
    """
    out = work.store.out
    runs, targets = _all(work)
    if not runs:  # the data are not on this machine: keep what another machine wrote
        return None
    with work.store.alone():
        before = _read(out / FILE)
        lines = {}
        for key, run in runs.items():
            if work.store.get(key) is None:
                both = [line for line in (before.get(key), _so_far(run, work.store.work / key)) if line]
                if both:
                    lines[key] = max(both, key=lambda line: int(line["rounds"]))
        if not lines:
            for name in (FILE, PAGE):
                (out / name).unlink(missing_ok=True)
            return None
        write(out / FILE, "".join(json.dumps(line) + "\n" for line in lines.values()))
        write(out / PAGE, _progress_page(work, runs, lines, targets))
    return out / PAGE


def _all(work: Reproduction) -> tuple[dict[str, Run], list[float]]:
    """Return every run of the preset by key, and every target accuracy."""
    runs: dict[str, Run] = {}
    targets: set[float] = set()
    for recipe in trained(work.preset):
        for run in work.runs(recipe):
            runs.setdefault(run.key, run)
        targets |= set(recipe.preset(work.preset).targets or recipe.targets)
    return runs, sorted(targets)


def _so_far(run: Run, place: Path) -> dict[str, Any] | None:
    rounds = list(RunDir(place).lines())
    if not rounds:
        return None
    return {
        "key": run.key,
        "label": run.label,
        "rounds": rounds[-1]["round"],
        "of": run.config.rounds,
        "seconds": round(sum(r["seconds"] for r in rounds)),
        "curve": [[r["round"], r["test_accuracy"]] for r in rounds if r["test_accuracy"] is not None],
    }


def _read(path: Path) -> dict[str, dict[str, Any]]:
    with suppress(FileNotFoundError):
        try:
            return {line["key"]: line for line in map(json.loads, read_text(path).splitlines())}
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"{path}: expected lines about runs, found others ({error!r}); restore or delete it"
            ) from None
    return {}


def _progress_page(
    work: Reproduction, runs: dict[str, Run], lines: dict[str, dict[str, Any]], targets: list[float]
) -> str:
    header = ("run", "state", "rounds", "accuracy %", "best %", *(f"round of {100 * a:g}%" for a in targets), "hours")
    rows = [(run.label, *_progress_row(run, work.store.get(key), lines.get(key), targets)) for key, run in runs.items()]
    text = (
        f"# Progress of the runs of preset `{work.preset}`\n\n"
        "Runs `in progress` are not finished: their numbers are those of the last round that was scored, and no "
        "verdict is drawn from them. A target that is reached stays reached; `-` is not reached so far.\n\n"
    )
    return text + markdown_table(header, rows)


def _progress_row(run: Run, done: Result | None, line: dict[str, Any] | None, targets: list[float]) -> tuple[str, ...]:
    if done is not None:
        rounds = done["rounds"]
        curve = list(zip(rounds["round"], rounds["test_accuracy"], strict=True))
        state, count, seconds = done["status"], done["summary"]["rounds"], done["summary"]["seconds"]
    elif line is not None:
        state, count, curve, seconds = "in progress", line["rounds"], line["curve"], line["seconds"]
    else:
        return ("not begun", f"0 of {run.config.rounds}", *["-"] * (len(targets) + 3))
    scores = [100 * accuracy for _, accuracy in curve if accuracy is not None]
    shown = [f"{scores[-1]:.2f}", f"{max(scores):.2f}"] if scores else ["-", "-"]
    reached = [first_at((accuracy for _, accuracy in curve), target) for target in targets]
    shown += ["-" if at is None else str(curve[at][0]) for at in reached]
    return (state, f"{count} of {run.config.rounds}", *shown, f"{seconds / 3600:.1f}")
