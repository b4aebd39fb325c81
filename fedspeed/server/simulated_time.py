"""Costs of clients in a round, for simulated time (`config/network.py`): operations of gradients, bytes sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from ..client.flat_model import copied
from ..client.work import Facts, Reply, Work
from ..config.network import Clock
from ..errors import UserError, one_line
from ..models.resnet import choose_layers
from ..record import Record


class Meter:
    """A meter that adds costs and simulated time to the records of a run whose plan names a network."""

    def __init__(self, work: Work) -> None:
        plan = work.plan
        self.batch_size = plan.batch_size
        self.clock = Clock(plan.network, plan.devices, plan.seed)
        self.flops = gradient_flops(work.flat.model, work.data.batch(work.data.rows(0)[:1])[0])

    def with_costs(self, record: Record, replies: Sequence[Reply], elapsed: float) -> Record:
        """Return a record with the costs of its clients, and the virtual time at its end; `elapsed` is that before."""
        replies = sorted(replies, key=lambda reply: reply.job.client)  # the order of the cohort
        spent = replace(
            record,
            client_flops=[round(self.flops * samples(reply.facts, self.batch_size)) for reply in replies],
            client_bytes_up=[reply.facts.sent for reply in replies],
        )
        return replace(spent, virtual_seconds=elapsed + self.clock.round(spent))


def samples(facts: Facts, batch_size: int) -> float:
    """Return how many samples a client took gradients of: its gradients times the mean size of its batches.

    Example:
        >>> samples(Facts(K=3, n=15, train_loss=0.0, drift=0.0, grad_evals=6.0), batch_size=10)  # 10, 5, 10
        50.0
    """
    epochs, rest = divmod(facts.K, -(-facts.n // batch_size))
    return facts.grad_evals * (epochs * facts.n + min(rest * batch_size, facts.n)) / facts.K


def gradient_flops(model: nn.Module, inputs: torch.Tensor) -> int:
    """Return the operations of one sample's gradient: three times those of the products of a forward pass.

    They are counted on shapes alone, so the package's fast layers count like the standard ones that they replace. A
    model that depends on values is given the sample itself. A model without products counts two per parameter.

    Example:
        >>> gradient_flops(nn.Linear(5, 2), torch.zeros(1, 5))  # 3 * 2 * 5 * 2
        60
    """
    plain = copied(model)
    choose_layers(plain, "plain")  # the counter does not see compiled kernels
    try:
        forward = _forward_flops(copied(plain).to("meta"), inputs.to("meta"))
    except Exception:
        try:
            forward = _forward_flops(plain, inputs)
        except Exception as error:
            raise UserError(
                f"network: the model's operations cannot be counted, its pass over one sample failed "
                f"({one_line(error)}); leave the network out"
            ) from error
    return 3 * (forward or 2 * sum(p.numel() for p in model.parameters() if p.requires_grad))


def _forward_flops(model: nn.Module, inputs: torch.Tensor) -> int:
    from torch.utils.flop_counter import FlopCounterMode  # runs without a network need none of it

    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model.eval()(inputs)
    return int(counter.get_total_flops())
