"""Scores of models on every client's data, and their file, which grows round by round.

The file is a line of JSON (the columns, the data they were measured on, and the number of samples per client), then
blocks of one size: the round (int64), then a float32 per column and client, little-endian. It needs no torch.
`statistics` are the same scores in a few numbers, which are part of a round's record.
"""

from __future__ import annotations

import hashlib
import json
import math
from typing import Any, NamedTuple

import numpy as np

FORMAT = 1
SERVER, OWN = ("loss", "accuracy"), ("own_loss", "own_accuracy")
PERSONALISED = ("personalised_loss", "personalised_accuracy")
COLUMNS = ([*SERVER], [*SERVER, *OWN], [*SERVER, *PERSONALISED], [*SERVER, *OWN, *PERSONALISED])
ON = ("train", "test")
"""The data of a client that are scored: those it trains on, or a test part of its own."""
TENTH = 0.1
"""The share of the clients that are the worst, or the best, in `statistics`."""


class ClientMetrics(NamedTuple):
    """Scores of some rounds (rows) and of every client (columns); NaN where there is none.

    Accuracies are NaN where outputs are not a score per class; scores that were not asked for are None.
    """

    rounds: np.ndarray  # (rounds,), 1 is the first
    samples: np.ndarray  # (clients,), the number of samples that are scored
    loss: np.ndarray  # (rounds, clients), of the server's model after the round
    accuracy: np.ndarray
    own_loss: np.ndarray | None = None  # of a client's own model at the end of its turn; NaN if its reply was lost
    own_accuracy: np.ndarray | None = None
    on: str = "train"  # the data of a client that were used, `train` or `test`
    personalised_loss: np.ndarray | None = None  # of the server's model after some local steps of the client
    personalised_accuracy: np.ndarray | None = None

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of the columns of scores."""
        asked = [pair for pair in (OWN, PERSONALISED) if getattr(self, pair[0]) is not None]
        return sum(asked, SERVER)

    def header(self) -> bytes:
        """Return the first line of the file."""
        about = {"format": FORMAT, "on": self.on, "columns": self.columns, "samples": self.samples.tolist()}
        return json.dumps(about).encode() + b"\n"

    def blocks(self) -> bytes:
        """Return the rounds as the bytes of the file."""
        found = np.empty(len(self.rounds), _block(self.columns, len(self.samples)))
        found["round"] = self.rounds
        with np.errstate(over="ignore"):  # A loss beyond float32 becomes infinite.
            for name in self.columns:
                found[name] = getattr(self, name)
        return found.tobytes()

    def some(self, chosen: np.ndarray) -> ClientMetrics:
        """Return the rounds that a mask chooses."""
        return self._replace(rounds=self.rounds[chosen], **{name: getattr(self, name)[chosen] for name in self.columns})

    def rows(self) -> list[dict[str, Any]]:
        """Return one row per round and client, for example for `pandas.DataFrame`."""
        scores = {name: getattr(self, name).tolist() for name in self.columns}
        return [
            {"round": t, "client": i, "samples": n, **{name: scores[name][r][i] for name in scores}}
            for r, t in enumerate(self.rounds.tolist())
            for i, n in enumerate(self.samples.tolist())
        ]

    def statistics(self) -> dict[str, float]:
        """Return the last round in a few numbers per column, each client counted once, clients without a score not.

        `_mean`; `_weighted`, the mean weighted by the samples that were scored; `_sd`, the standard deviation over
        clients; `_worst10` and `_best10`, the means over the worst and the best tenth of the clients; the quantiles
        `_q10`, `_median` and `_q90`; and the number of `clients`.

        Example:
            >>> one = ClientMetrics(np.array([1]), np.ones(4), np.ones((1, 4)), np.array([[0.5, 1, 0, math.nan]]))
            >>> found = one.statistics()
            >>> found["clients"], found["accuracy_mean"], found["accuracy_worst10"], found["accuracy_median"]
            (4, 0.5, 0.0, 0.5)
        """
        found: dict[str, float] = {}
        for column in self.columns:
            with np.errstate(over="ignore", invalid="ignore"):
                values = getattr(self, column)[-1].astype(np.float32).astype(np.float64)  # as in the file
                known = np.flatnonzero(~np.isnan(values))
                if not column.endswith("accuracy"):
                    found[f"{column.removesuffix('loss')}clients"] = len(known)
                if len(known):
                    numbers = _statistics(values[known], self.samples[known], column.endswith("accuracy"))
                    found |= {f"{column}_{name}": value for name, value in numbers.items()}
        return found

    def digest(self) -> str:
        """Return the digest of the file that holds exactly these scores."""
        return hashlib.blake2b(self.header() + self.blocks(), digest_size=16).hexdigest()


def parse(content: bytes) -> ClientMetrics:
    """Return the scores of a file, up to a block that was cut off or is not of a later round.

    Raises ValueError for a file of another kind.

    Example:
        >>> one = ClientMetrics(np.array([10]), np.array([5, 7]), np.array([[0.5, 2]]), np.array([[1, 0.25]]))
        >>> parse(one.header() + one.blocks() + one.blocks()[:9]).loss.tolist()
        [[0.5, 2.0]]
    """
    start = content.find(b"\n") + 1
    try:
        about = dict(json.loads(content[:start]))
    except (ValueError, TypeError, RecursionError):
        raise ValueError("expected a line of JSON first") from None
    samples, columns, on = about.get("samples"), about.get("columns"), about.get("on")
    if about.get("format") != FORMAT:
        raise ValueError(f"expected format {FORMAT}, found {str(about.get('format'))[:40]!r}")
    if columns not in COLUMNS or on not in ON:
        raise ValueError(f"expected columns and data by name, found {str(columns)[:80]} on {str(on)[:40]!r}")
    if not isinstance(samples, list) or not samples or not all(type(n) is int and 0 <= n < 2**53 for n in samples):
        raise ValueError("expected a number of samples per client")
    block = _block(columns, len(samples))
    found = np.frombuffer(content, block, (len(content) - start) // block.itemsize, start)
    found = found[np.logical_and.accumulate(np.diff(found["round"], prepend=0) > 0)]
    rounds = found["round"].astype(np.int64)
    values = {name: found[name].astype(np.float32) for name in columns}
    return ClientMetrics(rounds, np.array(samples, np.int64), **values, on=on)


def _statistics(values: np.ndarray, samples: np.ndarray, high_is_good: bool) -> dict[str, float]:
    """Return the statistics of scores; sums are exact, so that no order of addition fixes their bits."""
    n, order = len(values), np.sort(values)
    some = max(1, math.floor(TENTH * n + 0.5))
    mean = math.fsum(values) / n
    low, high = math.fsum(order[:some]) / some, math.fsum(order[-some:]) / some
    q10, median, q90 = np.quantile(order, (0.1, 0.5, 0.9)).tolist()
    return {
        "mean": mean,
        "weighted": math.fsum(values * samples) / int(samples.sum()),
        "sd": math.sqrt(math.fsum((values - mean) ** 2) / n),
        "worst10": low if high_is_good else high,
        "best10": high if high_is_good else low,
        "q10": q10,
        "median": median,
        "q90": q90,
    }


def _block(columns: list[str] | tuple[str, ...], clients: int) -> np.dtype[np.void]:
    return np.dtype([("round", "<i8"), *((name, "<f4", (clients,)) for name in columns)])
