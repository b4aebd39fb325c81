"""Runs in parallel: each is made or resumed in its directory, packed as a result, and stored."""

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
"""The numbers that a result keeps of every evaluated round; costs are totals up to the round."""
SERVER_LOSS = "server_loss.jsonl"


@dataclass(frozen=True)
class Run:
    """A run to make: its key, label, config, and the measures of its final model."""

    key: str
    label: str
    config: Config
    measure: tuple[str, ...] = ()

    @property
    def cost(self) -> float:
        """The estimated work of the run."""
        return cost_of(self.config)


def make(
    runs: list[Run],
    store: Store,
    jobs: int,
    on_part: Callable[[Run, float, str], None],
    on_done: Callable[[Run], None],
) -> list[Run]:
    """Make runs, `jobs` at a time in processes of their own; an interrupted run continues from its checkpoint.

    Return the runs that another command is making.

    Args:
        on_part: called with the run, the share of it that is done, and its last score in words.
        on_done: called with every run that is finished and stored.
    """
    others: list[Run] = []

    def report(run: Run, progress: tuple[float, str]) -> None:
        on_part(run, *progress)

    def keep(run: Run, result: Result | None) -> None:
        if result is None:
            others.append(run)
        else:
            store.learn(result)
            on_done(run)

    def stop(run: Run, error: str) -> None:
        raise UserError(f"{run.label}: {error}")

    work = partial(_work, store.out, store.read_at)
    pool.run_tasks(runs, work, jobs, on_report=report, on_done=keep, on_failed=stop)
    return others


def _work(out: Path, since: float, run: Run, tell: pool.Report) -> Result | None:
    """Make and store a result; return None if another command is making it."""
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
    """Make or resume one run in its directory, and return its result, also if it diverged."""
    from ..client.trees import one_thread

    began = time.monotonic()
    observers = [observer, *([_ServerLoss(run.config)] if "server_loss" in run.measure else [])]
    commit()  # cached here: the commit at the start of the run, not at its end
    make_run(run.config, place, observers)
    with one_thread():  # One thread fixes the bits, however many runs are made in parallel.
        result = pack(run, place)
    rounds = (
        result["summary"]["seconds"] + result["summary"]["eval_seconds"]
    )  # includes the rounds before an interruption
    return result | {"wall_seconds": round(max(time.monotonic() - began, rounds), 2)}


def pack(run: Run, place: Path) -> Result:
    """Return a finished run directory as a result: config, summary, evaluated rounds, scores of the final model."""
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
    """An observer that writes the server model's loss on all clients' data at about 50 evaluated rounds."""

    def __init__(self, config: Config) -> None:
        self.every = config.eval_every
        self.step = max(self.every, math.ceil(config.rounds / 50))

    def round(self, record: Record, run: Simulation) -> None:
        from ..client.evaluate import evaluate
        from ..client.trees import one_thread

        if record.test_accuracy is None or not (record.round % self.step < self.every or run.t >= run.plan.rounds):
            return
        with one_thread():  # One thread fixes the bits, however many runs are made in parallel.
            loss = evaluate(run.work.flat, run.x, _clients_data(run.work.data), run.work.loss).loss
        with (Path(run.out or ".") / SERVER_LOSS).open("a", encoding="utf-8") as file:
            file.write("\n" + json.dumps([record.round, loss if math.isfinite(loss) else None]))


def _server_losses(place: Path) -> dict[int, float | None]:
    """Return round -> loss; a round that was repeated after a kill counts once, an incomplete line is ignored."""
    path = place / SERVER_LOSS
    lines = path.read_text("utf-8").split("\n") if path.exists() else []
    return dict(json.loads(line) for line in lines if line.endswith("]"))


def _clients_data(data: Federated) -> Federated:
    """Return a federation with the data of all clients as its test set."""
    own = sorted(set(data.indices.tolist()))
    return replace(data, x_test=data.x[own], y_test=data.y[own])


def _finite(prefix: str, score: Score) -> dict[str, float | None]:
    """Return a score as JSON values."""
    return {prefix + name: value if math.isfinite(value) else None for name, value in score._asdict().items()}


def _rounds(rounds: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """Return the numbers `ROUNDS` of the evaluated rounds, and their metrics if there are any."""
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
    """Return the commit of the package's checkout, with `-dirty` if the package was changed; "" without a checkout."""
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
    """Return the largest relative difference between the numbers of a stored run and of its repetition.

    0 if they are equal, times excepted; the repetition may have more measures. Infinite if it lacks numbers or has
    another status.
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
