"""Methods on real devices, over Flower: `server_app` and `client_app`, the two parts of a Flower app.

The server runs the round loop of `simulate` with a back end whose clients are SuperNodes (`backend.py`); a device runs
the same local loop on its own data and keeps its state in files (`states.py`). flwr is imported only when
it is needed. `fedspeed deploy flower DIR` writes an app to start from; docs/guides/flower.md explains it step by step.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import UserError
from ..runs.simulate import as_loss, as_method, as_plan
from .agreement import Agreement

if TYPE_CHECKING:
    from ..config.plan import Plan
    from ..data.federated import Federated
    from ..methods.base import Method

__all__ = ["client_app", "server_app"]
OLDEST, BEYOND = (1, 42), (1, 43)
RANGE = "flwr>=1.42,<1.43"
"""The versions of flwr that are tested, for comparisons and for messages."""


def server_app(
    method: Method | type[Method] | str,
    model: Any,
    plan: Plan | None = None,
    *,
    clients: int,
    test: Callable[[], Federated | None] | None = None,
    out: Path | str = "runs/flower",
    loss: Any = None,
    no_decay: Sequence[str] = (),
    timeout: float = 600.0,
    wait: float = 600.0,
    poll: float = 1.0,
    bind_keys: bool = True,
    **settings: Any,
) -> Any:
    """Return the ServerApp: it waits for the devices, then runs the rounds into a run directory, or continues that run.

    Args:
        method, model, plan, loss, no_decay, settings: as `simulate` takes them, and the same as in `client_app`.
        clients: N, how many devices there are; their indices are 0 .. N - 1.
        test: returns data whose test set the server evaluates; without it no model is evaluated.
        out: the run directory; if it holds this same run, the run is continued.
        timeout: seconds that a round waits for a device before it continues without it.
        wait: seconds to wait, before the first round, until all devices have reported how many samples they have.
        poll: seconds between two requests for replies.
        bind_keys: whether an index belongs to the key of the SuperNode that first had it. Without SuperNode
            authentication a SuperNode has a new key at every start, so set this to False there.

    Keys of the run config that are fields of `Plan` replace settings (`flwr run . --run-config 'rounds=50'`); its `out`
    replaces the directory.
    """
    from .server import ServerSide, make_server_app

    require_flwr()
    side = ServerSide(clients, test, Path(out), timeout, wait, poll, bind_keys)
    return make_server_app(_agreement(method, model, plan, loss, no_decay, settings), side)


def client_app(
    method: Method | type[Method] | str,
    model: Any,
    data: Callable[[int, Mapping[str, Any]], Federated],
    plan: Plan | None = None,
    *,
    loss: Any = None,
    no_decay: Sequence[str] = (),
    **settings: Any,
) -> Any:
    """Return the ClientApp: it runs one client's turn on its own data whenever the server asks for it.

    Args:
        method, model, plan, loss, no_decay, settings: as in `server_app`.
        data: `data(client, node_config)` returns the data of this client: a `Federated` of one client, or of all
            clients, of which the device takes its own part. Pass `classes=` where a device may lack some classes.

    The SuperNode's `--node-config` holds the index of its client, `fedspeed-client=17`, and optionally the folder of
    its state, `fedspeed-states="/var/lib/fedspeed"`; by default that is `~/.fedspeed/flower`.
    """
    from .device import make_client_app

    require_flwr()
    return make_client_app(_agreement(method, model, plan, loss, no_decay, settings), data)


def require_flwr() -> str:
    """Return the version of flwr; raise unless it is one of those that are tested."""
    try:
        found = version("flwr")
    except PackageNotFoundError:
        raise UserError(f"flower: expected {RANGE}, found no flwr; pip install 'fedspeed[flower]'") from None
    numbers = tuple(int(n) for n in re.findall(r"\d+", found)[:2])
    if not OLDEST <= numbers < BEYOND:
        raise UserError(f"flower: expected {RANGE}, found flwr {found}; pip install '{RANGE}'")
    return found


def _agreement(
    method: Any, model: Any, plan: Any, loss: Any, no_decay: Sequence[str], settings: dict[str, Any]
) -> Agreement:
    return Agreement(as_method(method), model, as_plan(plan, settings), as_loss(loss), tuple(no_decay))
