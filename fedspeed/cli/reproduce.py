"""`fedspeed reproduce`."""

from __future__ import annotations

import argparse
import math
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import UserError, unknown
from .options import split_pairs
from .output import show_table, width
from .progress import ManyRunsProgress

if TYPE_CHECKING:
    from rich.console import Console

    from ..reproduce import Reproduction
    from ..reproduce.recipes import Recipe
    from ..reproduce.runs import Run
    from ..reproduce.table import Cell, Sheet
    from ..reproduce.verdicts import Verdict

EPILOG = """\
Finished runs are kept in OUT/runs.jsonl.gz and not repeated; config, data and results version identify them. A command
that was stopped or killed continues when it is repeated. Nothing is downloaded: cells whose data are not on this
machine are not run (`fedspeed data fetch NAME` downloads them), and a page that has numbers for them stays unchanged.

examples:
  fedspeed reproduce list
  fedspeed reproduce table7 --preset smoke
  fedspeed reproduce table7 fig1 --preset cnn --seeds 3
  fedspeed reproduce all --preset mlp
  fedspeed reproduce table7 --preset cnn --again
  fedspeed reproduce table1 --preset paper-2pct-mixed --only FedSpeed --split iid
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the recipes, the preset, and which of their runs are made."""
    parser.add_argument("names", nargs="+", metavar="NAME", help="table1, fig2, ..., several of them, `all`, or `list`")
    about = "the scale: paper (a GPU), cnn, mlp (two cores), smoke; default cnn"
    parser.add_argument("--preset", default="cnn", help=about)
    parser.add_argument("--seeds", type=int, metavar="N", help="number of seeds, 0..N-1; default: the recipe's")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="default results/iclr2023/PRESET")
    about = "runs side by side; default: one per core where runs are small"
    parser.add_argument("--jobs", type=int, metavar="N", help=about)
    about = "make the runs of this row only; repeat for several"
    parser.add_argument("--only", action="append", default=[], metavar="ROW", help=about)
    about = "make the runs of this split only, such as iid"
    parser.add_argument("--split", action="append", default=[], metavar="SPLIT", help=about)
    about = "a config key for every run, such as device=cuda or rounds=20; these runs are kept beside the stored ones"
    parser.add_argument("--set", dest="sets", action="append", default=[], metavar="KEY=VALUE", help=about)
    parser.add_argument("--again", action="store_true", help="repeat every run elsewhere and compare the numbers")
    parser.add_argument("--render", action="store_true", help="run nothing: tables and figures from the stored runs")
    parser.add_argument("--quiet", action="store_true", help="print nothing but errors")


def main(args: argparse.Namespace, console: Console) -> int:
    """Make the missing runs, then tables, figures and verdicts."""
    from ..reproduce import Reproduction
    from ..reproduce.page import write_progress
    from ..reproduce.recipes import SUITE, find_recipe, recipes

    if "list" in args.names:
        _list(console)
        return 0
    for name, value in (("seeds", args.seeds), ("jobs", args.jobs)):
        if value is not None and value < 1:
            raise UserError(f"--{name}: expected a whole number >= 1, got {value}")
    named = [find_recipe(name) for name in args.names if name != "all"]
    chosen = [r for r in recipes().values() if args.preset in r.presets] if "all" in args.names else named
    if not chosen:
        raise UserError(f"no recipe has the preset {args.preset!r}; see `fedspeed reproduce list`")
    for recipe in chosen:
        recipe.preset(args.preset)
    _check_selection(chosen, args)
    out = args.out or Path("results") / SUITE / args.preset
    work = Reproduction(args.preset, out, args.seeds, _overrides(args.sets))
    if args.again:
        return _again(work, chosen, args, console)
    began = time.monotonic()
    if not args.render:
        try:
            _run(work, [recipe for recipe in chosen if recipe.kind == "runs"], args, console)
        except KeyboardInterrupt:
            write_progress(work)
            console.print("stopped; finished work is kept: repeat the command to continue")
            return 130
    work.store.pack()
    lines = _write_pages(work, chosen, out, console)
    if not args.quiet:
        lines.append(f"{time.monotonic() - began:.0f} s for this command; tables, figures and verdicts: {out}")
        console.print("\n" + "\n\n".join(lines), markup=False, no_wrap=True, overflow="ignore", crop=False)
    return 0


def _write_pages(work: Reproduction, chosen: list[Recipe], out: Path, console: Console) -> list[str]:
    """Write the page of every recipe, the progress page and the index; return what to print about them."""
    from ..reproduce.page import index, judged, lost, render, write_progress

    lines: list[str] = []
    for recipe in chosen:
        sheet, verdicts = judged(work, recipe)
        gone = {cell.tables["data"]["name"]: None for cell in lost(work, sheet)}
        if gone:
            lines.append(f"{out / recipe.name}.md is left as it is: {', '.join(gone)} not on this machine; "
                         f"`fedspeed data fetch {next(iter(gone))}` fetches it")  # fmt: skip
            continue
        render(work, recipe, sheet, verdicts)
        lines.append(_shown(sheet, verdicts, out, width(console)))
    needed = [cell for recipe in chosen if recipe.kind == "runs" for cell in recipe.cells(work.preset)]
    for name in dict.fromkeys(cell.tables["data"]["name"] for cell in needed):
        if not work.available(name):
            lines.append(f"not run: {name} is not on this machine; `fedspeed data fetch {name}` gets it")
    for recipe, run in work.kept():
        lines.append(f"{run.label} is finished; {out / 'work' / run.key} is kept, since {recipe.name} continues it")
    if page := write_progress(work):
        lines.append(f"runs are in progress: {page}")
    if index(work) is None:
        lines.append(f"{out / 'README.md'} is left as it is: it has numbers of data that are not on this machine")
    return lines


def _check_selection(chosen: list[Recipe], args: argparse.Namespace) -> None:
    """Raise if --only or --split names what no recipe has."""
    cells = [cell for recipe in chosen for cell in recipe.cells(args.preset)]
    rows = {cell.row: None for cell in cells}
    splits = {cell.tables.get("split", ""): None for cell in cells}
    for what, given, known in (("row", args.only, rows), ("split", args.split, splits)):
        for name in given:
            if name not in known:
                raise unknown(what, name, known)


def _shown(sheet: Sheet, verdicts: Sequence[Verdict], out: Path, wide: int) -> str:
    """Return the primary table as wide as fits, its notes, the verdicts, and the path of the whole page."""
    from ..report.tables import fit
    from ..reproduce.page import caption, notes, primary, said

    header, lines = primary(sheet)
    table, dropped = fit((sheet.name, *header[1:]), lines, range(len(header) - 1, 0, -1), wide)
    more = [f"no room for {', '.join(dict.fromkeys(dropped))}"] if dropped else []
    more += ["part of the data set only: nothing is decided"] if sheet.partial else []
    more += [textwrap.shorten(note, 160, placeholder=" ...") for note in notes(sheet)]
    more += [f"{verdict.verdict}: {said(verdict)}" for verdict in verdicts]
    about = [textwrap.fill(text, wide, subsequent_indent="  ") for text in (sheet.title, f"{caption(sheet)}:")]
    below = [textwrap.fill(text, wide, initial_indent="- ", subsequent_indent="  ") for text in more]
    return "\n".join([*about, "", table, "", *below, f"page: {out / sheet.name}.md"])


def _overrides(given: list[str]) -> dict[str, Any]:
    """Parse `rounds=20`, `data.shrink=1` into tables of config keys."""
    tables: dict[str, Any] = {}
    for path, value in split_pairs(given, "--set", "KEY=VALUE such as rounds=20 or data.shrink=1"):
        target, dot, key = path.partition(".")
        if dot:
            tables.setdefault(target, {})[key] = value
        else:
            tables[target] = value
    return tables


def _run(work: Reproduction, chosen: list[Recipe], args: argparse.Namespace, console: Console) -> None:
    """Make the missing runs in the recipes' order; those with tuned settings after their grids."""
    title = chosen[0].name if len(chosen) == 1 else f"{len(chosen)} recipes"

    def wanted(cell: Cell) -> bool:
        return (not args.only or cell.row in args.only) and (not args.split or cell.tables.get("split") in args.split)

    for part in ("", ", tuned"):
        missing: dict[str, Run] = {}
        for recipe in chosen:
            for run in work.missing(work.grid(recipe, wanted) + work.runs(recipe, wanted)):
                missing.setdefault(run.key, run)
        # the runs that others continue are made with those
        begun = {run.first.key for run in missing.values() if run.first is not None}
        _make(work, title + part, [run for run in missing.values() if run.key not in begun], args, console)


def _make(work: Reproduction, title: str, runs: list[Run], args: argparse.Namespace, console: Console) -> None:
    from ..reproduce.runs import make
    from ..utils.processes import cores

    if not runs:
        return
    small = all(run.config.backend == "serial" for run in runs)
    jobs = args.jobs or (cores() if small else 1)
    if not args.quiet:
        side = f", {min(jobs, len(runs))} side by side" if min(jobs, len(runs)) > 1 else ""
        console.print(f"{title}: {len(runs)} runs to make{side}")
    with ManyRunsProgress(console, title, runs, not args.quiet, every=10.0) as shown:
        for run in make(runs, work.store, jobs, shown.on_part, shown.on_done):
            console.print(f"{run.label}: another command is making it; it is left to that")


def _again(work: Reproduction, chosen: list[Recipe], args: argparse.Namespace, console: Console) -> int:
    """Repeat the stored runs and compare every number except times; return the exit code."""
    import tempfile

    from ..reproduce import Reproduction
    from ..reproduce.runs import apart

    bad = compared = 0
    with tempfile.TemporaryDirectory() as place:
        second = Reproduction(work.preset, Path(place), work.seeds, work.overrides)
        for recipe in chosen:
            if recipe.kind != "runs":
                continue
            stored = [run for run in work.runs(recipe) if work.store.get(run.key)]
            _make(second, f"{recipe.name} again", second.missing(stored), args, console)
            for run in stored:
                first, now = work.store.get(run.key), second.store.get(run.key)
                far = apart(first, now) if first and now else math.inf
                compared, bad = compared + 1, bad + (far > 0)
                if far > 0:
                    commit = (first and first.get("commit")) or "not recorded"
                    where = " and ".join(_cpu(result) for result in (first, now))
                    console.print(
                        f"{run.label}: the numbers differ (stored by commit: {commit}; processors: {where}), "
                        f"relatively by at most {far:.1e}"
                    )
    console.print(f"{compared} runs made again: {compared - bad} have the same numbers, {bad} do not")
    return 1 if bad or not compared else 0


def _cpu(result: Any) -> str:
    """Return the processor on which a run was made; it decides how sums are rounded."""
    found = (result or {}).get("summary", {}).get("environment") or {}
    return " of ".join(str(found[key]) for key in ("cpu", "vendor") if key in found) or "not recorded"


def _list(console: Console) -> None:
    from ..reproduce.recipes import minutes_of, recipes

    rows = []
    for recipe in recipes().values():
        expected = {name: float(f"{minutes_of(recipe, name):.2g}") for name in recipe.presets}  # two digits
        scales = ", ".join(f"{name} {minutes:g}" for name, minutes in expected.items())
        rows.append((recipe.name, recipe.title, scales))
    show_table(console, ("name", "what", "presets (expected minutes; of `paper` on one GPU)"), rows)
    console.print("\nMinutes are those of the runs that no recipe above makes, computed from counted pictures.")
    console.print("next: fedspeed reproduce table7 --preset smoke")
