"""The runs of recipes side by side: each is made or taken up again, packed and stored."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from .. import pool
from ..errors import UserError
from ..observe import Observer
from .recipes import Tables
from .records import Order, carry_out
from .store import Store

if TYPE_CHECKING:
    from ..record import Record
    from ..server import Simulation


def make(
    orders: list[Order],
    store: Store,
    jobs: int,
    on_round: Callable[[Order, int], None],
    on_done: Callable[[Tables], None],
) -> None:
    """Make runs, `jobs` at a time in processes of their own; a run that was stopped goes on from its checkpoint.

    Args:
        on_round: called with the order and how many of its rounds are done.
        on_done: called with the record of every run that is finished, which is stored by then.
    """

    def keep(_: Order, record: Tables) -> None:
        store.put(record)
        on_done(record)

    def stop(order: Order, told: str) -> None:
        raise UserError(f"{order.label}: {told}")

    pool.carry_out(orders, partial(_work, store.work), jobs, on_told=on_round, on_done=keep, on_failed=stop)


def _work(place: Path, order: Order, tell: pool.Tell) -> Tables:
    return carry_out(order, place / order.key, _Watch(tell))


class _Watch(Observer):
    """Tells how many rounds are done."""

    def __init__(self, tell: pool.Tell) -> None:
        self.tell = tell

    def round(self, record: Record, run: Simulation) -> None:
        self.tell(record.round)
