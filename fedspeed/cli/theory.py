"""`fedspeed theory [ACTION]`: conditions and bound of the convergence theorem, its measured rate, its errata."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import theory as th
from ..errors import UserError
from . import options
from .output import show_table

if TYPE_CHECKING:
    from rich.console import Console

    from ..theory.bounds import Start
    from ..theory.experiment import Rate
    from ..theory.setting import RunSetting, Setting

DEFAULT_ACTION = "check"
ACTIONS = {
    "check": "check whether the theorem covers a setting, with its bound and a near setting that it covers (default)",
    "rate": "measure the O(1/T) rate under the conditions of each form, and plot it",
    "errata": "list the errors of the published analysis by number",
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
PROVED = {"printed": False, "consistent": False, "corrected": True, "tracking": True}
EPILOG = """\
The theorem has four forms: printed (as published), consistent (its algebra corrected), corrected (the same route with
every step proved) and tracking (another route, which keeps O(1/T)); docs/explanation/theory.md derives the last two.
Without an action the options are those of `fedspeed theory check`.

examples:
  fedspeed theory --eta 0.1 --lam 10 --K 50 --L 1
  fedspeed theory --eta 0.001 --lam 0.1 --K 200 --L 1 --sigma-l 1 --sigma-g 1 --T 1000
  fedspeed theory --from runs/NAME --L 5
  fedspeed theory rate --out figures
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the actions, and the options of each."""
    kinds = parser.add_subparsers(dest="action", metavar="[ACTION]")
    look = parser.formatter_class
    made = {name: kinds.add_parser(name, help=about, formatter_class=look) for name, about in ACTIONS.items()}
    check = made["check"]
    for name, kind, about in SETTING:
        check.add_argument("--" + name.replace("_", "-"), dest=name, type=kind, metavar="X", help=about)
    about = "rho divided by the gradient's norm"
    check.add_argument("--normalise", action=argparse.BooleanOptionalAction, default=None, help=about)
    check.add_argument("--gap", type=float, default=1.0, metavar="X", help="F(x^0) - F*; default 1")
    about = "mean_i ||grad F_i(x^0)||^2; default 2 L gap + sigma_g^2, which it cannot exceed"
    check.add_argument("--gradients", type=float, metavar="X", help=about)
    check.add_argument("--verbose", action="store_true", help="print every condition with value and slack")
    check.add_argument("--from", dest="run", metavar="RUN", help="take the setting from a run directory")
    rate = made["rate"]
    rate.add_argument("--problem", default="logistic", metavar="logistic|quadratic", help="default %(default)s")
    rate.add_argument("--rounds", default="32,64,128,256", metavar="T,T,..", help="default %(default)s")
    whose = "conditions of these forms: printed, corrected, tracking; free uses --free-lam; default all four"
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
        kind = options.seed if flag == "seed" else type(value)
        rate.add_argument(f"--{flag}", type=kind, default=value, metavar="X", help=f"{about}; default {value:g}")
    rate.add_argument("--out", metavar="DIR", help="write the figure there")
    for sub in made.values():
        sub.add_argument("--json", action="store_true", help="print the result as JSON and nothing else")


def main(args: argparse.Namespace, console: Console) -> int:
    """Run the action."""
    try:
        {"check": check, "rate": rate, "errata": errata}[args.action](args, console)
    except OverflowError:
        raise UserError(f"theory {args.action}: the numbers are too large to compute with; use smaller ones") from None
    return 0


def check(args: argparse.Namespace, console: Console) -> None:
    """Print conditions with slack, bounds, and what to change."""
    given = {name: value for name, _, _ in SETTING if (value := getattr(args, name)) is not None}
    if args.normalise is not None:
        given["normalise"] = args.normalise
    found = th.read_run(Path(args.run), given.get("K")) if args.run else None
    known = "L" in given or found is None or found.L is not None
    measured: dict[str, float] = {}
    if found:
        seen = {"L": found.L, "sigma_g": found.sigma_g}
        measured = {k: v for k, v in seen.items() if v is not None and v > 0 and k not in given}
        given = {**found.fields, **measured, **given}
    if args.gap < 0:
        raise UserError(f"theory: --gap must be >= 0, got {args.gap:g}; it is F(x^0) - F*")
    setting = th.Setting(**given)
    most = 2 * setting.L * args.gap + setting.sigma_g**2
    start = th.Start(args.gap, tracking=most if args.gradients is None else args.gradients)
    if args.json:
        _dump(console, _as_json(setting, start, found, known))
        return
    if found:
        _facts(console, found, args.run, " and ".join(measured), known, args.verbose)
    if args.verbose:
        console.print(f"sum of squared weights {setting.W:.3g}, P {th.P(setting):.4g}")
    at = f"gamma {setting.gamma:.4g}, lam L {setting.lam * setting.L:.4g}"
    console.print(f"{_verdict(setting, found) if known else 'L is not known, 1 is shown'}: {at}")
    if args.verbose:
        for form in th.FORMS:
            _conditions(console, setting, form)
    _forms(console, setting, start, args.verbose)
    if known:
        _nearest(console, setting, start)
    if not args.verbose:
        console.print("--verbose: every condition with its slack, and what to change")


def _verdict(setting: Setting, found: RunSetting | None) -> str:
    """Return whether a proved form covers this setting."""
    if found and any(fact.holds is False for fact in found.facts):
        return "no proof covers this run"
    proved = [f"`{form}`" for form in PROVED if PROVED[form] and th.form_at(setting, form).holds]
    open_ = ", if what is marked ? holds" if found and any(fact.holds is None for fact in found.facts) else ""
    return f"covered by {' and '.join(proved)}{open_}" if proved else "no proof covers this setting"


def _facts(console: Console, found: RunSetting, run: str, measured: str, known: bool, verbose: bool) -> None:
    """Print which of the theorem's assumptions a run meets; without `verbose` those that it does not."""
    console.print(f"{run}: " + ", ".join(f"{k} {v}" for k, v in found.fields.items()))
    marks = {True: "yes", False: "NO", None: "?"}
    rows = [(fact.name, marks[fact.holds], fact.why) for fact in found.facts if verbose or not fact.holds]
    if rows:
        show_table(console, ("what the theorem assumes", "this run", "since"), rows)
    if measured:
        at_least = "from inspect.json, curvature and dissimilarity at the last model alone, so at least these"
        console.print(f"{measured}: {at_least}")
    elif not known:
        console.print("L: unknown; give --L, or run `fedspeed inspect` on it first")


def _conditions(console: Console, setting: Setting, form: str) -> None:
    rows = []
    for c in th.form_at(setting, form).conditions:
        held = ("yes", "") if c.holds else ("NO", c.advice)
        numbers = (f"{c.value:.4g}", f"{c.limit:.4g}", f"{c.slack:.3g}")
        rows.append((c.name, *numbers, *held, ", ".join(map(str, c.errata))))
    show_table(console, (f"conditions `{form}`", "value", "limit", "slack", "holds", "if not", "errata"), rows)


def _forms(console: Console, setting: Setting, start: Start, verbose: bool) -> None:
    """Print a row per form: whether it is proved, how many conditions hold, its bound."""
    more = ("kappa", "largest term", "floor (Phi)") if verbose else ("fails first",)
    rows = []
    for form in th.FORMS:
        r, b = th.form_at(setting, form), th.bound(setting, start, form)
        usable, most = math.isfinite(b.total), th.largest_L(setting, form)
        failed = [c.name for c in r.conditions if not c.holds]
        held = "all hold" if r.holds else f"{len(r.conditions) - len(failed)} of {len(r.conditions)}"
        floor = f"{math.fsum(r.floor.values()):.4g}" if usable else "-"
        rest = (f"{r.kappa:.4g}", b.dominant if usable else "-", floor) if verbose else ([*failed, "-"][0],)
        total, largest = f"{b.total:.4g}" if usable else "-", f"{most:.3g}" if most else "none"
        rows.append((form, "yes" if PROVED[form] else "no", held, total, largest, *rest))
    show_table(console, ("form", "proved", "conditions", "bound", "largest L", *more), rows)
    console.print(
        f"bound: on (1/T) sum_t E||grad F(z^t)||^2, T = {setting.T}, from x^0 with F(x^0) - F* = {start.gap:g}\n"
        f"       and mean_i||grad F_i(x^0)||^2 = {start.tracking:.4g}\n"
        f"largest L: with which all conditions hold, the rest as it is"
    )


def _nearest(console: Console, setting: Setting, start: Start) -> None:
    """Print for each proved form that fails a setting nearby that meets it."""
    for form in ("tracking", "corrected"):
        if th.form_at(setting, form).holds:
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


def _as_json(setting: Setting, start: Start, found: RunSetting | None, known: bool) -> dict[str, Any]:
    forms = {}
    for form in th.FORMS:
        r, b = th.form_at(setting, form), th.bound(setting, start, form)
        forms[form] = {
            "proved": PROVED[form], "holds": r.holds, "kappa": r.kappa, "bound": b.total, "terms": b.terms,
            "largest_L": th.largest_L(setting, form),
            "conditions": [{**c._asdict(), "slack": c.slack, "holds": c.holds} for c in r.conditions],
        }  # fmt: skip
    facts = None if found is None else [fact._asdict() for fact in found.facts]
    return {"setting": setting.fields(), "gamma": setting.gamma, "L_known": known, "run": facts, "forms": forms}


def rate(args: argparse.Namespace, console: Console) -> None:
    """Measure the O(1/T) rate, print it, and draw it if --out is given."""
    if args.problem not in ("logistic", "quadratic"):
        raise UserError(f"theory rate: --problem must be logistic or quadratic, got {args.problem!r}")
    problem = (
        th.random_logistic(m=args.m, d=3, n=40, spread=3.0, seed=args.seed)
        if args.problem == "logistic"
        else th.random_quadratic(m=args.m, d=3, n=8, mu=0.3, sigma_g=1.0, sigma_l=2.0, seed=args.seed)
    )
    try:
        rounds = [int(part) for part in args.rounds.split(",")]
    except ValueError:
        raise UserError(f"--rounds: expected whole numbers such as 16,32,64, got {args.rounds!r}") from None
    how = {name: getattr(args, name) for name in ("distance", "batch", "seeds", "seed", "rho", "alpha")}
    how |= {"per_round": args.steps_per_round, "lam": args.free_lam}
    found: list[Rate] = []
    quiet = args.json or not console.is_terminal
    for form in args.conditions.split(","):
        with console.status("") as status:
            show = None if quiet else lambda name, T, f=form: status.update(f"{f}: {name}, T = {T}")
            found.append(th.rate(problem, form, rounds, **how, progress=show))
        if not args.json:
            _rate_table(console, found[-1])
    noise = problem.sigma_l(args.batch) if args.batch else 0.0
    about = (
        f"{args.problem}, {problem.m} clients, L = {problem.L:.3g}, sigma_g <= {problem.sigma_g:.3g}, sigma_l <= "
        f"{noise:.3g}, x^0 at {args.distance:g} from x*, seed {args.seed}"
    )
    if args.json:
        _dump(console, {"problem": about, "rates": [_rate_json(r) for r in found]})
    else:
        console.print(about + "\nslopes of log average on log T, with two standard errors (line and seeds); last two: "
                      "between the two largest T; tail: over the last quarter of the rounds")  # fmt: skip
    if args.out:
        from ..theory.experiment import rate_figure

        path = rate_figure(found, Path(args.out) / f"rate-{args.problem}-{args.distance:g}", title=about)
        if not args.json:
            console.print(f"figure: {path}")


def _rate_table(console: Console, r: Rate) -> None:
    lams = ", ".join(f"{s.lam:.3g}" for s in r.settings)
    rows = []
    for curve in r.curves:
        fit, tail = r.fit(curve.method), r.fit(curve.method, tail=True)
        slope, last = f"{fit.slope:.3f} ± {fit.error:.3f}", f"{r.last(curve.method):.3f}"
        averages = (f"{v:.3g}" for v in curve.average.mean(1))
        rows.append((curve.method, *averages, slope, last, f"{tail.slope:.2f} ± {tail.error:.2f}"))
    if r.bounds:
        rows.append(("bound", *(f"{b.total:.3g}" for b in r.bounds), f"{r.bound_fit.slope:.3f}", "", ""))
    titles = (f"conditions `{r.form}`", *(f"T = {t}" for t in r.T), "slope", "last two", "slope of the tail")
    show_table(console, titles, rows)
    seen = f"; FedSpeed reaches at most {r.worst:.3g} of the bound" if r.bounds else "; no bound"
    console.print(f"lam {lams}; K {r.settings[0].K} to {r.settings[-1].K}; eta = lam/K{seen}\n")


def errata(args: argparse.Namespace, console: Console) -> None:
    """Print the errata by number."""
    if args.json:
        _dump(console, {str(number): e._asdict() for number, e in th.ERRATA.items()})
    else:
        rows = [(str(number), e.printed, e.right, e.here) for number, e in th.ERRATA.items()]
        show_table(console, ("", "printed", "right", "here"), rows)


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
    """Print a result as JSON."""
    console.print_json(json.dumps(_finite(value)))


def _finite(value: Any) -> Any:
    """Replace what JSON does not have, infinity and NaN, by null."""
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
