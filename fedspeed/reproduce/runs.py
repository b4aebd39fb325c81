"""Runs of a reproduction: made or resumed side by side, packed as results, and stored.

Finished runs are files: one file of packed results, and one file per new result beside it. Cells that need no training
are counts of data sets (Table 3) and of splits (Figure 3).
"""

from __future__ import annotations

import gzip
import json
import math
import shutil
import statistics
import subprocess
import time
import zlib
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..config.config import Config
from ..errors import UserError
from ..experiments import pool
from ..experiments.batch import ProgressObserver, cost_of, make_run
from ..report.run_files import RunFiles
from ..runs.directory import RunDir
from ..server.observers import Observer
from ..utils.files import locked_beside, read_bytes, write
from .recipes import RESULTS_VERSION
from .table import Cell, Result

if TYPE_CHECKING:
    from ..client.evaluate import Score
    from ..data.federated import Federated
    from ..record import Record
    from ..server.simulation import Simulation


class Store:
    """The results of a folder by key.

    `OUT/runs.jsonl.gz` has one line per result, sorted by key. A new result is `OUT/runs/KEY.json` until `pack` moves
    it into that file. Unfinished runs are in `OUT/work/KEY`, each claimed by one process. Processes may share a folder.
    """

    def __init__(self, out: Path) -> None:
        self.out = out
        self.work = out / "work"
        self.packed = out / "runs.jsonl.gz"
        self._known: dict[str, Result] | None = None
        self.read_at = 0.0  # the time at which `_known` was read

    def results(self) -> dict[str, Result]:
        """Return all results by key."""
        if self._known is None:
            self._known = self._read()
        return self._known

    def get(self, key: str, measure: Iterable[str] = ()) -> Result | None:
        """Return a finished run that has these measures, or None."""
        found = self.results().get(key)
        return found if found is not None and all(name in found["measures"] for name in measure) else None

    def put(self, result: Result, keep: bool = False) -> None:
        """Store a finished run, and remove its run directory.

        The result is durable (fsync) before the directory is removed, so a crash loses neither.

        Args:
            keep: leave the run directory, because another run continues it.
        """
        with self.alone():
            (self.out / "runs").mkdir(parents=True, exist_ok=True)
            write(self._file(result["key"]), _line(result), durable=True)
        self.learn(result)
        if not keep:
            shutil.rmtree(self.work / result["key"], ignore_errors=True)
            (self.work / f".{result['key']}.lock").unlink(missing_ok=True)

    def hand_over(self, key: str, to: str) -> None:
        """Make the run directory of a finished run that of the run which continues it; both are claimed."""
        with suppress(FileNotFoundError):  # The result came from another folder: no directory was kept.
            (self.work / key).rename(self.work / to)
        (self.work / f".{key}.lock").unlink(missing_ok=True)

    def learn(self, result: Result) -> None:
        """Remember a result that another process has stored."""
        if self._known is not None:
            self._known[result["key"]] = result

    def later(self, key: str, since: float) -> Result | None:
        """Return a finished run that was stored or packed after a time, or None."""
        with suppress(FileNotFoundError):
            return _parse(self._file(key), read_bytes(self._file(key))).get(key)
        with suppress(FileNotFoundError):
            if self.packed.stat().st_mtime > since - 1:  # the time of a file may lag behind the clock
                return _parse(self.packed, read_bytes(self.packed)).get(key)
        return None

    def claim(self, key: str) -> AbstractContextManager[bool]:
        """Claim a run inside the `with`; yield False while another process makes it (where locks exist)."""
        return locked_beside(self.work / key, tries=1)

    def pack(self) -> None:
        """Move the new results into the packed file; the same results give the same bytes."""
        if not self._new():  # without results, do not create the folder of the lock
            return
        with self.alone():
            new = self._new()
            if not new:
                return
            self._known = self._read()
            lines = "".join(map(_line, self._known.values()))
            write(self.packed, gzip.compress(lines.encode(), mtime=0), durable=True)
            for path in new:  # only after the packed file is durable (fsync before unlink)
                path.unlink()
            with suppress(OSError):  # the user's own files are in it
                (self.out / "runs").rmdir()

    def _read(self) -> dict[str, Result]:
        """Read new results first: one that is packed meanwhile is then found in the packed file."""
        self.read_at = time.time()
        new: dict[str, Result] = {}
        for path in self._new():
            with suppress(FileNotFoundError):
                new |= _parse(path, read_bytes(path))
        with suppress(FileNotFoundError):
            new = _parse(self.packed, read_bytes(self.packed)) | new
        return dict(sorted(new.items()))

    def _file(self, key: str) -> Path:
        return self.out / "runs" / f"{key}.json"

    def _new(self) -> list[Path]:
        try:
            return sorted((self.out / "runs").glob("*.json"))
        except FileNotFoundError:  # another process packed the results and removed the folder meanwhile
            return []

    def alone(self) -> AbstractContextManager[bool]:
        """Lock the folder, so that results are stored and packed, and pages written, by one process at a time."""
        return locked_beside(self.work / "runs")


def _line(result: Result) -> str:
    return json.dumps(result) + "\n"


def _parse(path: Path, data: bytes) -> dict[str, Result]:
    """Parse the results of a file, compressed or not, by key."""
    try:
        text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode()
        found = {result["key"]: result for result in map(json.loads, text.splitlines())}
        whole = all(isinstance(r["measures"], dict) and r.get("wall_seconds", 0) >= 0 for r in found.values())
        if not found or not whole:
            raise ValueError("no result, or one without measures")
        return found
    except (OSError, EOFError, zlib.error, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(
            f"{path}: expected results of runs, found a damaged file ({error!r}); restore it, or delete it, and its "
            f"runs are made again"
        ) from None


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
    first: Run | None = None  # the run with the first rounds of this one, until a rule ends it sooner; made before
    keep: bool = False  # whether the run directory is kept for a run that continues it

    @property
    def cost(self) -> float:
        """The estimated work of the run."""
        return cost_of(self.config)


def make(
    runs: list[Run], store: Store, jobs: int, on_part: Callable[[Run, float, str], None], on_done: Callable[[Run], None]
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
            observer = ProgressObserver(run.config.rounds, tell)
            if run.first is not None and not _begin(store, run.key, run.first, observer):
                return None
            found = make_result(run, store.work / run.key, observer)
            found |= _continued(store.get(run.first.key), found) if run.first is not None else {}
            store.put(found, run.keep)
    return found


def _begin(store: Store, key: str, first: Run, observer: Observer) -> bool:
    """Give a run the directory of the run with its first rounds, which is made and stored before if it is not yet.

    Return False if another command is making that run. Where its result is stored and its directory is gone, or this
    run has begun already, nothing is done. A crash at any line leaves what the next call continues.
    """
    if RunDir(store.work / key).config_file.exists():
        return True
    with store.claim(first.key) as ours:
        if not ours:
            return False
        if store.get(first.key) is None:
            store.put(make_result(first, store.work / first.key, observer), keep=True)
        store.hand_over(first.key, key)
    return True


def _continued(first: Result | None, found: Result) -> Result:
    """Return `{"continues": KEY}` if the first rounds of a result were computed once, for both: they took as long."""
    if first is None:
        return {}
    before, now = first["rounds"]["seconds"], found["rounds"]["seconds"]
    return {"continues": first["key"]} if now[: len(before)] == before else {}


def make_result(run: Run, place: Path, observer: Observer) -> Result:
    """Make or resume one run in its directory, and return its result, also if it diverged."""
    from ..client.trees import one_thread

    began = time.monotonic()
    observers = [observer, *([_ServerLoss(run.config)] if "server_loss" in run.measure else [])]
    commit()  # cached here: the commit at the start of the run, not at its end
    make_run(run.config, place, observers)
    with one_thread():  # One thread fixes the bits, however many runs are made in parallel.
        result = pack(run, place)
    summary = result["summary"]
    rounds = summary["seconds"] + summary["eval_seconds"]  # includes the rounds before an interruption
    return result | {"wall_seconds": round(max(time.monotonic() - began, rounds), 2)}


def pack(run: Run, place: Path) -> Result:
    """Return a finished run directory as a result: config, summary, evaluated rounds, scores of the final model."""
    from ..client.evaluate import evaluate
    from ..runs.binary_files import load_vector
    from ..runs.inspect import inspect_run
    from ..runs.launch import prepare

    files = RunFiles.read(place)
    options = {name: value for name, value in run.config.data.options.items() if name != "test_size"}
    whole = replace(run.config, data=replace(run.config.data, options=options), backend="serial", workers=1)
    with prepare(whole) as simulation:
        work = simulation.work
        x = load_vector(work.flat, RunDir(place).model_file)
        test = evaluate(work.flat, x, work.data, work.loss)
        train = evaluate(work.flat, x, _clients_data(work.data), work.loss)
        pictures = 0 if work.data.y_test is None else len(work.data.y_test)
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
        "final": {**_finite("", test), **_finite("train_", train), "test_pictures": pictures},
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


def of_data(cell: Cell) -> dict[str, float]:
    """Return counts and shape of a data set as it is loaded."""
    from ..data import read

    samples = read(**cell.tables["data"])
    per_class = np.bincount(samples.y)
    return {
        "training pictures": len(samples.y),
        "test pictures": 0 if samples.y_test is None else len(samples.y_test),
        "classes": len(per_class),
        "fewest of a class": int(per_class.min()),
        "most of a class": int(per_class.max()),
        "channels": samples.x.shape[1],
        "pixels a side": samples.x.shape[2],
    }


def of_split(cell: Cell, seed: int) -> tuple[dict[str, float], np.ndarray]:
    """Return means over clients of a split, and the samples of every class (columns) at every client (rows)."""
    from ..data import describe, load

    tables = cell.tables
    data = load(**tables["data"], split=tables["split"], clients=tables["clients"], seed=seed, augment="none")
    found = describe(data)
    largest = found.counts.max(1) / found.sizes
    return {"half-mass classes": float(found.half.mean()), "largest class %": 100 * float(largest.mean())}, found.counts


def fact(value: float, seed: int) -> Result:
    """Return a number in the form of a result, which sheets and claims accept."""
    rounds: dict[str, list[Any]] = {name: [] for name in ROUNDS}
    return {"key": "fact", "seed": seed, "status": "finished", "measures": {"value": value}, "rounds": rounds}
