"""`fedspeed sweep --grid FIELD=A,B,..`: the same run at many points, and what its options say."""

from __future__ import annotations

import argparse
import json
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import UserError
from ..experiments.batch import one_command
from ..experiments.grid import Point, parse_value, points_of
from ..experiments.sweep import MOST_RUNS, outcome, plan, tasks_of
from ..report import tables
from ..utils.processes import cores
from . import options
from .compare import check_runs, configure_runs, make_shown, parse_seeds, print_table
from .output import width

if TYPE_CHECKING:
    from rich.console import Console

EPILOG = """\
Config fields: lr, rounds, split, clients, method, method.rho (or rho), model, model.hidden, data, data.alpha.
Several --grid give all combinations; a --point is one set of values, and a file of points has one table
[[points]] for each. Put values that contain commas in quotes or brackets: --grid 'model.hidden=[32],[64,64]'.

A command that was stopped or killed continues when it is repeated with the same --out: finished runs are kept, and
more values, points and seeds can be added. The bits are those of single runs.

examples:
  fedspeed sweep --grid lr=0.01,0.03,0.1,0.3 --data digits --clients 50 --active 5 --out runs/lr
  fedspeed sweep --grid lr=0.05,0.1 --grid lam=1,10,100 --method fedspeed --seeds 3 --jobs 2 --out runs/heat
  fedspeed sweep --grid method=fedavg,fedspeed --grid split=iid,dirichlet:0.1 --validation 0.1
  fedspeed sweep --point "lr=0.1,rho=0.05" --point "lr=0.1,rho=0.1,method=fedsam"
  fedspeed sweep experiment.toml --points points.toml --seeds 5,7
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the config file, --method, the points, and an option per config key."""
    parser.add_argument("file", nargs="?", metavar="FILE.toml", help="a config for all points; options override it")
    parser.add_argument("--method", metavar="NAME", help="method of all points, or file.py:Class; default fedspeed")
    points(parser)
    configure_runs(parser)
    options.configure(parser, seeds=True)


def points(parser: argparse.ArgumentParser) -> None:
    """Add the options that choose the points."""
    grid = "a field and its values, lr=0.05,0.1; several give all combinations"
    parser.add_argument("--grid", action="append", default=[], metavar="FIELD=A,B,..", help=grid)
    point = "one point, lr=0.1,rho=0.05; may be repeated"
    parser.add_argument("--point", action="append", default=[], metavar="FIELD=A,..", help=point)
    parser.add_argument("--points", metavar="FILE.toml", help="a file with one table [[points]] per point")
    most = f"largest number of runs, a guard against typing errors; default {MOST_RUNS}"
    parser.add_argument("--max-runs", type=int, default=MOST_RUNS, metavar="N", help=most)


def main(args: argparse.Namespace, console: Console) -> int:
    """Run every point with every seed that is not done; write table, figure and page."""
    show = not (args.quiet or args.json)
    base, seeds = options.tables(args), parse_seeds(args.seeds or "3")
    check_runs(args)
    given = given_points(args, len(seeds))
    out = options.output_folder(args, "sweep")
    planned = plan(base, given, seeds, out, overwrite=args.overwrite, log=args.log)
    tasks = tasks_of(planned)
    if show:
        options.print_presets(console, [("all points", base)])
        jobs = min(args.jobs or cores(), len(tasks))
        side = f", {jobs} side by side" if jobs > 1 else ""
        console.print(f"{len(tasks)} runs: {_many(given, 'point')} x {_many(seeds, 'seed')}{side}; into {out}")
    with one_command(out):
        failed = make_shown(args, tasks, out, console, show)
        found = outcome(planned, failed)
        found.write(out)
    if args.json:
        console.print_json(json.dumps({"out": str(out), **found.data(), "failed": failed}, default=str))
    elif show:
        wide = width(console)
        below = [textwrap.fill(found.note, wide), *([""] if found.verdict else [])]
        below += [textwrap.fill(line, wide, subsequent_indent="  ") for line in found.verdict]
        table, dropped = tables.fit(*found.table, found.keep, wide)
        files = "table.md, .csv, .tex and .json; sweep.png, .svg and .pdf; report.html"
        print_table(console, table, dropped, below, files, out)
    return 2 if failed else 0


def _many(things: list[Any], what: str) -> str:
    return f"{len(things)} {what}{'' if len(things) == 1 else 's'}"


def given_points(args: argparse.Namespace, seeds: int) -> list[Point]:
    """Return the points of --grid, --point or --points."""
    given = [f"--{name}" for name in ("grid", "point", "points") if getattr(args, name)]
    if len(given) != 1:
        found = " and ".join(given) + "; leave one out" if given else "none; --grid lr=0.05,0.1 for example"
        raise UserError(f"sweep: expected one of --grid, --point and --points, got {found}")
    if args.grid:
        return points_of(parse_grid(args.grid), None, seeds, args.max_runs)
    points = Path(args.points) if args.points else [parse_point(text) for text in args.point]
    return points_of(None, points, seeds, args.max_runs)


def parse_grid(given: list[str]) -> dict[str, list[Any]]:
    """Parse `["lr=0.05,0.1", "method.lam=1,10"]` into fields and their values."""
    found: dict[str, list[Any]] = {}
    for text in given:
        name, values = options.split_pair(text, "--grid", "FIELD=VALUE,VALUE such as lr=0.05,0.1")
        if name in found:
            raise UserError(f"--grid: expected {name} once, got it twice; put all values into one: {name}=A,B")
        if not values.strip():
            raise UserError(f"--grid: expected values for {name}, such as {name}=1,2; got none")
        found[name] = [_value(name, value) for value in split(values, text)]
    return found


def _value(name: str, text: str) -> Any:
    """Parse the value of a field; a method may have fields and wrappers, `fedspeed:rho=0+topk:0.1`."""
    value = parse_value(text)
    return options.parse_method(value) if name == "method" and isinstance(value, str) else value


def parse_point(text: str) -> Point:
    """Parse `lr=0.1,rho=0.05` into a point."""
    point: Point = {}
    for part in split(text, text):
        name, value = options.split_pair(part, "--point", "FIELD=VALUE,FIELD=VALUE such as lr=0.1,rho=0.05")
        if not value.strip():
            raise UserError(f"--point: expected a value for {name}, such as {name}=1; got none")
        if name in point:
            raise UserError(f"--point: expected one value for {name}, got two in {text!r}; leave one out")
        point[name] = _value(name, value)
    return point


def split(text: str, whole: str) -> list[str]:
    """Split at commas that are not in quotes or brackets.

    Example:
        >>> split("[32],[64,64]", "")
        ['[32]', '[64,64]']
    """
    parts, depth, quote = [""], 0, ""
    for sign in text:
        if quote or sign in "\"'":
            quote = "" if sign == quote else quote or sign
        depth += 0 if quote else (sign in "[{") - (sign in "]}")
        if sign == "," and not depth and not quote:
            parts.append("")
        else:
            parts[-1] += sign
    if not all(part.strip() for part in parts):
        raise UserError(f"sweep: expected a value between commas, got {whole!r}")
    return parts
