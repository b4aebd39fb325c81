"""The summary of a run: its accuracies, totals and digests, and whether the run has rounds left."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..backends import mixture
from ..config.config import Config
from ..config.lr_schedule import shown
from ..config.spec import BIASED, is_biased, setting_text
from ..config.stopping import Stopping, rules
from ..errors import UserError
from ..record import CLIENT_SCORES, Record, cost_to, rounds_digest
from ..utils.processes import environment
from .diagnosis import diagnose
from .directory import RunDir

if TYPE_CHECKING:
    from ..config.plan import Plan
    from ..server.simulation import Simulation

SUMS = ("bytes_down", "bytes_up", "grad_evals", "seconds", "eval_seconds")


def digests(out: Path, records: list[Record]) -> dict[str, str | None]:
    """Return the digests of model, rounds (without times) and client scores, if any: equal for equal runs."""
    run = RunDir(out)
    found = {"model": run.model_digest(), "rounds": rounds_digest(records)}
    try:
        measured = run.client_metrics()
    except UserError:
        return {**found, "client_metrics": None}
    if measured is not None:
        found["client_metrics"] = measured.some(measured.rounds <= len(records)).digest()
    return found


def summarise(config: Config, simulation: Simulation, records: list[Record], status: str) -> dict[str, Any]:
    """Return the outcome of a run: accuracies, totals, cost to the targets, and the environment."""
    chosen_on = "test" if simulation.data.validation is None else "validation"
    best = best_record(records, chosen_on)
    accuracies = [r.test_accuracy for r in records if r.test_accuracy is not None]
    last5 = accuracies[-5:]
    plain = [record.to_dict() for record in records]
    virtual = {"virtual_seconds": plain[-1].get("virtual_seconds", 0.0) if plain else 0.0}
    due = [r for r in records if r.round % config.eval_every == 0 or r.round == config.rounds]
    ills = {one.title: one.since for one in diagnose(records)}
    stopping = Stopping(config)
    fired = stopping.restart_from(records) if status.startswith("stopped: ") or config.max_time else None
    return {
        "status": status,
        **({"stopped": fired.told} if fired and status.startswith("stopped: ") else {}),
        "rounds": len(records),
        "last_accuracy": accuracies[-1] if accuracies else None,
        "best_accuracy": best and best.test_accuracy,
        "best_round": best and best.round,
        "chosen_on": chosen_on,
        "mean_last5_accuracy": math.fsum(last5) / len(last5) if last5 else None,
        "last_test_loss": due[-1].to_dict()["test_loss"] if due else None,  # None if not finite, also when read back
        "last_train_loss": plain[-1]["train_loss"] if plain else None,
        "targets": {str(target): cost_to(plain, target) for target in config.targets},
        **{key: sum(getattr(r, key) for r in records) for key in SUMS},
        **(virtual if config.network else {}),
        **({"wall_seconds": stopping.used} if config.max_time else {}),
        "seed": config.seed,
        **({"lr_schedule": shown(config.lr_schedule)} if config.lr_schedule else {}),
        **{key: text for key in ("warmup", "follow_lr") if (text := getattr(config, key))},
        **({"metrics": plain[-1]["metrics"]} if plain and plain[-1].get("metrics") else {}),
        **next((found for r in reversed(plain) if (found := {k: r[k] for k in CLIENT_SCORES if k in r})), {}),
        "settings": simulation.data_settings,
        **({"cohort": f"{setting_text(config.cohort)}: {BIASED}"} if is_biased(config.cohort) else {}),
        "parameters": simulation.work.flat.d,
        "data_fingerprint": simulation.data.fingerprint,
        "split_fingerprint": simulation.data.split_fingerprint,
        "environment": environment(simulation.work.flat.device) | mixture(simulation.backend),
    } | ({"illnesses": ills} if ills else {})


def best_record(records: list[Record], chosen_on: str) -> Record | None:
    """Return the first round with the highest accuracy on the `test` or `validation` set; without accuracies, the one
    with the lowest finite loss."""
    right, wrong = f"{chosen_on}_accuracy", f"{chosen_on}_loss"
    scored = [r for r in records if getattr(r, right) is not None]
    if scored:
        return max(scored, key=lambda r: getattr(r, right))
    finite = [r for r in records if getattr(r, wrong) is not None and math.isfinite(getattr(r, wrong))]
    return min(finite, key=lambda r: getattr(r, wrong), default=None)


def final_summary(run: RunDir, plan: Plan) -> dict[str, Any] | None:
    """Return the summary of a run without rounds left: finished, or stopped by a rule that the plan still has."""
    done, summary = run.finished(plan.rounds), run.summary()
    stopped = summary.get("stopped")
    if done is not None or not isinstance(stopped, dict) or not str(summary.get("status")).startswith("stopped: "):
        return done
    return summary if (stopped.get("by"), stopped.get("rule")) in list(rules(plan).items()) else None
