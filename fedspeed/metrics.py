"""Named numbers that a method and its clients report beside what the algorithm needs: checked, and averaged."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from numbers import Real
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from .errors import UserError
from .methods.base import Method

if TYPE_CHECKING:
    from .client import Reply


def reports(method: Method, hook: str) -> bool:
    """Whether a method, or one inside it, has a hook (`metrics`, `client_metrics`, `sent`, ...) of its own."""
    owner = next((cls for cls in type(method).__mro__ if hook in vars(cls)), Method)
    inner = [value for value in method.fields().values() if isinstance(value, Method)]
    if inner and hook in vars(owner).get("hands_on", ()):  # nothing but what is inside
        return any(reports(each, hook) for each in inner)
    return owner is not Method and callable(getattr(method, hook))


def numbers(told: Any, error: Callable[[str], UserError]) -> dict[str, float]:
    """What a hook reported, as floats; raise unless it is names and real numbers.

    One that is not finite stays as it is: it must not end a run. JSON has `null` for it, see `Record.to_dict`.

    Args:
        error: makes one of what is wrong.
    """
    if not isinstance(told, Mapping):
        raise error(f"must return a dict of names and numbers, found {told!r}")
    found: dict[str, float] = {}
    for name, value in told.items():
        if not isinstance(name, str) or not name.isidentifier():
            raise error(f"must return names such as update_norm, found {name!r}")
        one = number(value)
        if one is None:
            raise error(f"must return numbers, found {name} = {value!r}; a vector's norm is one: v.norm()")
        found[name] = one
    return found


def number(value: Any) -> float | None:
    """A real number, or a tensor of one, as a float; None for anything else."""
    try:
        one = value.item() if hasattr(value, "item") else value
        return float(one) if isinstance(one, Real) else None
    except OverflowError:
        return math.inf if value > 0 else -math.inf
    except (TypeError, ValueError, RuntimeError):  # a tensor of several
        return None


def merged(method: Method, own: dict[str, float], replies: Iterable[Reply]) -> dict[str, float]:
    """What a record holds: of what clients report, each name's mean over those who do, in job order; then the method's
    own of the round."""
    found: dict[str, list[float]] = {}
    for reply in replies:
        for name, value in (reply.facts.metrics or {}).items():
            found.setdefault(name, []).append(value)
    twice = next((name for name in own if name in found), None)
    if twice:
        raise UserError(
            f"{type(method).__name__}: metrics and client_metrics both report {twice}; give one of them another name"
        )
    return {name: sum(values) / len(values) for name, values in found.items()} | own


def norms(method: Method, server: Any) -> dict[str, float]:
    """Return the norms of x and of the server's running mean (`x_norm`, `H_norm`) for a method that keeps one.

    The server adds its running mean to x in every round, so these two numbers show whether it has settled.
    """
    if method.running_mean is None:
        return {}
    place = method.running_mean[1]
    name = place.rpartition(".")[2]
    return {"x_norm": float(server.x.norm()), f"{name}_norm": float(attrgetter(place)(server).norm())}


def average(replies: list[Reply], name: str) -> float:
    """The mean over clients of one of the facts that every reply has, `drift` for example."""
    return float(sum(getattr(reply.facts, name) for reply in replies)) / len(replies)


def steps_of(replies: list[Reply], weight: Callable[[Reply], float], total: float) -> tuple[float, float]:
    """The mean number of local steps under the weights, whose sum is `total`, and the mean rate of those steps."""
    steps = sum(weight(reply) * reply.facts.K for reply in replies)
    return steps / total, sum(weight(reply) * reply.facts.K * reply.facts.mean_rate for reply in replies) / steps
