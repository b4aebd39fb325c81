"""Claims of a paper as expressions over the cells of a table; `verdicts` tests them with the runs."""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import dataclass, field
from typing import Any

from ..errors import UserError

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
    pieces = re.split(
        r" ([+-]) ", f" {found['sum']} "
    )  # with the blanks, a sign at either end is found too: a cell is missing there
    terms = []
    for sign, piece in zip(["+", *pieces[1::2]], pieces[0::2], strict=True):
        term = _TERM.fullmatch(piece.strip())
        if not term or not term["cell"] or re.search(r" [<>] |^[*+-]( |$)", term["cell"]):
            raise _wrong(claim, "a cell name, perhaps after NUMBER*, between ` + ` and ` - `", piece.strip(), text)
        terms.append((float(sign + "1") * float(term["factor"] or 1), term["cell"]))
    return Expression(text.strip(), tuple(terms), op, float(found["bound"]), float(within or 0))


@dataclass(frozen=True)
class Claim:
    """A claim and the expressions that decide it.

    Args:
        text: the claim in words.
        source: one of `SOURCES`.
        metric: the metric of the contrasts; "" takes the recipe's primary one.
        ratio: use logarithms, so that `A - B > 0` is about the ratio of A and B.
        each: names for the `{placeholders}`; every combination has to hold.
        holds_if: expressions, see `parse`; at CPU scale only the sign of the paper's claim.
        size_if: expressions for the size, which replace `holds_if` at the paper's scale; alone, tested only there.
        presets: the presets that test it; () for every preset that has its cells.
    """

    text: str
    source: str = "paper"
    metric: str = ""
    ratio: bool = False
    each: dict[str, list[str]] = field(default_factory=dict)
    holds_if: tuple[str, ...] = ()
    size_if: tuple[str, ...] = ()
    presets: tuple[str, ...] = ()

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
