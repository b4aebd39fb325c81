"""Every method: the contract in `base.py`, one file per method or family, and all names in `catalogue.py`.

The names are resolved when first used, so that importing the contract does not import every method.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .catalogue import *  # noqa: F403


def __getattr__(name: str) -> Any:
    return getattr(import_module(".catalogue", __name__), name)
