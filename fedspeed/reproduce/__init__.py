"""The reproduction of the paper: the runs that recipes need, those that are missing, and the sheets they fill."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cached_property, reduce
from itertools import product
from pathlib import Path

from ..config.config import Config
from ..errors import UserError
from ..runs.config_file import WITHOUT_BLOCKS
from ..utils.files import read_toml
from .recipes import FOLDER, Recipe, find_recipe, merge, papers_scale, run_key, scale, trained
from .runs import Run, Store, fact, of_data, of_split
from .table import Cell, Sheet, Tables, cell_name

Wanted = Callable[[Cell], bool]


def data_digest(name: str) -> tuple[str, bool]:
    """Return the SHA-256 of a data set's arrays, and whether it is on this machine. Nothing is fetched."""
    from ..data import read
    from ..data.fetch import cache_dir

    if name == "digits":  # part of the package
        return read(name).digest(), True
    about = cache_dir() / name / "about.json"
    known = read_toml(FOLDER / "data.toml").get(name, "")
    if not about.exists():
        return known, False
    found: str = json.loads(about.read_text("utf-8"))["sha256"]
    if known and found != known:
        raise UserError(f"data {name}: expected the published set (SHA-256 {known[:12]}...), found {found[:12]}... in "
                        f"{about.parent}; delete that folder and fetch it again")  # fmt: skip
    return found, True


class Reproduction:
    """One preset of the suite: the runs that recipes need, the stored results, and the sheets they fill.

    Args:
        preset: the scale: paper, cnn, mlp, smoke, ...
        seeds: the number of seeds; None for the recipe's own number.
        overrides: config keys that replace those of every run, for example `{"device": "cuda"}`.
    """

    def __init__(self, preset: str, out: Path, seeds: int | None = None, overrides: Tables | None = None) -> None:
        self.preset = preset
        self.store = Store(out)
        self.seeds = seeds
        self.overrides = overrides or {}
        self._digests: dict[str, tuple[str, bool]] = {}

    def runs(self, recipe: Recipe, wanted: Wanted = lambda cell: True) -> list[Run]:
        """Return every run of a recipe that can be made, each once; those of `tuned` cells once their grid is done.

        The longest run is first, so that parallel runs end together; or runs are in the preset's order, by column.
        """
        found = {}
        columns = recipe.names(self.preset)[1]
        for cell in sorted(filter(wanted, recipe.cells(self.preset)), key=lambda cell: columns.index(cell.column)):
            for run in (self._run(recipe, cell, seed) for seed in self._seeds(recipe)):
                if run is not None and self.available(run.config.data.name):
                    found[run.key] = run
        listed = list(found.values())
        return listed if recipe.preset(self.preset).in_order else sorted(listed, key=lambda run: -run.cost)

    def grid(self, recipe: Recipe, wanted: Wanted = lambda cell: True) -> list[Run]:
        """Return the tuning runs of a recipe's `tuned` cells."""
        tuned = [cell for cell in filter(wanted, recipe.cells(self.preset)) if cell.tuned]
        return list({run.key: run for cell in tuned for _, run in self._points(recipe, cell)}.values())

    def missing(self, runs: list[Run]) -> list[Run]:
        """Return the runs without a stored result."""
        return [run for run in runs if self.store.get(run.key, run.measure) is None]

    def kept(self) -> list[tuple[Recipe, Run]]:
        """Return finished runs whose directories are kept, each with the recipe whose runs continue them."""
        runs = [(recipe, run.first) for recipe in trained(self.preset) for run in self.runs(recipe) if run.first]
        return [pair for pair in runs if self.store.get(pair[1].key) and (self.store.work / pair[1].key).exists()]

    def sheet(self, recipe: Recipe) -> Sheet:
        """Return the sheet of a recipe, filled with the stored results."""
        rows, columns = recipe.names(self.preset)
        cells = {cell_name(cell.row, cell.column): cell for cell in self._cells(recipe)}
        chosen = recipe.preset(self.preset)
        partial = any(cell.tables.get("data", {}).get("part") for cell in recipe.cells(self.preset))
        return Sheet(
            name=recipe.name, title=recipe.title, claim=recipe.claim, paper=recipe.paper,
            about=recipe.about + self._chosen(recipe), preset=self.preset,
            metric=chosen.metric or recipe.metric, show=chosen.show or recipe.show,
            targets=chosen.targets or recipe.targets, rows=rows, columns=columns, cells=cells,
            values=dict(recipe.values), seeds=len(self._seeds(recipe)), figure=recipe.figure,
            curves=(recipe.curve,) if isinstance(recipe.curve, str) else recipe.curve,
            partial=partial, papers_scale=papers_scale(self.preset), printed=recipe.printed,
            scale=scale(self.preset) if recipe.kind == "runs" else "",
        )  # fmt: skip

    def _cells(self, recipe: Recipe) -> Iterator[Cell]:
        """Yield the cells with their results, and a note where some are missing. The same on every machine."""
        for cell in recipe.cells(self.preset):
            if recipe.kind != "runs":
                yield self._fact(recipe, cell)
                continue
            wanted = [self._run(recipe, cell, seed) for seed in self._seeds(recipe)]
            results = tuple(r for run in wanted if run is not None and (r := self.store.get(run.key)) is not None)
            note = f"{len(results)} of {len(wanted)} seeds run" if len(results) < len(wanted) else ""
            yield replace(cell, results=results, note=note)

    def _chosen(self, recipe: Recipe) -> str:
        """Return the chosen points of the grids as a sentence."""
        found = {cell.row: self.best(recipe, cell) for cell in recipe.cells(self.preset) if cell.tuned}
        taken = [f"{row} {json.dumps(point).replace(chr(34), '')}" for row, point in found.items() if point is not None]
        return f" Points taken: {'; '.join(taken)}." if taken else ""

    def _fact(self, recipe: Recipe, cell: Cell) -> Cell:
        """Return a filled cell of a `data` or `split` recipe; its column names the number."""
        if not self.available(cell.tables["data"]["name"]):
            return replace(cell, note="not run: data unavailable")
        counted = [of_data(cell) if recipe.kind == "data" else of_split(cell, seed)[0] for seed in self._seeds(recipe)]
        return replace(cell, results=tuple(fact(found[cell.column], seed) for seed, found in enumerate(counted)))

    def available(self, name: str) -> bool:
        """Whether a data set is on this machine."""
        return self._data(name)[1]

    def best(self, recipe: Recipe, cell: Cell) -> Tables | None:
        """Return the grid point with the best score on the held-out clients; None while the grid is not done."""
        scored = [(self.store.get(run.key), point) for point, run in self._points(recipe, cell)]
        if any(result is None for result, _ in scored):
            return None
        return max(scored, key=lambda pair: (pair[0] and pair[0]["final"]["accuracy"]) or 0.0)[1]

    def _points(self, recipe: Recipe, cell: Cell) -> list[tuple[Tables, Run]]:
        tune = recipe.tune
        name = cell.tables["method"]["name"]
        changes = recipe.preset(self.preset).tune
        if tune is None or name not in tune.grid or not changes.get("data", {}).get("held_out"):
            raise UserError(
                f"recipe {recipe.name}: a tuned cell needs a grid for {name} in [tune.grid], and data.held_out clients "
                f"in the preset's tune"
            )
        keyed = [(point, *self._keyed(cell, tune.seed, changes, point)) for point in tune.grid[name]]
        return [(point, Run(key, f"tuning {name}", config)) for point, key, config in keyed]

    def _run(self, recipe: Recipe, cell: Cell, seed: int) -> Run | None:
        point = self.best(recipe, cell) if cell.tuned else {}
        if point is None:
            return None
        key, config = self._keyed(cell, seed, point)
        label = " ".join(part for part in (recipe.name, cell.row, cell.column, f"seed {seed}") if part)
        before = recipe.beginning(self.preset, cell)
        first = self._run(find_recipe(recipe.preset(self.preset).continues), before, seed) if before else None
        if first is not None and first.key == key:  # `--set` made them the same run
            first = None
        return Run(key, label, config, self._measures.get(key, ()), first, key in self._to_continue)

    @cached_property
    def _to_continue(self) -> set[str]:
        """The keys of the runs that a run without a result continues."""
        found: set[str] = set()
        for recipe in (recipe for recipe in trained(self.preset) if recipe.preset(self.preset).continues):
            for cell, seed in product(recipe.cells(self.preset), self._seeds(recipe)):
                before, later = recipe.beginning(self.preset, cell), self._keyed(cell, seed)[0]
                if before is not None and self.store.get(later) is None:
                    found |= {self._keyed(before, seed)[0]} - {later}
        return found

    @cached_property
    def _measures(self) -> dict[str, tuple[str, ...]]:
        """The measures that any recipe of the preset needs, by run key: recipes share runs."""
        found: dict[str, tuple[str, ...]] = {}
        for recipe in (recipe for recipe in trained(self.preset) if recipe.measure):
            for cell, seed in product(recipe.cells(self.preset), self._seeds(recipe)):
                key, _ = self._keyed(cell, seed)
                found[key] = tuple(dict.fromkeys((*found.get(key, ()), *recipe.measure)))
        return found

    def _keyed(self, cell: Cell, seed: int, *changes: Tables) -> tuple[str, Config]:
        """Return key and config of a run of a cell, with changes and then the overrides."""
        config = replace(cell, tables=reduce(merge, (*changes, self.overrides), cell.tables)).config(seed)
        if config.data.name != (own := cell.tables["data"]["name"]):
            raise UserError(
                f"preset {self.preset}: expected its own data, {own}, found {config.data.name}; omit data.name, or "
                f"train on other data with `fedspeed run --data {config.data.name}`"
            )
        if config.layers == "auto" and config.model.name not in WITHOUT_BLOCKS:
            if "layers" in self.overrides:
                raise UserError(
                    f"preset {self.preset}: expected layers plain or compiled, which the key of a result names, found "
                    f"auto, which is either; omit layers, or choose one of them"
                )
            config = replace(config, layers="plain")  # A key stands for one arithmetic, whatever the machine has.
        return run_key(config, self._data(config.data.name)[0]), config

    def _data(self, name: str) -> tuple[str, bool]:
        if name not in self._digests:
            self._digests[name] = data_digest(name)
        return self._digests[name]

    def _seeds(self, recipe: Recipe) -> range:
        return range(self.seeds or recipe.preset(self.preset).seeds)
