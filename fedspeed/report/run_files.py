"""The reader of run directories: the outcome of a run, runs of several seeds as one row, rounds for trackers."""

from __future__ import annotations

import hashlib
import json
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

from ..config.spec import BIASED, is_biased
from ..config.stopping import RULES
from ..errors import UserError
from ..record import CLIENT_SCORES, COSTS, Record, cost_to, is_number, planned_rounds
from ..runs.directory import ROUNDS, RunDir, is_running, runs_in
from ..utils.files import flat, read_bytes, read_json
from .labels import kind_of, labels

VIRTUAL = "virtual_seconds"
SUMMARY = ("seed", "last_accuracy", "best_accuracy", "mean_last5_accuracy", "last_test_loss", "last_train_loss",
           "rounds", "bytes_down", "bytes_up", "grad_evals", "seconds", "eval_seconds")  # fmt: skip
RUNNING, INTERRUPTED, DAMAGED = "running", "interrupted", "damaged"
MAY_CHANGE = ("rounds", "data_dir", "targets", *RULES)
"""Keys of a config that may change when a run is continued."""
OF_CLIENTS = ("mean", "worst10", "sd")
"""The statistics over clients that tables show, of the server's model; of personalised models they show the mean."""
_NUMBER = re.compile(r"(\d+(?:\.\d+)?)")


@dataclass(frozen=True)
class RunFiles:
    """A run directory as data."""

    path: Path
    rounds: list[dict[str, Any]]
    summary: dict[str, Any]
    config: dict[str, Any] = field(default_factory=dict)
    _reached: dict[float, dict[str, float | None]] = field(default_factory=dict, init=False, repr=False, compare=False)

    @classmethod
    def read(cls, path: Path) -> RunFiles:
        """Read a run directory that is finished or stopped, or has diverged. Nothing in it is executed.

        Unlike `read_contents`, this takes rounds with fields that this version does not have or require.
        """
        files = RunDir(path)
        try:
            run = cls(path, list(files.lines(whole=True)), files.raw_summary() or {}, files.config())
            if not run.summary:
                raise UserError(f"it has no {files.summary_file.name} that can be read")
            run.check()
        except UserError as error:
            raise UserError(f"{path} is not a finished run directory: {error}") from None
        except (KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{path} is not a finished run directory: it lacks {error}") from None
        return run

    def check(self) -> None:
        """Raise KeyError, TypeError or AttributeError where a required entry is missing or has another type."""
        if not isinstance(inner(self.config, "method").get("name"), str):
            raise TypeError("the name of a method")
        for key, value in self.numbers((0.5,)).items():
            if not is_number(value) and (value is not None or key == "seed"):
                raise TypeError(f"a number for {key}")
        texts = {"data_fingerprint": "-", "split_fingerprint": "-", **self.summary}
        for key in ("data_fingerprint", "split_fingerprint", "status"):
            if not str.strip(texts[key]):  # raises TypeError for anything but text
                raise TypeError(f"text for {key}")

    @property
    def done(self) -> bool:
        """Whether there is nothing left to run: finished, stopped by a rule, or diverged."""
        return self.state in ("finished", "stopped", "diverged")

    @property
    def state(self) -> str:
        """The first word of the status: `finished`, `stopped` (by a rule), `diverged`, or why the run broke off."""
        return str(self.summary["status"]).partition(":")[0]

    @property
    def stopped(self) -> str:
        """The rule that stopped the run, for example `stop_at accuracy=0.8`; "" if none did."""
        if self.state != "stopped":
            return ""
        stop = inner(self.summary, "stopped")
        by, rule = stop.get("by"), stop.get("rule")
        return f"{by} {rule[:60]}" if by in RULES and isinstance(rule, str) else "by a rule"

    @property
    def diverged(self) -> bool:
        """Whether the run ended with NaN or Inf."""
        return self.state == "diverged"

    @property
    def findings(self) -> list[str]:
        """The names of the health findings in the summary."""
        return [str(name) for name in inner(self.summary, "illnesses")]

    def curve(self, key: str = "test_accuracy") -> list[tuple[int, float]]:
        """Return (round, value) of the rounds that measured the value."""
        return [(r["round"], r[key]) for r in self.rounds if r.get(key) is not None]

    def numbers(self, targets: Sequence[float] = ()) -> dict[str, float | None]:
        """Return every result by its name in files; None where it was not measured or not reached."""
        plain: dict[str, float | None] = {key: self.summary[key] for key in SUMMARY}
        plain["bytes"] = self.summary["bytes_down"] + self.summary["bytes_up"]
        timed = bool(self.config.get("network"))
        plain |= {VIRTUAL: self.rounds[-1].get(VIRTUAL) if self.rounds else 0.0} if timed else {}
        plain |= self._of_clients
        for target in targets:
            plain |= self._reach(target)
        return plain

    @cached_property
    def _of_clients(self) -> dict[str, float | None]:
        """The last scores over clients, `client_test_accuracy_mean`; losses where there are no accuracies."""
        found: dict[str, float | None] = {}
        for on in CLIENT_SCORES:
            scores = inner(self.summary, on)
            what = "accuracy" if "accuracy_mean" in scores else "loss"
            names = [*(f"{what}_{name}" for name in OF_CLIENTS), f"personalised_{what}_mean"]
            found |= {f"{on}_{name}": scores[name] for name in names if is_number(scores.get(name))}
        return found

    def _reach(self, target: float) -> dict[str, float | None]:
        """Return the costs to reach a target by name (cached: every cell of a table asks for them)."""
        if target not in self._reached:
            spent = cost_to(self.rounds, target, COSTS) or {}
            timed = [VIRTUAL] if self.config.get("network") else []
            found = {to(cost, target): spent.get(cost) for cost in (*COSTS, *timed)}
            self._reached[target] = {to("rounds", target): spent.get("round"), **found}
        return self._reached[target]

    def bound(self, cost: str) -> float:
        """Return a lower bound of the cost to a target that was not reached: the planned rounds, or the total cost."""
        if cost == "rounds":
            return float(planned_rounds(self.config, self.state, len(self.rounds)) or len(self.rounds))
        return float(self.numbers()[cost] or 0.0)


def inner(tables: dict[str, Any], key: str) -> dict[str, Any]:
    """Return a table inside of others; empty if it is missing or anything else."""
    found = tables.get(key)
    return found if isinstance(found, dict) else {}


def to(cost: str, target: float) -> str:
    """Return the name of the cost to reach a target.

    Example:
        >>> to("rounds", 0.825)
        'rounds_to_82.5'
    """
    return f"{cost}_to_{100 * target:g}"


@dataclass(frozen=True)
class Row:
    """One method over its seeds."""

    label: str
    runs: list[RunFiles]

    def values(self, key: str, targets: Sequence[float] = ()) -> list[float]:
        """Return one number per seed that has one."""
        found = [run.numbers(targets).get(key) for run in self.runs]
        return [value for value in found if value is not None]

    def by_seed(self, key: str, targets: Sequence[float] = ()) -> dict[int, float]:
        """Return the number of every seed that has one; a run that diverged has none."""
        found = {int(run.summary["seed"]): run.numbers(targets).get(key) for run in self.runs if not run.diverged}
        return {seed: value for seed, value in found.items() if value is not None}

    def band(self, key: str = "test_accuracy") -> list[tuple[int, float, float]]:
        """Return (round, mean, standard deviation over seeds) where every seed has a value."""
        return band([dict(run.curve(key)) for run in self.runs])

    @property
    def diverged(self) -> int:
        """The number of runs that diverged."""
        return sum(run.diverged for run in self.runs)

    @property
    def at_goal(self) -> int:
        """The number of runs that stopped at a score: their last scores are the goal's, not the method's."""
        return sum(run.stopped.startswith("stop_at ") for run in self.runs)


def band(curves: Sequence[dict[int, float]]) -> list[tuple[int, float, float]]:
    """Return (round, mean, standard deviation) of the rounds in which every curve has a value.

    Example:
        >>> band([{1: 0.5, 2: 0.6}, {2: 0.6}])
        [(2, 0.6, 0.0)]
    """
    shared = sorted(set.intersection(*map(set, curves))) if curves else []
    found = [(t, [curve[t] for curve in curves]) for t in shared]
    return [(t, statistics.fmean(v), statistics.stdev(v) if len(v) > 1 else 0.0) for t, v in found]


def measured(rows: Iterable[Row]) -> str:
    """Return the metric of the runs: `test_accuracy`, or `test_loss` if no run has accuracies."""
    runs = [run for row in rows for run in row.runs]
    losses_only = any(run.curve("test_loss") for run in runs) and not any(run.curve() for run in runs)
    return "test_loss" if losses_only else "test_accuracy"


def short(value: float, digits: int = 4) -> str:
    """Return a number with this many decimals; a huge one, for example the loss of a diverging run, with an exponent.

    Example:
        >>> short(0.51234), short(3.0617e25)
        ('0.5123', '3.1e+25')
    """
    return f"{value:.{digits}f}" if abs(value) < 1e5 else f"{value:.1e}"


def score_of(record: Record) -> str:
    """Return accuracy and loss of an evaluated round as text."""
    accuracy = "" if record.test_accuracy is None else f"accuracy {record.test_accuracy:.2%}  "
    return f"{accuracy}test loss {'-' if record.test_loss is None else short(record.test_loss)}"


def minutes(seconds: float) -> str:
    """Return a time in words: seconds up to 90, then minutes, then hours.

    Example:
        >>> minutes(12), minutes(600), minutes(12000)
        ('12 s', '10 min', '3 h 20 min')
    """
    if seconds < 90:
        return f"{seconds:.0f} s"
    whole = round(seconds / 60)
    return f"{whole} min" if whole < 120 else f"{whole // 60} h {whole % 60} min"


def spread(values: list[float], scale: float = 1.0, digits: int = 2) -> str:
    """Return `mean +- standard deviation` over seeds; one value has no deviation.

    Example:
        >>> spread([0.5, 0.7], scale=100, digits=1)
        '60.0 +- 14.1'
    """
    if not values:
        return "-"
    mean = short(scale * statistics.fmean(values), digits)
    return mean if len(values) < 2 else f"{mean} +- {short(scale * statistics.stdev(values), digits)}"


def seeds_of(rows: Iterable[Row]) -> str:
    """Return how many seeds the rows have, in words: `1 seed`, `3 seeds`, `2 to 3 seeds`."""
    counts = sorted({len(row.runs) for row in rows})
    if not counts or counts == [1]:
        return "1 seed"
    return f"{counts[0]} to {counts[-1]} seeds" if len(counts) > 1 else f"{counts[0]} seeds"


def setting(rows: Iterable[Row]) -> str:
    """Return those of data set, split and cohort that all runs share, as text."""
    configs = [run.config for row in rows for run in row.runs]
    tables = [flat(config) for config in configs]
    first = tables[0] if tables else {}
    shared = {key: value for key, value in first.items() if all(t.get(key) == value for t in tables)}
    name = "data.set" if shared.get("data.name") == "given" and shared.get("data.set") else "data.name"
    parts = [str(shared[key]) for key in (name, "split") if key in shared]
    if {"active", "clients"} <= set(shared):
        biased = any(is_biased(config.get("cohort", "fixed")) for config in configs)
        parts.append(f"{shared['active']} of {shared['clients']} clients{f' ({BIASED})' if biased else ''}")
    return ", ".join(parts)


def folders_of_runs(given: Path) -> list[Path]:
    """Return the run directories in a folder, or the folder itself if it is one; numbers in names sort by size."""
    found = runs_in(given)
    if not found:
        raise UserError(f"{given} holds no runs: expected a run directory, or a folder of them")
    return sorted(found, key=lambda path: [float(p) if i % 2 else p for i, p in enumerate(_NUMBER.split(path.name))])


def gather(
    folders: Iterable[Path],
    usual: dict[str, dict[str, Any]] | None = None,
    read: Callable[[Path], RunFiles] = RunFiles.read,
    unfinished: bool = False,
) -> tuple[list[Row], list[str]]:
    """Return finished runs as rows, seeds in order, named by method and differences; and why others are left out.

    Args:
        usual: the default fields of methods; fields with other values are part of a row's name.
        read: reads a run directory; one for which it raises UserError is left out.
        unfinished: also take runs that are not done.
    """
    runs: dict[str, dict[int, RunFiles]] = {}
    out = []
    for folder in dict.fromkeys(folders):
        try:
            run = read(folder)
        except UserError as error:
            why = str(error).splitlines()[0].replace(f"{folder} is not a finished run directory", "not finished")
            out.append(f"{folder}: {why}")
            continue
        seeds = runs.setdefault(json.dumps(kind_of(run.config), sort_keys=True, default=str), {})
        seed = int(run.summary["seed"])
        if not run.done and not unfinished:
            out.append(f"{folder}: {str(run.summary['status']).splitlines()[0]}")
        elif seed in seeds and (seeds[seed].done or not run.done):
            same = "run" if run.config == seeds[seed].config else "seed"
            out.append(f"{folder}: the same {same} as {seeds[seed].path}")
        else:
            seeds[seed] = run
    kept = [[seeds[seed] for seed in sorted(seeds)] for seeds in runs.values() if seeds]
    names = labels([kind_of(seeds[0].config) for seeds in kept], usual or {})
    return [Row(label, seeds) for label, seeds in zip(names, kept, strict=True)], out


def collect(given: Sequence[Path], unfinished: bool = False) -> tuple[list[Row], list[str]]:
    """Return the runs of some folders as rows; of one folder in the order of the comparison that made them, else sorted
    by method; and why others are left out.

    Args:
        unfinished: also take the rounds so far of runs that are in progress, interrupted or damaged.
    """
    folders = [folder for path in given for folder in folders_of_runs(path)]
    rows, left_out = rows_of(folders, read_any if unfinished else RunFiles.read, unfinished, len(given) == 1)
    if not rows:
        raise UserError(f"{given[0]}: expected finished runs, found none; {left_out[0]}")
    place = _places(given[0]) if len(given) == 1 else {}
    return sorted(rows, key=lambda row: min(place.get(run.path.name, len(place)) for run in row.runs)), left_out


def _places(folder: Path) -> dict[str, int]:
    """Return the place of every run in the table that `compare` wrote beside it; empty without one."""
    try:
        rows = read_json(folder / "table.json")["rows"]
        return {str(name): i for i, row in enumerate(rows) for name in row.get("folders", ())}
    except (KeyError, TypeError, AttributeError):  # it is of another kind, or damaged
        return {}


def rows_of(
    folders: Sequence[Path], read: Callable[[Path], RunFiles], unfinished: bool, in_order: bool
) -> tuple[list[Row], list[str]]:
    """Return run directories as rows, sorted by method if `in_order`, and why others are left out; see `gather`."""
    from ..methods import METHODS, WRAPPERS

    usual = {name: cls.from_fields({}).to_dict() for name, cls in (METHODS | WRAPPERS).items()}
    rows, left_out = gather(folders, usual, read, unfinished)
    if in_order:
        rank = {name: i for i, name in enumerate(usual)}
        rows = sorted(rows, key=lambda row: rank.get(str(row.runs[0].config["method"]["name"]), len(rank)))
    return rows, left_out


def renamed(rows: Sequence[Row], names: Mapping[str, str]) -> list[Row]:
    """Return the rows with other labels."""
    return [Row(names[row.label], row.runs) for row in rows]


def finished(rows: Sequence[Row]) -> list[Row]:
    """Return the rows with only their finished runs; a row without any stays."""
    return [Row(row.label, [run for run in row.runs if run.done]) for row in rows]


class Contents(NamedTuple):
    """The files of a run directory, as far as they can be read.

    Args:
        rounds: the lines of `rounds.jsonl` up to the first that is not a round.
        records: the same rounds, checked.
        unread: the number of lines after them; the run may still be writing the last one.
        cut: whether the last line is incomplete.
        damage: the error of the first unread line; "" if there is none.
        summary: the contents of `summary.json`; None without one, empty if it cannot be read.
        running: whether a process is running the run.
    """

    files: RunDir
    config: dict[str, Any]
    rounds: list[dict[str, Any]]
    records: list[Record]
    unread: int
    cut: bool
    damage: str
    summary: dict[str, Any] | None
    running: bool

    @property
    def status(self) -> str:
        """The status of the summary; `running` or `interrupted` if there is none, or a process continues the run."""
        if self.summary is None or self.running:
            return RUNNING if self.running else INTERRUPTED
        return str(self.summary.get("status", ""))


def read_contents(path: Path) -> Contents:
    """Read a run directory in any state; raise if its config, or the file of rounds as a whole, cannot be read. Nothing
    in it is executed."""
    files = RunDir(path)
    config = files.config()
    with is_running(path) as before:
        pass  # Release the lock before reading files, so that a run can start in the directory meanwhile.
    summary = files.raw_summary()
    next(files.lines(), None)  # raises if the file cannot be read at all
    rounds: list[dict[str, Any]] = []
    records: list[Record] = []
    damage = ""
    try:
        for plain in files.lines(whole=files.rounds_file.exists()):
            record = Record.from_dict(plain)
            if record.round != len(records) + 1:
                raise TypeError(f"round is {record.round}")
            rounds.append(plain)
            records.append(record)
    except (UserError, TypeError) as error:
        why = str(error).rpartition("(")[2].removesuffix(")")
        damage = f"line {len(rounds) + 1} of {ROUNDS} is not a round ({why})"
    text = read_bytes(files.rounds_file) if files.rounds_file.is_file() else b""
    with is_running(path) as after:
        running = before or after
    unread = max(0, len(text.splitlines()) - len(records))
    return Contents(files, config, rounds, records, unread, not text.endswith(b"\n"), damage, summary, running)


def read_any(path: Path) -> RunFiles:
    """Return a run in any state; `status` in its summary says which, also where there is no summary file."""
    found = read_contents(path)
    seed = found.config.get("seed", 0)
    if not isinstance(inner(found.config, "method").get("name"), str) or type(seed) is not int:
        raise UserError(f"{found.files.config_file} is not the config of a run: it lacks a method or a seed")
    rounds, broken = found.rounds, found.damage
    run = RunFiles(path, rounds, found.summary or {}, found.config)
    try:
        run.check()
    except (KeyError, TypeError, AttributeError):
        broken = broken or ("" if found.summary is None else "its summary cannot be read")
    else:
        said = run.summary["rounds"]
        broken = broken or ("" if said == len(rounds) else f"{said} rounds in its summary, {len(rounds)} in {ROUNDS}")
        if not broken:
            return run
    status = f"{DAMAGED}: {broken}" if broken else f"{INTERRUPTED} after {len(rounds)} rounds"
    return RunFiles(path, rounds, _so_far(rounds, seed, RUNNING if found.running else status), found.config)


def _so_far(rounds: list[dict[str, Any]], seed: int, status: str) -> dict[str, Any]:
    """Return the parts of a summary that tables need, computed from these rounds."""
    accuracies = [r["test_accuracy"] for r in rounds if is_number(r.get("test_accuracy"))]
    losses = [r["test_loss"] for r in rounds if is_number(r.get("test_loss"))]
    added = ("bytes_down", "bytes_up", "grad_evals", "seconds", "eval_seconds")
    return {
        "status": status,
        "seed": seed,
        "rounds": len(rounds),
        "last_accuracy": accuracies[-1] if accuracies else None,
        "best_accuracy": max(accuracies, default=None),
        "mean_last5_accuracy": statistics.fmean(accuracies[-5:]) if accuracies else None,
        "last_test_loss": losses[-1] if losses else None,
        "last_train_loss": rounds[-1]["train_loss"] if rounds else None,
        **{key: sum(r[key] for r in rounds) for key in added},
    }


class LoggedRound(NamedTuple):
    """One round for a tracker: the time of its end, in seconds since 1970, and its numbers by name."""

    round: int
    time: float
    numbers: dict[str, float]


@dataclass(frozen=True)
class Source:
    """A run for trackers, finished or in progress: a name, hyper-parameters, tags, and numbers per round."""

    path: Path
    config: dict[str, Any]
    records: Sequence[Record]
    status: str = "running"

    @classmethod
    def read(cls, path: Path) -> Source:
        """Read a run directory in any state, or raise UserError if it is damaged. Nothing is executed."""
        found = read_contents(path)
        files, done = found.files, len(found.records)
        if not str(_table(found.config, "method").get("name", "")):
            raise UserError(f"{files.config_file} names no method")
        expected: int | None = done + max(0, found.unread - 1)  # the run may still be writing the last line
        if found.summary is not None and not found.running:
            expected = found.summary.get("rounds")
        if expected is None:
            raise UserError(f"{files.summary_file} is damaged: it cannot be read")
        if expected != done:
            raise UserError(f"{files.rounds_file} is damaged: expected {expected} rounds, found {done}")
        return cls(path, found.config, found.records, found.status)

    @property
    def name(self) -> str:
        """The last two parts of its path, `demo/fedavg-s0`."""
        return "/".join(self.path.resolve().parts[-2:]).lstrip("/")

    @property
    def key(self) -> str:
        """A digest of name and config that identifies the run, for example in a tracker; the same when it continues."""
        config = {key: value for key, value in self.config.items() if key not in MAY_CHANGE}
        text = json.dumps([self.name, config], sort_keys=True, default=str)
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    @property
    def tags(self) -> dict[str, str]:
        """Method, data and seed."""
        method, data = (_label(_table(self.config, name)) for name in ("method", "data"))
        return {"method": method, "data": data, "seed": str(self.config.get("seed", 0))}

    @property
    def parameters(self) -> dict[str, Any]:
        """The config, flat: `method.rho`; lists are text."""
        values = flat(self.config).items()
        return {key: value if isinstance(value, bool | int | float | str) else str(value) for key, value in values}

    @property
    def began(self) -> float:
        """The time at which the config was written, in seconds since 1970."""
        return RunDir(self.path).config_file.stat().st_mtime

    def rounds(self, last: int = 0) -> list[LoggedRound]:
        """Return all rounds, or only the `last` ones; their times are sums since the beginning of the run."""
        done = accumulate(record.seconds + record.eval_seconds for record in self.records)
        pairs = list(zip(self.records, done, strict=True))[-last:]
        return [LoggedRound(record.round, self.began + spent, numbers(record)) for record, spent in pairs]


def numbers(record: Record) -> dict[str, float]:
    """Return the numbers of a record by name: lists as lengths, metrics as `metrics/NAME`, without None.

    Example:
        >>> sizes = {"bytes_down": 8, "bytes_up": 8, "grad_evals": 10.0, "seconds": 0.5, "eval_seconds": 0.0}
        >>> losses = {"train_loss": 2.3, "test_loss": None, "test_accuracy": None, "drift": 0.0, "update_norm": 1.0}
        >>> lists = {"cohort": [4, 7], "dropped": [7], "stragglers": []}
        >>> found = numbers(Record(round=1, lr=0.1, **sizes, **losses, **lists, metrics={"a": 1}))
        >>> found["cohort"], found["dropped"], found["metrics/a"], "test_loss" in found, "round" in found
        (2, 1, 1, False, False)
    """
    found = {key.replace(".", "/", 1): value for key, value in flat(record.to_dict()).items() if key != "round"}
    return {name: len(one) if isinstance(one, list) else one for name, one in found.items() if one is not None}


def read_runs(given: Iterable[Path]) -> tuple[list[Source], list[str]]:
    """Read run directories and folders of them; return at least one run, and why others are left out."""
    found: dict[str, Source] = {}
    out = []
    for path in {folder.resolve(): folder for each in given for folder in folders_of_runs(each)}.values():
        try:
            run = Source.read(path)
        except (UserError, OSError) as error:
            out.append(f"{path}: {error}")
            continue
        if run.name in found:
            both = f"{found[run.name].path} and {path}"
            raise UserError(f"two runs are called {run.name}: {both}; export them one by one, to different places")
        found[run.name] = run
    if not found:
        raise UserError(f"no run can be read: {'; '.join(out) or 'none was given'}")
    return list(found.values()), out


def _table(config: dict[str, Any], name: str) -> dict[str, Any]:
    found = config.get(name)
    return found if isinstance(found, dict) else {"name": found or ""}


def _label(table: dict[str, Any]) -> str:
    """Return the name of a table; for code from a file, FILE:CLASS."""
    name = str(table.get("name", ""))
    return f"{Path(str(table['origin'])).name}:{name.rpartition(':')[2]}" if "origin" in table else name
