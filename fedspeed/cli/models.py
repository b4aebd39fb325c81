"""`fedspeed models`."""

from __future__ import annotations

import argparse
import inspect
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import Console


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the examples; there are no options."""
    parser.epilog = "examples:\n  fedspeed models\n  fedspeed run --model cnn --set model.widths=[8,16,64]\n"


def main(args: argparse.Namespace, console: Console) -> int:
    """Print one row per model."""
    from rich.table import Table

    from ..models import MODELS

    columns = ("model", "options (--set model.OPTION=VALUE)", "parameters", "what it is")
    table = Table(*columns, box=None, pad_edge=False)
    for name, builder in MODELS.items():
        own = {p.name: p.default for p in list(inspect.signature(builder).parameters.values())[2:]}
        shown = ", ".join(f"{option}={_toml(value)}" for option, value in own.items())
        about = (builder.__doc__ or "").splitlines()[0]
        table.add_row(name, shown or "-", _parameters(builder, "trim" in own), about)
    console.print(table, soft_wrap=False)
    console.print(
        "Parameters: on pictures of 3x32x32, 10 classes. Live are those that can have a gradient there; "
        "--set model.trim=true stores no others."
    )
    console.print("Your own: any nn.Module works from Python, see `fedspeed.simulate`.")
    return 0


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return str(list(value) if isinstance(value, tuple) else value)


def _parameters(builder: Callable[..., Any], can_trim: bool) -> str:
    """Return the number of parameters, and of live ones; "-" for a model of other inputs than images."""
    import torch

    from ..errors import UserError

    def count(**options: Any) -> int:
        with torch.device("meta"):  # shapes only
            return sum(p.numel() for p in builder((3, 32, 32), 10, **options).parameters())

    try:
        return f"{count():,}" + (f", {count(trim=True):,} live" if can_trim else "")
    except UserError:
        return "-"
