"""The convergence analysis as a tool: conditions, bounds, lemmas, problems with known constants. NumPy only.

The theorem comes in four named forms (`FORMS`): as printed, made consistent, corrected, and by another route that
keeps the O(1/T). `docs/theory.md` says what is proved. Names are resolved when first used, so that importing this
does not import NumPy.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_WHERE = {
    "setting": ("FORMS", "P", "Setting", "gamma", "gamma_k"),
    "routes": ("Condition", "Route", "kappa", "route"),
    "bounds": ("Bound", "Start", "bound", "largest_L", "phi", "schedule", "suggest"),
    "errata": ("ERRATA", "Erratum"),
    "rates": ("RATES", "PublishedRate"),
    "problems": ("Problem", "dissimilarity"),
    "quadratic": ("Quadratic", "random_quadratic"),
    "logistic": ("Logistic", "random_logistic"),
    "sequences": ("Sequences", "auxiliary", "exact_sequences", "fixed_point"),
    "engine": ("Trace", "run"),
    "lemmas": ("Inequality", "Moments", "moments"),
    "experiment": ("Fit", "Rate", "power_law", "rate", "start_at"),
    "perturbation": ("Perturbation", "quasi_gradient_orders"),
    "counterexample": ("Counterexample", "break_printed_bound"),
    "of_run": ("Fact", "RunSetting", "read_run"),
}
_PLACES = {name: module for module, names in _WHERE.items() for name in names}

__all__ = sorted(_PLACES)


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(f".{_PLACES[name]}", __name__), name)


def __dir__() -> list[str]:
    return __all__
