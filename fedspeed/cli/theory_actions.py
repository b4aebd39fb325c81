"""The actions of `fedspeed theory` but `check`; imported when one is asked for."""

from __future__ import annotations

import argparse
import json
import math
from typing import TYPE_CHECKING, Any

from .. import theory as th
from ..errors import UserError
from .theory import folder, numbers

if TYPE_CHECKING:
    from rich.console import Console

    from ..theory.experiment import Rate


def rate(args: argparse.Namespace, console: Console) -> None:
    """The O(1/T) experiment."""
    from ..report.theory import rate_figure

    if args.problem not in ("logistic", "quadratic"):
        raise UserError(f"theory rate: --problem must be logistic or quadratic, got {args.problem!r}")
    problem = (
        th.random_logistic(m=args.m or 8, d=3, n=40, spread=3.0, seed=args.seed)
        if args.problem == "logistic"
        else th.random_quadratic(m=args.m or 8, d=3, n=8, mu=0.3, sigma_g=1.0, sigma_l=2.0, seed=args.seed)
    )
    rates: list[Rate] = []
    quiet = args.json or not console.is_terminal
    for form in args.conditions.split(","):
        with console.status("") as status:
            show = None if quiet else lambda name, T, f=form: status.update(f"{f}: {name}, T = {T}")
            rates.append(
                th.rate(
                    problem, form, numbers(args.rounds, "--rounds"), distance=args.distance, batch=args.batch,
                    seeds=args.seeds, seed=args.seed, per_round=args.steps_per_round, lam=args.free_lam,
                    rho=0.1 if args.rho is None else args.rho, alpha=1.0 if args.alpha is None else args.alpha,
                    progress=show,
                )
            )  # fmt: skip
        if not args.json:
            _rate_table(console, rates[-1])
    noise = problem.sigma_l(args.batch) if args.batch else 0.0
    about = (
        f"{args.problem}, {problem.m} clients, L = {problem.L:.3g}, sigma_g <= {problem.sigma_g:.3g}, sigma_l <= "
        f"{noise:.3g}, x^0 at {args.distance:g} from x*, seed {args.seed}"
    )
    if args.json:
        dump(console, {"problem": about, "rates": [_rate_json(r) for r in rates]})
    else:
        console.print(about + "\nslopes of log average on log T, with two standard errors (line and seeds); last two: "
                      "between the two largest T; tail: over the last quarter of the rounds")  # fmt: skip
    out = folder(args)
    if out:
        path = rate_figure(rates, out / f"rate-{args.problem}-{args.distance:g}.png", about)
        if not args.json:
            console.print(f"figure: {path}")


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
    from ..report.theory import perturbation_figure
    from ..theory.perturbation import PENALTIES

    alpha = 1.0 if args.alpha is None else args.alpha
    problem = th.random_logistic(m=4, d=5, n=50, seed=args.seed)
    found = th.quasi_gradient_orders(problem, [0.2 / 2**i for i in range(7)], alpha=alpha, seed=args.seed)
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
            f"logistic loss, alpha {alpha:g}, rho from {found.rho[0]:g} to {found.rho[-1]:g}, seed {args.seed}; on a "
            f"quadratic the first error is 0"
        )
    out = folder(args)
    if out:
        path = perturbation_figure(found, out / "perturbation.png")
        if not args.json:
            console.print(f"figure: {path}")


def counterexample(args: argparse.Namespace, console: Console) -> None:
    """The printed theorem, broken."""
    from ..report.theory import counterexample_figure

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
    out = folder(args)
    if out:
        path = counterexample_figure(found, out / "counterexample.png")
        if not args.json:
            console.print(f"figure: {path}")


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
