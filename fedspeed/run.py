"""A run: a `Config` -> `simulate` -> a run directory."""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import __version__
from .config import Config, read_toml
from .errors import Diverged, UserError, unknown
from .interrupts import together
from .report.difference import TIMES, model_digest
from .rundir import (
    FILES,
    PLACEMENT,
    alone,
    claim,
    clear,
    finished,
    line,
    read_config,
    read_records,
    refuse_a_run,
    sweep,
    write,
)

if TYPE_CHECKING:
    import torch

    from .checkpoint import Checkpoints
    from .server import Record, Simulation


def prepare(
    config: Config, progress: Callable[[str, int, int], None] | None = None, folder: Path | None = None
) -> Simulation:
    """Load the data, build the model, and stand at round 0."""
    from torch.nn.functional import cross_entropy, mse_loss

    from .data import load
    from .models import MODELS, build_model
    from .server import Simulation

    given: dict[str, Any] = {
        "split": config.split,
        "clients": config.clients,
        "seed": config.seed,
        "augment": config.augment,
        "data_dir": config.data_dir or None,
    }
    for spec, kind in ((config.data, "data"), (config.model, "model")):
        for key in spec.options:
            if key in given or key in ("progress", "data"):
                raise UserError(f"config: {kind}.{key} is no option of the {kind}; set the config's own key instead")
    if config.model.name not in MODELS:  # before the data, which may be a download away
        raise unknown("model", config.model.name, MODELS)
    data = load(config.data.name, **given, progress=progress, **config.data.options)
    model = build_model(config.model.name, data, seed=config.seed, **config.model.options)
    loss = mse_loss if data.classes is None else cross_entropy
    return Simulation(config.method, model, data, config, loss, folder=folder)


def run_config(
    config: Config,
    out: Path,
    *,
    overwrite: bool = False,
    on_round: Callable[[Record], None] | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> dict[str, Any]:
    """Run a config into a directory and return its summary.

    The directory gets `config.toml` before anything slow happens, so that a run killed at any instant can be resumed; a
    line of `rounds.jsonl` a round, checkpoints, and at the end `model.safetensors` and `summary.json`. A run that
    diverges keeps what it had and says so in the summary. An input that turns out bad leaves nothing behind, and an
    earlier run is not overwritten before data and model of the new one stand.
    """
    from .checkpoint import Checkpoints

    refuse_a_run(out, overwrite)
    fresh = not any((out / name).exists() for name in FILES)
    made = [folder for folder in (out, *out.parents) if not folder.exists()]
    with alone(out):
        if fresh:
            claim(out)
            write(out / "config.toml", config.to_toml())
        try:
            simulation = prepare(config, progress, out / "states")
        except UserError:
            if fresh:
                (out / "config.toml").unlink(missing_ok=True)
                for folder in made:
                    folder.rmdir()
            raise
        if not fresh:
            claim(out)
        config = replace(config, engine=simulation.plan.engine)  # `auto` is resolved: the engine decides the last bits
        write(out / "config.toml", config.to_toml())
        checkpoints = Checkpoints(out, config.checkpoint_every, bound_to(out, simulation))
        return _rounds(config, out, simulation, [], checkpoints, on_round)


def resume(
    out: Path,
    *,
    on_round: Callable[[Record], None] | None = None,
    progress: Callable[[str, int, int], None] | None = None,
    allow_code: bool = False,
) -> dict[str, Any]:
    """Go on with a run from its newest checkpoint, or from round 0 if it has none: the same bits as without a break.

    A run that is finished is left as it is, and its summary returned.

    Args:
        allow_code: also if the directory's config names Python files, which are then executed.
    """
    config = read_config(out, allow_code)
    done = finished(out)
    if done is not None:
        return done
    from .checkpoint import Checkpoints

    with alone(out):
        checkpoints = Checkpoints(out, config.checkpoint_every)
        saved = checkpoints.latest()  # before the data, which may take long
        records = read_records(out, saved.t) if saved else []
        with prepare(config, progress, out / "states") as simulation, _room(out):
            checkpoints.bound = bound_to(out, simulation)
            if saved is not None:
                checkpoints.check(saved, checkpoints.bound)
                checkpoints.restore(saved, simulation, records)
            for name in ("summary.json", "model.safetensors"):  # first: they tell of rounds that are cut off below
                (out / name).unlink(missing_ok=True)
            clear(out) if saved is None else checkpoints.go_on(saved, simulation.states)
            sweep(out)
            if saved is None or saved.manifest.rounds is None:
                write(out / "rounds.jsonl", "".join(line(record) for record in records))
            return _rounds(config, out, simulation, records, checkpoints, on_round)


def bound_to(out: Path, simulation: Simulation) -> dict[str, str]:
    """Digests of what a run is of; a checkpoint of anything else is not gone on with.

    The config counts as it stands in its file: a later version may have more fields.
    """
    tables = read_toml(out / "config.toml") | {"engine": simulation.plan.engine}
    for name in (*PLACEMENT, "rounds", "targets", "data_dir"):  # the data themselves count, not where they are
        tables.pop(name, None)
    text = json.dumps(tables, sort_keys=True, default=str)
    data = simulation.data
    return {
        "config": hashlib.blake2b(text.encode(), digest_size=8).hexdigest(),
        "data": data.fingerprint,
        "split": data.split_fingerprint,
    }


@contextmanager
def _room(out: Path) -> Iterator[None]:
    """A disk that is full, or a file that cannot be written, as an error that says how to go on."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"cannot write to {out} ({error.strerror or error}); what was written before is kept. Free some space, "
            f"then `fedspeed resume {out}`"
        ) from None


def _rounds(
    config: Config,
    out: Path,
    simulation: Simulation,
    records: list[Record],
    checkpoints: Checkpoints,
    on_round: Callable[[Record], None] | None,
) -> dict[str, Any]:
    """The rounds that are left, each written down, then the model and the summary."""
    status, written = "running", (simulation.t, simulation.server)
    try:
        with _room(out), simulation, (out / "rounds.jsonl").open("a", encoding="utf-8") as lines:
            for record in simulation:
                with together():
                    lines.write(line(record))
                    lines.flush()
                    records.append(record)
                    written = (simulation.t, simulation.server)
                checkpoints.offer(simulation.t, simulation.server, simulation.states)
                if on_round:
                    on_round(record)
            checkpoints.write(simulation.t, simulation.server, simulation.states)
            checkpoints.wait()
        status = "finished"
    except Diverged as error:
        status = f"diverged: {error}"
        raise
    except KeyboardInterrupt:
        status = "interrupted"
        raise
    except Exception as error:
        status = f"failed: {error}"
        raise
    finally:
        if status != "running":
            with suppress(Exception):  # told already, or not what stopped the run
                checkpoints.wait()
            with _room(out) if status == "finished" else suppress(Exception):  # what stopped the run is told instead
                simulation.restore(*written)  # a round that was not written down is not in the model either
                save_model(simulation, out / "model.safetensors")
                summary = summarise(config, simulation, records, status) | {
                    "checkpoint_seconds": checkpoints.waited,
                    "digests": digests(out, records),
                }
                write(out / "summary.json", json.dumps(summary, indent=1) + "\n")
    return summary


def save_model(simulation: Simulation, path: Path) -> None:
    """The server's model by parameter names, as safetensors."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    part = path.with_name(path.name + ".part")
    part.unlink(missing_ok=True)  # it may be a link
    try:
        save_file(model_tensors(simulation), part, metadata={"fedspeed": f"{__version__}, round {simulation.t}"})
        os.replace(part, path)
    except (OSError, SafetensorError) as error:
        part.unlink(missing_ok=True)
        raise error if isinstance(error, OSError) else OSError(str(error)) from None


def model_tensors(simulation: Simulation) -> dict[str, torch.Tensor]:
    """Parameters and buffers of the server's model by name, as they are saved."""
    model = simulation.model
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: a.detach().cpu().clone().contiguous() for name, a in named}


def digests(out: Path, records: list[Record]) -> dict[str, str | None]:
    """Of the model, and of the rounds without their times: equal for equal runs."""
    rounds = [{k: v for k, v in record.to_dict().items() if k not in TIMES} for record in records]
    found = hashlib.blake2b(json.dumps(rounds).encode(), digest_size=16)
    return {"model": model_digest(out / "model.safetensors"), "rounds": found.hexdigest()}


def summarise(config: Config, simulation: Simulation, records: list[Record], status: str) -> dict[str, Any]:
    """What a run came to: accuracies, totals, cost to the targets, and where it was made."""
    scored = [r for r in records if r.test_accuracy is not None]
    accuracies = [r.test_accuracy for r in scored if r.test_accuracy is not None]
    last5 = accuracies[-5:]
    reached: dict[str, Any] = {}
    for target in config.targets:
        first = next((r for r in scored if r.test_accuracy is not None and r.test_accuracy >= target), None)
        upto = [r for r in records if first and r.round <= first.round]
        reached[str(target)] = first and {
            "round": first.round,
            "bytes": sum(r.bytes_down + r.bytes_up for r in upto),
        }
    due = [r for r in records if r.round % config.eval_every == 0 or r.round == config.rounds]
    data = simulation.data
    return {
        "status": status,
        "rounds": len(records),
        "last_accuracy": accuracies[-1] if accuracies else None,
        "best_accuracy": max(accuracies, default=None),
        "mean_last5_accuracy": math.fsum(last5) / len(last5) if last5 else None,
        "last_test_loss": due[-1].to_dict()["test_loss"] if due else None,  # None if not finite, also when read back
        "last_train_loss": records[-1].to_dict()["train_loss"] if records else None,
        "targets": reached,
        "bytes_down": sum(r.bytes_down for r in records),
        "bytes_up": sum(r.bytes_up for r in records),
        "grad_evals": sum(r.grad_evals for r in records),
        "seconds": sum(r.seconds for r in records),
        "eval_seconds": sum(r.eval_seconds for r in records),
        "seed": config.seed,
        "parameters": simulation.work.flat.d,
        "data_fingerprint": data.fingerprint,
        "split_fingerprint": data.split_fingerprint,
        "environment": environment(simulation.work.flat.device.type),
    }


def environment(device: str) -> dict[str, Any]:
    """Versions and hardware: equal bits are promised for equal ones."""
    import numpy
    import torch

    return {
        "fedspeed": __version__,
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "cores": os.cpu_count(),
        "device": torch.cuda.get_device_name() if device == "cuda" else device,
    }
