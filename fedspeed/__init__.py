"""Federated optimisation in PyTorch: FedSpeed, its baselines and its successors.

The public names are resolved when first used, so that `import fedspeed` does not import torch.
"""

import os
import sys

if getattr(sys, "argv", [])[:1] == ["-m"] and not sys.flags.safe_path and sys.path[0] != os.path.dirname(__path__[0]):
    del sys.path[0]  # `python -m fedspeed` puts the current folder here, perhaps an untrusted run directory

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # for editors and type checkers, which do not run `__getattr__`
    from .client.flat_model import FlatModel as FlatModel
    from .config.config import Config as Config
    from .config.plan import Plan as Plan
    from .data import load as _load
    from .data.federated import Federated as Federated
    from .errors import Diverged as Diverged
    from .errors import UserError as UserError
    from .experiments.audit import audit as audit
    from .experiments.compare import compare as compare
    from .experiments.sweep import sweep as sweep
    from .experiments.tune import tune as tune
    from .methods.base import Local as Local
    from .methods.base import Method as Method
    from .methods.base import Round as Round
    from .methods.catalogue import *  # noqa: F403
    from .models import MODELS as MODELS
    from .models import build_model as build_model
    from .record import Record as Record
    from .report.diff import differences as _differences
    from .report.export import load_runs as load_runs
    from .report.write import report as report
    from .runs.directory import RunDir as RunDir
    from .runs.fork import fork as fork
    from .runs.launch import extend as extend
    from .runs.launch import resume as resume
    from .runs.launch import run_config as run_config
    from .runs.replay import replay as replay
    from .runs.simulate import simulate as simulate
    from .runs.verify import verify as verify
    from .server.observers import Observer as Observer
    from .server.simulation import Simulation as Simulation
    from .utils.checked_fields import param as param
    from .utils.random import rng as rng

    load_data, diff = _load, _differences

__version__ = "0.1.0"

_METHODS = [
    "FedAvg", "FedProx", "FedAdam", "Scaffold", "FedCM", "FedDyn", "FedADMM", "FedSpeed", "FedPD", "FedYogi",
    "FedAdagrad", "FedNova", "FedSAM", "MoFedSAM", "FedGamma", "FedSMOO", "FedLESAM", "FedInit",
    "Clip", "DP", "TopK", "Quantise",
    "AFedPD", "AFedPDSAM", "FedGloSS", "FedACG", "FedNSAM", "FedWMSAM", "FedTOGA",
    "FedLESAMD", "FedLESAMS", "FedSWA", "FedMoSWA", "FedGMT", "FedExP",
]  # fmt: skip
_PUBLIC = {
    **dict.fromkeys(["METHODS", "Wrapper", *_METHODS], "methods"),
    **dict.fromkeys(["Method", "Local", "Round"], "methods.base"),
    **dict.fromkeys(["MODELS", "build_model"], "models"),
    **dict.fromkeys(["run_config", "extend", "resume"], "runs.launch"),
    **dict.fromkeys(["UserError", "Diverged"], "errors"),
    "param": "utils.checked_fields",
    "rng": "utils.random",
    "Plan": "config.plan",
    "Config": "config.config",
    "fork": "runs.fork",
    "verify": "runs.verify",
    "diff": "report.diff:differences",
    "replay": "runs.replay",
    "simulate": "runs.simulate",
    "audit": "experiments.audit",
    "Simulation": "server.simulation",
    "Record": "record",
    "Observer": "server.observers",
    "RunDir": "runs.directory",
    "load_runs": "report.export",
    "compare": "experiments.compare",
    "sweep": "experiments.sweep",
    "tune": "experiments.tune",
    "Federated": "data",
    "load_data": "data:load",
    "FlatModel": "client.flat_model",
}
# `report` can be called, as the command can
_MODULES = {"data": "data", "methods": "methods", "report": "report", "terms": "methods.terms", "theory": "theory"}

__all__ = sorted([*_PUBLIC, "report"])


def __getattr__(name: str) -> Any:
    if name not in _MODULES and name not in _PUBLIC:
        raise AttributeError(f"module 'fedspeed' has no attribute {name!r}; it has {', '.join(__dir__())}")
    collector = importlib.import_module(".utils.collector", __name__)
    with collector.paused():  # most of them import torch
        if name in _MODULES:
            return importlib.import_module(f".{_MODULES[name]}", __name__)
        module, _, inner = _PUBLIC[name].partition(":")
        return getattr(importlib.import_module(f".{module}", __name__), inner or name)


def __dir__() -> list[str]:
    return sorted({*__all__, *_MODULES})
