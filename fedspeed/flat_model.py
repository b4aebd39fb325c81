"""The flat model that a run trains: a copy of a module, with what the plan says of batch norm."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import numpy as np
import torch
from torch import nn

from .data.federated import Federated
from .errors import UserError
from .methods.base import Method
from .norms import with_group_norm
from .plan import Plan
from .sampling import torch_seed
from .vec import FlatModel


def copied(model: nn.Module) -> nn.Module:
    """A copy of a model, which is what is trained."""
    try:
        return copy.deepcopy(model)
    except Exception as error:
        reason = (str(error).splitlines() or [""])[0]
        raise UserError(
            f"model: {type(model).__name__} cannot be copied, and it is a copy that is trained ({reason}); run one "
            f"batch through lazy modules, use torch.nn.utils.parametrizations for weight norm"
        ) from error


def flat_model(
    model: nn.Module,
    data: Federated,
    plan: Plan,
    device: torch.device,
    no_decay: Sequence[str],
    method: Method | None = None,
) -> FlatModel:
    """A copy of a model as it is trained, with what the plan says of batch norm.

    Args:
        method: whose `ascent_fraction`, if it has one, takes a part of every batch.
    """
    module = copied(model).to(device)
    module = with_group_norm(module) if plan.batch_norm == "group" else module
    flat = FlatModel(module, no_decay, plan.tracks)
    if flat.statistics:
        fraction = getattr(method, "ascent_fraction", 1.0)
        _refuse_single(flat, data.to(device, flat.dtype), plan.batch_size, fraction, method)
    return flat


def _with_single(n: np.ndarray, batch_size: int, fraction: float) -> np.ndarray:
    """Return the clients, by their numbers of samples, that have a batch of one, or of which a part is one."""
    lone = np.array([b and max(1, round(fraction * b)) == 1 for b in range(batch_size + 1)], dtype=bool)
    return np.flatnonzero(lone[n % batch_size] | (lone[batch_size] & (n >= batch_size)))


def _refuse_single(flat: FlatModel, data: Federated, batch_size: int, fraction: float, method: Method | None) -> None:
    """Raise if some client has a batch of one sample and the model's batch norm cannot take that."""
    n = data.sizes
    alone = _with_single(n, batch_size, fraction)
    if not len(alone):
        return
    client = int(alone[n[alone].argmin()])
    try:
        with torch_seed(0, "batch norm"), torch.no_grad(), flat.statistics.kept():
            flat.model.train()(data.batch(data.rows(client)[:1])[0])
    except ValueError as error:
        if "more than 1 value" not in str(error):
            raise
        sizes = range(batch_size + 1, batch_size + 100)
        other = next((b for b in sizes if not len(_with_single(n, b, fraction))), 0)
        part = f", with ascent_fraction {fraction:g} of {method.label}" if method and fraction < 1 else ""
        raise UserError(
            f"batch_norm: one sample has no variance, and client {client} with {n[client]} samples has a batch of one "
            f"at batch size {batch_size}{part}; {f'--batch-size {other} leaves none, or' if other else 'choose'} "
            f"--batch-norm group"
        ) from None
