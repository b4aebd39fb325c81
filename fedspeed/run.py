"""A run: a `Config` -> `simulate` -> a run directory."""

from __future__ import annotations

import hashlib
import json
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import __version__
from .config import Config
from .environment import environment as environment
from .errors import Diverged, Terminated, UserError, unknown
from .files import write
from .interrupts import together
from .report.difference import TIMES, model_digest
from .runconfig import amend, bound_to, clear_code, read_config, write_config
from .rundir import FILES, alone, claim, clear, finished, line, read_records, refuse_a_run, sweep

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
        "clients": config.clients or None,
        "seed": config.seed,
        "augment": config.augment,
        "data_dir": config.data_dir or None,
    }
    for spec, kind in ((config.data, "data"), (config.model, "model")):
        for key in spec.options:
            if key in given or key in ("progress", "data", "validation"):
                raise UserError(f"config: {kind}.{key} is no option of the {kind}; set the config's own key instead")
    if config.data_dir and not Path(config.data_dir).expanduser().exists():
        raise UserError(
            f"data: there is nothing at {config.data_dir}; if the data were moved, say where they are now (--data-dir)"
        )
    if config.model.name not in MODELS:  # before the data, which may be a download away
        raise unknown("model", config.model.name, MODELS)
    data = load(config.data.name, **given, progress=progress, **config.data.options)
    config = replace(config, clients=config.clients or data.clients)
    if config.validation:
        data = data.with_validation(config.validation, config.seed)
    if MODELS[config.model.name].__module__ == build_model.__module__:  # ours compute with numbers: no embeddings
        data = data.floats()
    model = build_model(config.model.name, data, seed=config.seed, **config.model.options)
    loss = mse_loss if data.classes is None else cross_entropy
    return Simulation(config.method, model, data, config, loss, folder=folder)


def run_config(
    config: Config,
    out: Path | str,
    *,
    overwrite: bool = False,
    on_round: Callable[[Record], None] | None = None,
    progress: Callable[[str, int, int], None] | None = None,
    on_client: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Run a config into a directory and return its summary.

    The directory gets `config.toml` before anything slow happens, so that a run killed at any instant can be resumed; a
    line of `rounds.jsonl` a round, checkpoints, and at the end `model.safetensors` and `summary.json`. A run that
    diverges keeps what it had and says so in the summary. An input that turns out bad leaves nothing behind, and an
    earlier run is not overwritten before data and model of the new one stand.
    """
    from .checkpoint import Checkpoints

    out = Path(out)
    refuse_a_run(out, overwrite)
    made = [folder for folder in (out, *out.parents) if not folder.exists()]
    with alone(out):
        refuse_a_run(out, overwrite)  # another process may have finished one meanwhile
        fresh = not any((out / name).exists() for name in FILES)
        if fresh:
            claim(out)
            clear_code(out)
            write_config(out, config)
        try:
            simulation = prepare(config, progress, out / "states")
        except Exception:
            if fresh:
                (out / "config.toml").unlink(missing_ok=True)
                clear_code(out)
                with suppress(OSError):  # somebody else has put something there meanwhile
                    for folder in made:
                        folder.rmdir()
            raise
        if not fresh:
            claim(out)
            clear_code(out)
        plan = simulation.plan  # what was left open is resolved: `auto` (the engine decides the last bits), numbers
        config = replace(config, engine=plan.engine, clients=getattr(plan, "clients", 0), active=plan.active)
        write_config(out, config)
        checkpoints = Checkpoints(out, config.checkpoint_every, bound_to(out, simulation))
        return _rounds(config, out, simulation, [], checkpoints, on_round, on_client)


def resume(
    out: Path | str,
    *,
    on_round: Callable[[Record], None] | None = None,
    progress: Callable[[str, int, int], None] | None = None,
    on_client: Callable[[int, int], None] | None = None,
    allow_code: bool = False,
    rounds: int = 0,
    data_dir: str = "",
) -> dict[str, Any]:
    """Go on with a run from its newest checkpoint, or from round 0 if it has none: the same bits as without a break.

    A run that is finished is left as it is, and its summary returned, unless it is given more rounds: then it ends as
    if it had had them from the start.

    Args:
        allow_code: also if the directory's config names Python files, which are then executed.
        rounds: how many the run is to have in all; 0 for as many as its config says.
        data_dir: where the data are now, if they were moved.
    """
    out = Path(out)
    config = longer(read_config(out, allow_code), rounds)
    config = replace(config, data_dir=data_dir or config.data_dir)
    done = finished(out, config.rounds)
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
                if other := checkpoints.other_variables(saved):
                    told = f"environment variables that change the last bits differ ({other})"
                    warnings.warn(f"{told}; the run goes on, equal up to rounding", stacklevel=2)
            again = saved if saved is not None and _scored_as_the_last(records[-1], config) else None
            if again is not None:
                saved = checkpoints.before(again)
                if saved is None:
                    raise UserError(
                        f"{out} cannot be given more rounds as one long run would have them: round {again.t} was "
                        f"evaluated only because it was the last (eval_every {config.eval_every}), and there is no "
                        f"checkpoint before it; start a run with more rounds"
                    )
                records = records[: saved.t]
            amend(out, rounds=config.rounds, data_dir=data_dir)
            if again is not None:
                checkpoints.drop(again)
            if saved is not None:
                checkpoints.restore(saved, simulation, records)
            for name in ("summary.json", "model.safetensors"):  # first: they tell of rounds that are cut off below
                (out / name).unlink(missing_ok=True)
            clear(out) if saved is None else checkpoints.go_on(saved, simulation.states)
            sweep(out)
            if saved is None or saved.manifest.rounds is None:
                write(out / "rounds.jsonl", "".join(line(record) for record in records))
            return _rounds(config, out, simulation, records, checkpoints, on_round, on_client)


def longer(config: Config, rounds: int) -> Config:
    """The config of a run that is given more rounds, 0 for none; fewer are refused."""
    if rounds and rounds < config.rounds:
        raise UserError(
            f"--rounds: expected at least the {config.rounds} rounds of the run, got {rounds}; rounds can be "
            f"added, not taken away"
        )
    return replace(config, rounds=rounds or config.rounds)


def _scored_as_the_last(record: Record, config: Config) -> bool:
    """Whether a round was evaluated only because it was the last, and no longer is: it is run again without that."""
    scores = (record.test_loss, record.test_accuracy, record.validation_loss, record.validation_accuracy)
    due = record.round % config.eval_every == 0 or record.round >= config.rounds
    return not due and any(score is not None for score in scores)


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
    on_client: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """The rounds that are left, each written down, then the model and the summary."""
    status, written, here = "running", (simulation.t, simulation.server), out.stat().st_ino
    simulation.on_client = on_client
    try:
        with _room(out), simulation, (out / "rounds.jsonl").open("a", encoding="utf-8") as lines:
            for record in simulation:
                _stay(out, here)
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
            _stay(out, here)
        status = "finished"
    except Diverged as error:
        status = f"diverged: {error}"
        raise
    except KeyboardInterrupt as error:
        status = "terminated" if isinstance(error, Terminated) else "interrupted"
        raise
    except Exception as error:
        status = f"failed: {error}"
        raise
    finally:
        if status != "running" and _is_at(out, here):
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


def _is_at(out: Path, here: int) -> bool:
    """Whether a folder is still where a run began in it, and no other."""
    return out.exists() and out.stat().st_ino == here


def _stay(out: Path, here: int) -> None:
    if not _is_at(out, here):
        raise UserError(f"{out} was moved while the run went on; `fedspeed resume` it where it is now")


def save_model(simulation: Simulation, path: Path) -> None:
    """The server's model by parameter names, as safetensors."""
    from safetensors.torch import save

    write(path, save(model_tensors(simulation), metadata={"fedspeed": f"{__version__}, round {simulation.t}"}))


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
    chosen_on = "test" if simulation.data.validation is None else "validation"
    best = best_record(records, chosen_on)
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
        "best_accuracy": best and best.test_accuracy,
        "best_round": best and best.round,
        "chosen_on": chosen_on,
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


def best_record(records: list[Record], chosen_on: str) -> Record | None:
    """The first round with the highest accuracy on the `test` or `validation` set; without accuracies, with the lowest
    finite loss there."""
    right, wrong = f"{chosen_on}_accuracy", f"{chosen_on}_loss"
    scored = [r for r in records if getattr(r, right) is not None]
    if scored:
        return max(scored, key=lambda r: getattr(r, right))
    finite = [r for r in records if getattr(r, wrong) is not None and math.isfinite(getattr(r, wrong))]
    return min(finite, key=lambda r: getattr(r, wrong), default=None)
