"""Any method of ours on real devices, over Flower: `server_app` and `client_app`, the two parts of a Flower app.

The server runs the round loop of `simulate` with a back end whose clients are SuperNodes (`grid.py`); a device runs the
same local loop on its own data and keeps its state in files (`kept.py`). Nothing here imports flwr before it is needed.
`fedspeed deploy flower DIR` writes an app to begin with; docs/guides/flower.md goes through one step by step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..runs.simulate import as_method, as_plan, require_loss
from .agreement import Agreement
from .require import require_flwr

if TYPE_CHECKING:
    from ..config.plan import Plan
    from ..data.federated import Federated
    from ..methods.base import Method

__all__ = ["client_app", "server_app"]


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
    """The ServerApp: waits for the devices, then runs the rounds into a run directory, or continues those in it.

    Args:
        method, model, plan, loss, no_decay, settings: as `simulate` takes them, and the same as in `client_app`.
        clients: N, how many devices there are; their indices are 0 .. N - 1.
        test: gives data whose test set the server scores with; without it nothing is scored.
        out: the run directory; one that holds this very run is continued.
        timeout: seconds that a round waits for a device before it goes on without it.
        wait: seconds that the first round waits for all devices to have said how many samples they have.
        poll: seconds between two looks for replies.
        bind_keys: an index belongs to the key of the SuperNode that first had it. Without SuperNode authentication a
            SuperNode has a new key at every start, so set this to False there.

    Keys of the run config that are fields of `Plan` replace settings (`flwr run . --run-config 'rounds=50'`), `out` the
    directory.
    """
    from .server import ServerSide, make_server_app

    require_flwr()
    side = ServerSide(clients, test, Path(out), timeout, wait, poll, bind_keys)
    return make_server_app(_terms(method, model, plan, loss, no_decay, settings), side)


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
    """The ClientApp: one client's turn on its own data, whenever the server asks for it.

    Args:
        method, model, plan, loss, no_decay, settings: as in `server_app`.
        data: `data(client, node_config)` gives the data of this client: a `Federated` of one client, or of all of them,
            of which it takes its own part. Give `classes=` where a device may lack some.

    The SuperNode's `--node-config` says which client it is, `fedspeed-client=17`, and may say where its state is kept,
    `fedspeed-states="/var/lib/fedspeed"`; by default that is `~/.fedspeed/flower`.
    """
    from .device import make_client_app

    require_flwr()
    return make_client_app(_terms(method, model, plan, loss, no_decay, settings), data)


def _terms(
    method: Any, model: Any, plan: Any, loss: Any, no_decay: Sequence[str], settings: dict[str, Any]
) -> Agreement:
    require_loss(loss)
    return Agreement(as_method(method), model, as_plan(plan, settings), loss, tuple(no_decay))
