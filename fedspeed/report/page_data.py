"""The data of a report page: every number of every round once, as JSON takes it."""

from __future__ import annotations

import base64
import json
import math
import zlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..record import is_number
from ..runs.directory import RunDir, read_split
from .comparison import Comparison
from .figures import COLOURS, DARK, DASHES
from .run_files import Row, RunFiles, measured, setting
from .statistics import NO, UNKNOWN, Gap, gaps

SCORES = ("test_accuracy", "test_loss", "train_loss", "validation_accuracy", "validation_loss", "drift", "update_norm")
COSTS = ("lr", "bytes_down", "bytes_up", "grad_evals", "seconds", "eval_seconds", "virtual_seconds")
COUNTED = ("cohort", "dropped", "stragglers")
TIMES = ("seconds", "eval_seconds", "virtual_seconds")
PLAIN = 1_000_000
"""Characters of JSON that stand in the page as they are; more are compressed."""
BASELINES = 24
"""Methods up to which the page has the differences to each of them, else to the chosen one only."""
SPLITS, CELLS, CLIENTS = 12, 40_000, 2000
"""Splits that are drawn, counts of each that may be, and clients that get a bar of their own."""
METRICS = 12
"""Named numbers of methods that get a panel."""


def embed(rows: Sequence[Row], found: Comparison) -> dict[str, Any]:
    """Return the data that the page draws.

    Args:
        rows: with all runs, also those that are not done.
        found: the comparison of those that are.
    """
    pool = Pool()
    return {
        "setting": setting(rows),
        "metric": measured(rows),
        "baseline": found.baseline,
        "targets": list(found.targets),
        "colours": {"light": COLOURS, "dark": DARK, "dashes": DASHES},
        "rows": [{"label": row.label, "runs": [_run(run, pool) for run in row.runs]} for row in rows],
        "columns": pool.columns,
        "gaps": _gaps(found),
        "splits": _splits(rows),
    }


class Pool:
    """Columns, the same one only once: rates and cohorts of many runs are."""

    def __init__(self) -> None:
        self.columns: list[Any] = []
        self._known: dict[str, int] = {}

    def add(self, values: list[Any]) -> int:
        """Return the place of a column; one number stands for a column of equal numbers."""
        column = values[0] if values and all(value == values[0] for value in values) else values
        key = json.dumps(column)
        if key not in self._known:
            self._known[key] = len(self.columns)
            self.columns.append(column)
        return self._known[key]


def _run(run: RunFiles, pool: Pool) -> dict[str, Any]:
    plain: dict[str, Any] = {
        "seed": run.summary["seed"],
        "status": str(run.summary["status"]),
        "done": run.done,
        "folder": run.path.name,
        "rounds": len(run.rounds),
        "of": told if type(told := run.config.get("rounds")) is int else None,
        "split": str(run.summary.get("split_fingerprint", "")),
        "columns": {name: pool.add(values) for name, values in columns(run).items()},
        "took_part": _took_part(run, pool),
    }
    clients = last_scores(run.path)
    return plain | ({"clients": clients} if clients else {})


def columns(run: RunFiles) -> dict[str, list[Any]]:
    """Return a list per number of rounds, None where a round lacks it; times to the microsecond, lists as lengths."""
    found: dict[str, list[Any]] = {}
    named = sorted({name for r in run.rounds for name in r.get("metrics", ())})
    for name in (*SCORES, *COSTS):
        values = [r[name] if name in r else r.get("metrics", {}).get(name) for r in run.rounds]
        found[name] = [_number(value, name) for value in values]
    for name in named[:METRICS]:
        if name not in found:
            found[f"metrics.{name}"] = [_number(r.get("metrics", {}).get(name), name) for r in run.rounds]
    for name in COUNTED:
        found[name] = [len(r.get(name, ())) for r in run.rounds]
    return {name: values for name, values in found.items() if any(value is not None for value in values)}


def _number(value: Any, name: str) -> float | None:
    if not is_number(value):
        return None
    return round(float(value), 6) if name in TIMES else value


def _took_part(run: RunFiles, pool: Pool) -> dict[str, Any]:
    """Return how often each client was counted; of many clients, how many were how often."""
    counts = Counter(client for r in run.rounds for client in r["cohort"])
    counts.subtract(client for r in run.rounds for client in r.get("dropped", ()))
    told = run.config.get("clients")
    clients = told if type(told) is int and 0 < told < 10**7 else len(counts)
    times = Counter(counts.values())
    times[0] += max(0, clients - len(counts))
    small = 0 < clients <= CLIENTS and all(0 <= client < clients for client in counts)
    return {
        "clients": clients,
        "times": sorted([k, n] for k, n in times.items() if n > 0),
        "each": pool.add([counts[client] for client in range(clients)]) if small else None,
    }


def _gaps(found: Comparison) -> dict[str, list[dict[str, Any]]]:
    labels = [row.label for row in found.rows] if any(row.runs for row in found.rows) else []
    chosen = labels if len(labels) <= BASELINES else [found.baseline]
    own = {found.baseline: found.gaps}
    return {label: [plain_gap(gap) for gap in own.get(label) or gaps(found.rows, label)] for label in chosen}


def plain_gap(gap: Gap) -> dict[str, Any]:
    """Return a difference as JSON takes it."""
    sure = len(gap.values) > 1
    return {
        "method": gap.method,
        "metric": gap.metric,
        "seeds": gap.seeds,
        "values": gap.values,
        "mean": gap.mean,
        "low": gap.low if sure else None,
        "high": gap.high if sure else None,
        "answer": answer(gap),
    }


def answer(gap: Gap) -> str:
    """Whether a difference is real, and what would decide it."""
    if gap.more:
        return f"undecided: {gap.more} more seed{'s' if gap.more > 1 else ''} would decide"
    longer = {UNKNOWN: "unknown: 1 seed; one more gives an interval"}
    longer[NO] = "no: less than half a point" if "accuracy" in gap.metric else NO
    return longer.get(gap.answer, gap.answer)


def _splits(rows: Sequence[Row]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for run in (run for row in rows for run in row.runs):
        told = run.summary.get("split_fingerprint")
        if len(found) >= SPLITS or told in found:
            continue
        split = read_split(RunDir(run.path).split_file)
        if split is None or (told and split.fingerprint != told):
            continue
        few = split.counts and len(split.counts) * len(split.counts[0]) <= CELLS
        found[split.fingerprint] = {
            "name": f"{split.data}, {split.split}, seed {run.summary['seed']}",
            "sizes": split.sizes if len(split.sizes) <= CLIENTS else [],
            "counts": split.counts if few and len(split.sizes) <= CLIENTS else [],
            "clients": len(split.sizes),
            "samples": sum(split.sizes),
            "classes": split.classes,
        }
    return found


def script(data: dict[str, Any]) -> str:
    """Return the data as a script element that no text in it can close; compressed where they are many."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    if len(text) <= PLAIN:
        return f'<script id="data" type="application/json">{text.replace("<", chr(92) + "u003c")}</script>'
    packed = base64.b64encode(zlib.compress(text.encode())).decode()
    return f'<script id="data" type="application/json" data-packed="deflate">{packed}</script>'


def last_scores(path: Path) -> dict[str, Any] | None:
    """Return accuracy and loss of the last measured server model on every client's data; None without."""
    try:
        found = RunDir(path).client_metrics()
    except UserError:  # damaged: `fedspeed verify` says so
        return None
    if found is None or not len(found.rounds):
        return None
    return {
        "round": int(found.rounds[-1]),
        "on": str(found.on),
        "accuracy": _finite(found.accuracy[-1].tolist()),
        "loss": _finite(found.loss[-1].tolist()),
    }


def _finite(values: list[float]) -> list[float | None]:
    return [float(f"{value:.6g}") if math.isfinite(value) else None for value in values]
