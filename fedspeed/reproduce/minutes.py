"""How long a recipe takes: counted pictures times the measured seconds per picture of its preset. No torch here."""

from __future__ import annotations

from functools import cache

from ..experiments.batch import pictures_of
from .recipes import Recipe, merge, recipes, run_key, settings
from .table import Cell


def minutes(recipe: Recipe, preset: str) -> float:
    """Return the minutes that a recipe's own runs take: those that no earlier recipe of the preset makes as well."""
    return sum(_new(preset).get(recipe.name, {}).values()) / 60


def runs(recipe: Recipe, preset: str) -> int:
    """Return the number of those runs."""
    return len(_new(preset).get(recipe.name, {}))


@cache
def _new(preset: str) -> dict[str, dict[str, float]]:
    """Return, for every recipe of a preset, the keys of the runs that it is the first to need, and their seconds."""
    seen: set[str] = set()
    found: dict[str, dict[str, float]] = {}
    for recipe in recipes().values():
        if preset in recipe.presets and recipe.kind == "runs":
            needed = {key: seconds for cell in recipe.cells(preset) for key, seconds in _runs(recipe, preset, cell)}
            found[recipe.name] = {key: seconds for key, seconds in needed.items() if key not in seen}
            seen |= needed.keys()
    return found


def _runs(recipe: Recipe, preset: str, cell: Cell) -> list[tuple[str, float]]:
    """Return key and seconds of every run of a cell, tuning included."""
    chosen = recipe.preset(preset)
    column = next((c for c in chosen.columns or recipe.columns if c["name"] == cell.column), {})
    measured = settings(preset).get("seconds_per_picture", {})
    each = float(measured.get(column.get("setting", chosen.setting), 0.0))
    configs = [cell.config(seed) for seed in range(chosen.seeds)]
    if cell.tuned and recipe.tune is not None:
        for point in recipe.tune.grid[cell.tables["method"]["name"]]:
            tables = merge(merge(cell.tables, chosen.tune), point)
            configs.append(Cell(cell.row, cell.column, tables=tables, rivals=cell.rivals).config(recipe.tune.seed))
    return [(run_key(config, ""), each * pictures_of(config)) for config in configs]
