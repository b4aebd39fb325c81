"""How runs stand: under way or over, how far they are, and how long they still take."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from ..illness import diagnose
from ..record import Record, is_number
from .markup import Html, element, join, visible
from .runs import Row, RunFiles, short

RECENT = 20
"""Rounds whose mean time tells how long the others take."""
STATES = ("running", "failed", "diverged", "damaged", "interrupted", "stopped", "finished")
"""In the order in which they are listed."""


@dataclass(frozen=True)
class Standing:
    """How a run stands.

    Args:
        state: one of `STATES`.
        about: why it failed, what ails it; "" where there is nothing to say.
        of: the rounds it is to have, 0 if it does not say.
        left: seconds, of a run under way that has done a round.
        curve: what it was tested by, round after round.
    """

    run: str
    method: str
    seed: int
    state: str
    about: str
    rounds: int
    of: int
    left: float | None
    score: str
    curve: list[float]


def standings(rows: Sequence[Row]) -> list[Standing]:
    """Of all runs, those under way first."""
    found = [standing(run, row.label) for row in rows for run in row.runs]
    return sorted(found, key=lambda one: STATES.index(one.state))


def standing(run: RunFiles, method: str) -> Standing:
    """Of one run, as far as its files tell."""
    status, _, why = str(run.summary["status"]).partition(":")
    state = next((word for word in STATES if status.startswith(word)), "interrupted")  # terminated
    told, of = why.strip().partition("\n")[0], run.config.get("rounds")
    of = of if type(of) is int and of > 0 else 0
    about = [told] if told else []
    if ills := run.illnesses or _ills(run):
        about.append(f"ill: {', '.join(ills)}")
    curve, score = [value for _, value in run.curve()], "-"
    if curve:
        score = f"{100 * curve[-1]:.2f}%"
    elif curve := [value for _, value in run.curve("test_loss") or run.curve("train_loss")]:
        score = f"loss {short(curve[-1])}"
    left = _left(run, of) if state == "running" else None
    return Standing(
        run.path.name, method, int(run.summary["seed"]), state, "; ".join(about), len(run.rounds), of, left, score,
        [value for value in curve if is_number(value)],
    )  # fmt: skip


def _ills(run: RunFiles) -> list[str]:
    """What a run that is not over has so far."""
    if run.done or not any(plain.get("signs") for plain in run.rounds):
        return []
    return list(dict.fromkeys(one.name for one in diagnose([Record.from_dict(plain) for plain in run.rounds])))


def _left(run: RunFiles, of: int) -> float | None:
    recent = [plain["seconds"] + plain["eval_seconds"] for plain in run.rounds[-RECENT:]]
    return fmean(recent) * max(0, of - len(run.rounds)) if recent and of else None


def score_of(record: Record) -> str:
    """Accuracy and loss of an evaluated round; a loss that diverges in short form."""
    accuracy = "" if record.test_accuracy is None else f"accuracy {record.test_accuracy:.2%}  "
    return f"{accuracy}test loss {'-' if record.test_loss is None else short(record.test_loss)}"


def minutes(seconds: float) -> str:
    """A time in words: seconds up to 90, then minutes, then hours.

    Example:
        >>> minutes(12), minutes(600), minutes(12000)
        ('12 s', '10 min', '3 h 20 min')
    """
    if seconds < 90:
        return f"{seconds:.0f} s"
    whole = round(seconds / 60)
    return f"{whole} min" if whole < 120 else f"{whole // 60} h {whole % 60} min"


def headline(found: Sequence[Standing]) -> str:
    """How many are in which state, and how long those under way take.

    Example:
        >>> headline([])
        'no runs yet'
    """
    counts = Counter(one.state for one in found)
    parts = [f"{counts[state]} {state}" for state in STATES if counts[state]]
    left = max((one.left for one in found if one.left is not None), default=None)
    return (", ".join(parts) or "no runs yet") + (f"; about {minutes(left)} left" if left is not None else "")


def progress(one: Standing) -> str:
    """Rounds done, of how many.

    Example:
        >>> progress(Standing("a", "fedavg", 0, "running", "", 3, 10, None, "-", []))
        '3 of 10'
    """
    return f"{one.rounds} of {one.of}" if one.of else str(one.rounds)


def time_left(one: Standing) -> str:
    """In words; "" if nobody can tell."""
    return "" if one.left is None else minutes(one.left)


def live(found: Sequence[Standing]) -> Html:
    """The section of the page about it."""
    text = headline(found)
    lead = element("p", f"{text[0].upper()}{text[1:]}.", class_="lead")
    if not found:
        return join([lead, element("p", "They show here as soon as they begin.", class_="note")])
    head = element("tr", *(element("th", title, scope="col") for title in HEADER))
    body = [
        element(
            "tr",
            element("th", one.run, scope="row"),
            element(
                "td", element("span", one.state, class_=f"state {one.state}"), f" {one.about}" if one.about else ""
            ),
            element("td", _bar(one), f" {progress(one)}"),
            *(element("td", cell) for cell in (one.score, time_left(one), one.method, str(one.seed))),
        )
        for one in found
    ]
    made = element("table", element("thead", head), element("tbody", *body), class_="plain runs", id="live-table")
    return join([lead, element("div", made, class_="scroll tall", tabindex="0", role="region", aria_label="runs")])


HEADER = ("run", "state", "rounds", "last", "left", "method", "seed")


def _bar(one: Standing) -> Html:
    name = visible(f"{one.run}: {progress(one)} rounds")
    return (
        element("progress", value=str(min(one.rounds, one.of)), max=str(one.of), aria_label=name) if one.of else Html()
    )
