"""Flower's simulation runtime (Ray): FedAvg, two actors of one CPU and one thread each.

python -m benchmarks.contenders.peer_flower WORKLOAD [--active N] [--epochs N]
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterable
from typing import Any

os.environ.update(FLWR_TELEMETRY_ENABLED="0", RAY_USAGE_STATS_ENABLED="0", RAY_DEDUP_LOGS="0")

from flwr.app import ArrayRecord, Context, Message
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

from .. import stock
from ..protocol import Turns
from ..workloads import CORES, Workload, add_workload, asked, load
from .flower_client import app

NEVER = 10**9


class Stop(Exception):
    """Exception that leaves Flower's loop."""


class OnCommand(FedAvg):
    """FedAvg that begins a round when asked to; the clock runs from choosing the clients to the new average."""

    def __init__(self, turns: Turns, **options: Any) -> None:
        super().__init__(**options)
        self.turns = turns

    def configure_train(self, *args: Any) -> Iterable[Message]:
        """Wait for the round, then let Flower choose the clients."""
        if not self.turns.wait():
            raise Stop
        return super().configure_train(*args)

    def aggregate_train(self, *args: Any) -> Any:
        """Aggregate the replies, the last part of a round."""
        aggregated = super().aggregate_train(*args)
        self.latest = aggregated[0]
        self.turns.done()
        return aggregated


def server(workload: Workload) -> ServerApp:
    """Return a server app that runs rounds on command."""
    server_app = ServerApp()
    net, arrays = stock.build(workload.model), load(workload)

    @server_app.main()
    def main(grid: Grid, context: Context) -> None:
        strategy: OnCommand

        def check() -> float:
            net.load_state_dict(strategy.latest.to_torch_state_dict())
            return stock.accuracy(net, arrays)

        strategy = OnCommand(
            Turns(check, parameters=stock.count(net)),
            fraction_train=workload.active / workload.clients,
            fraction_evaluate=0.0,
            min_train_nodes=workload.active,
            min_available_nodes=workload.clients,
        )
        strategy.start(grid=grid, initial_arrays=ArrayRecord(net.state_dict()), num_rounds=NEVER)

    return server_app


def main() -> None:
    """Run Flower's loop, held back by the strategy."""
    parser = argparse.ArgumentParser()
    add_workload(parser)
    args = parser.parse_args()
    workload = asked(args)
    files = tempfile.mkdtemp(prefix="ray-")
    resources = {"num_cpus": 1, "num_gpus": 0.0}
    init = {"num_cpus": CORES, "num_gpus": 0, "include_dashboard": False, "_temp_dir": files}
    try:
        with contextlib.suppress(Stop):
            run_simulation(
                server(workload),
                app(workload),
                num_supernodes=workload.clients,
                backend_config={"client_resources": resources, "init_args": init},
            )
    finally:
        shutil.rmtree(files, ignore_errors=True)


if __name__ == "__main__":
    main()
