"""Models by name: those of the paper and smaller ones. A builder takes the input's shape and the number of outputs.

None has batch norm: clients cannot share running statistics, so normalisation is by groups.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..data.federated import Federated, federated
from ..errors import UserError, unknown
from ..utils.random import torch_seed
from ..utils.registry import call, file_of, load_code, raised, require_part, to_install
from .basic import cnn, lenet, linear, mlp, vector
from .charlstm import CharLSTM, charlstm
from .resnet import resnet18_gn

MODELS: dict[str, Callable[..., nn.Module]] = {
    f.__name__: f for f in (linear, vector, mlp, cnn, lenet, resnet18_gn, charlstm)
}


def takes_numbers(builder: Callable[..., nn.Module]) -> bool:
    """Return whether a builder is one of `MODELS` that computes with its inputs, so that whole numbers become floats.

    A builder of `MODELS` for token ids has the attribute `takes_tokens`. A user's builder gets its inputs as they are.
    Results depend on the answer, so it must not depend on the module in which a builder is defined.
    """
    return builder in MODELS.values() and not getattr(builder, "takes_tokens", False)


def find_builder(name: str, code: str = "") -> Callable[..., nn.Module]:
    """Return the function of a name in `MODELS`, or of `path/to/file.py:build`, which is executed; `code` is the digest
    that the file must have, "" for any."""
    if name in MODELS:
        return MODELS[name]
    if not file_of(name):
        require_part("model", name)
        raise unknown("model", name, MODELS)
    builder: Callable[..., nn.Module] = load_code("model", name, code)
    if not callable(builder):
        raise UserError(f"model {name}: expected a function build(shape, outputs, **options), found {builder!r}")
    return builder


def build_model(name: str, data: Federated, *, seed: int = 0, **options: Any) -> nn.Module:
    """Build a named model that fits the data, initialised as a function of the seed alone.

    Args:
        name: one of `MODELS`, or `path/to/file.py:build` with a function `build(shape, outputs, **options)`, or the
            class of a module that needs no arguments.
        options: the builder's own keywords, e.g. `hidden=(32, 32)` for `mlp`.
    """
    federated(data)
    if not isinstance(name, str):
        raise UserError(
            f"build_model: expected a name, one of {', '.join(MODELS)}, found {name!r}; give a module of your own to "
            f"simulate as it is"
        )
    return build_with(find_builder(name), name, data, seed, options)


def build_with(
    builder: Callable[..., nn.Module], name: str, data: Federated, seed: int, options: dict[str, Any]
) -> nn.Module:
    """Build a model by a function; `name` is for messages and says whether the function is from a user's file."""
    if takes_numbers(builder) and not data.x.dtype.is_floating_point and data.x.dtype != torch.uint8:
        raise UserError(
            f"model {name}: expected floating inputs or bytes, found {data.x.dtype}; use data.floats(), or for token "
            f"ids a model of your own with an embedding"
        )
    alone = _needs_nothing(builder)
    parameters = list(inspect.signature(builder).parameters.values())[0 if alone else 2 :]
    known = {p.name: p.default for p in parameters if p.kind is not p.VAR_KEYWORD}
    for option, value in options.items():
        if len(known) < len(parameters):  # it takes any
            break
        if option not in known:
            raise (
                unknown(f"option of model {name}", option, known)
                if known
                else UserError(f"model {name} has no options, found {option!r}; leave it out")
            )
        if not file_of(name):
            _check_option(name, option, value, known[option])
    shape = tuple(data.y.shape[1:])
    facts = (data.shape, data.classes or math.prod(shape))
    try:
        with torch_seed(seed, "init"):
            model = builder(*facts, **options)
    except UserError:
        raise
    except Exception as error:
        if not alone:
            why = _why(name, builder, facts, error)
            raise UserError(f"model {name}: cannot be built with {options}: {why}") from error
        with torch_seed(seed, "init"):
            model = call("model", name, builder, options)
    if not isinstance(model, nn.Module):
        raise UserError(f"model {name}: expected an nn.Module, found a {type(model).__name__}; return one")
    if isinstance(model, CharLSTM):
        model.check(data.x, data.x_test)
    if data.classes or len(shape) == 1:
        return model
    return nn.Sequential(model, nn.Unflatten(1, shape) if shape else nn.Flatten(0))  # outputs shaped like the targets


def _needs_nothing(builder: Callable[..., nn.Module]) -> bool:
    """Return whether a builder is a class that can be called without arguments, if not with shape and outputs."""
    parameters = inspect.signature(builder).parameters.values()
    free = all(p.default is not p.empty or p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters)
    return isinstance(builder, type) and free


def _why(name: str, builder: Any, facts: tuple[Any, ...], error: Exception) -> str:
    """Return why a model could not be built, and how a user's function was called."""
    if not file_of(name):
        return (str(error).splitlines() or ["not enough memory"])[0]
    path = Path(file_of(name)).resolve()
    reason = raised(error, path) + to_install(error, path)
    if isinstance(error, ImportError):
        return reason
    called = getattr(builder, "__name__", "build")
    return f"{reason}; it is called as {called}(shape, outputs, **options), here {called}({facts[0]}, {facts[1]})"


def _check_option(model: str, option: str, value: Any, default: Any) -> None:
    """Raise unless an option is of the kind of its default: widths in a list, a name, or a whole number >= 0."""
    if isinstance(default, bool):
        wanted, good = "true or false", isinstance(value, bool)
    elif isinstance(default, str):
        wanted, good = f"a name such as {default!r}", isinstance(value, str)
    elif isinstance(default, tuple):
        wanted = f"a list of whole numbers >= 1 such as {list(default)}"
        good = isinstance(value, list | tuple) and all(type(a) is int and a >= 1 for a in value)
    else:
        wanted, good = "a whole number >= 0", type(value) is int and value >= 0
    if not good:
        raise UserError(f"model {model}: {option} must be {wanted}, got {value!r}")
