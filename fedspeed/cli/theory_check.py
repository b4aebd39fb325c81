"""`fedspeed theory check`: does the theorem cover a setting or a run, what it says there, what to change."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import theory as th
from ..errors import UserError
from .theory import SETTING, dump, new_table

if TYPE_CHECKING:
    from rich.console import Console

    from ..theory.bounds import Start
    from ..theory.from_run import RunSetting
    from ..theory.setting import Setting

PROVED = {"printed": False, "consistent": False, "corrected": True, "tracking": True}


def check(args: argparse.Namespace, console: Console) -> None:
    """Conditions with slack, bounds, what to change."""
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
        dump(console, _as_json(setting, start, found, known))
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
    """Whether what is proved speaks of this setting."""
    if found and any(fact.holds is False for fact in found.facts):
        return "no proof covers this run"
    proved = [f"`{form}`" for form in PROVED if PROVED[form] and th.form_at(setting, form).holds]
    open_ = ", if what is marked ? holds" if found and any(fact.holds is None for fact in found.facts) else ""
    return f"covered by {' and '.join(proved)}{open_}" if proved else "no proof covers this setting"


def _facts(console: Console, found: RunSetting, run: str, measured: str, known: bool, verbose: bool) -> None:
    """What a run has of the theorem's assumptions; without `verbose` those that it does not meet."""
    console.print(f"{run}: " + ", ".join(f"{k} {v}" for k, v in found.fields.items()))
    table = new_table("what the theorem assumes", "this run", "since")
    for fact in found.facts:
        if verbose or not fact.holds:
            table.add_row(fact.name, {True: "yes", False: "NO", None: "?"}[fact.holds], fact.why)
    if table.row_count:
        console.print(table, soft_wrap=False)
    if measured:
        console.print(f"{measured}: from inspect.json, curvature and dissimilarity at the last model alone, so "
                      f"at least these")  # fmt: skip
    elif not known:
        console.print("L: unknown; say --L, or run `fedspeed inspect` on it first")


def _conditions(console: Console, setting: Setting, form: str) -> None:
    r = th.form_at(setting, form)
    table = new_table(f"conditions `{form}`", "value", "limit", "slack", "holds", "if not", "errata")
    for c in r.conditions:
        mark = "yes" if c.holds else "NO"
        errata = ", ".join(map(str, c.errata))
        table.add_row(c.name, f"{c.value:.4g}", f"{c.limit:.4g}", f"{c.slack:.3g}", mark, "" if c.holds else c.advice,
                      errata)  # fmt: skip
    console.print(table, soft_wrap=False)


def _forms(console: Console, setting: Setting, start: Start, verbose: bool) -> None:
    """One row per form: whether it is proved, how many conditions hold, its bound."""
    more = ("kappa", "largest term", "floor (Phi)") if verbose else ("fails first",)
    table = new_table("form", "proved", "conditions", "bound", "largest L", *more)
    for form in th.FORMS:
        r, b = th.form_at(setting, form), th.bound(setting, start, form)
        usable, most = math.isfinite(b.total), th.largest_L(setting, form)
        failed = [c.name for c in r.conditions if not c.holds]
        held = "all hold" if r.holds else f"{len(r.conditions) - len(failed)} of {len(r.conditions)}"
        floor = f"{math.fsum(r.floor.values()):.4g}" if usable else "-"
        rest = (f"{r.kappa:.4g}", b.dominant if usable else "-", floor) if verbose else ([*failed, "-"][0],)
        table.add_row(form, "yes" if PROVED[form] else "no", held, f"{b.total:.4g}" if usable else "-",
                      f"{most:.3g}" if most else "none", *rest)  # fmt: skip
    console.print(table, soft_wrap=False)
    console.print(
        f"bound: on (1/T) sum_t E||grad F(z^t)||^2, T = {setting.T}, from x^0 with F(x^0) - F* = {start.gap:g}\n"
        f"       and mean_i||grad F_i(x^0)||^2 = {start.tracking:.4g}\n"
        f"largest L: with which all conditions hold, the rest as it is"
    )


def _nearest(console: Console, setting: Setting, start: Start) -> None:
    """For each proved form that fails a setting nearby that meets it."""
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
