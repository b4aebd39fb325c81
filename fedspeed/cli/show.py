"""`fedspeed show RUN`."""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from ..record import CLIENT_SCORES

if TYPE_CHECKING:
    from rich.console import Console

    from ..report.run_files import Source

EPILOG = """\
examples:
  fedspeed show runs/NAME
"""
BARS = "▁▂▃▄▅▆▇█"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the run."""
    parser.epilog = EPILOG
    parser.add_argument("run", metavar="RUN", help="a run directory, finished or in progress")


def main(args: argparse.Namespace, console: Console) -> int:
    """Print the run's settings, status, cost and curves."""
    from ..report.figures import chart
    from ..report.run_files import Row, RunFiles, Source
    from ..runs.directory import RunDir
    from ..runs.fork_origin import read_parent

    run = Source.read(Path(args.run))
    rounds = [record.to_dict() for record in run.records]
    console.print(
        f"{run.path}: {run.tags['method']} on {run.tags['data']} {_of(run, 'split')}, seed {run.tags['seed']}"
    )
    parent = read_parent(RunDir(run.path))
    if parent is not None:
        console.print(parent.text())
    status, _, why = run.status.partition("\n")[0].partition(": ")
    console.print(f"{status}, {len(rounds)} of {_of(run, 'rounds')} rounds{_cost(rounds)}")
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


def _of(run: Source, key: str) -> str:
    return str(run.config.get(key, ""))


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
