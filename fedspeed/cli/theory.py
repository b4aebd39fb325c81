"""`fedspeed theory`: conditions and bound of the convergence theorem, its experiments, errata and counterexample."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import UserError, unknown

if TYPE_CHECKING:
    from rich.console import Console

ACTIONS = {
    "check": "does the theorem cover a setting, with which bound, and which setting near it (the default)",
    "rate": "measure the O(1/T) rate under the conditions of each form, and plot it",
    "perturbation": "the order at which the perturbed gradient follows the penalised loss",
    "counterexample": "a run that meets the printed conditions and breaks the printed bound",
    "rates": "published rates of FedSpeed, FedAvg, SCAFFOLD, FedAdam, VRL-SGD",
    "errata": "what the published analysis gets wrong, by number",
}
SETTING: tuple[tuple[str, Any, str], ...] = (
    ("eta", float, "local rate eta_l; default 0.1"),
    ("lam", float, "lambda, 1/w; default 10"),
    ("K", int, "local steps; default 50"),
    ("L", float, "smoothness constant; default 1"),
    ("alpha", float, "weight of the perturbed gradient; default 1"),
    ("rho", float, "ascent step; default 0"),
    ("m", int, "clients, all active; default 10"),
    ("T", int, "rounds; default 100"),
    ("sigma_l", float, "noise of a minibatch gradient; default 0"),
    ("sigma_g", float, "heterogeneity; default 0"),
)
USED = {
    "check": {*(name for name, _, _ in SETTING), "normalise", "gap", "gradients", "run", "verbose"},
    "rate": {"m", "alpha", "rho", "problem", "rounds", "conditions", "free_lam", "seeds", "seed", "batch", "distance",
             "steps_per_round", "out"},
    "perturbation": {"alpha", "seed", "out"},
    "counterexample": {"lam", "out"},
    "rates": set(),
    "errata": set(),
}  # fmt: skip
DEFAULTS = {
    "gap": 1.0, "problem": "logistic", "rounds": "32,64,128,256", "conditions": "printed,corrected,tracking,free",
    "free_lam": 4.0, "seeds": 8, "seed": 0, "batch": 1, "distance": 1.0, "steps_per_round": 1,
}  # fmt: skip
EPILOG = """\
The theorem has four forms: printed (as published), consistent (its slips of algebra put right), corrected (its route,
every step proved) and tracking (another route, which keeps O(1/T)); docs/theory.md derives the last two.

examples:
  fedspeed theory --eta 0.1 --lam 10 --K 50 --L 1
  fedspeed theory --eta 0.001 --lam 0.1 --K 200 --L 1 --sigma-l 1 --sigma-g 1 --T 1000
  fedspeed theory --from runs/NAME --L 5
  fedspeed theory rate --out figures
  fedspeed theory counterexample --out figures
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """What to do, and the options of each."""
    parser.epilog = "actions:\n" + "".join(f"  {k:15s} {v}\n" for k, v in ACTIONS.items()) + "\n" + EPILOG
    parser.add_argument("action", nargs="?", default="check", metavar="ACTION", help="see below; default check")
    setting = parser.add_argument_group("check: the setting")
    for name, kind, about in SETTING:
        setting.add_argument("--" + name.replace("_", "-"), dest=name, type=kind, metavar="X", help=about)
    setting.add_argument(
        "--normalise", action=argparse.BooleanOptionalAction, default=None, help="rho divided by the gradient's norm"
    )
    setting.add_argument("--gap", type=float, metavar="X", help="F(x^0) - F*; default 1")
    about = "mean_i ||grad F_i(x^0)||^2; default 2 L gap + sigma_g^2, which it cannot exceed"
    setting.add_argument("--gradients", type=float, metavar="X", help=about)
    setting.add_argument("--verbose", action="store_true", default=None, help="every condition with value and slack")
    setting.add_argument("--from", dest="run", metavar="RUN", help="take the setting from a run directory")
    rate = parser.add_argument_group("rate (also --m, --alpha, --rho)")
    rate.add_argument("--problem", metavar="logistic|quadratic", help="default logistic")
    rate.add_argument("--rounds", metavar="T,T,..", help=f"default {DEFAULTS['rounds']}")
    whose = "whose: printed, corrected, tracking; free takes --free-lam; default all four"
    rate.add_argument("--conditions", metavar="A,B", help=whose)
    rate.add_argument("--free-lam", type=float, metavar="X", help="lam L under `free`; default 4")
    rate.add_argument("--seeds", type=int, metavar="N", help="repetitions; default 8")
    rate.add_argument("--seed", type=int, metavar="N", help="of problem and minibatches; default 0")
    rate.add_argument("--batch", type=int, metavar="N", help="minibatch size, 0 for all; default 1")
    rate.add_argument("--distance", type=float, metavar="X", help="||x^0 - x*||; default 1")
    rate.add_argument("--steps-per-round", type=int, metavar="N", help="K/T; default 1")
    parser.add_argument("--out", metavar="DIR", help="write the action's figure there")
    parser.add_argument("--json", action="store_true", help="print the result as JSON and nothing else")


def main(args: argparse.Namespace, console: Console) -> int:
    """Do what was asked."""
    from . import theory_actions, theory_check

    if args.action not in ACTIONS:
        raise unknown("theory action", args.action, ACTIONS)
    for name in set().union(*USED.values()) - USED[args.action]:
        if getattr(args, name) is not None:
            flag = "--from" if name == "run" else "--" + name.replace("_", "-")
            raise UserError(f"theory {args.action}: makes no use of {flag}, got {getattr(args, name)}; leave it away")
    for name, value in DEFAULTS.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    getattr(theory_check if args.action == "check" else theory_actions, args.action)(args, console)
    return 0


def numbers(text: str, option: str) -> list[int]:
    """`16,32` -> [16, 32]."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise UserError(f"{option}: expected whole numbers such as 16,32,64, got {text!r}") from None


def folder(args: argparse.Namespace) -> Path | None:
    """Where figures go, if anywhere."""
    return Path(args.out) if args.out else None
