"""Inspection of a run's model: the sharpness of its minimum, the divergence of its clients, the noise of ascent steps.

Sharpness and divergence are measured at a finished run's model, noise also at the checkpoints that a run keeps.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..config.config import Config
from ..config.presets import paper_decay
from ..errors import UserError
from ..utils.files import read_text, write
from .config_file import read_config
from .directory import CONFIG, MODEL, RunDir, is_complete
from .launch import prepare

if TYPE_CHECKING:
    import torch

    from ..client.sharpness import Noise
    from ..server.simulation import Simulation


@dataclass(frozen=True)
class Inspection:
    """Measurements of the training loss F at the run's last server model x, without weight decay or augmentation.

    The divergence is mean_i ||x_iK - mean_j x_jK||^2 after a round of plain local SGD from x (FedAvg's, whatever the
    method was, so that models can be compared), at the rate of the run's last round.
    """

    method: str
    samples: int  # training samples in F and its Hessian
    loss: float  # F(x)
    gradient_norm: float  # ||grad F(x)||
    eigenvalue: float  # the largest of the Hessian
    residual: float  # of the eigenvalue
    products: int  # with the Hessian, used for it
    sam_gap: float  # F(x + rho g/||g||) - F(x)
    rho: float
    clients: int  # in the two numbers below
    dissimilarity: float  # mean_i ||grad F_i(x) - mean_j grad F_j(x)||^2: sigma_g^2 of (A3) at this one point
    divergence: float
    warmup: str  # the run's, "" for none


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
    _require_positive(samples=samples, clients=clients, iterations=iterations)
    if not rho > 0:
        raise UserError(f"inspect: rho must be > 0, got {rho:g}; it is the length of the SAM step")
    files = RunDir(run)
    if not files.config_file.is_file() or not files.model_file.is_file():
        raise UserError(f"{run} is not a finished run: expected {CONFIG} and {MODEL} in it; `fedspeed run` writes them")
    config = read_config(run, allow_code)
    with prepare(replace(config, backend="serial", workers=1), progress) as simulation:
        found = _measure(simulation, config, files, samples, clients, rho, iterations)
    with _writable(out or run) as place:
        write(place.inspection_file, json.dumps(asdict(found), indent=1) + "\n")
    return found


def _require_positive(**counts: int) -> None:
    for name, value in counts.items():
        if value < 1:
            raise UserError(f"inspect: {name} must be at least 1, got {value}")


@contextmanager
def _writable(out: Path | str) -> Iterator[RunDir]:
    """Make the folder of the measurements; raise a UserError if they cannot be written inside the `with`."""
    try:
        Path(out).mkdir(parents=True, exist_ok=True)
        yield RunDir(out)
    except OSError as error:
        raise UserError(f"inspect: cannot write to {out}: {error.strerror}; choose another --out") from None


def _measure(
    simulation: Simulation, config: Config, files: RunDir, samples: int, clients: int, rho: float, iterations: int
) -> Inspection:
    """Measure the model of a run on at most some samples and clients."""
    from ..client.sharpness import batches, mean_gradient, sam_gap, top_eigenvalue
    from .binary_files import load_vector

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
    """Return at most some of the values, drawn by a seed, in order."""
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


@dataclass(frozen=True)
class NoiseAt:
    """The noise of the ascent step at a run's server model; see `client.sharpness.Noise` for the numbers."""

    method: str
    round: int  # rounds that the model has
    client: Noise  # of two minibatches of one client, over some clients
    whole: Noise  # of two minibatches of all clients' samples together
    clients: int  # how many
    samples: int  # the most that one of these clients has
    batch_size: int
    seed: int  # of the minibatches


def inspect_noise(
    run: Path,
    *,
    round: int | None = None,
    pairs: int = 8,
    clients: int = 20,
    seed: int = 0,
    out: Path | None = None,
    progress: Callable[[str, int, int], None] | None = None,
    allow_code: bool = False,
) -> NoiseAt:
    """Measure the noise of a run's ascent step, and write it to `noise.json`, a list with one entry per round.

    Args:
        run: a run directory, finished or not.
        round: measure the model after this round, of which there is a checkpoint; the last model there is if None.
        pairs: pairs of minibatches per client; as many in all of the whole training set.
        clients, out, allow_code: as for `inspect_run`; clients are drawn by the seed.
    """
    _require_positive(pairs=pairs, clients=clients)
    config = read_config(run, allow_code)
    entries: dict[int, Any] = {entry["round"]: entry for entry in read_noise(RunDir(out or run))}
    from ..client.sharpness import ascent_noise  # torch, which a refusal above does not need

    with prepare(replace(config, backend="serial", workers=1), progress) as simulation:
        t, model = model_at(RunDir(run), simulation, round)
        before = max(t - 1, 0)
        simulation.restore(before, simulation.server, None)
        work, data = simulation.next_runner().work.at(before), simulation.work.data  # settings of the model's round
        work.flat.load(model)
        x = model[: work.flat.d]
        own = {int(i): data.rows(int(i)) for i in _some(np.arange(data.clients), clients, seed, "noise clients")}
        everything = {data.clients: np.unique(data.indices)}
        found = NoiseAt(
            method=work.method.name,
            round=t,
            client=ascent_noise(work, x, own, pairs, seed),
            whole=ascent_noise(work, x, everything, pairs * len(own), seed),
            clients=len(own),
            samples=max(map(len, own.values())),
            batch_size=work.plan.batch_size,
            seed=seed,
        )
    with _writable(out or run) as place:
        entries[t] = plain(found)
        write(place.noise_file, json.dumps([entries[t] for t in sorted(entries)], indent=1) + "\n")
    return found


def plain(found: NoiseAt) -> dict[str, Any]:
    """Return a measurement as JSON values."""
    return asdict(found) | {"client": found.client._asdict(), "whole": found.whole._asdict()}


def read_noise(run: RunDir) -> list[dict[str, Any]]:
    """Return the entries of `noise.json`; an empty list without it."""
    try:
        found = json.loads(read_text(run.noise_file))
        if isinstance(found, list) and all(type(entry["round"]) is int for entry in found):
            return found
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        pass
    raise UserError(f"{run.noise_file}: expected a list of measurements, found something else; restore it or delete it")


def model_at(run: RunDir, simulation: Simulation, round: int | None) -> tuple[int, torch.Tensor]:
    """Return a round, by default the last whose model is stored, and the server's model after it.

    The model is a vector with running statistics, if there are any, as `FlatModel.load` takes it.
    """
    import torch

    from ..client.batch_norm import full_vector
    from ..client.tree_bytes import read_state
    from .binary_files import load_vector
    from .checkpoint import server_of

    summary = run.raw_summary() or {}
    if is_complete(summary) and run.model_file.is_file() and round in (None, summary["rounds"]):
        flat = simulation.work.flat
        x = load_vector(flat, run.model_file)
        return summary["rounds"], torch.cat([x, flat.statistics.read().to(x)]) if flat.statistics else x
    known = sorted(int(path.stem) for path in run.manifests())
    if not known or round not in (None, *known):
        has = f"checkpoints of rounds {', '.join(map(str, known))}" if known else "no checkpoint"
        asked = f"of round {round}" if round is not None else f"or {MODEL}"
        raise UserError(f"{run.path}: expected a checkpoint {asked}, found {has}; `keep_every` keeps them")
    t = known[-1] if round is None else round
    try:
        simulation.restore(t, read_state(server_of(run, t), simulation.server), None)
    except UserError:
        if round is None and all(int(path.stem) != t for path in run.manifests()):
            return model_at(run, simulation, None)  # A run in progress has replaced the checkpoint in the meantime.
        raise
    return t, full_vector(simulation.server).to(simulation.work.flat.dtype)
