"""The schedule of the local rate over rounds: the factor s(t) of `lr` in round t = 0, 1, ...

    constant                1
    exponential:G           G^t
    step:30,60:G            G^(number of milestones <= t): G from round 31 on, G^2 from round 61 on
    cosine                  F + (1 - F) (1 + cos(pi t / T)) / 2
    polynomial:P            F + (1 - F) (1 - t / T)^P
    piecewise:1=1,50=0.1    straight lines between the factors of some rounds, which count from 1

A run without a schedule has lr_decay^t instead (`Plan.rate`).

F is the floor, 0 unless given, and T all rounds of the run, `cosine:floor=0.01,rounds=500`; from round T + 1 on the
factor is F. `piecewise:FILE` reads rounds and factors from a file, `file.py:f` calls f(t) for every round.

A schedule is kept as text that alone decides every round: `cosine` over 100 rounds is `cosine:rounds=100`, and a file's
or a function's numbers are written into it. So more rounds never change those before, a run directory needs no file
and no code, and no function travels to a worker. The rate also has a warm-up, and fields of the method may follow both
(`warmup.py`).
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import math
import tomllib
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import UserError, one_line, unknown
from ..utils.checked_fields import parse_pairs
from ..utils.files import LARGEST, read_text
from ..utils.registry import file_of, load_code, raised, require_part

SHAPES = {
    "constant": "constant",
    "exponential": "exponential:0.998",
    "step": "step:30,60:0.1",
    "cosine": "cosine, cosine:floor=0.01 or cosine:rounds=500",
    "polynomial": "polynomial:2 or polynomial:2,floor=0.01,rounds=500",
    "piecewise": "piecewise:1=1,50=0.1 or piecewise:FILE",
}
"""The named schedules, each with examples."""
FIRST = {"exponential": "factor", "polynomial": "power"}
"""The parameter that comes first, without its name."""
FALLING = ("cosine", "polynomial")
"""The schedules with a floor and a length."""
FILES = "rows `round,factor` in a .csv, or factors by round in a .json or .toml"
MOST_TEXT = 90_000
"""Characters of a schedule; a config in TOML has at most 100,000."""
TINY = 5e-324
"""The smallest number above 0."""


class Shape(NamedTuple):
    """A schedule, read: its name, its numbers by name, milestones or rounds, and the factors of those rounds."""

    name: str
    numbers: dict[str, float]
    at: tuple[int, ...] = ()
    factors: tuple[float, ...] = ()


def schedule_text(given: Any, rounds: int) -> str:
    """Return a schedule of a run in its one form; raise unless the factor of every round is a finite number above 0.

    Args:
        given: text, a function of t = 0, 1, ... that returns the factor of lr in that round, a list of all factors, or
            a table of some by round, 1, 2, ...

    Example:
        >>> schedule_text("cosine", 100), schedule_text("polynomial:2.0", 100)
        ('cosine:rounds=100', 'polynomial:2,rounds=100')
        >>> schedule_text(lambda t: 0.5 if t < 50 else 0.05, 100), schedule_text([1, 0.5, 0.25], 3)
        ('piecewise:1=0.5,50=0.5,51=0.05,100=0.05', 'piecewise:1=1,2=0.5,3=0.25')
    """
    if isinstance(given, str) and not given.strip():
        return ""
    if callable(given):
        given = _called(given, rounds)
    try:
        pairs = given.items() if isinstance(given, Mapping) else enumerate(given, 1)
        shape = _read(given) if isinstance(given, str) else _rows(pairs)
    except TypeError:
        raise _unknown(given) from None
    if shape.name in FALLING:
        shape = shape._replace(numbers={"rounds": rounds, **shape.numbers})
    text = _written(shape)
    _require_factors(shape, text, rounds)
    if len(text) > MOST_TEXT:
        raise UserError(
            f"lr_schedule: expected at most {MOST_TEXT:,} characters, found {len(text):,}; round the factors to six "
            f"digits, or give fewer rounds and lines between them"
        )
    return text


def _called(function: Callable[[int], Any], rounds: int) -> list[Any]:
    """Return the factors that a user's function gives; it is called once per round, all before the first."""
    found, t = [], 0
    try:
        for t in range(rounds):
            found.append(function(t))
    except Exception as error:
        code = getattr(function, "__code__", None)
        where = raised(error, Path(code.co_filename)) if code else one_line(error)
        name = getattr(function, "__name__", type(function).__name__)
        raise UserError(f"lr_schedule: {name}({t}) failed: {where}; expected the factor of lr in round t") from error
    return found


def _rows(pairs: Iterable[tuple[Any, Any]]) -> Shape:
    """Return the piecewise shape of rounds and factors, without the inner rounds of a stretch of equal factors.

    A line between equal factors has exactly their bits.
    """
    rows = [(_whole(at), _number(f"factor of round {at}", factor)) for at, factor in pairs]
    _require_ascending([at for at, _ in rows])
    ends = [None, *(factor for _, factor in rows), None]
    kept = [row for i, row in enumerate(rows) if not ends[i] == row[1] == ends[i + 2]]
    return Shape("piecewise", {}, tuple(at for at, _ in kept), tuple(factor for _, factor in kept))


@lru_cache(maxsize=64)
def _read(text: str) -> Shape:
    """Return the shape of a text; raise for an unknown name or wrong parameters."""
    name, _, rest = (part.strip() for part in text.partition(":"))
    if name not in SHAPES or table_of(text):
        raise _unknown(text)
    wrong = UserError(f"lr_schedule: expected {SHAPES[name]}, found {text[:80]!r}")
    if name == "step":
        milestones, colon, factor = rest.rpartition(":")
        if not colon:
            raise wrong
        at = [_whole(part) for part in milestones.split(",")]
        _require_ascending(at)
        return Shape(name, {"factor": _number("factor of step", factor)}, tuple(at))
    pairs = parse_pairs(rest)
    if name == "piecewise":
        if not pairs or not all(factor for _, factor in pairs):
            raise wrong
        return _rows(pairs)
    found: dict[str, float] = {}
    for i, (key, value) in enumerate(pairs):
        if i == 0 and name in FIRST and not value:
            key, value = FIRST[name], key
        if key in found or not value or key not in (FIRST.get(name), *(("floor", "rounds") if name in FALLING else ())):
            raise wrong
        least = 0 if key == "floor" else TINY
        found[key] = _whole(value) if key == "rounds" else _number(f"{key} of {name}", value, least)
    if (name in FIRST and FIRST[name] not in found) or found.get("floor", 0) > 1:
        raise wrong
    return Shape(name, found)


def _whole(given: Any) -> int:
    """Return a number of rounds."""
    value = _number("the number of a round", given, 1)
    if not value.is_integer():
        raise UserError(f"lr_schedule: expected rounds as whole numbers from 1 on, found {given}")
    return int(value)


def _number(what: str, given: Any, least: float = TINY) -> float:
    """Return a finite number that is not below `least`."""
    try:
        value = math.nan if isinstance(given, bool) else float(given)
    except (TypeError, ValueError, OverflowError):
        value = math.nan
    if not least <= value < math.inf:
        bound = "above 0" if least == TINY else f">= {least:g}"
        raise UserError(f"lr_schedule: expected a finite number {bound} as {what}, found {str(given)[:40]}")
    return value


def _require_ascending(rounds: list[int]) -> None:
    for before, after in pairwise(rounds):
        if after <= before:
            raise UserError(f"lr_schedule: expected rounds in ascending order, each once, found {after} after {before}")


def _require_factors(shape: Shape, text: str, rounds: int) -> None:
    """Raise unless every round has a finite factor above 0.

    The factors of `piecewise` were checked as they were read. All others are monotone, so the last round decides.
    """
    if shape.name == "piecewise":
        if not shape.at or shape.at[0] != 1 or shape.at[-1] < rounds:
            found = f"{shape.at[0]} to {shape.at[-1]}" if shape.at else "none"
            raise UserError(
                f"lr_schedule: expected factors from round 1 to round {rounds}, found {found}; add the others"
            )
        return
    try:
        last = lr_factor(text, rounds - 1)
    except OverflowError:
        last = math.inf
    if not 0 < last < math.inf:
        another = f"{shape.name} with rounds={rounds} or a floor" if shape.name in FALLING else "another factor"
        raise UserError(
            f"lr_schedule: expected a finite factor above 0 in every round, found {last:g} in round {rounds} of "
            f"{text}; start a run with {another}"
        )


def _unknown(given: Any) -> UserError:
    if file_of(given) or table_of(given):
        return UserError(f"lr_schedule: a file is read by simulate and Config.from_dict, found {given!r} in a Plan")
    if isinstance(given, str):
        return unknown("lr_schedule", given.partition(":")[0][:40], [*SHAPES, "file.py:f"])
    return UserError(
        f"lr_schedule: expected a name such as cosine, a function of t or a list of factors, found {str(given)[:80]!r}"
    )


def _written(shape: Shape) -> str:
    """Return the one text of a shape."""
    numbers = {name: _digits(value) for name, value in shape.numbers.items()}
    if shape.name == "step":
        return f"step:{','.join(map(str, shape.at))}:{numbers['factor']}"
    parts = [f"{at}={_digits(factor)}" for at, factor in zip(shape.at, shape.factors, strict=True)]
    parts += [numbers[name] for name in numbers if name == FIRST.get(shape.name)]
    parts += [f"{name}={numbers[name]}" for name in ("floor", "rounds") if name in numbers]
    return f"{shape.name}:{','.join(parts)}" if parts else shape.name


def _digits(value: float) -> str:
    """Return a number with all digits that fix its bits."""
    return repr(float(value)).removesuffix(".0")


def lr_factor(schedule: str, t: int) -> float:
    """Return the factor of lr in round t = 0, 1, ... of a schedule in the form of `schedule_text`.

    Example:
        >>> [lr_factor("step:2,3:0.5", t) for t in range(5)], lr_factor("cosine:floor=0.5,rounds=4", 2)
        ([1.0, 1.0, 0.5, 0.25, 0.25], 0.75)
        >>> [lr_factor("piecewise:1=1,3=0.5,9=0.5", t) for t in range(4)]
        [1.0, 0.75, 0.5, 0.5]
    """
    shape = _read(schedule)
    name, numbers = shape.name, shape.numbers
    if name == "constant":
        return 1.0
    if name == "exponential":
        return float(numbers["factor"] ** t)
    if name == "step":
        return float(numbers["factor"] ** bisect_right(shape.at, t))
    if name == "piecewise":  # the factor of a listed round, or the one on the line between its neighbours
        r = t + 1
        i = bisect_right(shape.at, r) - 1
        a = shape.factors[i]
        if shape.at[i] == r:
            return a
        return a + (shape.factors[i + 1] - a) * ((r - shape.at[i]) / (shape.at[i + 1] - shape.at[i]))
    part, floor = min(1.0, t / numbers["rounds"]), numbers.get("floor", 0.0)
    falling = (1 + math.cos(math.pi * part)) / 2 if name == "cosine" else (1 - part) ** numbers["power"]
    return float(floor + (1 - floor) * falling)


def extremes(schedule: str, rounds: int) -> list[int]:
    """Return rounds t = 0, 1, ... of a run among which the schedule has its largest and its smallest factor.

    Example:
        >>> extremes("cosine:rounds=9", 9), extremes("piecewise:1=0.1,4=1,9=0.2", 9)
        ([0, 8], [0, 3, 8])
    """
    shape = _read(schedule) if schedule.startswith("piecewise") else Shape("", {})
    inner = sorted((factor, at - 1) for at, factor in zip(shape.at, shape.factors, strict=True) if at <= rounds)
    return sorted({0, rounds - 1, *(t for _, t in (*inner[:1], *inner[-1:]))})


def shown(schedule: str) -> str:
    """Return a schedule for people: of many factors only the first, the last and a digest.

    Example:
        >>> shown("cosine:rounds=100"), shown("piecewise:" + ",".join(f"{r}={r / 10}" for r in range(1, 40)))
        ('cosine:rounds=100', 'piecewise:1=0.1,..,39=3.9#2976')
    """
    if len(schedule) <= 60 or not schedule.startswith("piecewise:"):
        return schedule
    digest = hashlib.blake2b(schedule.encode(), digest_size=2).hexdigest()
    return f"{schedule.partition(',')[0]},..,{schedule.rpartition(',')[2]}#{digest}"


def from_file(given: Any) -> Any:
    """Return a schedule whose file is read: `file.py:f` as the function, `piecewise:FILE` as text, others as they are.

    It executes a user's file, so a run directory's config comes here only after `read_config` has let it pass.
    """
    name = given.get("name") if isinstance(given, dict) else given
    if not isinstance(name, str):
        return given
    require_part("lr_schedule", "" if table_of(name) else name)
    if file_of(name):
        return load_code("lr_schedule", name, str(given.get("code", "")) if isinstance(given, dict) else "")
    file = table_of(name)
    return _written(_rows(_pairs(Path(file).expanduser()))) if file else name


def table_of(name: Any) -> str:
    """Return the file of `piecewise:FILE`; "" for any other schedule.

    Example:
        >>> table_of("piecewise:rates.csv"), table_of("piecewise:1=1,50=0.1"), table_of("cosine")
        ('rates.csv', '', '')
    """
    kind, _, file = name.partition(":") if isinstance(name, str) else ("", "", "")
    return file.strip() if kind.strip() == "piecewise" and "=" not in file else ""


def _pairs(path: Path) -> list[tuple[Any, Any]]:
    """Return the rounds and factors of a file."""
    try:
        text = read_text(path, LARGEST)
        if path.suffix == ".json":
            found = json.loads(text, object_pairs_hook=list)  # a list keeps a round that is given twice
        elif path.suffix == ".toml":
            found = list(tomllib.loads(text).items())
        else:
            found = [row for row in csv.reader(io.StringIO(text)) if row]
            found = found[1:] if found and [cell.strip() for cell in found[0]] == ["round", "factor"] else found
        return [(at, factor) for at, factor in found]
    except OSError as error:
        raise UserError(f"lr_schedule: cannot read {path}: {error.strerror}; expected {FILES}") from None
    except (ValueError, TypeError, RecursionError, csv.Error) as error:
        raise UserError(f"lr_schedule: {path}: expected {FILES}, found something else ({one_line(error)})") from None
