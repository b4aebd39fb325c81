"""A run: a `Config` -> `simulate` -> a run directory."""

from __future__ import annotations

import json
import math
import os
import platform
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import __version__
from .config import Config
from .errors import Diverged, UserError, unknown

if TYPE_CHECKING:
    from .server import Record, Simulation

PLACEMENT = ("device", "backend", "workers", "states", "checkpoint_every")
"""Settings that say where and how, and change no bit of the result (on one kind of device)."""

FILES = ("config.toml", "rounds.jsonl", "summary.json", "model.safetensors")


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
    refuse_a_run(out, overwrite)
    fresh = not any((out / name).exists() for name in FILES)
    made = not out.exists()
    if fresh:
        claim(out)
        write(out / "config.toml", config.to_toml())
    try:
        simulation = prepare(config, progress, out / "states")
    except UserError:
        if fresh:
            (out / "config.toml").unlink(missing_ok=True)
            if made:
                out.rmdir()
        raise
    claim(out)
    config = replace(config, engine=simulation.plan.engine)  # `auto` is resolved: the engine decides the last bits
    write(out / "config.toml", config.to_toml())
    return _rounds(config, out, simulation, [], on_round)


def resume(
    out: Path,
    *,
    on_round: Callable[[Record], None] | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> dict[str, Any]:
    """Go on with a run from its newest checkpoint, or from round 0 if it has none: the same bits as without a break.

    A run that is finished is left as it is, and its summary returned.
    """
    config = read_config(out)
    done = finished(out)
    if done is not None:
        return done
    from .checkpoint import Checkpoints

    simulation = prepare(config, progress, out / "states")
    checkpoints = Checkpoints(out, config.checkpoint_every)
    saved = checkpoints.latest()
    records: list[Record] = []
    if saved is not None:
        like = simulation.method.init_client(simulation.x0)
        server = checkpoints.restore(saved, simulation.server, like, simulation.states)
        simulation.restore(saved.t, server)
        records = read_records(out, saved.t)
    write(out / "rounds.jsonl", "".join(line(record) for record in records))
    for name in ("summary.json", "model.safetensors"):
        (out / name).unlink(missing_ok=True)
    return _rounds(config, out, simulation, records, on_round)


def read_config(out: Path) -> Config:
    """The config of a run directory."""
    if not (out / "config.toml").is_file():
        raise UserError(f"{out} holds no run: expected a config.toml; start one with `fedspeed run --out {out}`")
    return Config.from_toml(out / "config.toml")


def same_run(stored: Config, given: Config) -> bool:
    """Whether two configs are one run: the same but for where it is computed, and an engine still to be resolved."""
    given = replace(given, engine=stored.engine if given.engine == "auto" else given.engine)
    return replace(given, **{name: getattr(stored, name) for name in PLACEMENT}) == stored


def finished(out: Path) -> dict[str, Any] | None:
    """The summary of a finished run, None for one that can go on."""
    try:
        summary: dict[str, Any] = json.loads((out / "summary.json").read_text("utf-8"))
    except (OSError, ValueError):
        return None
    return summary if summary.get("status") == "finished" else None


def _rounds(
    config: Config,
    out: Path,
    simulation: Simulation,
    records: list[Record],
    on_round: Callable[[Record], None] | None,
) -> dict[str, Any]:
    """The rounds that are left, each written down, then the model and the summary."""
    from .checkpoint import Checkpoints

    checkpoints = Checkpoints(out, config.checkpoint_every)
    status = "running"
    try:
        with simulation, (out / "rounds.jsonl").open("a", encoding="utf-8") as lines:
            for record in simulation:
                records.append(record)
                lines.write(line(record))
                lines.flush()
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
            with suppress(UserError):  # told already, or not what stopped the run
                checkpoints.wait()
            save_model(simulation, out / "model.safetensors")
            summary = summarise(config, simulation, records, status)
            write(out / "summary.json", json.dumps(summary, indent=1) + "\n")
    return summary


def line(record: Record) -> str:
    """A record as a line of `rounds.jsonl`."""
    return json.dumps(record.to_dict()) + "\n"


def read_records(out: Path, rounds: int) -> list[Record]:
    """The first rounds of `rounds.jsonl`; later lines, and one that was cut off, are not read."""
    from .server import Record

    records: list[Record] = []
    for text in (out / "rounds.jsonl").read_text("utf-8").splitlines():
        if len(records) == rounds:
            break
        try:
            records.append(Record(**json.loads(text)))
        except (ValueError, TypeError):
            break
    if [record.round for record in records] != list(range(1, rounds + 1)):
        raise UserError(f"{out / 'rounds.jsonl'} does not hold rounds 1 to {rounds} of the checkpoint; it was changed")
    return records


def refuse_a_run(out: Path, overwrite: bool) -> None:
    """Raise if a directory already holds a run, or a part of one, that may not be overwritten."""
    if not overwrite and any((out / name).exists() for name in FILES):
        raise UserError(f"{out} already holds a run; choose another --out, or --overwrite it")


def claim(out: Path) -> None:
    """Make the run directory, without the files of an earlier run."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name in FILES:
            (out / name).unlink(missing_ok=True)
        for name in ("states", "checkpoints"):
            shutil.rmtree(out / name, ignore_errors=True)
    except OSError as error:
        raise UserError(f"cannot make the output folder {out}: {error.strerror}; choose another --out") from None


def write(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    part = path.with_name(path.name + ".part")
    part.write_text(text, encoding="utf-8")
    os.replace(part, path)


def save_model(simulation: Simulation, path: Path) -> None:
    """The server's model by parameter names, as safetensors."""
    from safetensors.torch import save_file

    model = simulation.model
    tensors = {name: p.detach().cpu().clone().contiguous() for name, p in model.named_parameters()}
    tensors |= {name: b.detach().cpu().clone().contiguous() for name, b in model.named_buffers()}
    part = path.with_name(path.name + ".part")
    save_file(tensors, part, metadata={"fedspeed": f"{__version__}, round {simulation.t}"})
    os.replace(part, path)


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
    tested = [r.test_loss for r in records if r.test_loss is not None]
    data = simulation.data
    return {
        "status": status,
        "rounds": len(records),
        "last_accuracy": accuracies[-1] if accuracies else None,
        "best_accuracy": max(accuracies, default=None),
        "mean_last5_accuracy": math.fsum(last5) / len(last5) if last5 else None,
        "last_test_loss": tested[-1] if tested and math.isfinite(tested[-1]) else None,
        "last_train_loss": records[-1].train_loss if records else None,
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
