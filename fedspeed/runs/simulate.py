"""`simulate`: turn its arguments into method, model, data and plan, or raise a clear error; then make a simulation."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Unpack

from torch import nn

from ..client.flat_model import Loss
from ..client.losses import named_loss
from ..config.losses import LOSSES
from ..config.lr_schedule import from_file
from ..config.plan import Plan, Settings, lists_settings
from ..config.stopping import as_targets
from ..data.federated import Federated, federated
from ..errors import UserError, unknown
from ..methods import METHODS, build
from ..methods.base import Method
from ..models import MODELS, build_model
from ..server.observers import Observer, Observers
from ..server.simulation import Simulation
from ..utils.random import torch_seed
from .from_objects import recorded


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
    how = as_method(method), as_model(model, data, plan.seed), data, plan, as_loss(loss), no_decay
    make = partial(Simulation, *how, observers=watching, new=True)
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
