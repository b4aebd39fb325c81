"""The summary of a run: what it must hold to stand for a finished one, and whether anything is left to do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .stopping import rules

if TYPE_CHECKING:
    from .plan import Plan
    from .rundir import RunDir

REPORTED = ("last_accuracy", "best_accuracy", "mean_last5_accuracy", "rounds", "bytes_down", "bytes_up", "grad_evals",
            "seconds", "eval_seconds", "data_fingerprint", "split_fingerprint")  # fmt: skip


def is_whole(summary: dict[str, Any]) -> bool:
    """Whether it has all that it must, each of its kind, and all of the accuracies or none."""
    whole = all(key in summary and _fits(key, summary[key]) for key in REPORTED)
    return whole and len({summary[key] is None for key in REPORTED if key.endswith("accuracy")}) == 1


def _fits(key: str, value: Any) -> bool:
    """Whether a summary's value is of its kind: text, a share or nothing, or a finite number >= 0."""
    if key.endswith("fingerprint"):
        return isinstance(value, str)
    if value is None or type(value) not in (int, float):
        return value is None and key.endswith("accuracy")
    return bool(0 <= value <= (1 if key.endswith("accuracy") else 1e300))


def over(run: RunDir, plan: Plan) -> dict[str, Any] | None:
    """The summary of a run that has nothing left to do: finished, or stopped by a rule that the plan still has."""
    done, summary = run.finished(plan.rounds), run.summary()
    told = summary.get("stopped")
    if done is not None or not isinstance(told, dict) or not str(summary.get("status")).startswith("stopped: "):
        return done
    return summary if (told.get("by"), told.get("rule")) in list(rules(plan).items()) else None
