"""Inspection of a finished run's model: the sharpness of its minimum, and the divergence of its clients."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ..config.config import Config
from ..config.presets import paper_decay
from ..errors import UserError
from ..utils.files import write
from .config_file import read_config
from .directory import CONFIG, MODEL, RunDir
from .launch import prepare

if TYPE_CHECKING:
    import torch

    from ..server.simulation import Simulation


@dataclass(frozen=True)
class Inspection:
    """Measurements of the training loss F at the run's last server model x, without weight decay or augmentation.

    Args:
        samples: the number of training samples in F and its Hessian.
        loss, gradient_norm: F(x) and ||grad F(x)||.
        eigenvalue, residual, products: the largest eigenvalue of the Hessian, its residual, and Hessian products used.
        sam_gap, rho: F(x + rho g/||g||) - F(x).
        clients: the number of clients in the two numbers below.
        dissimilarity: mean_i ||grad F_i(x) - mean_j grad F_j(x)||^2: sigma_g^2 of (A3) at this one point.
        divergence: mean_i ||x_iK - mean_j x_jK||^2 after a round of plain local SGD from x (FedAvg's, whatever the
            method was, so that models can be compared), at the rate of the run's last round.
        warmup: the run's, "" for none.
    """

    method: str
    samples: int
    loss: float
    gradient_norm: float
    eigenvalue: float
    residual: float
    products: int
    sam_gap: float
    rho: float
    clients: int
    dissimilarity: float
    divergence: float
    warmup: str


def inspect_run(
    run: Path,
    *,
    samples: int = 1000,
    clients: int = 20,
    rho: float = 0.1,
    iterations: int = 100,
    out: Path | None = None,
    progress: Callable[[str, int, int], None] | None = None,
    allow_code: bool = False,
) -> Inspection:
    """Rebuild a finished run from its directory, measure its model, and write `inspect.json`.

    Args:
        run: a run directory with `config.toml` and `model.safetensors`.
        samples, clients: at most this many, drawn by the run's seed.
        out: where to write; the run directory if None.
        allow_code: also if the directory's config names Python files, which are then executed.
    """
    for name, value in (("samples", samples), ("clients", clients), ("iterations", iterations)):
        if value < 1:
            raise UserError(f"inspect: {name} must be at least 1, got {value}")
    if not rho > 0:
        raise UserError(f"inspect: rho must be > 0, got {rho:g}; it is the length of the SAM step")
    files = RunDir(run)
    if not files.config_file.is_file() or not files.model_file.is_file():
        raise UserError(f"{run} is not a finished run: expected {CONFIG} and {MODEL} in it; `fedspeed run` writes them")
    config = read_config(run, allow_code)
    with prepare(replace(config, backend="serial", workers=1), progress) as simulation:
        found = _measure(simulation, config, files, samples, clients, rho, iterations)
    place = out or run
    try:
        place.mkdir(parents=True, exist_ok=True)
        write(RunDir(place).inspection_file, json.dumps(asdict(found), indent=1) + "\n")
    except OSError as error:
        raise UserError(f"inspect: cannot write to {place}: {error.strerror}; choose another --out") from None
    return found


def _measure(
    simulation: Simulation, config: Config, files: RunDir, samples: int, clients: int, rho: float, iterations: int
) -> Inspection:
    """Measure the model of a run on at most some samples and clients."""
    from ..client.sharpness import batches, mean_gradient, sam_gap, top_eigenvalue
    from .model_file import load_vector

    work, data = simulation.work, simulation.work.data
    x = load_vector(work.flat, files.model_file)
    rows = _some(np.unique(data.indices), samples, config.seed, "inspect")
    chosen = _some(np.arange(data.clients), clients, config.seed, "inspect clients")
    parts = batches(data, rows)
    loss, gradient = mean_gradient(work.flat, x, parts, work.loss)
    top = top_eigenvalue(work.flat, x, parts, work.loss, iterations=iterations, seed=config.seed)
    gap = sam_gap(work.flat, x, parts, work.loss, rho)
    own = [mean_gradient(work.flat, x, batches(data, data.rows(int(i))), work.loss)[1] for i in chosen]
    return Inspection(
        method=config.method.name,
        samples=len(rows),
        loss=loss,
        gradient_norm=float(gradient.norm()),
        eigenvalue=top.value,
        residual=top.residual,
        products=top.products,
        sam_gap=gap,
        rho=rho,
        clients=len(chosen),
        dissimilarity=_spread(own),
        divergence=_spread(_local_models(simulation, config, x, chosen, len(files.records()))),
        warmup=config.warmup,
    )


def _some(values: np.ndarray, most: int, seed: int, purpose: str) -> np.ndarray:
    """Return at most some of the values, drawn by the run's seed, in order."""
    from ..utils.random import rng

    return values if len(values) <= most else np.sort(rng(seed, purpose).choice(values, most, replace=False))


def _local_models(
    simulation: Simulation, config: Config, x: torch.Tensor, chosen: np.ndarray, t: int
) -> list[torch.Tensor]:
    """Return the local movements of one more round of FedAvg, after t rounds."""
    from ..client.batch_norm import method_part
    from ..client.local_loop import run_client
    from ..client.work import Job
    from ..methods import FedAvg

    work = replace(simulation.work, method=FedAvg())
    hooks = work.hooks
    down = hooks.broadcast(hooks.init_server(x))
    lr = config.rate(max(t - 1, 0), paper_decay(config.method))
    replies = (run_client(work, Job(int(i), t, lr), down, hooks.init_client(x)) for i in chosen)
    return [method_part(reply.up).D for reply in replies]


def _spread(vectors: list[torch.Tensor]) -> float:
    """Return mean_i ||v_i - mean_j v_j||^2."""
    mean = sum((v.double() for v in vectors[1:]), vectors[0].double()) / len(vectors)
    return float(sum(float((v.double() - mean).square().sum()) for v in vectors)) / len(vectors)
