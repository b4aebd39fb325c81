"""The names of all methods. `METHODS` maps the lower-case name to the class; `build` takes a table from TOML.

A method of this package is imported here and stands in one of the tuples below, in `_METHODS` of
`fedspeed/__init__.py`, and, if its server adds a running mean to x, in `WEIGHTS` of `config/damping.py`. A method of
your own needs no change here: name it `path/to/file.py:Class`, or let your package declare an entry point in the group
`fedspeed.methods`.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from ..errors import UserError, one_line, unknown
from ..utils.own_code import Code
from ..utils.registry import file_of, foreign, load, read_code, require_part, run_code
from .adaptive import FedAdagrad as FedAdagrad
from .adaptive import FedAdam as FedAdam
from .adaptive import FedYogi as FedYogi
from .afedpd import AFedPD as AFedPD
from .afedpd import AFedPDSAM as AFedPDSAM
from .base import Method
from .compression import Quantise as Quantise
from .compression import TopK as TopK
from .fedacg import FedACG as FedACG
from .fedacg import FedNSAM as FedNSAM
from .fedadmm import FedADMM as FedADMM
from .fedadmm import FedPD as FedPD
from .fedavg import FedAvg as FedAvg
from .fedavg import FedNova as FedNova
from .fedavg import FedProx as FedProx
from .fedcm import FedCM as FedCM
from .fedcm import FedWMSAM as FedWMSAM
from .fedcm import MoFedSAM as MoFedSAM
from .feddyn import FedDyn as FedDyn
from .feddyn import FedGloSS as FedGloSS
from .feddyn import FedSMOO as FedSMOO
from .fedexp import FedExP as FedExP
from .fedgmt import FedGMT as FedGMT
from .fedinit import FedInit as FedInit
from .fedsam import FedLESAM as FedLESAM
from .fedsam import FedLESAMD as FedLESAMD
from .fedsam import FedLESAMS as FedLESAMS
from .fedsam import FedSAM as FedSAM
from .fedspeed import FedSpeed as FedSpeed
from .fedswa import FedMoSWA as FedMoSWA
from .fedswa import FedSWA as FedSWA
from .fedtoga import FedTOGA as FedTOGA
from .privacy import DP as DP
from .privacy import Clip as Clip
from .scaffold import FedGamma as FedGamma
from .scaffold import Scaffold as Scaffold
from .wrapper import Wrapper as Wrapper

_PAPER = (FedAvg, FedProx, FedAdam, Scaffold, FedCM, FedDyn, FedADMM, FedSpeed)
_FAMILY = (FedPD, FedYogi, FedAdagrad, FedNova, FedSAM, MoFedSAM, FedGamma, FedSMOO, FedLESAM)
_AFTER = (
    AFedPD,
    AFedPDSAM,
    FedGloSS,
    FedACG,
    FedNSAM,
    FedWMSAM,
    FedTOGA,
    FedLESAMD,
    FedLESAMS,
    FedSWA,
    FedMoSWA,
    FedGMT,
)

METHODS: dict[str, type[Method]] = {cls.__name__.lower(): cls for cls in (*_PAPER, *_FAMILY, *_AFTER)}
"""The methods of the paper's comparison first, then the family around them, then those published after FedSpeed."""

IN_PAPERS = {name: cls.__name__ for name, cls in METHODS.items()} | {
    "scaffold": "SCAFFOLD", "fedgamma": "FedGAMMA", "afedpd": "A-FedPD", "afedpdsam": "A-FedPDSAM",
    "fedlesamd": "FedLESAM-D", "fedlesams": "FedLESAM-S",
}  # fmt: skip
"""The names as the papers write them, for tables and figures."""

FAMILIES = ("averaging", "adaptive server", "control variates", "momentum", "primal-dual", "sharpness-aware")
"""The values of `Method.family`, in the order of lists."""

WRAPPERS: dict[str, type[Method]] = {cls.__name__.lower(): cls for cls in (FedInit, FedExP, Clip, DP, TopK, Quantise)}
"""Methods around a method: `fedspeed+topk:0.01+dp:noise=1`."""


def find_method(name: str, code: str = "", origin: str = "") -> type[Method]:
    """Return the class of a name in `METHODS` or `WRAPPERS`, of an entry point, or of `path/to/file.py:Class`.

    Names of this package may be written as the papers do: `FedAvg`, `SCAFFOLD`.

    Args:
        code: the digest the file must have, "" for any; a file that has another is not executed.
        origin: where the file was copied from, "" if it is not a copy.
    """
    known = METHODS | WRAPPERS
    if name.lower() in known:
        return known[name.lower()]
    if file_of(name):
        path, read, _ = read_code("method", name, code)
        return from_code(path, name.rpartition(":")[2], read, origin)
    require_part("method", name)
    others = foreign("fedspeed.methods")
    if name in others:
        return _checked(load("method", name, others[name]), name)
    raise unknown("method", name, [*known, *others])


def build(table: dict[str, Any]) -> Method:
    """Return a method from `{"name": ..., field: value}`; one from a file may also have `code` and `origin`, see
    `find_method`."""
    cls, fields = class_of(table)
    try:
        return cls.from_fields(fields)
    except UserError:
        raise
    except Exception as error:
        if "source" not in vars(cls):
            raise
        raise UserError(f"method {table['name']}: cannot be made with {fields} ({one_line(error)})") from error


def class_of(table: dict[str, Any]) -> tuple[type[Method], dict[str, Any]]:
    """Return the class that a table names, and the table's fields."""
    if not isinstance(table, dict) or not isinstance(table.get("name"), str):
        raise UserError(f"method: expected a name or a table with a name, found {table!r}")
    fields = dict(table)
    name = fields.pop("name")
    about = {key: fields.pop(key) for key in ("code", "origin") if key in fields and ".py:" in name}
    if not all(isinstance(value, str) for value in about.values()):
        raise UserError(f"method {name}: expected text as code and origin, found {about!r}")
    return find_method(name, **about), fields


def require_name(method: Method) -> None:
    """Raise for a method that a config could not name, so that its run could not be read back."""
    cls = type(method)
    if "source" not in vars(cls) and (METHODS | WRAPPERS).get(method.name) is not cls:
        raise UserError(
            f"method {cls.__name__}: a config names its method, and this class was not found by a name; use "
            f"simulate({cls.__name__}(...), ..., out=...), or build({{'name': 'path/to/file.py:{cls.__name__}'}})"
        )
    if isinstance(base := getattr(method, "base", None), Method):
        require_name(base)


def from_code(path: Path, name: str, code: Code, origin: str = "") -> type[Method]:
    """Return a class from the code of a file, which is executed, whatever the file contains by now."""
    cls = _checked(run_code(path, code, "method", name), f"{path}:{name}")
    if cls.source:
        cls.code, cls.origin = code.digest, origin or cls.__dict__.get("origin") or str(path)
    return cls


def _checked(cls: Any, name: str) -> type[Method]:
    if not (isinstance(cls, type) and issubclass(cls, Method)):
        raise UserError(f"method {name}: expected a subclass of fedspeed.Method, found {cls!r}")
    if any(isinstance(value, dataclasses.Field) for value in vars(cls).values()):
        raise UserError(f"method {name}: expected a dataclass; write @dataclass(frozen=True) above {cls.__name__}")
    if not cls.__module__.startswith("fedspeed."):  # one of ours that is only imported there has its name
        cls.source = name
    return cls
