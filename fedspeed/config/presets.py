"""Presets: the settings of the paper for each method, and those of its authors' code where they differ."""

from __future__ import annotations

from typing import Any

from ..errors import UserError
from ..methods import METHODS, Wrapper, class_of
from ..methods.base import Method, nested

PRESETS = ("paper", "released")
"""`paper` gives each method the paper's own learning-rate decay. `released` sets what the code of FedSpeed's authors
does otherwise (docs/explanation/authors-code.md), and what a method's class states in `released`."""

RELEASED: dict[str, Any] = {
    "cohort": "bernoulli",
    "clip": 10.0,
    "clip_mode": "released",
    "decay_outside_mix": True,
    "lr_decay": 0.998,
    "eval_every": 1,
}
"""The settings of their code in every run, whatever the data."""

THEIR_METHODS = "fedavg fedprox fedadam scaffold feddyn fedcm fedsam mofedsam fedgamma fedspeed fedsmoo"
"""The methods of their code, woodenchild95/FL-Simulator: the choices of `--method` in its train.py."""

THEIR_DATA = ("cifar10", "cifar100", "tinyimagenet")
"""The data of the paper that their code loads; its augmentation is not defined for other data."""

TEXT = ("shakespeare",)
"""Data that are not pictures of any kind: their code, its network and its augmentation have nothing for them."""


def as_released(given: dict[str, Any], tables: dict[str, dict[str, Any]], split: Any) -> dict[str, Any]:
    """Return a config with the settings of their code where the user gave none.

    Args:
        given: the keys of a config, as the user gave them.
        tables: the tables `method`, `model` and `data` of it, those that were not given by their default names.
        split: its split, or the usual one; `dirichlet:A`, and `iid` on CIFAR-10, are read as their code deals them.
    """
    model, data = tables["model"], tables["data"]["name"]
    if data in TEXT:
        raise UserError(
            f"preset released: expected pictures as in the authors' code, found {data}, which is text; leave the "
            f"preset out and give the options it stands for (docs/explanation/authors-code.md)"
        )
    if model["name"] == "resnet18_gn" and model.get("trim") is True:  # else the clip sees a smaller norm than theirs
        model = {"keep_norm": True, **model}
    augment = {"augment": "released"} if data in THEIR_DATA else {}
    method = released(tables["method"])
    return {**RELEASED, **augment, **given, "method": method, "model": model, "split": _dealt(split, data)}


def _dealt(split: Any, data: str) -> Any:
    """Return the split that their code makes of a name; a split that is not a name stays as it is."""
    if not isinstance(split, str):
        return split
    if split.strip() == "iid" and data == "cifar10":  # CIFAR-100 is dealt class by class there: `iid` as it is
        return "iid-random"
    return split.replace("dirichlet:", "dirichlet-refill:") if split.startswith("dirichlet:") else split


def released(table: dict[str, Any]) -> dict[str, Any]:
    """Return a method's table with the values of its authors' code where none is given, and so for methods inside it.

    A method of this package that is not in the code of FedSpeed's authors and has no values of its own authors' code
    is refused. Wrappers and a user's methods are taken as they are.

    Example:
        >>> released({"name": "topk", "base": "fedadam"})
        {'name': 'topk', 'base': {'tau': 0.01, 'name': 'fedadam'}}
    """
    base: Any = table.get("base")
    base = {"name": base} if isinstance(base, str) else base
    named = isinstance(base, dict) and isinstance(base.get("name"), str)  # others are refused where methods are built
    inner = {"base": released(base)} if named else {}
    cls = class_of(table)[0]
    if METHODS.get(table["name"]) is cls and table["name"] not in THEIR_METHODS.split() and not cls.released:
        raise UserError(
            f"preset released: expected a method of the authors' code, found {table['name']}; leave the preset out "
            f"and give the options it stands for (docs/explanation/authors-code.md)"
        )
    return {**cls.released, **table, **inner}


def paper_decay(method: Method) -> float:
    """Return the paper's learning-rate decay per round for a method: `lr_decay = 0` and `--preset paper`.

    Every class states it as `paper_decay`; a class of the user's may have its own, `lr_decay = 0.99`.

    Example:
        >>> from fedspeed import FedAvg, FedInit, FedSpeed
        >>> paper_decay(FedAvg()), paper_decay(FedSpeed()), paper_decay(FedInit(FedSpeed()))
        (0.998, 0.9995, 0.9995)
    """
    own: float | None = getattr(method, "lr_decay", None)
    if own is not None:
        return own
    inner = list(nested(method))[1:]
    asks = isinstance(method, Wrapper) or hasattr(type(method), "lr_decay")  # older files: return self.base.lr_decay
    return paper_decay(inner[0]) if inner and asks else method.paper_decay
