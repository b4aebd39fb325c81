"""Tables of comparisons and the formats of all tables: text that fits a width, Markdown, CSV, LaTeX, plain data."""

from __future__ import annotations

import csv as csv_format
import io
import math
import re
import statistics
import textwrap
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import UserError, unknown
from ..record import CLIENT_SCORES
from .run_files import VIRTUAL, Row, measured, short, spread, to
from .statistics import Gap, distinguished

Lines = list[tuple[str, ...]]


@dataclass(frozen=True)
class Column:
    """A column of the table.

    Args:
        keep: its priority when there is little room; columns with the least are dropped first.
        deviation: whether the deviation over seeds is shown.
        named: its name for `--columns`, if that does not follow from the title.
    """

    title: str
    key: str
    keep: int
    scale: float = 1.0
    digits: int = 2
    deviation: bool = True
    named: str = ""

    @property
    def name(self) -> str:
        """The name of the column for `--columns`.

        Example:
            >>> ACCURACIES[2].name, Column("rounds to 80%", "rounds_to_80", 8).name
            ('last5', 'rounds-to-80')
        """
        if self.named:
            return self.named
        words = self.title.replace("last-5 mean", "last5").replace("MB sent", "mb")
        return words.replace("%", "").strip().replace(" ", "-").lower()


METHOD = "method"
ACCURACIES = (
    Column("last %", "last_accuracy", 7, 100),
    Column("best %", "best_accuracy", 3, 100),
    Column("last-5 mean %", "mean_last5_accuracy", 9, 100),
)
TEST_LOSS = Column("test loss", "last_test_loss", 9, digits=4)
OTHERS = (
    Column("train loss", "last_train_loss", 5, digits=4),
    Column("MB sent", "bytes", 4, 1e-6, 1, False),
    Column("gradients", "grad_evals", 2, 1, 0, False),
    Column("seconds", "seconds", 1, 1, 1, False),
    Column("virtual s", VIRTUAL, 4, 1, 2, False),
)
TO_TARGET = (
    ("rounds", "rounds", 8, 1.0, 1),
    ("MB", "bytes", 6, 1e-6, 1),
    ("gradients", "grad_evals", 2, 1.0, 0),
    ("seconds", "seconds", 1, 1.0, 1),
    ("virtual s", VIRTUAL, 6, 1.0, 2),
)
"""Costs to reach a target: title, name, `keep`, scale and digits of the column."""
CLIENTS = {
    "client-mean": ("client {} mean", "{}_mean", 6),
    "worst10": ("client {} worst tenth", "{}_worst10", 8),
    "spread": ("client {} sd", "{}_sd", 6),
    "personalised": ("personalised {} mean", "personalised_{}_mean", 6),
}
"""Scores over clients: a column's name for `--columns`, and its title, key and `keep`; {} is data or score."""


def columns(rows: Sequence[Row], targets: Sequence[float] = ()) -> tuple[Column, ...]:
    """Return all columns: accuracies (losses without them), scores over clients that a run has, costs to the targets,
    totals; simulated time if all runs have it."""
    scores = ACCURACIES if measured(rows) == "test_accuracy" else (TEST_LOSS,)
    timed = bool(rows) and all(len(row.values(VIRTUAL)) == len(row.runs) for row in rows)
    every = (*scores, *client_columns(rows), *_reached(targets), *OTHERS)
    return tuple(column for column in every if timed or not column.key.startswith(VIRTUAL))


def client_columns(rows: Sequence[Row]) -> list[Column]:
    """Return the columns of scores over clients that a run has; their titles say on which data of a client."""
    known = {key for row in rows for run in row.runs for key in run.numbers()}
    found = []
    for name, (title, key, keep) in CLIENTS.items():
        for on, data in zip(CLIENT_SCORES, ("test", "training"), strict=True):
            for score, words, end, scale, digits in (("accuracy", "", " %", 100.0, 2), ("loss", " loss", "", 1.0, 4)):
                full = title.format(data + words) + end
                found.append(Column(full, f"{on}_{key.format(score)}", keep, scale, digits, named=name))
    return [column for column in found if column.key in known]


def table(
    rows: Sequence[Row], targets: Sequence[float] = (), names: Sequence[str] = ()
) -> tuple[tuple[str, ...], Lines]:
    """Return header and one line per method: mean +- deviation over seeds, notes on diverged and missing runs."""
    shown, most = choose(rows, targets, names), max((len(row.runs) for row in rows), default=0)
    lines = [(_name(row, most), *(_cell(row, column, targets) for column in shown)) for row in rows]
    return (METHOD, *(column.title for column in shown)), lines


def choose(rows: Sequence[Row], targets: Sequence[float], names: Sequence[str] = ()) -> tuple[Column, ...]:
    """Return the columns with these names, in this order; for `all` every column that the rows fill.

    Without names there are four, and one per further target: last-5 mean and best accuracy (test and training loss if
    there is no accuracy), rounds to the targets (MB if there are none), and gradients; and simulated time, if any.
    """
    full = columns(rows, targets)
    if list(names) == ["all"]:
        return full
    if names:
        return named_columns(targets, names, client_columns(rows))
    timed = [column for column in full if column.key.startswith(VIRTUAL if not targets else f"{VIRTUAL}_to_")]
    scores = ACCURACIES[:0:-1] if measured(rows) == "test_accuracy" else (TEST_LOSS, OTHERS[0])
    reached = named_columns(targets, ["rounds"]) if targets else OTHERS[1:2]
    return (*scores, *reached, *timed, OTHERS[2])


def named_columns(
    targets: Sequence[float], names: Sequence[str], of_clients: Sequence[Column] = ()
) -> tuple[Column, ...]:
    """Return the columns with these names; `rounds` stands for those of all targets, and `method` is always there.

    Args:
        of_clients: the scores over clients that the runs have; there is no column for the others.
    """
    reached = _reached(targets)
    every = (*ACCURACIES, TEST_LOSS, *reached, *OTHERS)
    known = {METHOD: (), **{column.name: (column,) for column in every}}
    known |= {name: tuple(column for column in of_clients if column.name == name) for name in CLIENTS}
    known |= {"rounds": rounds} if (rounds := tuple(c for c in reached if c.title.startswith("rounds"))) else {}
    for name in names:
        if not targets and (name == "rounds" or "-to-" in name):
            raise UserError(
                f"column {name}: expected a target accuracy, found none; add --targets 0.8, in Python targets=[0.8]"
            )
        if name not in known:
            raise unknown("column", name, [*known, "all"])
    return tuple(column for name in dict.fromkeys(names) for column in known[name])


def _reached(targets: Sequence[float]) -> list[Column]:
    return [
        Column(f"{title} to {100 * target:g}%", to(cost, target), keep, scale, digits)
        for target in targets
        for title, cost, keep, scale, digits in TO_TARGET
    ]


def leaders(rows: Sequence[Row], shown: Sequence[Column], targets: Sequence[float] = ()) -> set[tuple[int, int]]:
    """Return (row, column) of every cell that is best in its column, or that the seeds do not distinguish from it.

    High accuracies and low losses, costs and deviations over clients are good. A method with a diverged run, or with a
    number that not all of its runs have, takes no part. A column of scores has no best cell if any run stopped at a
    score, nor has a column of equal numbers, nor have runs on different data.
    """
    data = {(run.summary["seed"], run.summary.get("data_fingerprint", "")) for row in rows for run in row.runs}
    if len(data) > len({seed for seed, _ in data}):
        return set()
    found: set[tuple[int, int]] = set()
    for j, column in enumerate(shown):
        score = "accuracy" in column.key or "loss" in column.key
        high = "accuracy" in column.key and not column.key.endswith("_sd")
        if score and any(row.at_goal for row in rows):
            continue
        values = {i: row.by_seed(column.key, targets) for i, row in enumerate(rows) if not row.diverged}
        means = {i: statistics.fmean(v.values()) for i, v in values.items() if v and len(v) == len(rows[i].runs)}
        if not means:
            continue
        best = (max if high else min)(means, key=lambda i: means[i])
        alike = {i for i in means if i == best or _alike(values[i], values[best], score)}
        found |= {(i, j) for i in alike} if len(rows) > 1 and len({*means.values()}) > 1 else set()
    return found


def _alike(ours: dict[int, float], best: dict[int, float], score: bool) -> bool:
    """Whether the paired seeds do not distinguish two methods; of one seed, whether the numbers are equal.

    A cost that differs by the same number in every seed, bytes for example, is exact.
    """
    differences = [ours[seed] - best[seed] for seed in ours.keys() & best.keys()]
    if len(differences) < 2:
        return ours == best
    if not score and max(differences) - min(differences) <= 1e-9:
        return abs(differences[0]) <= 1e-9
    return not distinguished(differences)


def _name(row: Row, most: int) -> str:
    notes = [f"{row.diverged} of {len(row.runs)} diverged"] if row.diverged else []
    stops = [rule for run in row.runs if (rule := run.stopped)]
    notes += [f"{len(stops)} of {len(row.runs)} stopped: {' or '.join(dict.fromkeys(stops))}"] if stops else []
    unhealthy = [run for run in row.runs if run.findings and not run.diverged]
    notes += [f"{len(unhealthy)} of {len(row.runs)} unhealthy: {unhealthy[0].findings[0]}"] if unhealthy else []
    notes += [f"{len(row.runs)} of {most} seeds"] if len(row.runs) < most else []
    return row.label + (f" ({', '.join(notes)})" if notes else "")


def _cell(row: Row, column: Column, targets: Sequence[float]) -> str:
    values = row.values(column.key, targets)
    if "_to_" in column.key and len(values) < len(row.runs):
        return _bound(row, column, targets)
    if column.deviation or not values:
        return spread(values, column.scale, column.digits)
    mean = column.scale * statistics.fmean(values)
    return f"{mean:.2g}" if 0 < mean < 0.5 * 10**-column.digits else short(mean, column.digits)  # 0.013 MB are not 0.0


def _bound(row: Row, column: Column, targets: Sequence[float]) -> str:
    """Return a lower bound where not every run reached a target.

    A run that missed it counts with the rounds it was planned for, or with all that it spent.
    """
    cost, reached = column.key.partition("_to_")[0], len(row.values(column.key, targets))
    found = [(run, run.numbers(targets)[column.key]) for run in row.runs]
    mean = column.scale * statistics.fmean(run.bound(cost) if value is None else value for run, value in found)
    text = short(mean, 0 if mean == round(mean) else column.digits)
    return f"> {text} ({reached} of {len(found)})" if reached else f"> {text}"


GAP = ("method", "last-5 mean", "95% interval", "real?", "last", "95% interval", "real?")
GAP_LOSS = ("method", "test loss", "95% interval", "real?")
GAP_KEEP = (9, 9, 9, 2, 2, 2)


def gap_table(found: Sequence[Gap]) -> tuple[tuple[str, ...], Lines]:
    """Return header and one line per method: its difference to the baseline (accuracies in points), with interval."""
    by_method: dict[str, list[str]] = {}
    for gap in found:
        scale, digits = (100.0, 2) if "accuracy" in gap.metric else (1.0, 4)
        mean, low, high = (_signed(v, scale, digits) for v in (gap.mean, gap.low, gap.high))
        bounds = f"[{low}, {high}]" if math.isfinite(gap.low) else "-"
        by_method.setdefault(gap.method, []).extend([mean, bounds, gap.answer])
    header = GAP if any("accuracy" in gap.metric for gap in found) else GAP_LOSS
    return header, [(method, *cells) for method, cells in by_method.items()]


def _signed(value: float | None, scale: float, digits: int) -> str:
    if value is None:
        return "-"
    text = short(scale * value, digits)
    return text if text.startswith("-") else f"+{text}"


# --- formats ---


def markdown(header: tuple[str, ...], lines: Lines) -> str:
    """Return a Markdown table; bars and tags in cells are escaped."""
    rule = tuple("---" for _ in header)
    tag = re.compile("<(?=[a-zA-Z/!?])")
    safe = [[tag.sub("&lt;", cell.replace("|", r"\|")) for cell in line] for line in (header, rule, *lines)]
    return "".join("| " + " | ".join(line) + " |\n" for line in safe)


def tabular(header: tuple[str, ...], lines: Lines) -> str:
    """Return a plain LaTeX tabular."""
    body = [" & ".join(map(escape, line)) + r" \\" for line in (header, *lines)]
    rows = [body[0], r"\hline", *body[1:]]
    return "\n".join([rf"\begin{{tabular}}{{l{'r' * (len(header) - 1)}}}", *rows, r"\end{tabular}", ""])


def booktabs(header: tuple[str, ...], lines: Lines, bold: Collection[tuple[int, int]] = ()) -> str:
    """Return a LaTeX tabular with the rules of the package booktabs; `bold` has (line, column after the first)."""
    titles = [escape(f"{title[:1].upper()}{title[1:]}".replace(" %", " (%)")) for title in header]
    rows = [r"\toprule", " & ".join(titles) + r" \\", r"\midrule"]
    for i, (name, *numbers) in enumerate(lines):
        cells = [re.sub(r"(?<![\w.])-(?=\d)", "$-$", escape(cell)) for cell in numbers]  # a minus, not a hyphen
        bolds = [rf"\textbf{{{cell}}}" if (i, j) in bold else cell for j, cell in enumerate(cells)]
        rows.append(" & ".join([symbols(name), *bolds]) + r" \\")
    rows += [r"\bottomrule", r"\end{tabular}", ""]
    return "\n".join([rf"\begin{{tabular}}{{@{{}}l{'r' * (len(header) - 1)}@{{}}}}", *rows])


def escape(text: str) -> str:
    """Escape text for LaTeX."""
    special = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", ">": "$>$", "<": "$<$"}
    special.update({sign: "\\" + sign for sign in "&%$#_{}"})
    return "".join(special.get(sign, sign) for sign in text).replace("+-", r"$\pm$")


GREEK = "alpha|beta|gamma|delta|epsilon|eta|theta|kappa|lambda|mu|rho|sigma|tau|omega"


def symbols(label: str) -> str:
    r"""Return a method's label for LaTeX: `rho=` with its Greek letter, and what stands in dollars as it is.

    Example:
        >>> print(symbols("FedSpeed (rho=0.05, lam=10)"), symbols(r"A_1 $\lambda_1$"))
        FedSpeed ($\rho$=0.05, $\lambda$=10) A\_1 $\lambda_1$
    """
    parts = re.split(r"(\$[^$]+\$)", label)
    field = re.compile(rf"(?<![\w\\])({GREEK}|lam)(?:\\_([a-z])|(\d))?(?==)")

    def symbol(found: re.Match[str]) -> str:
        letter, below = "lambda" if found[1] == "lam" else found[1], found[2] or found[3]
        return rf"$\{letter}_{below}$" if below else rf"$\{letter}$"

    return "".join(part if i % 2 else field.sub(symbol, escape(part)) for i, part in enumerate(parts))


def csv_lines(lines: Iterable[Iterable[Any]]) -> str:
    """Return lines, the header first, as CSV; None is an empty cell."""
    text = io.StringIO()
    csv_format.writer(text, lineterminator="\n").writerows(lines)
    return text.getvalue()


def csv_text(table: Sequence[dict[str, Any]]) -> str:
    """Return rows by column names as CSV; a list becomes its numbers with spaces between them."""
    names = list(dict.fromkeys(name for one in table for name in one))
    joined = [{name: " ".join(map(str, v)) if isinstance(v, list) else v for name, v in one.items()} for one in table]
    return csv_lines([names, *([one.get(name) for name in names] for one in joined)])


def csv(rows: Sequence[Row], targets: Sequence[float] = ()) -> str:
    """Return one CSV line per run, numbers only; a cell is empty where a target was not reached."""
    runs = [(row.label, run, run.numbers(targets)) for row in rows for run in row.runs]
    names = _names([numbers for _, _, numbers in runs])
    lines = [[label, run.state, *map(numbers.get, names), run.path.name] for label, run, numbers in runs]
    return csv_lines([["method", "status", *names, "folder"], *lines])


def data(rows: Sequence[Row], targets: Sequence[float], found: Sequence[Gap], baseline: str) -> dict[str, Any]:
    """Return the comparison as JSON values: numbers of every seed by their names in files, with mean and deviation."""
    return {
        "rows": [_row(row, targets) for row in rows],
        "baseline": baseline,
        "differences": [{**plain_gap(gap), "real": gap.real} for gap in found],
    }


def plain_gap(gap: Gap) -> dict[str, Any]:
    """Return a difference as JSON values; an interval without bounds is None."""
    return {
        "method": gap.method,
        "metric": gap.metric,
        "seeds": list(gap.seeds),
        "values": list(gap.values),
        "mean": gap.mean,
        "low": gap.low if math.isfinite(gap.low) else None,
        "high": gap.high if math.isfinite(gap.high) else None,
    }


def _row(row: Row, targets: Sequence[float]) -> dict[str, Any]:
    of_runs = [run.numbers(targets) for run in row.runs]
    plain: dict[str, Any] = {
        "method": row.label,
        "seeds": [numbers.pop("seed") for numbers in of_runs],
        "status": [run.state for run in row.runs],
        "folders": [run.path.name for run in row.runs],
        "illnesses": [run.findings for run in row.runs],
    }
    for key in _names(of_runs):
        values = [numbers.get(key) for numbers in of_runs]
        known = [value for value in values if value is not None]
        plain[key] = {
            "values": values,
            "mean": statistics.fmean(known) if known else None,
            "std": statistics.stdev(known) if len(known) > 1 else None,
            "n": len(known),
        }
    return plain


def _names(of_runs: Sequence[dict[str, float | None]]) -> list[str]:
    """Return the names of all numbers of the runs, in the order of the run with most of them."""
    longest = sorted(of_runs, key=len, reverse=True)
    return list(dict.fromkeys(key for numbers in longest for key in numbers))


# --- text ---


MATTERS, LONG = 5, 20
"""Columns with less `keep` are dropped before names longer than `LONG` get a line of their own."""


def fit(header: tuple[str, ...], lines: Lines, keep: Sequence[int], width: int) -> tuple[str, list[str]]:
    """Return a table as text of at most `width` characters, and the titles of the columns that were dropped.

    Numbers are never cut. With too little room, titles take two lines; then the columns with the least `keep` are
    dropped (`keep` has one number per column but the first); then long names take a line of their own.
    """
    keep = keep[: len(header) - 1]  # a table of losses has fewer columns than one of accuracies
    levels = [0, *sorted(set(keep))[:-1]]  # columns up to a level are dropped together
    short_names = max((len(line[0]) for line in lines), default=0) <= LONG
    first = levels if short_names else [level for level in levels if level < MATTERS]
    tries = [(False, False, 0), *((True, False, level) for level in first), *((True, True, level) for level in levels)]
    for stacked, apart, level in tries:
        left = [0, *(i for i, own in enumerate(keep, 1) if own > level)]
        text = _text([header, *lines], left, stacked, apart, width)
        if max(map(len, text)) <= width:
            break
    return "\n".join(text), [title for i, title in enumerate(header) if i not in left]


def _text(table: Lines, left: list[int], stacked: bool, apart: bool, width: int) -> list[str]:
    """Return aligned lines; `stacked`: titles take two lines; `apart`: names take a line above their numbers."""
    shown = left[1:] if apart else left
    titles = (_halves(table[0][i]) if stacked else ("", table[0][i]) for i in shown)
    every = [*zip(*titles, strict=True), *([line[i] for i in shown] for line in table[1:])]
    widths = [max(map(len, cells)) for cells in zip(*every, strict=True)]

    def aligned(cells: Sequence[str]) -> str:
        first = cells[0].rjust(widths[0]) if apart else cells[0].ljust(widths[0])
        rest = (cell.rjust(w) for cell, w in zip(cells[1:], widths[1:], strict=True))
        return ("  " * apart + "  ".join([first, *rest])).rstrip()

    upper, lower, *body = map(aligned, every)
    text = [upper] * bool(upper.strip()) + [lower]
    for (name, *_), numbers in zip(table[1:], body, strict=True):
        text += textwrap.wrap(name, width, break_on_hyphens=False) if apart else []
        text.append(numbers)
    return text


def _halves(title: str) -> tuple[str, str]:
    """Split a title into two lines of about the same length."""
    words = title.split()
    cuts = [(" ".join(words[:i]), " ".join(words[i:])) for i in range(len(words))]
    return min(cuts, key=lambda pair: max(map(len, pair)))
