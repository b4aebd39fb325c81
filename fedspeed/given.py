"""What `simulate` is given: names and classes become the things they stand for, anything else a clear error."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from .data.federated import Federated
from .devices import ready
from .errors import UserError, unknown
from .methods import METHODS, build
from .methods.base import Method
from .models import MODELS, build_model
from .norms import with_group_norm
from .plan import Plan
from .presets import paper_decay
from .sampling import torch_seed
from .stopping import require_scores
from .vec import FlatModel

if TYPE_CHECKING:
    from .server import Simulation


def given_method(value: Any) -> Method:
    """A method; a name, a table or a class stands for one with its defaults.

    Example:
        >>> given_method("fedprox") == given_method(METHODS["fedprox"]) == METHODS["fedprox"]()
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


def given_model(value: Any, data: Federated, seed: int) -> nn.Module:
    """A module; a name of `MODELS`, or a class or function without arguments, is built as a function of the seed."""
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


def copied(model: nn.Module) -> nn.Module:
    """A copy of a model, which is what is trained."""
    try:
        return copy.deepcopy(model)
    except Exception as error:
        reason = (str(error).splitlines() or [""])[0]
        raise UserError(
            f"model: {type(model).__name__} cannot be copied, and it is a copy that is trained ({reason}); run one "
            f"batch through lazy modules, use torch.nn.utils.parametrizations for weight norm"
        ) from error


def flat_model(
    model: nn.Module,
    data: Federated,
    plan: Plan,
    device: torch.device,
    no_decay: Sequence[str],
    method: Method | None = None,
) -> FlatModel:
    """A copy of a model as it is trained, with what the plan says of batch norm.

    Args:
        method: whose `ascent_fraction`, if it has one, takes a part of every batch.
    """
    module = copied(model).to(device)
    module = with_group_norm(module) if plan.batch_norm == "group" else module
    flat = FlatModel(module, no_decay, plan.tracks)
    if flat.statistics:
        fraction = getattr(method, "ascent_fraction", 1.0)
        _refuse_single(flat, data.to(device, flat.dtype), plan.batch_size, fraction, method)
    return flat


def _with_single(n: np.ndarray, batch_size: int, fraction: float) -> np.ndarray:
    """Return the clients, by their numbers of samples, that have a batch of one, or of which a part is one."""
    lone = np.array([b and max(1, round(fraction * b)) == 1 for b in range(batch_size + 1)], dtype=bool)
    return np.flatnonzero(lone[n % batch_size] | (lone[batch_size] & (n >= batch_size)))


def _refuse_single(flat: FlatModel, data: Federated, batch_size: int, fraction: float, method: Method | None) -> None:
    """Raise if some client has a batch of one sample and the model's batch norm cannot take that."""
    n = data.sizes
    alone = _with_single(n, batch_size, fraction)
    if not len(alone):
        return
    client = int(alone[n[alone].argmin()])
    try:
        with torch_seed(0, "batch norm"), torch.no_grad(), flat.statistics.kept():
            flat.model.train()(data.batch(data.rows(client)[:1])[0])
    except ValueError as error:
        if "more than 1 value" not in str(error):
            raise
        sizes = range(batch_size + 1, batch_size + 100)
        other = next((b for b in sizes if not len(_with_single(n, b, fraction))), 0)
        part = f", with ascent_fraction {fraction:g} of {method.label}" if method and fraction < 1 else ""
        raise UserError(
            f"batch_norm: one sample has no variance, and client {client} with {n[client]} samples has a batch of one "
            f"at batch size {batch_size}{part}; {f'--batch-size {other} leaves none, or' if other else 'choose'} "
            f"--batch-norm group"
        ) from None


def given_plan(base: Any, settings: dict[str, Any]) -> Plan:
    """The plan with the settings on top; an unknown one is an error that names the nearest."""
    if base is not None and not isinstance(base, Plan):
        raise UserError(f"plan: expected a Plan, found {_a(base)}; give settings by name, simulate(..., rounds=60)")
    fields = Plan().fields()
    for name in settings:
        if name not in fields:
            others = ("plan", "loss", "no_decay", "out", "resume", "observers")
            raise unknown("keyword of simulate", name, [*fields, *others])
    return Plan(**{**{name: getattr(base or Plan(), name) for name in fields}, **settings})


def fitting_plan(plan: Plan, data: Federated, method: Method) -> Plan:
    """The plan with its cohort's size; data, or a method, that it cannot be for are refused."""
    plan.require_schedules(method, paper_decay(method))
    plan = dataclasses.replace(plan, active=plan.cohort_size(data.clients))
    if plan.active > data.clients:
        raise UserError(
            f"active must be at most the number of clients, got {plan.active} active of {data.clients}; "
            f"lower --active or raise --clients"
        )
    if data.sizes.min() < 1:
        raise UserError(f"data: every client needs at least one sample; client {int(data.sizes.argmin())} has none")
    test, validation = (rows is not None and len(rows) > 0 for rows in (data.y_test, data.validation))
    require_scores(plan, test, validation, data.classes is not None)
    return plan


def require_loss(loss: Any) -> None:
    """Raise for what cannot be called, or is a class; None stands for the usual loss."""
    if (loss is not None and not callable(loss)) or isinstance(loss, type):
        raise UserError(
            f"loss: expected a function loss(model(x), y), found {_a(loss)}; torch.nn.functional.cross_entropy for "
            f"classes, mse_loss for numbers, or an instance such as nn.BCEWithLogitsLoss()"
        )


def pick_device(name: str) -> torch.device:
    """`auto` is cuda, else mps, else cpu; anything else must exist."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        ready(torch.device(name))
        device = torch.zeros(1, device=name).device
        if device.type != "meta":  # whose tensors hold no numbers
            return device
        reason = ""
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
    if not re.fullmatch(r"cpu|mps|cuda(:\d+)?", name):
        raise UserError(f"device: expected auto, cpu, cuda, cuda:N or mps, found {name!r}")
    raise UserError(f"device {name!r} cannot be used here ({reason}); try --device cpu")


def shown(method: Method) -> str:
    """A method with the fields that are not at their defaults.

    Example:
        >>> shown(METHODS["fedspeed"](rho=0.05))
        'FedSpeed(rho=0.05)'
    """
    told = []
    for field in dataclasses.fields(method):
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        value = getattr(method, field.name)
        if value != default:
            told.append(f"{field.name}={shown(value) if isinstance(value, Method) else repr(value)}")
    return f"{type(method).__name__}({', '.join(told)})"


def described(run: Simulation) -> str:
    """A simulation in a line: what it is of, where it stands, how it is computed."""
    flat, data, plan = run.work.flat, run.data, run.plan
    return (
        f"<Simulation: {shown(run.method)}, {type(flat.model).__name__} with "
        f"{flat.size}, {data.name} {data.split} over {data.clients} clients, round {run.t} of "
        f"{plan.rounds}{f' ({run.stopping.status})' if run.stopping.status else ''}, engine {plan.engine}, "
        f"back end {run.placement}>"
    )


def _refuse_arguments(what: str, made: Any) -> None:
    """Raise where a class or function cannot be called without arguments."""
    name = getattr(made, "__name__", type(made).__name__)
    try:
        signature = inspect.signature(made)
        signature.bind()
    except ValueError:  # it says nothing about itself
        return
    except TypeError:
        raise UserError(
            f"{what}: expected a {what}, found {'the class' if isinstance(made, type) else 'the function'} {name}, "
            f"which needs arguments; give {name}(...) with them"
        ) from None


def _a(value: Any) -> str:
    """What a value is, in a few words."""
    if value is None or isinstance(value, str | int | float):
        return repr(value)
    return f"the class {value.__name__}" if isinstance(value, type) else f"a {type(value).__name__}"
