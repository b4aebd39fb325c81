"""Who runs the rounds of a fork that had other settings (`until`): a simulation with those."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from ..config.plan import Plan
from ..methods.base import Method

if TYPE_CHECKING:
    from ..config.config import Config
    from .simulation import Simulation


def sibling(simulation: Simulation, method: Method, plan: Plan, **how: Any) -> Simulation:
    """A simulation of the same model, data and loss, at round 0."""
    flat = simulation.work.flat
    with flat.apart():
        return type(simulation)(method, flat.model, simulation.data, plan, simulation.work.loss, flat.no_decay, **how)


class Segments:
    """Who runs the next round of a simulation: itself, or, in a stretch with other settings, one that has those."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = weakref.ref(simulation)  # one that is let go of takes its workers with it
        self._other: tuple[Config, Simulation] | None = None

    def next(self) -> Simulation:
        """A simulation that stands where this one stands; client states are the same object."""
        simulation = self._simulation()
        assert simulation is not None  # who asks
        config = simulation.plan.earlier(simulation.t)
        if self._other is not None and self._other[0] is not config:
            self.close()
        if config is None:
            return simulation
        if self._other is None:
            shared = {"observers": simulation.observers, "states": simulation.states}
            self._other = config, sibling(simulation, config.method, config, **shared)
            self._other[1].stopping = simulation.stopping  # Its records count the time of the whole run.
        other = self._other[1]
        other.restore(simulation.t, simulation.server, simulation.elapsed)
        return other

    def close(self) -> None:
        """Stop what an earlier stretch had started."""
        if self._other is not None:
            self._other[1].backend.close()
            self._other = None
