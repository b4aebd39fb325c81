"""Segments of a fork: the rounds before it had other settings (`until`), and a sibling with those computes them."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from ..config.plan import Plan
from ..methods.base import Method

if TYPE_CHECKING:
    from ..config.config import Config
    from .simulation import Simulation


def sibling(simulation: Simulation, method: Method, plan: Plan, **how: Any) -> Simulation:
    """Return a simulation of the same model, data and loss, at round 0."""
    flat = simulation.work.flat
    with flat.detached():
        return type(simulation)(method, flat.model, simulation.data, plan, simulation.work.loss, flat.no_decay, **how)


class Segments:
    """The choice of the simulation that computes a round: the run's own, or a sibling with the segment's settings."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = weakref.ref(simulation)  # weak: a dropped simulation must stop its workers
        self._other: tuple[Config, Simulation] | None = None

    def next(self) -> Simulation:
        """Return the simulation for the next round, at the run's present state; client states are shared."""
        simulation = self._simulation()
        assert simulation is not None
        config = simulation.plan.config_at(simulation.t)
        if self._other is not None and self._other[0] is not config:
            self.close()
        if config is None:
            return simulation
        if self._other is None:
            made = sibling(simulation, config.method, config, observers=simulation.observers, states=simulation.states)
            made.stopping = simulation.stopping  # Its records count the time of the whole run.
            made.cohort = simulation.cohort  # It is the same in all rounds, and knows all of them.
            self._other = config, made
        other = self._other[1]
        other.restore(simulation.t, simulation.server, simulation.elapsed)
        return other

    def close(self) -> None:
        """Stop the workers of an earlier segment."""
        if self._other is not None:
            self._other[1].backend.close()
            self._other = None
