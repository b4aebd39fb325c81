"""Settings of the first rounds of a fork: the tables `until` of a config.

`[until.300]` with `lr = 0.1` says that the rate was 0.1 in rounds 1 to 300, whatever the config says for later ones. So
the config is complete, and running it from round 0 gives the bits of the fork. This module reads such tables and
refuses settings that must be the same in all rounds; `server/segments.py` runs the rounds.
"""

from __future__ import annotations

import re
from typing import Any

from ..errors import UserError
from ..methods.base import Method, nested
from ..utils.registry import file_of
from .lr_schedule import table_of
from .plan import PLACEMENT
from .stopping import RULES

Until = tuple[tuple[int, dict[str, Any]], ...]
"""(300, {"lr": 0.1}), ...: the values that differ in the rounds up to the 300th; in order."""

DREW = "the rounds so far were drawn with it"
FIXED = {
    "model": "the vectors of the rounds so far are that model's",
    "data": "the rounds so far learned from these data",
    "split": "clients keep what they own",
    "clients": "clients keep what they own",
    "validation": "what was held out stays held out",
    "client_test": "what was held out stays held out",
    "augment": "the rounds so far learned from these data",
    "batch_norm": "the vectors of the rounds so far are that model's",
    "loss": "the scores so far are of it",
    "test_set": "the scores so far are on it, or there are none",
    "seed": "split, first model, cohorts and batches are drawn with it",
    "active": DREW,
    "cohort": DREW,
    "state_dtype": "clients' states are stored in it",
    "network": "virtual seconds so far are of it",
    "devices": "virtual seconds so far are of them",
    "client_metrics": "the scores so far are a table with its columns",
    "format": "it is the version of the layout",
    "until": "it says what the rounds so far had",
}
"""Fields that are the same in all rounds of a run, and why."""
ANY_ROUND = ("rounds", "targets", "data_dir", *RULES)
"""Fields without effect on finished rounds; `rounds` only where the last of them was the run's last."""


def read_until(given: Any, rounds: int) -> Until:
    """Return the segments of a config, in order, from its table; raise for anything else."""
    if isinstance(given, tuple):
        given = {str(upto): over for upto, over in given}
    if not isinstance(given, dict) or not all(
        re.fullmatch("[1-9][0-9]{0,17}", str(key)) and int(key) < rounds and isinstance(over, dict)
        for key, over in given.items()
    ):
        raise UserError(
            f"config: until must be tables of the run's {rounds} rounds such as [until.30] with lr = 0.1, got {given!r}"
        )
    for key, over in given.items():
        for name in over.keys() & FIXED.keys():
            raise UserError(f"config: until.{key}.{name}: {name} is the same in all rounds of a run: {FIXED[name]}")
        for name in over.keys() & set(PLACEMENT):  # nor may a run directory name a cluster here
            raise UserError(f"config: until.{key}.{name}: {name} says where rounds are computed, not what they had")
        if (
            file_of(over.get("lr_schedule"))
            or table_of(over.get("lr_schedule"))
            or isinstance(over.get("lr_schedule"), dict)
        ):
            raise UserError(f"config: until.{key}.lr_schedule: expected a schedule with its numbers, found a file")
        if "method" in over and not _fields_alone(over["method"]):  # a name could make it execute a file
            raise UserError(f"config: until.{key}.method: expected fields of the run's own method, found another")
    return tuple(sorted((int(key), over) for key, over in given.items()))


def _fields_alone(method: Any) -> bool:
    """Return whether a table holds only fields of a method and of those inside it, and names no method."""
    named = not isinstance(method, dict) or any(name in method for name in ("name", "code", "origin"))
    return not named and ("base" not in method or _fields_alone(method["base"]))


def class_chain(method: Method) -> list[tuple[str, str, str]]:
    """Return class name, file and its digest of a method and of those inside it."""
    return [(type(each).__name__, each.source, each.code) for each in nested(method)]


def changed_lasting_field(then: Method, now: Method) -> str:
    """Return the first field that differs in a method or one inside it although its class lists it as `lasting`."""
    pairs = zip(nested(then), nested(now), strict=True)
    return next((name for a, b in pairs for name in a.lasting if getattr(a, name) != getattr(b, name)), "")
