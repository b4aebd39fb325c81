"""The convergence theorem as a calculator: conditions, bounds, experiments. Uses NumPy only; only `cli` imports it.

The theorem has four named forms (`FORMS`): printed, consistent, corrected, and another route that keeps the O(1/T).
`docs/explanation/theory.md` says what is proved. Names are imported on first use, so that `import fedspeed.theory` does
not import NumPy.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_WHERE = {
    "setting": ("FORMS", "Fact", "P", "RunSetting", "Setting", "gamma", "gamma_k", "read_run"),
    "forms": ("ERRATA", "Condition", "Erratum", "Form", "form_at", "kappa"),
    "bounds": ("Bound", "Start", "bound", "largest_L", "phi", "schedule", "suggest"),
    ".data.problems": ("random_logistic", "random_quadratic"),  # fedspeed.data.problems
    "runs": ("Trace", "auxiliary", "run"),
    "experiment": ("Fit", "Rate", "power_law", "rate", "start_at"),
}
_PLACES = {name: module for module, names in _WHERE.items() for name in names}

__all__ = sorted(_PLACES)


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(f".{_PLACES[name]}", __name__), name)


def __dir__() -> list[str]:
    return __all__
