"""fedspeed itself: `simulate`, a round at a time, evaluation off.

python -m benchmarks.contenders.ours WORKLOAD METHOD [--active N] [--epochs N] [--backend NAME] [--settings authors]
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import fedspeed
from fedspeed.methods.scaffold import Scaffold

from .. import arrays, stock
from ..protocol import serve
from ..workloads import CORES, Workload, add_workload, asked, load

METHODS = {
    "fedavg": fedspeed.FedAvg(),
    "fedspeed": fedspeed.FedSpeed(),
    "fedspeed-quarter": fedspeed.FedSpeed(ascent_fraction=0.25),
    "scaffold": Scaffold(),
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "resnet18_gn": ("resnet18_gn", {"trim": True}),  # the same function without taps that meet no pixel
    "cnn": ("cnn", {"widths": (32, 64, 128), "padding": 0}),
    "mlp": ("mlp", {"hidden": (64,)}),
}
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "authors": {"augment": "released", "weight_decay": 1e-3, "clip": 10.0, "clip_mode": "released"},
}
"""What a local step has besides the gradient: nothing, as in the bare loops, or all that the authors' loop has."""
NEVER = 10**7


@contextmanager
def nodes(backend: str) -> Iterator[dict[str, Any]]:
    """Yield the settings of a back end that needs some: for Ray a cluster of three nodes on this machine, the driver's
    without a worker, so that everything travels from node to node."""
    if backend != "ray":
        yield {}
        return
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    for _ in range(CORES):
        cluster.add_node(num_cpus=1)
    try:
        yield {"ray_address": cluster.address}
    finally:
        cluster.shutdown()


def start(
    workload: Workload, method: str, backend: str = "", augment: str = "none", **settings: Any
) -> fedspeed.Simulation:
    """Return the simulation: the engine by the package's own rule, worker processes where it is the loop."""
    data = arrays.federated(workload, augment)
    settings = {"weight_decay": 0.0, **settings}
    name, options = MODELS[workload.model]
    model = fedspeed.build_model(name, data, **options)
    return fedspeed.simulate(
        METHODS[method],
        model,
        data,
        rounds=NEVER,
        eval_every=NEVER,
        active=workload.active,
        local_epochs=workload.epochs,
        batch_size=workload.batch,
        lr=workload.lr,
        lr_decay=1.0,
        device="cpu",
        engine="auto",
        backend=backend or ("auto" if workload.model == "mlp" else "process"),
        workers=CORES,
        **settings,
    )


def main() -> None:
    """Serve rounds."""
    parser = argparse.ArgumentParser()
    add_workload(parser)
    parser.add_argument("method", choices=METHODS)
    parser.add_argument("--backend", default="", help="serial, process, ray; as the workload has it if left out")
    parser.add_argument("--settings", choices=SETTINGS, default="plain")
    args = parser.parse_args()
    workload = asked(args)
    with (
        nodes(args.backend) as cluster,
        start(workload, args.method, args.backend, **cluster, **SETTINGS[args.settings]) as run,
    ):
        facts = {
            "parameters": stock.count(run.model),
            "engine": run.plan.engine,
            "backend": type(run.backend).__name__,
            "states": type(run.states).__name__,
        }
        serve(run.step, lambda: stock.accuracy(run.model, load(workload)), **facts)


if __name__ == "__main__":
    main()
