"""The cells of a reproduced table: the results of their runs, the metrics they give, and the sheet they fill."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..config.config import Config
from ..config.warmup import shared
from ..errors import UserError, unknown
from ..methods import build
from ..record import first_at, planned_rounds

Tables = dict[str, Any]
Result = dict[str, Any]
"""A stored run: config, summary, evaluated rounds, scores and measures of the final model."""

ACCURACIES = ("final", "last", "last5", "best")
COSTS = ("rounds", "bytes", "grad_evals", "seconds", "mean5_rounds")
"""Costs of the first score at a target; `mean5_rounds`: rounds until the mean of five scores is at the target."""
COUNTED = ("value", "grad_evals", "bytes")
"""Metrics that are counted, so that all seeds may be equal."""
MEASURES = ("sharpness", "sam_gap", "divergence", "value")  # value: of a cell that is counted, not trained
PLAIN = (*ACCURACIES, "early", "test_loss", "train_loss", "seconds_per_round", "seconds", "grad_evals", "bytes",
         "drift", *MEASURES)  # fmt: skip

WORDS = {
    "final": "accuracy of the final model", "last": "last test accuracy", "last5": "mean of the last 5 test accuracies",
    "best": "best test accuracy", "early": "test accuracy after a fifth of the rounds", "test_loss": "test loss",
    "train_loss": "training loss", "drift": "client drift",
    "seconds_per_round": "time of a round", "seconds": "time", "grad_evals": "gradients", "bytes": "sent",
    "sharpness": "sharpness", "sam_gap": "SAM gap", "rounds": "rounds",
    "mean5_rounds": "rounds until the mean of five scores",
    "divergence": "divergence", "value": "value",
}  # fmt: skip
UNITS = {**dict.fromkeys((*ACCURACIES, "early"), "%"), "seconds_per_round": "s", "seconds": "s", "bytes": "MB"}
DIGITS = {
    **dict.fromkeys((*ACCURACIES, "early", "bytes"), 2),
    **dict.fromkeys(("seconds", "rounds", "mean5_rounds"), 1),
    "seconds_per_round": 4,
    "grad_evals": 0,
}


def metric_names(targets: Sequence[float]) -> tuple[str, ...]:
    """Return the names of all metrics of a result: the plain ones, and the costs to reach each target accuracy.

    Example:
        >>> metric_names([0.825])[-5:]
        ('rounds_to_82.5', 'bytes_to_82.5', 'grad_evals_to_82.5', 'seconds_to_82.5', 'mean5_rounds_to_82.5')
    """
    wrong = [a for a in targets if not 0 < a < 1]
    if wrong:
        raise UserError(f"targets: expected accuracies in (0, 1), got {wrong[0]!r}; 36 % is 0.36")
    return (*PLAIN, *(f"{cost}_to_{100 * a:g}" for a in targets for cost in COSTS))


def metrics(result: Result, targets: Sequence[float]) -> dict[str, float | None]:
    """Return the metrics of one result; None where it was not measured or not reached.

    Accuracies are in percent. A diverged run counts with its last evaluated accuracy, 0 if it has none.

    Args:
        targets: accuracies in (0, 1); a gives `rounds_to_A`, `bytes_to_A`, ... with A = 100 a.
    """
    names = metric_names(targets)
    try:
        values = [*_plain(result), *_reached(result["rounds"], targets)]
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        key = result.get("key", "?") if isinstance(result, dict) else "?"
        raise UserError(
            f"result {key}: expected status, final and rounds, found {error!r}; "
            f"its file is damaged: run the recipe again with another --out"
        ) from None
    return dict(zip(names, values, strict=True))


def _plain(result: Result) -> list[float | None]:
    """Return the metrics in the order of `PLAIN`."""
    rounds, diverged = result["rounds"], is_diverged(result)
    final, measures = result.get("final") or {}, result.get("measures") or {}
    accuracies = [100 * (_finite(a) or 0.0) for a in rounds["test_accuracy"]]  # NaN counts as accuracy 0
    if not accuracies and diverged:
        accuracies = [0.0]
    last = accuracies[-1] if accuracies else None
    end = _finite(final.get("accuracy"))
    drift = [_finite(d) for d in rounds["drift"][-math.ceil(len(rounds["drift"]) / 4) :]]
    known_drift = [d for d in drift if d is not None]
    return [
        last if diverged else None if end is None else 100 * end,
        last,
        statistics.fmean(accuracies[-5:]) if accuracies else None,
        max(accuracies) if accuracies else None,
        next((a for t, a in zip(rounds["round"], accuracies, strict=False) if 5 * t >= _planned(result)), last),
        _finite(final.get("loss")),
        _finite(final.get("train_loss")),
        _finite(result.get("seconds_per_round")),
        *(_finite(rounds[cost][-1]) if rounds[cost] else None for cost in ("seconds", "grad_evals", "bytes")),
        statistics.fmean(known_drift) if known_drift and len(known_drift) == len(drift) else None,
        *(_finite(measures.get(name)) for name in MEASURES),
    ]


def _reached(rounds: dict[str, Any], targets: Sequence[float]) -> list[float | None]:
    """Return the costs of the first score at each target, and the round of the first mean of five scores there."""
    spent = list(zip(*(rounds[key] for key in ("round", "bytes", "grad_evals", "seconds")), strict=True))
    scores = [_finite(accuracy) or 0.0 for accuracy in rounds["test_accuracy"]]
    # Fewer than five scores give a mean that is too low.
    means = [math.fsum(scores[max(0, i - 4) : i + 1]) / 5 for i in range(len(scores))]
    found: list[float | None] = []
    for target in targets:
        first, steady = first_at(scores, target), first_at(means, target)
        found += [None] * (len(COSTS) - 1) if first is None else [float(cost) for cost in spent[first]]
        found.append(None if steady is None else float(spent[steady][0]))
    return found


def censored(result: Result, metric: str) -> float | None:
    """Return a lower bound of a `..._to_A` that the run never reached: its rounds + 1, or its total cost.

    The rounds of a run that diverged early are those of its config. None for other metrics.
    """
    cost, found, _ = metric.partition("_to_")
    if not found or cost not in COSTS:
        return None
    if cost in ("rounds", "mean5_rounds"):
        return _planned(result) + 1.0
    return float(result["rounds"][cost][-1]) if result["rounds"][cost] else 0.0


def _planned(result: Result) -> int:
    done = max(result["rounds"]["round"], default=0)
    return planned_rounds(result.get("config") or {}, str(result["status"]), done)


def is_diverged(result: Result) -> bool:
    """Whether the run ended with NaN or Inf."""
    return str(result["status"]).startswith("diverged")


def check_metric(metric: str, targets: Sequence[float]) -> None:
    """Raise `UserError` unless results have this metric."""
    if metric not in metric_names(targets):
        raise unknown("metric", metric, metric_names(targets))


def cell_name(row: str, column: str) -> str:
    """Return `row/column`; the row alone where the column has no name.

    Example:
        >>> cell_name("FedAvg", "IID"), cell_name("FedAvg", "")
        ('FedAvg/IID', 'FedAvg')
    """
    return f"{row}/{column}" if column else row


@dataclass(frozen=True)
class Cell:
    """A row and a column: a config without its seed, and the results of its runs."""

    row: str
    column: str
    results: tuple[Result, ...] = ()  # in the order of seeds; empty if it was not run
    note: str = ""  # why it is empty or incomplete: `not run: data unavailable` or `2 of 3 seeds run`
    tables: Tables = field(default_factory=dict)  # of the config
    tuned: bool = False  # whether its runs use the best point of the method's grid
    rivals: tuple[Tables, ...] = ()  # the methods of its recipe; they share a warm-up, of a field if they have it

    def config(self, seed: int) -> Config:
        """Return the config of a seed; without a learning-rate decay, the method has that of the paper."""
        tables = {"lr_decay": 0.0, **self.tables, "seed": seed}
        if tables.get("warmup") or tables.get("follow_lr"):
            own = build(tables["method"])
            tables |= shared(tables, own, [own, *map(build, self.rivals)])
        return Config.from_dict(tables)

    def values(self, metric: str, targets: Sequence[float]) -> list[float | None]:
        """Return the metric of every result; None where it was not measured or not reached."""
        check_metric(metric, targets)
        return [metrics(result, targets)[metric] for result in self.results]


@dataclass(frozen=True)
class Sheet:
    """A reproduced table or figure: its text, its cells, and the paper's numbers."""

    name: str
    title: str
    claim: str
    about: str
    paper: str  # its place in the paper; "" for our own finding
    preset: str
    metric: str  # the primary metric, that of the paper's numbers
    show: tuple[str, ...]  # the other metrics of the table
    targets: tuple[float, ...]  # accuracies in (0, 1), for `rounds_to_A` and other costs
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    cells: dict[str, Cell]  # by cell name, see `cell_name`
    values: dict[str, float | str]  # the paper's numbers by cell name; a string such as ">1500" means never reached
    seeds: int  # per cell
    figure: str  # `curves`, `lines`, `bars` or `none`
    curves: tuple[str, ...]  # the curves to draw, see `plot.CURVES`; one that no run has is left out
    partial: bool = False  # whether the runs had only part of a data set, so that they decide nothing
    papers_scale: bool = False  # the preset is the paper's own setting: sizes are tested and not only signs
    # Further numbers of the paper by row, named `COLUMN - COLUMN` (differences) or otherwise.
    printed: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    scale: str = ""  # the preset's comparison of its scale with the paper's

    def __post_init__(self) -> None:
        """Raise `UserError` for metrics that no result has, before anything is computed."""
        for metric in (self.metric, *self.show):
            check_metric(metric, self.targets)

    @property
    def other_targets(self) -> bool:
        """Whether our numbers are costs to another target than the paper's."""
        return "_to_" in self.metric and not self.papers_scale

    def cell(self, row: str, column: str) -> Cell | None:
        """Return the cell of a row and a column, if the preset has it."""
        return self.cells.get(cell_name(row, column))

    def value(self, row: str, column: str) -> float | str | None:
        """Return the paper's number of a row and a column, if it has one."""
        return self.values.get(cell_name(row, column))


@dataclass(frozen=True)
class Estimate:
    """A metric of a cell over its seeds."""

    mean: float  # a lower bound if some runs never reached the target
    deviation: float | None  # standard deviation over seeds; None with one seed
    n: int  # of runs
    missed: int = 0  # of runs that never reached the target


def estimate(cell: Cell | None, metric: str, targets: Sequence[float]) -> Estimate | None:
    """Return mean and standard deviation in the units of `label`; None without values."""
    values, missed = [], 0
    for result, value in zip(cell.results, cell.values(metric, targets), strict=True) if cell else ():
        bound = censored(result, metric) if value is None else None
        missed += bound is not None
        values += [v for v in (value, bound) if v is not None]
    if not values:
        return None
    scale = 1e-6 if UNITS.get(base(metric)) == "MB" else 1.0
    deviation = scale * statistics.stdev(values) if len(values) > 1 else None
    return Estimate(scale * statistics.fmean(values), deviation, len(values), missed)


def label(metric: str) -> str:
    """Return the description of a metric with its unit.

    Example:
        >>> label("best"), label("bytes_to_82.5")
        ('best test accuracy (%)', 'sent to reach 82.5 % (MB)')
    """
    base, _, target = metric.partition("_to_")
    unit = f" ({UNITS[base]})" if base in UNITS else ""
    return WORDS[base] + (f" to reach {target} %" if target else "") + unit


def base(metric: str) -> str:
    """Return a metric without its target: `bytes` for `bytes_to_82.5`."""
    return metric.partition("_to_")[0]


def _finite(value: Any) -> float | None:
    """Return a number, or None for null, NaN and Inf."""
    return float(value) if value is not None and math.isfinite(value) else None
