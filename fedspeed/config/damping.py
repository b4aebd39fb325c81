"""Damping of the running mean H that FedDyn, FedSpeed and methods built on them add to x in every round.

In a direction in which all clients have the curvature a and no other gradient, K local steps at the rate lr give

    D = -c (a x + w h),    c = [1 - (1 - lr (a + v))^K] / (a + v),    v = w with a prox term, 0 without one (FedGMT)

The expected h of an active client is H, and p = S/N of the clients are active, so a round is linear:

    H' = H + p D,    x' = x + D + H',    D = -c (a x + w H)

H forgets at the rate p c w: its memory is 1 / (p c w) rounds. The eigenvalues of a round are the roots z of
z^2 - (2 - s) z + 1 - c a - p c w, where s = (1 + p) c a + p c w. They are real if the damping ratio s / (2 sqrt(p c a))
is at least 1. Below 1, x swings through 0 and back, the further the smaller the ratio.

Weight decay is the curvature that every run has: where normalisation makes a layer independent of the length of its
weights, nothing else moves that length, and a is the weight decay. Other directions swing at other frequencies.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from ..errors import UserError
from ..methods import build
from ..methods.base import Method
from .plan import Plan
from .presets import paper_decay

WEIGHTS = {"feddyn": "alpha"} | dict.fromkeys(
    ("fedspeed", "fedsmoo", "fedgloss", "fedtoga", "fedlesamd", "fedgmt"), "lam"
)
"""The methods whose rounds are the ones above, up to their ascent steps and FedTOGA's beta, and the field that holds
w or 1/w. A wrapper changes the round, so it is not in this table."""
FAR = 0.45
"""The damping ratio below which a run is warned about. It was chosen after runs of one small network with normalised
weights (one seed, a start of eight times the usual length): the norm of x came back to 1.9 times what it settles at
with a ratio of 0.42, to 1.4 times with 0.53, and did not come back with 0.74."""
LONG = 20_000
"""The largest number of rounds that are simulated."""


@dataclass(frozen=True)
class Damping:
    """The damping of a run's running mean.

    Args:
        memory: 1 / (p c w), in rounds.
        ratio: the damping ratio at the plan's rate; 1 is critical.
        zero: the round in which x changes its sign for the first time; None if it does not within the run.
        critical: the w at which the ratio is 1.
    """

    memory: float
    ratio: float
    zero: int | None
    critical: float


def damping(method: Method, plan: Plan, sizes: Sequence[int]) -> Damping | None:
    """Return how the running mean of a run is damped against weight decay; None without one or without the other.

    Example:
        >>> from fedspeed import FedDyn
        >>> found = damping(FedDyn(alpha=0.1), Plan(rounds=1500, active=10, local_steps=10, lr_decay=0), [100] * 500)
        >>> round(found.memory), round(found.ratio, 2), found.zero, round(found.critical, 2)
        (523, 0.33, 415, 0.44)
    """
    field = WEIGHTS.get(method.name)
    if field is None or method.running_mean is None:  # the server has no running mean, or another one
        return None
    weight = float(getattr(method, field))
    a, w = plan.weight_decay, weight if field == "alpha" else 1 / weight
    if not w or not a or not len(sizes) or plan.local_optimizer != "sgd":  # c is that of plain SGD steps
        return None
    p = plan.cohort_size(len(sizes)) / len(sizes) * (1 - plan.dropout)
    K = round(sum(plan.steps_of(int(n)) for n in sizes) / len(sizes))
    prox = bool(method.shrink)
    if not 0 < plan.lr * (a + w * prox) < 1 or not p * a * (c := _gain(plan.lr, K, a, w * prox)) > 1e-300:
        return None  # local steps overshoot or hardly move: the model does not apply
    x, H, zero, decay = 1.0, 0.0, None, paper_decay(method)
    for t in range(min(plan.rounds, LONG)):
        D = -_gain(plan.rate(t, decay), K, a, w * prox) * (a * x + w * H)
        H += p * D
        x += D + H
        if x < 0:
            zero = t + 1
            break
    return Damping(1 / (p * c * w), _ratio(c, a, w, p), zero, _critical(plan.lr, K, a, p, prox))


def warning(method: Method, plan: Plan, sizes: Sequence[int]) -> str:
    """Return one line for a run whose running mean is far from damped, "" for any other.

    A run that ends before x would change its sign is not affected, however long the memory.

    Example:
        >>> from fedspeed import FedSpeed
        >>> warning(FedSpeed(lam=10), Plan(rounds=1500, active=10, local_steps=50), [500] * 100)
        ''
    """
    found = damping(method, plan, sizes)
    if found is None or found.zero is None or found.ratio >= FAR:
        return ""
    field = WEIGHTS[method.name]
    value = found.critical if field == "alpha" else 1 / found.critical
    return (
        f"{type(method).__name__}: expected a damping ratio of H near 1, found {found.ratio:.2g} "
        f"(memory {found.memory:,.0f} rounds of {plan.rounds:,}; x may swing past where it settles from round "
        f"{found.zero:,} on); --set method.{field}={value:.2g} is critical"
    )


def warning_of(config: dict[str, Any], sizes: Sequence[int]) -> str:
    """Return the line of `warning` for the tables of a config; "" where incomplete or wrong, or for a user's method."""
    table = config.get("method")
    if not isinstance(table, dict) or table.get("name") not in list(WEIGHTS):
        return ""
    planned = {field.name for field in fields(Plan)}
    try:
        plan = Plan.from_fields({key: value for key, value in config.items() if key in planned})
        return warning(build(table), plan, sizes)
    except (UserError, ArithmeticError, ValueError):
        return ""


def _gain(lr: float, K: int, a: float, v: float) -> float:
    """Return c: how far K steps go per unit of gradient."""
    return float((1 - (1 - lr * (a + v)) ** K) / (a + v))


def _ratio(c: float, a: float, w: float, p: float) -> float:
    return ((1 + p) * c * a + p * c * w) / (2 * math.sqrt(p * c * a))


def _critical(lr: float, K: int, a: float, p: float, prox: bool) -> float:
    """Return the w with the ratio 1 by bisection. The ratio rises with w, and is at least 1 at w = 1/lr, where c w is
    nearly 1 and ((1 + p) a + p w) / 2 >= sqrt((1 + p) a p w)."""
    low, high = 0.0, 1 / lr
    for _ in range(60):
        w = (low + high) / 2
        low, high = (low, w) if _ratio(_gain(lr, K, a, w * prox), a, w, p) >= 1 else (w, high)
    return high
