"""A comparison of methods: tables, paired differences and notes, as files and as data; for another network too."""

from __future__ import annotations

import json
import math
import re
import statistics
import struct
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..config.lr_schedule import shown
from ..config.network import Clock
from ..config.spec import compared, difference, in_force
from ..config.stopping import goal_accuracy
from ..errors import UserError, nearest
from ..record import Record, is_number
from ..utils.files import write
from . import tables
from .labels import besides_method, find_label, paper_names
from .run_files import VIRTUAL, Row, RunFiles, measured, renamed, seeds_of, setting
from .statistics import find_row, gaps

TEXT_WIDTH = 100
"""Characters of a comparison that is printed as text."""


def targets_of(rows: Sequence[Row], baseline: str = "") -> list[float]:
    """Return the targets of the configs; without any, the baseline's last-5 mean accuracy, rounded down to percent."""
    if given := configured_targets(rows):
        return given
    ends = find_row(rows, baseline).values("mean_last5_accuracy")
    return [math.floor(100 * statistics.fmean(ends)) / 100] if ends and statistics.fmean(ends) >= 0.01 else []


def configured_targets(rows: Sequence[Row]) -> list[float]:
    """Return the targets of the runs' configs, and the accuracies at which they stop."""
    lists = [run.config.get("targets") for row in rows for run in row.runs]
    given = [a for one in lists if isinstance(one, list) for a in one]
    goals = [goal for row in rows for run in row.runs for goal in goal_accuracy(str(run.config.get("stop_at", "")))]
    return sorted({a for a in [*given, *goals] if is_number(a) and 0 < a < 1})


SIZES = {"column": (3.25, 2.4), "page": (6.75, 2.9)}
"""Sizes of figures in a paper, in inches."""


@dataclass(frozen=True)
class Look:
    """The choice of what tables and figures show.

    Args:
        columns: names of the table's columns, or `all`; "" for the usual five. See `tables.choose`.
        labels: other names of methods, as a mapping or as text, `fedavg=FedAvg,fedspeed=Ours`.
        title: the title of the figure and the page; "none" for none, None for one that is made from the setting.
        size: the size of the figure in a paper: `column`, `page`, or inches, `5x3`.

    Example:
        >>> Look(columns="last5, best").names, Look(size="5x3").inches
        (['last5', 'best'], (5.0, 3.0))
    """

    columns: str | Sequence[str] = ""
    labels: str | Mapping[str, str] = ""
    title: str | None = None
    size: str = ""

    @property
    def names(self) -> list[str]:
        """The names of the columns."""
        given = self.columns.split(",") if isinstance(self.columns, str) else self.columns
        return [name.strip() for name in given if name.strip()]

    @property
    def inches(self) -> tuple[float, float] | None:
        """Width and height of the figure; None for the size that needs no paper."""
        if not self.size or self.size in SIZES:
            return SIZES.get(self.size)
        try:
            width, height = (float(part) for part in self.size.split("x"))
        except (ValueError, AttributeError):
            width = height = 0.0
        if not (1 <= width <= 40 and 1 <= height <= 40):
            raise UserError(
                f"size: expected column, page or WIDTHxHEIGHT from 1 to 40 inches, found {self.size!r}; give one"
            )
        return width, height

    def titled(self, usual: str) -> str:
        """Return the title to show, given the usual one."""
        return usual if self.title is None else "" if self.title == "none" else self.title

    def named(self, labels: Sequence[str], papers: bool) -> dict[str, str]:
        """Return label -> name to show; raise for names of unknown labels, and for one name of two.

        Args:
            papers: write methods that have no other name as their papers do.
        """
        known = paper_names(labels) if papers else {label: label for label in labels}
        for given, new in self._pairs(labels):
            old = find_label(given, labels)
            another = _meant_as_label(new, labels) if isinstance(self.labels, str) else ""
            if old is None or not new or another:
                found = another or f"{given}={new}"
                raise UserError(
                    f"labels: expected OLD=NEW with OLD one of {', '.join(known)}, found {found!r}; correct it"
                )
            known[old] = new
        twice = next((name for name, times in Counter(known.values()).items() if times > 1), None)
        if twice is not None:
            raise UserError(f"labels: expected a different name for every method, found {twice!r} twice; change one")
        return known

    def _pairs(self, labels: Sequence[str]) -> list[tuple[str, str]]:
        """Return (label, name); a comma or an `=` may be part of a label."""
        if not isinstance(self.labels, str):
            return [(old, str(new).strip()) for old, new in self.labels.items()]
        found: list[tuple[int, int]] = []  # where a label begins, and its `=`
        text, end = self.labels, 0
        for start in [0, *(comma.end() for comma in re.finditer(",", text))]:
            signs = [sign.start() for sign in re.finditer("=", text) if sign.start() > start >= end]
            meant = [sign for sign in signs if find_label(text[start:sign].strip(), labels)]
            if meant:
                found, end = [*found, (start, meant[-1])], meant[-1]
        if not found or found[0][0]:  # what stands first names no method
            old, _, new = text.partition("=")
            return [(old, new.strip())] if text.strip() else []
        ends = [*(start - 1 for start, _ in found[1:]), len(text)]
        pieces = [(start, sign, end) for (start, sign), end in zip(found, ends, strict=True)]
        return [(text[start:sign].strip(), text[sign + 1 : end].strip()) for start, sign, end in pieces]

    def check(
        self, labels: Sequence[str], targets: Sequence[float], of_clients: Collection[str] = tuple(tables.CLIENTS)
    ) -> None:
        """Raise for anything that cannot be shown, before the runs are made.

        Args:
            of_clients: the columns of scores over clients that the runs have.
        """
        if lacking := next((name for name in self.names if name in tables.CLIENTS and name not in of_clients), ""):
            option = "every=10,personalised=5" if lacking == "personalised" else "every=10"
            raise UserError(
                f"column {lacking}: expected runs with such scores of clients, found none; "
                f"make them with --client-metrics {option}"
            )
        if self.names != ["all"]:
            tables.named_columns(targets, self.names)
        for papers in (True, False):  # tables on the screen have the methods' own names
            self.named(labels, papers)
        from .figures import can_draw

        if wrong := next((name for name in self.named(labels, papers=True).values() if not can_draw(name)), ""):
            raise UserError(rf"labels: expected maths such as $\rho_1$ between dollars, found {wrong!r}; correct it")
        _ = self.inches


def _meant_as_label(name: str, labels: Sequence[str]) -> str:
    """Return the part of a name to show that looks like another `OLD=NEW`, which no method has; or ""."""
    methods = [label.partition(":")[0] for label in labels]
    for part in re.finditer(r",\s*([^,=:]+)(?=[:=])", name):
        if part[1].strip() in methods or nearest(part[1].strip(), methods):
            return name[part.start(1) :]
    return ""


class Comparison:
    """Rows compared with a baseline (the first row unless named); it shows itself in a notebook.

    Args:
        kept: the number of runs that were finished before, and not made again.
    """

    def __init__(
        self, rows: Sequence[Row], targets: Sequence[float], baseline: str = "", look: Look | None = None, kept: int = 0
    ) -> None:
        self.kept = f"kept {kept} {'run that was' if kept == 1 else 'runs that were'} finished before" if kept else ""
        self.rows, self.targets, self.look = rows, targets, look or Look()
        self.baseline = find_row(rows, baseline).label if rows else ""
        self.gaps = gaps(rows, self.baseline) if rows else []
        self.columns = tables.choose(rows, targets, self.look.names)
        self.table = tables.table(rows, targets, self.look.names)
        self.leaders = tables.leaders(rows, self.columns, targets)
        self.gap_table = tables.gap_table(self.gaps)

    def named(self, papers: bool) -> Comparison:
        """Return the comparison with the names of its look; `papers`: other methods as their papers write them."""
        names = self.look.named([row.label for row in self.rows], papers)
        look = replace(self.look, labels="")
        return Comparison(renamed(self.rows, names), self.targets, names.get(self.baseline, ""), look)

    def __repr__(self) -> str:
        shown = self.named(papers=False)
        keep = [column.keep for column in self.columns]
        text = f"{tables.fit(*shown.table, keep, TEXT_WIDTH)[0]}\n\n{self.note}"
        if self.gaps:
            text += f"\n\n{shown.question}:\n{tables.fit(*shown.gap_table, tables.GAP_KEEP, TEXT_WIDTH)[0]}"
        return text + (f"\n\n{self.kept}" if self.kept else "")

    def _repr_html_(self) -> str:
        from .page import verdict

        return verdict(self.named(papers=True)) + (f"<p>{self.kept}</p>" if self.kept else "")

    def write(self, out: Path) -> None:
        """Write the table and the figure in every format; CSV and JSON are complete and have the methods' own names."""
        from .figures import save

        out.mkdir(parents=True, exist_ok=True)
        write(out / "table.md", self.named(papers=False).markdown())
        write(out / "table.csv", tables.csv(self.rows, self.targets))
        write(out / "table.tex", self.named(papers=True).latex())
        write(out / "table.json", json.dumps(self.data(), indent=1) + "\n")
        save(self.figure(), out / self.figure_name, paper=self.look.inches is not None)

    @property
    def figure_name(self) -> str:
        """The name of the figure's files: `accuracy`, or `loss` if no run has accuracies."""
        return measured(self.rows).removeprefix("test_")

    def figure(self) -> Any:
        """Draw the curves, methods named as their papers write them."""
        from .figures import draw_curves

        return draw_curves(self.named(papers=True).rows, self.look.titled(self.title), self.look.inches)

    def markdown(self) -> str:
        """Return table and differences as Markdown."""
        page = tables.markdown(*self.table) + f"\n{self.note}.\n" + (f"\n{self.settings}.\n" if self.settings else "")
        return page + (f"\n{self.question}:\n\n{tables.markdown(*self.gap_table)}" if self.gaps else "")

    def latex(self) -> str:
        """Return the table for LaTeX (booktabs), with the best of every column in bold."""
        bold = "% Bold: the best of a column, and what the seeds do not distinguish from it.\n" if self.leaders else ""
        return f"% {self.note}\n{bold}" + tables.booktabs(*self.table, self.leaders)

    @property
    def paper_gaps(self) -> tuple[tuple[str, ...], tables.Lines]:
        """Header and lines of the differences for a paper: the first metric, without a verdict in words."""
        unit = "points" if any("accuracy" in gap.metric for gap in self.gaps) else "test loss"
        header = (tables.METHOD, f"difference to {self.baseline} ({unit})", "95% interval")
        return header, [line[:3] for line in self.gap_table[1]]

    def data(self) -> dict[str, Any]:
        """Return the comparison as JSON values."""
        same, others = compared(self._settings)
        settings = {"settings": {"shared": same, "different": others}}
        return tables.data(self.rows, self.targets, self.gaps, self.baseline) | settings

    @property
    def _settings(self) -> dict[str, dict[str, str]]:
        first = {row.label: row.runs[0] for row in self.rows if row.runs}
        found = {label: in_force(run.config, run.summary.get("settings")) for label, run in first.items()}
        known = {name for one in found.values() for name in one}
        for name, values in besides_method([run.config for run in first.values()]).items():
            if name not in known:
                for one, value in zip(found.values(), values, strict=True):
                    one[name] = value
        return found

    @property
    def settings(self) -> str:
        """The training settings, and which of them differ between the methods."""
        return difference(self._settings)

    @property
    def title(self) -> str:
        """The title of the figure: setting and seeds."""
        return f"{setting(self.rows)}\n{self._seeds}"

    @property
    def _seeds(self) -> str:
        return "1 seed" if seeds_of(self.rows) == "1 seed" else f"mean +- standard deviation over {seeds_of(self.rows)}"

    @property
    def note(self) -> str:
        """The conditions of the numbers: seeds, decay, schedules, network, stopped runs."""
        runs = [run for row in self.rows for run in row.runs]
        rates = _scheduled(self.rows, "warmup", "warm-up") + _scheduled(self.rows, "follow_lr", "following lr:")
        parts = [self._seeds, _decay([run.config for run in runs]) + rates]
        timed = [run.config for run in runs if run.config.get("network")]
        if nets := dict.fromkeys(f"{one['network']}, devices {one.get('devices', 'uniform')}" for one in timed):
            parts.append(f"virtual seconds: network {' or '.join(nets)}")
        if stopped := sum(bool(run.stopped) for run in runs):  # means are then over runs of different lengths
            parts.append(f"{stopped} of {len(runs)} runs were stopped by a rule before their last round")
        return "; ".join(part for part in parts if part)

    @property
    def question(self) -> str:
        """The question that the differences answer."""
        unit = "points, " if any("accuracy" in gap.metric for gap in self.gaps) else ""
        many = f"; of {n} such intervals about {n / 20:.0f} miss by chance" if (n := len(self.gaps)) >= 20 else ""
        return f"Is the difference to {self.baseline} real? ({unit}paired over seeds, 95% t-interval{many})"


def _decay(configs: Sequence[Mapping[str, Any]]) -> str:
    """Return the learning-rate schedule or decay in force, in words."""
    scheduled = {str(config.get("lr_schedule", "")) for config in configs}
    found = {config.get("lr_decay", 0.0) for config in configs}
    if len(scheduled) > 1:
        return "learning-rate schedule as in each config"
    if any(scheduled):
        return f"learning-rate schedule {shown(scheduled.pop())}"
    if len(found) > 1:
        return "learning-rate decay as in each config"
    if not found:
        return ""
    (decay,) = found
    return f"learning-rate decay {decay:g} per round" if decay else "learning-rate decay of the paper, per method"


def _scheduled(rows: Sequence[Row], key: str, words: str) -> str:
    """Return the schedules of one kind, with the methods that use them where they differ."""
    found: dict[str, list[str]] = {}
    for row in rows:
        for schedule in {str(run.config.get(key, "")) for run in row.runs}:
            found.setdefault(schedule, []).append(row.label)
    if len(found) < 2:
        return "".join(f"; {words} {schedule}" for schedule in found if schedule)
    return f"; {words} " + "; ".join(f"{one or 'none'} of {', '.join(whose)}" for one, whose in found.items())


def costed(run: RunFiles, network: str = "", devices: str = "") -> RunFiles:
    """Return a run with simulated time for another network or other devices; "" keeps its own."""
    lacking = UserError(
        f"{run.path}: expected rounds that say what every client computed and sent, found none; only a run made "
        f"with --network can be timed for another: run it again with one"
    )
    if not run.config.get("network"):
        raise lacking
    network, devices = network or str(run.config["network"]), devices or str(run.config.get("devices", "uniform"))
    clock = Clock(network, devices, int(run.summary["seed"]))
    try:
        times = clock.rounds([Record.from_dict(plain) for plain in run.rounds])
        rounds = [{**plain, VIRTUAL: time} for plain, time in zip(run.rounds, times, strict=True)]
    except (TypeError, ValueError, ArithmeticError, struct.error):
        raise lacking from None
    return replace(run, rounds=rounds, config={**run.config, "network": network, "devices": devices})
