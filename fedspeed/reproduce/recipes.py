"""Recipes: a paper's tables and figures as data: settings, rows, columns, its numbers and claims. No torch here."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

from ..config.config import Config
from ..config.plan import PLACEMENT
from ..errors import UserError, unknown
from ..utils.files import read_toml
from .claims import Claim
from .table import Cell, Tables, cell_name

RESULTS_VERSION = 1
"""Bumped whenever the arithmetic of a run changes beyond rounding, so that stored results are made again.

`tests/reproduce/test_results_version.py` holds what this version computes, and fails when that changes.
"""
KEYED = {
    "format", "active", "cohort", "local_epochs", "local_steps", "batch_size", "lr", "lr_decay", "weight_decay",
    "clip", "clip_mode", "decay_outside_mix", "weighting", "eval_every", "seed", "on_client_error", "dropout",
    "stragglers", "precision", "engine", "state_dtype", "rounds", "method", "model", "data", "split", "clients",
    "augment", "data_dir",
}  # fmt: skip
"""Config keys that name a run whatever their value; younger ones only where they are not at their default."""
SUITE = "iclr2023"
FOLDER = Path(__file__).parent / SUITE


@dataclass(frozen=True)
class Preset:
    """A scale of a recipe: its setting, seeds, and what of the recipe it replaces."""

    setting: str = ""
    seeds: int = 1
    set: Tables = field(default_factory=dict)
    rows: tuple[Tables, ...] = ()
    columns: tuple[Tables, ...] = ()
    targets: tuple[float, ...] = ()
    metric: str = ""
    show: tuple[str, ...] = ()
    in_order: bool = False  # runs column by column, as listed, not the longest first
    tune: Tables = field(default_factory=dict)  # of the tuning runs; data.held_out clients replace the test set


@dataclass(frozen=True)
class Tune:
    """A small grid per method, scored on clients that do not train: never on the test set.

    Args:
        grid: method -> points, each a table of config keys.
        seed: of the tuning runs; the results use seeds 0, 1, ...
    """

    grid: Mapping[str, list[Tables]]
    seed: int = 1000


@dataclass(frozen=True)
class Recipe:
    """A table or figure: claim, setting, rows x columns of runs, the paper's numbers, and what to show."""

    name: str
    title: str
    claim: str
    about: str
    presets: Mapping[str, Preset]
    paper: str = ""
    kind: str = "runs"
    order: int = 99
    metric: str = "final"
    show: tuple[str, ...] = ("final", "last5", "best")
    targets: tuple[float, ...] = ()
    figure: str = "none"
    curve: str | tuple[str, ...] = "test_accuracy"
    measure: tuple[str, ...] = ()
    values: Mapping[str, Any] = field(default_factory=dict)
    printed: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    rows: tuple[Tables, ...] = ()
    columns: tuple[Tables, ...] = ()
    claims: tuple[Claim, ...] = ()
    tune: Tune | None = None

    def preset(self, name: str) -> Preset:
        """A preset by name."""
        if name not in self.presets:
            raise unknown(f"preset of {self.name}", name, self.presets)
        return self.presets[name]

    def cells(self, preset: str) -> list[Cell]:
        """Every cell, without results: setting (the column's, if it names one) < preset < column < row."""
        chosen = self.preset(preset)
        found = []
        for row, column in product(chosen.rows or self.rows, chosen.columns or self.columns or ({"name": ""},)):
            setting = column.get("setting", chosen.setting)
            base = merge(settings(preset)[setting] if setting else {}, chosen.set)
            tables = merge(merge(base, _without(column)), _without(row))
            found.append(Cell(row["name"], column["name"], tables=tables, tuned=bool(column.get("tuned"))))
        rivals = tuple(cell.tables["method"] for cell in found if "method" in cell.tables)
        return [replace(cell, rivals=rivals) for cell in found]

    def names(self, preset: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The names of rows and columns."""
        cells = self.cells(preset)
        return tuple(dict.fromkeys(c.row for c in cells)), tuple(dict.fromkeys(c.column for c in cells))

    def cell_names(self, preset: str) -> set[str]:
        """What claims may name."""
        return {cell_name(cell.row, cell.column) for cell in self.cells(preset)}


def merge(under: Tables, over: Tables) -> Tables:
    """One table of config keys over another; `method`, `data` and `model` key by key, a new name starting afresh.

    Example:
        >>> merge({"lr": 0.1, "method": {"rho": 0.2}}, {"method": {"name": "fedspeed"}})
        {'lr': 0.1, 'method': {'rho': 0.2, 'name': 'fedspeed'}}
    """
    result = dict(under)
    for name, value in over.items():
        below = result.get(name)
        if (
            isinstance(value, dict)
            and isinstance(below, dict)
            and below.get("name") in (None, value.get("name", below.get("name")))
        ):
            value = {**below, **value}
        result[name] = value
    return result


def run_key(config: Config, digest: str) -> str:
    """Names a run by what decides its numbers: config (not where it is computed), data, and the results' version."""
    tables = config.to_dict()
    for name in (*PLACEMENT, "targets"):
        tables.pop(name, None)
    for name in tables.keys() - KEYED:  # younger than the results that are stored
        if tables[name] == getattr(Config, name):
            tables.pop(name)
    given = {"config": tables, "data": digest, "results": RESULTS_VERSION}
    return hashlib.blake2b(json.dumps(given, sort_keys=True).encode(), digest_size=8).hexdigest()


@cache
def settings(preset: str) -> Mapping[str, Any]:
    """The named settings of a preset; `paper-main` and the like use those of `paper` where they have none."""
    found = read_toml(FOLDER / "settings.toml")
    own = {**found.get(preset.partition("-")[0], {}), **found.get(preset, {})}
    if not own:
        raise unknown("preset", preset, found)
    return own


def papers_scale(preset: str) -> bool:
    """Whether a preset says of itself that it is the paper's own setting: only there sizes are judged."""
    return bool(settings(preset).get("papers_scale"))


def scale(preset: str) -> str:
    """What a preset says of its own scale beside the paper's; "" if nothing."""
    return " ".join(str(settings(preset).get("scale", "")).split())


@cache
def recipes() -> Mapping[str, Recipe]:
    """Every recipe by name, in order of value."""
    found = [read(path) for path in FOLDER.glob("*.toml") if path.stem not in ("settings", "data")]
    return {recipe.name: recipe for recipe in sorted(found, key=lambda recipe: (recipe.order, recipe.name))}


def find_recipe(name: str) -> Recipe:
    """A recipe by name."""
    if name not in recipes():
        raise unknown("recipe", name, recipes())
    return recipes()[name]


def read(path: Path) -> Recipe:
    """A recipe's file; keys it does not know are errors."""
    given = read_toml(path)
    where = f"recipe {path.stem}"
    given["presets"] = {
        name: Preset(**_known(Preset, _lists(table), f"{where}, preset {name}"))
        for name, table in given.get("presets", {}).items()
    }
    given["claims"] = tuple(
        Claim(**_known(Claim, _lists(table), f"{where}, claim")) for table in given.get("claims", [])
    )
    if "tune" in given:
        given["tune"] = Tune(**_known(Tune, given["tune"], f"{where}, tune"))
    try:
        return Recipe(path.stem, **_known(Recipe, _lists(given), where))
    except TypeError as error:
        raise UserError(f"{where}: {error}; expected title, claim, about and presets") from None


def _lists(table: Tables) -> Tables:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in table.items()}


def _known(cls: type, table: Tables, where: str) -> Tables:
    names = {f.name for f in fields(cls)}
    for name in table:
        if name not in names:
            raise unknown(f"key of {where}", name, names)
    return table


def _without(table: Tables) -> Tables:
    return {name: value for name, value in table.items() if name not in ("name", "tuned", "setting")}


def every_cell(preset: str) -> Iterator[tuple[Recipe, Cell]]:
    """All cells of all recipes that have a preset."""
    for recipe in recipes().values():
        if preset in recipe.presets and recipe.kind == "runs":
            for cell in recipe.cells(preset):
                yield recipe, cell
