"""The project's goals, and whether a run of the benchmarks reached them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .contests import OURS, RAY, SPEED, TWO_GRADIENTS
from .stats import FEWEST, Ratio, ratio
from .timing import Outcome

Held = dict[str, Outcome]


@dataclass(frozen=True)
class Goal:
    """One goal: the wanted value and the one that was found.

    Args:
        met: None where nothing was measured.
        close: whether the wanted value lies inside the interval of what was found.
    """

    about: str
    wanted: str
    found: str = "not measured"
    met: bool | None = None
    close: bool = False


def goals(
    held: Held,
    memory: dict[str, Any] | None,
    startup: dict[str, Any] | None,
    checkpoint: dict[str, Any] | None = None,
    many: dict[str, Any] | None = None,
    profile: dict[str, Any] | None = None,
) -> list[Goal]:
    """Return every goal that this run says something about, and the others as not measured."""
    return [
        _fastest(held, "W1", 4.2),
        _ratio(held, "W1", "bare loop 1x2", OURS, at_least=2.7),
        _ratio(held, "W1-fedspeed", "bare loop 1x2, two gradients a step", SPEED, at_least=2.7),
        _ratio(held, "W1-fedspeed", SPEED, OURS, at_most=2.0),
        _ratio(held, "W1-fedspeed", "fedspeed: FedSpeed, ascent_fraction 1/4", OURS, at_most=1.6),
        _fastest(held, "W2", 1.4),
        _fastest(held, "W3", 15.0),
        _ratio(held, "W4", "bare loop 2x1", OURS, at_least=4.0),
        _ratio(held, "W4-fedspeed", TWO_GRADIENTS, SPEED, at_least=3.6),
        _ratio(held, "W5", "bare loop 2x1", OURS, at_least=4.0),
        _ratio(held, "W5-fedspeed", TWO_GRADIENTS, SPEED, at_least=3.6),
        _limit(profile),
        _ratio(held, "W3-methods", SPEED, OURS, at_most=2.5),
        _ratio(held, "W3-methods", "fedspeed: SCAFFOLD", OURS, at_most=2.5),
        _ratio(held, "W1-ray", RAY, OURS, at_most=1.15),
        _ratio(held, "W2-ray", RAY, OURS, at_most=1.15),
        _memory(memory),
        _growth(memory),
        _start(startup, "run", "start-up: `fedspeed run --data digits` to its first round done", 1.3),
        _start(startup, "version", "start-up: `fedspeed --version`", 0.3),
        _checkpoint(checkpoint),
        _many(many),
    ]


def compare(outcome: Outcome | None, name: str, against: str) -> Ratio | None:
    """Return the time of one contender over that of another in the same contest."""
    a, b = (outcome.row(name), outcome.row(against)) if outcome else (None, None)
    return ratio(a.seconds, b.seconds) if a and b else None


def _fastest(held: Held, contest: str, factor: float) -> Goal:
    """Return the goal to be faster than the best of the others in the same run, with those that were not measured."""
    about, wanted = f"{contest}: times faster than the best of the others", f">= {factor:g}"
    outcome = held.get(contest)
    rivals = [row for row in outcome.rows if row.entry.rival] if outcome else []
    ratios = {row.entry.name: compare(outcome, row.entry.name, OURS) for row in rivals}
    there = {name: found for name, found in ratios.items() if found}
    if not there:
        return Goal(about, wanted)
    best = min(there, key=lambda name: there[name].value)
    absent = [name for name in ratios if name not in there]
    found = f"{there[best]} ({best}{'; without ' + ', '.join(absent) if absent else ''})"
    return Goal(about, wanted, found, there[best].value >= factor, _inside(factor, there[best]))


def _ratio(held: Held, contest: str, name: str, against: str, at_least: float = 0.0, at_most: float = 0.0) -> Goal:
    about = f"{contest}: {name} / {against}"
    wanted = f">= {at_least:g}" if at_least else f"<= {at_most:g}"
    found = compare(held.get(contest), name, against)
    if not found:
        return Goal(about, wanted)
    met = found.value >= at_least if at_least else found.value <= at_most
    return Goal(about, wanted, str(found), met, _inside(at_least or at_most, found))


def _inside(value: float, found: Ratio) -> bool:
    return found.n >= FEWEST and found.low < value < found.high


def _memory(memory: dict[str, Any] | None) -> Goal:
    about, wanted = "memory: FedSpeed, ResNet-18-GN, 500 clients touched: RSS of the tree", "< 1.5 GB"
    peak = memory["peaks"][0] if memory else None
    if not peak or peak["failure"] or not peak["rss"]:
        return Goal(about, wanted)
    found = (
        f"{peak['rss'] / 1e9:.2f} GB with {peak['clients']} clients (files in memory: {peak['segments'] / 1e9:.2f} GB)"
    )
    met = peak["rss"] < 1.5e9
    return Goal(about, wanted, found, met if memory and (memory["full"] or not met) else None)


def _growth(memory: dict[str, Any] | None) -> Goal:
    about, wanted = "memory: growth of RSS, 100 to 10,000 clients touched, small CNN", "< 10%"
    if not memory or memory["growth"] is None:
        return Goal(about, wanted)
    last = memory["peaks"][-1]["clients"]
    return Goal(about, wanted, f"{memory['growth']:+.1%} from 100 to {last:,}", memory["growth"] < 0.10)


def _start(startup: dict[str, Any] | None, what: str, about: str, seconds: float) -> Goal:
    wanted = f"<= {seconds:g} s"
    if not startup:
        return Goal(about, wanted)
    found = startup[what]["median"]
    return Goal(about, wanted, f"{found:.2f} s", found <= seconds)


def _limit(profile: dict[str, Any] | None) -> Goal:
    about, wanted = "W1: a local step of FedAvg / the limit of its profile", "<= 1.5"
    if not profile:
        return Goal(about, wanted)
    found = profile["step"] / profile["limit"]
    return Goal(about, wanted, f"{found:.2f} ({profile['step']:.1f} / {profile['limit']:.1f} ms)", found <= 1.5)


def _checkpoint(checkpoint: dict[str, Any] | None) -> Goal:
    about, wanted = "checkpoints: part of a W1 FedAvg round that waits for them", "< 3%"
    if not checkpoint or "default" not in checkpoint or not checkpoint["default"]["written"]:  # none was due
        return Goal(about, wanted)
    default, often = checkpoint["default"]["share"], checkpoint["every round"]["share"]
    return Goal(about, wanted, f"{default:.2%}; {often:.2%} with one every round", default < 0.03)


def _many(many: dict[str, Any] | None) -> Goal:
    about, wanted = "100,000 clients: a round by the clock, last tenth over first tenth", "< 1.2"
    if not many:
        return Goal(about, wanted)
    growth = many["last"] / many["first"]
    return Goal(about, wanted, f"{growth:.2f}; waits {many['share']:.2%}", growth < 1.2)
