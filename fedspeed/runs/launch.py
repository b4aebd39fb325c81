"""Launch of a run: from a `Config` to its simulation and its run directory; start, resume, extend."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config.config import Config
from ..config.stopping import with_rules
from ..errors import UserError
from ..server.observers import Observer, Observers
from ..utils.collector import paused
from .config_file import amend, bound_to, read_config, store_layers, write_config
from .directory import RunDir, exclusive
from .recorder import RunRecorder, disk_errors
from .summary import final_summary

if TYPE_CHECKING:
    from ..client.flat_model import Loss
    from ..data.federated import Federated
    from ..record import Record
    from ..server.simulation import Simulation
    from .checkpoint import Checkpoints, Saved


def prepare(
    config: Config,
    progress: Callable[[str, int, int], None] | None = None,
    folder: Path | None = None,
    new: bool = False,
) -> Simulation:
    """Load the data, build the model, and return a simulation at round 0.

    Args:
        folder: for client states on disk; None makes a temporary one.
        new: refuse ambiguous targets; runs of older versions may have them, new ones may not.
    """
    with paused():
        from torch.nn.functional import cross_entropy, mse_loss

        from ..client.losses import doubtful, named_loss
        from ..models import build_with, find_builder, takes_numbers
        from ..server.simulation import Simulation

    builder = find_builder(config.model.name, config.model.code)  # before the data, which may be a download away
    config, data = load_federation(config, progress)
    if takes_numbers(builder):
        data = data.floats()
    model = build_with(builder, config.model.name, data, config.seed, config.model.options)
    if config.loss:
        loss: Loss | None = named_loss(config.loss)
    elif not new:
        loss = mse_loss if data.classes is None else cross_entropy
    elif data.classes is None and not data.y.is_floating_point():  # These targets have no default loss.
        found = doubtful(data.y.cpu().numpy()) or (
            f"expected one class label per row, or floats for regression, found whole numbers of shape "
            f"{tuple(data.y.shape)}; name a loss, --loss bce for several labels of 0 and 1 per row"
        )
        raise UserError(f"data {data.name}: {found}")
    else:
        loss = None
    return Simulation(config.method, model, data, config, loss, folder=folder, new=new)


def load_federation(
    config: Config, progress: Callable[[str, int, int], None] | None = None
) -> tuple[Config, Federated]:
    """Return the config with the number of clients of its data, and the data."""
    from ..data import load

    given: dict[str, Any] = {
        "split": config.split,
        "clients": config.clients or None,
        "seed": config.seed,
        "augment": config.augment,
        "data_dir": config.data_dir or None,
        "client_test": config.client_test,
    }
    for spec, kind in ((config.data, "data"), (config.model, "model")):
        for key in spec.options:
            if key in given or key in ("progress", "data", "validation", "code"):
                raise UserError(f"config: {kind}.{key} is not an option of the {kind}; set the config's own key")
    if config.data_dir and not Path(config.data_dir).expanduser().exists():
        raise UserError(
            f"data: there is nothing at {config.data_dir}; if the data were moved, give their new place (--data-dir)"
        )
    data = load(config.data.name, **given, progress=progress, code=config.data.code, **config.data.options)
    done = "paper" if data.pipeline.random else "none"
    config = replace(config, clients=config.clients or data.clients, augment=config.augment or done)
    if config.validation:
        data = data.with_validation(config.validation, config.seed)
    if not config.test_set:
        own = data.client_test is not None and data.client_test.held
        data = replace(data, x_test=None, y_test=None, client_test=None if own else data.client_test)
    return config, data


def run_config(
    config: Config,
    out: Path | str,
    *,
    overwrite: bool = False,
    observers: Iterable[Observer | str] = (),
    progress: Callable[[str, int, int], None] | None = None,
) -> dict[str, Any]:
    """Run a config into a directory and return its summary.

    The directory gets `config.toml` before anything slow happens, so that a run killed at any time can be resumed; a
    line of `rounds.jsonl` per round, checkpoints, and at the end `model.safetensors` and `summary.json`. A run that
    diverges keeps its rounds, and its summary says so. Bad input leaves no files behind, and an earlier run is not
    overwritten before data and model of the new one are loaded.

    Args:
        observers: `fedspeed.Observer`s or their names, called as the run proceeds; they are not part of the config.
        progress: called with (what, done, total) during slow steps before the rounds, a download for example.
    """
    with paused():
        from ..methods import require_name
        from .checkpoint import Checkpoints

    require_name(config.method)
    out, watching = Path(out), Observers(observers)
    run = RunDir(out)
    run.refuse_a_run(overwrite)
    made = run.missing_folders()
    with exclusive(out):
        run.refuse_a_run(overwrite)  # Another process may have finished one before the lock.
        fresh = not run.existing()
        if fresh:
            run.create()
        try:
            if fresh:
                write_config(out, config)
            simulation = prepare(config, progress, run.states, new=True)
        except Exception:
            if fresh:
                run.withdraw(made)
            raise
        with simulation:
            if not fresh:
                run.create()
            # Written again with the defaults resolved (`auto`: the engine decides the last bits). The checkpoints are
            # bound to the digest of this file.
            plan = simulation.plan
            layers = config.layers if plan.layers == "auto" else plan.layers
            clients, augment = getattr(plan, "clients", 0), getattr(plan, "augment", config.augment)
            config = replace(
                config, engine=plan.engine, layers=layers, clients=clients, active=plan.active, augment=augment
            )
            write_config(out, config)
            checkpoints = Checkpoints(out, config.checkpoint_every, bound_to(out, simulation), config.keep_every)
            return _run(RunRecorder(out, config, simulation, [], checkpoints), watching)


def resume(
    out: Path | str,
    *,
    observers: Iterable[Observer | str] = (),
    progress: Callable[[str, int, int], None] | None = None,
    allow_code: bool = False,
    rounds: int = 0,
    data_dir: str = "",
    placement: Mapping[str, Any] | None = None,
    **rules: Any,
) -> dict[str, Any]:
    """Continue a run from its newest checkpoint, or from round 0 if it has none: the same bits as without a break.

    A finished run is left as it is, and its summary returned, unless it gets more rounds: then it ends as if it had had
    them from the start. The same holds for a run stopped by a rule, unless that rule is changed or dropped.

    Args:
        observers, progress: as for `run_config`.
        allow_code: also if the directory's config names Python files, which are then executed.
        rounds: the number of rounds in all; 0 for the number in its config.
        data_dir: where the data are now, if they were moved.
        placement: where to compute it from now on, `{"backend": "ray", "workers": 8}`; the rest is in its config.
        rules: `stop_at`, `patience`, `min_delta` or `max_time` from now on; "none" or 0 drops the rule.
    """
    out, watching = Path(out), Observers(observers)
    config = config_to_resume(out, allow_code, rounds, data_dir, placement, **rules)
    return resume_config(out, config, watching, progress, data_dir)


def config_to_resume(
    out: Path,
    allow_code: bool = False,
    rounds: int = 0,
    data_dir: str = "",
    placement: Mapping[str, Any] | None = None,
    **rules: Any,
) -> Config:
    """Return the config with which `resume` continues a run; see there for the arguments."""
    config = with_rules(with_rounds(read_config(out, allow_code), rounds), rules)
    return replace(config, data_dir=data_dir or config.data_dir, **(placement or {}))


def resume_config(
    out: Path,
    config: Config,
    watching: Observers,
    progress: Callable[[str, int, int], None] | None = None,
    data_dir: str = "",
) -> dict[str, Any]:
    """Continue the run in a directory with the config of `config_to_resume`, and return its summary; see `resume`."""
    run = RunDir(out)
    done = final_summary(run, config)
    if done is not None:
        return done
    with paused():
        from .checkpoint import Checkpoints

    with exclusive(out):
        checkpoints = Checkpoints(out, config.checkpoint_every, keep=config.keep_every)
        saved = checkpoints.latest()  # before the data, which may take long
        records = run.records(saved.t) if saved else []
        with prepare(config, progress, run.states) as simulation:
            records = continue_run(out, config, simulation, checkpoints, saved, records, data_dir)
            return _run(RunRecorder(out, config, simulation, records, checkpoints), watching)


def extend(run: Path | str, rounds: int, **how: Any) -> dict[str, Any]:
    """Continue a run to `rounds` rounds in all, as if it had had them from the start; return its summary.

    Args:
        how: as for `resume`.
    """
    if type(rounds) is not int or rounds < 1:
        raise UserError(f"rounds: expected how many the run is to have in all, found {rounds!r}")
    return resume(run, rounds=rounds, **how)


def continue_run(
    out: Path,
    config: Config,
    simulation: Simulation,
    checkpoints: Checkpoints,
    saved: Saved | None,
    records: list[Record],
    data_dir: str = "",
) -> list[Record]:
    """Set a simulation and its run directory back to the newest checkpoint, and return the records up to it.

    Everything is checked before anything is changed.
    """
    from .checkpoint import nearest

    run = RunDir(out)
    with disk_errors(out, config):
        if saved is None:
            store_layers(out, config, simulation.plan.layers)
        checkpoints.bound = bound_to(out, simulation)
        if saved is not None:
            checkpoints.check(saved, checkpoints.bound)
            then, now = (bound.get("variables", "") for bound in (saved.manifest.bound, checkpoints.bound))
            if then and then != now:
                what = f"environment variables that change the last bits differ ({then} then, {now} now)"
                warnings.warn(f"{what}; the run continues, equal up to rounding", stacklevel=3)
        again = saved if saved is not None and _scored_as_the_last(out, records[-1], config) else None
        if again is not None:
            saved = nearest(run, again.t - 1)
            if saved is None:
                raise UserError(
                    f"{out} cannot be extended bit for bit: round {again.t} was evaluated only because it was the last "
                    f"(eval_every, client_metrics), and there is no checkpoint before it; start a run with more rounds"
                )
            checkpoints.check(saved, checkpoints.bound)
            records = records[: saved.t]
        amend(out, config, data_dir=data_dir)
        if again is not None:
            run.manifest_path(again.t).unlink(missing_ok=True)  # `rewind_to` removes the rest.
        if saved is not None:
            checkpoints.restore(saved, simulation, records)
        run.remove_results()  # First: they describe rounds that are cut off below.
        run.clear() if saved is None else checkpoints.rewind_to(saved, simulation.states)
        run.remove_partial()
        if saved is None or saved.manifest.rounds is None:
            run.write_records(records)
    return records


def _run(recording: RunRecorder, observers: Observers) -> dict[str, Any]:
    """Run the rounds that are left, and return the summary."""
    simulation = recording.simulation
    simulation.observers, simulation.recorder = observers, recording
    rounds = iter(simulation)  # Kept here: dropped by the loop, it would end before the error is known.
    with simulation:
        for _ in rounds:
            pass
    return recording.summary


def with_rounds(config: Config, rounds: int) -> Config:
    """Return the config with more rounds, 0 for no change; raise for fewer."""
    if rounds and rounds < config.rounds:
        raise UserError(
            f"--rounds: expected at least the {config.rounds} rounds of the run, got {rounds}; rounds can be "
            f"added, not removed"
        )
    return replace(config, rounds=rounds or config.rounds)


def _scored_as_the_last(out: Path, record: Record, config: Config) -> bool:
    """Return whether a round was evaluated only because it was the last, which it no longer is."""
    config = config.config_at(record.round - 1) or config
    scores = (record.test_loss, record.test_accuracy, record.validation_loss, record.validation_accuracy)
    due = record.round % config.eval_every == 0 or record.round >= config.rounds
    if not due and any(score is not None for score in scores):
        return True
    measured = RunDir(out).client_metrics() if not config.scores_clients(record.round) else None
    return measured is not None and record.round in measured.rounds
