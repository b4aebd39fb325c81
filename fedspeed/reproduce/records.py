"""A finished run as one record: made or resumed in its directory, packed, compared."""

from __future__ import annotations

import math
import statistics
import subprocess
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config import Config
from ..errors import Diverged
from ..report.runs import RunFiles
from .recipes import RESULTS_VERSION, Tables

if TYPE_CHECKING:
    from ..evaluate import Score
    from ..observe import Observer


@dataclass(frozen=True)
class Order:
    """A run to make: its key, what to call it, its config, and what to measure on its final model."""

    key: str
    label: str
    config: Config
    measure: tuple[str, ...] = ()

    @property
    def cost(self) -> float:
        """About how much work it is, in minibatch passes: an ascent step doubles a step."""
        config, method = self.config, self.config.method
        ascent = getattr(method, "ascent_fraction", 1.0) if getattr(method, "rho", 0.0) else 0.0
        train = config.data.options.get("train_size", 50_000) / config.clients
        steps = config.local_steps or config.local_epochs * train / config.batch_size
        return config.rounds * config.active * steps * (1 + ascent)


def carry_out(order: Order, place: Path, observer: Observer) -> Tables:
    """Run, or go on with, one order in its directory, and pack what came of it."""
    from ..run import resume, run_config
    from ..vec import one_thread

    began = time.monotonic()
    try:
        if (place / "config.toml").exists():
            resume(place, observers=[observer])
        else:
            run_config(order.config, place, observers=[observer])
    except Diverged:
        pass  # the summary says so, and the record with it
    with one_thread():  # the same bits however many run side by side
        record = pack(order, place)
    return record | {"wall_seconds": round(time.monotonic() - began, 2)}


def pack(order: Order, place: Path) -> Tables:
    """A finished run directory as one record: config, summary, evaluated rounds, and scores of the final model."""
    from ..evaluate import evaluate
    from ..inspection import inspect_run
    from ..modelfile import load_vector
    from ..run import prepare

    run = RunFiles.read(place)
    options = {name: value for name, value in order.config.data.options.items() if name != "test_size"}
    whole = replace(order.config, data=replace(order.config.data, options=options), backend="serial", workers=1)
    with prepare(whole) as simulation:
        work = simulation.work
        x = load_vector(work.flat, place / "model.safetensors")
        test = evaluate(work.flat, x, work.data, work.loss)
        own = sorted(set(work.data.indices.tolist()))
        train = evaluate(work.flat, x, replace(work.data, x_test=work.data.x[own], y_test=work.data.y[own]), work.loss)
    measures: dict[str, float] = {}
    if "sharpness" in order.measure:
        seen = inspect_run(place)
        measures = {"sharpness": seen.eigenvalue, "sam_gap": seen.sam_gap, "divergence": seen.divergence}
    return {
        "key": order.key,
        "results_version": RESULTS_VERSION,
        "commit": commit(),
        "config": order.config.to_dict(),
        "seed": order.config.seed,
        "status": run.summary["status"],
        "summary": run.summary,
        "final": {
            **_finite("", test),
            **_finite("train_", train),
            "test_pictures": 0 if work.data.y_test is None else len(work.data.y_test),
        },
        "measures": measures,
        "rounds": _rounds(run.rounds),
        "seconds_per_round": statistics.median(r["seconds"] for r in run.rounds) if run.rounds else None,
    }


def _finite(prefix: str, score: Score) -> dict[str, float | None]:
    """A score as JSON takes it."""
    return {prefix + name: value if math.isfinite(value) else None for name, value in score._asdict().items()}


def _rounds(rounds: list[Tables]) -> dict[str, list[Any]]:
    """The evaluated rounds, with what they had cost by then."""
    found: dict[str, list[Any]] = {name: [] for name in ("round", "test_accuracy", "test_loss", "train_loss", "drift",
                                                         "bytes", "grad_evals", "seconds")}  # fmt: skip
    spent = {"bytes": 0, "grad_evals": 0.0, "seconds": 0.0}
    for r in rounds:
        spent["bytes"] += r["bytes_down"] + r["bytes_up"]
        spent["grad_evals"] += r["grad_evals"]
        spent["seconds"] += r["seconds"]
        if r["test_accuracy"] is not None:
            for name, values in found.items():
                values.append(round(spent[name], 3) if name in spent else r[name])
            if r.get("metrics"):
                found.setdefault("metrics", []).append({"round": r["round"], **r["metrics"]})
    return found


def commit() -> str:
    """The commit of the checkout this runs from; nothing for an installed package."""
    here = Path(__file__).parent.parent
    if not (here / ".git").exists():
        return ""
    told = subprocess.run(["git", "-C", str(here), "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return told.stdout.strip()


def same(a: Tables, b: Tables) -> bool:
    """Whether two records hold the same numbers: rounds and final scores, but for times."""

    def numbers(record: Tables) -> Any:
        rounds = {name: values for name, values in record["rounds"].items() if name != "seconds"}
        return record["final"], rounds, record["status"]

    return bool(numbers(a) == numbers(b))
