"""`simulate`: turn its arguments into method, model, data and plan, or raise a clear error; make, and record, a run.

The run directory of objects (any module, any data, any loss) cannot store them and build them again. So its config
identifies them by names and digests, and continuing takes the same call with the same objects; others are refused.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import sys
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, Unpack

import tomli_w
import torch
from torch import nn

from ..client.flat_model import Loss
from ..client.losses import loss_name, named_loss, place
from ..config.config import Config
from ..config.lr_schedule import from_file
from ..config.plan import PLACEMENT, Plan, Settings, lists_settings
from ..config.spec import GIVEN, LOSSES, OWN_CODE, SETTINGS, Spec, setting_text
from ..config.stopping import RULES, as_targets
from ..data.federated import Federated, federated
from ..errors import UserError, unknown
from ..methods import METHODS, WRAPPERS, build
from ..methods.base import Method, nested
from ..models import MODELS, build_model
from ..record import is_number
from ..server.observers import Observer, Observers
from ..server.simulation import Simulation
from ..utils.files import flat
from ..utils.own_code import PLAIN, code_digest
from ..utils.random import torch_seed
from .checkpoint import Checkpoints
from .config_file import as_stored, bound_to, layers_of, write_config
from .directory import CONFIG, RunDir, exclusive
from .launch import continue_run, with_rounds
from .recorder import RunRecorder
from .summary import final_summary

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


class MakeSimulation(Protocol):
    """A function that builds the simulation of a run directory."""

    def __call__(self, *, new: bool, folder: Path, layers: str) -> Simulation:
        """Return the simulation at round 0.

        Args:
            new: whether the run begins now, so that its model and loss have not been tried.
            folder: where client states may go.
            layers: how the run in the directory computes residual blocks, which the plan may leave open.
        """


def recorded(
    out: Path | str | None,
    resume: bool,
    make: MakeSimulation,
    model: nn.Module,
    targets: tuple[float, ...] = (),
) -> Simulation:
    """Return a simulation that records to a directory, at round 0 or where the run of the same objects in it stopped.

    Args:
        make: builds the simulation.
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
            layers = layers_of(run, run.config()) if continues else "auto"
            simulation = make(new=not continues, folder=run.states, layers=layers)
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
    before = stored.get("targets")
    if config.targets and list(config.targets) != before:  # New targets, which change no bit, replace those stored.
        run.write_tables(stored | {"targets": list(config.targets)})
    if not config.targets and isinstance(before, list) and all(is_number(a) and 0 < a < 1 for a in before):
        config = replace(config, targets=tuple(before))
    checkpoints = Checkpoints(out, config.checkpoint_every, keep=config.keep_every)
    saved = checkpoints.latest()
    records = run.records(saved.t) if saved else []
    if saved is not None and final_summary(run, config) is not None:
        checkpoints.check(saved, bound_to(out, simulation))
        checkpoints.restore(saved, simulation, records)
    else:
        records = continue_run(out, config, simulation, checkpoints, saved, records)
    return RunRecorder(out, config, simulation, records, checkpoints, partial(exclusive, out))


def _require_same(out: Path, stored: dict[str, Any], config: ObjectsConfig) -> None:
    """Raise if a run is of another method, plan, model, data, loss or code: the first that differs is named."""
    layers = layers_of(RunDir(out), stored)
    given = tomllib.loads(tomli_w.dumps(as_stored(config)))
    then, now = (flat({"layers": layers} | tables) for tables in (stored, given))
    if type(stored.get("rounds")) is not int:
        raise UserError(f"{RunDir(out).config_file} was changed: expected a number of rounds; put it back")
    for key in {**now, **then}:
        loose = key in (*PLACEMENT, *RULES, "rounds", "targets") or key.endswith("origin")
        if loose or then.get(key) == now.get(key) or key.startswith(f"{OWN_CODE}."):  # The code is compared below.
            continue
        fix = FIX.get(key, "make the same call as before")
        expected, found = (repr(tables.get(key, "nothing"))[:99] for tables in (then, now))
        if (setting := key.partition(".")[0]) in SETTINGS:
            key = setting
            expected, found = (_setting(tables.get(key, getattr(Plan(), key))) for tables in (stored, config.to_dict()))
        raise UserError(
            f"{out} holds another run: expected {key} {expected}, found {found}; {fix}, or choose another out"
        )
    code, own = stored.get(OWN_CODE), config.own_code
    if not isinstance(code, dict) or not own or code.get("made_by") != own["made_by"]:
        return  # Runs of older versions, or made by another Python, cannot tell whether code was edited.
    if changed := [key for key in PARTS if code.get(key) != own.get(key)]:
        raise UserError(
            f"{out} holds another run: its code differs in {', '.join(changed)}, edited since it began; put that "
            f"back, or choose another out"
        )


def _setting(value: Any) -> str:
    """Return a setting that may be an object, for a message."""
    given = isinstance(value, dict) and value.get("name") == GIVEN
    return f"the object {value.get('object')}"[:99] if given else repr(setting_text(value))[:99]


def _config(simulation: Simulation, model: nn.Module) -> ObjectsConfig:
    """Return the config that identifies the objects of a simulation by names, plain attributes and digests."""
    plan, data, work = simulation.plan, simulation.data, simulation.work
    settings = {field.name: getattr(plan, field.name) for field in fields(Plan)}
    for key in SETTINGS:
        if not isinstance(settings[key], str | Spec):  # an object
            settings[key] = Spec(GIVEN, {"object": loss_name(settings[key])})
    identity = {
        "set": data.name,
        "fingerprint": data.fingerprint,
        "split_fingerprint": data.split_fingerprint,
        "pipeline": repr(data.pipeline),
    }
    return ObjectsConfig(
        **settings,
        method=simulation.method,
        model=Spec(GIVEN, {"class": place(type(model)), "parameters": work.flat.d, "digest": module_digest(model)}),
        data=Spec(GIVEN, identity),
        split=data.split,
        clients=data.clients,
        augment=GIVEN,
        loss=loss_name(work.loss),
        no_decay=tuple(work.flat.no_decay),
        own_code=_own_code(simulation, model),
    )


def _own_code(simulation: Simulation, model: nn.Module) -> dict[str, str]:
    """Return digests of the code of the caller's method, model, loss and settings, as far as it is not installed."""
    found = {
        "method": code_digest(*(type(method) for method in nested(simulation.method))),
        "model": code_digest(*dict.fromkeys(type(part) for part in model.modules())),
        "layers": _layers_digest(model),
        "loss": code_digest(simulation.work.loss),
        **{key: code_digest(value) for key in SETTINGS if callable(value := getattr(simulation.plan, key))},
    }
    python = ".".join(map(str, sys.version_info[:2]))
    return {"made_by": f"Python {python}, torch {torch.__version__}"} | {k: v for k, v in found.items() if v}


def _layers_digest(model: nn.Module) -> str:
    """Return the digest of the plain settings of layers, a rate of dropout for example; this package's may change."""
    ours = __name__.partition(".")[0]
    found = {}
    for name, part in model.named_modules():
        if place(type(part)).partition(".")[0] != ours:  # ResNet is stored as the Sequential that it was
            own = {} if type(part).__module__.partition(".")[0] == ours else vars(part)
            kept = {k: v for k, v in own.items() if not k.startswith("_") and k != "training" and _is_plain(v)}
            found[name] = sorted((k, repr(v)) for k, v in kept.items())
    return hashlib.blake2b(json.dumps(found).encode(), digest_size=16).hexdigest()


def _is_plain(value: Any) -> bool:
    return all(map(_is_plain, value)) if isinstance(value, tuple) else isinstance(value, PLAIN)


def module_digest(model: nn.Module) -> str:
    """Return the digest of a module: classes, names, shapes and values of layers, parameters (and whether they are
    trained) and buffers."""
    found = hashlib.blake2b(digest_size=16)
    found.update(json.dumps([(name, place(type(part))) for name, part in model.named_modules()]).encode())
    for name, a in [*model.named_parameters(), *model.named_buffers()]:
        found.update(json.dumps([name, str(a.dtype), list(a.shape), a.requires_grad]).encode())
        found.update(a.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


@lists_settings
def simulate(
    method: Method | type[Method] | str,
    model: nn.Module | Callable[[], nn.Module] | str,
    data: Federated,
    plan: Plan | None = None,
    *,
    loss: Loss | str | dict[str, Any] | None = None,
    no_decay: Sequence[str] = (),
    out: Path | str | None = None,
    resume: bool = False,
    targets: Sequence[float] = (),
    observers: Sequence[Observer | str] = (),
    **settings: Unpack[Settings],
) -> Simulation:
    """Train `model` over the clients of `data`; iterate to run the rounds.

    Args:
        method: for example `FedSpeed(lam=10, rho=0.1)`; a class or a name, `"fedspeed"`, takes its defaults.
        model: any module; a copy of it is trained, its parameters are x^0. A name of `MODELS`, or a class without
            arguments, is built from the seed.
        data: the samples of every client; `load_data` and `Federated.from_arrays` make it.
        plan: how to train; every keyword of `Plan` may also be given as `settings`.
        loss: a function `loss(model(x), y)`, the mean over a batch, or a name: `"cross-entropy:smoothing=0.1"`,
            `"mse"`, `"huber:delta=0.5"`, `"bce"` for several labels per row, `"file.py:loss"`. By default cross-entropy
            for classes, the squared error for floating targets.
        no_decay: names, or ends of names, of parameters without weight decay.
        out: a run directory to write while you iterate; however that ends, the run can be resumed.
        resume: continue the run in `out`, if there is one; it must have the same arguments, and ends with the same
            bits as without a break. With more `rounds`, it ends as if it had had them from the start.
        targets: accuracies to time, stored in `out` for its tables.
        observers: `fedspeed.Observer`s or their names, called as the run proceeds.

    Returns:
        A `Simulation`: an iterable of `Record`s with the current vector `.x`, `.model`, `.server` and `.states`.

    Example:
        >>> import fedspeed
        >>> data = fedspeed.load_data("digits", split="dirichlet:0.3", clients=50)
        >>> model = fedspeed.build_model("linear", data)
        >>> run = simulate(fedspeed.FedSpeed(), model, data, rounds=2, active=5, batch_size=10)
        >>> [record.round for record in run]
        [1, 2]
    """
    watching, goals = Observers(observers), as_targets(targets)
    plan, data = as_plan(plan, dict(settings)), federated(data)
    how = as_method(method), as_model(model, data, plan.seed), data
    rest = as_loss(loss), no_decay

    def make(*, new: bool = True, folder: Path | None = None, layers: str = "auto") -> Simulation:
        chosen = replace(plan, layers=layers) if plan.layers == "auto" else plan
        return Simulation(*how, chosen, *rest, folder, watching, new=new)

    if out is None and not resume:
        return make()
    return recorded(out, resume, make, how[1], goals)


def as_method(value: Any) -> Method:
    """Return a method; a name, a table or a class stands for one with its defaults.

    Example:
        >>> as_method("fedprox") == as_method(METHODS["fedprox"]) == METHODS["fedprox"]()
        True
    """
    if isinstance(value, Method):
        return value
    if isinstance(value, str | dict):
        return build({"name": value} if isinstance(value, str) else value)
    if isinstance(value, type) and issubclass(value, Method):
        _refuse_arguments("method", value)
        return value()
    raise UserError(
        f"method: expected a method such as FedSpeed(rho=0.1), its class or its name, found {_a(value)}; "
        f"the names are {', '.join(METHODS)}"
    )


def as_model(value: Any, data: Federated, seed: int) -> nn.Module:
    """Return a module; a name of `MODELS`, or a class or function without arguments, is built from the seed."""
    if isinstance(value, nn.Module):
        return value
    named = next((name for name, builder in MODELS.items() if builder is value), value)
    if isinstance(named, str):
        return build_model(named, data, seed=seed)
    if callable(value):
        _refuse_arguments("model", value)
        with torch_seed(seed, "init"):
            made = value()
        if isinstance(made, nn.Module):
            return made
        raise UserError(f"model: expected an nn.Module, found {_a(made)} that {value.__name__}() returned; return one")
    raise UserError(
        f"model: expected an nn.Module, or one of the names {', '.join(MODELS)}, found {_a(value)}; "
        f"fedspeed.build_model makes one that fits the data"
    )


def as_plan(base: Any, settings: dict[str, Any]) -> Plan:
    """Return the plan with some settings changed; raise for an unknown one, naming the nearest."""
    if base is not None and not isinstance(base, Plan):
        raise UserError(f"plan: expected a Plan, found {_a(base)}; give settings by name, simulate(..., rounds=60)")
    fields = Plan().fields()
    for name in settings:
        if name in ("client_test", "validation"):
            raise UserError(
                f"simulate: {name}: expected as a part of the data, found as a setting; load_data(..., {name}=0.2), or "
                f"data.with_{name}(0.2)"
            )
        if name not in fields:
            others = ("plan", "loss", "no_decay", "out", "resume", "targets", "observers")
            raise unknown("keyword of simulate", name, [*fields, *others])
    if "lr_schedule" in settings:
        settings = {**settings, "lr_schedule": from_file(settings["lr_schedule"])}
    return Plan(**{**{name: getattr(base or Plan(), name) for name in fields}, **settings})


def as_loss(loss: Any) -> Loss | None:
    """Return the function of a loss; None stands for the default one. Raise for what cannot be called, or is a class.

    Example:
        >>> as_loss("mse").__name__
        'mse_loss'
    """
    if isinstance(loss, str | dict):
        return named_loss(loss)
    if (loss is not None and not callable(loss)) or isinstance(loss, type):
        raise UserError(
            f"loss: expected a function loss(model(x), y) or a name of {', '.join(LOSSES)}, found {_a(loss)}; give an "
            f"instance, such as nn.BCEWithLogitsLoss()"
        )
    return loss  # type: ignore[no-any-return]


def _refuse_arguments(what: str, made: Any) -> None:
    """Raise if a class or function cannot be called without arguments."""
    name = getattr(made, "__name__", type(made).__name__)
    try:
        signature = inspect.signature(made)
        signature.bind()
    except ValueError:  # It has no signature.
        return
    except TypeError:
        raise UserError(
            f"{what}: expected a {what}, found {'the class' if isinstance(made, type) else 'the function'} {name}, "
            f"which needs arguments; give {name}(...) with them"
        ) from None


def _a(value: Any) -> str:
    """Return a short description of a value."""
    if value is None or isinstance(value, str | int | float):
        return repr(value)
    return f"the class {value.__name__}" if isinstance(value, type) else f"a {type(value).__name__}"
