"""Running statistics (batch norm) beside what a method keeps and sends: no method knows of them.

In training a batch norm takes the statistics of the batch, so they change no weight; they are for evaluation. The
server's are the mean of those of the clients that were counted, with the weights of the round. `average` sends them
down and up; `local` leaves every client its own from turn to turn, and the server's mean of them, which nobody sends,
is there to evaluate and save the model with.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from .contract import Hooks

if TYPE_CHECKING:
    from .methods.base import Grad, Local, Method, Round
    from .vec import FlatModel


class Carried(NamedTuple):
    """A tree of a method's, and statistics."""

    base: Any
    statistics: torch.Tensor

    @property
    def x(self) -> torch.Tensor:
        """The method's model."""
        x: torch.Tensor = self.base.x
        return x


def of_method(tree: Any) -> Any:
    """What of a tree is the method's."""
    return tree.base if isinstance(tree, Carried) else tree


def whole(server: Any) -> torch.Tensor:
    """The server's model as `FlatModel.load` takes it: its vector, then its statistics if there are any."""
    x: torch.Tensor = server.x
    return torch.cat([x, server.statistics]) if isinstance(server, Carried) else x


class Carrying(Hooks):
    """The hooks of a method for a model with running statistics.

    Args:
        local: whether clients keep their own; else the server's are everybody's.
    """

    def __init__(self, method: Method, flat: FlatModel, local: bool) -> None:
        super().__init__(method, flat.d, flat.dtype)
        self.held = flat.statistics
        self.local = local

    def expect(self, up: Any) -> None:
        """Every upload is to have the fields of this one."""
        super().expect(up.base)

    def init_server(self, x0: torch.Tensor) -> Any:
        """The method's, and the model's first statistics."""
        return Carried(super().init_server(x0), self.held.first.to(x0, copy=True))

    def init_client(self, x0: torch.Tensor) -> Any:
        """The method's, and the model's first statistics if clients keep their own."""
        client = super().init_client(x0)
        return Carried(client, self.held.first.to(x0, copy=True)) if self.local else client

    def broadcast(self, server: Any) -> Any:
        """What the method sends, and the server's statistics unless clients have their own."""
        down = super().broadcast(server.base)
        return down if self.local else Carried(down, server.statistics)

    def start(self, down: Any, client: Any) -> torch.Tensor:
        """Where local work begins; the layers are given the statistics they begin with."""
        self.held.put((client if self.local else down).statistics)
        return super().start(of_method(down), of_method(client))

    def direction(self, x: torch.Tensor, grad: Grad, down: Any, client: Any) -> torch.Tensor:
        """The method's."""
        return super().direction(x, grad, of_method(down), of_method(client))

    def upload(self, xK: torch.Tensor, down: Any, client: Any, run: Local) -> tuple[Any, Any]:
        """What the method sends and keeps, and the layers' statistics."""
        up, kept = super().upload(xK, of_method(down), of_method(client), run)
        found = self.held.read()
        return Carried(up, found), Carried(kept, found.clone()) if self.local else kept

    def sent(self, up: Any) -> int:
        """Bytes of the method's part; of the statistics if they are sent."""
        own = 0 if self.local else up.statistics.numel() * up.statistics.element_size()
        return super().sent(up.base) + own

    def received(self, mean: Any, round: Round) -> Any:
        """The method's part as the server goes on with it, and the mean of the statistics."""
        return Carried(super().received(mean.base, round), mean.statistics)

    def settle(self, client: Any, mean: Any, round: Round) -> Any:
        """The method's part; a client's own statistics are as they were."""
        kept = super().settle(of_method(client), mean.base, round)
        return Carried(kept, client.statistics) if self.local else kept

    def update(self, server: Any, mean: Any, round: Round) -> Any:
        """The method's next state, and the mean of the statistics."""
        return Carried(super().update(server.base, mean.base, round), mean.statistics)

    def client_metrics(self, xK: torch.Tensor, down: Any, client: Any, run: Local) -> dict[str, float] | None:
        """The method's."""
        return super().client_metrics(xK, of_method(down), of_method(client), run)

    def metrics(self, server: Any, mean: Any, round: Round) -> dict[str, float]:
        """The method's."""
        return super().metrics(server.base, mean.base, round)
