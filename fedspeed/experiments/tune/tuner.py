"""`Tuning`: the searches of all methods in one loop, and the cost of a run in gradients before it is made.

Trials are run directories, so no result is lost. A cost equals what the records of its run will count.
"""

from __future__ import annotations

import math
import statistics
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import accumulate, count, islice
from pathlib import Path
from typing import Any

import numpy as np

from ...config.config import Config
from ...config.plan import Plan
from ...config.spec import cohort_name
from ...config.stopping import RULES
from ...config.warmup import lengths, shared
from ...errors import UserError, unknown
from ...methods import build
from ...methods.base import Method
from ...record import Record
from ...report.export import need
from ...report.run_files import RunFiles
from ...runs.directory import RunDir
from ...runs.launch import load_federation
from ...server.cohort import Cohort
from ...utils.random import dropped, rng, straggler_steps
from ..batch import RunTask, folder_name, is_done
from ..grid import Pairs, Space, check, point_tables, point_text, spaces, usual_point
from .strategies import STRATEGIES, Found, Search, Trial, choose, propose


def gradients(method: Method, plan: Plan, sizes: np.ndarray) -> list[float]:
    """Return the gradients up to every round of a run that does not diverge, by the clients' numbers of samples.

    A user's sampler may choose by losses, which are not known before: for it they are those of cohorts drawn uniformly.
    """

    @cache
    def of_batch(rows: int) -> float:
        return per_step(method, rows)

    @cache
    def of_client(n: int, steps: int) -> float:
        epoch = [min(plan.batch_size, n - a) for a in range(0, n, plan.batch_size)]
        whole, rest = divmod(steps, len(epoch))
        return whole * sum(map(of_batch, epoch)) + sum(map(of_batch, epoch[:rest]))

    rounds = []
    cohort = Cohort(plan if cohort_name(plan.cohort) else replace(plan, cohort="fixed"), sizes)
    for t in range(plan.rounds):
        active = cohort.draw(t)
        lost = {int(i) for i in dropped(plan.seed, t, active, plan.dropout)}
        cost = 0.0
        for i in (int(i) for i in active if i not in lost):
            steps = straggler_steps(plan.seed, t, i, plan.steps_of(int(sizes[i])), plan.stragglers)
            cost += of_client(int(sizes[i]), steps)
        rounds.append(cost)
    return list(accumulate(rounds))


def per_step(method: Method, rows: int) -> float:
    """Return how many gradients of a minibatch of `rows` rows one local step takes, by running it on a small vector."""
    import torch

    from ...client.distillation import PASSES

    evals = 0.0

    def grad(x: Any, fraction: float = 1.0, *, teacher: Any = None, pull: float = 1.0, tau: float = 1.0) -> Any:
        nonlocal evals
        part = 1.0 if fraction == 1.0 else max(1, round(fraction * rows)) / rows
        evals += part * (1.0 + 1 / PASSES if teacher is not None and pull else 1.0)
        return torch.ones_like(x)

    x0 = torch.arange(1.0, 4.0)
    down, client = method.broadcast(method.init_server(x0.clone())), method.init_client(x0)
    method.direction(method.start(down, client).clone(), grad, down, client)
    return evals


HELD_OUT = "0.2"
"""Default held-out part of every client."""
LAST = 5
"""A score is the mean over the last LAST evaluated rounds."""
MOST = 10_000
"""Largest number of runs per method; a larger budget is probably a typing error."""

Make = Callable[[list[RunTask]], Mapping[str, str]]
"""Function that makes or continues runs; returns label -> reason for every one that failed."""


class Tuning:
    """The searches of all methods, each with the same budget, scored on held-out data.

    Args:
        methods: label -> method's table; a field in the table is not tuned.
        base: the config of all runs, as tables; `validation` is the held-out part.
        budget: minibatch gradients that the trials of each method may take.
        strategy: one of `STRATEGIES`.
        space: entries `[METHOD.]FIELD=VALUES` that override what fields declare.
        tune_seeds, seeds: the seeds of the trials, and of the judged runs.
        out: the folder of all runs.
    """

    def __init__(
        self,
        methods: Mapping[str, dict[str, Any]],
        base: dict[str, Any],
        budget: float,
        strategy: str,
        space: Sequence[str],
        tune_seeds: Sequence[int],
        seeds: Sequence[int],
        out: Path,
    ) -> None:
        if strategy == "grid":
            raise UserError(
                f"tune: expected one of {', '.join(STRATEGIES)}, got grid; use `fedspeed sweep --grid` for one"
            )
        if strategy not in STRATEGIES:
            raise unknown("strategy", strategy, STRATEGIES)
        if not methods:
            raise UserError("tune: expected methods, such as fedavg fedspeed; got none")
        _require_seeds(tune_seeds, seeds)
        for name in RULES:
            if base.get(name):
                raise UserError(f"tune: expected runs of all their rounds, got {name} = {base[name]}; leave it out")
        self.methods = dict(methods)
        self.base = {
            key: value for key, value in base.items() if key not in ("method", "seed", "validation", "test_set")
        }
        self.held_out = str(base.get("validation") or HELD_OUT)
        self.budget, self.strategy = budget, strategy
        self.tune_seeds, self.seeds = tuple(tune_seeds), tuple(seeds)
        self.out = out
        self.known: dict[str, dict[Trial, Found]] = {label: {} for label in methods}
        self.spaces = spaces(self.methods, self.base, space)
        for label, own in self.spaces.items():
            check(label, self.methods[label], own)
        self._rivals = {label: build(table) for label, table in self.methods.items()}
        first = next(iter(methods))  # the sizes of clients are the same for all methods
        self._sizes = cache(lambda seed: load_federation(self.config(first, (), seed))[1].sizes)
        self.rounds = self.config(first, (), self.tune_seeds[0]).rounds
        self._costs: dict[tuple[Any, ...], list[float]] = {}
        if strategy == "optuna":
            need("optuna", "'fedspeed[optuna]'")
        self.searches = {label: self._search(label, own) for label, own in self.spaces.items()}
        self._require_budget()

    def config(self, label: str, point: Pairs, seed: int, judged: bool = False) -> Config:
        """Return the config of a trial, which never reads the test set, or of a judged run, which holds nothing out."""
        base = dict(self.base)
        base |= shared(base, self._rivals[label], self._rivals.values())
        if not judged:
            base |= {"validation": self.held_out, "test_set": False, "client_metrics": ""}
        return Config.from_dict({**point_tables(base, self.methods[label], point), "seed": seed})

    def _search(self, label: str, space: Space) -> Search:
        usual = self.config(label, (), self.tune_seeds[0])
        return Search(
            space=space,
            budget=self.budget,
            rounds=self.rounds,
            seeds=self.tune_seeds,
            further=self._further,
            cost=partial(self._cost, label),
            draw=partial(self._draw, label, space),
            valid=partial(self._valid, label),
            every=usual.eval_every,
            least=max(lengths(usual.warmup).values(), default=1),
        )

    def _draw(self, label: str, space: Space, i: int) -> Pairs | None:
        """Return the i-th point: the defaults, then random ones. A field has one stream, which methods share."""
        usual = usual_point(space, self.methods[label])
        if i == 0 and usual is not None:
            return usual
        seed = self.tune_seeds[0]
        point = tuple(
            (name, axis.at(rng(seed, f"tune {name.rpartition('base.')[2]}", i).random()))
            for name, axis in space.items()
        )
        return point if self._valid(label, point) else None

    def _valid(self, label: str, point: Pairs) -> bool:
        try:
            with warnings.catch_warnings():  # the run will repeat the warning
                warnings.simplefilter("ignore")
                self.config(label, point, self.tune_seeds[0])
        except UserError:
            return False
        return True

    def _further(self, turn: int) -> int:
        """Return the additional seed of a turn: the seeds after those of the trials, without those of judged runs."""
        further = (seed for seed in count(max(self.tune_seeds) + 1) if seed not in self.seeds)
        return next(islice(further, turn, None))

    def _cost(self, label: str, trial: Trial) -> float:
        config = self.config(label, trial.point, trial.seed)
        a_step = per_step(config.method, 1_000_003)  # a prime number of rows distinguishes fractions of a batch
        alike = (trial.seed, config.batch_size, config.local_epochs, config.local_steps, a_step)
        if alike not in self._costs:
            self._costs[alike] = gradients(config.method, config, self._sizes(trial.seed))
        return self._costs[alike][trial.rounds - 1]

    def price(self, label: str) -> float:
        """Return the gradients of a point: one whole run with every tuning seed."""
        search = self.searches[label]
        first = next(search.points(), None)
        if first is None:
            self.config(label, tuple((name, axis.at(0.5)) for name, axis in search.space.items()), self.tune_seeds[0])
            raise UserError(f"space: no point of {label} can be run; give it other values, --space")
        return search.price(first, self.rounds, {})

    def _require_budget(self) -> None:
        if not isinstance(self.budget, int | float) or not 0 < self.budget < math.inf:
            raise UserError(f"--budget: expected a number of gradients > 0, got {self.budget!r}")
        prices = {label: self.price(label) for label in self.methods}
        label = max(prices, key=lambda label: prices[label])
        if prices[label] > self.budget:
            raise UserError(
                f"--budget: expected at least {math.ceil(prices[label])} gradients, one run of {label} per "
                f"tuning seed, got {self.budget:g}; raise it, or take fewer --rounds"
            )
        if self.budget / min(prices.values()) > MOST:
            raise UserError(
                f"--budget: expected at most {MOST} runs per method, {MOST * min(prices.values()):g} gradients, got "
                f"{self.budget:g}; lower it"
            )

    def search(self, make: Make) -> dict[str, Pairs]:
        """Make all trials that the searches need, those of all methods together; return the chosen points."""
        asked: dict[str, dict[Pairs, list[Trial]]] = {}
        while True:
            wanted: list[tuple[str, Trial]] = []
            for label, search in self.searches.items():
                try:
                    asked[label], new = propose(self.strategy, search, self.known[label])
                except UserError as error:
                    raise UserError(f"{label}: {error}") from None
                wanted += [(label, trial) for trial in new]
            if not wanted:
                break
            tasks = {key: self._task(*key) for key in wanted if self.look(*key) is None}
            failed = make(list(tasks.values())) if tasks else {}
            for label, trial in wanted:
                found = self.look(label, trial)
                if found is None:
                    why = failed.get(tasks[label, trial].label, "it is not done")
                    raise UserError(f"tune: {tasks[label, trial].label} failed: {why}")
                self.known[label][trial] = found
        return {label: choose(label, self.known[label], asked[label]) for label in self.methods}

    def folder(self, label: str, point: Pairs, seed: int, judged: bool = False) -> Path:
        """Return the folder of a point's run; it depends on the values alone, so strategies share runs."""
        return self.out / ("judged" if judged else "trials") / f"{folder_name(f'{label},{point_text(point)}')}-s{seed}"

    def _trial(self, label: str, trial: Trial) -> tuple[Path, Config]:
        """Return the folder and the config of a trial; a stored run with more rounds keeps them."""
        folder = self.folder(label, trial.point, trial.seed)
        run = RunDir(folder)
        stored = run.config().get("rounds", 0) if run.config_file.exists() else 0
        rounds = max(trial.rounds, stored) if isinstance(stored, int) else trial.rounds
        return folder, replace(self.config(label, trial.point, trial.seed), rounds=rounds)

    def _task(self, label: str, trial: Trial) -> RunTask:
        folder, config = self._trial(label, trial)
        return RunTask.of(config, folder, f"{label} {point_text(trial.point)} seed {trial.seed}")

    def look(self, label: str, trial: Trial) -> Found | None:
        """Return the result of a trial from its run directory, cut after the trial's rounds; None if it is not done."""
        folder, config = self._trial(label, trial)
        run = RunDir(folder)
        if not run.config_file.exists():
            return None
        done = is_done(folder, config)
        records = run.records()
        if not done and (config.rounds == trial.rounds or len(records) < trial.rounds):
            return None
        counted = records[: trial.rounds]
        whole = len(counted) == trial.rounds
        return Found(held_out_score(counted) if whole else None, sum(record.grad_evals for record in counted))

    def judge(self, make: Make, chosen: Mapping[str, Pairs]) -> tuple[dict[str, list[RunFiles]], dict[str, str]]:
        """Run the chosen points with fresh seeds on the test set; return the runs, and label -> reason of failures."""
        tasks = {
            (label, seed): RunTask.of(
                self.config(label, point, seed, judged=True),
                self.folder(label, point, seed, judged=True),
                f"{label} judged seed {seed}",
            )
            for seed in self.seeds
            for label, point in chosen.items()
        }
        left = [task for task in tasks.values() if not is_done(task.folder, Config.from_dict(task.tables))]
        failed = dict(make(left)) if left else {}
        made: dict[str, list[RunFiles]] = {label: [] for label in chosen}
        for (label, _), task in tasks.items():
            if task.label not in failed:
                made[label].append(RunFiles.read(task.folder))
        return made, failed


def held_out_score(records: Sequence[Record]) -> float | None:
    """Return the mean held-out accuracy of the last evaluated rounds, or minus the loss if there is no accuracy.

    Larger is better; None if it is not finite.
    """
    right = [r.validation_accuracy for r in records if r.validation_accuracy is not None]
    wrong = [-r.validation_loss for r in records if r.validation_loss is not None]
    scores = (right or wrong)[-LAST:]
    mean = statistics.fmean(scores) if scores else math.nan
    return mean if math.isfinite(mean) else None


def _require_seeds(tune_seeds: Sequence[int], seeds: Sequence[int]) -> None:
    for name, given in (("--tune-seeds", tune_seeds), ("--seeds", seeds)):
        if not given or len(set(given)) < len(given):
            raise UserError(f"{name}: expected different seeds, at least one; got {list(given)}")
    both = sorted(set(tune_seeds) & set(seeds))
    if both:
        raise UserError(
            f"--seeds and --tune-seeds: expected none in common, got {both[0]} in both: points would be judged on what "
            f"they were tuned with; leave it out of one"
        )
