"""Differences between two run directories, from their files alone."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..config.spec import OWN_CODE
from ..errors import UserError
from ..record import PLACED, TIMES
from ..runs.directory import CLIENT_METRICS, ROUNDS, RunDir

FINGERPRINTS = ("data_fingerprint", "split_fingerprint")
SECTIONS = ("config", "data", "environment", "results", "model")


class Absent:
    """A marker for a value that a run does not have, which differs from None."""

    def __repr__(self) -> str:
        return "-"


ABSENT = Absent()


@dataclass(frozen=True)
class Difference:
    """One value that differs between two runs.

    Args:
        section: one of `SECTIONS`.
        name: the key, for example `method.rho` or `round 7: drift`.
        a, b: the value in each run; `ABSENT` where it has none.
    """

    section: str
    name: str
    a: Any
    b: Any


def differences(a: Path | str, b: Path | str) -> list[Difference]:
    """Return the differences between two runs, times excepted: config, fingerprints, environment, the first round
    that differs, scores on clients' data, the model."""
    one, other = RunDir(a), RunDir(b)
    first, second = one.config(), other.config()
    if _dict(first.get(OWN_CODE)).get("made_by") != _dict(second.get(OWN_CODE)).get("made_by"):
        first, second = ({k: v for k, v in tables.items() if k != OWN_CODE} for tables in (first, second))
    found = [*_tables("config", first, second), *_summaries(one, other), *_rounds(one, other)]
    scores = ({CLIENT_METRICS: own.digest()} if (own := run.client_metrics()) else {} for run in (one, other))
    models = ({"digest of the parameters": run.model_digest() or ABSENT} for run in (one, other))
    return [*found, *_tables("results", *scores), *_tables("model", *models)]


def _summaries(a: RunDir, b: RunDir) -> list[Difference]:
    """Compare fingerprints, environment and the other keys of the summaries."""
    first, second = _summary(a), _summary(b)
    data = _tables("data", *({k: s.pop(k, ABSENT) for k in FINGERPRINTS} for s in (first, second)))
    machines = [_dict(s.pop("environment", None)) for s in (first, second)]
    if not all("vendor" in machine for machine in machines):  # a run made before the vendor was recorded
        machines = [{key: value for key, value in machine.items() if key != "vendor"} for machine in machines]
    made_on = _tables("environment", *machines)
    return [*data, *made_on, *_tables("results", first, second)]


def _rounds(a: RunDir, b: RunDir) -> list[Difference]:
    """Return the differences of the first round that differs in more than times."""
    first, second = list(a.lines()), list(b.lines())
    for t, (one, other) in enumerate(zip(first, second, strict=False), 1):
        found = _tables("results", _timeless(one), _timeless(other))
        if found:
            return [Difference("results", f"round {t} (the first that differs): {f.name}", f.a, f.b) for f in found]
    return _tables("results", *({f"rounds in {ROUNDS}": len(rounds)} for rounds in (first, second)))


def _tables(section: str, a: dict[str, Any], b: dict[str, Any]) -> list[Difference]:
    """Return the keys with different values; keys of nested tables as `method.rho`."""
    found = []
    for key in [*a, *(key for key in b if key not in a)]:
        if key == "origin":  # the path of the method's file on the user's disk; its code is compared
            continue
        one, other = a.get(key, ABSENT), b.get(key, ABSENT)
        if isinstance(one, dict) and isinstance(other, dict):
            inner = _tables(section, one, other)
            found += [Difference(section, f"{key}.{f.name}", f.a, f.b) for f in inner]
        elif one != other or type(one) is not type(other):
            found.append(Difference(section, key, one, other))
    return found


def _summary(run: RunDir) -> dict[str, Any]:
    """Return the part of a summary that is compared; empty if the run is not finished."""
    found = run.raw_summary()
    if found == {}:
        raise UserError(f"{run.summary_file} cannot be read; `fedspeed verify` looks closer")
    others = ("digests", "engine", "settings", *PLACED)  # rounds, model and config are compared instead
    return {key: value for key, value in _timeless(found or {}).items() if key not in others}


def _timeless(table: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in table.items() if key not in TIMES}


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
