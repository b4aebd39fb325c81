"""`fedspeed theory [ACTION]`: conditions and bound of the convergence theorem, its experiments, errata and rates."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import theory as th
from ..errors import UserError

if TYPE_CHECKING:
    from rich.console import Console

    from ..theory.experiment import Rate

DEFAULT_ACTION = "check"
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
EPILOG = """\
The theorem has four forms: printed (as published), consistent (its slips of algebra corrected), corrected (its route,
every step proved) and tracking (another route, which keeps O(1/T)); docs/explanation/theory.md derives the last two.
Options without an action are those of `fedspeed theory check`.

examples:
  fedspeed theory --eta 0.1 --lam 10 --K 50 --L 1
  fedspeed theory --eta 0.001 --lam 0.1 --K 200 --L 1 --sigma-l 1 --sigma-g 1 --T 1000
  fedspeed theory --from runs/NAME --L 5
  fedspeed theory rate --out figures
  fedspeed theory counterexample --out figures
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """The actions, and the options of each."""
    parser.epilog = EPILOG
    kinds = parser.add_subparsers(dest="action", metavar="[ACTION]")
    look = parser.formatter_class
    made = {name: kinds.add_parser(name, help=about, formatter_class=look) for name, about in ACTIONS.items()}
    check = made["check"]
    for name, kind, about in SETTING:
        check.add_argument("--" + name.replace("_", "-"), dest=name, type=kind, metavar="X", help=about)
    check.add_argument(
        "--normalise", action=argparse.BooleanOptionalAction, default=None, help="rho divided by the gradient's norm"
    )
    check.add_argument("--gap", type=float, default=1.0, metavar="X", help="F(x^0) - F*; default 1")
    about = "mean_i ||grad F_i(x^0)||^2; default 2 L gap + sigma_g^2, which it cannot exceed"
    check.add_argument("--gradients", type=float, metavar="X", help=about)
    check.add_argument("--verbose", action="store_true", help="every condition with value and slack")
    check.add_argument("--from", dest="run", metavar="RUN", help="take the setting from a run directory")
    rate = made["rate"]
    rate.add_argument("--problem", default="logistic", metavar="logistic|quadratic", help="default %(default)s")
    rate.add_argument("--rounds", default="32,64,128,256", metavar="T,T,..", help="default %(default)s")
    whose = "whose: printed, corrected, tracking; free takes --free-lam; default all four"
    rate.add_argument("--conditions", default="printed,corrected,tracking,free", metavar="A,B", help=whose)
    for flag, value, about in (
        ("m", 8, "clients"),
        ("alpha", 1.0, "weight of the perturbed gradient"),
        ("rho", 0.1, "rho_0: the ascent step is rho_0/sqrt(T)"),
        ("free-lam", 4.0, "lam L under `free`"),
        ("seeds", 8, "repetitions"),
        ("seed", 0, "of problem and minibatches"),
        ("batch", 1, "minibatch size, 0 for all"),
        ("distance", 1.0, "||x^0 - x*||"),
        ("steps-per-round", 1, "K/T"),
    ):
        rate.add_argument(f"--{flag}", type=type(value), default=value, metavar="X", help=f"{about}; default {value:g}")
    bend = made["perturbation"]
    bend.add_argument(
        "--alpha", type=float, default=1.0, metavar="X", help="weight of the perturbed gradient; default 1"
    )
    bend.add_argument("--seed", type=int, default=0, metavar="N", help="of problem and points; default 0")
    made["counterexample"].add_argument("--lam", type=float, metavar="X", help="lam L; default 1 and 4")
    for name, sub in made.items():
        if name in ("rate", "perturbation", "counterexample"):
            sub.add_argument("--out", metavar="DIR", help="write the figure there")
        sub.add_argument("--json", action="store_true", help="print the result as JSON and nothing else")


def main(args: argparse.Namespace, console: Console) -> int:
    """Do what was asked."""
    from .theory_check import check

    try:
        {"check": check, "rate": rate, "perturbation": perturbation, "counterexample": counterexample, "rates": rates,
         "errata": errata}[args.action](args, console)  # fmt: skip
    except OverflowError:
        raise UserError(f"theory {args.action}: the numbers are too large to compute with; use smaller ones") from None
    return 0


def rate(args: argparse.Namespace, console: Console) -> None:
    """The O(1/T) experiment."""
    if args.problem not in ("logistic", "quadratic"):
        raise UserError(f"theory rate: --problem must be logistic or quadratic, got {args.problem!r}")
    problem = (
        th.random_logistic(m=args.m, d=3, n=40, spread=3.0, seed=args.seed)
        if args.problem == "logistic"
        else th.random_quadratic(m=args.m, d=3, n=8, mu=0.3, sigma_g=1.0, sigma_l=2.0, seed=args.seed)
    )
    found: list[Rate] = []
    quiet = args.json or not console.is_terminal
    for form in args.conditions.split(","):
        with console.status("") as status:
            show = None if quiet else lambda name, T, f=form: status.update(f"{f}: {name}, T = {T}")
            found.append(
                th.rate(
                    problem, form, numbers(args.rounds, "--rounds"), distance=args.distance, batch=args.batch,
                    seeds=args.seeds, seed=args.seed, per_round=args.steps_per_round, lam=args.free_lam,
                    rho=args.rho, alpha=args.alpha, progress=show,
                )
            )  # fmt: skip
        if not args.json:
            _rate_table(console, found[-1])
    noise = problem.sigma_l(args.batch) if args.batch else 0.0
    about = (
        f"{args.problem}, {problem.m} clients, L = {problem.L:.3g}, sigma_g <= {problem.sigma_g:.3g}, sigma_l <= "
        f"{noise:.3g}, x^0 at {args.distance:g} from x*, seed {args.seed}"
    )
    if args.json:
        dump(console, {"problem": about, "rates": [_rate_json(r) for r in found]})
    else:
        console.print(about + "\nslopes of log average on log T, with two standard errors (line and seeds); last two: "
                      "between the two largest T; tail: over the last quarter of the rounds")  # fmt: skip
    _figure(args, console, "rate_figure", f"rate-{args.problem}-{args.distance:g}", found, title=about)


def _rate_table(console: Console, r: Rate) -> None:
    lams = ", ".join(f"{s.lam:.3g}" for s in r.settings)
    table = new_table(f"conditions `{r.form}`", *(f"T = {t}" for t in r.T), "slope", "last two", "slope of the tail")
    for curve in r.curves:
        fit, tail = r.fit(curve.method), r.fit(curve.method, tail=True)
        table.add_row(curve.method, *(f"{v:.3g}" for v in curve.average.mean(1)), f"{fit.slope:.3f} ± {fit.error:.3f}",
                      f"{r.last(curve.method):.3f}", f"{tail.slope:.2f} ± {tail.error:.2f}")  # fmt: skip
    if r.bounds:
        table.add_row("bound", *(f"{b.total:.3g}" for b in r.bounds), f"{r.bound_fit.slope:.3f}", "", "")
    console.print(table, soft_wrap=False)
    seen = f"; FedSpeed reaches at most {r.worst:.3g} of the bound" if r.bounds else "; no bound"
    console.print(f"lam {lams}; K {r.settings[0].K} to {r.settings[-1].K}; eta = lam/K{seen}\n")


def perturbation(args: argparse.Namespace, console: Console) -> None:
    """Orders of the perturbation view."""
    from ..theory.perturbation import PENALTIES

    problem = th.random_logistic(m=4, d=5, n=50, seed=args.seed)
    found = th.quasi_gradient_orders(problem, [0.2 / 2**i for i in range(7)], alpha=args.alpha, seed=args.seed)
    if args.json:
        dump(console, {name: {"order": fit.slope, "error": fit.error} for name, fit in found.order.items()})
    else:
        table = new_table("penalty", "g_tilde with", "order of the error", "error / effect at the least rho")
        for name, about in PENALTIES.items():
            fit = found.order[name]
            share = found.error[name][-1] / found.effect[name][-1]
            table.add_row(name, about, f"{fit.slope:.3f} ± {fit.error:.3f}", f"{share:.3g}")
        console.print(table, soft_wrap=False)
        console.print(
            f"logistic loss, alpha {args.alpha:g}, rho from {found.rho[0]:g} to {found.rho[-1]:g}, seed {args.seed}; "
            f"on a quadratic the first error is 0"
        )
    _figure(args, console, "perturbation_figure", "perturbation", found)


def counterexample(args: argparse.Namespace, console: Console) -> None:
    """The printed theorem, broken."""
    found = [th.break_printed_bound(lam=lam) for lam in ((1.0, 4.0) if args.lam is None else (args.lam,))]
    if args.json:
        rows = [{"lam": c.setting.lam, "average": c.average, "bound": c.bound.total, "conditions_hold": c.bound.valid,
                 "violated": c.violated} for c in found]  # fmt: skip
        dump(console, rows)
    else:
        table = new_table(
            "lam L", "eta", "K", "T", "printed conditions hold", "average seen", "printed bound", "bound broken"
        )
        for c in found:
            s = c.setting
            table.add_row(f"{s.lam:g}", f"{s.eta:.3g}", f"{s.K:,}", f"{s.T:,}", "yes" if c.bound.valid else "NO",
                          f"{c.average:.4g}", f"{c.bound.total:.4g}", "YES" if c.violated else "no")  # fmt: skip
        console.print(table, soft_wrap=False)
        console.print(
            "two clients F_1 = w, F_2 = -0.3 w, w' the triangle wave: 1-smooth, sigma_g = 0.65, sigma_l = rho = 0, F "
            "bounded below. Nothing printed limits lam L (erratum 9)."
        )
    _figure(args, console, "counterexample_figure", "counterexample", found)


def rates(args: argparse.Namespace, console: Console) -> None:
    """The table of published rates."""
    if args.json:
        dump(console, [row._asdict() for row in th.RATES])
        return
    table = new_table("method", "rate", "K", "assumptions", "note", "source")
    for row in th.RATES:
        table.add_row(row.method, row.rate, row.K, row.assumptions, row.note, row.source)
    console.print(table, soft_wrap=False)


def errata(args: argparse.Namespace, console: Console) -> None:
    """The errata by number."""
    if args.json:
        dump(console, {str(number): e._asdict() for number, e in th.ERRATA.items()})
        return
    table = new_table("", "printed", "right", "here")
    for number, e in th.ERRATA.items():
        table.add_row(str(number), e.printed, e.right, e.here)
    console.print(table, soft_wrap=False)


def numbers(text: str, option: str) -> list[int]:
    """`16,32` -> [16, 32]."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise UserError(f"{option}: expected whole numbers such as 16,32,64, got {text!r}") from None


def _figure(args: argparse.Namespace, console: Console, draw: str, stem: str, found: Any, **how: Any) -> None:
    """Draw what was found, if a folder was named."""
    if not args.out:
        return
    from ..theory import figures

    path = getattr(figures, draw)(found, Path(args.out) / stem, **how)
    if not args.json:
        console.print(f"figure: {path}")


def new_table(*titles: str) -> Any:
    """A table without lines."""
    from rich.table import Table

    return Table(*titles, box=None, pad_edge=False)


def _rate_json(r: Rate) -> dict[str, Any]:
    return {
        "conditions": r.form, "T": r.T.tolist(), "lam": [s.lam for s in r.settings], "K": [s.K for s in r.settings],
        "bound": [b.total for b in r.bounds],
        "methods": {
            c.method: {"average": c.average.mean(1).tolist(), "slope": r.fit(c.method).slope,
                       "error": r.fit(c.method).error, "last_slope": r.last(c.method),
                       "tail_slope": r.fit(c.method, tail=True).slope}
            for c in r.curves
        },
    }  # fmt: skip


def dump(console: Console, value: Any) -> None:
    """A result as JSON."""
    console.print_json(json.dumps(_finite(value)))


def _finite(value: Any) -> Any:
    """JSON has no infinity: null."""
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
