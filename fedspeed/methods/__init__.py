"""Every method, one file each. `METHODS` maps the lower-case name to the class."""

from __future__ import annotations

from ..method import Method
from .fedavg import FedAvg as FedAvg
from .fedspeed import FedSpeed as FedSpeed

METHODS: dict[str, type[Method]] = {cls.__name__.lower(): cls for cls in (FedAvg, FedSpeed)}
