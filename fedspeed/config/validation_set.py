"""The settings `validation` and `client_test`: parts of the training data that are set aside before training.

The first is one set, to choose rounds and settings on; the second is a test part per client.
"""

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


OWN_TEST = "own"
"""The value of `client_test` for data that come with a test part per client."""


def parse_client_test(spec: str | float) -> Validation | None:
    """Read `0.2`, that share of every client's rows, or `"own"`, for which None is returned; raise for anything else.

    Example:
        >>> parse_client_test("0.2").count(25), parse_client_test(0.2).count(1), parse_client_test("own")
        (5, 0, None)
    """
    if str(spec).strip() == OWN_TEST:
        return None
    try:
        share = math.nan if isinstance(spec, bool) else float(spec)
    except (TypeError, ValueError):
        share = math.nan
    if not 0 < share < 1:
        raise UserError(
            "client_test: expected a share between 0 and 1 such as 0.2 (of every client's samples), or own (the test "
            f"part per client that the data come with), found {spec!r}"
        )
    return Validation(share)


def clients_that_train(spec: str, clients: int) -> int:
    """Return how many of the clients are left to train; 0 if their number is not known yet.

    Example:
        >>> clients_that_train("clients:0.1", 50), clients_that_train("0.1", 50), clients_that_train("clients:5", 0)
        (45, 50, 0)
    """
    chosen = parse_validation(spec)
    return clients - chosen.count(clients) if clients and chosen.of_clients else clients
