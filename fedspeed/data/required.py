"""What stands where a `Federated` is expected, and how to make one of it."""

from __future__ import annotations

from typing import Any

from ..errors import UserError
from .federated import Federated
from .samples import Samples


def federated(data: Any) -> Federated:
    """The data, if they are a `Federated`; anything else is an error that says how to make one.

    Example:
        >>> federated("digits")
        Traceback (most recent call last):
        ...
        fedspeed.errors.UserError: data: expected a Federated, found the name 'digits'; load it first:
        data = fedspeed.load_data('digits', split='dirichlet:0.6', clients=100)
    """
    if isinstance(data, Federated):
        return data
    found, fix = _told(data)
    raise UserError(f"data: expected a Federated, found {found}; {fix}")


def _told(data: Any) -> tuple[str, str]:
    kind = type(data).__name__
    if isinstance(data, str):
        return f"the name {data!r}", (
            f"load it first: data = fedspeed.load_data({data!r}, split='dirichlet:0.6', clients=100)"
        )
    if isinstance(data, type):
        return f"the class {data.__name__}", (
            "fedspeed.load_data or Federated.from_arrays(x, y, clients) make an instance (docs/guides/data.md)"
        )
    if isinstance(data, Samples):
        return (
            "Samples, which nobody owns yet",
            "share them out: fedspeed.data.federate(samples, split='iid', clients=10)",
        )
    if hasattr(data, "dataset"):  # a DataLoader
        return f"a {kind}", (
            "batches are drawn here: fedspeed.data.federate(fedspeed.data.from_torch(loader.dataset), split='iid', "
            "clients=10)"
        )
    pairs = not hasattr(data, "dtype") and hasattr(data, "__getitem__") and hasattr(data, "__len__")
    if pairs and not isinstance(data, tuple | list | dict):  # a torch Dataset
        fix = "share it out: fedspeed.data.federate(fedspeed.data.from_torch(dataset), split='iid', clients=10)"
        return f"a {kind}", fix
    return f"a {kind}", "make one with Federated.from_arrays(x, y, clients), see docs/guides/data.md for more ways"
