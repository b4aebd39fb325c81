"""`fedspeed runs`, `show`, `watch` and `diff`: what runs are there, and what is in them, from their files."""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from ..errors import Terminated, UserError
from ..record import CLIENT_SCORES
from .output import show_table, visible, width

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rich.console import Console, Group, RenderableType

    from ..report.live import Standing
    from ..report.run_files import RunFiles

EPILOG_RUNS = """\
examples:
  fedspeed runs                      the runs below the folder runs/
  fedspeed runs runs/first results   those of other folders
"""
AGES = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))


def configure_runs(parser: argparse.ArgumentParser) -> None:
    """Add the folders."""
    parser.add_argument("folders", nargs="*", default=["runs"], metavar="FOLDER", help="folders of runs; default runs")


def main_runs(args: argparse.Namespace, console: Console) -> int:
    """Print one line per run, the newest first."""
    from ..report.run_files import read_any
    from ..runs.directory import CONFIG

    found = {
        run: max(file.stat().st_mtime for file in run.iterdir() if file.is_file())  # when a file was written last
        for at in args.folders
        for run in (file.parent for file in Path(at).rglob(CONFIG))
    }
    if not found:
        raise UserError(
            f"{', '.join(args.folders)}: expected run directories below it, found none; `fedspeed run` makes one"
        )
    rows: list[tuple[str, ...]] = []
    for path in sorted(found, key=lambda path: -found[path]):
        try:
            cells = _cells(read_any(path))
        except UserError:  # `fedspeed verify` says what is wrong
            cells = ("", "", "", "", "damaged")
        rows.append((str(path), *cells, _age(time.time() - found[path])))
    show_table(console, ("run", "method", "data", "rounds", "score", "state", "written"), rows)
    return 0


def _method_of(table: dict[str, Any]) -> str:
    """Return the name of a method; of one in a file, the user's file and the class."""
    from ..utils.registry import file_of

    file, name = file_of(table["name"]), str(table["name"])
    return f"{Path(str(table.get('origin') or file)).name}:{name.rpartition(':')[2]}" if file else name


def _cells(run: RunFiles) -> tuple[str, ...]:
    """Return method, data, rounds, last score and state of a run as texts."""
    data = run.config.get("data", {})
    name = data.get("name", "") if isinstance(data, dict) else data
    scores, losses = run.curve(), run.curve("test_loss")
    score = f"{scores[-1][1]:.2%}" if scores else f"loss {losses[-1][1]:.4g}" if losses else ""
    setting = f"{name} {run.config.get('split', '')}, seed {run.config.get('seed', 0)}"
    rounds = f"{len(run.rounds)}/{run.config.get('rounds', '?')}"
    return _method_of(run.config["method"]), setting, rounds, score, run.state


def _age(seconds: float) -> str:
    """Return how long ago something was, in its largest unit.

    Example:
        >>> _age(7300), _age(0.2)
        ('2 h ago', 'now')
    """
    return next((f"{int(seconds // size)} {unit} ago" for size, unit in AGES if seconds >= size), "now")


EPILOG_SHOW = """\
examples:
  fedspeed show runs/NAME
"""
BARS = "▁▂▃▄▅▆▇█"


def configure_show(parser: argparse.ArgumentParser) -> None:
    """Add the run."""
    parser.add_argument("run", metavar="RUN", help="a run directory, finished or in progress")


def main_show(args: argparse.Namespace, console: Console) -> int:
    """Print the run's settings, status, cost and curves."""
    from ..report.figures import chart
    from ..report.run_files import Row, RunFiles, Source
    from ..runs.directory import RunDir
    from ..runs.fork import read_parent

    run = Source.read(Path(args.run))
    rounds = [record.to_dict() for record in run.records]
    setting = f"{run.tags['method']} on {run.tags['data']} {run.config.get('split', '')}, seed {run.tags['seed']}"
    console.print(f"{run.path}: {setting}")
    if parent := read_parent(RunDir(run.path)):
        console.print(parent.text())
    status, _, why = run.status.partition("\n")[0].partition(": ")
    console.print(f"{status}, {len(rounds)} of {run.config.get('rounds', '')} rounds{_cost(rounds)}")
    if why:
        console.print(why)
    files = RunFiles(run.path, rounds, {}, run.config)
    accuracies = [value for _, value in files.curve()]
    if accuracies:
        last5 = fmean(accuracies[-5:])
        console.print(f"accuracy last {accuracies[-1]:.2%}, best {max(accuracies):.2%}, mean of last 5 {last5:.2%}")
    for line in next((lines for r in reversed(rounds) if (lines := client_lines(r))), []):
        console.print(line)
    if accuracies:
        console.print(chart([Row(run.tags["method"], [files])], console.width))
    for name in ("test_loss", "train_loss"):
        values = [value for _, value in files.curve(name)]
        if values:
            console.print(f"{name.replace('_', ' '):>10} {spark(values)} {values[0]:.4g} to {values[-1]:.4g}")
    return 0


def client_lines(found: dict[str, Any]) -> list[str]:
    """Return the scores over clients of a record or a summary in words, a line per model; none without any.

    Example:
        >>> scores = {"accuracy_mean": 0.8, "accuracy_worst10": 0.5, "accuracy_median": 0.9, "accuracy_sd": 0.125}
        >>> client_lines({"client_test": scores})
        ['clients, on their own test data: accuracy mean 80.00%, worst tenth 50.00%, median 90.00%, sd 12.50%']
    """
    lines = []
    for key, data in zip(CLIENT_SCORES, ("own test data", "training data"), strict=True):
        for kind, model in (("", "clients"), ("own_", "their own models"), ("personalised_", "personalised")):
            for score, style in (("accuracy", ".2%"), ("loss", ".4g")):
                names = {f"{kind}{score}_{name}": name for name in ("mean", "worst10", "median", "sd")}
                table = found.get(key, {})
                if all(isinstance(table.get(name), int | float) for name in names):
                    shown = ", ".join(f"{short} {table[name]:{style}}" for name, short in names.items())
                    shown = shown.replace("worst10", "worst tenth")
                    lines.append(f"{model}, on their {data}: {score} {shown}")
                    break
    return lines


def _cost(rounds: list[dict[str, Any]]) -> str:
    def total(*keys: str) -> float:
        return float(sum(one[key] for one in rounds for key in keys))

    megabytes, seconds = total("bytes_down", "bytes_up") / 1e6, total("seconds", "eval_seconds")
    return f", {megabytes:.1f} MB sent, {total('grad_evals'):.0f} gradients, {seconds:.1f} s" if rounds else ""


def spark(values: list[float], width: int = 60) -> str:
    """Return values as a line of bars, thinned to a width.

    Example:
        >>> spark([3.0, 2.0, 1.0])
        '█▅▁'
    """
    picked = [values[i * len(values) // width] for i in range(width)] if len(values) > width else values
    low, top = min(picked), max(picked)
    return "".join(BARS[round((v - low) / ((top - low) or 1) * (len(BARS) - 1))] for v in picked)


EPILOG_WATCH = """\
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


def configure_watch(parser: argparse.ArgumentParser) -> None:
    """Add the folder, the port and the kind of view."""
    parser.add_argument("runs", metavar="RUNS_DIR", help="a folder of run directories, or one of them")
    parser.add_argument("--port", type=int, default=0, metavar="N", help="port of the page; default any free one")
    about = "show a table in the terminal instead; into a pipe or a file once"
    parser.add_argument("--terminal", action="store_true", help=about)


def main_watch(args: argparse.Namespace, console: Console) -> int:
    """Show the runs until Ctrl-C."""
    from ..report.live import Server

    folder = Path(args.runs)
    try:
        if args.terminal:
            _terminal(folder, console)
            return 0
        with Server(folder, args.port) as server:
            console.print(f"watching {folder}: {server.url}  (Ctrl-C ends it)")
            console.file.flush()
            server.serve_forever()
    except KeyboardInterrupt as stopped:
        return 130 if isinstance(stopped, Terminated) else 0
    return 0


def _terminal(folder: Path, console: Console) -> None:
    from rich.live import Live

    from ..report.live import Watched, standings

    watched = Watched(folder)
    watched.look()
    if not console.is_terminal:
        console.print(view(standings(watched.rows), watched.left_out, width(console)), width=width(console))
        return
    with Live(console=console, auto_refresh=False) as shown:
        while True:
            now = view(standings(watched.rows), watched.left_out, console.width, console.height - 6)
            shown.update(now, refresh=True)
            time.sleep(EVERY)
            watched.look()


def view(found: Sequence[Standing], left_out: Sequence[str], width: int, most: int = 10**6) -> Group:
    """Return a table with a line per run, those in progress first; as many lines and columns as fit."""
    from rich.console import Group
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    from ..report.live import headline, progress, time_left

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
        wraps, right = name == "state", name in ("seed", "last", "left")
        table.add_column(name, no_wrap=not wraps, min_width=8 if wraps else None, justify="right" if right else "left")
    room = max(1, most - len(left_out))
    for one in found[:room]:
        table.add_row(*(cell(one) for cell in columns.values()))
    below = [f"and {len(found) - room} more"] if len(found) > room else []
    below += [f"left out: {reason}" for reason in left_out]
    return Group(headline(found), *([table] if found else []), *map(visible, below))


EPILOG_DIFF = """\
Compares configs, fingerprints of data and split, versions and hardware, every round (the first that differs is shown)
and the models. Times are left out. Exit code: 0 if all is the same, 1 if not, 2 for bad input.

examples:
  fedspeed diff runs/A runs/B
"""


def configure_diff(parser: argparse.ArgumentParser) -> None:
    """Add the two runs."""
    parser.add_argument("a", metavar="RUN_A", help="a run directory")
    parser.add_argument("b", metavar="RUN_B", help="another run directory")
    parser.add_argument("--json", action="store_true", help="print the differences as JSON and nothing else")


def main_diff(args: argparse.Namespace, console: Console) -> int:
    """Print one line per difference, by section."""
    from ..report.diff import SECTIONS, Absent, differences

    found = differences(Path(args.a), Path(args.b))
    if args.json:
        plain = [asdict(one) for one in found]
        console.print_json(json.dumps(plain, default=lambda value: None if isinstance(value, Absent) else str(value)))
        return 1 if found else 0
    other = next((one for one in found if one.name == "method.name"), None)
    if other:
        console.print(f"different methods: {other.a} | {other.b}   (-: the method has no such field)")
    for section in SECTIONS:
        own = [one for one in found if one.section == section]
        console.print(f"{section}: " + (f"{len(own)} differ" if own else "the same"))
        for one in own:
            console.print(f"  {one.name}: {one.a!r} | {one.b!r}")
    return 1 if found else 0
