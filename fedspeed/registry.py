"""Names that stand for classes: ours as "module:Class", imported when one is asked for; of others as entry points."""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from typing import Any

from .errors import UserError, one_line


def foreign(group: str) -> dict[str, str]:
    """What installed packages offer in a group of entry points: name -> "module:Class"."""
    return {entry.name: entry.value for entry in entry_points(group=group)}


def load(kind: str, name: str, place: str, fix: str = "install it, or leave it out") -> Any:
    """What "module:Class" names; one that cannot be imported is an error in one line.

    Example:
        >>> load("back end", "ray", "no_such_module:Ray")
        Traceback (most recent call last):
        fedspeed.errors.UserError: back end ray: no_such_module:Ray cannot be loaded (ModuleNotFoundError: No module
        named 'no_such_module'); install it, or leave it out
    """
    try:
        return EntryPoint(name, place, "").load()
    except (Exception, SystemExit) as error:
        raise UserError(f"{kind} {name}: {place} cannot be loaded ({one_line(error)}); {fix}") from error
