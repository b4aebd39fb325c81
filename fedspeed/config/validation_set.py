"""The setting `validation`: the part of the training data that is set aside to choose rounds and settings on."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..errors import UserError


@dataclass(frozen=True)
class Validation:
    """A fraction of every client's rows, or (`of_clients`) a share or a number of clients that then do not train.

    Example:
        >>> parse_validation("0.1").count(25), parse_validation("clients:5").count(100)
        (3, 5)
    """

    amount: float | int
    of_clients: bool = False

    def count(self, n: int) -> int:
        """Return how many of n rows or clients: rounded, halves up; at least one always stays for training."""
        wanted = self.amount if isinstance(self.amount, int) else math.floor(self.amount * n + 0.5)
        if self.of_clients and not 0 < wanted < n:
            raise UserError(
                f"validation: expected 1 to {n - 1} of {n} clients, found clients:{self.amount}, which is {wanted}"
            )
        return min(wanted, n - 1)


def parse_validation(spec: str | float) -> Validation:
    """Read `0.1`, `"clients:0.1"` or `"clients:5"`; raise for anything else."""
    kind, colon, amount = str(spec).strip().rpartition(":")
    try:
        value: float | int = int(amount) if kind and amount.strip().isdigit() else float(amount)
    except ValueError:
        value = math.nan
    good = value >= 1 if isinstance(value, int) else 0 < value < 1
    if not good or kind not in ("", "clients") or bool(colon) != bool(kind) or isinstance(spec, bool):
        raise UserError(
            "validation: expected 0.1 (that fraction of every client's samples), clients:0.1 or clients:5 (that many "
            f"clients, who do not train), found {spec!r}"
        )
    return Validation(value, bool(kind))


def clients_that_train(spec: str, clients: int) -> int:
    """Return how many of the clients are left to train; 0 if their number is not known yet.

    Example:
        >>> clients_that_train("clients:0.1", 50), clients_that_train("0.1", 50), clients_that_train("clients:5", 0)
        (45, 50, 0)
    """
    chosen = parse_validation(spec)
    return clients - chosen.count(clients) if clients and chosen.of_clients else clients
