"""Standing where a run stood, in a folder of one's own: what `verify`, `fork` and `replay` share. It is only read."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from .illness import UNTRAINED
from .record import TIMES, Record, older
from .rundir import ROUNDS, RunDir
from .states import DiskStates
from .tree_bytes import read_state

if TYPE_CHECKING:
    from .manifest import Saved
    from .server import Simulation


def nearest(run: RunDir, t: int) -> Saved | None:
    """The newest checkpoint of no more than t rounds, its files checked; None where there is none."""
    from .checkpoint import Checkpoints

    checkpoints = Checkpoints(run.path)
    found = [path for path in checkpoints.manifests() if int(path.stem) <= t]
    return checkpoints.read(found[0]) if found else None


def stand(run: RunDir, saved: Saved, simulation: Simulation, records: list[Record]) -> None:
    """Put a simulation of a run where its checkpoint stands. States that have files are read where they are, and
    written into the simulation's own folder."""
    if isinstance(simulation.states, DiskStates):
        simulation.states.folder.mkdir(parents=True, exist_ok=True)
        for i, entry in saved.entries.items():
            if entry.digest:
                where = run.state_path(i, entry.generation)
                os.symlink(where.resolve(), simulation.states.path(i, entry.generation))
    simulation.states.restore(saved, simulation.work.hooks.init_client(simulation.x0))
    elapsed = records[saved.t - 1].virtual_seconds if 0 < saved.t <= len(records) else None
    simulation.restore(saved.t, read_state(saved.server, simulation.server), elapsed)


def unlike(again: Record, before: Record | None) -> list[str]:
    """How a round that was run again differs from its record."""
    if before is None:
        return [f"round {again.round} is missing in {ROUNDS}"]
    new = (again if "x_norm" in before.metrics else older(again)).to_dict()
    old = before.to_dict()
    if any(sign.startswith(UNTRAINED[1]) for sign in before.signs):  # of a version that judged weights by another rule
        for plain in (new, old):
            plain["signs"] = {
                sign: value for sign, value in plain.get("signs", {}).items() if not sign.startswith(UNTRAINED)
            }
    return [
        f"round {again.round}: {key} is {old.get(key)!r} in {ROUNDS}, run again it is {new.get(key)!r}"
        for key in new | old
        if key not in TIMES and old.get(key) != new.get(key) and (key != "signs" or key in old)  # older runs have none
    ]
