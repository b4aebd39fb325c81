"""What an audit found, and how it reads."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..methods.base import Method
from .setting import Setting
from .trace import Difference, Key, Trace, first_difference

if TYPE_CHECKING:
    from .faults import Fault


KINDS = {
    "denominator": "a sum divided by the wrong number: S, N, K or nothing",
    "sign": "a term with the wrong sign",
    "state": "a state that leaks from another client, is lost between rounds, or is old",
    "missing term": "a term that has no effect: no gradient flows, it is never added, or it is overwritten",
    "local steps": "K off by one, or a wrong K or rate where a sum of steps is scaled back",
    "learning rate": "a rate that does not decay, or decays at the wrong time",
    "field": "a hyper-parameter used as its inverse, its double, its half or its complement, or another variant",
}


class Cause(NamedTuple):
    """A mistake that, made by our own run, gives the numbers that were found: all, or up to a point."""

    kind: str
    says: str
    until: Key | None = None  # the first vector that it does not explain


@dataclass(frozen=True, eq=False)
class Audit:
    """The verdict on an implementation.

    Args:
        compared: how many vectors were compared.
        first: what differs first; None if nothing does.
        causes: every single mistake that reproduces ALL its numbers, the commonest first.
        nearest: where none does, the one that reproduces them longest.
        changed: where it first changed in place a gradient that it was handed; "" for nowhere. That is no difference
            here, where every call gives a fresh vector, but one wherever gradients share memory.
    """

    subject: str
    method: Method
    setting: Setting
    compared: int
    first: Difference | None
    causes: tuple[Cause, ...]
    nearest: Cause | None
    changed: str = ""

    @property
    def conforms(self) -> bool:
        """Whether all numbers are ours."""
        return self.first is None

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        first = self.first and {
            "round": self.first.key.round,
            "client": self.first.key.client,
            "what": self.first.key.what,
            "found": self.first.found.tolist(),
            "expected": self.first.expected.tolist(),
            "error": self.first.error,
            "gradient_call": self.first.call or None,
            "gradient_calls": {"found": self.first.calls[0], "expected": self.first.calls[1]},
        }
        near = self.nearest and {
            "kind": self.nearest.kind, "says": self.nearest.says, "until": str(self.nearest.until)
        }  # fmt: skip
        return {
            "subject": self.subject, "method": self.method.to_dict(), "setting": self.setting.fields(),
            "conforms": self.conforms, "compared": self.compared, "first_difference": first,
            "causes": [{"kind": cause.kind, "says": cause.says} for cause in self.causes], "nearest": near,
            "gradient_changed_in_place": self.changed or None,
        }  # fmt: skip

    def __str__(self) -> str:
        s, fields = self.setting, self.method.fields()
        told = ", ".join(f"{key} {value}" for key, value in fields.items() if not isinstance(value, Method))
        about = (
            f"{self.subject} beside {self.method.label} ({told}): {s.rounds} rounds, {s.active} of {s.clients} "
            f"clients, K = {s.local_steps}, lr {s.lr:g} x {s.lr_decay:g}^t"
        )
        if self.first is None:
            conforms = f"conforms: {self.compared} vectors, all equal within {s.tolerance:g}"
            return "\n".join([about, conforms, *self._changes()])
        differs = [f"DIFFERS first in {self.first.key}", *_numbers(self.first), *self._guess()]
        return "\n".join([about, *differs, *self._changes()])

    def _changes(self) -> list[str]:
        text = "it changes the gradient it is handed in place: right here, where every call gives a fresh vector; wrong"
        return [f"note: {self.changed}: {text} where gradients share memory (p.grad); copy it first"] * bool(
            self.changed
        )

    def _guess(self) -> list[str]:
        if self.causes:
            also = [f"  or, with the same numbers here: {cause.kind}: {cause.says}" for cause in self.causes[1:]]
            return [f"probable cause: {self.causes[0].kind}: {self.causes[0].says}", *also]
        if self.nearest:
            return [
                "no single mistake that we know gives these numbers; there may be two. The nearest agrees up to",
                f"{self.nearest.until}: {self.nearest.kind}: {self.nearest.says}",
            ]
        return ["no mistake that we know gives these numbers"]


def _numbers(first: Difference) -> list[str]:
    """By how much, and where in a client's turn."""
    i = int(np.abs(first.found - first.expected).argmax())
    lines = [f"  found    {_shown(first.found)}", f"  expected {_shown(first.expected)}",
             f"  largest error {first.error:.3g}, in entry {i}"]  # fmt: skip
    theirs, ours = first.calls
    if theirs != ours and ours:
        lines.append(f"  gradients asked for in that turn: {theirs}, expected {ours}")
    if first.call:
        lines.append(f"  gradient {first.call} of that turn is the first that is asked for at another point")
    elif ours and theirs == ours:
        lines.append("  all gradients of that turn were asked for at the right points: the last step differs")
    return lines


def _shown(v: np.ndarray) -> str:
    return "[" + ", ".join(f"{a:.6g}" for a in v[:6]) + (", ..." if len(v) > 6 else "") + "]"


def explain(
    theirs: Trace, first: Difference, tried: Iterable[tuple[Fault, Callable[[], Trace]]], tolerance: float
) -> tuple[tuple[Cause, ...], Cause | None]:
    """The faults whose runs give all of these numbers, and of the others the one that does so longest."""
    places = {key: place for place, key in enumerate(theirs.vectors)}
    causes: list[Cause] = []
    known: list[Trace] = []
    nearest, furthest = None, places[first.key]
    for fault, run in tried:
        try:
            with np.errstate(all="ignore"):
                made = run()
        except Exception:  # a mistake that this method cannot make
            continue
        if not made.finite():
            continue
        apart = first_difference(theirs, made, tolerance)
        if apart is None and all(
            first_difference(made, one, tolerance) for one in known
        ):  # not one mistake in two ways
            known.append(made)
            causes.append(Cause(fault.kind, fault.says))
        elif apart is not None and places[apart.key] > furthest:
            nearest, furthest = Cause(fault.kind, fault.says, apart.key), places[apart.key]
    return tuple(causes), None if causes else nearest
