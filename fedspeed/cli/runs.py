"""`fedspeed runs`."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import UserError
from ..utils.registry import file_of

if TYPE_CHECKING:
    from rich.console import Console

    from ..report.run_files import RunFiles

EPILOG = """\
examples:
  fedspeed runs                      the runs below the folder runs/
  fedspeed runs runs/first results   those of other folders
"""
AGES = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the folders."""
    parser.epilog = EPILOG
    parser.add_argument("folders", nargs="*", default=["runs"], metavar="FOLDER", help="folders of runs; default runs")


def main(args: argparse.Namespace, console: Console) -> int:
    """Print one line per run, the newest first."""
    from rich.table import Table

    from ..report.run_files import read_any
    from ..runs.directory import CONFIG

    found = {file.parent: _written(file.parent) for at in args.folders for file in Path(at).rglob(CONFIG)}
    if not found:
        raise UserError(f"{args.folders[0]}: expected run directories below it, found none; `fedspeed run` makes one")
    table = Table("run", "method", "data", "rounds", "score", "state", "written", box=None, pad_edge=False)
    for path in sorted(found, key=lambda path: -found[path]):
        try:
            cells = _cells(read_any(path))
        except UserError:  # `fedspeed verify` says what is wrong
            cells = ("", "", "", "", "damaged")
        table.add_row(str(path), *cells, _age(time.time() - found[path]))
    console.print(table)
    return 0


def _written(run: Path) -> float:
    """Return when a file of a run was written last."""
    return max(file.stat().st_mtime for file in run.iterdir() if file.is_file())


def _method(table: dict[str, Any]) -> str:
    """Return the name of a method; of one in a file, the user's file and the class."""
    file, name = file_of(table["name"]), str(table["name"])
    return f"{Path(str(table.get('origin') or file)).name}:{name.rpartition(':')[2]}" if file else name


def _cells(run: RunFiles) -> tuple[str, ...]:
    """Return method, data, rounds, last score and state of a run as texts."""
    data = run.config.get("data", {})
    name = data.get("name", "") if isinstance(data, dict) else data
    scores = run.curve()
    losses = run.curve("test_loss")
    score = f"{scores[-1][1]:.2%}" if scores else f"loss {losses[-1][1]:.4g}" if losses else ""
    setting = f"{name} {run.config.get('split', '')}, seed {run.config.get('seed', 0)}"
    return (
        _method(run.config["method"]),
        setting,
        f"{len(run.rounds)}/{run.config.get('rounds', '?')}",
        score,
        run.state,
    )


def _age(seconds: float) -> str:
    """Return how long ago something was, in its largest unit.

    Example:
        >>> _age(7300), _age(0.2)
        ('2 h ago', 'now')
    """
    return next((f"{int(seconds // size)} {unit} ago" for size, unit in AGES if seconds >= size), "now")
