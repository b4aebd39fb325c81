"""Run directories of objects given to `simulate`: any module, any data, any loss.

Objects cannot be stored and built again. So the config identifies them by names and digests, and continuing takes the
same call with the same objects; others are refused.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tomli_w
import torch

from ..client.losses import loss_name, place
from ..config.config import Config
from ..config.plan import PLACEMENT, Plan
from ..config.spec import GIVEN, OWN_CODE, SETTINGS, Spec, setting_text
from ..config.stopping import RULES
from ..errors import UserError
from ..methods import METHODS, WRAPPERS
from ..methods.base import nested
from ..record import is_number
from ..utils.code_digest import PLAIN, code_digest
from ..utils.tables import flat
from .checkpoint import Checkpoints
from .config_file import as_stored, bound_to, write_config
from .directory import CONFIG, RunDir, exclusive
from .launch import continue_run, with_rounds
from .recorder import RunRecorder
from .summary import final_summary

if TYPE_CHECKING:
    from torch import nn

    from ..data.federated import Federated
    from ..server.simulation import Simulation

FIX = {
    "model.digest": "build the model from the same seed (torch.manual_seed), or give its class, which is",
    "data.fingerprint": "give the same data",
    "data.split_fingerprint": "give the same split",
    "data.pipeline": 'prepare the data in the same way (own pictures that were flipped and cropped: augment="paper")',
    "loss": "give the same loss=",
}
PARTS = ("method", "model", "layers", "loss", *SETTINGS)
"""The keys of `own_code` with digests."""


@dataclass(frozen=True)
class ObjectsConfig(Config):
    """The config of a run of given objects: a plan, and names and digests that identify the objects."""

    loss: str = ""  # the function's name, in every config: declared again, it is not `later`
    no_decay: tuple[str, ...] = ()
    own_code: dict[str, str] = field(default_factory=dict)

    def _settle_loss(self) -> None:
        """Do nothing: any function may have been given."""

    def _settle_clients(self) -> None:
        """Do nothing: the data are loaded before the config is made."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain tables; a method from outside this package is also named by its class."""
        tables = super().to_dict()
        cls = type(self.method)
        if not self.method.source and cls not in {**METHODS, **WRAPPERS}.values():
            tables["method"] = {**tables["method"], "class": place(cls)}
        if not self.own_code:
            tables.pop(OWN_CODE, None)
        return tables


def recorded(
    out: Path | str | None,
    resume: bool,
    make: Callable[..., Simulation],
    model: nn.Module,
    targets: tuple[float, ...] = (),
) -> Simulation:
    """Return a simulation that records to a directory, at round 0 or where the run of the same objects in it stopped.

    Args:
        make: builds the simulation; its argument is a folder for client states.
        model: the caller's module.
        targets: accuracies to time; without any, a run that is continued keeps its own.
    """
    if out is None or not isinstance(out, str | Path) or not isinstance(resume, bool):
        raise UserError(f"simulate: expected out= a folder and resume= True or False, found {out!r} and {resume!r}")
    out = Path(out)
    run = RunDir(out)
    _refuse(out, resume)
    made = run.missing_folders()
    with exclusive(out):
        continues = _refuse(out, resume)  # Another process may have begun one before the lock.
        if not continues:
            run.create()
        simulation = None
        try:
            simulation = make(folder=run.states)
            config = replace(_config(simulation, model), targets=targets)
            simulation.recorder = (_resumed if continues else _begun)(out, config, simulation)
        except BaseException as error:
            if simulation is not None:
                simulation.close()
            begun = run.config_file.exists() and not isinstance(error, Exception)  # The run can be continued.
            if not continues and not begun:
                run.withdraw(made)
            raise
    return simulation


def _refuse(out: Path, resume: bool) -> bool:
    """Return whether a directory holds a run; raise if that run may not be continued."""
    found = RunDir(out).existing()
    if found and not resume:
        raise UserError(f"{out} already holds a run; resume=True continues it, or choose another out")
    if found and CONFIG not in found:
        raise UserError(f"{out} holds {found[0]} but no {CONFIG}: no run to continue; choose another out")
    return bool(found)


def _begun(out: Path, config: ObjectsConfig, simulation: Simulation) -> RunRecorder:
    write_config(out, config)
    checkpoints = Checkpoints(out, config.checkpoint_every, bound_to(out, simulation), config.keep_every)
    return RunRecorder(out, config, simulation, [], checkpoints, partial(exclusive, out))


def _resumed(out: Path, config: ObjectsConfig, simulation: Simulation) -> RunRecorder:
    run = RunDir(out)
    stored = run.config()
    _require_same(out, stored, config)
    with_rounds(replace(config, rounds=stored["rounds"], patience=0, min_delta=0.0), config.rounds)
    config = _with_targets(run, stored, config)
    checkpoints = Checkpoints(out, config.checkpoint_every, keep=config.keep_every)
    saved = checkpoints.latest()
    records = run.records(saved.t) if saved else []
    if saved is not None and final_summary(run, config) is not None:
        checkpoints.check(saved, bound_to(out, simulation))
        checkpoints.restore(saved, simulation, records)
    else:
        records = continue_run(out, config, simulation, checkpoints, saved, records)
    return RunRecorder(out, config, simulation, records, checkpoints, partial(exclusive, out))


def _with_targets(run: RunDir, stored: dict[str, Any], config: ObjectsConfig) -> ObjectsConfig:
    """Return the config with the targets of its run; new ones, which change no bit, replace those stored."""
    before = stored.get("targets")
    if config.targets and list(config.targets) != before:
        run.write_tables(stored | {"targets": list(config.targets)})
    kept = before if isinstance(before, list) and all(is_number(a) and 0 < a < 1 for a in before) else ()
    return config if config.targets else replace(config, targets=tuple(kept))


def _require_same(out: Path, stored: dict[str, Any], config: ObjectsConfig) -> None:
    """Raise if a run is of another method, plan, model, data or loss: the first that differs is named."""
    then, now = flat(stored), flat(tomllib.loads(tomli_w.dumps(as_stored(config))))
    if type(stored.get("rounds")) is not int:
        raise UserError(f"{RunDir(out).config_file} was changed: expected a number of rounds; put it back")
    for key in {**now, **then}:
        if key in (*PLACEMENT, *RULES, "rounds", "targets") or key.endswith("origin") or then.get(key) == now.get(key):
            continue
        if key.startswith(f"{OWN_CODE}."):  # below
            continue
        fix = FIX.get(key, "make the same call as before")
        expected, found = (repr(tables.get(key, "nothing"))[:99] for tables in (then, now))
        if (setting := key.partition(".")[0]) in SETTINGS:
            key = setting
            expected, found = (_setting(tables.get(key, getattr(Plan(), key))) for tables in (stored, config.to_dict()))
        raise UserError(
            f"{out} holds another run: expected {key} {expected}, found {found}; {fix}, or choose another out"
        )
    _require_same_code(out, stored.get(OWN_CODE), config.own_code)


def _setting(value: Any) -> str:
    """Return a setting that may be an object, for a message."""
    given = isinstance(value, dict) and value.get("name") == GIVEN
    return f"the object {value.get('object')}"[:99] if given else repr(setting_text(value))[:99]


def _require_same_code(out: Path, then: Any, now: dict[str, str]) -> None:
    """Raise if the code of objects was edited; runs of older versions, or made by another Python, cannot tell."""
    if not isinstance(then, dict) or not now or then.get("made_by") != now["made_by"]:
        return
    if changed := [key for key in PARTS if then.get(key) != now.get(key)]:
        raise UserError(
            f"{out} holds another run: its code differs in {', '.join(changed)}, edited since it began; put that "
            f"back, or choose another out"
        )


def _config(simulation: Simulation, model: nn.Module) -> ObjectsConfig:
    """Return the config that identifies the objects of a simulation by names and digests."""
    plan = simulation.plan
    data = simulation.data
    work = simulation.work
    return ObjectsConfig(
        **{field.name: getattr(plan, field.name) for field in fields(Plan)} | _objects(plan),
        method=simulation.method,
        model=Spec(GIVEN, {"class": place(type(model)), "parameters": work.flat.d, "digest": module_digest(model)}),
        data=Spec(GIVEN, _identity(data)),
        split=data.split,
        clients=data.clients,
        augment=GIVEN,
        loss=loss_name(work.loss),
        no_decay=tuple(work.flat.no_decay),
        own_code=_own_code(simulation, model),
    )


def _own_code(simulation: Simulation, model: nn.Module) -> dict[str, str]:
    """Return digests of the code of the caller's method, model, loss and settings, as far as it is not installed."""
    given = {key: value for key in SETTINGS if callable(value := getattr(simulation.plan, key))}
    found = {
        "method": code_digest(*(type(method) for method in nested(simulation.method))),
        "model": code_digest(*dict.fromkeys(type(part) for part in model.modules())),
        "layers": _layers_digest(model),
        "loss": code_digest(simulation.work.loss),
        **{key: code_digest(value) for key, value in given.items()},
    }
    python = ".".join(map(str, sys.version_info[:2]))
    return {"made_by": f"Python {python}, torch {torch.__version__}"} | {k: v for k, v in found.items() if v}


def _layers_digest(model: nn.Module) -> str:
    """Return the digest of the plain settings of layers, a rate of dropout for example; this package's may change."""
    ours = __name__.partition(".")[0]
    found = {
        name: sorted(
            (k, repr(v)) for k, v in vars(part).items() if not k.startswith("_") and k != "training" and _is_plain(v)
        )
        for name, part in model.named_modules()
        if type(part).__module__.partition(".")[0] != ours
    }
    return hashlib.blake2b(json.dumps(found).encode(), digest_size=16).hexdigest()


def _is_plain(value: Any) -> bool:
    return all(map(_is_plain, value)) if isinstance(value, tuple) else isinstance(value, PLAIN)


def _objects(plan: Plan) -> dict[str, Spec]:
    """Return the settings of a plan that are objects, identified by their names and plain attributes."""
    given = {key: getattr(plan, key) for key in SETTINGS}
    return {k: Spec(GIVEN, {"object": loss_name(v)}) for k, v in given.items() if not isinstance(v, str | Spec)}


def _identity(data: Federated) -> dict[str, Any]:
    return {
        "set": data.name,
        "fingerprint": data.fingerprint,
        "split_fingerprint": data.split_fingerprint,
        "pipeline": repr(data.pipeline),
    }


def module_digest(model: nn.Module) -> str:
    """Return the digest of a module: classes, names, shapes and values of layers, parameters (and whether they are
    trained) and buffers."""
    found = hashlib.blake2b(digest_size=16)
    found.update(json.dumps([(name, place(type(part))) for name, part in model.named_modules()]).encode())
    for name, a in [*model.named_parameters(), *model.named_buffers()]:
        found.update(json.dumps([name, str(a.dtype), list(a.shape), a.requires_grad]).encode())
        found.update(a.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()
