"""Schedules: values that change over rounds.

A warm-up `lr=10,rho=20` gives the number of rounds T_w over which each field rises to its value. In round t = 0, 1, ...
it is

    value * min(1, (t + 1) / T_w)

so it begins at value / T_w, never at 0, and is the value itself from round T_w - 1 on. `lr` belongs to the plan, and
has a schedule beside its warm-up (`lr_schedule.py`). Any other field belongs to the method, or to one inside it, whose
class allows it: `rho: float = param(0.1, "[0, inf)", "...", schedulable=True)`.

Fields may also follow the rate (`follow_lr`): in round t they have its factors, schedule and warm-up. With rho = lr,
rho is eta_l in every round.
"""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Iterable, Mapping
from typing import Any

from ..errors import UserError, one_line, unknown
from ..methods.base import Method, nested
from ..utils.checked_fields import parse_pairs

LR = "lr"
"""The field of a warm-up that belongs to the plan, and so to every method."""


def warmup_text(given: Any) -> str:
    """Return a warm-up, given as text or as a table, in its one form: `lr` first, then by name.

    Example:
        >>> warmup_text({"rho": 20, "lr": 10}), warmup_text("rho=20, lr=10"), warmup_text("")
        ('lr=10,rho=20', 'lr=10,rho=20', '')
    """
    wrong = UserError(f"warmup: expected fields and numbers of rounds such as lr=10,rho=10, got {given!r}")
    if not isinstance(given, str | Mapping):
        raise wrong
    found: dict[str, int] = {}
    for key, value in parse_pairs(given) if isinstance(given, str) else given.items():
        name = key.strip() if isinstance(key, str) else ""
        if not name.isidentifier() or value == "":
            raise wrong
        if name in found:
            raise UserError(f"warmup: expected every field once, got {name} twice; leave one out")
        try:
            whole = isinstance(value, str | numbers.Integral) and not isinstance(value, bool)
            found[name] = int(value) if whole else 0
        except ValueError:
            found[name] = 0
        if found[name] < 1:
            raise UserError(f"warmup: {name} must be a whole number of rounds >= 1, got {value}; leave it out for none")
    return _text(found)


def _text(lengths: Mapping[str, int]) -> str:
    return ",".join(f"{name}={lengths[name]}" for name in sorted(lengths, key=lambda name: (name != LR, name)))


def lengths(warmup: str) -> dict[str, int]:
    """Return T_w of every field of a warm-up in the form of `warmup_text`."""
    return {name: int(value) for name, value in parse_pairs(warmup)}


def follow_text(given: Any) -> str:
    """Return the fields that follow the rate, given as text or as a list, in one form: each once, by name.

    Example:
        >>> follow_text("rho_l, rho"), follow_text(["rho"]), follow_text("")
        ('rho,rho_l', 'rho', '')
    """
    names = given.split(",") if isinstance(given, str) and given.strip() else given or []
    listed = names if isinstance(names, list | tuple) else [names]
    found = [name.strip() if isinstance(name, str) else "" for name in listed]
    if not all(name.isidentifier() for name in found) or len(set(found)) < len(found):
        raise UserError(f"follow_lr: expected fields of the method, each once, such as rho or rho,rho_l, got {given!r}")
    return ",".join(sorted(found))


def followers(follow: str) -> list[str]:
    """Return the fields of a text of `follow_text`."""
    return follow.split(",") if follow else []


def fit_rounds(warmup: str, rounds: int) -> None:
    """Raise if a warm-up lasts longer than a run."""
    for name, length in lengths(warmup).items():
        if length > rounds:
            raise UserError(
                f"warmup: {name} must be at most the number of rounds, got {length} of {rounds}: it would never reach "
                f"its value; shorten it or raise --rounds"
            )


def factor(warmup: str, name: str, t: int) -> float:
    """Return the factor of a field in round t = 0, 1, ...; 1 for one without a warm-up.

    Example:
        >>> [factor("lr=4", "lr", t) for t in range(5)], factor("lr=4", "rho", 0)
        ([0.25, 0.5, 0.75, 1.0, 1.0], 1.0)
    """
    return min(1.0, (t + 1) / lengths(warmup).get(name, 1))


def schedulable(method: Method) -> list[str]:
    """Return the fields of a method, and of those inside it, that can be scheduled.

    Example:
        >>> from fedspeed import FedAvg, FedInit, FedSpeed
        >>> schedulable(FedSpeed()), schedulable(FedInit(FedSpeed())), schedulable(FedAvg())
        (['rho'], ['rho'], [])
    """
    return list(dict.fromkeys(name for each in nested(method) for name in own_schedulable(type(each))))


def own_schedulable(method: type[Method]) -> list[str]:
    """Return the fields of a class that are marked as schedulable."""
    return [field.name for field in dataclasses.fields(method) if field.metadata.get("schedulable")]


def method_at(method: Method, warmup: str, t: int) -> Method:
    """Return the method of round t = 0, 1, ...: a copy with the fields of that round, or itself where none differs.

    A field that a wrapper and the method inside it both have is the wrapper's.

    Example:
        >>> from fedspeed import FedSpeed
        >>> [method_at(FedSpeed(rho=0.4), "lr=9,rho=4", t).rho for t in range(5)]
        [0.1, 0.2, 0.30000000000000004, 0.4, 0.4]
    """
    for name, length in lengths(warmup).items():
        if name != LR and t + 1 < length:
            method = _scaled(method, name, factor(warmup, name, t), f"warmup: {name} in round {t + 1}")
    return method


def following(method: Method, follow: str, factors: Iterable[float], t: int) -> Method:
    """Return the method of round t = 0, 1, ... with the rate's factors on the fields that follow it.

    Args:
        factors: those of the rate in that round, multiplied in this order, so that rho = lr gives the bits of the rate.

    Example:
        >>> from fedspeed import FedSpeed
        >>> following(FedSpeed(rho=0.4), "rho", (0.5, 0.5), 1).rho
        0.1
    """
    for by in factors if follow else ():
        for name in followers(follow):
            if by != 1:
                method = _scaled(method, name, by, f"follow_lr: {name} in round {t + 1}")
    return method


def _scaled(method: Method, name: str, by: float, what: str) -> Method:
    if name in own_schedulable(type(method)):
        change = {name: getattr(method, name) * by}
    else:
        inner = {key: value for key, value in method.fields().items() if isinstance(value, Method)}
        change = {key: _scaled(each, name, by, what) for key, each in inner.items() if name in schedulable(each)}
    try:
        return dataclasses.replace(method, **change)
    except UserError as error:
        raise UserError(f"{what}: {error}") from None
    except Exception as error:  # a user's class may raise anything
        raise UserError(f"{what}: {type(method).__name__} cannot be made with {change} ({one_line(error)})") from error


def shared(tables: Mapping[str, Any], method: Method, among: Iterable[Method]) -> dict[str, str]:
    """Return a method's part of the schedules in the tables of a config that several methods share, by key.

    The part is the rate and the fields that the method has; a field that none of the methods among which they are
    shared has is an error.

    Example:
        >>> from fedspeed import FedAvg, FedSpeed
        >>> shared({"warmup": "lr=2,rho=2", "follow_lr": "rho"}, FedAvg(), [FedAvg(), FedSpeed()])
        {'warmup': 'lr=2', 'follow_lr': ''}
    """
    methods, own = list(among), schedulable(method)
    found = {}
    if tables.get("warmup"):
        rounds = lengths(warmup_text(tables["warmup"]))
        _require_fields("warmup", rounds, methods)
        found["warmup"] = _text({name: length for name, length in rounds.items() if name in [LR, *own]})
    if tables.get("follow_lr"):
        names = followers(follow_text(tables["follow_lr"]))
        _require_fields("follow_lr", names, methods)
        found["follow_lr"] = follow_text([name for name in names if name in own])
    return found


def _require_fields(key: str, names: Iterable[str], methods: list[Method]) -> None:
    """Raise for a name that is not a schedulable field of any of these methods, nor the rate in a warm-up."""
    some = dict.fromkeys(name for method in methods for name in schedulable(method))
    known = [LR, *some] if key == "warmup" else list(some)
    name = next((name for name in names if name not in known), None)
    if name is None:
        return
    owner = next((each for method in methods for each in nested(method) if name in each.fields()), None)
    if owner is not None:
        raise UserError(
            f"{key}: {name} of {type(owner).__name__} cannot be scheduled, expected one of "
            f"{', '.join(known) or 'none'}; `fedspeed methods {owner.name}` shows which fields can"
        )
    whose = ", ".join(sorted({type(method).__name__ for method in methods}))
    raise UserError(f"{key}: {unknown(f'field of {whose} to schedule', name, known)}")
