"""`fedspeed compare`."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from ..config import Config
from ..errors import Diverged, UserError
from ..methods import METHODS
from ..run import run_config
from ..rundir import refuse_a_run
from . import options
from .progress import Live

if TYPE_CHECKING:
    from rich.console import Console

    from ..report.runs import Row

ONE_DECAY = 0.998
"""The learning-rate decay every method gets unless told otherwise: FedAvg's in the paper."""

EPILOG = """\
A method may carry fields of its own: fedspeed:rho=0,lam=100. All methods get the same splits, initial models,
cohorts and batches for a seed, and one learning-rate decay; the paper gave some methods a slower one (--paper-decay).

examples:
  fedspeed compare fedavg fedspeed --data digits --clients 50 --active 5 --seeds 3
  fedspeed compare fedspeed:rho=0 fedspeed:rho=0.05 fedspeed:rho=0.1 --seeds 5
  fedspeed compare all --data digits --split dirichlet:0.3 --clients 50 --active 5
  fedspeed compare fedspeed fedinit:base=fedspeed,beta=0.05
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Options of `compare`."""
    parser.epilog = EPILOG
    parser.add_argument("methods", nargs="+", metavar="METHOD", help="NAME, NAME:field=value,..., or `all`")
    parser.add_argument("--file", metavar="FILE.toml", help="a config for everything but the method")
    parser.add_argument("--seeds", default="3", metavar="N|A,B,..", help="how many seeds (0..N-1), or which; default 3")
    parser.add_argument("--paper-decay", action="store_true", help="give each method the paper's learning-rate decay")
    options.configure(parser, seeds=True)


def main(args: argparse.Namespace, console: Console) -> int:
    """Run every method with every seed, then one table, one chart, one PNG."""
    from ..report.figures import curves
    from ..report.runs import COLUMNS, Row, RunFiles, chart, markdown, table

    for text in args.sets:
        if text.strip().startswith("method."):
            raise UserError(f"--set: compare has several methods, got {text!r}; write fedspeed:rho=0.05 instead")
    if args.paper_decay and args.lr_decay is not None:
        raise UserError("--paper-decay and --lr-decay: expected one of them, got both; leave one out")
    show = not (args.quiet or args.json)
    base, seeds = options.tables(args), parse_seeds(args.seeds)
    base.pop("method", None)
    if args.paper_decay:
        base["lr_decay"] = 0.0
    elif args.lr_decay is None:
        base["lr_decay"] = base.get("lr_decay") or ONE_DECAY
    plans = [(text, [Config.from_dict({**base, "method": parse_method(text), "seed": s}) for s in seeds])
             for text in expand(args.methods, base, console if show else None)]  # fmt: skip
    out = options.output_folder(args, "compare")
    folders = [out / f"{folder_name(text)}-s{config.seed}" for text, configs in plans for config in configs]
    for i, folder in enumerate(folders):
        if folder in folders[:i]:
            raise UserError(f"compare: expected different methods and seeds, got {folder.name} twice; leave one out")
        refuse_a_run(folder, args.overwrite)
    rows: list[Row] = []
    with Live(console, plans[0][1][0].rounds, "compare", show, runs=len(plans) * len(seeds)) as live:
        for text, configs in plans:
            runs = []
            for config in configs:
                live.begin(f"{text} seed {config.seed}")
                folder = out / f"{folder_name(text)}-s{config.seed}"
                try:
                    run_config(config, folder, overwrite=args.overwrite,
                               on_round=live.on_round, progress=live.on_progress)  # fmt: skip
                except Diverged as error:
                    if show:
                        console.print(f"{error}", style="red")
                runs.append(RunFiles.read(folder))
            rows.append(Row(text, runs))
    lines = table(rows)
    picture = curves(rows, out / "accuracy.png", title=_title(plans[0][1][0], len(seeds)))
    (out / "table.md").write_text(markdown(COLUMNS, lines), encoding="utf-8")
    if args.json:
        console.print_json(
            json.dumps({"out": str(out), "rows": [dict(zip(COLUMNS, line, strict=True)) for line in lines]})
        )
    elif show:
        _print(console, COLUMNS, lines, chart(rows))
        console.print(f"\nmean +- standard deviation over {len(seeds)} seed(s); decay "
                      f"{base['lr_decay'] or 'of the paper'}")  # fmt: skip
        console.print(f"figure: {picture}\ntable:  {out / 'table.md'}")
        console.print(
            f"next: fedspeed methods {plans[-1][1][0].method.name}   (what it does, and what its fields mean)"
        )
    return 0


def expand(given: list[str], base: dict[str, Any], console: Console | None) -> list[str]:
    """`all` stands for every method that the setting allows; one that refuses it is left out with its reason."""
    names: list[str] = []
    for text in given:
        for name in METHODS if text == "all" else (text,):
            try:
                Config.from_dict({**base, "method": parse_method(name)})
            except UserError as error:
                if text != "all" or name == "fedspeed":  # a bad setting, not a method that cannot run in it
                    raise
                if console:
                    console.print(f"left out: {error}", style="yellow")
            else:
                names.append(name)
    return names


def parse_seeds(text: str) -> list[int]:
    """`3` -> 0, 1, 2; `5,7` -> 5, 7; `7,` -> 7 alone."""
    try:
        numbers = [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < (0 if "," in text else 1):
        raise UserError(f"--seeds: expected how many, such as 3, or which, such as 5,7; got {text!r}")
    return list(range(numbers[0])) if "," not in text else numbers


def parse_method(text: str) -> dict[str, Any]:
    """`fedspeed:rho=0.05,lam=100` -> a method's table; `file.py:Class:rho=0.05` for one of your own."""
    name, _, given = text.partition(":")
    if name.endswith(".py"):
        cls, _, given = given.partition(":")
        name = f"{name}:{cls}"
    fields: dict[str, Any] = {"name": name}
    for part in given.split(",") if given else []:
        key, found, value = part.partition("=")
        if not found:
            raise UserError(f"method {text!r}: expected NAME:field=value,..., found {part!r}")
        fields[key.strip()] = options.parse_value(value)
    return fields


def folder_name(text: str) -> str:
    """A method's text as a folder's name."""
    return "".join(c if c.isalnum() or c in "-._=" else "_" for c in text)


def _title(config: Config, seeds: int) -> str:
    size = f"{config.active} of {config.clients} clients, " if config.clients else ""
    return f"{config.data.name}, {config.split}, {size}{seeds} seed(s)"


def _print(console: Console, header: tuple[str, ...], lines: list[tuple[str, ...]], drawing: str) -> None:
    from rich.table import Table

    shown = Table(box=None, pad_edge=False)
    for i, title in enumerate(header):
        shown.add_column(title, justify="left" if i == 0 else "right", no_wrap=True)
    for line in lines:
        shown.add_row(*line)
    console.print()
    console.print(shown)
    console.print()
    console.print(drawing, markup=False)
