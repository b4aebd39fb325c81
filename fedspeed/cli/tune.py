"""`fedspeed tune`."""

from __future__ import annotations

import argparse
import json
import math
import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import UserError
from ..experiments.tune import FIRST
from ..experiments.tune.strategies import STRATEGIES
from . import compare, options
from .compare import base_tables, expand
from .options import parse_method
from .output import show_table, width

if TYPE_CHECKING:
    from rich.console import Console

    from ..experiments.batch import RunTask
    from ..experiments.tune.result import Tuned
    from ..experiments.tune.tuner import Tuning

EPILOG = """\
Every method may spend the same number of gradients on its trials: one with two gradients per step gets half as many
trials. Trials are scored on held-out data, --validation: 0.2 of every client by default, or clients:0.2 for clients
that do not train; they never read the test set. The chosen points then run with fresh --seeds, train on all training
data and are scored on the test set.

Tuned are lr and the fields that a method declares (lam, mu and alpha of prox terms, rho of ascent steps, eta_g of
adaptive servers); --dry-run lists them. A field with a value, from --lr 0.1 or fedspeed:rho=0, is not tuned.
  --space fedspeed.lam=1,10,100        these values          --space lr=0.01..1:log       a range, for all methods

strategies: random (the defaults first), halving (many points for few rounds, the better third continues in the runs
it has), optuna (its TPE; pip install 'fedspeed[optuna]'). For a grid of values: fedspeed sweep --grid.

A command that was stopped continues when it is repeated with the same --out, because trials are run directories.

examples:
  fedspeed tune fedavg fedspeed --budget 1e5 --data digits --clients 50 --active 5 --rounds 60 --batch-size 10
  fedspeed tune fedavg fedprox fedspeed --budget 1e5 --strategy halving --validation clients:0.2 --out runs/tuned
  fedspeed tune fedspeed:rho=0 fedspeed --budget 5e4 --space lam=1,10,100 --space lr=0.01..1:log --dry-run
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the methods, the budget, the search and an option per config key."""
    parser.add_argument("methods", nargs="+", metavar="METHOD", help="NAME, NAME:field=value,... or `all`")
    parser.add_argument("--budget", required=True, metavar="N", help="gradients for the trials of each method")
    parser.add_argument("--strategy", default="random", metavar="|".join(STRATEGIES), help="default random")
    about = "values to try; may be repeated"
    parser.add_argument("--space", action="append", default=[], metavar="[METHOD.]FIELD=VALUES", help=about)
    about = f"number of seeds of a trial ({FIRST}, {FIRST + 1}, ...), or a list; default 1"
    parser.add_argument("--tune-seeds", metavar="N|A,B,..", default="1", help=about)
    parser.add_argument("--baseline", metavar="METHOD", default="", help="method to compare with; default the first")
    parser.add_argument("--dry-run", action="store_true", help="print the search spaces and costs; run nothing")
    parser.add_argument("--file", metavar="FILE.toml", help="a config for everything but the method")
    compare.configure_runs(parser)
    options.configure(parser, seeds=True)


def main(args: argparse.Namespace, console: Console) -> int:
    """Tune, judge, and print the result."""
    from ..experiments.tune import finish
    from ..experiments.tune.result import used

    compare.check_runs(args)
    if args.overwrite:
        raise UserError("--overwrite: tune always continues the runs in its folder; choose another --out")
    if args.test_set is not None:
        raise UserError("--test-set: trials never see the test set, judged runs always do; leave it out")
    show = not (args.quiet or args.json)
    base = base_tables(args)
    tables = expand(args.methods, base, console if show else None)
    texts = [text for text, _ in tables]
    if len(set(texts)) < len(texts):
        twice = next(text for text in texts if texts.count(text) > 1)
        raise UserError(f"tune: expected every method once, got {twice} twice; leave one out")
    out = Path(args.out or "runs") if args.dry_run else options.output_folder(args, "tune")
    tuning = _tuning(args, base, texts, out)
    if show:
        options.print_presets(console, tables)
        _print_plan(tuning, console)
    if args.dry_run:
        if args.json:
            console.print_json(json.dumps(used(tuning)))
        return 0

    def make(tasks: list[RunTask]) -> dict[str, str]:
        return compare.make_shown(args, [replace(task, log=tuple(args.log)) for task in tasks], out, console, show)

    found = finish(tuning, make, args.baseline)
    if args.json:
        console.print_json(json.dumps({"out": str(out), **found.data()}))
    elif show:
        _report(found, console)
    return 2 if found.failed else 0


def _tuning(args: argparse.Namespace, base: dict[str, Any], texts: list[str], out: Path) -> Tuning:
    from ..experiments.tune.tuner import Tuning

    try:
        budget = float(args.budget)
    except ValueError:
        budget = math.nan
    if math.isnan(budget):
        raise UserError(f"--budget: expected a number of gradients such as 1e5, got {args.budget!r}")
    given = compare.parse_seeds(args.tune_seeds)
    seeds = [FIRST + seed for seed in given] if "," not in args.tune_seeds else given
    judges = compare.parse_seeds(args.seeds or "3")
    methods = {text: parse_method(text) for text in texts}
    return Tuning(methods, base, budget, args.strategy, args.space, seeds, judges, out)


def _print_plan(tuning: Tuning, console: Console) -> None:
    """Print the search spaces, the data and the costs."""
    from rich.table import Column

    rows = []
    for label, space in tuning.spaces.items():
        price = tuning.price(label) / len(tuning.tune_seeds)
        tried = ", ".join(f"{name} {axis}" for name, axis in space.items())
        rows.append((label, f"{price:,.0f}", f"{tuning.budget // price:,.0f}", tried))
    last = Column("what is tried", overflow="fold")
    show_table(console, ("method", "gradients of a run", "runs in the budget", last), rows)
    kind, _, amount = tuning.held_out.rpartition(":")
    held = f"{amount} of the clients" if kind else f"{amount} of every client"
    console.print(
        f"{tuning.strategy}, {tuning.budget:,.0f} gradients for each method, runs of {tuning.rounds} rounds; "
        f"tuned on {held}, which no client trains on, seeds {_seeds(tuning.tune_seeds)}; the test set is for judging, "
        f"seeds {_seeds(tuning.seeds)}"
    )


def _seeds(seeds: Any) -> str:
    return ", ".join(map(str, seeds))


def _report(found: Tuned, console: Console) -> None:
    """Print the chosen points, their cost, the best method by budget, and the judged runs."""
    from ..experiments.grid import point_text
    from ..report.figures import draw_text

    used = found.used
    rows = []
    for label, point in found.chosen.items():
        own = [row for row in found.rows if row["method"] == label]
        points, score = len({row["point"] for row in own}), found.scores[label]
        rows.append((label, point_text(tuple(point.items())), _score(score), f"{points}", f"{found.spent[label]:,.0f}"))
    console.print()
    show_table(console, ("method", "chosen", "held-out", "points", "gradients"), rows)
    left = max(used["budget"] - spent for spent in found.spent.values())
    less = "less than one point costs" if found.even else "nothing was left to try"
    console.print(f"budget {used['budget']:,.0f} gradients each; at most {left:,.0f} not spent, {less}")
    best_at = "; ".join(f"{share:.0%} {label} ({_score(score)})" for share, label, score in found.leaders())
    console.print(f"best method at a share of the budget, on held-out data: {best_at}")
    curves = [(label, _filled(curve, found.spent[label])) for label, curve in found.best_so_far.items() if curve]
    if curves and all(y >= 0 for _, curve in curves for _, y in curve):
        console.print("\n" + draw_text(curves, "gradients", console.width), no_wrap=True, overflow="ignore", crop=False)
    seeds = _seeds(used["judging_seeds"])
    console.print(f"\njudged on the test set (accuracy: mean of the last five), seeds {seeds}, which no trial had:")
    judged = []
    for one in found.judged:
        shown = ("loss {:.4g}" if "loss" in one["metric"] else "{:.2%}").format
        interval = "-" if one["low"] is None else f"{shown(one['low'])} to {shown(one['high'])}"
        spread = f"{one['diverged']} diverged" if one["diverged"] else interval
        mean = "-" if one["mean"] is None else shown(one["mean"])
        judged.append((one["method"], mean, spread, f"{one['gradients']:,.0f}"))
    show_table(console, ("method", "test set", "95% interval", "gradients"), judged)
    if found.comparison is not None and found.comparison.gaps:
        question, gaps = compare.gap_lines(found.comparison, width(console))
        console.print(f"\n{question}")
        console.print(gaps, no_wrap=True, crop=False)
    console.print(f"\nfiles: tune.json, trials.csv, budget.png, .svg and .pdf; judged/table.md\n   in: {found.out}")
    page = shlex.join(["fedspeed", "report", str(found.out / "judged")])
    console.print(f"next: {page}   (one page: who wins, by how much, is it real, at what cost)")


def _score(value: float) -> str:
    """Return a score as text: an accuracy, or a loss if it is negative."""
    return f"{value:.2%}" if value >= 0 else f"loss {-value:.4g}"


def _filled(curve: list[tuple[float, float]], last: float) -> list[tuple[float, float]]:
    """Return a step curve at 36 equally spaced places, to be drawn."""
    places = [last * i / 35 for i in range(36)]
    return [(x, max(y for at, y in curve if at <= x)) for x in places if x >= curve[0][0]]
