"""Whether the runs bear a claim out: linear contrasts of cells, paired over seeds, with a 95% t-interval.

A contrast is v_s = sum of coefficient * metric(cell, seed s); pairing removes what a seed brings to all (split, cohorts
and start). The interval is mean(v) +- t(n - 1) * sd(v) / sqrt(n); a claim holds when every interval lies on its side.
"""

from __future__ import annotations

import itertools
import math
import re
import statistics
from dataclasses import dataclass, field
from typing import Any

from ..errors import UserError
from ..report.paired import interval
from .table import Sheet, censored, check_metric, metrics

HOLDS = "holds"
FAILS = "does not hold"
UNDECIDED = "undecided"
NOT_RUN = "not run"
PARTIAL = "no verdict: part of the data set"

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

    def slack(self, low: float, high: float) -> float:
        """How far inside the claim [low, high] lies; holds if > 0 (`=`: if >= 0)."""
        if self.op == "=":
            return min(low - (self.bound - self.within), self.bound + self.within - high)
        return low - self.bound if self.op == ">" else self.bound - high

    def verdict(self, low: float, high: float) -> str:
        """Holds where the whole interval lies inside the claim, does not hold where all of it lies outside."""
        slack = self.slack(low, high)
        if slack > 0 or (self.op == "=" and slack == 0):
            return HOLDS
        if self.op == "=":
            outside = low > self.bound + self.within or high < self.bound - self.within
        else:
            outside = high < self.bound if self.op == ">" else low > self.bound
        return FAILS if outside else UNDECIDED


def parse(text: str, claim: str = "") -> Expression:
    """An expression of a claim; the claim's text is for the error.

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
    pieces = re.split(r" ([+-]) ", f" {found['sum']} ")  # the blanks show a sign at either end, where a cell is missing
    terms = []
    for sign, piece in zip(["+", *pieces[1::2]], pieces[0::2], strict=True):
        term = _TERM.fullmatch(piece.strip())
        if not term or not term["cell"] or re.search(r" [<>] |^[*+-]( |$)", term["cell"]):
            raise _wrong(claim, "a cell name, perhaps after NUMBER*, between ` + ` and ` - `", piece.strip(), text)
        terms.append((float(sign + "1") * float(term["factor"] or 1), term["cell"]))
    return Expression(text.strip(), tuple(terms), op, float(found["bound"]), float(within or 0))


@dataclass(frozen=True)
class Claim:
    """What is claimed, and the expressions that decide it.

    Args:
        text: the claim in words.
        source: `paper` or `ours`.
        metric: of the contrasts; "" takes the recipe's primary one.
        each: names for the `{placeholders}`; every combination has to hold.
        holds_if: expressions, see `parse`.
        presets: where it is asked; () everywhere.
    """

    text: str
    source: str = "paper"
    metric: str = ""
    each: dict[str, list[str]] = field(default_factory=dict)
    holds_if: tuple[str, ...] = ()
    presets: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Expand and parse, so that a wrong recipe says so before it is run."""
        self.expressions()

    def asked_of(self, preset: str) -> bool:
        """Whether the claim is about this preset."""
        return not self.presets or preset in self.presets

    def expressions(self) -> list[Expression]:
        """Every expression with every combination of `each` filled in."""
        if self.source not in ("paper", "ours"):
            raise _wrong(self.text, "source `paper` or `ours`", self.source)
        if not _are_names(self.holds_if):
            raise _wrong(self.text, "a list holds_if of at least one expression", repr(self.holds_if))
        for name, choices in self.each.items():
            if not _are_names(choices):
                raise _wrong(self.text, f"each.{name} to be a list of at least one name", repr(choices))
            if not any(f"{{{name}}}" in text for text in self.holds_if):
                raise _wrong(self.text, f"{{{name}}} of `each` to be used in holds_if", " ; ".join(self.holds_if))
        filled = dict[str, None]()  # an expression without placeholders is the same in every combination
        for choice in itertools.product(*self.each.values()):
            names = dict(zip(self.each, choice, strict=True))
            for text in self.holds_if:
                pieces = re.split(r"\{(.*?)\}", text)  # text, name, text, name, ..., text
                strange = [name for name in pieces[1::2] if name not in names]
                if strange:
                    known = ", ".join(names) or "which is empty"
                    raise _wrong(self.text, f"a placeholder of `each` ({known})", strange[0], text)
                filled["".join(names[piece] if i % 2 else piece for i, piece in enumerate(pieces))] = None
        return [parse(text, self.text) for text in filled]

    def cells(self) -> set[str]:
        """The cells it names, to check a recipe with: a misspelt one would be `not run` for ever."""
        return {cell for expression in self.expressions() for _, cell in expression.terms}


@dataclass(frozen=True)
class Contrast:
    """One expression on the runs.

    Args:
        values: v_s of every seed that all its cells have.
        low, high: 95% t-interval of the mean; infinite where nothing bounds it.
        slack: how far inside the claim the interval lies; the least is the most telling.
        note: what else to know, e.g. that a target was never reached.
        paper: what the paper's own numbers give, where it has one for every cell.
    """

    text: str
    values: tuple[float, ...]
    mean: float
    low: float
    high: float
    verdict: str
    slack: float = -math.inf
    note: str = ""
    paper: float | None = None


@dataclass(frozen=True)
class Verdict:
    """A claim and what the runs say about it."""

    text: str
    source: str
    verdict: str
    contrasts: tuple[Contrast, ...]


def judge(claim: Claim, sheet: Sheet) -> Verdict:
    """The verdict of one claim: holds if all its contrasts hold, does not hold if any does not, else undecided.

    A cell that was not run leaves the claim open, unless a contrast that was run refutes it.
    """
    if not claim.asked_of(sheet.preset):
        return Verdict(claim.text, claim.source, NOT_RUN, ())
    metric = claim.metric or sheet.metric
    check_metric(metric, sheet.targets)
    contrasts = tuple(_contrast(expression, metric, sheet) for expression in claim.expressions())
    found = {contrast.verdict for contrast in contrasts}
    first = next((v for v in (PARTIAL, FAILS, NOT_RUN, UNDECIDED) if v in found), HOLDS)
    return Verdict(claim.text, claim.source, first, contrasts)


def _contrast(expression: Expression, metric: str, sheet: Sheet) -> Contrast:
    cells = {name: sheet.cells.get(name) for _, name in expression.terms}
    missing = [name for name, cell in cells.items() if cell is None or not cell.results]
    paper = _paper(expression, sheet) if metric == sheet.metric else None
    if missing:
        note = f"no {', '.join(missing)}"
        return Contrast(expression.text, (), math.nan, -math.inf, math.inf, NOT_RUN, note=note, paper=paper)
    by_seed = {name: {result["seed"]: result for result in cell.results} for name, cell in cells.items() if cell}
    shared = sorted(set.intersection(*(set(results) for results in by_seed.values())))
    values = []
    below = False
    above = False
    notes = dict[str, None]()
    for seed in shared:
        total = 0.0
        for factor, name in expression.terms:
            result = by_seed[name][seed]
            value = metrics(result, sheet.targets)[metric]
            if value is None:
                value = censored(result, metric)
                if value is None:  # e.g. the loss of a diverged run: dropping its seed would favour those that diverge
                    note = f"{name} has no {metric} for seed {seed}"
                    return _result(expression, (), -math.inf, math.inf, sheet, note, paper)
                # The true number is larger, so the contrast is a bound on one side and says nothing on the other.
                below, above = below or factor < 0, above or factor > 0
                notes[f"{name} did not reach the target in every run: a bound"] = None
            total += factor * value
        values.append(total)
    low, high = interval(values)
    low, high = -math.inf if below else low, math.inf if above else high
    return _result(expression, tuple(values), low, high, sheet, "; ".join(notes), paper)


def _paper(expression: Expression, sheet: Sheet) -> float | None:
    """The contrast of the paper's own numbers; None where one is missing or was never reached."""
    terms = [(factor, sheet.values.get(name)) for factor, name in expression.terms]
    numbers = [factor * value for factor, value in terms if isinstance(value, int | float)]
    return math.fsum(numbers) if len(numbers) == len(terms) else None


def _result(
    expression: Expression,
    values: tuple[float, ...],
    low: float,
    high: float,
    sheet: Sheet,
    note: str,
    paper: float | None,
) -> Contrast:
    mean = statistics.fmean(values) if values else math.nan
    verdict = PARTIAL if sheet.partial else expression.verdict(low, high)
    return Contrast(expression.text, values, mean, low, high, verdict, expression.slack(low, high), note, paper)


def _are_names(value: Any) -> bool:
    """A list of at least one string; a string by itself would be taken letter by letter."""
    return isinstance(value, list | tuple) and len(value) > 0 and all(isinstance(name, str) for name in value)


def _wrong(claim: str, expected: str, found: str, whole: str = "") -> UserError:
    """An error that names the claim and the piece."""
    where = f" in {whole!r}" if whole else ""
    return UserError(f"claim {claim!r}: expected {expected}, found {found!r}{where}; correct it in the recipe")
