"""pfl-research: `FederatedAveraging` on its `SimulatedBackend`, in one process or under torchrun.

python -m benchmarks.contenders.peer_pfl WORKLOAD [--threads 2] [--active N] [--epochs N]
torchrun --nproc_per_node=2 -m benchmarks.contenders.peer_pfl WORKLOAD --threads 1
"""

from __future__ import annotations

import argparse
import os
import types
from typing import Any

import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByDatapoints
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from torch import nn
from torch.nn.functional import cross_entropy

from .. import stock
from ..protocol import Turns
from ..workloads import Workload, add_workload, asked, load

NEVER = 10**9
RANK, RANKS = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


class OnCommand(TrainingProcessCallback):
    """Callback that delays every iteration until its command; the first rank passes commands to the others."""

    def __init__(self, turns: Turns | None) -> None:
        self.turns = turns

    def on_train_begin(self, *, model: Any) -> Metrics:
        """Wait for the first round; to stop before it is to end."""
        if not self._go():
            raise SystemExit
        return Metrics()

    def after_central_iteration(
        self, aggregate_metrics: Metrics, model: Any, *, central_iteration: int
    ) -> tuple[bool, Metrics]:
        """Stop the clock; wait for the next round."""
        if self.turns:
            self.turns.done()
        return not self._go(), Metrics()

    def _go(self) -> bool:
        go = torch.tensor([float(self.turns.wait()) if self.turns else 0.0])
        if RANKS > 1:
            torch.distributed.broadcast(go, src=0)
        return bool(go)


def with_loss(net: nn.Module) -> nn.Module:
    """Return the two functions that pfl expects of a model."""

    def loss(self: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return cross_entropy(self(x), y)

    def metrics(self: nn.Module, x: torch.Tensor, y: torch.Tensor) -> dict[str, Weighted]:
        with torch.no_grad():
            return {"loss": Weighted(cross_entropy(self(x), y, reduction="sum").item(), len(y))}

    net.loss, net.metrics = types.MethodType(loss, net), types.MethodType(metrics, net)
    return net


def users(workload: Workload) -> FederatedDataset:
    """Return every client's samples, shuffled again each time it is active."""
    arrays = load(workload)
    x, y = torch.from_numpy(arrays.x), torch.from_numpy(arrays.y)

    def one(user: int) -> Dataset:
        order = torch.randperm(workload.samples)
        return Dataset(raw_data=[x[user][order], y[user][order]], user_id=str(user))

    return FederatedDataset(one, get_user_sampler("random", list(range(workload.clients))))


def main() -> None:
    """Run pfl's loop, held back by the callback."""
    parser = argparse.ArgumentParser()
    add_workload(parser)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    workload = asked(args)
    torch.set_num_threads(args.threads)
    net = with_loss(stock.build(workload.model).train())
    data, arrays = users(workload), load(workload)
    turns = Turns(lambda: stock.accuracy(net, arrays), parameters=stock.count(net)) if RANK == 0 else None
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=NEVER,
            evaluation_frequency=NEVER,  # evaluates in round 0 only, which is the warm-up
            train_cohort_size=workload.active,
            val_cohort_size=0,
        ),
        backend=SimulatedBackend(training_data=data, val_data=data, postprocessors=[WeightByDatapoints()]),
        model=PyTorchModel(
            model=net,
            local_optimizer_create=torch.optim.SGD,
            central_optimizer=torch.optim.SGD(net.parameters(), 1.0),
        ),
        model_train_params=NNTrainHyperParams(
            local_learning_rate=workload.lr, local_num_epochs=workload.epochs, local_batch_size=workload.batch
        ),
        model_eval_params=NNEvalHyperParams(local_batch_size=workload.samples),
        callbacks=[OnCommand(turns)],
        send_metrics_to_platform=False,
    )


if __name__ == "__main__":
    main()
