"""The client that Flower's actors run; a separate module, so that data and model stay in the actor between clients."""

from __future__ import annotations

from functools import cache

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import nn

from .. import stock
from ..workloads import Workload, load


@cache
def _prepared(workload: Workload) -> tuple[torch.Tensor, torch.Tensor, nn.Module]:
    torch.set_num_threads(1)
    arrays = load(workload)
    return torch.from_numpy(arrays.x), torch.from_numpy(arrays.y), stock.build(workload.model)


def app(workload: Workload) -> ClientApp:
    """Return a client app for one workload."""
    client = ClientApp()

    @client.train()
    def train(message: Message, context: Context) -> Message:
        x, y, net = _prepared(workload)
        net.load_state_dict(message.content["arrays"].to_torch_state_dict())
        who = int(context.node_config["partition-id"])
        fit(net, x[who], y[who], workload)
        content = {
            "arrays": ArrayRecord(net.state_dict()),
            "metrics": MetricRecord({"num-examples": workload.samples}),
        }
        return Message(RecordDict(content), reply_to=message)

    return client


def fit(net: nn.Module, x: torch.Tensor, y: torch.Tensor, workload: Workload) -> None:
    """Run local SGD."""
    optimiser = torch.optim.SGD(net.parameters(), lr=workload.lr)
    for _ in range(workload.epochs):
        for rows in torch.randperm(workload.samples).split(workload.batch):
            optimiser.zero_grad()
            nn.functional.cross_entropy(net(x[rows]), y[rows]).backward()
            optimiser.step()
