"""Methods around a method."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from ..errors import UserError
from ..method import Grad, Local, Method, Round
from ..params import param
from .fedavg import FedAvg
from .fedcm import FedCM
from .fedgamma import FedGamma
from .fednova import FedNova
from .mofedsam import MoFedSAM
from .scaffold import Scaffold

if TYPE_CHECKING:
    from torch import Tensor as Vec

GRADIENT_FROM_D = (Scaffold, FedGamma, FedCM, MoFedSAM, FedNova)
"""Methods that read D / (K eta_l) as a mean gradient: D must be measured from where the steps began."""


class Client(NamedTuple):
    last: Vec  # the client's last local model, x^0 at first
    base: Any  # what the base method keeps


@dataclass(frozen=True)
class FedInit(Method):
    """Relaxed initialisation around any method: local work begins away from the client's own last model.

        1  server sends what `base` sends
        2  client i begins at s_i = x^t + beta (x^t - x_i), x_i its last local model (x^0 at first)
        3  centre="start":   `base` sees s_i as the model it received: D_i = x_iK - s_i, prox centre s_i (as released)
           centre="global":  `base` sees x^t; only the first point differs, so FedAvg's server takes the mean model
                             (as in the paper)
        4  client i keeps x_i = x_iK; the server does what `base` does

    `centre="global"` is refused for SCAFFOLD, FedGamma, FedCM, MoFedSAM and FedNova: they read D_i / (K eta_l) as a
    mean gradient, and D_i measured from x^t would count the relaxation beta (x^t - x_i) as one.
    Recovers: beta = 0: the base method.

    Args:
        base: the method inside; in TOML a table `[method.base]`, on the command line `--set method.base=fedspeed`.
        beta: relaxation coefficient.
        centre: `start` or `global`, see above.

    Example:
        >>> FedInit(FedAvg(), beta=0.05).to_dict()["base"]
        {'name': 'fedavg', 'eta_g': 1.0}

    Reference: Sun et al., Understanding How Consistency Works in Federated Learning via Stage-wise Relaxed
    Initialization, NeurIPS 2023.
    """

    base: Method = field(default_factory=FedAvg)
    beta: float = param(0.1, "[0, inf)", "beta, the relaxation coefficient")
    centre: str = param("start", ("start", "global"), "what the base method sees as its centre")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.centre == "global" and isinstance(self.base, GRADIENT_FROM_D):
            name = type(self.base).__name__
            raise UserError(
                f"FedInit: centre must be start around {name}, got global: {name} reads D / (K eta_l) as a mean "
                f"gradient, and D measured from x^t would count the relaxation as one"
            )

    @property
    def mix(self) -> float:
        return self.base.mix

    @property
    def shrink(self) -> float:
        return self.base.shrink

    @property
    def lr_decay(self) -> float:
        return self.base.lr_decay

    def check(self, lr: float, active: int, clients: int) -> None:
        self.base.check(lr, active, clients)

    def init_server(self, x0: Vec) -> Any:
        return self.base.init_server(x0)

    def init_client(self, x0: Vec) -> Client:
        return Client(x0, self.base.init_client(x0))

    def broadcast(self, server: Any) -> Any:
        return self.base.broadcast(server)

    def relaxed(self, down: Any, client: Client) -> Vec:
        """s_i of line 2."""
        s: Vec = down.x + self.beta * (down.x - client.last)
        return s

    def seen(self, down: Any, client: Client) -> Any:
        """What the base method receives, line 3."""
        return down._replace(x=self.relaxed(down, client)) if self.centre == "start" else down

    def start(self, down: Any, client: Client) -> Vec:
        if self.centre == "global":
            return self.relaxed(down, client)
        return self.base.start(self.seen(down, client), client.base)

    def direction(self, x: Vec, grad: Grad, down: Any, client: Client) -> Vec:
        return self.base.direction(x, grad, self.seen(down, client), client.base)

    def upload(self, xK: Vec, down: Any, client: Client, run: Local) -> tuple[Any, Client]:
        up, kept = self.base.upload(xK, self.seen(down, client), client.base, run)
        return up, Client(xK, kept)  # line 4

    def update(self, server: Any, mean: Any, round: Round) -> Any:
        return self.base.update(server, mean, round)

    def client_metrics(self, xK: Vec, down: Any, client: Client, run: Local) -> Mapping[str, float]:
        return self.base.client_metrics(xK, self.seen(down, client), client.base, run)

    def metrics(self, server: Any, mean: Any, round: Round) -> Mapping[str, float]:
        return self.base.metrics(server, mean, round)

    def to_dict(self) -> dict[str, Any]:
        return {**super().to_dict(), "base": self.base.to_dict()}

    @classmethod
    def from_fields(cls, fields: dict[str, Any]) -> Self:
        from . import build

        base = fields.get("base", "fedavg")
        table = {"name": base} if isinstance(base, str) else base
        return super().from_fields({**fields, "base": base if isinstance(base, Method) else build(table)})
