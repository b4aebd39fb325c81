"""`simulate`: turn its arguments into method, model, data and plan, or raise a clear error; then make a simulation."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from ..client.flat_model import Loss
from ..config.plan import Plan
from ..data.federated import Federated, federated
from ..errors import UserError, unknown
from ..methods import METHODS, build
from ..methods.base import Method
from ..models import MODELS, build_model
from ..server.observers import Observer, Observers
from ..server.simulation import Simulation
from ..utils.random import torch_seed
from .from_objects import recorded


def simulate(
    method: Method | type[Method] | str,
    model: nn.Module | Callable[[], nn.Module] | str,
    data: Federated,
    plan: Plan | None = None,
    *,
    loss: Loss | None = None,
    no_decay: Sequence[str] = (),
    out: Path | str | None = None,
    resume: bool = False,
    observers: Sequence[Observer | str] = (),
    **settings: Any,
) -> Simulation:
    """Train `model` over the clients of `data`; iterate to run the rounds.

    Args:
        method: for example `FedSpeed(lam=10, rho=0.1)`; a class or a name, `"fedspeed"`, takes its defaults.
        model: any module; a copy of it is trained, its parameters are x^0. A name of `MODELS`, or a class without
            arguments, is built from the seed.
        data: the samples of every client; `load_data` and `Federated.from_arrays` make it.
        plan: how to train; every keyword of `Plan` may also be given as `settings`.
        loss: `loss(model(x), y)`, the mean over a batch; by default cross-entropy for classes, the squared error for
            floating targets.
        no_decay: names, or ends of names, of parameters without weight decay.
        out: a run directory to write while you iterate; however that ends, the run can be resumed.
        resume: continue the run in `out`, if there is one; it must have the same arguments, and ends with the same
            bits as without a break. With more `rounds`, it ends as if it had had them from the start.
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
    watching = Observers(observers)
    plan, data = as_plan(plan, settings), federated(data)
    require_loss(loss)
    module = as_model(model, data, plan.seed)
    make = partial(Simulation, as_method(method), module, data, plan, loss, no_decay, observers=watching)
    if out is None and not resume:
        return make()
    return recorded(out, resume, make, module)


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
        if name not in fields:
            others = ("plan", "loss", "no_decay", "out", "resume", "observers")
            raise unknown("keyword of simulate", name, [*fields, *others])
    return Plan(**{**{name: getattr(base or Plan(), name) for name in fields}, **settings})


def require_loss(loss: Any) -> None:
    """Raise for a loss that cannot be called, or is a class; None stands for the usual loss."""
    if (loss is not None and not callable(loss)) or isinstance(loss, type):
        raise UserError(
            f"loss: expected a function loss(model(x), y), found {_a(loss)}; torch.nn.functional.cross_entropy for "
            f"classes, mse_loss for numbers, or an instance such as nn.BCEWithLogitsLoss()"
        )


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
