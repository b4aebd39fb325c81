"""The data of a report page: every number of every round once, as JSON values."""

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
from .tables import plain_gap

SCORES = ("test_accuracy", "test_loss", "train_loss", "validation_accuracy", "validation_loss", "drift", "update_norm")
COSTS = ("lr", "bytes_down", "bytes_up", "grad_evals", "seconds", "eval_seconds", "virtual_seconds")
COUNTED = ("cohort", "dropped", "stragglers")
TIMES = ("seconds", "eval_seconds", "virtual_seconds")
PLAIN = 1_000_000
"""The largest number of characters of JSON that are embedded without compression."""
BASELINES = 24
"""With at most so many methods, the page has the differences to each of them; else only to the baseline."""
SPLITS, CELLS, CLIENTS = 12, 40_000, 2000
"""The most splits that are drawn, counts per split, and clients with a bar of their own."""
METRICS = 12
"""The most metrics of methods that get a panel."""


def embed(rows: Sequence[Row], found: Comparison) -> dict[str, Any]:
    """Return the data that the page draws; rows and comparison are those of `page.page`."""
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
    """Distinct columns: many runs share, for example, learning rates and cohort sizes."""

    def __init__(self) -> None:
        self.columns: list[Any] = []
        self._known: dict[str, int] = {}

    def add(self, values: list[Any]) -> int:
        """Return the index of a column; a column of equal numbers is stored as one number."""
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
        "of": of if type(of := run.config.get("rounds")) is int else None,
        "split": str(run.summary.get("split_fingerprint", "")),
        "columns": {name: pool.add(values) for name, values in columns(run).items()},
        "took_part": _took_part(run, pool),
    }
    return plain | ({"clients": clients} if (clients := last_scores(run.path)) else {})


def columns(run: RunFiles) -> dict[str, list[Any]]:
    """Return one list per number, with None where a round lacks it; times to the microsecond, lists as lengths."""
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
    """Return how often each client took part; for many clients, only how many took part how often."""
    counts = Counter(client for r in run.rounds for client in r["cohort"])
    counts.subtract(client for r in run.rounds for client in r.get("dropped", ()))
    given = run.config.get("clients")
    clients = given if type(given) is int and 0 < given < 10**7 else len(counts)
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
    of = {label: gaps(found.rows, label) for label in chosen}
    return {label: [{**plain_gap(gap), "answer": answer(gap)} for gap in each] for label, each in of.items()}


def answer(gap: Gap) -> str:
    """Return whether a difference is real, and what would decide it."""
    if gap.more:
        return f"undecided; by estimate {gap.more} more seed{'s' if gap.more > 1 else ''} would decide"
    longer = {UNKNOWN: "unknown: 1 seed; one more gives an interval"}
    longer[NO] = "no: less than half a point" if "accuracy" in gap.metric else NO
    return longer.get(gap.answer, gap.answer)


def _splits(rows: Sequence[Row]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for run in (run for row in rows for run in row.runs):
        expected = run.summary.get("split_fingerprint")
        if len(found) >= SPLITS or expected in found:
            continue
        split = read_split(RunDir(run.path).split_file)
        if split is None or (expected and split.fingerprint != expected):
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
    """Return the data as a script element that no text in it can close; compressed if it is large."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    if len(text) <= PLAIN:
        return f'<script id="data" type="application/json">{text.replace("<", chr(92) + "u003c")}</script>'
    packed = base64.b64encode(zlib.compress(text.encode())).decode()
    return f'<script id="data" type="application/json" data-packed="deflate">{packed}</script>'


def last_scores(path: Path) -> dict[str, Any] | None:
    """Return the last scores on every client's data, of all models that were scored; None if there are none."""
    try:
        found = RunDir(path).client_metrics()
    except UserError:  # damaged; `fedspeed verify` reports it
        return None
    if found is None or not len(found.rounds):
        return None
    plain: dict[str, Any] = {"round": int(found.rounds[-1]), "on": str(found.on)}
    for name in found.columns:
        values = getattr(found, name)[-1].tolist()
        plain[name] = [float(f"{value:.6g}") if math.isfinite(value) else None for value in values]
    return plain
