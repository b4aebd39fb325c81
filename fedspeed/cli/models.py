"""`fedspeed models`."""

from __future__ import annotations

import argparse
import inspect
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


def configure(parser: argparse.ArgumentParser) -> None:
    """No options."""
    parser.epilog = "examples:\n  fedspeed models\n  fedspeed run --model cnn --set model.widths=[8,16,64]\n"


def main(args: argparse.Namespace, console: Console) -> int:
    """One row per model."""
    from rich.table import Table

    from ..models import MODELS

    table = Table("model", "options (--set model.OPTION=VALUE)", "what it is", box=None, pad_edge=False)
    for name, builder in MODELS.items():
        own = list(inspect.signature(builder).parameters.values())[2:]
        shown = ", ".join(f"{p.name}={list(p.default) if isinstance(p.default, tuple) else p.default}" for p in own)
        table.add_row(name, shown or "-", (builder.__doc__ or "").splitlines()[0])
    console.print(table, soft_wrap=False)
    console.print("Your own: any nn.Module works from Python, see `fedspeed.simulate`.")
    return 0
