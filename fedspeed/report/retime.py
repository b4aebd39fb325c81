"""Finished runs with simulated time for another network or other devices."""

from __future__ import annotations

import struct
from dataclasses import replace

from ..config.network import Clock
from ..errors import UserError
from ..record import Record
from .run_files import VIRTUAL, RunFiles


def costed(run: RunFiles, network: str = "", devices: str = "") -> RunFiles:
    """Return a run with simulated time for another network or other devices; "" keeps its own."""
    lacking = UserError(
        f"{run.path}: expected rounds that say what every client computed and sent, found none; only a run made "
        f"with --network can be timed for another: run it again with one, its results stay the same"
    )
    if not run.config.get("network"):
        raise lacking
    network, devices = network or str(run.config["network"]), devices or str(run.config.get("devices", "uniform"))
    clock = Clock(network, devices, int(run.summary["seed"]))
    try:
        times = clock.rounds([Record.from_dict(plain) for plain in run.rounds])
        rounds = [{**plain, VIRTUAL: time} for plain, time in zip(run.rounds, times, strict=True)]
    except (TypeError, ValueError, ArithmeticError, struct.error):
        raise lacking from None
    return replace(run, rounds=rounds, config={**run.config, "network": network, "devices": devices})
