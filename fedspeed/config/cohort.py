"""Cohorts by name: who takes part in a round, a value with a parameter as a split is. `server/cohort.py` draws them.

fixed               S clients, uniformly and without replacement
bernoulli           each client alone with probability S/N, drawn again while none is
cyclic              the next S clients of an order that is drawn once, from the seed: everyone equally often
cyclic:in-order     the same in the order of the ids
weighted:samples    S clients without replacement, each draw in proportion to their numbers of samples
availability:FILE   S of those whom a trace has in the round, uniformly; all of them if they are fewer
file.py:NAME        a sampler of the user's own
"""

from __future__ import annotations

from typing import Any

from ..errors import UserError, unknown
from .spec import Setting, Spec

PARAMETERS: dict[str, tuple[str, ...]] = {
    "fixed": ("",),
    "bernoulli": ("",),
    "cyclic": ("", "in-order"),
    "weighted": ("samples",),
    "availability": ("FILE",),
}
"""The names of cohorts, each with the parameters that it takes; "" for none."""
SIZED = ("fixed", "cyclic", "weighted")
"""Cohorts of exactly S clients."""
UNIFORM = ("fixed", "bernoulli", "cyclic")
"""Cohorts in which every client takes part equally often, in the mean."""
BIASED = "clients are not drawn uniformly"


def cohort_name(value: Any) -> str:
    """Return the name of a cohort without its parameter; "" for a user's sampler and for what is none.

    Example:
        >>> cohort_name("cyclic:in-order"), cohort_name({"name": "availability:trace.csv"}), cohort_name("own.py:f")
        ('cyclic', 'availability', '')
    """
    text = value.name if isinstance(value, Spec) else value.get("name") if isinstance(value, dict) else value
    name = text.partition(":")[0] if isinstance(text, str) else ""
    return name if name in PARAMETERS else ""


def is_biased(value: Any) -> bool:
    """Return whether some clients may take part more often than others, by the cohort in a plan or a stored config."""
    return cohort_name(value) not in UNIFORM


def require_cohort(value: Setting) -> None:
    """Raise for a cohort that does not exist, or whose parameter is wrong.

    Example:
        >>> require_cohort("weighted:losses")
        Traceback (most recent call last):
        fedspeed.errors.UserError: cohort weighted: expected weighted:samples, found 'weighted:losses'
    """
    if isinstance(value, Spec) and cohort_name(value) and value.options:
        raise UserError(f"cohort {value.name}: expected no options, found {next(iter(value.options))}; leave it out")
    if not isinstance(value, str):
        return
    name, colon, parameter = value.partition(":")
    if name not in PARAMETERS:
        raise unknown("cohort", name, [*PARAMETERS, "file.py:NAME"])
    if parameter not in PARAMETERS[name] or parameter == "FILE" or (colon and not parameter):
        ways = " or ".join(f"{name}:{each}" if each else name for each in PARAMETERS[name])
        raise UserError(f"cohort {name}: expected {ways}, found {value!r}")
