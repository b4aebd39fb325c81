"""Verdicts on claims: linear contrasts of cells, paired over seeds, corrected for their number.

A contrast is v_s = sum of coefficient * metric(cell, seed s). Pairing removes the variation that all cells share in a
seed (split, cohorts and initial model). A contrast is decided, for or against the claim, if the p of its t-test is at
most 0.05 after Holm's correction over the contrasts of the claim. A claim holds if all contrasts are decided for it,
and does not hold if one is decided against it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..report.statistics import interval, t_p
from .claims import Claim, Expression
from .table import COUNTED, UNITS, Result, Sheet, base, censored, check_metric, estimate, is_diverged, metrics

HOLDS = "holds"
FAILS = "does not hold"
UNDECIDED = "undecided"
DIVERGED = "undecided (diverged)"
NOT_RUN = "not run"
PARTIAL = "no verdict: part of the data set"
UNTIMED = "no verdict: not timed alone"
LEVEL = 0.05


@dataclass(frozen=True)
class Contrast:
    """One expression on the runs.

    Args:
        values: v_s of every seed that all its cells have.
        low, high: 95% t-interval of the mean of this contrast alone; infinite on an unbounded side.
        p: two-sided p of the t-test against the claim's nearest edge; None if it cannot be tested.
        adjusted: p after Holm's correction over the claim.
        leaning: the distance of the mean from the edge in standard errors; negative outside the claim.
        note: a remark, for example that a target was never reached.
        paper: the contrast of the paper's own numbers, if it has one for every cell.
    """

    text: str
    values: tuple[float, ...]
    mean: float
    low: float
    high: float
    verdict: str
    p: float | None = None
    adjusted: float | None = None
    leaning: float = 0.0
    note: str = ""
    paper: float | None = None


@dataclass(frozen=True)
class Verdict:
    """A claim with the verdict of the runs.

    Args:
        source: one of `SOURCES`.
        said: whose claim it is, in words, and whether its size or its sign was tested.
        ranks: the ranks of the row that a claim compares with others, by column.
    """

    text: str
    source: str
    said: str
    verdict: str
    contrasts: tuple[Contrast, ...]
    ranks: tuple[str, ...] = ()

    def count(self, *verdicts: str) -> int:
        """Return the number of contrasts with one of these verdicts."""
        return sum(contrast.verdict in verdicts for contrast in self.contrasts)


def judge(claim: Claim, sheet: Sheet) -> Verdict:
    """Return the verdict on a claim: it holds if all contrasts do, does not if any does not, else it is undecided.

    A cell that was not run leaves the claim open, unless another contrast refutes it.
    """
    metric = claim.metric or sheet.metric
    check_metric(metric, sheet.targets)
    said = claim.said(sheet.papers_scale)
    expressions = claim.expressions(sheet.papers_scale)
    if base(metric).startswith("seconds"):
        return Verdict(claim.text, claim.source, said, UNTIMED, ())
    found = _corrected([_contrast(expression, metric, claim.ratio, sheet) for expression in expressions])
    kinds = {contrast.verdict for contrast in found}
    first = next((v for v in (PARTIAL, FAILS, NOT_RUN, UNDECIDED, DIVERGED) if v in kinds), HOLDS)
    return Verdict(claim.text, claim.source, said, first, found, tuple(_ranks(expressions, metric, sheet)))


def holm(ps: Sequence[float]) -> list[float]:
    """Return Holm's adjusted p: the k-th smallest of m times m - k + 1, never below the adjusted p of a smaller one.

    Example:
        >>> holm([0.01, 0.04, 0.03])
        [0.03, 0.06, 0.06]
    """
    adjusted = [1.0] * len(ps)
    highest = 0.0
    for k, i in enumerate(sorted(range(len(ps)), key=lambda i: ps[i])):
        highest = max(highest, min(1.0, (len(ps) - k) * ps[i]))
        adjusted[i] = highest
    return adjusted


def _corrected(contrasts: list[Contrast]) -> tuple[Contrast, ...]:
    """Return the contrasts after Holm's correction over those that were tested.

    The same runs in two columns count as one test.
    """
    family = list(dict.fromkeys((c.values, c.p) for c in contrasts if c.p is not None))
    adjusted = dict(zip(family, holm([p for _, p in family]), strict=True))
    found = []
    for contrast in contrasts:
        if contrast.p is not None:
            p = adjusted[contrast.values, contrast.p]
            verdict = contrast.verdict if p <= LEVEL or contrast.verdict == PARTIAL else UNDECIDED
            contrast = replace(contrast, adjusted=p, verdict=verdict)
        found.append(contrast)
    return tuple(found)


def _contrast(expression: Expression, metric: str, ratio: bool, sheet: Sheet) -> Contrast:
    """Return the contrast of an expression, with the verdict that holds if it is decided."""
    paper = _paper(expression, sheet) if metric == sheet.metric and not ratio else None
    nothing = Contrast(expression.text, (), math.nan, -math.inf, math.inf, UNDECIDED, paper=paper)
    cells = {name: sheet.cells.get(name) for _, name in expression.terms}
    missing = [name for name, cell in cells.items() if cell is None or not cell.results]
    if missing:
        return replace(nothing, verdict=NOT_RUN, note=f"no {', '.join(missing)}")
    broken = [name for name, cell in cells.items() if cell and any(map(is_diverged, cell.results))]
    if broken:
        nothing = replace(nothing, verdict=DIVERGED, note=f"diverged: {', '.join(broken)}")
    by_seed = {name: {result["seed"]: result for result in cell.results} for name, cell in cells.items() if cell}
    values, below, above, notes = [], False, False, dict[str, None]()
    for seed in sorted(set.intersection(*(set(results) for results in by_seed.values()))):
        total = 0.0
        for factor, name in expression.terms:
            value, bound = _value(by_seed[name][seed], metric, sheet)
            if value is None:
                return nothing if broken else replace(nothing, note=f"{name} has no {metric} for seed {seed}")
            if bound:  # the true number is larger, so only one side is bounded
                below, above = below or factor < 0, above or factor > 0
                notes[f"{name} did not reach the target in every run: a bound"] = None
            total += factor * (math.log(value) if ratio else value)
        values.append(total)
    found = replace(nothing, values=tuple(values), note=nothing.note or "; ".join(notes))
    if not values:
        return found
    low, high = interval(values)
    low, high = -math.inf if below else low, math.inf if above else high
    found = replace(found, mean=statistics.fmean(values), low=low, high=high)
    if sheet.partial:
        return replace(found, verdict=PARTIAL)
    if broken or len(values) < 2:
        return found
    return _tested(found, expression, metric in COUNTED, below, above)


def _tested(found: Contrast, expression: Expression, counted: bool, below: bool, above: bool) -> Contrast:
    """Return the contrast with the p of the claim's nearest edge (inside: of both), and the verdict it decides.

    Equal values in all seeds come from a coarse test set or evaluation interval, so they decide nothing; except for
    counted metrics, which have no spread, and for runs that are equal.
    """
    start, end = expression.edges
    mean = found.mean
    inside = start <= mean <= end if expression.op == "=" else start < mean < end
    if max(found.values) - min(found.values) <= 1e-9:
        exact = counted or (expression.op == "=" and expression.bound == 0 and not any(found.values))
        if not exact:
            return replace(found, note="; ".join(filter(None, (found.note, "the same in every seed: no spread"))))
        return replace(found, p=0.0, verdict=HOLDS if inside else FAILS)
    edges = [edge for edge in (start, end) if math.isfinite(edge)] if inside else [end if mean >= end else start]
    if any(below if mean > edge else above for edge in edges):  # the side that matters is unbounded
        return replace(found, p=1.0)
    n = len(found.values)
    error = statistics.stdev(found.values) / math.sqrt(n)
    away = min(abs(mean - edge) for edge in edges) / error
    return replace(found, p=t_p(away, n - 1), leaning=away if inside else -away, verdict=HOLDS if inside else FAILS)


def _value(result: Result, metric: str, sheet: Sheet) -> tuple[float | None, bool]:
    """Return the metric, and whether it is only a lower bound; None for example for the loss of a diverged run."""
    value = metrics(result, sheet.targets)[metric]
    return (value, False) if value is not None else (censored(result, metric), True)


def _paper(expression: Expression, sheet: Sheet) -> float | None:
    """Return the contrast of the paper's own numbers; None if one is missing, a bound, or for another target."""
    if sheet.other_targets:
        return None
    terms = [(factor, sheet.values.get(name)) for factor, name in expression.terms]
    numbers = [factor * value for factor, value in terms if isinstance(value, int | float)]
    return math.fsum(numbers) if len(numbers) == len(terms) else None


def _ranks(expressions: list[Expression], metric: str, sheet: Sheet) -> list[str]:
    """Return ranks by mean, `FedSpeed 2 of 8 on IID`, if every contrast compares one row with another."""
    pairs = [(e.terms[0][1], e.terms[1][1]) for e in expressions if _compares(e, sheet)]
    if len(pairs) != len(expressions):
        return []
    for side in (0, 1):  # the row that the claim puts above, or below, the others
        rivals: dict[str, list[str]] = {}
        for pair in pairs:
            rivals.setdefault(pair[side], []).append(pair[1 - side])
        if len({sheet.cells[name].row for name in rivals}) == 1 and all(len(others) > 1 for others in rivals.values()):
            found = [_rank(name, others, metric, sheet) for name, others in rivals.items()]
            return [text for text in found if text]
    return []


def _compares(expression: Expression, sheet: Sheet) -> bool:
    """Whether an expression says that one cell is above another of the same column."""
    cells = [sheet.cells.get(name) for _, name in expression.terms]
    signs = [factor for factor, _ in expression.terms] == [1, -1] and (expression.op, expression.bound) == (">", 0)
    return signs and None not in cells and len({cell.column for cell in cells if cell}) == 1


def _rank(name: str, others: list[str], metric: str, sheet: Sheet) -> str:
    """Return the rank from the best (highest accuracy, lowest other metric); `1 to 4 of 4` for ties."""
    sign = 1 if UNITS.get(metric) == "%" else -1
    found = {cell: estimate(sheet.cells[cell], metric, sheet.targets) for cell in (name, *others)}
    known = {cell: sign * each.mean for cell, each in found.items() if each}
    if name not in known or len(known) < 2:
        return ""
    place = 1 + sum(value > known[name] for value in known.values())
    last = sum(value >= known[name] for value in known.values())
    places = f"{place} to {last}" if last > place else str(place)
    cell = sheet.cells[name]
    where = f" on {cell.column}" if len(sheet.columns) > 1 else ""
    return f"{cell.row} {places} of {len(known)}{where}"
