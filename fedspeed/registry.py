"""Names that stand for classes: ours as "module:Class", imported when one is asked for; of others as entry points."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from .errors import UserError, one_line

BACKENDS = {
    "serial": "fedspeed.backends.serial:Serial",
    "process": "fedspeed.backends.process:Processes",
    "ray": "fedspeed.backends.cluster:Ray",
}
"""Name -> "module:Class"; imported when a run asks for it."""
BACKEND_GROUP = "fedspeed.backends"


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


def backend_names() -> Iterator[str]:
    """What `backend` may be; entry points, which take time to find, come last."""
    yield from ("auto", *BACKENDS)
    yield from (name for name in foreign(BACKEND_GROUP) if name not in BACKENDS)
