"""Runs side by side: each is made or taken up again in its directory, packed as a result, and stored."""

from __future__ import annotations

import json
import math
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config.config import Config
from ..errors import UserError
from ..experiments import pool
from ..experiments.batch import ProgressObserver, cost_of, make_run
from ..report.run_files import RunFiles
from ..runs.directory import RunDir
from ..server.observers import Observer
from .recipes import RESULTS_VERSION
from .store import Store
from .table import Result

if TYPE_CHECKING:
    from ..client.evaluate import Score
    from ..data.federated import Federated
    from ..record import Record
    from ..server.simulation import Simulation

ROUNDS = ("round", "test_accuracy", "test_loss", "train_loss", "drift", "bytes", "grad_evals", "seconds")
"""What a result keeps of every evaluated round; costs are what was spent by then."""


SERVER_LOSS = "server_loss.jsonl"


@dataclass(frozen=True)
class Run:
    """A run to make: its key, what to call it, its config, and what to measure on its final model."""

    key: str
    label: str
    config: Config
    measure: tuple[str, ...] = ()

    @property
    def cost(self) -> float:
        """About how much work it is."""
        return cost_of(self.config)


def make(
    runs: list[Run],
    store: Store,
    jobs: int,
    on_part: Callable[[Run, float, str], None],
    on_done: Callable[[Run], None],
) -> list[Run]:
    """Make runs, `jobs` at a time in processes of their own; a run that was stopped continues from its checkpoint.

    Returns those that another command is making, which are left to it.

    Args:
        on_part: called with the run, how much of it is done, and how it goes in words.
        on_done: called with every run that is finished, and stored by then.
    """
    others: list[Run] = []

    def told(run: Run, progress: tuple[float, str]) -> None:
        on_part(run, *progress)

    def keep(run: Run, result: Result | None) -> None:
        if result is None:
            others.append(run)
        else:
            store.learn(result)
            on_done(run)

    def stop(run: Run, told: str) -> None:
        raise UserError(f"{run.label}: {told}")

    work = partial(_work, store.out, store.read_at)
    pool.run_tasks(runs, work, jobs, on_report=told, on_done=keep, on_failed=stop)
    return others


def _work(out: Path, since: float, run: Run, tell: pool.Report) -> Result | None:
    """The result, stored; None if another command is making it."""
    store = Store(out)
    with store.claim(run.key) as ours:
        if not ours:
            return None
        found = store.later(run.key, since)
        if found is None or not all(name in found["measures"] for name in run.measure):
            found = make_result(run, store.work / run.key, ProgressObserver(run.config.rounds, tell))
            store.put(found)
    return found


def make_result(run: Run, place: Path, observer: Observer) -> Result:
    """Make or continue one run in its directory, and pack the outcome; of one that diverged, too."""
    from ..client.trees import one_thread

    began = time.monotonic()
    observers = [observer, *([_ServerLoss(run.config)] if "server_loss" in run.measure else [])]
    commit()  # as it is now, not when the run is done
    make_run(run.config, place, observers)
    with one_thread():  # the same bits however many run side by side
        result = pack(run, place)
    rounds = result["summary"]["seconds"] + result["summary"]["eval_seconds"]  # also of those before a break
    return result | {"wall_seconds": round(max(time.monotonic() - began, rounds), 2)}


def pack(run: Run, place: Path) -> Result:
    """A finished run directory as one result: config, summary, evaluated rounds, and scores of the final model."""
    from ..client.evaluate import evaluate
    from ..runs.inspect import inspect_run
    from ..runs.launch import prepare
    from ..runs.model_file import load_vector

    files = RunFiles.read(place)
    options = {name: value for name, value in run.config.data.options.items() if name != "test_size"}
    whole = replace(run.config, data=replace(run.config.data, options=options), backend="serial", workers=1)
    with prepare(whole) as simulation:
        work = simulation.work
        x = load_vector(work.flat, RunDir(place).model_file)
        test = evaluate(work.flat, x, work.data, work.loss)
        train = evaluate(work.flat, x, _clients_data(work.data), work.loss)
    measures: dict[str, float] = {}
    if "sharpness" in run.measure:
        seen = inspect_run(place)
        measures = {"sharpness": seen.eigenvalue, "sam_gap": seen.sam_gap, "divergence": seen.divergence}
    rounds = _rounds(files.rounds)
    if "server_loss" in run.measure:
        known = _server_losses(place)
        rounds["server_loss"] = [known.get(t) for t in rounds["round"]]
        measures["server_loss"] = len(known)
    return {
        "key": run.key,
        "results_version": RESULTS_VERSION,
        "commit": commit(),
        "config": run.config.to_dict(),
        "seed": run.config.seed,
        "status": files.summary["status"],
        "summary": files.summary,
        "final": {
            **_finite("", test),
            **_finite("train_", train),
            "test_pictures": 0 if work.data.y_test is None else len(work.data.y_test),
        },
        "measures": measures,
        "rounds": rounds,
        "seconds_per_round": statistics.median(r["seconds"] for r in files.rounds) if files.rounds else None,
    }


class _ServerLoss(Observer):
    """Writes the loss of the server's model on all clients' data at the evaluated rounds, about 50 of a long run."""

    def __init__(self, config: Config) -> None:
        self.every = config.eval_every
        self.step = max(self.every, math.ceil(config.rounds / 50))

    def round(self, record: Record, run: Simulation) -> None:
        from ..client.evaluate import evaluate
        from ..client.trees import one_thread

        if record.test_accuracy is None or not (record.round % self.step < self.every or run.t >= run.plan.rounds):
            return
        with one_thread():  # the same bits however many run side by side
            loss = evaluate(run.work.flat, run.x, _clients_data(run.work.data), run.work.loss).loss
        with (Path(run.out or ".") / SERVER_LOSS).open("a", encoding="utf-8") as file:
            file.write("\n" + json.dumps([record.round, loss if math.isfinite(loss) else None]))


def _server_losses(place: Path) -> dict[int, float | None]:
    """Round -> loss; a round that was made again after a kill counts once, a line that a kill cut off not at all."""
    path = place / SERVER_LOSS
    lines = path.read_text("utf-8").split("\n") if path.exists() else []
    return dict(json.loads(line) for line in lines if line.endswith("]"))


def _clients_data(data: Federated) -> Federated:
    """What all clients own, in the place of the test set."""
    own = sorted(set(data.indices.tolist()))
    return replace(data, x_test=data.x[own], y_test=data.y[own])


def _finite(prefix: str, score: Score) -> dict[str, float | None]:
    """A score as JSON takes it."""
    return {prefix + name: value if math.isfinite(value) else None for name, value in score._asdict().items()}


def _rounds(rounds: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """The evaluated rounds, with what they had cost by then."""
    found: dict[str, list[Any]] = {name: [] for name in ROUNDS}
    metrics: list[dict[str, Any]] = []
    spent = {"bytes": 0, "grad_evals": 0.0, "seconds": 0.0}
    for r in rounds:
        spent["bytes"] += r["bytes_down"] + r["bytes_up"]
        spent["grad_evals"] += r["grad_evals"]
        spent["seconds"] += r["seconds"]
        if r["test_accuracy"] is not None:
            for name, values in found.items():
                values.append(round(spent[name], 3) if name in spent else r[name])
            if r.get("metrics"):
                metrics.append({"round": r["round"], **r["metrics"]})
    return found | ({"metrics": metrics} if metrics else {})


@cache
def commit(package: Path = Path(__file__).parents[1]) -> str:
    """The commit of the checkout that the package is in, `-dirty` if the package was changed; "" if it is in none."""
    if not (package.parent / ".git").exists():
        return ""

    def git(*words: str) -> str:
        command = ["git", "--no-optional-locks", "-C", str(package.parent), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--", package.name)
        return git("rev-parse", "--short=12", "HEAD") + ("-dirty" if changed else "")
    except (OSError, subprocess.CalledProcessError):  # no git, or no commit yet
        return ""


def apart(stored: Result, now: Result) -> float:
    """How far a run that was made again is from the stored one: its numbers' largest difference, relative to them.

    0 if they are the same, times aside; it may have measured more. inf if it ended otherwise, or lacks numbers.
    """
    rounds = [name for name in stored["rounds"] if name != "seconds"]
    if stored["status"] != now["status"] or not {*rounds} <= now["rounds"].keys():
        return math.inf
    pairs = [(value, now["final"].get(name)) for name, value in stored["final"].items()]
    for name in rounds:
        if len(stored["rounds"][name]) != len(now["rounds"][name]):
            return math.inf
        pairs += zip(stored["rounds"][name], now["rounds"][name], strict=True)
    return max((_apart(a, b) for a, b in pairs if a != b), default=0.0)


def _apart(a: Any, b: Any) -> float:
    numbers = all(isinstance(x, int | float) and math.isfinite(x) for x in (a, b))
    return abs(a - b) / (abs(a) or abs(b)) if numbers else math.inf
