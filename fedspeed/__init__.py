"""Federated optimisation in PyTorch: FedSpeed, its baselines and its successors.

The public names are resolved when first used, so that `import fedspeed` does not import torch.
"""

import os
import sys

if getattr(sys, "argv", [])[:1] == ["-m"] and not sys.flags.safe_path and sys.path[0] != os.path.dirname(__path__[0]):
    del sys.path[0]  # `python -m fedspeed` puts the current folder here, perhaps an untrusted run directory

import importlib
from typing import Any

__version__ = "0.1.0"

_METHODS = [
    "FedAvg", "FedProx", "FedAdam", "Scaffold", "FedCM", "FedDyn", "FedADMM", "FedSpeed", "FedPD", "FedYogi",
    "FedAdagrad", "FedNova", "FedSAM", "MoFedSAM", "FedGamma", "FedSMOO", "FedLESAM", "FedInit",
    "Clip", "DP", "TopK", "Quantise",
    "AFedPD", "AFedPDSAM", "FedGloSS", "FedACG", "FedNSAM", "FedWMSAM", "FedTOGA",
    "FedLESAMD", "FedLESAMS", "FedSWA", "FedMoSWA", "FedGMT", "FedExP",
]  # fmt: skip
_PUBLIC = {
    "METHODS": "methods",
    **dict.fromkeys(_METHODS, "methods"),
    "Method": "methods.base",
    "Wrapper": "methods",
    "Local": "methods.base",
    "Round": "methods.base",
    "param": "utils.params",
    "rng": "utils.random",
    "Plan": "config.plan",
    "Config": "config.config",
    "run_config": "runs.launch",
    "fork": "runs.fork",
    "extend": "runs.launch",
    "replay": "runs.replay",
    "simulate": "runs.simulate",
    "audit": "experiments.audit",
    "Simulation": "server.simulation",
    "Record": "record",
    "Observer": "server.observers",
    "RunDir": "runs.directory",
    "load_runs": "report.export",
    "sweep": "experiments.sweep",
    "tune": "experiments.tune",
    "Federated": "data",
    "load_data": "data:load",
    "MODELS": "models",
    "build_model": "models",
    "FlatModel": "client.flat_model",
    "UserError": "errors",
    "Diverged": "errors",
}

_MODULES = {"data": "data", "methods": "methods", "terms": "methods.terms", "theory": "theory"}

__all__ = sorted(_PUBLIC)


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f".{_MODULES[name]}", __name__)
    if name not in _PUBLIC:
        raise AttributeError(f"module 'fedspeed' has no attribute {name!r}; it has {', '.join(__dir__())}")
    module, _, inner = _PUBLIC[name].partition(":")
    return getattr(importlib.import_module(f".{module}", __name__), inner or name)


def __dir__() -> list[str]:
    return sorted([*__all__, *_MODULES])
