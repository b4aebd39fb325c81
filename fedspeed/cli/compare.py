"""`fedspeed compare`, and what it shares with other commands that make several runs: seeds, jobs, how to continue."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import textwrap
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config.config import Config
from ..config.warmup import shared
from ..errors import UserError
from ..experiments.batch import RunTask, make_runs, one_command, unfinished
from ..experiments.compare import planned_runs
from ..experiments.sweep import rows_of, tasks_of
from ..methods import METHODS, WRAPPERS, build
from ..report import tables
from ..report.figures import chart
from ..report.labels import find_label
from ..report.tables import CLIENTS
from ..runs.directory import RunDir
from ..server.observers import Observers
from ..utils.processes import cores
from . import options, report
from .methods import grouped
from .output import show_table, width
from .progress import ManyRunsProgress

if TYPE_CHECKING:
    from rich.console import Console

    from ..report.comparison import Comparison
    from ..report.run_files import Row

Labelled = tuple[str, dict[str, Any]]
"""A method's text, and the tables of its config."""
EPILOG = """\
Methods may have fields: fedspeed:rho=0,lam=100; and wrappers: fedspeed+topk:0.01+dp:noise=1. For a seed all methods
get the same splits, initial models, cohorts and batches, and one learning-rate decay; the paper gave some methods a
slower one (--paper-decay). --warmup and --follow-lr apply to the rate of every method, and to another field in the
methods that have it.

A command that was stopped continues when it is repeated with the same --out: finished runs are kept. With folders in
place of methods nothing is run: table, figure and differences are made from their runs; --network and --devices then
compute the simulated time of those runs for another network.

examples:
  fedspeed compare fedavg fedspeed --data digits --clients 50 --active 5 --seeds 3 --out runs/first
  fedspeed compare fedspeed:rho=0 fedspeed:rho=0.05 fedspeed:rho=0.1 --seeds 5 --jobs 2
  fedspeed compare all --data digits --split dirichlet:0.3 --clients 50 --active 5      by family and cost
  fedspeed compare fedspeed fedspeed+fedinit:0.05
  fedspeed compare fedspeed fedspeed+dp:noise=1,clip=0.5 fedspeed+topk:0.01 fedspeed+quantise:4
  fedspeed compare runs/first --baseline fedspeed      a folder of runs, or several run directories
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the methods or folders, the baseline, and an option per config key."""
    about = "NAME, NAME:field=value,..., `all`; or folders of runs"
    parser.add_argument("methods", nargs="+", metavar="METHOD", help=about)
    parser.add_argument("--file", metavar="FILE.toml", help="a config for everything but the method")
    configure_runs(parser)
    parser.add_argument("--baseline", metavar="METHOD", default="", help="method to compare with; default the first")
    parser.add_argument("--paper-decay", action="store_true", help="the same as --preset paper")
    report.add_look(parser)
    options.configure(parser, seeds=True)


def main(args: argparse.Namespace, console: Console) -> int:
    """Run every method with every seed that is not done, or read runs; write tables and figures."""
    from ..report.comparison import Comparison, configured_targets

    show = not (args.quiet or args.json)
    out = options.output_folder(args, "compare")
    folders = [text for text in args.methods if is_folder(text)]
    if folders and len(folders) < len(args.methods):
        other = next(text for text in args.methods if text not in folders)
        raise UserError(f"compare: expected methods to run or folders of runs, got both ({other}, {folders[0]})")
    failed: dict[str, str] = {}
    look = report.look_of(args)
    if folders:
        rows, out = _read(args, out, [Path(text) for text in folders], console if show else None)
        targets = args.targets or configured_targets(rows)
        look.check([row.label for row in rows], targets, [column.name for column in tables.client_columns(rows)])
        result = Comparison(rows, targets, args.baseline, look)
        result.write(out)
    else:
        with one_command(out):
            rows, failed, targets = _run(args, out, console, show)
            lost = failed and not find_label(args.baseline, [row.label for row in rows])  # all its runs failed
            result = Comparison(rows, targets, "" if lost else args.baseline, look)
            result.write(out)
    if args.json:
        console.print_json(json.dumps({"out": str(out), **result.data(), "failed": failed}))
    elif show:
        show_comparison(result.named(papers=False), console, out)
        page = shlex.join(["fedspeed", "report", *(folders or [str(out)])])
        console.print(f"next: {page}   (one page: who wins, by how much, is it real, at what cost)")
    return 2 if failed else 0


def is_folder(text: str) -> bool:
    """Return whether an argument is a folder of runs and not a method: `./fedavg` is a folder, `fedavg` a method."""
    if text in (*METHODS, *WRAPPERS, "all"):
        return False
    path = Path(text)
    if not path.is_dir() and os.sep in text and ".py" not in text:
        raise UserError(f"compare: there is no folder {text}; expected methods, or folders of runs")
    return path.is_dir()


def _read(args: argparse.Namespace, out: Path, given: list[Path], console: Console | None) -> tuple[list[Row], Path]:
    """Return the rows of existing runs, and the output folder: theirs if they are in one folder."""
    from ..report.comparison import costed
    from ..report.run_files import collect

    asked = [
        *(key for key in options.tables(args) if key not in ("targets", "network", "devices")),
        *(name for name in ("seeds", "log") if getattr(args, name)),
    ]
    if asked:
        flag = "--" + asked[0].replace("_", "-")
        raise UserError(f"compare: with folders nothing is run, so {flag} has no use; leave it out")
    rows, left_out = collect(given)
    if args.network or args.devices:
        rows = [replace(row, runs=[costed(run, args.network, args.devices) for run in row.runs]) for row in rows]
    if console:
        for reason in left_out:
            console.print(f"left out: {reason}", style="yellow")
    first, alone = given[0], len(given) == 1 and not args.out
    beside = alone and not RunDir(first).config_file.is_file() and not (first / "table.md").exists()
    return rows, first if beside else out


def _run(args: argparse.Namespace, out: Path, console: Console, show: bool) -> tuple[list[Row], dict[str, str], Any]:
    """Make the missing runs; return all rows, label -> reason of failures, and the targets."""
    base, seeds = base_tables(args), parse_seeds(args.seeds or "3")
    check_runs(args)
    tables = expand(args.methods, base, console if show else None)
    if "all" in args.methods:
        tables, groups = by_cost(tables)
        if show:
            show_table(console, ("family", "gradients per step", "vectors down / up", "methods"), groups)
            console.print()
    if show:
        options.print_presets(console, tables)
    names = [text for text, _ in tables]
    if args.baseline and not find_label(args.baseline, names):
        raise UserError(f"--baseline: expected one of {', '.join(names)}, got {args.baseline!r}")
    how = {"overwrite": args.overwrite, "log": args.log}
    planned, targets = planned_runs(tables, seeds, out, **how)
    measured = str(base.get("client_metrics", ""))
    of_clients = [name for name in CLIENTS if measured and (name != "personalised" or name in measured)]
    report.look_of(args).check(names, targets, of_clients)
    failed = make_shown(args, tasks_of(planned), out, console, show)
    return rows_of("compare", planned, failed), failed, targets


def base_tables(args: argparse.Namespace) -> dict[str, Any]:
    """Return the config of all methods, with one learning-rate decay unless --paper-decay is given."""
    for text in args.sets:
        if options.parse_set(text)[0] == "method":
            raise UserError(f"--set: {args.command} has several methods, got {text!r}; write fedspeed:rho=0.05 instead")
    if (paper := getattr(args, "paper_decay", False)) and args.lr_decay is not None:
        raise UserError("--paper-decay and --lr-decay: expected one of them, got both; leave one out")
    base = options.tables(args)
    base.pop("method", None)
    if paper and base.get("lr_schedule"):
        raise UserError("--paper-decay and --lr-schedule: expected one of them, got both; leave one out")
    if paper:
        base["lr_decay"] = 0.0  # 0: the paper's decay of each method
    return base


def expand(given: list[str], base: dict[str, Any], console: Console | None) -> list[Labelled]:
    """Return every method's text and config; `all` is every method that accepts the setting, the others are printed."""
    asked = [(text, name) for text in given for name in (METHODS if text == "all" else (options.lowered(text),))]
    scheduled = base.get("warmup") or base.get("follow_lr")
    rivals = {name: build(options.parse_method(name)) for _, name in asked} if scheduled else {}
    found: list[Labelled] = []
    for text, name in asked:
        tables = {**base, "method": options.parse_method(name)}
        if rivals:
            tables |= shared(base, rivals[name], rivals.values())
        try:
            Config.from_dict(tables)
        except UserError as error:
            if text != "all" or name == "fedspeed":  # the setting is wrong for all methods
                raise
            if console:
                console.print(f"left out: {error}", style="yellow")
        else:
            found.append((name, tables))
    return found


def by_cost(tables: list[Labelled]) -> tuple[list[Labelled], list[tuple[str, ...]]]:
    """Sort the methods of `all` by family and cost; return them, and the groups of equal cost as table rows."""
    order = grouped(text for text, _ in tables if text in METHODS)
    found: dict[tuple[str, str, str], list[str]] = {}
    for family, name, c in order:
        found.setdefault((family, f"{c.grads:.3g}", f"{c.down} / {c.up}"), []).append(name)
    names = iter([name for _, name, _ in order])
    moved = [next(names) if text in METHODS else text for text, _ in tables]
    own = dict(tables)
    return [(text, own[text]) for text in moved], [(*costs, ", ".join(some)) for costs, some in found.items()]


def show_comparison(found: Comparison, console: Console, out: Path) -> None:
    """Print table, differences and chart; columns that do not fit are named."""
    wide = width(console)
    below = [textwrap.fill(note, wide) for note in (found.note, found.settings)]
    below += ["", *gap_lines(found, wide)] if found.gaps else []
    drawing = chart(found.rows, console.width)
    below += ["", drawing] if drawing else []
    table, dropped = tables.fit(*found.table, [column.keep for column in found.columns], wide)
    files = f"table.md, .csv, .tex and .json; {found.figure_name}.png, .svg and .pdf"
    print_table(console, table, dropped, below, files, out)


def gap_lines(found: Comparison, wide: int) -> list[str]:
    """Return the question that the table of differences answers, and the table."""
    return [textwrap.fill(f"{found.question}:", wide), tables.fit(*found.gap_table, tables.GAP_KEEP, wide)[0]]


def configure_runs(parser: argparse.ArgumentParser) -> None:
    """Add --seeds and --jobs."""
    parser.add_argument("--seeds", metavar="N|A,B,..", help="number of seeds (0..N-1), or a list; default 3")
    about = "number of runs side by side; 0: one per core; default 1"
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help=about)


def check_runs(args: argparse.Namespace) -> None:
    """Raise for options that no run could be made with."""
    Observers(args.log)  # raises for an unknown observer
    if args.jobs < 0:
        raise UserError(f"--jobs: expected a whole number >= 0, got {args.jobs}")


def make_shown(
    args: argparse.Namespace, tasks: Sequence[RunTask], out: Path, console: Console, show: bool
) -> dict[str, str]:
    """Make the runs that are not done, with a progress display; return label -> reason of failures."""
    left = unfinished(tasks)
    if len(left) < len(tasks) and show:
        console.print(f"{len(tasks) - len(left)} of {len(tasks)} runs are done already and kept")
    try:
        with ManyRunsProgress(console, args.command, left, show) as shown:
            return make_runs(left, args.jobs or cores(), shown, args.traceback)
    except KeyboardInterrupt as stopped:
        given = [text for text in args.argv if text != "--overwrite"]
        again = shlex.join(["fedspeed", *given, *([] if args.out else ["--out", str(out)])])
        raise type(stopped)(f"`{again}` continues it") from None


def print_table(console: Console, table: str, dropped: list[str], below: list[str], files: str, out: Path) -> None:
    """Print a table, the names of the columns that did not fit, the lines below it, and the files."""
    wide = width(console)
    missing = [textwrap.fill(f"no room for {', '.join(dropped)}: see {out / 'table.md'}", wide)] if dropped else []
    parts = ["", table, "", *missing, *below, "", textwrap.fill(f"files: {files}", wide), f"   in: {out}"]
    console.print("\n".join(parts), no_wrap=True, overflow="ignore", crop=False)


def parse_seeds(text: str) -> list[int]:
    """Parse `3` into 0, 1, 2; `5,7` into 5, 7; `7,` into 7 alone."""
    try:
        numbers = [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < (0 if "," in text else 1):
        raise UserError(f"--seeds: expected how many, such as 3, or which, such as 5,7; got {text!r}")
    return list(range(numbers[0])) if "," not in text else numbers
