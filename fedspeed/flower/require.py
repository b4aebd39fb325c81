"""Whether flwr is there, in the range that was tested."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version

from ..errors import UserError

OLDEST, BEYOND = (1, 42), (1, 43)
RANGE = "flwr>=1.42,<1.43"


def require_flwr() -> str:
    """The version of flwr; raise unless it is one that this was tested with."""
    try:
        found = version("flwr")
    except PackageNotFoundError:
        raise UserError(f"flower: expected {RANGE}, found no flwr; pip install 'fedspeed[flower]'") from None
    numbers = tuple(int(n) for n in re.findall(r"\d+", found)[:2])
    if not OLDEST <= numbers < BEYOND:
        raise UserError(f"flower: expected {RANGE}, found flwr {found}; pip install '{RANGE}'")
    return found
