"""`model.safetensors`: the server's model by parameter names, written, and read back as a vector."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save

from . import __version__
from .errors import UserError
from .files import write
from .rundir import CONFIG

if TYPE_CHECKING:
    from .server import Simulation
    from .vec import FlatModel


def save_model(simulation: Simulation, path: Path) -> None:
    """The server's model by parameter names, as safetensors."""
    write(path, save(model_tensors(simulation), metadata={"fedspeed": f"{__version__}, round {simulation.t}"}))


def model_tensors(simulation: Simulation) -> dict[str, torch.Tensor]:
    """Parameters and buffers of the server's model by name, as they are saved."""
    model = simulation.model
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: a.detach().cpu().clone().contiguous() for name, a in named}


def load_vector(flat: FlatModel, path: Path) -> torch.Tensor:
    """The flat vector of a `model.safetensors`; says which parameter is missing or misshapen."""
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path} cannot be read ({error}); expected the safetensors file of a finished run") from None
    parts = []
    for name, shape in zip(flat.names, flat.shapes, strict=True):
        if name not in tensors or tensors[name].shape != shape:
            found = tuple(tensors[name].shape) if name in tensors else "nothing"
            raise UserError(f"{path} does not fit its {CONFIG}: expected {name} of shape {tuple(shape)}, found {found}")
        parts.append(tensors[name].reshape(-1).to(flat.dtype))
    return torch.cat(parts).to(flat.device)
