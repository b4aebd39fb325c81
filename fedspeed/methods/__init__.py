"""Every method, one file each. `METHODS` maps the lower-case name to the class; `build` takes a table from TOML.

A method of your own needs no change here: name it `path/to/file.py:Class`, or let your package declare an entry point
in the group `fedspeed.methods`.
"""

from __future__ import annotations

import importlib.util
import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from ..errors import UserError, unknown
from ..method import Method
from .fedadagrad import FedAdagrad as FedAdagrad
from .fedadam import FedAdam as FedAdam
from .fedadmm import FedADMM as FedADMM
from .fedavg import FedAvg as FedAvg
from .fedcm import FedCM as FedCM
from .feddyn import FedDyn as FedDyn
from .fedgamma import FedGamma as FedGamma
from .fedlesam import FedLESAM as FedLESAM
from .fednova import FedNova as FedNova
from .fedpd import FedPD as FedPD
from .fedprox import FedProx as FedProx
from .fedsam import FedSAM as FedSAM
from .fedsmoo import FedSMOO as FedSMOO
from .fedspeed import FedSpeed as FedSpeed
from .fedyogi import FedYogi as FedYogi
from .mofedsam import MoFedSAM as MoFedSAM
from .scaffold import Scaffold as Scaffold
from .wrappers import FedInit as FedInit

_PAPER = (FedAvg, FedProx, FedAdam, Scaffold, FedCM, FedDyn, FedADMM, FedSpeed)
_FAMILY = (FedPD, FedYogi, FedAdagrad, FedNova, FedSAM, MoFedSAM, FedGamma, FedSMOO, FedLESAM)

METHODS: dict[str, type[Method]] = {cls.__name__.lower(): cls for cls in (*_PAPER, *_FAMILY)}
"""The methods of the paper's comparison first, then the family around them."""

WRAPPERS: dict[str, type[Method]] = {"fedinit": FedInit}
"""Methods around a method."""


def find(name: str) -> type[Method]:
    """The class of a name in `METHODS` or `WRAPPERS`, of an entry point, or of `path/to/file.py:Class`."""
    known = METHODS | WRAPPERS
    if name in known:
        return known[name]
    path, colon, cls = name.rpartition(":")
    if colon and path.endswith(".py"):
        return _from_file(Path(path), cls)
    foreign = {entry.name: entry for entry in entry_points(group="fedspeed.methods")}
    if name in foreign:
        return _checked(foreign[name].load(), name)
    raise unknown("method", name, [*known, *foreign])


def build(table: dict[str, Any]) -> Method:
    """A method from `{"name": ..., field: value}`."""
    if not isinstance(table, dict) or not isinstance(table.get("name"), str):
        raise UserError(f"method: expected a name or a table with a name, got {table!r}")
    fields = dict(table)
    return find(fields.pop("name")).from_fields(fields)


def _from_file(path: Path, name: str) -> type[Method]:
    """Import a class from a Python file the user named; modules beside it are found, after all others."""
    module_name = f"fedspeed_user_{path.stem}"
    if not path.is_file():
        raise UserError(f"method {path}:{name}: there is no file {path}; expected path/to/file.py:Class")
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    beside = str(path.parent.resolve())
    if beside not in sys.path:
        sys.path.append(beside)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise UserError(f"method {path}:{name}: {path} cannot be imported: {type(error).__name__}: {error}") from error
    if not hasattr(module, name):
        classes = [key for key, value in vars(module).items() if isinstance(value, type) and issubclass(value, Method)]
        raise unknown(f"class in {path}", name, classes)
    return _checked(getattr(module, name), f"{path}:{name}")


def _checked(cls: Any, name: str) -> type[Method]:
    if not (isinstance(cls, type) and issubclass(cls, Method)):
        raise UserError(f"method {name}: expected a subclass of fedspeed.Method, found {cls!r}")
    cls.source = name
    return cls
