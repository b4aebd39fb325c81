"""`fedspeed inspect RUN`: sharpness and client divergence of trained models."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import UserError
from . import options

if TYPE_CHECKING:
    from rich.console import Console

EPILOG = """\
eigenvalue: the largest of the training loss's Hessian; SAM gap: what one ascent step of length rho adds to the loss;
dissimilarity: mean_i ||grad F_i - grad F||^2; divergence: mean_i ||x_iK - mean||^2 after a round of plain local SGD.
Each run directory gets an inspect.json.

examples:
  fedspeed inspect runs/fedavg runs/fedspeed
  fedspeed inspect runs/NAME --samples 5000 --rho 0.05 --json
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the runs and the sizes of the samples."""
    parser.epilog = EPILOG
    parser.add_argument("runs", nargs="+", metavar="RUN", help="directories of finished runs")
    parser.add_argument("--samples", type=int, default=1000, metavar="N", help="training samples; default 1000")
    parser.add_argument("--clients", type=int, default=20, metavar="N", help="number of clients; default 20")
    parser.add_argument("--rho", type=float, default=0.1, metavar="X", help="length of the SAM step; default 0.1")
    parser.add_argument("--iterations", type=int, default=100, metavar="N", help="Hessian products; default 100")
    parser.add_argument("--out", metavar="DIR", help="write inspect.json there instead (one run only)")
    options.allow_code(parser)
    parser.add_argument("--json", action="store_true", help="print the result as JSON and nothing else")


def main(args: argparse.Namespace, console: Console) -> int:
    """Print one row per run."""
    from rich.table import Table

    from ..runs.inspect import inspect_run

    if args.out and len(args.runs) > 1:
        raise UserError(f"inspect: --out takes one run, got {len(args.runs)}; omit --out, or inspect one by one")
    titles = ("run", "method", "loss", "||grad||", "eigenvalue", "SAM gap", "dissimilarity", "divergence")
    table, found, warm = Table(*titles, box=None, pad_edge=False), {}, []
    for run in args.runs:
        with console.status(f"inspecting {run}"):
            one = inspect_run(
                Path(run),
                samples=args.samples,
                clients=args.clients,
                rho=args.rho,
                iterations=args.iterations,
                out=Path(args.out) if args.out else None,
                allow_code=args.allow_code,
            )
        found[run] = asdict(one)
        warm += [f"{Path(run).name}: warm-up {one.warmup}"] if one.warmup else []
        table.add_row(
            Path(run).name, one.method, f"{one.loss:.4f}", f"{one.gradient_norm:.3g}",
            f"{one.eigenvalue:.4g} ± {one.residual:.1g}", f"{one.sam_gap:.4g}", f"{one.dissimilarity:.4g}",
            f"{one.divergence:.4g}",
        )  # fmt: skip
    if args.json:
        console.print_json(json.dumps(found))
        return 0
    console.print(table)
    for line in warm:
        console.print(line)
    console.print(f"over {one.samples} training samples, {one.clients} clients; rho {one.rho:g}; inspect.json written")
    return 0
