"""The binary files of a run directory: `model.safetensors`, and the digests of uploads in `uploads.bin`.

The model is the server's by parameter names, and is read back as a vector. A row of `uploads.bin` has 16 bytes,
little-endian: round (1 is the first), client, digest.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save

from .. import __version__
from ..client.upload_digest import Uploads
from ..errors import UserError
from ..utils.files import read_bytes, write
from .directory import CONFIG, RunDir

if TYPE_CHECKING:
    from ..client.flat_model import FlatModel
    from ..server.simulation import Simulation


def save_model(simulation: Simulation, path: Path) -> None:
    """Write the server's model by parameter names, as safetensors."""
    write(path, save(model_tensors(simulation), metadata={"fedspeed": f"{__version__}, round {simulation.t}"}))


def model_tensors(simulation: Simulation) -> dict[str, torch.Tensor]:
    """Return parameters and buffers of the server's model by name, as they are saved."""
    return {name: a.detach().cpu().clone().contiguous() for name, a in named_tensors(simulation.model)}


def named_tensors(model: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
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
    """Return the vector of a `model.safetensors`; load its frozen weights and running statistics into the model."""
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path} cannot be read ({error}); expected the safetensors file of a finished run") from None
    for name, a in named_tensors(flat.model):
        if name not in tensors or tensors[name].shape != a.shape:
            found = tuple(tensors[name].shape) if name in tensors else "nothing"
            expected = f"{name} of shape {tuple(a.shape)}"
            raise UserError(f"{path} does not fit its {CONFIG}: expected {expected}, found {found}")
    for name, a in named_tensors(flat.model):
        if not a.requires_grad:
            a.data.copy_(tensors[name])
    return torch.cat([tensors[name].reshape(-1).to(flat.dtype) for name in flat.names]).to(flat.device)


ROW = np.dtype([("round", "<u4"), ("client", "<u4"), ("digest", "<u8")])


def add_uploads(run: RunDir, t: int, uploads: Uploads) -> None:
    """Append the digests of a round."""
    rows = np.array([(t, client, value) for client, value in uploads.items()], ROW)
    if len(rows):
        with run.uploads_file.open("ab") as file:
            file.write(rows.tobytes())


def read_uploads(run: RunDir) -> dict[int, Uploads]:
    """Return round -> digest per client, of the rounds that have some; a row that was cut off is left out."""
    path = run.uploads_file
    try:
        content = read_bytes(path) if path.exists() else b""
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error}); put it back") from None
    found: dict[int, Uploads] = {}
    for t, client, value in np.frombuffer(content, ROW, len(content) // ROW.itemsize).tolist():
        found.setdefault(t, {})[client] = value
    return found


def upload_mismatches(before: Uploads, again: Uploads, t: int) -> list[str]:
    """Return a line per client whose upload differs in a round that was run again, if its digest was recorded."""
    return [
        f"round {t}: what client {client} sent is not what it sends in the round run again"
        for client, value in again.items()
        if before.get(client, value) != value
    ]
