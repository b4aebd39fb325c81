"""`fedspeed diff RUN_A RUN_B`."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from ..report.diff import SECTIONS, Absent, differences

if TYPE_CHECKING:
    from rich.console import Console

EPILOG = """\
Compares configs, fingerprints of data and split, versions and hardware, every round (the first that differs is shown)
and the models. Times are left out. Exit code: 0 if all is the same, 1 if not, 2 for bad input.

examples:
  fedspeed diff runs/A runs/B
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the two runs."""
    parser.epilog = EPILOG
    parser.add_argument("a", metavar="RUN_A", help="a run directory")
    parser.add_argument("b", metavar="RUN_B", help="another run directory")
    parser.add_argument("--json", action="store_true", help="print the differences as JSON and nothing else")


def main(args: argparse.Namespace, console: Console) -> int:
    """Print one line per difference, by section."""
    found = differences(Path(args.a), Path(args.b))
    if args.json:
        absent_as_null = json.dumps(
            [asdict(one) for one in found], default=lambda value: None if isinstance(value, Absent) else str(value)
        )
        console.print_json(absent_as_null)
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
