"""Recipes: a paper's tables and figures as data, with settings, rows, columns, its numbers and claims, and the time
that a recipe takes. No torch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

from ..config.config import Config
from ..config.plan import PLACEMENT
from ..errors import UserError, unknown
from ..experiments.batch import pictures_of
from ..utils.files import read_toml
from .table import Cell, Tables, cell_name
from .verdicts import Claim

RESULTS_VERSION = 1
"""The version of the arithmetic of runs; a change beyond rounding increases it, so that results are made again.

`tests/reproduce/test_results_version.py` has the numbers of this version, and fails if they change.
"""
KEYED = {
    "format", "active", "cohort", "local_epochs", "local_steps", "batch_size", "lr", "lr_decay", "weight_decay",
    "clip", "clip_mode", "decay_outside_mix", "weighting", "eval_every", "seed", "on_client_error", "dropout",
    "stragglers", "precision", "engine", "state_dtype", "rounds", "method", "model", "data", "split", "clients",
    "augment", "data_dir",
}  # fmt: skip
"""Config keys that are always part of a run's key; newer ones only with a value other than their default."""
SUITE = "iclr2023"
FOLDER = Path(__file__).parent / SUITE


@dataclass(frozen=True)
class Preset:
    """A scale of a recipe: its setting, seeds, and the parts of the recipe that it replaces."""

    setting: str = ""
    seeds: int = 1
    set: Tables = field(default_factory=dict)
    rows: tuple[Tables, ...] = ()
    columns: tuple[Tables, ...] = ()
    targets: tuple[float, ...] = ()
    metric: str = ""
    show: tuple[str, ...] = ()
    in_order: bool = False  # runs column by column, as listed, not the longest first
    continues: str = ""  # the recipe whose runs (same row and column) have the first rounds of these
    # Config keys of the tuning runs; data.held_out clients replace the test set.
    tune: Tables = field(default_factory=dict)


@dataclass(frozen=True)
class Tune:
    """A small grid per method, scored on clients that do not train, never on the test set."""

    grid: Mapping[str, list[Tables]]  # method -> points, each a table of config keys
    seed: int = 1000  # of the tuning runs; the results use seeds 0, 1, ...


@dataclass(frozen=True)
class Recipe:
    """A table or figure of the paper: claim, setting, rows x columns of runs, the paper's numbers, metrics to show."""

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
        """Return a preset by name."""
        if name not in self.presets:
            raise unknown(f"preset of {self.name}", name, self.presets)
        return self.presets[name]

    def cells(self, preset: str) -> list[Cell]:
        """Return every cell without results; the row overrides the column, the preset, and the setting."""
        chosen = self.preset(preset)
        found = []
        for row, column in product(chosen.rows or self.rows, chosen.columns or self.columns or ({"name": ""},)):
            setting = column.get("setting", chosen.setting)
            if setting and setting not in (known := _named(preset)):
                raise unknown(f"setting of preset {preset} in recipe {self.name}", setting, known)
            base = merge(settings(preset)[setting] if setting else {}, chosen.set)
            tables = merge(merge(base, _without(column)), _without(row))
            found.append(Cell(row["name"], column["name"], tables=tables, tuned=bool(column.get("tuned"))))
        rivals = tuple(cell.tables["method"] for cell in found if "method" in cell.tables)
        return [replace(cell, rivals=rivals) for cell in found]

    def beginning(self, preset: str, cell: Cell) -> Cell | None:
        """Return the cell whose run has the first rounds of this cell's, in the recipe that the preset continues."""
        other = self.preset(preset).continues
        cells = find_recipe(other).cells(preset) if other else []
        return next((found for found in cells if (found.row, found.column) == (cell.row, cell.column)), None)

    def names(self, preset: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the names of rows and columns."""
        cells = self.cells(preset)
        return tuple(dict.fromkeys(c.row for c in cells)), tuple(dict.fromkeys(c.column for c in cells))

    def cell_names(self, preset: str) -> set[str]:
        """Return the names of the cells, which claims refer to."""
        return {cell_name(cell.row, cell.column) for cell in self.cells(preset)}


def merge(under: Tables, over: Tables) -> Tables:
    """Merge two tables of config keys; `method`, `data` and `model` key by key, unless their name changes.

    Example:
        >>> merge({"lr": 0.1, "method": {"rho": 0.2}}, {"method": {"name": "fedspeed"}})
        {'lr': 0.1, 'method': {'rho': 0.2, 'name': 'fedspeed'}}
    """
    result = dict(under)
    for name, value in over.items():
        below = result.get(name)
        if isinstance(value, dict) and isinstance(below, dict):
            own = below.get("name")
            value = {**below, **value} if own in (None, value.get("name", own)) else value
        result[name] = value
    return result


def run_key(config: Config, digest: str) -> str:
    """Return the key of a run: a digest of config (without its placement), data, and `RESULTS_VERSION`."""
    tables = config.to_dict()
    for name in (*PLACEMENT, "targets"):
        tables.pop(name, None)
    if tables.get("layers") == "plain":  # as the oldest results, which do not say so
        tables.pop("layers")
    for name in tables.keys() - KEYED:  # newer than the oldest stored results
        if tables[name] == getattr(Config, name):
            tables.pop(name)
    given = {"config": tables, "data": digest, "results": RESULTS_VERSION}
    return hashlib.blake2b(json.dumps(given, sort_keys=True).encode(), digest_size=8).hexdigest()


@cache
def settings(preset: str) -> Mapping[str, Any]:
    """Return the named settings of a preset; `paper-main` inherits those of `paper`."""
    found = read_toml(FOLDER / "settings.toml")
    own = {**found.get(preset.partition("-")[0], {}), **found.get(preset, {})}
    if not own:
        raise unknown("preset", preset, found)
    return own


def _named(preset: str) -> list[str]:
    """Return the names of a preset's settings, without what is said about the preset."""
    return [name for name, table in settings(preset).items() if isinstance(table, dict) and "clients" in table]


def papers_scale(preset: str) -> bool:
    """Whether a preset has the paper's own setting: only there the sizes of claims are tested."""
    return bool(settings(preset).get("papers_scale"))


def scale(preset: str) -> str:
    """Return a preset's comparison of its scale with the paper's; "" if it has none."""
    return " ".join(str(settings(preset).get("scale", "")).split())


@cache
def recipes() -> Mapping[str, Recipe]:
    """Return every recipe by name, in order of value."""
    found = [read(path) for path in FOLDER.glob("*.toml") if path.stem not in ("settings", "data")]
    return {recipe.name: recipe for recipe in sorted(found, key=lambda recipe: (recipe.order, recipe.name))}


def find_recipe(name: str) -> Recipe:
    """Return a recipe by name."""
    if name not in recipes():
        raise unknown("recipe", name, recipes())
    return recipes()[name]


def read(path: Path) -> Recipe:
    """Read a recipe's file; unknown keys are errors."""
    given = read_toml(path)
    where = f"recipe {path.stem}"
    presets = given.get("presets", {}).items()
    given["presets"] = {name: Preset(**_known(Preset, table, f"{where}, preset {name}")) for name, table in presets}
    given["claims"] = [Claim(**_known(Claim, table, f"{where}, claim")) for table in given.get("claims", [])]
    if "tune" in given:
        given["tune"] = Tune(**_known(Tune, given["tune"], f"{where}, tune"))
    try:
        return Recipe(path.stem, **_known(Recipe, given, where))
    except TypeError as error:
        raise UserError(f"{where}: {error}; expected title, claim, about and presets") from None


def _known(cls: type, table: Tables, where: str) -> Tables:
    """Return the fields of a class in a table, lists as tuples."""
    names = {f.name for f in fields(cls)}
    for name in table:
        if name not in names:
            raise unknown(f"key of {where}", name, names)
    return {name: tuple(value) if isinstance(value, list) else value for name, value in table.items()}


def _without(table: Tables) -> Tables:
    return {name: value for name, value in table.items() if name not in ("name", "tuned", "setting")}


def trained(preset: str) -> list[Recipe]:
    """Return the recipes of a preset that need runs."""
    return [recipe for recipe in recipes().values() if preset in recipe.presets and recipe.kind == "runs"]


def minutes_of(recipe: Recipe, preset: str) -> float:
    """Return the estimated minutes of a recipe's own runs, those that no earlier recipe of the preset needs."""
    return sum(_own_runs(preset).get(recipe.name, {}).values()) / 60


def runs_of(recipe: Recipe, preset: str) -> int:
    """Return the number of a recipe's own runs."""
    return len(_own_runs(preset).get(recipe.name, {}))


@cache
def _own_runs(preset: str) -> dict[str, dict[str, float]]:
    """Return, for every recipe of a preset, the keys of the runs that it is the first to need, and their seconds."""
    seen: set[str] = set()
    found: dict[str, dict[str, float]] = {}
    for recipe in trained(preset):
        needed = {key: seconds for cell in recipe.cells(preset) for key, seconds in _seconds(recipe, preset, cell)}
        found[recipe.name] = {key: seconds for key, seconds in needed.items() if key not in seen}
        first = [c for cell in recipe.cells(preset) if (c := recipe.beginning(preset, cell)) is not None]
        seen |= needed.keys() | {key for cell in first for key, _ in _seconds(recipe, preset, cell)}
    return found


def _seconds(recipe: Recipe, preset: str, cell: Cell) -> list[tuple[str, float]]:
    """Return key and seconds of every run of a cell, tuning included: pictures times measured seconds per picture."""
    chosen = recipe.preset(preset)
    column = next((c for c in chosen.columns or recipe.columns if c["name"] == cell.column), {})
    measured = settings(preset).get("seconds_per_picture", {})
    each = float(measured.get(column.get("setting", chosen.setting), 0.0))
    configs = [cell.config(seed) for seed in range(chosen.seeds)]
    if cell.tuned and recipe.tune is not None:
        for point in recipe.tune.grid[cell.tables["method"]["name"]]:
            configs.append(replace(cell, tables=merge(merge(cell.tables, chosen.tune), point)).config(recipe.tune.seed))
    return [(run_key(config, ""), each * pictures_of(config)) for config in configs]
