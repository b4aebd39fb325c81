"""Simulated time: how long a round would take on a given network with given devices. It changes no result.

The slowest client whose reply is counted decides the round, and the rounds add up (docs/guides/simulated-time.md):

    latency + bytes down / download rate + flops / (REFERENCE * speed of its device) + bytes up / upload rate

Client i has the same device in every round: a function of the seed and i alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate

from ..errors import UserError, unknown
from ..record import Record
from ..utils.checked_fields import number, parse_pairs
from ..utils.files import key

REFERENCE = 1e10
"""Floating-point operations per second of a device of speed 1, in training."""

MEGABIT = 125_000
"""Bytes per megabit."""


@dataclass(frozen=True)
class Network:
    """A client's connection: rates in Mbit/s, the latency of a round trip in ms."""

    up: float
    down: float
    latency: float


NETWORKS = {"lte": Network(10, 30, 50), "wifi": Network(50, 100, 10), "fibre": Network(500, 1000, 5)}

Mix = tuple[tuple[float, float], ...]
"""(speed, share of the clients) of each kind of device; the shares add up to 1."""

DEVICES: dict[str, Mix] = {
    "uniform": ((1.0, 1.0),),
    "phones": ((2.0, 0.2), (1.0, 0.5), (0.25, 0.3)),
    "lab": ((10.0, 0.75), (100.0, 0.25)),
}


def parse_network(text: str) -> Network:
    """Read a name of `NETWORKS`, or numbers for all of its fields.

    Example:
        >>> parse_network("up=5,down=20,latency=80")
        Network(up=5.0, down=20.0, latency=80.0)
    """
    if text in NETWORKS:
        return NETWORKS[text]
    if "=" not in text:
        raise unknown("network", text, [*NETWORKS, "up=..,down=..,latency=.."])
    pairs = parse_pairs(text)
    given = {name: number(value) for name, value in pairs}
    if sorted(given) != ["down", "latency", "up"] or len(pairs) != 3:
        raise UserError(f"network: expected up, down and latency once each, such as {_EXAMPLE}, found {text!r}")
    if not (given["up"] >= 1e-6 and given["down"] >= 1e-6 and 0 <= given["latency"] <= 1e9):
        raise UserError(
            f"network: expected rates of at least 1e-6 Mbit/s and a latency of 0 to 1e9 ms, such as {_EXAMPLE}, "
            f"found {text!r}"
        )
    return Network(**given)


_EXAMPLE = "up=10,down=30,latency=50"


def parse_devices(text: str) -> Mix:
    """Read a name of `DEVICES`, or `SPEEDxSHARE` for each kind.

    Example:
        >>> parse_devices("1x0.5,4x0.5")
        ((1.0, 0.5), (4.0, 0.5))
    """
    if text in DEVICES:
        return DEVICES[text]
    if not any(sign.isdigit() for sign in text):
        raise unknown("mix of devices", text, [*DEVICES, "SPEEDxSHARE,.."])
    pairs = [part.partition("x") for part in text.split(",")]
    mix = tuple((number(speed), number(share)) for speed, _, share in pairs)
    whole = math.isclose(sum(share for _, share in mix), 1.0, abs_tol=1e-6)
    if not whole or not all(1e-6 <= speed <= 1e6 and share > 0 for speed, share in mix):
        raise UserError(
            f"devices: expected SPEEDxSHARE,.. with speeds from 1e-6 to 1e6 and shares that add up to 1, such as "
            f"1x0.5,4x0.5, found {text!r}"
        )
    return mix


class Clock:
    """A clock that times rounds by their records.

    Args:
        network, devices: as `parse_network` and `parse_devices` take them.
        seed: the run's, which decides which client has which device.

    Example:
        >>> Clock("up=8,down=8,latency=100", "0.5x1", seed=0).client(3, 1_000_000, 10**10, 2_000_000)
        5.1
    """

    def __init__(self, network: str, devices: str = "uniform", seed: int = 0) -> None:
        self.network = parse_network(network)
        self.mix = parse_devices(devices)
        self.seed = seed
        self.speed = cache(self._speed)

    def _speed(self, client: int) -> float:
        """Return the speed of a client's device."""
        drawn = key(self.seed, "device", client) % 2**53 / 2**53
        below = accumulate(share for _, share in self.mix)
        return next((speed for (speed, _), end in zip(self.mix, below, strict=True) if drawn < end), self.mix[-1][0])

    def client(self, client: int, down: float, flops: float, up: float) -> float:
        """Return the seconds of one client's turn from the bytes it receives, its operations and the bytes it sends."""
        net = self.network
        sending = down / (net.down * MEGABIT) + up / (net.up * MEGABIT)
        return net.latency / 1000 + sending + flops / (REFERENCE * self.speed(client))

    def round(self, record: Record) -> float:
        """Return the seconds of a round: those of the slowest client whose reply was counted."""
        return max(self.turns(record))

    def turns(self, record: Record) -> list[float]:
        """Return the seconds of each client whose reply was counted, in the order of the cohort."""
        lost = set(record.dropped)
        counted = [i for i in record.cohort if i not in lost]
        down = record.bytes_down / len(record.cohort)
        turns = zip(counted, record.client_flops, record.client_bytes_up, strict=True)
        return [self.client(i, down, flops, up) for i, flops, up in turns]

    def rounds(self, records: Sequence[Record]) -> Iterator[float]:
        """Yield the seconds from the start of a run to the end of each of its rounds."""
        return accumulate(self.round(record) for record in records)
