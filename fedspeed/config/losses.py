"""Losses by name: `mse`, `huber:delta=0.5`, `cross-entropy:smoothing=0.1`, `bce`; `client/losses.py` computes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..errors import UserError, unknown
from ..utils.params import Params, param, parse_pairs


@dataclass(frozen=True)
class NoParameters(Params):
    """The parameters of a loss that has none."""


@dataclass(frozen=True)
class Smoothing(Params):
    """The parameter of cross-entropy."""

    smoothing: float = param(0.0, "[0, 1)", "the share of a label that is spread over all classes")


@dataclass(frozen=True)
class Delta(Params):
    """The parameter of the Huber loss."""

    delta: float = param(1.0, "(0, inf)", "the error from which on the loss is linear")


LOSSES: dict[str, type[Params]] = {"cross-entropy": Smoothing, "mse": NoParameters, "huber": Delta, "bce": NoParameters}
"""Name -> its parameters."""


def parse_loss(given: Any) -> tuple[str, dict[str, float]]:
    """Return the name of a loss and its parameters that are not at their defaults.

    Example:
        >>> parse_loss("huber:delta=0.5"), parse_loss("Cross_Entropy : smoothing=0")
        (('huber', {'delta': 0.5}), ('cross-entropy', {}))
    """
    if not isinstance(given, str):
        raise UserError(f"loss: expected a name such as mse or huber:delta=0.5, got {given!r}")
    name, _, text = given.partition(":")
    name = name.strip().lower().replace("_", "-")
    if name not in LOSSES:
        raise unknown("loss", given, [*LOSSES, "file.py:NAME"])
    usual, pairs = LOSSES[name]().fields(), parse_pairs(text)
    if [key for key, _ in pairs if key not in usual] or len(pairs) > len(usual):
        wanted = " and ".join(f"{key}=NUMBER once" for key in usual) or "no parameters"
        raise UserError(f"loss {name}: expected {wanted}, got {given!r}")
    try:
        found = LOSSES[name](**{key: _number(value) for key, value in pairs}).fields()
    except UserError as error:
        raise UserError(f"loss {name}: {str(error).partition(': ')[2]}") from None
    return name, {key: value for key, value in found.items() if value != usual[key]}


def _number(text: str) -> Any:
    try:
        return float(text)
    except ValueError:
        return text


def loss_text(given: Any) -> str:
    """Return a loss in its one spelling; "" stands for the one that the targets decide.

    Example:
        >>> loss_text("huber:delta=1.0"), loss_text("huber: delta=.5"), loss_text("")
        ('huber', 'huber:delta=0.5', '')
    """
    if isinstance(given, str) and not given.strip():
        return ""
    name, own = parse_loss(given)
    return name + "".join(f":{key}={value!r}" for key, value in own.items())
