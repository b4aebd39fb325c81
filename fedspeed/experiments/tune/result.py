"""The result of tuning: chosen points, all trials with their cost, and the judged runs."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...report.comparison import Comparison
from ...report.export import need
from ...report.run_files import Row, measured
from ...report.statistics import METRICS, interval
from ...report.tables import csv_text
from ...utils.files import write
from ..grid import Pairs, point_text
from .strategies import mean_score
from .tuner import Tuning

SHARES = (0.25, 0.5, 0.75, 1.0)
"""Shares of the budget at which the best method is reported."""


@dataclass(frozen=True)
class Tuned:
    """The outcome of `fedspeed.tune`.

    Args:
        out: the folder of all results: `tune.json`, `trials.csv`, `budget.png`, the runs.
        used: the settings: strategy, budget, held-out data, seeds, spaces.
        chosen: method -> its chosen point, the tuned fields only.
        scores: method -> held-out score of its chosen point.
        spent: method -> gradients of its trials, counted from their records.
        rows: all trials in order, as dicts; `trials` is the same as a frame.
        judged: per method the mean over fresh seeds with a 95% interval, on the test set.
        comparison: the judged runs as in `fedspeed compare`; None if none was made.
        failed: label of a judged run -> the reason of its failure.
    """

    out: Path
    used: dict[str, Any]
    chosen: dict[str, dict[str, Any]]
    scores: dict[str, float]
    spent: dict[str, float]
    rows: list[dict[str, Any]]
    judged: list[dict[str, Any]]
    comparison: Comparison | None = field(repr=False, default=None)
    failed: dict[str, str] = field(default_factory=dict)

    @property
    def trials(self) -> Any:
        """All trials as a pandas frame."""
        return need("pandas").DataFrame(self.rows)

    @property
    def best_so_far(self) -> dict[str, list[tuple[float, float]]]:
        """Method -> list of (gradients spent, held-out score of the best point so far)."""
        found: dict[str, list[tuple[float, float]]] = {label: [] for label in self.chosen}
        scores: dict[tuple[str, str, int], list[float]] = {}
        for row in self.rows:
            if row["seed"] not in self.used["tuning_seeds"] or row["score"] is None:
                continue
            curve, seeds = found[row["method"]], scores.setdefault((row["method"], row["point"], row["rounds"]), [])
            seeds.append(row["score"])
            score = statistics.fmean(seeds)
            if len(seeds) == len(self.used["tuning_seeds"]) and (not curve or score > curve[-1][1]):
                curve.append((row["spent"], score))
        return found

    @property
    def even(self) -> bool:
        """Whether every method has spent the budget up to less than the price of one point."""
        return all(self.used["budget"] - spent < self.used["one_point"][label] for label, spent in self.spent.items())

    def leaders(self) -> list[tuple[float, str, float]]:
        """Return a list of (share of the budget, best method by then, its held-out score)."""
        found = []
        points = [(x, label, y) for label, curve in self.best_so_far.items() for x, y in curve]
        for share in SHARES:
            known = [(label, y) for x, label, y in points if x <= share * self.used["budget"]]
            if known:
                found.append((share, *max(known, key=lambda one: one[1])))
        return found

    def data(self) -> dict[str, Any]:
        """Return the content of `tune.json`."""
        leaders = [{"share": share, "method": label, "score": score} for share, label, score in self.leaders()]
        return {
            "used": self.used,
            "chosen": self.chosen,
            "held_out_scores": self.scores,
            "spent": self.spent,
            "best_at": leaders,
            "judged": self.judged,
            "failed": self.failed,
        }

    def write(self) -> None:
        """Write the files beside the runs."""
        self.out.mkdir(parents=True, exist_ok=True)
        write(self.out / "tune.json", json.dumps(self.data(), indent=1) + "\n")
        write(self.out / "trials.csv", csv_text(self.rows))
        draw(self, self.out / "budget")
        if self.comparison is not None:
            self.comparison.write(self.out / "judged")


def result(
    tuning: Tuning,
    chosen: Mapping[str, Pairs],
    runs: Mapping[str, Sequence[Any]],
    failed: Mapping[str, str],
    baseline: str = "",
) -> Tuned:
    """Collect the result of all runs."""
    rows = trial_rows(tuning)
    made = [Row(label, list(found)) for label, found in runs.items() if found]
    comparison = Comparison(made, (), baseline if baseline in [row.label for row in made] else "") if made else None
    return Tuned(
        out=tuning.out,
        used=used(tuning),
        chosen={label: dict(point) for label, point in chosen.items()},
        scores={label: _score(tuning, label, point) for label, point in chosen.items()},
        spent={label: sum(row["gradients"] for row in rows if row["method"] == label) for label in tuning.methods},
        rows=rows,
        judged=[_judged(row, measured(made)) for row in made],
        comparison=comparison,
        failed=dict(failed),
    )


def used(tuning: Tuning) -> dict[str, Any]:
    """Return the settings of a search, for `tune.json` and `--dry-run --json`."""
    further = {seed for known in tuning.known.values() for _, seed, _ in known} - set(tuning.tune_seeds)
    return {
        "strategy": tuning.strategy,
        "budget": tuning.budget,
        "unit": "gradients of minibatches per method, counted from the records of its trials (grad_evals)",
        "rounds": tuning.rounds,
        "held_out": tuning.held_out,
        "score": "mean held-out accuracy (minus the loss without accuracies) of the last 5 evaluated rounds",
        "tuning_seeds": list(tuning.tune_seeds),
        "further_seeds_of_leaders": sorted(further),
        "judging_seeds": list(tuning.seeds),
        "test_set": "read by the judged runs only",
        "spaces": {label: {n: str(axis) for n, axis in space.items()} for label, space in tuning.spaces.items()},
        "one_point": {label: tuning.price(label) for label in tuning.methods},
    }


def trial_rows(tuning: Tuning) -> list[dict[str, Any]]:
    """Return a row per trial with the gradients it added; a run that halving continued has a row per rung."""
    found: list[dict[str, Any]] = []
    for label, known in tuning.known.items():
        before: dict[tuple[Pairs, int], float] = {}
        spent = 0.0
        for trial, result in known.items():
            added = result.gradients - before.get((trial.point, trial.seed), 0.0)
            before[trial.point, trial.seed] = result.gradients
            spent += added
            row = {"method": label, "point": point_text(trial.point), **dict(trial.point)}
            row |= {"seed": trial.seed, "rounds": trial.rounds, "score": result.score, "gradients": added}
            run = tuning.folder(label, trial.point, trial.seed).relative_to(tuning.out).as_posix()
            found.append({**row, "spent": spent, "run": run})
    return found


def _score(tuning: Tuning, label: str, point: Pairs) -> float:
    """Return the mean held-out score of a point over all seeds that it was tried with."""
    known = tuning.known[label]
    return mean_score(known, [trial for trial in known if (trial.point, trial.rounds) == (point, tuning.rounds)])


def _judged(row: Row, key: str) -> dict[str, Any]:
    metric = METRICS[key][0]
    values = row.values(metric)
    low, high = interval(values)
    return {
        "method": row.label,
        "metric": metric,
        "mean": statistics.fmean(values) if values else None,
        "low": low if len(values) > 1 else None,
        "high": high if len(values) > 1 else None,
        "seeds": [run.summary["seed"] for run in row.runs],
        "diverged": row.diverged,
        "gradients": sum(row.values("grad_evals")),
    }


def draw(tuned: Tuned, stem: Path) -> list[Path]:
    """Write the figure "best method at budget B" beside the judged scores, as `stem`.png, .svg and .pdf.

    The files have the same bytes every time.
    """
    from ...report.figures import MARKERS, new_figure, save, style

    figure, first = new_figure(9.4, 4.0)
    first.remove()
    left, right = figure.subplots(1, 2, width_ratios=(1.7, 1))
    curves = tuned.best_so_far
    scale = 100 if all(y >= 0 for curve in curves.values() for _, y in curve) else 1
    unit = "accuracy (%)" if scale == 100 else "score (minus the loss)"
    for i, (label, curve) in enumerate(curves.items()):
        points = [*curve, (tuned.spent[label], curve[-1][1])] if curve else []
        line = {**style(i), "marker": MARKERS[i % len(MARKERS)], "markersize": 4.5, "linewidth": 1.6}
        left.step([x for x, _ in points], [scale * y for _, y in points], where="post", label=label, **line)
    left.set(xlabel="gradients spent on tuning", ylabel=f"held-out {unit}, best point so far")
    left.set_title("best method at budget B", fontsize=10)
    left.set_xlim(0, 1.02 * tuned.used["budget"])
    _draw_judged(right, tuned)
    for panel in (left, right):
        panel.grid(alpha=0.3)
    handles, names = left.get_legend_handles_labels()
    figure.legend(handles, names, frameon=False, handlelength=3.0, fontsize=8, loc="outside lower center", ncols=4)
    return save(figure, stem, ("png", "svg", "pdf"))


def _draw_judged(panel: Any, tuned: Tuned) -> None:
    from ...report.figures import MARKERS, style

    places = {label: i for i, label in enumerate(tuned.chosen)}
    losses = any(one["metric"] == "last_test_loss" for one in tuned.judged)
    scale = 1 if losses else 100
    for one in tuned.judged:
        if one["mean"] is None:
            continue
        i = places[one["method"]]
        mean = scale * one["mean"]
        ends = None if one["low"] is None else [[mean - scale * one["low"]], [scale * one["high"] - mean]]
        panel.errorbar([i], [mean], yerr=ends, fmt=MARKERS[i % len(MARKERS)], color=style(i)["color"], capsize=4)
    panel.set_xticks(range(len(places)), list(places), rotation=20 if len(places) > 2 else 0, fontsize=8)
    panel.set_xlim(-0.6, len(places) - 0.4)
    panel.set_ylabel("test loss" if losses else "test accuracy (%), mean of the last five")
    panel.set_title(f"judged on {len(tuned.used['judging_seeds'])} fresh seeds, 95% interval", fontsize=10)
