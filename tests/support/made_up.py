"""Packed results and sheets with numbers chosen by hand, for tests of verdicts and renderings."""

from __future__ import annotations

import itertools
from typing import Any

from fedspeed.reproduce.table import Cell, Sheet, cell_name

NUMBERS = itertools.count()


def result(seed: int = 0, final: float = 50.0, curve: list[float] | None = None, **changes: Any) -> dict[str, Any]:
    """A finished run of 10 rounds per evaluation: accuracies in percent, 1 MB, 100 gradients and 2 s a round."""
    accuracies = [final] if curve is None else curve
    t = [10 * (i + 1) for i in range(len(accuracies))]
    return {
        "key": f"run{next(NUMBERS)}",
        "config": {"rounds": t[-1] if t else 10},
        "seed": seed,
        "status": "finished",
        "summary": {"seconds": 30.0, "eval_seconds": 2.0},
        "final": {"accuracy": final / 100, "loss": 1.5, "train_loss": 0.5},
        "rounds": {
            "round": t,
            "test_accuracy": [a / 100 for a in accuracies],
            "test_loss": [2.0 - a / 100 for a in accuracies],
            "train_loss": [1.0 - a / 100 for a in accuracies],
            "drift": [float(i) for i in range(len(t))],
            "bytes": [1_000_000 * r for r in t],
            "grad_evals": [100.0 * r for r in t],
            "seconds": [2.0 * r for r in t],
        },
        "seconds_per_round": 2.0,
        **changes,
    }


def sheet(table: dict[str, list[dict[str, Any]]], columns: tuple[str, ...] = ("",), **changes: Any) -> Sheet:
    """A sheet from the results of every cell, by cell name; the preset lacks the cells that are not there."""
    rows = tuple(dict.fromkeys(name if len(columns) == 1 else name.rsplit("/", 1)[0] for name in table))
    places = {cell_name(row, column): (row, column) for row in rows for column in columns}
    cells = {name: Cell(*places[name], tuple(results)) for name, results in table.items()}
    words = {
        "name": "table7",
        "title": "Table 7: modules",
        "claim": "each adds",
        "about": "100 clients",
        "paper": "Table 7",
    }
    rest = {"preset": "cnn", "metric": "final", "show": ("final", "best"), "targets": (), "values": {}, "seeds": 3}
    drawn = {"figure": "curves", "curves": ("test_accuracy",)}
    return Sheet(**{**words, **rest, **drawn, "rows": rows, "columns": columns, "cells": cells, **changes})


def finals(*values: float) -> list[dict[str, Any]]:
    """Seeds 0, 1, ... that end at these accuracies."""
    return [result(seed, value) for seed, value in enumerate(values)]
