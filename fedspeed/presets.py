"""Named settings: what the paper ran each method with, and what its authors' code does where it differs."""

from __future__ import annotations

from typing import Any

from .method import Method, nested
from .methods import (
    AFedPD,
    AFedPDSAM,
    FedADMM,
    FedDyn,
    FedGloSS,
    FedLESAMD,
    FedPD,
    FedSMOO,
    FedSpeed,
    FedTOGA,
    Wrapper,
    class_of,
)

PRESETS = ("paper", "released")
"""`paper` gives each method the paper's own learning-rate decay; `released` is what the authors' code does where it
differs (docs/released.md), beside what a method's class says in `released`."""

RELEASED: dict[str, Any] = {
    "cohort": "bernoulli",
    "clip": 10.0,
    "clip_mode": "released",
    "decay_outside_mix": True,
    "augment": "released",
    "lr_decay": 0.998,
}

SLOWER = (FedDyn, FedADMM, FedSpeed, FedPD, FedSMOO, AFedPD, AFedPDSAM, FedGloSS, FedTOGA, FedLESAMD)
"""Methods with a prox term and a dual, for which the paper takes a slower decay."""


def released(table: dict[str, Any]) -> dict[str, Any]:
    """A method's table with what its authors' code sets, where nothing is given; of methods inside it, too.

    Example:
        >>> released({"name": "topk", "base": "fedadam"})
        {'name': 'topk', 'base': {'tau': 0.01, 'name': 'fedadam'}}
    """
    base = table.get("base")
    found: Any = {"name": base} if isinstance(base, str) else base
    inner = {"base": released(found)} if _names(base) else {}
    return {**class_of(table)[0].released, **table, **inner}


def _names(base: Any) -> bool:
    """Whether it is a method's name or table; what else stands there is refused where methods are built."""
    return isinstance(base, str) or (isinstance(base, dict) and isinstance(base.get("name"), str))


def paper_decay(method: Method) -> float:
    """The paper's learning-rate decay per round for a method: what `lr_decay = 0` and `--preset paper` stand for.

    A class of the user's may have its own, `lr_decay = 0.99`.

    Example:
        >>> from fedspeed import FedAvg, FedInit
        >>> paper_decay(FedAvg()), paper_decay(FedSpeed()), paper_decay(FedInit(FedSpeed()))
        (0.998, 0.9995, 0.9995)
    """
    own: float | None = getattr(method, "lr_decay", None)
    if own is not None:
        return own
    inner = list(nested(method))[1:]
    asks = isinstance(method, Wrapper) or hasattr(type(method), "lr_decay")  # older files: return self.base.lr_decay
    if inner and asks:
        return paper_decay(inner[0])
    return 0.9995 if isinstance(method, SLOWER) else 0.998
