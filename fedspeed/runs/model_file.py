"""The file `model.safetensors`: the server's model by parameter names, written, and read back as a vector."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save

from .. import __version__
from ..errors import UserError
from ..utils.files import write
from .directory import CONFIG

if TYPE_CHECKING:
    from torch import nn

    from ..client.flat_model import FlatModel
    from ..server.simulation import Simulation


def save_model(simulation: Simulation, path: Path) -> None:
    """Write the server's model by parameter names, as safetensors."""
    write(path, save(model_tensors(simulation), metadata={"fedspeed": f"{__version__}, round {simulation.t}"}))


def model_tensors(simulation: Simulation) -> dict[str, torch.Tensor]:
    """Return parameters and buffers of the server's model by name, as they are saved."""
    return {name: a.detach().cpu().clone().contiguous() for name, a in named_tensors(simulation.model)}


def named_tensors(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Return parameters and buffers, each once."""
    return [*model.named_parameters(), *model.named_buffers()]


def frozen_digest(flat: FlatModel) -> dict[str, str]:
    """Return the digest of the values of a model that are in no checkpoint: frozen parameters and buffers, and first
    running statistics; an empty dict for a model without any."""
    others = [name for name, a in named_tensors(flat.model) if not a.requires_grad]
    if not flat.statistics and not others:
        return {}
    found = hashlib.blake2b(digest_size=8)
    for name, a in [("", flat.statistics.first), *named_tensors(flat.model)]:
        if not a.requires_grad and name not in flat.statistics.buffers:
            found.update(f"{name} {a.dtype} {tuple(a.shape)}".encode())
            found.update(a.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return {"frozen weights": found.hexdigest()}


def load_vector(flat: FlatModel, path: Path) -> torch.Tensor:
    """Return the flat vector of a `model.safetensors`; load its frozen weights and running statistics into the model.

    Raises a UserError that names a missing or misshapen parameter.
    """
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path} cannot be read ({error}); expected the safetensors file of a finished run") from None
    for name, a in named_tensors(flat.model):
        if name not in tensors or tensors[name].shape != a.shape:
            found = tuple(tensors[name].shape) if name in tensors else "nothing"
            raise UserError(
                f"{path} does not fit its {CONFIG}: expected {name} of shape {tuple(a.shape)}, found {found}"
            )
    for name, a in named_tensors(flat.model):
        if not a.requires_grad:
            a.data.copy_(tensors[name])
    parts = [tensors[name].reshape(-1).to(flat.dtype) for name in flat.names]
    return torch.cat(parts).to(flat.device)
