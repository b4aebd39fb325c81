"""The actions of `fedspeed theory`; imported when one is asked for."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import theory as th
from ..errors import UserError
from .theory import SETTING, folder, numbers

if TYPE_CHECKING:
    from rich.console import Console

    from ..theory.bounds import Start
    from ..theory.experiment import Rate
    from ..theory.of_run import RunSetting
    from ..theory.setting import Setting

PROVED = {"printed": "no", "consistent": "no", "corrected": "yes", "tracking": "yes"}


def check(args: argparse.Namespace, console: Console) -> None:
    """Conditions with slack, bounds, what to change."""
    given = {name: value for name, _, _ in SETTING if (value := getattr(args, name)) is not None}
    if args.normalise is not None:
        given["normalise"] = args.normalise
    found = th.read_run(Path(args.run), given.get("K")) if args.run else None
    known = "L" in given or found is None or found.L is not None
    if found:
        measured = {"L": found.L, "sigma_g": found.sigma_g}
        given = {**found.fields, **{k: v for k, v in measured.items() if v is not None and v > 0}, **given}
    if args.gap < 0:
        raise UserError(f"theory: --gap must be >= 0, got {args.gap:g}; it is F(x^0) - F*")
    setting = th.Setting(**given)
    most = 2 * setting.L * args.gap + setting.sigma_g**2
    start = th.Start(args.gap, tracking=most if args.gradients is None else args.gradients)
    if args.json:
        _dump(console, _as_json(setting, start, found, known))
        return
    if found:
        _facts(console, found, args.run, known)
    console.print(
        f"gamma {setting.gamma:.4g}, sum of squared weights {setting.W:.3g}, P {th.P(setting):.4g}, lam L "
        f"{setting.lam * setting.L:.4g}" + ("" if known else " (L is not known; 1 is shown)")
    )
    for form in th.FORMS:
        _conditions(console, setting, form)
    _bounds(console, setting, start, known)


def _facts(console: Console, found: RunSetting, run: str, known: bool) -> None:
    console.print(f"{run}: " + ", ".join(f"{k} {v}" for k, v in found.fields.items()))
    table = _table("what the theorem assumes", "this run", "since")
    for fact in found.facts:
        table.add_row(fact.name, {True: "yes", False: "NO", None: "?"}[fact.holds], fact.why)
    console.print(table)
    if found.L is not None:
        console.print("L and sigma_g: from inspect.json, curvature and dissimilarity at the last model alone, so at "
                      "least these")  # fmt: skip
    elif not known:
        console.print("L: unknown; say --L, or run `fedspeed inspect` on it first")


def _conditions(console: Console, setting: Setting, form: str) -> None:
    r = th.route(setting, form)
    table = _table(f"conditions `{form}`", "value", "limit", "slack", "holds", "if not", "errata")
    for c in r.conditions:
        mark = "yes" if c.holds else "NO"
        errata = ", ".join(map(str, c.errata))
        table.add_row(c.name, f"{c.value:.4g}", f"{c.limit:.4g}", f"{c.slack:.3g}", mark, "" if c.holds else c.advice,
                      errata)  # fmt: skip
    console.print(table)


def _bounds(console: Console, setting: Setting, start: Start, known: bool) -> None:
    table = _table("form", "proved", "conditions hold", "kappa", "bound", "largest term", "floor (Phi)", "largest L")
    for form in th.FORMS:
        r, b = th.route(setting, form), th.bound(setting, start, form)
        usable, most = math.isfinite(b.total), th.largest_L(setting, form)
        table.add_row(
            form, PROVED[form], "yes" if r.holds else "NO", f"{r.kappa:.4g}", f"{b.total:.4g}" if usable else "-",
            b.dominant if usable else "-", f"{math.fsum(r.floor.values()):.4g}" if usable else "-",
            f"{most:.3g}" if most else "none",
        )  # fmt: skip
    console.print(table)
    console.print(
        f"bound: on (1/T) sum_t E||grad F(z^t)||^2 from x^0 with F(x^0) - F* = {start.gap:g} and "
        f"mean_i||grad F_i(x^0)||^2 = {start.tracking:.4g}; largest L: with which the conditions still hold"
    )
    if not known:
        return
    for form in ("tracking", "corrected"):
        if th.route(setting, form).holds:
            continue
        near = th.suggest(setting, form, start)
        if near is None:
            console.print(f"no lam meets `{form}` with K = {setting.K}")
            continue
        extra = "" if near.rho == setting.rho and near.normalise == setting.normalise else f" --rho {near.rho:.4g}"
        console.print(
            f"meets `{form}`: --lam {near.lam:.4g} --eta {near.eta:.4g} --K {near.K}{extra}"
            f"{' --no-normalise' if setting.normalise and not near.normalise else ''}, bound "
            f"{th.bound(near, start, form).total:.4g}"
        )


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
        _dump(console, {"problem": about, "rates": [_rate_json(r) for r in rates]})
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
    table = _table(f"conditions `{r.form}`", *(f"T = {t}" for t in r.T), "slope", "last two", "slope of the tail")
    for curve in r.curves:
        fit, tail = r.fit(curve.method), r.fit(curve.method, tail=True)
        table.add_row(curve.method, *(f"{v:.3g}" for v in curve.average.mean(1)), f"{fit.slope:.3f} ± {fit.error:.3f}",
                      f"{r.last(curve.method):.3f}", f"{tail.slope:.2f} ± {tail.error:.2f}")  # fmt: skip
    if r.bounds:
        table.add_row("bound", *(f"{b.total:.3g}" for b in r.bounds), f"{r.bound_fit.slope:.3f}", "", "")
    console.print(table)
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
        _dump(console, {name: {"order": fit.slope, "error": fit.error} for name, fit in found.order.items()})
    else:
        table = _table("penalty", "g_tilde with", "order of the error", "error / effect at the least rho")
        for name, about in PENALTIES.items():
            fit = found.order[name]
            share = found.error[name][-1] / found.effect[name][-1]
            table.add_row(name, about, f"{fit.slope:.3f} ± {fit.error:.3f}", f"{share:.3g}")
        console.print(table)
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
        _dump(console, rows)
    else:
        table = _table(
            "lam L", "eta", "K", "T", "printed conditions hold", "average seen", "printed bound", "bound broken"
        )
        for c in found:
            s = c.setting
            table.add_row(f"{s.lam:g}", f"{s.eta:.3g}", f"{s.K:,}", f"{s.T:,}", "yes" if c.bound.valid else "NO",
                          f"{c.average:.4g}", f"{c.bound.total:.4g}", "YES" if c.violated else "no")  # fmt: skip
        console.print(table)
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
        _dump(console, [row._asdict() for row in th.RATES])
        return
    table = _table("method", "rate", "K", "assumptions", "note", "source")
    for row in th.RATES:
        table.add_row(row.method, row.rate, row.K, row.assumptions, row.note, row.source)
    console.print(table)


def errata(args: argparse.Namespace, console: Console) -> None:
    """The errata by number."""
    if args.json:
        _dump(console, {str(number): e._asdict() for number, e in th.ERRATA.items()})
        return
    table = _table("", "printed", "right", "here")
    for number, e in th.ERRATA.items():
        table.add_row(str(number), e.printed, e.right, e.here)
    console.print(table)


def _table(*titles: str) -> Any:
    from rich.table import Table

    return Table(*titles, box=None, pad_edge=False)


def _as_json(setting: Setting, start: Start, found: RunSetting | None, known: bool) -> dict[str, Any]:
    forms = {}
    for form in th.FORMS:
        r, b = th.route(setting, form), th.bound(setting, start, form)
        forms[form] = {
            "proved": PROVED[form] == "yes", "holds": r.holds, "kappa": r.kappa, "bound": b.total, "terms": b.terms,
            "largest_L": th.largest_L(setting, form),
            "conditions": [{**c._asdict(), "slack": c.slack, "holds": c.holds} for c in r.conditions],
        }  # fmt: skip
    facts = None if found is None else [fact._asdict() for fact in found.facts]
    return {"setting": setting.fields(), "gamma": setting.gamma, "L_known": known, "run": facts, "forms": forms}


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


def _dump(console: Console, value: Any) -> None:
    console.print_json(json.dumps(_finite(value)))


def _finite(value: Any) -> Any:
    """JSON has no infinity: null."""
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
