"""Run directories with rounds chosen by hand: what a report reads, without running anything."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from fedspeed.record import Record
from fedspeed.runs.directory import RunDir, Split

CLIENTS = 12


def made_run(
    folder: Path, method: str = "fedavg", seed: int = 0, rounds: int = 10, gain: float = 0.0, **changes: Any
) -> RunDir:
    """A finished run whose accuracy rises to about 0.8 + `gain`.

    Args:
        changes: `status`, `config` and `summary` (merged into what would be there), `record` (a function of a record's
            fields that returns others).
    """
    run, random = RunDir(folder), np.random.default_rng([seed, len(method), round(1000 * gain)])
    folder.mkdir(parents=True, exist_ok=True)
    records = []
    for t in range(1, rounds + 1):
        score = (0.8 + gain) * (1 - math.exp(-3 * t / rounds)) + 0.01 * random.normal()
        fields = {
            "round": t,
            "cohort": sorted(random.choice(CLIENTS, 4, replace=False).tolist()),
            "lr": 0.1 * 0.998**t,
            "train_loss": 2 * math.exp(-3 * t / rounds) + 0.1 * random.random(),
            "test_loss": float(np.float32(2.3 - 2 * score)),
            "test_accuracy": round(score * 360) / 360,
            "drift": float(random.random()),
            "update_norm": float(random.random()),
            "bytes_down": 4000,
            "bytes_up": 4000,
            "grad_evals": 20.0,
            "dropped": [],
            "stragglers": [],
            "seconds": 0.01 + 0.01 * float(random.random()),
            "eval_seconds": 0.001 * float(random.random()),
        }
        records.append(Record(**changes.get("record", dict)(fields)))
    config = {
        "format": 1,
        "rounds": rounds,
        "seed": seed,
        "lr": 0.1,
        "lr_decay": 0.998,
        "clients": CLIENTS,
        "active": 4,
        "split": "iid",
        "method": {"name": method},
        "model": {"name": "mlp"},
        "data": {"name": "digits"},
    }
    run.write_tables({**config, **changes.get("config", {})})
    run.write_records(records)
    scores = [r.test_accuracy for r in records if r.test_accuracy is not None]
    last = scores[-5:]
    summary = {
        "status": changes.get("status", "finished"),
        "rounds": rounds,
        "last_accuracy": scores[-1] if scores else None,
        "best_accuracy": max(scores, default=None),
        "mean_last5_accuracy": math.fsum(last) / len(last) if last else None,
        "last_test_loss": records[-1].to_dict()["test_loss"] if records else None,
        "last_train_loss": records[-1].to_dict()["train_loss"] if records else None,
        **{
            name: sum(getattr(r, name) for r in records)
            for name in ("bytes_down", "bytes_up", "grad_evals", "seconds", "eval_seconds")
        },
        "seed": seed,
        "parameters": 10,
        "data_fingerprint": "d" * 16,
        "split_fingerprint": f"{seed:016d}",
        "environment": {"fedspeed": "0.1.0", "torch": "2.13.0", "cpu": "AVX2"},
        "digests": {"model": "m" * 32, "rounds": "r" * 32},
        "engine": "loop",
    }
    run.write_summary({**summary, **changes.get("summary", {})})
    counts = np.random.default_rng(seed).integers(0, 9, (CLIENTS, 5)).tolist()
    split = Split(summary["split_fingerprint"], "digits", "iid", [sum(row) for row in counts], counts, [])
    run.split_file.write_text(json.dumps(split._asdict()))
    return run
