"""`fedspeed watch`."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import Terminated

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rich.console import Console, Group, RenderableType

    from ..report.live import Standing

EPILOG = """\
The page of `fedspeed report`, with a table of the runs in progress: rounds done and time left. It updates itself, is
served to this machine only, is read-only and does not disturb runs. The folder may still be empty. Ctrl-C ends it.

examples:
  fedspeed watch runs/first
  fedspeed watch runs/first --port 8000
  fedspeed watch runs/first --terminal
"""
EVERY = 2.0
STYLES = {
    "running": "cyan",
    "finished": "green",
    "stopped": "green",
    "failed": "red",
    "diverged": "red",
    "damaged": "red",
}


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the folder, the port and the kind of view."""
    parser.epilog = EPILOG
    parser.add_argument("runs", metavar="RUNS_DIR", help="a folder of run directories, or one of them")
    parser.add_argument("--port", type=int, default=0, metavar="N", help="port of the page; default any free one")
    about = "show a table in the terminal instead; into a pipe or a file once"
    parser.add_argument("--terminal", action="store_true", help=about)


def main(args: argparse.Namespace, console: Console) -> int:
    """Show the runs until Ctrl-C."""
    folder = Path(args.runs)
    try:
        if args.terminal:
            _terminal(folder, console)
        else:
            _serve(folder, args.port, console)
    except KeyboardInterrupt as stopped:
        return 130 if isinstance(stopped, Terminated) else 0
    return 0


def _serve(folder: Path, port: int, console: Console) -> None:
    from ..report.live import Server

    with Server(folder, port) as server:
        console.print(f"watching {folder}: {server.url}  (Ctrl-C ends it)")
        console.file.flush()
        server.serve_forever()


def _terminal(folder: Path, console: Console) -> None:
    from rich.live import Live

    from ..report.live import Watched, standings

    watched = Watched(folder)
    watched.look()
    if not console.is_terminal:
        console.print(view(standings(watched.rows), watched.left_out, console.width))
        return
    with Live(console=console, auto_refresh=False) as shown:
        while True:
            shown.update(
                view(standings(watched.rows), watched.left_out, console.width, console.height - 6), refresh=True
            )
            time.sleep(EVERY)
            watched.look()


def view(found: Sequence[Standing], left_out: Sequence[str], width: int, most: int = 10**6) -> Group:
    """Return a table with a line per run, those in progress first; as many lines and columns as fit."""
    from rich.console import Group
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    from ..report.live import headline, progress, time_left
    from .output import visible
    from .show import spark

    columns: dict[str, Callable[[Standing], RenderableType]] = {
        "run": lambda one: visible(one.run),
        "state": lambda one: Text(visible(f"{one.state} {one.about}".strip()), style=STYLES.get(one.state, "")),
        "": lambda one: ProgressBar(one.of, min(one.rounds, one.of), width=12) if one.of else "",
        "rounds": progress,
        "last": lambda one: one.score,
        "curve": lambda one: spark(one.curve, 16) if one.curve else "",
        "left": time_left,
        "method": lambda one: visible(one.method),
        "seed": lambda one: str(one.seed),
    }
    for name, needs in (("", 110), ("curve", 90)):
        if width < needs:
            del columns[name]
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in columns:
        right = name in ("seed", "last", "left")
        table.add_column(
            name,
            no_wrap=name != "state",
            min_width=8 if name == "state" else None,
            justify="right" if right else "left",
        )
    room = max(1, most - len(left_out))
    for one in found[:room]:
        table.add_row(*(cell(one) for cell in columns.values()))
    below = [f"and {len(found) - room} more"] if len(found) > room else []
    below += [f"left out: {reason}" for reason in left_out]
    return Group(headline(found), *([table] if found else []), *map(visible, below))
