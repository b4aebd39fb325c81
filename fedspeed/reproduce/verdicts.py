"""Claims of a paper as expressions over the cells of a table, and verdicts on them: contrasts, paired over seeds.

A contrast is v_s = sum of coefficient * metric(cell, seed s). Pairing removes the variation that all cells share in a
seed (split, cohorts and initial model). A contrast is decided, for or against the claim, if the p of its t-test is at
most 0.05 after Holm's correction over the contrasts of the claim. A claim holds if all contrasts are decided for it,
and does not hold if one is decided against it.
"""

from __future__ import annotations

import itertools
import math
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..errors import UserError
from ..report.statistics import interval, t_p
from .table import COUNTED, UNITS, Result, Sheet, base, censored, check_metric, estimate, is_diverged, metrics

SOURCES = {"paper": "the paper's", "tolerance": "the paper's, our tolerance", "ours": "ours"}
"""The authors of a claim; `tolerance`: the claim is the paper's, its tolerance is ours."""

_NUMBER = r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?"
_COMPARISON = re.compile(rf"(?P<sum>.*) (?P<op>[<>=]) (?P<bound>{_NUMBER})(?: within (?P<within>{_NUMBER}))?")
_TERM = re.compile(rf"(?:(?P<factor>{_NUMBER})\s*\*\s*)?(?P<cell>.*)")


@dataclass(frozen=True)
class Expression:
    """`sum of coefficient * cell`, then `> bound`, `< bound` or `= bound within e`."""

    text: str
    terms: tuple[tuple[float, str], ...]
    op: str
    bound: float
    within: float = 0.0

    @property
    def edges(self) -> tuple[float, float]:
        """The ends of the interval that the claim allows."""
        if self.op == "=":
            return self.bound - self.within, self.bound + self.within
        return (self.bound, math.inf) if self.op == ">" else (-math.inf, self.bound)


def parse(text: str, claim: str = "") -> Expression:
    """Parse an expression of a claim; an error names the claim.

    Example:
        >>> parse("FedSpeed/Dir-0.6 - 0.5*FedAvg/Dir-0.6 > 1").terms
        ((1.0, 'FedSpeed/Dir-0.6'), (-0.5, 'FedAvg/Dir-0.6'))
    """
    found = _COMPARISON.fullmatch(text.strip())
    if not found:
        raise _wrong(claim, "an expression that ends in ` > NUMBER`, ` < NUMBER` or ` = NUMBER within NUMBER`", text)
    op, within = found["op"], found["within"]
    if (op == "=") != (within is not None):
        raise _wrong(claim, "`within NUMBER` after ` = NUMBER`, and only there", text)
    if within is not None and float(within) < 0:
        raise _wrong(claim, "`within` a number >= 0", text)
    # With the blanks, a sign at either end is found too: a cell is missing there.
    pieces = re.split(r" ([+-]) ", f" {found['sum']} ")
    terms = []
    for sign, piece in zip(["+", *pieces[1::2]], pieces[0::2], strict=True):
        term = _TERM.fullmatch(piece.strip())
        if not term or not term["cell"] or re.search(r" [<>] |^[*+-]( |$)", term["cell"]):
            raise _wrong(claim, "a cell name, perhaps after NUMBER*, between ` + ` and ` - `", piece.strip(), text)
        terms.append((float(sign + "1") * float(term["factor"] or 1), term["cell"]))
    return Expression(text.strip(), tuple(terms), op, float(found["bound"]), float(within or 0))


@dataclass(frozen=True)
class Claim:
    """A claim in words and the expressions that decide it, see `parse`."""

    text: str
    source: str = "paper"  # one of `SOURCES`
    metric: str = ""  # the metric of the contrasts; "" takes the recipe's primary one
    ratio: bool = False  # use logarithms, so that `A - B > 0` is about the ratio of A and B
    each: dict[str, list[str]] = field(default_factory=dict)  # for the `{placeholders}`; all combinations have to hold
    holds_if: tuple[str, ...] = ()  # at CPU scale only the sign of the paper's claim
    size_if: tuple[str, ...] = ()  # of the size; replace `holds_if` at the paper's scale; alone, tested only there
    presets: tuple[str, ...] = ()  # the presets that test it; () for every preset that has its cells

    def __post_init__(self) -> None:
        """Expand and parse all expressions, so that a wrong recipe fails before it is run."""
        if self.source not in SOURCES:
            raise _wrong(self.text, f"source {', '.join(SOURCES)}", self.source)
        if not self.holds_if and not self.size_if:
            raise _wrong(self.text, "a list holds_if, or size_if, of at least one expression", repr(self.holds_if))
        for name, choices in self.each.items():
            if not _are_names(choices):
                raise _wrong(self.text, f"each.{name} to be a list of at least one name", repr(choices))
            if not any(f"{{{name}}}" in text for text in (*self.holds_if, *self.size_if)):
                raise _wrong(self.text, f"{{{name}}} of `each` to be used in holds_if", " ; ".join(self.holds_if))
        self.expressions(True), self.expressions(False)

    def asked(self, preset: str, cells: set[str], papers_scale: bool) -> bool:
        """Whether a preset tests the claim: it needs the claim's cells, and for sizes the paper's scale."""
        if self.presets and preset not in self.presets:
            return False
        return bool(self.size_if if papers_scale and self.size_if else self.holds_if) and self.cells() <= cells

    def expressions(self, papers_scale: bool = False) -> list[Expression]:
        """Return every expression with every combination of `each` filled in."""
        texts = self.size_if if papers_scale and self.size_if else self.holds_if
        if texts and not _are_names(texts):
            raise _wrong(self.text, "a list of at least one expression", repr(texts))
        filled = dict[str, None]()  # an expression without placeholders is the same in every combination
        for choice in itertools.product(*self.each.values()):
            names = dict(zip(self.each, choice, strict=True))
            for text in texts:
                pieces = re.split(r"\{(.*?)\}", text)  # text, name, text, name, ..., text
                strange = [name for name in pieces[1::2] if name not in names]
                if strange:
                    known = ", ".join(names) or "which is empty"
                    raise _wrong(self.text, f"a placeholder of `each` ({known})", strange[0], text)
                filled["".join(names[piece] if i % 2 else piece for i, piece in enumerate(pieces))] = None
        return [parse(text, self.text) for text in filled]

    def said(self, papers_scale: bool) -> str:
        """Return whose claim it is, and whether only its sign is tested."""
        if papers_scale or not self.size_if:
            return SOURCES[self.source]
        return f"{SOURCES['paper']}, its sign"

    def cells(self) -> set[str]:
        """Return the cells it names; a recipe is checked with them: a claim on a misspelt cell is never tested."""
        both = (*self.expressions(True), *self.expressions(False))
        return {cell for expression in both for _, cell in expression.terms}


def _are_names(value: Any) -> bool:
    """Whether a value is a list of at least one string; a single string would be split into letters."""
    return isinstance(value, list | tuple) and len(value) > 0 and all(isinstance(name, str) for name in value)


def _wrong(claim: str, expected: str, found: str, whole: str = "") -> UserError:
    """Return an error that names the claim and the wrong piece."""
    where = f" in {whole!r}" if whole else ""
    return UserError(f"claim {claim!r}: expected {expected}, found {found!r}{where}; correct it in the recipe")


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
    """One expression on the runs."""

    text: str
    values: tuple[float, ...]  # v_s of every seed that all its cells have
    mean: float
    low: float  # to `high`: 95% t-interval of the mean of this contrast alone; infinite on an unbounded side
    high: float
    verdict: str
    p: float | None = None  # two-sided, of the t-test against the claim's nearest edge; None if it cannot be tested
    adjusted: float | None = None  # p after Holm's correction over the claim
    leaning: float = 0.0  # the distance of the mean from the edge in standard errors; negative outside the claim
    note: str = ""  # a remark, for example that a target was never reached
    paper: float | None = None  # the contrast of the paper's own numbers, if it has one for every cell


@dataclass(frozen=True)
class Verdict:
    """A claim with the verdict of the runs."""

    text: str
    source: str  # one of `SOURCES`
    said: str  # whose claim it is, in words, and whether its size or its sign was tested
    verdict: str
    contrasts: tuple[Contrast, ...]
    ranks: tuple[str, ...] = ()  # the ranks of the row that a claim compares with others, by column

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
