"""`fedspeed explain RUN`: diagnose a run: what is wrong, its likely cause, what to try."""

from __future__ import annotations

import argparse
import json
import shlex
import textwrap
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from ..report.explain import Health, examine, series
from ..runs.diagnosis import MEANING
from ..runs.directory import RunDir
from . import options

if TYPE_CHECKING:
    from rich.console import Console

EPILOG = """\
Reads the rounds of a run, finished, failed or in progress, and reports signs of trouble: outputs that no longer depend
on the input, dead layers, a loss above that of guessing, accuracy at chance level, growing states, NaN.

examples:
  fedspeed explain runs/20260101-120000-fedspeed-digits-s0
"""


HEALTHY = (
    "nothing of what is looked for was seen: outputs depend on the input, no layer is dead, loss and accuracy are "
    "better than those of guessing or it is too early to say, no state grows, all numbers are finite"
)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the run."""
    parser.epilog = EPILOG
    parser.add_argument("run", metavar="RUN", help="the run directory")
    options.allow_code(parser, executes=False)
    parser.add_argument("--json", action="store_true", help="print the result as JSON and nothing else")


def main(args: argparse.Namespace, console: Console) -> int:
    """Print the state of the run, then a paragraph per finding."""
    health = examine(Path(args.run))
    if args.json:
        console.print_json(json.dumps(_data(health)))
        return 0
    console.print(f"{health.path}: {health.state}; {_score(health)}")
    for note in health.notes:
        console.print(f"note: {note}", style="yellow")
    for text in _long(health, min(console.width, 110)):
        console.print(text)
    return 0


def _score(health: Health) -> str:
    scores = [(r.round, r.test_accuracy) for r in health.records if r.test_accuracy is not None]
    if not health.records:
        return "no round is done yet"
    if not scores:
        loss = health.records[-1].train_loss
        return "train loss beyond numbers" if loss is None else f"train loss {loss:.4g}"
    best = max(scores, key=lambda score: score[1])
    return f"accuracy {scores[-1][1]:.2%} in round {scores[-1][0]}, best {best[1]:.2%} in round {best[0]}"


def _long(health: Health, wide: int) -> list[str]:
    if not health.found and not health.records:
        return ["there is nothing to look at yet"]
    if not health.found:
        return [textwrap.fill(HEALTHY, wide)]
    parts = []
    for one in health.found:
        numbers = [f"seen in {len(one.values)} rounds; round: value {series(one)}"] if one.values else []
        texts = [f"since round {one.since}: {one.seen}", *numbers, MEANING[one.name]]
        body = [textwrap.fill(text, wide, initial_indent="  ", subsequent_indent="  ") for text in texts]
        tries = [f"    {i}. {advice.option}   ({advice.why})" for i, advice in enumerate(health.advice(one), 1)]
        parts.append("\n".join(["", one.title, *body, *(["  what to try, in this order:", *tries] if tries else [])]))
    first = next((advice for one in health.found for advice in health.advice(one)), None)
    if first is None:
        return parts
    if health.config.get("data") and str(_name(health)) != "given":
        again = ["fedspeed", "run", str(RunDir(health.path).config_file), *first.option.split(), "--out"]
        parts.append(f"\nfor example: {shlex.join([*again, f'{health.path}-2'])}")
    else:
        parts.append(
            "\nthe run is of objects given to `simulate`: --lr 0.02 there is lr=0.02, method.x a field of the method"
        )
    return parts


def _name(health: Health) -> object:
    model = health.config.get("model")
    return model.get("name") if isinstance(model, dict) else model


def _data(health: Health) -> dict[str, object]:
    return {
        "run": str(health.path),
        "state": health.state,
        "rounds": len(health.records),
        "notes": health.notes,
        "illnesses": [
            {**asdict(one), "means": MEANING[one.name], "try": [advice.option for advice in health.advice(one)]}
            for one in health.found
        ],
    }
